"""The server's side of one HTTP/2 connection, without I/O: bytes in, events out (RFC 9113).

The caller passes what it receives to `receive` and handles the events in order. It answers by `out`, gives `credit` for
the DATA that it has used, and after each of its turns writes what `out.take` returns. Each rule names its section. All
counts are bounded by `Http2Limits`, and frames that cost work and bring no request forward by `floods`.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from halimede.core.wire.http2 import frames
from halimede.core.wire.http2.blocks import Block, BlockReader, depends_on
from halimede.core.wire.http2.codes import (
    ACK,
    END_STREAM,
    MAX_MAX_FRAME_SIZE,
    MAX_STREAM_ID,
    MAX_WINDOW,
    MIN_MAX_FRAME_SIZE,
    ConnectionFault,
    FrameType,
    H2Code,
    Setting,
    StreamFault,
)
from halimede.core.wire.http2.credit import Credit
from halimede.core.wire.http2.events import (
    ConnectionFails,
    DataArrives,
    Event,
    Pinged,
    RequestBegins,
    RequestEnds,
    StreamIsReset,
)
from halimede.core.wire.http2.fields import HeaderBlocks, RequestFields
from halimede.core.wire.http2.floods import CHEAP, RESET, FloodGuard
from halimede.core.wire.http2.frame_reader import FrameReader
from halimede.core.wire.http2.limits import RECENTLY_CLOSED, Http2Limits
from halimede.core.wire.http2.sender import Sender
from halimede.core.wire.http2.streams import HALF_CLOSED_REMOTE, ON_RECEIVED_END, Closed, Stream, StreamTable

T = TypeVar("T")
C = TypeVar("C")

_LAST_PING, _SECOND_PING = b"shutdown", b"lastcall"

MAX_FRAMES_AT_ONCE = 1000
"""Small frames take microseconds each: these take a few milliseconds."""


class Http2Connection(Generic[T, C]):
    """One client. T is the application's value of a request's fields, C its record of a stream.

    `table` has the streams, `out` is the sending side, `credit` opens windows to the client. `is_greeted`: the client
    has sent its preface and SETTINGS. After a fault `is_failed`, and input is ignored.
    """

    __slots__ = ("_block", "_fields", "_final_stream_id", "_floods", "_limits", "_sent_away", "begun", "credit",
                 "frames", "is_failed", "is_greeted", "is_left", "out", "reader", "table")  # fmt: skip

    def __init__(self, interpret: Callable[[RequestFields], T], limits: Http2Limits, now: float) -> None:
        self._limits = limits
        self._floods = FloodGuard(now)
        self._fields: HeaderBlocks[T] = HeaderBlocks(interpret)
        self._block = BlockReader()
        self.reader = FrameReader(MIN_MAX_FRAME_SIZE)
        self.table: StreamTable[C] = StreamTable(RECENTLY_CLOSED)
        self.out: Sender[C] = Sender(self.table, self._floods)
        self.out.outgoing.append(
            frames.settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    Setting.INITIAL_WINDOW_SIZE: limits.window,
                    Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
                }
            )
        )
        self.credit: Credit[C] = Credit(limits, self.reader, self.out)
        self.is_greeted = False
        self.is_failed = False
        self.is_left = False
        """The client has sent GOAWAY: it begins no further requests."""
        self._sent_away = False
        self.frames = 0
        """How many the last `receive` has processed."""
        self.begun = 0
        """How many header blocks of new requests have come."""
        self._final_stream_id: int | None = None

    def receive(self, data: memoryview, now: float, most_requests: int = MAX_FRAMES_AT_ONCE) -> list[Event[T, C]]:
        """Process received bytes. Views of them in the events are valid until the next call.

        The bytes after `most_requests` new requests are kept, and the reader `has_unread`: call again, with no bytes.
        """
        events: list[Event[T, C]] = []
        if self.is_failed:
            return events
        last = self.begun + most_requests
        count = 0
        try:
            for kind, flags, stream_id, payload, size in self.reader.read(data):
                if self._block.is_within and kind != FrameType.CONTINUATION:
                    raise ConnectionFault(H2Code.PROTOCOL_ERROR, "a header block is interrupted by another frame")
                if not self.is_greeted:
                    self._check_greeting(kind, flags)
                if kind < len(_HANDLERS):
                    _HANDLERS[kind](self, flags, stream_id, payload, size, now, events)
                else:
                    # Section 5.5: ignored.
                    self._floods.spend(CHEAP, now, "frames of unknown types")
                count += 1
                if self.begun >= last or count == MAX_FRAMES_AT_ONCE:
                    self.reader.stop()
        except ConnectionFault as fault:
            events.append(ConnectionFails(fault, self.fail(fault)))
        self.frames = count
        return events

    def received_directly(self, piece: memoryview, now: float) -> list[Event[T, C]]:
        """As `receive`, for a piece of the DATA frame in receipt (`reader.data_left`) that is in its place already."""
        events: list[Event[T, C]] = []
        _, flags, stream_id, payload, size = self.reader.received_directly(piece)
        try:
            self._on_data(flags, stream_id, payload, size, now, events)
        except ConnectionFault as fault:
            events.append(ConnectionFails(fault, self.fail(fault)))
        return events

    def _check_greeting(self, kind: int, flags: int) -> None:
        # Section 3.4: the first frame is SETTINGS, and not an acknowledgement.
        if kind != FrameType.SETTINGS or flags & ACK:
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        self.is_greeted = True

    @property
    def is_within(self) -> bool:
        """Whether the client has begun a frame or a header block, which is incomplete. DATA does not count."""
        reader = self.reader
        return self._block.is_within or (reader.is_within and not reader.data_left)

    @property
    def kept_bytes(self) -> int:
        """What is kept of frames and header blocks that are incomplete, or wait."""
        return self.reader.kept_bytes + self._block.kept_bytes

    # Frames of requests.

    def _on_data(
        self, flags: int, stream_id: int, payload: memoryview, size: int, now: float, events: list[Event[T, C]]
    ) -> None:
        if size:
            self.credit.received(size)
        stream = self.table.open.get(stream_id)
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
        self, flags: int, stream_id: int, payload: memoryview, _size: int, now: float, events: list[Event[T, C]]
    ) -> None:
        block = self._block.headers(flags, stream_id, payload)
        if block is not None:
            self._on_block(block, now, events)
            if self._fields.unusual_fields:
                self._charge_fields(now)

    def _on_continuation(
        self, flags: int, stream_id: int, payload: memoryview, _size: int, now: float, events: list[Event[T, C]]
    ) -> None:
        block = self._block.continuation(flags, stream_id, payload)
        if block is not None:
            self._on_block(block, now, events)
            if self._fields.unusual_fields:
                self._charge_fields(now)

    def _charge_fields(self, now: float) -> None:
        # A field takes microseconds to decode, and two bytes.
        count, self._fields.unusual_fields = self._fields.unusual_fields, 0
        self._floods.spend(count * CHEAP, now, "header fields")

    def _on_block(self, block: Block, now: float, events: list[Event[T, C]]) -> None:
        table, stream_id = self.table, block.stream_id
        if stream_id <= table.last_id:
            self._on_trailers(block, now, events)
            return
        table.last_id = stream_id
        self.begun += 1
        if self._final_stream_id is not None:
            # Section 6.8: the client has been told that this request is not processed, and sends it elsewhere.
            self._fields.skip(block.content)
            self._floods.spend(CHEAP, now, "requests after the last one that is served")
            return
        if len(table.open) >= self._limits.max_streams:
            # Section 5.1.2.
            self._fields.skip(block.content)
            self._refuse(stream_id, H2Code.REFUSED_STREAM, now, "requests above the limit of concurrent ones")
            return
        try:
            head, content_length = self._fields.request(block.content)
            if block.depends_on_itself:
                raise StreamFault(H2Code.PROTOCOL_ERROR, "a stream that depends on itself")
            if block.is_end and content_length:
                raise StreamFault(H2Code.PROTOCOL_ERROR, "content-length without DATA")
        except StreamFault as fault:
            self._refuse(stream_id, fault.code, now, "malformed requests")
            return
        stream: Stream[C] = Stream(stream_id, self._limits.window, self.out.initial_window, content_length)
        if block.is_end:
            stream.state = HALF_CLOSED_REMOTE
        table.open[stream_id] = stream
        events.append(RequestBegins(stream, head, block.is_end))

    def _on_trailers(self, block: Block, now: float, events: list[Event[T, C]]) -> None:
        stream_id = block.stream_id
        stream = self.table.open.get(stream_id)
        if stream is None:
            self._fields.skip(block.content)
            if self.table.why_closed(stream_id) is None and not self._is_unserved(stream_id):
                # Section 5.1.1: numbers only grow.
                raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"stream {stream_id} begins after a later one")
            self._on_frame_without_stream(stream_id, now, "HEADERS")
            return
        if stream.state is HALF_CLOSED_REMOTE:
            # Before the fields are checked: section 5.1 asks for this code, whatever they are.
            self._fields.skip(block.content)
            self._end_by_fault(stream, H2Code.STREAM_CLOSED, "HEADERS after END_STREAM", now, events)
            return
        try:
            self._fields.trailers(block.content)
            if not block.is_end:
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
        if self.table.is_idle(stream_id):
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"RST_STREAM on the idle stream {stream_id}")
        stream = self.table.open.get(stream_id)
        if stream is None:
            self._floods.spend(CHEAP, now, "RST_STREAM frames")
            return
        self._floods.spend(RESET, now, "requests that are reset")
        self.table.close(stream, Closed.RESET_BY_CLIENT)
        events.append(StreamIsReset(stream, ""))

    def _on_frame_without_stream(self, stream_id: int, now: float, what: str) -> None:
        """DATA, or HEADERS, of an idle or closed stream (section 5.1)."""
        if self.table.is_idle(stream_id):
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"{what} on the idle stream {stream_id}")
        self._floods.spend(CHEAP, now, "frames of closed streams")
        if self._is_unserved(stream_id):
            return
        if self.table.why_closed(stream_id) is Closed.RESET_BY_SERVER:
            return
        if what == "HEADERS":
            raise ConnectionFault(H2Code.STREAM_CLOSED, f"HEADERS on the closed stream {stream_id}")
        self.out.outgoing.append(frames.rst_stream(stream_id, H2Code.STREAM_CLOSED))
        self.table.remember(stream_id, Closed.RESET_BY_SERVER)

    def _is_unserved(self, stream_id: int) -> bool:
        """Whether the client has been told that this stream is not processed."""
        return self._final_stream_id is not None and stream_id > self._final_stream_id

    # Frames of the connection.

    def _on_priority(
        self, _flags: int, stream_id: int, payload: memoryview, size: int, now: float, events: list[Event[T, C]]
    ) -> None:
        # Section 5.3.2: the priorities of RFC 7540 are not used.
        self._floods.spend(CHEAP, now, "PRIORITY frames")
        if not stream_id:
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, "PRIORITY on stream 0")
        stream = self.table.open.get(stream_id)
        if size != 5:
            fault = StreamFault(H2Code.FRAME_SIZE_ERROR, "PRIORITY whose size is not 5")
        elif depends_on(payload) == stream_id:
            fault = StreamFault(H2Code.PROTOCOL_ERROR, "a stream that depends on itself")
        else:
            return
        if stream is not None:
            self._end_by_fault(stream, fault.code, fault.text, now, events)
        elif self.table.is_idle(stream_id):
            # Section 6.4: an idle stream cannot be reset.
            raise ConnectionFault(fault.code, fault.text)
        else:
            self.out.outgoing.append(frames.rst_stream(stream_id, fault.code))

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
        self.out.outgoing.append(frames.SETTINGS_ACK)
        events += self.out.write_waiting()

    def _apply_setting(self, number: int, value: int) -> None:
        # Section 6.5.2. HEADER_TABLE_SIZE does not matter, because nothing that is sent uses the dynamic table.
        match number:
            case Setting.ENABLE_PUSH:
                if value > 1:
                    raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}")
            case Setting.INITIAL_WINDOW_SIZE:
                self.out.set_initial_window(value)
            case Setting.MAX_FRAME_SIZE:
                if not MIN_MAX_FRAME_SIZE <= value <= MAX_MAX_FRAME_SIZE:
                    raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"MAX_FRAME_SIZE is {value}")
                self.out.set_frame_bytes(value)

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
            self.out.outgoing.append(frames.ping(bytes(payload), ack=True))
            events.append(Pinged())
        elif self._sent_away and self._final_stream_id is None:
            if payload == _LAST_PING:
                self.out.outgoing.append(frames.ping(_SECOND_PING))
            elif payload == _SECOND_PING:
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
        self._floods.window_update(now)
        increment = frames.unpack_number(payload)[0] & MAX_WINDOW
        if not stream_id:
            # Sections 6.9 and 6.9.1.
            if not increment:
                raise ConnectionFault(H2Code.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0")
            self.out.widen(increment)
        else:
            if self.table.is_idle(stream_id):
                raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"WINDOW_UPDATE on the idle stream {stream_id}")
            stream = self.table.open.get(stream_id)
            if stream is None:
                return  # Section 5.1: it may have been sent before the client knew the end.
            if not increment:
                self._end_by_fault(stream, H2Code.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0", now, events)
                return
            stream.send_window += increment
            if stream.send_window > MAX_WINDOW:
                self._end_by_fault(stream, H2Code.FLOW_CONTROL_ERROR, "a window exceeds its maximum", now, events)
                return
        events += self.out.write_waiting()

    # Ends.

    def send_away(self, text: str = "") -> None:
        """Ask the client to begin further requests on another connection; those that it still begins are served."""
        if not self._sent_away and not self.is_failed:
            self._sent_away = True
            self.out.outgoing.append(frames.goaway(MAX_STREAM_ID, H2Code.NO_ERROR, text))

    def shut_down(self, text: str = "") -> None:
        """Serve the requests that have begun and no others (section 6.8).

        The client's answer to a ping shows that it has seen the first GOAWAY. gRPC's clients put that answer before the
        requests that they had begun by then; the answer to a second ping shows that those have arrived too. Then a
        second GOAWAY says which was the last: the client knows that no other was processed.
        """
        if self.is_failed or self._final_stream_id is not None:
            return
        self.send_away(text)
        self.out.outgoing.append(frames.ping(_LAST_PING))

    def send_final_goaway(self) -> None:
        """Say which request was the last, without waiting for the answer to the ping."""
        if not self.is_failed and self._final_stream_id is None:
            self._send_final_goaway()

    def _send_final_goaway(self) -> None:
        self._sent_away = True
        self._final_stream_id = self.table.last_id
        self.out.outgoing.append(frames.goaway(self.table.last_id, H2Code.NO_ERROR))

    @property
    def is_over(self) -> bool:
        """Whether the connection can be closed: no request is in progress, and no other will be processed."""
        return not self.table.open and (self.is_failed or self.is_left or self._final_stream_id is not None)

    def fail(self, fault: ConnectionFault) -> list[Stream[C]]:
        """End the connection with GOAWAY. Input is ignored from now on. Returns the streams that were open."""
        self.is_failed = True
        # Section 6.8: the number of a GOAWAY is not above that of the one before.
        last_stream_id = self.table.last_id if self._final_stream_id is None else self._final_stream_id
        # A clear text helps the operator of the client; gRPC's clients show it.
        self.out.outgoing.append(frames.goaway(last_stream_id, fault.code, fault.text))
        self.out.forget_waiting()
        return self.table.close_all()

    def _refuse(self, stream_id: int, code: H2Code, now: float, what: str) -> None:
        """Reset a stream that has no record."""
        self._floods.spend(RESET, now, what)
        self.out.outgoing.append(frames.rst_stream(stream_id, code))
        self.table.remember(stream_id, Closed.RESET_BY_SERVER)

    def _end_by_fault(self, stream: Stream[C], code: H2Code, text: str, now: float, events: list[Event[T, C]]) -> None:
        self._floods.spend(RESET, now, "faults of streams")
        self.out.reset(stream, code)
        events.append(StreamIsReset(stream, text))


def _check_size(size: int, expected: int, name: str) -> None:
    if size != expected:
        raise ConnectionFault(H2Code.FRAME_SIZE_ERROR, f"{name} of {size} bytes, {expected} are right")


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
