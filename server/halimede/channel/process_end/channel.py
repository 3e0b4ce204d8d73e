"""The worker's end of the channel to the server.

There is no thread that only reads. The main thread waits for work in `receive`. A thread that needs a message of the
server while the model runs (a cancellation, an acknowledgement, the result of a call) reads the channel itself. One
thread reads at a time and dispatches frames to the others. So a batch is not passed between threads, and a model's own
threads get their messages while the main thread executes, waits or blocks.

An event loop may take the place of the main thread (`read_on_loop`). Any other loop that waits for an answer reads as
long as it waits (`reading_on`).

Standard library only, for any CPython from 3.10 on.
"""

import asyncio
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum

from halimede.channel.frames import ChannelFrame, FrameTable
from halimede.channel.process_end.reader import FrameReader, ServerGoneError
from halimede.channel.process_end.writer import LoopWriter
from halimede.core.spin import SPIN_NS
from halimede.core.types import Buffer

Handler = Callable[[memoryview], None]
"""Gets the body of a frame, on the thread that reads."""


class Channel:
    """Frames in both directions. Thread-safe."""

    def __init__(self, descriptor: int, frames: FrameTable) -> None:
        """Takes over the descriptor. `frames` are those of the protocol."""
        self._frames = frames
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._write: Callable[[Buffer], None] = self._socket.sendall
        self._reader = FrameReader(self._socket, self._dispatch)
        self._handlers: dict[int, Handler] = {}
        self._inbox: deque[tuple[IntEnum, memoryview]] = deque()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._news = threading.Condition()
        self._waiting = 0
        self._later: deque[bytes] = deque()
        """Frames of finalizers."""
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}
        """The number of tasks that wait on each loop, except the loop that executes batches; changed only on the thread
        of the loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_work: Callable[[], None] = _nothing
        self._process = os.getpid()
        self.on_gone: Callable[[], None] = _nothing
        """Called when a read on a loop finds that the server has closed the channel."""
        self.spins = False
        """Whether `receive` spins for the next frame before it blocks."""

    def handle(self, kind: IntEnum, handler: Handler) -> None:
        """Pass frames of this kind to the handler. All other frames are work: see `receive`."""
        self._handlers[int(kind)] = handler

    def disconnect(self) -> None:
        """Close the socket in the child of a fork: the channel belongs to the parent alone."""
        self._socket.close()

    def take_descriptor(self) -> int | None:
        """The descriptor that came with the frame that is being dispatched; None if the kernel has dropped it, because
        this process has too many open files."""
        return self._reader.descriptors.popleft() if self._reader.descriptors else None

    def receive(self) -> tuple[IntEnum, memoryview]:
        """Wait for the next frame of work: one whose kind has no handler. ServerGoneError."""
        inbox = self._inbox
        while not inbox:
            if self._reading.acquire(blocking=False):
                try:
                    if not inbox:
                        if self.spins:
                            self._spin()
                        if not inbox:
                            self._reader.read(0)
                finally:
                    self._reading.release()
                if self._waiting:
                    self._notify()
            else:
                self.wait_for(lambda: bool(inbox))
        return inbox.popleft()

    def _spin(self) -> None:
        """Poll for work for SPIN_NS, yielding the processor in between. The caller holds `_reading`."""
        until = time.monotonic_ns() + SPIN_NS
        while not self._inbox and time.monotonic_ns() < until:
            os.sched_yield()
            self._reader.read(socket.MSG_DONTWAIT)

    def received(self) -> tuple[IntEnum, memoryview] | None:
        """What `receive` would return without waiting."""
        return self._inbox.popleft() if self._inbox else None

    def read_on_loop(self, loop: asyncio.AbstractEventLoop, on_work: Callable[[], None]) -> None:
        """Read on the running loop from now on. `on_work` is called on it when `received` has something."""
        self._loop = loop
        self._on_work = on_work
        loop.add_reader(self._socket.fileno(), self._read_on_loop)
        # uvloop has made it a socket that does not block.
        self._socket.setblocking(True)

    def write_on_loop(self, loop: asyncio.AbstractEventLoop, on_room: Callable[[], None]) -> LoopWriter:
        """Write on the thread of this loop from now on, and never block it. See `LoopWriter`."""
        writer = LoopWriter(self._socket, loop, on_room)
        self._write = writer.write
        return writer

    def poll(self) -> None:
        """Read what has arrived, without waiting."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._reader.read(socket.MSG_DONTWAIT)
        finally:
            self._reading.release()
        self._notify()

    def send(self, message: "Buffer | list[Buffer]") -> None:
        """Write a frame, or several frames one after the other. ServerGoneError."""
        try:
            with self._writing:
                if isinstance(message, list):
                    for each in message:
                        self._write(each)
                else:
                    self._write(message)
        except OSError as error:
            raise ServerGoneError from error
        if self._later:
            self._send_later()

    def send_later(self, frame: bytes) -> None:
        """Write a small frame, now or when the thread that writes has finished.

        For finalizers: takes no lock that this thread may hold, and fails silently.
        """
        self._later.append(frame)
        self._send_later()

    def _send_later(self) -> None:
        later = self._later
        # A thread that holds the lock calls this method after it has released the lock.
        while later and os.getpid() == self._process and self._writing.acquire(blocking=False):
            try:
                while later:
                    self._write(later.popleft())
            except OSError:
                later.clear()
            finally:
                self._writing.release()

    def wait_for(self, has_come: Callable[[], bool]) -> None:
        """Read until `has_come`, or wait for the thread that reads. ServerGoneError.

        `has_come` must become true by a handler, which runs on the thread that reads.
        """
        while not has_come():
            if self._reading.acquire(blocking=False):
                try:
                    # It may have become true before this thread had the lock.
                    if not has_come():
                        self._reader.read(0)
                finally:
                    self._reading.release()
                if self._waiting or self._loop is not None:
                    self._notify()
            else:
                self._wait_for_news(lambda: has_come() or not self._reading.locked())

    @contextmanager
    def reading_on(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Read on the running loop while a task on it waits for an effect of a handler."""
        if loop is self._loop:
            yield
            return
        loops = self._loops
        waiting = loops[loop] = loops.get(loop, 0) + 1
        try:
            if waiting == 1:
                loop.add_reader(self._socket.fileno(), self._read_for_waiters, loop)
            yield
        finally:
            loops[loop] -= 1
            if not loops[loop]:
                del loops[loop]
                loop.remove_reader(self._socket.fileno())

    def _read_for_waiters(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._reader.read(socket.MSG_DONTWAIT)
        except ServerGoneError:
            loop.remove_reader(self._socket.fileno())
            self.on_gone()
        finally:
            self._reading.release()
        self._notify()

    def _wait_for_news(self, is_over: Callable[[], bool]) -> None:
        with self._news:
            self._waiting += 1
            try:
                # The timeout covers a reader that releases the lock between the check and the wait.
                while not is_over() and self._news.wait(0.1):
                    pass
            finally:
                self._waiting -= 1

    def _notify(self) -> None:
        if self._waiting:
            with self._news:
                self._news.notify_all()
        if self._loop is not None and self._inbox:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._on_work)

    def _read_on_loop(self) -> None:
        if self._reading.acquire(blocking=False):
            try:
                self._reader.read(socket.MSG_DONTWAIT)
            except ServerGoneError:
                # The loop would only log an exception raised here, and would call this method again at once.
                if self._loop is not None:
                    self._loop.remove_reader(self._socket.fileno())
                self._inbox.append((ChannelFrame.STOP, memoryview(b"")))
                self.on_gone()
            finally:
                self._reading.release()
        if self._waiting:
            with self._news:
                self._news.notify_all()
        if self._inbox:
            self._on_work()

    def _dispatch(self, number: int, body: memoryview) -> None:
        handler = self._handlers.get(number)
        if handler is None:
            self._inbox.append((self._frames[number], body))
        else:
            handler(body)


def _nothing() -> None:
    """No callback is set."""
