"""The server's side of one HTTP/2 connection, without I/O: bytes in, events out (RFC 9113).

The caller passes what it receives to `receive` and handles the events in order; it answers by `respond`, `send`,
`finish` and `reset`, and after each of its turns writes what `take_outgoing` returns. Each rule names its section.

DATA waits here while the client's windows or the transport have no room. `room` is how many bytes of DATA may be
written now, which the caller sets. Windows for received DATA open as the caller gives `credit`: a stream whose request
is not used stops its client alone, because the window of the connection opens at once. All counts are bounded by
`Http2Limits`, and frames that bring nothing forward by `floods`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar

from halimede.core.types import Buffer
from halimede.core.wire.http2 import frames
from halimede.core.wire.http2.codes import (
    ACK,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    MAX_MAX_FRAME_SIZE,
    MAX_STREAM_ID,
    MAX_WINDOW,
    MIN_MAX_FRAME_SIZE,
    PADDED,
    PRIORITY_FIELDS,
    ConnectionFault,
    FrameType,
    H2Code,
    Setting,
    StreamFault,
)
from halimede.core.wire.http2.fields import HeaderBlocks, RequestFields
from halimede.core.wire.http2.floods import CHEAP, RESET, WINDOW_UPDATES_PER_DATA, FloodGuard
from halimede.core.wire.http2.frame_reader import FrameReader
from halimede.core.wire.http2.frames import pack_head
from halimede.core.wire.http2.streams import (
    CLOSED,
    HALF_CLOSED_LOCAL,
    HALF_CLOSED_REMOTE,
    ON_RECEIVED_END,
    ON_SENT_END,
    OPEN,
    Closed,
    RecentlyClosed,
    Stream,
)

T = TypeVar("T")
C = TypeVar("C")

MAX_BLOCK_BYTES = 32 << 10
"""The header block of a request, in all its frames, before it is decoded."""

MAX_CONTINUATIONS = 16

LARGE_REQUEST_BYTES = 64 << 10
"""The first request of a connection with more DATA permits larger frames, which cost less."""

RECENTLY_CLOSED = 32

_PING = b"keepaliv"
_LAST_PING = b"shutdown"
_DATA_HEAD, _HEADERS_HEAD = FrameType.DATA, FrameType.HEADERS
_JOIN_BELOW = 16 << 10
"""Answers up to this size are copied together into one write."""


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """`window` is what a client may send on a stream ahead of credit, in bytes; `max_header_list_bytes` is told to
    clients, and enforced by the application. A client that sends large requests may do so in frames of
    `large_frame_bytes`."""

    max_streams: int = 128
    window: int = 1 << 20
    connection_window: int = 64 << 20
    large_frame_bytes: int = 1 << 20
    max_header_list_bytes: int = 16 << 10


@dataclass(slots=True)
class RequestBegins(Generic[T, C]):
    """`is_end`: no DATA follows."""

    stream: Stream[C]
    head: T
    is_end: bool


@dataclass(slots=True)
class DataArrives(Generic[C]):
    """`data` is valid until `receive` is called again. `size` is to be passed to `credit` when it is used."""

    stream: Stream[C]
    data: memoryview
    size: int
    is_end: bool


@dataclass(slots=True)
class RequestEnds(Generic[C]):
    """The client has sent everything, and trailers after its DATA."""

    stream: Stream[C]


@dataclass(slots=True)
class StreamIsReset(Generic[C]):
    """Nothing more can be sent: the client has reset the stream, or has broken a rule (`fault`)."""

    stream: Stream[C]
    fault: str


@dataclass(slots=True)
class StreamHasRoom(Generic[C]):
    """All DATA that waited is written."""

    stream: Stream[C]


@dataclass(slots=True)
class Pinged:
    """The client has sent a ping, which is answered already."""


@dataclass(slots=True)
class ConnectionFails(Generic[C]):
    """The client has broken a rule. GOAWAY is in the outgoing bytes; nothing more is read. `streams` were open."""

    fault: ConnectionFault
    streams: list[Stream[C]]


Event = (
    RequestBegins[T, C]
    | DataArrives[C]
    | RequestEnds[C]
    | StreamIsReset[C]
    | StreamHasRoom[C]
    | Pinged
    | ConnectionFails[C]
)


class _Block:
    """A header block of which CONTINUATION frames must follow (section 6.10)."""

    __slots__ = ("continuations", "flags", "pieces", "size", "stream_id")

    def __init__(self, stream_id: int, flags: int, piece: bytes) -> None:
        self.stream_id = stream_id
        self.flags = flags
        self.pieces = [piece]
        self.size = len(piece)
        self.continuations = 0


class Http2Connection(Generic[T, C]):
    """One client. T is the application's value of a request's fields, C its record of a stream.

    `streams` are those that are not closed, by number, and `unsent_bytes` is the DATA that they have not sent yet.
    `has_sent` is set when HEADERS or DATA are outgoing. After a fault `is_failed`, and input is ignored.
    """

    __slots__ = (
        "_block",
        "_blocks",
        "_client_frame_bytes",
        "_client_window",
        "_closed",
        "_final_stream_id",
        "_floods",
        "_is_greeted",
        "_limits",
        "_receive_window",
        "_send_window",
        "_sent_away",
        "_uncredited",
        "_waiting",
        "has_sent",
        "is_failed",
        "is_left",
        "last_stream_id",
        "outgoing",
        "reader",
        "room",
        "streams",
        "unsent_bytes",
    )

    def __init__(self, interpret: Callable[[RequestFields], T], limits: Http2Limits, now: float) -> None:
        self._limits = limits
        self.reader = FrameReader(MIN_MAX_FRAME_SIZE)
        self._blocks: HeaderBlocks[T] = HeaderBlocks(interpret)
        self._floods = FloodGuard(now)
        self._closed = RecentlyClosed(RECENTLY_CLOSED)
        self.streams: dict[int, Stream[C]] = {}
        self.last_stream_id = 0
        self._block: _Block | None = None
        self._is_greeted = False
        self.is_failed = False
        self.is_left = False
        """The client has sent GOAWAY: it begins no further requests."""
        self._sent_away = False
        self._final_stream_id: int | None = None
        # What the client may send, and what it has sent without credit for it.
        self._receive_window = limits.connection_window
        self._uncredited = 0
        # What the client lets us send: its settings and windows.
        self._client_window = DEFAULT_WINDOW
        self._client_frame_bytes = MIN_MAX_FRAME_SIZE
        self._send_window = DEFAULT_WINDOW
        self.room: float = inf
        self._waiting: deque[Stream[C]] = deque()
        self.unsent_bytes = 0
        self.has_sent = False
        self.outgoing: list[Buffer] = [
            frames.settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    Setting.INITIAL_WINDOW_SIZE: limits.window,
                    Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
                }
            ),
            frames.window_update(0, limits.connection_window - DEFAULT_WINDOW),
        ]

    # Bytes in.

    def receive(self, data: memoryview, now: float) -> list[Event[T, C]]:
        """Process received bytes. Views of them in the events are valid until the next call."""
        events: list[Event[T, C]] = []
        if self.is_failed:
            return events
        try:
            for kind, flags, stream_id, payload, size in self.reader.read(data):
                if self._block is not None and kind != FrameType.CONTINUATION:
                    raise ConnectionFault(H2Code.PROTOCOL_ERROR, "a header block is interrupted by another frame")
                if not self._is_greeted:
                    self._check_greeting(kind, flags)
                if kind < len(_HANDLERS):
                    _HANDLERS[kind](self, flags, stream_id, payload, size, now, events)
                else:
                    # Section 5.5: ignored.
                    self._floods.spend(CHEAP, now, "frames of unknown types")
        except ConnectionFault as fault:
            events.append(ConnectionFails(fault, self.fail(fault)))
        return events

    def received_directly(self, piece: memoryview, now: float) -> list[Event[T, C]]:
        """As `receive`, for a piece of the DATA frame in receipt (`reader.data_left`) that is in its place already."""
        events: list[Event[T, C]] = []
        kind, flags, stream_id, payload, size = self.reader.received_directly(piece)
        _HANDLERS[kind](self, flags, stream_id, payload, size, now, events)
        return events

    def _check_greeting(self, kind: int, flags: int) -> None:
        # Section 3.4: the first frame is SETTINGS, and not an acknowledgement.
        if kind != FrameType.SETTINGS or flags & ACK:
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        self._is_greeted = True

    @property
    def is_greeted(self) -> bool:
        """Whether the client has sent its preface and SETTINGS."""
        return self._is_greeted

    # Frames of requests.

    def _on_data(
        self, flags: int, stream_id: int, payload: memoryview, size: int, now: float, events: list[Event[T, C]]
    ) -> None:
        # Section 6.9: every DATA frame counts, whatever becomes of it.
        if size:
            self._receive_window -= size
            if self._receive_window < 0:
                raise ConnectionFault(H2Code.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
            self._uncredited += size
            if self._uncredited * 2 >= self._limits.connection_window:
                self._receive_window += self._uncredited
                self.outgoing.append(frames.window_update(0, self._uncredited))
                self._uncredited = 0
        stream = self.streams.get(stream_id)
        if stream is None:
            self._on_frame_without_stream(stream_id, now, "DATA")
            return
        is_end = flags & END_STREAM != 0
        state = stream.state
        if state is HALF_CLOSED_REMOTE:
            self._end_by_fault(stream, H2Code.STREAM_CLOSED, "DATA after END_STREAM", now, events)
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            self._end_by_fault(stream, H2Code.FLOW_CONTROL_ERROR, "more DATA than the stream's window", now, events)
            return
        if stream.unreceived is not None:
            stream.unreceived -= len(payload)
            if stream.unreceived < 0 or (is_end and stream.unreceived):
                # Section 8.1.1.
                self._end_by_fault(stream, H2Code.PROTOCOL_ERROR, "content-length is not the size", now, events)
                return
        if is_end:
            stream.state = ON_RECEIVED_END[state]
        elif not size and not payload:
            self._floods.spend(CHEAP, now, "empty DATA frames")
        events.append(DataArrives(stream, payload, size, is_end))

    def _on_headers(
        self, flags: int, stream_id: int, payload: memoryview, size: int, now: float, events: list[Event[T, C]]
    ) -> None:
        if not stream_id & 1:
            # Section 5.1.1; stream 0 has no requests.
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
        depends_on_itself = False
        if flags & (PADDED | PRIORITY_FIELDS):
            payload, depends_on_itself = _without_extras(flags, stream_id, payload)
        if not flags & END_HEADERS:
            if size > MAX_BLOCK_BYTES:
                raise _large_block()
            self._block = _Block(stream_id, flags, bytes(payload))
            return
        self._on_block(flags, stream_id, bytes(payload), now, events, depends_on_itself=depends_on_itself)

    def _on_continuation(
        self, flags: int, stream_id: int, payload: memoryview, size: int, now: float, events: list[Event[T, C]]
    ) -> None:
        block = self._block
        if block is None or block.stream_id != stream_id:
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, "CONTINUATION without a header block of its stream")
        block.continuations += 1
        block.size += size
        if block.size > MAX_BLOCK_BYTES or block.continuations > MAX_CONTINUATIONS:
            raise _large_block()
        block.pieces.append(bytes(payload))
        if flags & END_HEADERS:
            self._block = None
            self._on_block(block.flags, stream_id, b"".join(block.pieces), now, events)

    def _on_block(
        self,
        flags: int,
        stream_id: int,
        block: bytes,
        now: float,
        events: list[Event[T, C]],
        *,
        depends_on_itself: bool = False,
    ) -> None:
        if len(block) > MAX_BLOCK_BYTES:
            raise _large_block()
        if stream_id <= self.last_stream_id:
            self._on_trailers(flags, stream_id, block, now, events)
            return
        self.last_stream_id = stream_id
        if self._final_stream_id is not None:
            # Section 6.8: the client has been told that this request is not processed, and sends it elsewhere.
            self._blocks.skip(block)
            return
        if len(self.streams) >= self._limits.max_streams:
            # Section 5.1.2.
            self._blocks.skip(block)
            self._refuse(stream_id, H2Code.REFUSED_STREAM, now, "requests above the limit of concurrent ones")
            return
        is_end = flags & END_STREAM != 0
        try:
            head, content_length = self._blocks.request(block)
            if depends_on_itself:
                raise StreamFault(H2Code.PROTOCOL_ERROR, "a stream that depends on itself")
            if is_end and content_length:
                raise StreamFault(H2Code.PROTOCOL_ERROR, "content-length without DATA")
        except StreamFault as fault:
            self._refuse(stream_id, fault.code, now, "malformed requests")
            return
        stream: Stream[C] = Stream(stream_id, self._limits.window, self._client_window, content_length)
        if is_end:
            stream.state = HALF_CLOSED_REMOTE
        self.streams[stream_id] = stream
        events.append(RequestBegins(stream, head, is_end))

    def _on_trailers(self, flags: int, stream_id: int, block: bytes, now: float, events: list[Event[T, C]]) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            self._blocks.skip(block)
            if self._closed.get(stream_id) is None:
                # Section 5.1.1: numbers only grow.
                raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"stream {stream_id} begins after a later one")
            self._on_frame_without_stream(stream_id, now, "HEADERS")
            return
        if stream.state is HALF_CLOSED_REMOTE:
            # Before the fields are checked: section 5.1 asks for this code, whatever they are.
            self._blocks.skip(block)
            self._end_by_fault(stream, H2Code.STREAM_CLOSED, "HEADERS after END_STREAM", now, events)
            return
        try:
            self._blocks.trailers(block)
            if not flags & END_STREAM:
                raise StreamFault(H2Code.PROTOCOL_ERROR, "trailers without END_STREAM")
            if stream.unreceived:
                raise StreamFault(H2Code.PROTOCOL_ERROR, "content-length is not the size")
        except StreamFault as fault:
            self._end_by_fault(stream, fault.code, fault.text, now, events)
            return
        stream.state = ON_RECEIVED_END[stream.state]
        events.append(RequestEnds(stream))

    def _on_rst_stream(
        self, _flags: int, stream_id: int, _payload: memoryview, size: int, now: float, events: list[Event[T, C]]
    ) -> None:
        _check_size(size, 4, "RST_STREAM")
        if stream_id > self.last_stream_id or not stream_id:
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"RST_STREAM on the idle stream {stream_id}")
        stream = self.streams.get(stream_id)
        if stream is None:
            self._floods.spend(CHEAP, now, "RST_STREAM frames")
            return
        self._floods.spend(RESET, now, "requests that are reset")
        self._close(stream, Closed.RESET_BY_CLIENT)
        events.append(StreamIsReset(stream, ""))

    def _on_frame_without_stream(self, stream_id: int, now: float, what: str) -> None:
        """DATA, or HEADERS, of an idle or closed stream (section 5.1)."""
        if stream_id > self.last_stream_id or not stream_id & 1:
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"{what} on the idle stream {stream_id}")
        self._floods.spend(CHEAP, now, "frames of closed streams")
        if self._final_stream_id is not None and stream_id > self._final_stream_id:
            return
        if self._closed.get(stream_id) is Closed.RESET_BY_SERVER:
            return
        if what == "HEADERS":
            raise ConnectionFault(H2Code.STREAM_CLOSED, f"HEADERS on the closed stream {stream_id}")
        self.outgoing.append(frames.rst_stream(stream_id, H2Code.STREAM_CLOSED))
        self._closed.add(stream_id, Closed.RESET_BY_SERVER)

    # Frames of the connection.

    def _on_priority(
        self, _flags: int, stream_id: int, payload: memoryview, size: int, now: float, events: list[Event[T, C]]
    ) -> None:
        # Section 5.3.2: the priorities of RFC 7540 are not used.
        self._floods.spend(CHEAP, now, "PRIORITY frames")
        if not stream_id:
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, "PRIORITY on stream 0")
        stream = self.streams.get(stream_id)
        if size != 5:
            fault = StreamFault(H2Code.FRAME_SIZE_ERROR, "PRIORITY whose size is not 5")
        elif _depends_on(payload) == stream_id:
            fault = StreamFault(H2Code.PROTOCOL_ERROR, "a stream that depends on itself")
        else:
            return
        if stream is not None:
            self._end_by_fault(stream, fault.code, fault.text, now, events)
        else:
            self.outgoing.append(frames.rst_stream(stream_id, fault.code))

    def _on_settings(
        self, flags: int, stream_id: int, payload: memoryview, size: int, now: float, events: list[Event[T, C]]
    ) -> None:
        self._floods.spend(CHEAP, now, "SETTINGS frames")
        if stream_id:
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"SETTINGS on stream {stream_id}")
        if size % 6 or (flags & ACK and size):
            raise ConnectionFault(H2Code.FRAME_SIZE_ERROR, f"SETTINGS of {size} bytes")
        if flags & ACK:
            return
        for number, value in frames.unpack_settings(payload):
            self._apply_setting(number, value)
        self.outgoing.append(frames.SETTINGS_ACK)
        self._write_waiting(events)

    def _apply_setting(self, number: int, value: int) -> None:
        # Section 6.5.2. HEADER_TABLE_SIZE does not matter, because nothing that is sent uses the dynamic table.
        match number:
            case Setting.ENABLE_PUSH:
                if value > 1:
                    raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}")
            case Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise ConnectionFault(H2Code.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE is {value}")
                # Section 6.9.2: the windows of open streams change with it, and may become negative.
                change = value - self._client_window
                self._client_window = value
                for stream in self.streams.values():
                    stream.send_window += change
                    if stream.send_window > MAX_WINDOW:
                        raise ConnectionFault(H2Code.FLOW_CONTROL_ERROR, "a window exceeds its maximum")
            case Setting.MAX_FRAME_SIZE:
                if not MIN_MAX_FRAME_SIZE <= value <= MAX_MAX_FRAME_SIZE:
                    raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"MAX_FRAME_SIZE is {value}")
                self._client_frame_bytes = value

    def _on_push_promise(
        self, _flags: int, _id: int, _payload: memoryview, _size: int, _now: float, _events: list[Event[T, C]]
    ) -> None:
        raise ConnectionFault(H2Code.PROTOCOL_ERROR, "PUSH_PROMISE of a client")  # Section 8.4.

    def _on_ping(
        self, flags: int, stream_id: int, payload: memoryview, size: int, now: float, events: list[Event[T, C]]
    ) -> None:
        self._floods.spend(CHEAP, now, "PING frames")
        if stream_id:
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"PING on stream {stream_id}")
        _check_size(size, 8, "PING")
        if not flags & ACK:
            self.outgoing.append(frames.ping(bytes(payload), ack=True))
            events.append(Pinged())
        elif payload == _LAST_PING and self._sent_away and self._final_stream_id is None:
            self._send_final_goaway()

    def _on_goaway(
        self, _flags: int, stream_id: int, _payload: memoryview, size: int, now: float, _events: list[Event[T, C]]
    ) -> None:
        self._floods.spend(CHEAP, now, "GOAWAY frames")
        if stream_id:
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"GOAWAY on stream {stream_id}")
        if size < 8:
            raise ConnectionFault(H2Code.FRAME_SIZE_ERROR, f"GOAWAY of {size} bytes")
        self.is_left = True

    def _on_window_update(
        self, _flags: int, stream_id: int, payload: memoryview, size: int, now: float, events: list[Event[T, C]]
    ) -> None:
        _check_size(size, 4, "WINDOW_UPDATE")
        floods = self._floods
        if floods.paid_updates >= 1:
            floods.paid_updates -= 1
        else:
            floods.spend(CHEAP, now, "WINDOW_UPDATE frames")
        increment = frames.unpack_number(payload)[0] & MAX_WINDOW
        if not stream_id:
            # Sections 6.9 and 6.9.1.
            if not increment:
                raise ConnectionFault(H2Code.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0")
            self._send_window += increment
            if self._send_window > MAX_WINDOW:
                raise ConnectionFault(H2Code.FLOW_CONTROL_ERROR, "a window exceeds its maximum")
        else:
            if stream_id > self.last_stream_id:
                raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"WINDOW_UPDATE on the idle stream {stream_id}")
            stream = self.streams.get(stream_id)
            if stream is None:
                return  # Section 5.1: it may have been sent before the client knew the end.
            if not increment:
                self._end_by_fault(stream, H2Code.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0", now, events)
                return
            stream.send_window += increment
            if stream.send_window > MAX_WINDOW:
                self._end_by_fault(stream, H2Code.FLOW_CONTROL_ERROR, "a window exceeds its maximum", now, events)
                return
        self._write_waiting(events)

    # Credit for received DATA.

    def credit(self, stream: Stream[C], size: int) -> None:
        """The application has used `size` bytes of a stream: its client may send as many more."""
        if stream.state is not OPEN and stream.state is not HALF_CLOSED_LOCAL:
            return
        stream.uncredited += size
        if stream.uncredited * 2 >= self._limits.window:
            self._grant(stream, stream.uncredited)

    def expect(self, stream: Stream[C], size: int) -> None:
        """The client is to send `size` more bytes that the application will use in any case: open the window for
        all of them, so that the client does not wait for credit."""
        if size > LARGE_REQUEST_BYTES and self.reader.max_frame_bytes < self._limits.large_frame_bytes:
            # Not at the start: small requests need no large frames, and the first ones of a connection are small.
            self.reader.max_frame_bytes = self._limits.large_frame_bytes
            self.outgoing.append(frames.settings({Setting.MAX_FRAME_SIZE: self._limits.large_frame_bytes}))
        missing = min(size, MAX_WINDOW) - stream.receive_window
        if missing > 0 and stream.state is OPEN:
            self._grant(stream, missing)

    def _grant(self, stream: Stream[C], size: int) -> None:
        stream.uncredited -= size
        stream.receive_window += size
        self.outgoing.append(frames.window_update(stream.id, size))

    # Answers.

    def answer(self, stream: Stream[C], head: bytes, data: Sequence[Buffer], size: int, trailers: bytes) -> None:
        """Send a whole answer: header block, `size` bytes of `data`, and the block of the trailers."""
        if stream.state is CLOSED:
            return
        if size <= _JOIN_BELOW and size <= stream.send_window and size <= self._send_window and self.room > 0:
            # The usual case, in one write.
            stream.send_window -= size
            self._send_window -= size
            self.room -= size
            self._floods.paid_updates += WINDOW_UPDATES_PER_DATA
            self.has_sent = True
            stream_id = stream.id
            self.outgoing += (
                pack_head(len(head) << 8 | _HEADERS_HEAD, END_HEADERS, stream_id),
                head,
                pack_head(size << 8 | _DATA_HEAD, 0, stream_id),
                *data,
                pack_head(len(trailers) << 8 | _HEADERS_HEAD, END_HEADERS | END_STREAM, stream_id),
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
        self.outgoing.append(pack_head(len(head) << 8 | _HEADERS_HEAD, flags, stream.id) + head)
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
        self.unsent_bytes += size
        if is_first and size:
            self._write_data(stream)
            if stream.unsent_bytes:
                self._waiting.append(stream)

    def finish(self, stream: Stream[C], trailers: bytes = b"") -> None:
        """The answer is complete: send its end after all DATA, with the block of its trailers if it has any."""
        if stream.state is CLOSED:
            return
        stream.trailers = trailers
        if not stream.unsent_bytes:
            self._write_end(stream, trailers)

    def _write_end(self, stream: Stream[C], trailers: bytes) -> None:
        if trailers:
            self.respond(stream, trailers, is_end=True)
        else:
            self.outgoing.append(pack_head(_DATA_HEAD, END_STREAM, stream.id))
            self._on_sent_end(stream)

    def reset(self, stream: Stream[C], code: H2Code) -> None:
        """End a stream without a complete answer."""
        if stream.state is CLOSED:
            return
        self.outgoing.append(frames.rst_stream(stream.id, code))
        self._close(stream, Closed.RESET_BY_SERVER)

    def write_waiting(self) -> list[Event[T, C]]:
        """The transport has `room` again. Returns the streams whose DATA is written."""
        events: list[Event[T, C]] = []
        self._write_waiting(events)
        return events

    def _write_waiting(self, events: list[Event[T, C]]) -> None:
        """Write DATA that has room now: one frame of each stream in turn."""
        waiting = self._waiting
        blocked: list[Stream[C]] = []
        while waiting and self.room > 0 and self._send_window > 0:
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
                events.append(StreamHasRoom(stream))
        waiting.extend(blocked)

    def _write_data(self, stream: Stream[C], frames_left: float = inf) -> None:
        unsent = stream.unsent
        while frames_left > 0 and unsent:
            size = min(stream.unsent_bytes, self._client_frame_bytes, stream.send_window, self._send_window, self.room)
            if size <= 0:
                return
            size = int(size)
            frames_left -= 1
            self.has_sent = True
            stream.send_window -= size
            self._send_window -= size
            stream.unsent_bytes -= size
            stream.sent_bytes += size
            self.unsent_bytes -= size
            self.room -= size
            self._floods.paid_updates += WINDOW_UPDATES_PER_DATA
            self.outgoing.append(pack_head(size << 8 | _DATA_HEAD, 0, stream.id))
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

    def take_outgoing(self) -> list[Buffer]:
        """What is to be written, in order."""
        outgoing, self.outgoing = self.outgoing, []
        return outgoing

    def ping(self) -> None:
        """Send a ping. Whatever arrives next shows that the client lives."""
        self.outgoing.append(frames.ping(_PING))

    # Ends.

    def send_away(self, text: str = "") -> None:
        """Ask the client to begin further requests on another connection; those that it still begins are served."""
        if not self._sent_away and not self.is_failed:
            self._sent_away = True
            self.outgoing.append(frames.goaway(MAX_STREAM_ID, H2Code.NO_ERROR, text))

    def shut_down(self, text: str = "") -> None:
        """Serve the requests that have begun and no others (section 6.8).

        The client's answer to a ping shows that it has seen the first GOAWAY, and that no request is on its way. Then a
        second GOAWAY says which was the last: the client knows that no other was processed.
        """
        if self.is_failed or self._final_stream_id is not None:
            return
        self.send_away(text)
        self.outgoing.append(frames.ping(_LAST_PING))

    def send_final_goaway(self) -> None:
        """Say which request was the last, without waiting for the answer to the ping."""
        if not self.is_failed and self._final_stream_id is None:
            self._send_final_goaway()

    def _send_final_goaway(self) -> None:
        self._sent_away = True
        self._final_stream_id = self.last_stream_id
        self.outgoing.append(frames.goaway(self.last_stream_id, H2Code.NO_ERROR))

    @property
    def is_over(self) -> bool:
        """Whether the connection can be closed: no request is in progress, and no other will be processed."""
        return not self.streams and (self.is_failed or self.is_left or self._final_stream_id is not None)

    def fail(self, fault: ConnectionFault) -> list[Stream[C]]:
        """End the connection with GOAWAY. Input is ignored from now on. Returns the streams that were open."""
        self.is_failed = True
        # A clear text helps the operator of the client; gRPC's clients show it.
        self.outgoing.append(frames.goaway(self.last_stream_id, fault.code, fault.text))
        self._waiting.clear()
        streams = list(self.streams.values())
        for stream in streams:
            self._drop(stream)
        self.streams.clear()
        return streams

    def _refuse(self, stream_id: int, code: H2Code, now: float, what: str) -> None:
        """Reset a stream that has no record."""
        self._floods.spend(RESET, now, what)
        self.outgoing.append(frames.rst_stream(stream_id, code))
        self._closed.add(stream_id, Closed.RESET_BY_SERVER)

    def _end_by_fault(self, stream: Stream[C], code: H2Code, text: str, now: float, events: list[Event[T, C]]) -> None:
        self._floods.spend(RESET, now, "faults of streams")
        self.reset(stream, code)
        events.append(StreamIsReset(stream, text))

    def _on_sent_end(self, stream: Stream[C]) -> None:
        stream.state = ON_SENT_END[stream.state]
        if stream.state is CLOSED:
            del self.streams[stream.id]
            self._closed.add(stream.id, Closed.ENDED)
        else:
            # Section 8.1: the answer is complete, and the rest of the request is not read.
            self.reset(stream, H2Code.NO_ERROR)

    def _close(self, stream: Stream[C], reason: Closed) -> None:
        self._drop(stream)
        del self.streams[stream.id]
        self._closed.add(stream.id, reason)

    def _drop(self, stream: Stream[C]) -> None:
        self.unsent_bytes -= stream.unsent_bytes
        stream.state = CLOSED
        stream.unsent = None
        stream.unsent_bytes = 0
        stream.trailers = None


def _check_size(size: int, expected: int, name: str) -> None:
    if size != expected:
        raise ConnectionFault(H2Code.FRAME_SIZE_ERROR, f"{name} of {size} bytes, {expected} are right")


def _large_block() -> ConnectionFault:
    return ConnectionFault(H2Code.ENHANCE_YOUR_CALM, f"a header block of more than {MAX_BLOCK_BYTES} bytes")


def _depends_on(payload: memoryview) -> int:
    return int(frames.unpack_number(payload)[0]) & MAX_STREAM_ID


def _without_extras(flags: int, stream_id: int, payload: memoryview) -> tuple[memoryview, bool]:
    """The block of a HEADERS frame without padding and priority (section 6.2), and whether the stream depends on
    itself."""
    at, end = 0, len(payload)
    if flags & PADDED:
        if not end:
            raise ConnectionFault(H2Code.FRAME_SIZE_ERROR, "a padded HEADERS frame without its length")
        end -= payload[0]
        at = 1
    depends_on_itself = False
    if flags & PRIORITY_FIELDS:
        if end - at < 5:
            raise ConnectionFault(H2Code.FRAME_SIZE_ERROR, "a HEADERS frame without its priority")
        depends_on_itself = _depends_on(payload[at : at + 4]) == stream_id
        at += 5
    if at > end:
        raise ConnectionFault(H2Code.PROTOCOL_ERROR, "a HEADERS frame with more padding than payload")
    return payload[at:end], depends_on_itself


_Handler = Callable[[Http2Connection[Any, Any], int, int, memoryview, int, float, list[Any]], None]
_HANDLERS: tuple[_Handler, ...] = (
    Http2Connection._on_data,
    Http2Connection._on_headers,
    Http2Connection._on_priority,
    Http2Connection._on_rst_stream,
    Http2Connection._on_settings,
    Http2Connection._on_push_promise,
    Http2Connection._on_ping,
    Http2Connection._on_goaway,
    Http2Connection._on_window_update,
    Http2Connection._on_continuation,
)
"""By frame type."""
