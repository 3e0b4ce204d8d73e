"""Frames to and from one worker process.

Rooms register a handler for each kind of frame that a worker may send. Every frame is held against its kind's limit
before it is taken, and what waits for a worker that does not read is bounded. A worker that breaks a rule is given up:
`on_lost` is called, once, and its owner ends the process. All methods are called on the event loop's thread.
"""

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from halimede.core.types import Buffer
from halimede.workers.frames.control import encode_blocks
from halimede.workers.frames.kinds import HEADER, LIMITS, METRICS, FrameError, Kind
from halimede.workers.segments import Block

MAX_UNASKED_BYTES = 1 << 20
"""Of a larger answer the beginning is looked at before the rest of it is taken."""

MAX_UNSENT_FRAMES = 16 << 10
"""Frames that wait for a worker to read. One that executes for long may leave some thousands."""

MAX_FRAMES_PER_TURN = 256
"""Frames of one worker that are handled before the loop gets its turn."""

METRICS_BYTES_PER_FRAME = 64
"""So much of updates of metrics is as much work as a frame."""

_RECEIVE_BYTES = 256 << 10

Handler = Callable[[memoryview], None]
"""Takes the body of a frame. FrameError."""


class _Received(threading.local):
    """What is being received: one buffer for all channels of a loop, which is one thread's, because nothing stays in
    it between two turns of the loop. Loads have loops of their own."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(_RECEIVE_BYTES))


_received = _Received()


class Channel:
    """A socket that carries frames."""

    def __init__(self, channel: socket.socket, on_lost: Callable[[str], None], loop: asyncio.AbstractEventLoop) -> None:
        """`on_lost` gets the reason when nothing more can come. The channel is closed then."""
        self._socket = channel
        self._socket.setblocking(False)
        self._descriptor = channel.fileno()
        self._buffer = _received.buffer
        self._on_lost = on_lost
        self._loop = loop
        self._handlers: dict[int, tuple[int, Handler]] = {}
        """By kind: the largest body, and who takes it."""
        self.check_begun: Handler = _accept
        """Gets the part of a large DONE's body that has come, before the rest is taken. FrameError."""
        self._partial = bytearray()
        """The beginning of a frame that has not come whole."""
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        """Frames, or what is left of them, with the descriptors that go with them."""
        self.unsent_bytes = 0
        self.sent = 0
        """How many frames were sent, or tried to be."""
        self.released: deque[Block] = deque()
        """Blocks of the worker's arena that it is told to be free with the next frame."""
        self.left_unread = False
        """The worker closed its end before it had read all that was sent."""
        self.is_closed = False
        loop.add_reader(self._descriptor, self._readable)

    def __repr__(self) -> str:
        return f"<Channel {len(self._unsent)} frames unsent>"

    def handle(self, kind: Kind, handler: Handler) -> None:
        """From now on frames of this kind are taken."""
        self._handlers[kind] = LIMITS[kind], handler

    def close(self) -> None:
        """Let go of the socket, and of the rooms that take frames."""
        if self.is_closed:
            return
        self.is_closed = True
        self.left_unread = self.left_unread or bool(self._unsent)
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._socket.close()
        self._drop_unsent()
        # The rooms hold the channel: without this, their memory would stay until the garbage collector runs.
        self._handlers.clear()
        self.check_begun = _accept
        self._on_lost = _ignore

    def send(self, frame: Buffer, descriptors: tuple[int, ...] = ()) -> None:
        """Write a frame, or as much of it as goes; the rest goes when the worker reads. Descriptors are taken over."""
        self.sent += 1
        if self.released and not self._unsent:
            self._send_released()
        if self.is_closed:
            _close(descriptors)
            return
        if not self._unsent and not descriptors:
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                sent = 0
            except (BrokenPipeError, ConnectionResetError):
                self.left_unread = True
                return  # it has closed its end: reading tells
            except OSError as error:
                self._lose(f"its channel failed: {error.strerror}")
                return
            if sent == len(frame):
                return
            frame = memoryview(frame)[sent:]
        if len(self._unsent) >= MAX_UNSENT_FRAMES:
            _close(descriptors)
            self._lose(f"it left more than {MAX_UNSENT_FRAMES} frames unread")
            return
        self._unsent.append((memoryview(frame), descriptors))
        self.unsent_bytes += len(frame)
        if len(self._unsent) == 1:
            self._loop.add_writer(self._descriptor, self._write)
            if descriptors:
                self._write()

    def _send_released(self) -> None:
        blocks = []
        while self.released:
            blocks.append(self.released.popleft())
        self.send(encode_blocks(Kind.RELEASE, blocks))

    def _write(self) -> None:
        unsent = self._unsent
        try:
            while unsent:
                data, descriptors = unsent[0]
                if descriptors:
                    sent = socket.send_fds(self._socket, [data], list(descriptors))
                    _close(descriptors)
                else:
                    sent = self._socket.send(data)
                self.unsent_bytes -= sent
                if sent == len(data):
                    unsent.popleft()
                else:
                    unsent[0] = data[sent:], ()
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            # It has closed its end. What it said before can still be read, and reading tells that it ends.
            self.left_unread = True
            self._drop_unsent()
        except OSError as error:
            self._lose(f"its channel failed: {error.strerror}")
            return
        self._loop.remove_writer(self._descriptor)

    def _drop_unsent(self) -> None:
        self.unsent_bytes = 0
        while self._unsent:
            _close(self._unsent.popleft()[1])

    def _readable(self) -> None:
        buffer = self._buffer
        try:
            got = self._socket.recv_into(buffer)
        except BlockingIOError:
            return
        except ConnectionResetError:
            # So the kernel says that a socket was closed with something unread in it.
            self.left_unread = True
            self._lose("it closed its channel")
            return
        except OSError as error:
            self._lose(f"its channel failed: {error.strerror}")
            return
        if not got:
            self._lose("it closed its channel")
            return
        if self._partial:
            self._partial += buffer[:got]
            self._take(memoryview(self._partial), self._partial)
            return
        length, kind = HEADER.unpack_from(buffer) if got >= HEADER.size else (0, 0)
        if HEADER.size + length != got:
            self._take(buffer[:got], None)
            return
        # Nearly always one frame, and whole.
        limit, handler = self._handlers.get(kind, _NOBODY)
        try:
            if length > limit:
                raise _refusal(length, kind)
            handler(memoryview(bytes(buffer[HEADER.size : got])))
        except FrameError as error:
            self._lose(f"it sent garbage: {error}")

    def _take(self, data: memoryview, held: bytearray | None) -> None:
        """Handle the whole frames of `data`, and keep the rest. `held` is what `data` is a view of, if it is ours."""
        at = handled = 0
        end = len(data)
        try:
            while end - at >= HEADER.size and handled < MAX_FRAMES_PER_TURN:
                length, kind = HEADER.unpack_from(data, at)
                limit, handler = self._handlers.get(kind, _NOBODY)
                if length > limit:
                    raise _refusal(length, kind)
                stop = at + HEADER.size + length
                if stop > end:
                    if length > MAX_UNASKED_BYTES and kind == Kind.DONE:
                        self.check_begun(data[at + HEADER.size :])
                    break
                # A copy, of which the answers are views; a large frame is alone in its buffer, and is not copied.
                body = data[at + HEADER.size : stop]
                # Updates of metrics come by the thousand in one frame: they count for what they cost.
                at, handled = stop, handled + (1 if kind != METRICS else 1 + length // METRICS_BYTES_PER_FRAME)
                handler(body if held is not None and stop == end else memoryview(bytes(body)))
                if self.is_closed:
                    return
        except FrameError as error:
            self._lose(f"it sent garbage: {error}")
            return
        if held is None or at:
            self._partial = bytearray(data[at:])
        if handled >= MAX_FRAMES_PER_TURN and self._partial:
            # The rest after the others' turn, without reading more meanwhile.
            self._loop.remove_reader(self._descriptor)
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self.is_closed:
            return
        self._loop.add_reader(self._descriptor, self._readable)
        self._take(memoryview(self._partial), self._partial)

    def _lose(self, reason: str) -> None:
        if not self.is_closed:
            on_lost = self._on_lost
            self.close()
            on_lost(reason)


def _accept(_: memoryview) -> None:
    """Nothing is held against it."""


def _ignore(_: str) -> None:
    """The owner has closed the channel itself."""


_NOBODY: tuple[int, Handler] = -1, _accept
"""Of a kind that nobody takes."""


def _refusal(length: int, number: int) -> FrameError:
    """What is wrong with a frame that is not taken."""
    try:
        kind = Kind(number)
    except ValueError:
        return FrameError(f"a frame of kind {number}")
    if kind not in LIMITS:
        return FrameError(f"a {kind.name} frame, which only the server sends")
    return FrameError(f"a {kind.name} frame of {length} bytes")


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
