"""What a connection sends: answers within the client's windows and the room of the transport.

DATA waits here while a window or the transport has no room, and streams that wait are served in turn, a frame each.
`room` is how many bytes of DATA may be written now; the caller sets it. Nothing that is sent changes the client's HPACK
table, so that header blocks are constants.
"""

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Generic, TypeVar

from halimede.core.types import Buffer
from halimede.core.wire.http2 import frames
from halimede.core.wire.http2.codes import (
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    MAX_WINDOW,
    MIN_MAX_FRAME_SIZE,
    ConnectionFault,
    FrameType,
    H2Code,
)
from halimede.core.wire.http2.events import StreamHasRoom
from halimede.core.wire.http2.floods import FloodGuard
from halimede.core.wire.http2.frames import pack_head
from halimede.core.wire.http2.streams import CLOSED, Closed, Stream, StreamTable

C = TypeVar("C")

_DATA, _HEADERS = FrameType.DATA, FrameType.HEADERS
_KEEPALIVE = b"keepaliv"
_JOIN_BELOW = 16 << 10
"""Answers up to this size are copied together into one write."""


class Sender(Generic[C]):
    """One connection's sending side.

    `outgoing` are the bytes to write, in order. `has_sent` is set when HEADERS or DATA are among them.
    """

    __slots__ = ("_floods", "_frame_bytes", "_table", "_waiting", "_window", "has_sent", "initial_window", "outgoing",
                 "room")  # fmt: skip

    def __init__(self, table: StreamTable[C], floods: FloodGuard) -> None:
        self._table = table
        self._floods = floods
        # What the client lets us send: its settings and its window for the connection.
        self.initial_window = DEFAULT_WINDOW
        """The window of a new stream."""
        self._frame_bytes = MIN_MAX_FRAME_SIZE
        self._window = DEFAULT_WINDOW
        # Streams with DATA, in the order of their turns.
        self._waiting: deque[Stream[C]] = deque()
        self.room: float = inf
        self.has_sent = False
        self.outgoing: list[Buffer] = []

    # What the client permits.

    def set_initial_window(self, size: int) -> None:
        """Section 6.9.2: the windows of open streams change with it, and may become negative."""
        if size > MAX_WINDOW:
            raise ConnectionFault(H2Code.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE is {size}")
        change = size - self.initial_window
        self.initial_window = size
        for stream in self._table.open.values():
            stream.send_window += change
            if stream.send_window > MAX_WINDOW:
                raise ConnectionFault(H2Code.FLOW_CONTROL_ERROR, "a window exceeds its maximum")

    def set_frame_bytes(self, size: int) -> None:
        """The largest payload of a DATA frame."""
        self._frame_bytes = size

    def widen(self, size: int) -> None:
        """The client has opened the window of the connection by `size` bytes (section 6.9.1)."""
        self._window += size
        if self._window > MAX_WINDOW:
            raise ConnectionFault(H2Code.FLOW_CONTROL_ERROR, "a window exceeds its maximum")

    # Answers.

    def answer(self, stream: Stream[C], head: bytes, data: Sequence[Buffer], size: int, trailers: bytes) -> None:
        """Send a whole answer: header block, `size` bytes of `data`, and the block of the trailers."""
        if stream.state is CLOSED:
            return
        if size <= _JOIN_BELOW and size <= stream.send_window and size <= self._window and self.room > 0:
            # The usual case, in one write. Each part fits the smallest frame size.
            stream.send_window -= size
            self._window -= size
            self.room -= size
            self._floods.data_sent()
            self.has_sent = True
            stream_id = stream.id
            self.outgoing += (
                pack_head(len(head) << 8 | _HEADERS, END_HEADERS, stream_id),
                head,
                pack_head(size << 8 | _DATA, 0, stream_id),
                *data,
                pack_head(len(trailers) << 8 | _HEADERS, END_HEADERS | END_STREAM, stream_id),
                trailers,
            )
            self._on_sent_end(stream)
            return
        self.respond(stream, head)
        self.send(stream, data, size)
        self.finish(stream, trailers)

    def respond(self, stream: Stream[C], head: bytes, *, is_end: bool = False) -> None:
        """Send a header block; `is_end`: it is the whole answer. Blocks must fit the client's smallest frame size."""
        if stream.state is CLOSED:
            return
        self.has_sent = True
        flags = END_HEADERS | END_STREAM if is_end else END_HEADERS
        self.outgoing.append(pack_head(len(head) << 8 | _HEADERS, flags, stream.id) + head)
        if is_end:
            self._on_sent_end(stream)

    def send(self, stream: Stream[C], data: Sequence[Buffer], size: int) -> None:
        """Send DATA of `size` bytes, the rest of it later if there is no room. The buffers are kept until then."""
        if stream.state is CLOSED:
            return
        unsent = stream.unsent
        if unsent is None:
            unsent = stream.unsent = deque()
        is_first = not stream.unsent_bytes
        unsent.extend(data)
        stream.unsent_bytes += size
        self._table.unsent_bytes += size
        if is_first and size:
            self._write_data(stream)
            if stream.unsent_bytes:
                self._wait(stream)

    def finish(self, stream: Stream[C], trailers: bytes = b"") -> None:
        """The answer is complete: send its end after all DATA, with the block of its trailers if it has any."""
        if stream.state is CLOSED:
            return
        stream.trailers = trailers
        if not stream.unsent_bytes:
            self._write_end(stream, trailers)

    def cut_short(self, stream: Stream[C]) -> None:
        """Send the end of a finished answer without the DATA that waits: trailers need no room in a window."""
        trailers = stream.trailers
        if stream.state is CLOSED or trailers is None:
            return
        self._table.drop_unsent(stream)
        self._write_end(stream, trailers)

    def reset(self, stream: Stream[C], code: H2Code) -> None:
        """End a stream without a complete answer."""
        if stream.state is CLOSED:
            return
        self.outgoing.append(frames.rst_stream(stream.id, code))
        self._table.close(stream, Closed.RESET_BY_SERVER)

    def write_waiting(self) -> list[StreamHasRoom[C]]:
        """Write DATA that has room now: one frame of each stream in turn. Returns the streams whose DATA is written."""
        written: list[StreamHasRoom[C]] = []
        waiting = self._waiting
        blocked: list[Stream[C]] = []
        while waiting and self.room > 0 and self._window > 0:
            stream = waiting.popleft()
            if stream.state is CLOSED:
                continue
            if stream.send_window <= 0:
                blocked.append(stream)
                continue
            self._write_data(stream, frames_left=1)
            if stream.unsent_bytes:
                waiting.append(stream)
            elif stream.trailers is not None:
                self._write_end(stream, stream.trailers)
            else:
                written.append(StreamHasRoom(stream))
        waiting.extend(blocked)
        return written

    def forget_waiting(self) -> None:
        """Nothing more is sent on any stream."""
        self._waiting.clear()

    def ping(self) -> None:
        """Send a ping. Whatever arrives next shows that the client lives."""
        self.outgoing.append(frames.ping(_KEEPALIVE))

    def take(self) -> list[Buffer]:
        """What is to be written, in order."""
        outgoing, self.outgoing = self.outgoing, []
        return outgoing

    def _wait(self, stream: Stream[C]) -> None:
        if len(self._waiting) >= len(self._table.open):
            # Streams that were reset while they waited, which would collect while the client opens no window.
            self._waiting = deque([each for each in self._waiting if each.state is not CLOSED])
        self._waiting.append(stream)

    def _write_data(self, stream: Stream[C], frames_left: float = inf) -> None:
        unsent = stream.unsent
        while frames_left > 0 and unsent:
            size = min(stream.unsent_bytes, self._frame_bytes, stream.send_window, self._window, self.room)
            if size <= 0:
                return
            size = int(size)
            frames_left -= 1
            self.has_sent = True
            stream.send_window -= size
            stream.unsent_bytes -= size
            stream.sent_bytes += size
            self._window -= size
            self._table.unsent_bytes -= size
            self.room -= size
            self._floods.data_sent()
            self.outgoing.append(pack_head(size << 8 | _DATA, 0, stream.id))
            while size:
                part = unsent[0]
                if len(part) <= size:
                    self.outgoing.append(unsent.popleft())
                    size -= len(part)
                else:
                    view = memoryview(part)
                    self.outgoing.append(view[:size])
                    unsent[0] = view[size:]
                    size = 0

    def _write_end(self, stream: Stream[C], trailers: bytes) -> None:
        if trailers:
            self.respond(stream, trailers, is_end=True)
        else:
            self.outgoing.append(pack_head(_DATA, END_STREAM, stream.id))
            self._on_sent_end(stream)

    def _on_sent_end(self, stream: Stream[C]) -> None:
        if not self._table.end(stream):
            # Section 8.1: the answer is complete, and the rest of the request is not read.
            self.reset(stream, H2Code.NO_ERROR)
