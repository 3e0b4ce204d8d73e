"""Frames to and from one worker process.

The other modules register a handler for each kind of frame that a worker may send. Every frame is checked against its
kind's limit before it is received, memory is taken only for bytes that have arrived, and the frames that wait for a
worker that does not read are bounded. A worker writes each frame at once: one that stops within a frame has announced
a wrong length, or is lost. If a worker breaks a rule, `on_lost` is called, once, and its owner ends the process. All
methods are called on the event loop's thread.
"""

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial

from halimede.channel.frames import HEADER, ChannelFrame, FrameError, FrameTable
from halimede.channel.json_frames import encode_blocks
from halimede.channel.segments import Block
from halimede.core.types import Buffer

MAX_UNCHECKED_BYTES = 1 << 20
"""The beginning of a frame larger than this is checked before the rest is received, if its kind has such a check."""

MAX_UNSENT_FRAMES = 16 << 10
"""Maximum frames that wait for a worker to read. During a long execution some thousands may wait."""

MAX_FRAMES_PER_TURN = 256
"""Frames of one worker that are handled before the loop gets its turn."""

MAX_FRAME_BYTES = 1 << 32
"""A body is shorter than this: its length has four bytes."""

STALL_SECS = 10.0
"""How long a worker may send nothing while a frame is incomplete. One that is stopped between two frames is not
concerned."""

_RECEIVE_BYTES = 256 << 10

Handler = Callable[[memoryview], None]
"""Gets the body of a frame. FrameError."""


CheckPartial = Callable[[int, int, memoryview], bool]
"""Gets kind and length of a large frame, and the part of its body that has arrived. Returns whether this was enough for
the check; otherwise it is called again. FrameError."""


class _Received(threading.local):
    """The receive buffer that all channels of a loop share: no data stays in it between two turns. It is per thread,
    because loads have their own loops."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(_RECEIVE_BYTES))


_received = _Received()


class Channel:
    """A socket that carries frames."""

    def __init__(
        self,
        channel: socket.socket,
        frames: FrameTable,
        on_lost: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
        stall_secs: float = STALL_SECS,
    ) -> None:
        """`on_lost` gets the reason once the channel is lost and has been closed."""
        self._socket = channel
        self._socket.setblocking(False)
        self._descriptor = channel.fileno()
        self._buffer = _received.buffer
        self._frames = frames
        self._on_lost = on_lost
        self._loop = loop
        self._handlers: dict[int, tuple[int, Handler, int]] = {}
        """By kind: the maximum size of the body, its handler, and the bytes that take as much work as one frame."""
        self._checks: dict[int, CheckPartial] = {}
        """By kind, for those that have one."""
        self._is_checked = False
        """Whether the check of the incomplete frame is over."""
        self._partial = bytearray()
        """The beginning of a frame that is not complete."""
        self._stall_secs = stall_secs
        self._watch: asyncio.TimerHandle | None = None
        """Set while a frame is incomplete."""
        self._progress = 0
        """Counts the reads of frames that did not arrive in one piece."""
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        """Frames, or their rests, with the descriptors that are sent with them."""
        self.unsent_bytes = 0
        self.released: deque[Block] = deque()
        """Blocks of the worker's arena that are free; a RELEASE frame lists them before the next frame."""
        self.left_unread = False
        """The worker closed its end before it had read all frames."""
        self.is_closed = False
        loop.add_reader(self._descriptor, self._readable)

    def __repr__(self) -> str:
        return f"<Channel {len(self._unsent)} frames unsent, {len(self._partial)} bytes of a frame received>"

    def handle(
        self,
        kind: IntEnum,
        handler: Handler,
        check_partial: CheckPartial | None = None,
        bytes_per_frame: int = MAX_FRAME_BYTES,
    ) -> None:
        """Register the handler for frames of this kind, and the check of large ones of which a part has arrived.
        `bytes_per_frame` take as much work as one frame."""
        limit = self._frames[kind].limit
        if limit is None:
            raise ValueError(f"only the server sends {kind.name}")
        self._handlers[kind] = limit, handler, bytes_per_frame
        if check_partial is not None:
            self._checks[kind] = check_partial

    def close(self) -> None:
        """Close the socket and drop the handlers."""
        if self.is_closed:
            return
        self.is_closed = True
        self.left_unread = self.left_unread or bool(self._unsent)
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._socket.close()
        if self._watch is not None:
            self._watch.cancel()
        self._drop_unsent()
        # The handlers' objects refer to the channel: without this, the memory would stay until garbage collection.
        self._handlers.clear()
        self._checks.clear()
        self._on_lost = _ignore

    def send(self, frame: Buffer, descriptors: tuple[int, ...] = ()) -> None:
        """Write a frame; a rest that does not fit is written when the worker reads. Takes ownership of descriptors."""
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
                return  # the worker has closed its end: the next read reports it
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
        self.send(encode_blocks(ChannelFrame.RELEASE, blocks))

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
            # The worker has closed its end. Frames that it sent before can still be read; then a read reports the end.
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
            # The kernel reports this if the peer closed its socket with unread data in it.
            self.left_unread = True
            self._lose("it closed its channel")
            return
        except OSError as error:
            self._lose(f"its channel failed: {error.strerror}")
            return
        if not got:
            self._lose("it closed its channel")
            return
        self._guarded(partial(self._receive, got))

    def _receive(self, got: int) -> None:
        """Handle what is in the buffer. FrameError, MemoryError."""
        buffer = self._buffer
        if self._partial:
            self._partial += buffer[:got]
            self._take(memoryview(self._partial), self._partial)
            return
        length, kind = HEADER.unpack_from(buffer) if got >= HEADER.size else (0, 0)
        if HEADER.size + length != got:
            self._take(buffer[:got], None)
            return
        # The usual case: one complete frame.
        limit, handler, _ = self._handlers.get(kind, _NO_HANDLER)
        if length > limit:
            raise _refusal(self._frames, length, kind)
        handler(memoryview(bytes(buffer[HEADER.size : got])))

    def _take(self, data: memoryview, held: bytearray | None) -> None:
        """Handle the complete frames of `data`, keep the rest. `held` is `self._partial` if `data` is a view of it.

        FrameError, MemoryError.
        """
        at = handled = 0
        end = len(data)
        self._progress += 1
        while end - at >= HEADER.size and handled < MAX_FRAMES_PER_TURN:
            length, kind = HEADER.unpack_from(data, at)
            limit, handler, bytes_per_frame = self._handlers.get(kind, _NO_HANDLER)
            if length > limit:
                raise _refusal(self._frames, length, kind)
            stop = at + HEADER.size + length
            if stop > end:
                if length > MAX_UNCHECKED_BYTES and kind in self._checks and not (self._is_checked and not at):
                    self._is_checked = self._checks[kind](kind, length, data[at + HEADER.size :])
                break
            # The answers are views of this copy. A large frame has its buffer to itself and is not copied.
            body = data[at + HEADER.size : stop]
            at, handled = stop, handled + 1 + length // bytes_per_frame
            handler(body if held is not None and stop == end else memoryview(bytes(body)))
            if self.is_closed:
                return
        if held is None or at:
            self._partial = bytearray(data[at:])
        if self._partial and self._watch is None:
            self._watch_progress()
        if handled >= MAX_FRAMES_PER_TURN and self._partial:
            # The rest in the next turn of the loop, without reading more until then.
            self._loop.remove_reader(self._descriptor)
            self._loop.call_soon(self._resume)

    def _watch_progress(self) -> None:
        self._watch = self._loop.call_later(self._stall_secs, self._check_progress, self._progress)

    def _check_progress(self, before: int) -> None:
        """End a worker that has sent nothing since `before`, although a frame is incomplete."""
        self._watch = None
        if not self._partial:
            return
        if self._progress == before:
            self._lose(f"it sent garbage: {len(self._partial)} bytes of a longer frame, and nothing for some time")
        else:
            self._watch_progress()

    def _resume(self) -> None:
        if self.is_closed:
            return
        self._loop.add_reader(self._descriptor, self._readable)
        self._guarded(lambda: self._take(memoryview(self._partial), self._partial))

    def _guarded(self, read: Callable[[], None]) -> None:
        """Read frames. The worker is lost if they are invalid, or find no memory: a part of them is gone then."""
        try:
            read()
        except FrameError as error:
            self._lose(f"it sent garbage: {error}")
        except MemoryError:
            self._lose("the server has not enough memory for what it sent")

    def _lose(self, reason: str) -> None:
        if not self.is_closed:
            on_lost = self._on_lost
            self.close()
            on_lost(reason)


def _accept(_: memoryview) -> None:
    """Accept any body."""


def _ignore(_: str) -> None:
    """No effect: the owner has closed the channel."""


_NO_HANDLER: tuple[int, Handler, int] = -1, _accept, MAX_FRAME_BYTES
"""The entry for kinds without a handler: every length is above the limit."""


def _refusal(frames: FrameTable, length: int, number: int) -> FrameError:
    """The error for a frame that the protocol does not have, that only the server sends, or above its limit."""
    kind = frames.get(number)
    if kind is None:
        return FrameError(f"a frame of kind {number}")
    text = "frame, which only the server sends" if kind.limit is None else f"frame of {length} bytes"
    return FrameError(f"a {kind.name} {text}")


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
