"""The worker's end of the channel to the server.

There is no thread that reads: the main thread waits for work in `receive`, and whoever needs news while the model runs
(has the request been cancelled? has the client taken an answer? what did the server answer to my call?) reads for
itself. One reads at a time; the others wait for what the reader dispatches. So a batch costs no hand-over between
threads, and a model's own threads are served while the main thread executes, waits or blocks.

An event loop may do the main thread's part of it (`read_on_loop`), and any other loop that waits for an answer reads
for as long as it does (`reading_on`).
"""

import asyncio
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from halimede.core.spin import SPIN_NS
from halimede.core.types import Buffer, ErrorCode, InferenceError
from halimede.workers.frames.control import decode_blocks, error_from_json
from halimede.workers.frames.kinds import (
    BORROWED,
    CALL,
    CALL_ANSWER,
    CREDIT,
    EXECUTE,
    FORGET,
    HEADER,
    KEY,
    MAPPED,
    MAX_CALLS,
    MAX_CONTROL_BYTES,
    RESULT,
    SEGMENT,
    Kind,
    encode_frame,
)

_RECEIVE_BYTES = 256 << 10
_DESCRIPTORS_BYTES = socket.CMSG_SPACE(4 * 8)

_MAX_EARLY = 1024

_KINDS = {kind.value: kind for kind in Kind}
_EXECUTE = Kind.EXECUTE

WINDOW_RESPONSES = 32
WINDOW_BYTES = 8 << 20
"""Answers of one request that its client has not taken yet, before whoever sends more has to wait. One goes always."""


class OpenRequest:
    """What the channel knows of a request that is not answered finally. `begun_ns` is when its execution began."""

    __slots__ = ("begun_ns", "cancelled", "unacknowledged", "unacknowledged_bytes")

    def __init__(self, begun_ns: int) -> None:
        self.begun_ns = begun_ns
        self.cancelled = False
        self.unacknowledged: deque[int] | None = None
        self.unacknowledged_bytes = 0

    def is_full(self) -> bool:
        if not self.unacknowledged:
            return False
        return len(self.unacknowledged) >= WINDOW_RESPONSES or self.unacknowledged_bytes >= WINDOW_BYTES


class ServerGoneError(Exception):
    """The channel's other end is closed: there is nobody left to work for."""


class Channel:
    """Frames both ways, and what they mean for requests, calls and memory. Thread-safe."""

    def __init__(
        self,
        descriptor: int,
        on_segment: Callable[[int, int, int], bool],
        on_release: Callable[[list[tuple[int, int]]], None],
        on_forget: Callable[[int], None],
    ) -> None:
        """`on_segment`: number, what it is for, its descriptor; returns whether a borrowed one can be looked at."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._on_segment = on_segment
        self._on_release = on_release
        self._on_forget = on_forget
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._views = (self._view,)
        self._start = 0
        self._end = 0
        self._descriptors: deque[int] = deque()
        self._inbox: deque[tuple[Kind, memoryview]] = deque()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._news = threading.Condition()
        self._waiting = 0
        self._results: dict[int, tuple[bool, Any]] = {}
        self._calls = 0
        self._calling: set[int] = set()
        """Numbers of the calls that the server has not answered."""
        self._later: deque[bytes] = deque()
        """What finalizers have to say."""
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}
        """How many wait on each loop beside the one that works; changed on the loop's own thread alone."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_work: Callable[[], None] = _nothing
        self._process = os.getpid()
        self.on_call_answer: Callable[[memoryview], None] = _drop
        """Gets the body of each CALL_ANSWER, from whoever reads."""
        self.on_gone: Callable[[], None] = _nothing
        """The server is gone, and a loop has noticed."""
        self.spins = False
        """Whether `receive` spins for the next frame before it blocks."""
        self.open: dict[int, OpenRequest] = {}
        """Requests that are not answered finally, by key. Added by whoever decodes them."""
        self.cancelled_early: dict[int, None] = {}
        """Keys that were cancelled while no request of theirs was open: for whoever has added some to look at."""

    def disconnect(self) -> None:
        """For the child of a fork: the channel is its parent's alone."""
        self._socket.close()

    def receive(self) -> tuple[Kind, memoryview]:
        """The next EXECUTE, ASK_READY or STOP, or START. ServerGoneError."""
        inbox = self._inbox
        while not inbox:
            if self._reading.acquire(blocking=False):
                try:
                    if not inbox:
                        if self.spins:
                            self._spin()
                        if not inbox:
                            self._read(0)
                finally:
                    self._reading.release()
                if self._waiting:
                    self._tell()
            else:
                self.wait_for(lambda: bool(inbox))
        return inbox.popleft()

    def _spin(self) -> None:
        """Look for work for SPIN_NS, letting others have the processor. Held by `_reading`."""
        until = time.monotonic_ns() + SPIN_NS
        while not self._inbox and time.monotonic_ns() < until:
            os.sched_yield()
            self._read(socket.MSG_DONTWAIT)

    def received(self) -> tuple[Kind, memoryview] | None:
        """What `receive` would return without waiting."""
        return self._inbox.popleft() if self._inbox else None

    def read_on_loop(self, loop: asyncio.AbstractEventLoop, on_work: Callable[[], None]) -> None:
        """From now on the running loop reads. `on_work` is called on it when there is something to `received`."""
        self._loop = loop
        self._on_work = on_work
        loop.add_reader(self._socket.fileno(), self._read_on_loop)

    def is_cancelled(self, key: int) -> bool:
        """Whether the request is cancelled, or over."""
        request = self.open.get(key)
        if request is None:
            return True
        if not request.cancelled:
            self.look()
        return request.cancelled

    def look(self) -> None:
        """Read what has come, without waiting."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._read(socket.MSG_DONTWAIT)
        finally:
            self._reading.release()
        self._tell()

    def wait_for_room(self, key: int) -> bool:
        """Wait until another answer of this request may be sent; False once it is cancelled."""
        request = self.open.get(key)
        if request is None:
            return False
        if request.is_full() and not request.cancelled:
            self.wait_for(lambda: request.cancelled or not request.is_full())
        return not request.cancelled

    def count(self, key: int, size_bytes: int) -> None:
        """An answer of so many bytes is sent that its client has to take."""
        request = self.open.get(key)
        if request is not None:
            with self._news:
                if request.unacknowledged is None:
                    request.unacknowledged = deque()
                request.unacknowledged.append(size_bytes)
                request.unacknowledged_bytes += size_bytes

    def call(self, method: str, arguments: Any) -> Any:
        """Ask the server and wait for its answer; and before that while it has as many calls of ours as it takes.
        InferenceError."""
        asked = json.dumps([method, arguments]).encode()
        size = CALL.size + len(asked)
        if size > MAX_CONTROL_BYTES:
            text = f"{method}: its arguments take {size} bytes, at most {MAX_CONTROL_BYTES} are taken"
            raise InferenceError(ErrorCode.INVALID_ARG, text)
        calling = self._calling
        while (number := self._begin_call()) is None:
            self.wait_for(lambda: len(calling) < MAX_CALLS)
        self.send(encode_frame(Kind.CALL, CALL.pack(number) + asked))
        self.wait_for(lambda: number in self._results)
        went_well, value = self._results.pop(number)
        if not went_well:
            raise error_from_json(value)
        return value

    def _begin_call(self) -> int | None:
        with self._news:
            if len(self._calling) >= MAX_CALLS:
                return None
            self._calls = number = (self._calls + 1) & 0xFFFFFFFF
            self._calling.add(number)
            return number

    def send(self, message: "Buffer | list[Buffer]") -> None:
        """Write a frame, or several of them one after the other. ServerGoneError."""
        try:
            with self._writing:
                if isinstance(message, list):
                    for each in message:
                        self._socket.sendall(each)
                else:
                    self._socket.sendall(message)
        except OSError as error:
            raise ServerGoneError from error
        if self._later:
            self._send_later()

    def send_later(self, frame: bytes) -> None:
        """Write a small frame, at once or as soon as whoever writes has done so. For finalizers: takes no lock that
        this thread may hold, fails silently."""
        self._later.append(frame)
        self._send_later()

    def _send_later(self) -> None:
        later = self._later
        # Whoever writes looks here after it has let go.
        while later and os.getpid() == self._process and self._writing.acquire(blocking=False):
            try:
                while later:
                    self._socket.sendall(later.popleft())
            except OSError:
                later.clear()
            finally:
                self._writing.release()

    def wait_for(self, has_come: Callable[[], bool]) -> None:
        """Read until `has_come`, or wait for whoever reads.

        What it asks about must be settled by what is dispatched, on the reader's thread. ServerGoneError.
        """
        while not has_come():
            if self._reading.acquire(blocking=False):
                try:
                    # What it waits for may have come between the look and the lock.
                    if not has_come():
                        self._read(0)
                finally:
                    self._reading.release()
                if self._waiting or self._loop is not None:
                    self._tell()
            else:
                self._wait_for_news(lambda: has_come() or not self._reading.locked())

    @contextmanager
    def reading_on(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Somebody waits on the running loop for what is dispatched: it reads meanwhile."""
        if loop is self._loop:
            yield
            return
        loops = self._loops
        waiting = loops[loop] = loops.get(loop, 0) + 1
        try:
            if waiting == 1:
                loop.add_reader(self._socket.fileno(), self._read_beside, loop)
            yield
        finally:
            loops[loop] -= 1
            if not loops[loop]:
                del loops[loop]
                loop.remove_reader(self._socket.fileno())

    def _read_beside(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._read(socket.MSG_DONTWAIT)
        except ServerGoneError:
            loop.remove_reader(self._socket.fileno())
            self.on_gone()
        finally:
            self._reading.release()
        self._tell()

    def _wait_for_news(self, is_over: Callable[[], bool]) -> None:
        with self._news:
            self._waiting += 1
            try:
                # The limit is for a reader that let go between the look and the wait.
                while not is_over() and self._news.wait(0.1):
                    pass
            finally:
                self._waiting -= 1

    def _tell(self) -> None:
        if self._waiting:
            with self._news:
                self._news.notify_all()
        if self._loop is not None and self._inbox:
            with suppress(RuntimeError):  # the loop has ended: nobody works any more
                self._loop.call_soon_threadsafe(self._on_work)

    def _read_on_loop(self) -> None:
        if self._reading.acquire(blocking=False):
            try:
                self._read(socket.MSG_DONTWAIT)
            except ServerGoneError:
                # Raised here it would be the loop's to report, and again at its next turn.
                if self._loop is not None:
                    self._loop.remove_reader(self._socket.fileno())
                self._inbox.append((Kind.STOP, memoryview(b"")))
                self.on_gone()
            finally:
                self._reading.release()
        if self._waiting:
            with self._news:
                self._news.notify_all()
        if self._inbox:
            self._on_work()

    def _read(self, flags: int) -> None:
        """One read of the socket, and all frames that are whole then. Held by `_reading`."""
        begun = self._end
        try:
            got, ancillary, _, _ = self._socket.recvmsg_into(
                (self._view[begun:],) if begun else self._views, _DESCRIPTORS_BYTES, flags
            )
        except BlockingIOError:
            return
        except OSError as error:
            raise ServerGoneError from error
        if not got:
            raise ServerGoneError
        if ancillary:
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self._descriptors.extend(memoryview(data).cast("i"))
        if not begun and got >= HEADER.size:
            # Nearly always one frame, and whole.
            length, number = HEADER.unpack_from(self._buffer)
            if HEADER.size + length == got:
                # A copy of its own, because a model may keep what it got, and may write to it.
                self._dispatch(number, memoryview(self._buffer[:got])[HEADER.size :])
                return
        self._end = begun + got
        self._take_frames()

    def _take_frames(self) -> None:
        while self._end - self._start >= HEADER.size:
            length, number = HEADER.unpack_from(self._buffer, self._start)
            whole = HEADER.size + length
            have = self._end - self._start
            copied = bytearray(whole)
            if have >= whole:
                copied[:] = self._view[self._start : self._start + whole]
                self._start += whole
            elif whole > _RECEIVE_BYTES // 2:
                copied[:have] = self._view[self._start : self._end]
                self._start = self._end
                self._fill(memoryview(copied)[have:])
            else:
                break
            self._dispatch(number, memoryview(copied)[HEADER.size :])
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start > _RECEIVE_BYTES // 2:
            rest = self._end - self._start
            self._buffer[:rest] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, rest

    def _fill(self, rest: memoryview) -> None:
        """The rest of a frame that is on its way."""
        while rest:
            try:
                got = self._socket.recv_into(rest)
            except OSError as error:
                raise ServerGoneError from error
            if not got:
                raise ServerGoneError
            rest = rest[got:]

    def _dispatch(self, number: int, body: memoryview) -> None:
        if number == EXECUTE:
            self._inbox.append((_EXECUTE, body))
            return
        if number == CALL_ANSWER:
            self.on_call_answer(body)
            return
        kind = _KINDS[number]
        match kind:
            case Kind.CANCEL:
                (key,) = KEY.unpack(body)
                if key not in self.open:
                    # Over already, or its batch has come in the same breath and is not decoded.
                    self.cancelled_early[key] = None
                    if len(self.cancelled_early) > _MAX_EARLY:
                        self.cancelled_early.pop(next(iter(self.cancelled_early)), None)
                request = self.open.get(key)
                if request is not None:
                    request.cancelled = True
            case Kind.CREDIT:
                key, count = CREDIT.unpack(body)
                request = self.open.get(key)
                if request is not None and request.unacknowledged is not None:
                    # Whoever sends counts at the same time.
                    with self._news:
                        for _ in range(min(count, len(request.unacknowledged))):
                            request.unacknowledged_bytes -= request.unacknowledged.popleft()
            case Kind.RELEASE:
                self._on_release(decode_blocks(body))
            case Kind.SEGMENT:
                number, arena = SEGMENT.unpack(body)
                self._take_segment(number, arena)
            case Kind.FORGET:
                self._on_forget(*FORGET.unpack(body))
            case Kind.RESULT:
                number, went_well = RESULT.unpack_from(body)
                self._results[number] = bool(went_well), json.loads(bytes(body[RESULT.size :]))
                self._calling.discard(number)
            case _:
                self._inbox.append((kind, body))

    def _take_segment(self, number: int, arena: int) -> None:
        if arena != BORROWED:
            self._on_segment(number, arena, self._descriptors.popleft())
            return
        # The kernel drops a descriptor that this process has no number left for. What is borrowed can be copied.
        is_mapped = bool(self._descriptors) and self._on_segment(number, arena, self._descriptors.popleft())
        self.send_later(encode_frame(Kind.MAPPED, MAPPED.pack(number, is_mapped)))


def _nothing() -> None:
    """There is nobody to tell."""


def _drop(_: memoryview) -> None:
    """Before anybody calls there is nothing to be answered."""
