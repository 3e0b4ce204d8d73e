"""HTTP/2's server side written plainly from RFC 9113: one whole frame at a time, no cache, no pieces, no fast paths.

Tests compare `Http2Connection` with it. It leaves out the limits on floods, on the size of header blocks, and on how
many closed streams are remembered, so a test must stay below them. Texts of faults are not part of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from struct import pack, unpack

from hpack import Decoder, HPACKError

from halimede.core.wire.http2.codes import H2Code
from halimede.core.wire.http2.limits import Http2Limits
from support.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    PADDED,
    PING,
    PRIORITY_FIELDS,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Frame,
)
from support.http2_model_sender import ModelSender, ModelStream

MAX_WINDOW = 2**31 - 1


class ConnectionEnds(Exception):
    """A connection error of this code (section 5.4.1)."""


class StreamEnds(Exception):
    """A stream error of this code (section 5.4.2)."""


@dataclass
class Http2Model:
    limits: Http2Limits
    events: list[tuple[object, ...]] = field(default_factory=list)
    last: int = 0
    final: int | None = None
    is_sent_away: bool = False
    is_greeted: bool = False
    is_failed: bool = False
    is_left: bool = False
    block: tuple[int, int, bytes, bool] | None = None
    decoder: Decoder = field(default_factory=Decoder)
    max_frame_in: int = 16_384
    credit: int = 0

    def __post_init__(self) -> None:
        self.out = ModelSender(self.limits.window)
        self.streams, self.closed, self.send = self.out.streams, self.out.closed, self.out.send

    def receive(self, frame: Frame) -> None:
        if self.is_failed:
            return
        try:
            try:
                self._frame(frame)
            except StreamEnds as error:
                self.out.reset(frame.stream, error.args[0])
                self.events.append(("reset", frame.stream, True))
        except ConnectionEnds as error:
            self.is_failed = True
            self.send(GOAWAY, 0, 0, pack(">II", self.last if self.final is None else self.final, error.args[0]))
            self.events.append(("fails", error.args[0], list(self.streams)))
            self.streams.clear()
            self.out.waiting.clear()

    def _frame(self, frame: Frame) -> None:
        if len(frame.payload) > self.max_frame_in:
            raise ConnectionEnds(H2Code.FRAME_SIZE_ERROR)  # 4.2
        if frame.kind == DATA:
            _unpadded(frame)
        if self.block is not None and frame.kind != CONTINUATION:
            raise ConnectionEnds(H2Code.PROTOCOL_ERROR)  # 6.10
        if not self.is_greeted and (frame.kind != SETTINGS or frame.flags & ACK):
            raise ConnectionEnds(H2Code.PROTOCOL_ERROR)  # 3.4
        self.is_greeted = True
        handlers: list[Callable[[Frame], None]] = [
            *(self._data, self._headers, self._priority, self._rst_stream, self._settings),
            *(self._push_promise, self._ping, self._goaway, self._window_update, self._continuation),
        ]
        if frame.kind < len(handlers):
            handlers[frame.kind](frame)

    def _is_idle(self, stream: int) -> bool:
        return stream % 2 == 0 or stream > self.last

    def _data(self, frame: Frame) -> None:
        content, size, is_end = _unpadded(frame), len(frame.payload), bool(frame.flags & END_STREAM)
        self.credit += size
        if self.credit * 2 >= self.limits.connection_window:
            self.send(WINDOW_UPDATE, 0, 0, pack(">I", self.credit))
            self.credit = 0
        stream = self.streams.get(frame.stream)
        if stream is None:
            self._late(frame)
            return
        if not stream.is_receiving:
            raise StreamEnds(H2Code.STREAM_CLOSED)  # 5.1
        stream.window_in -= size
        if stream.window_in < 0:
            raise StreamEnds(H2Code.FLOW_CONTROL_ERROR)  # 6.9.1
        if stream.left is not None:
            stream.left -= len(content)
            if stream.left < 0 or (is_end and stream.left):
                raise StreamEnds(H2Code.PROTOCOL_ERROR)  # 8.1.1
        stream.is_receiving = not is_end
        self.events.append(("data", stream.id, content, size, is_end))

    def _late(self, frame: Frame) -> None:
        """DATA or HEADERS of a stream that is not open (5.1)."""
        if self._is_idle(frame.stream):
            raise ConnectionEnds(H2Code.PROTOCOL_ERROR)
        is_unserved = self.final is not None and frame.stream > self.final
        if is_unserved or self.closed.get(frame.stream) == "server":
            return
        if frame.kind != DATA:
            is_known = frame.stream in self.closed
            raise ConnectionEnds(H2Code.STREAM_CLOSED if is_known else H2Code.PROTOCOL_ERROR)  # 5.1, 5.1.1
        self.send(RST_STREAM, 0, frame.stream, pack(">I", H2Code.STREAM_CLOSED))
        self.closed[frame.stream] = "server"

    def _headers(self, frame: Frame) -> None:
        if frame.stream % 2 == 0:
            raise ConnectionEnds(H2Code.PROTOCOL_ERROR)  # 5.1.1
        payload, is_on_itself = _unpadded(frame), False
        if frame.flags & PRIORITY_FIELDS:
            if len(payload) < 5:
                raise ConnectionEnds(H2Code.FRAME_SIZE_ERROR)  # 4.2
            is_on_itself = _number(payload[:4]) == frame.stream
            payload = payload[5:]
        self.block = (frame.stream, frame.flags, payload, is_on_itself)
        if frame.flags & END_HEADERS:
            self._whole_block(frame)

    def _continuation(self, frame: Frame) -> None:
        if self.block is None or self.block[0] != frame.stream:
            raise ConnectionEnds(H2Code.PROTOCOL_ERROR)  # 6.10
        stream, flags, content, is_on_itself = self.block
        self.block = (stream, flags, content + frame.payload, is_on_itself)
        if frame.flags & END_HEADERS:
            self._whole_block(frame)

    def _whole_block(self, frame: Frame) -> None:
        assert self.block is not None
        number, flags, content, is_on_itself = self.block
        self.block = None
        is_end, is_new = bool(flags & END_STREAM), number > self.last
        self.last = max(self.last, number)
        try:
            fields = [(bytes(name), bytes(value)) for name, value in self.decoder.decode(content, raw=True)]
        except HPACKError:
            raise ConnectionEnds(H2Code.COMPRESSION_ERROR) from None  # 4.3
        if not is_new:
            self._trailers(frame, fields, is_end)
            return
        if self.final is not None:
            return  # 6.8
        length = next((int(value) for name, value in fields if name == b"content-length"), None)
        if len(self.streams) >= self.limits.max_streams:
            self._refuse(number, H2Code.REFUSED_STREAM)  # 5.1.2
        elif not _is_request(fields) or is_on_itself or (is_end and length):
            self._refuse(number, H2Code.PROTOCOL_ERROR)  # 8.1.1
        else:
            stream = ModelStream(number, self.limits.window, self.out.initial_window_out, length, not is_end)
            self.streams[number] = stream
            self.events.append(("begins", number, dict(fields)[b":path"].decode(), is_end))

    def _refuse(self, number: int, code: H2Code) -> None:
        self.send(RST_STREAM, 0, number, pack(">I", code))
        self.closed[number] = "server"

    def _trailers(self, frame: Frame, fields: list[tuple[bytes, bytes]], is_end: bool) -> None:
        stream = self.streams.get(frame.stream)
        if stream is None:
            self._late(frame)
            return
        if not stream.is_receiving:
            raise StreamEnds(H2Code.STREAM_CLOSED)  # 5.1
        if any(name.startswith(b":") or name != name.lower() or name == b"connection" for name, _ in fields):
            raise StreamEnds(H2Code.PROTOCOL_ERROR)  # 8.1
        if not is_end or stream.left:
            raise StreamEnds(H2Code.PROTOCOL_ERROR)  # 8.1, 8.1.1
        stream.is_receiving = False
        self.events.append(("ends", stream.id))

    def _priority(self, frame: Frame) -> None:
        if frame.stream == 0:
            raise ConnectionEnds(H2Code.PROTOCOL_ERROR)  # 6.3
        if len(frame.payload) != 5:
            code = H2Code.FRAME_SIZE_ERROR  # 6.3
        elif _number(frame.payload[:4]) == frame.stream:
            code = H2Code.PROTOCOL_ERROR
        else:
            return
        if frame.stream in self.streams:
            raise StreamEnds(code)
        if self._is_idle(frame.stream):
            raise ConnectionEnds(code)
        self.send(RST_STREAM, 0, frame.stream, pack(">I", code))

    def _rst_stream(self, frame: Frame) -> None:
        if len(frame.payload) != 4:
            raise ConnectionEnds(H2Code.FRAME_SIZE_ERROR)  # 6.4
        if self._is_idle(frame.stream):
            raise ConnectionEnds(H2Code.PROTOCOL_ERROR)  # 6.4
        if self.streams.pop(frame.stream, None) is not None:
            self.closed[frame.stream] = "client"
            self.events.append(("reset", frame.stream, False))

    def _settings(self, frame: Frame) -> None:
        if frame.stream:
            raise ConnectionEnds(H2Code.PROTOCOL_ERROR)  # 6.5
        if len(frame.payload) % 6 or (frame.flags & ACK and frame.payload):
            raise ConnectionEnds(H2Code.FRAME_SIZE_ERROR)  # 6.5
        if frame.flags & ACK:
            return
        for at in range(0, len(frame.payload), 6):
            number, value = unpack(">HI", frame.payload[at : at + 6])
            if (number == 2 and value > 1) or (number == 5 and not 16_384 <= value < 2**24):
                raise ConnectionEnds(H2Code.PROTOCOL_ERROR)  # 6.5.2
            if number == 4:
                for stream in self.streams.values():
                    stream.window_out += value - self.out.initial_window_out  # 6.9.2
                self.out.initial_window_out = value
                if max([value, *(stream.window_out for stream in self.streams.values())]) > MAX_WINDOW:
                    raise ConnectionEnds(H2Code.FLOW_CONTROL_ERROR)  # 6.5.2, 6.9.2
            if number == 5:
                self.out.max_frame_out = value
        self.send(SETTINGS, ACK, 0, b"")
        self.events += self.out.write_waiting()

    def _push_promise(self, _frame: Frame) -> None:
        raise ConnectionEnds(H2Code.PROTOCOL_ERROR)  # 8.4

    def _ping(self, frame: Frame) -> None:
        if frame.stream:
            raise ConnectionEnds(H2Code.PROTOCOL_ERROR)  # 6.7
        if len(frame.payload) != 8:
            raise ConnectionEnds(H2Code.FRAME_SIZE_ERROR)  # 6.7
        if not frame.flags & ACK:
            self.send(PING, ACK, 0, frame.payload)
            self.events.append(("pinged",))
        elif frame.payload == b"shutdown" and self.is_sent_away and self.final is None:
            self.send(PING, 0, 0, b"lastcall")
        elif frame.payload == b"lastcall" and self.is_sent_away:
            self.send_final_goaway()

    def _goaway(self, frame: Frame) -> None:
        if frame.stream:
            raise ConnectionEnds(H2Code.PROTOCOL_ERROR)  # 6.8
        if len(frame.payload) < 8:
            raise ConnectionEnds(H2Code.FRAME_SIZE_ERROR)  # 4.2
        self.is_left = True

    def _window_update(self, frame: Frame) -> None:
        if len(frame.payload) != 4:
            raise ConnectionEnds(H2Code.FRAME_SIZE_ERROR)  # 6.9
        increment = _number(frame.payload)
        if frame.stream == 0:
            self.out.window_out += increment
            if increment == 0 or self.out.window_out > MAX_WINDOW:
                raise ConnectionEnds(H2Code.FLOW_CONTROL_ERROR if increment else H2Code.PROTOCOL_ERROR)  # 6.9, 6.9.1
        elif self._is_idle(frame.stream):
            raise ConnectionEnds(H2Code.PROTOCOL_ERROR)  # 5.1
        elif frame.stream not in self.streams:
            return
        else:
            stream = self.streams[frame.stream]
            stream.window_out += increment
            if increment == 0 or stream.window_out > MAX_WINDOW:
                raise StreamEnds(H2Code.FLOW_CONTROL_ERROR if increment else H2Code.PROTOCOL_ERROR)  # 6.9, 6.9.1
        self.events += self.out.write_waiting()

    # The application's GOAWAY.

    def send_away(self) -> None:
        if not self.is_failed and not self.is_sent_away:
            self.is_sent_away = True
            self.send(GOAWAY, 0, 0, pack(">II", MAX_WINDOW, 0))

    def shut_down(self) -> None:
        if not self.is_failed and self.final is None:
            self.send_away()
            self.send(PING, 0, 0, b"shutdown")

    def send_final_goaway(self) -> None:
        if not self.is_failed and self.final is None:
            self.is_sent_away = True
            self.final = self.last
            self.send(GOAWAY, 0, 0, pack(">II", self.last, 0))


def _number(payload: bytes) -> int:
    """A number after a reserved bit."""
    return int.from_bytes(payload, "big") & MAX_WINDOW


def _unpadded(frame: Frame) -> bytes:
    """The payload of DATA or HEADERS without its padding (6.1)."""
    if not frame.flags & PADDED:
        return frame.payload
    if not frame.payload:
        raise ConnectionEnds(H2Code.FRAME_SIZE_ERROR)  # 4.2
    if frame.payload[0] >= len(frame.payload):
        raise ConnectionEnds(H2Code.PROTOCOL_ERROR)
    return frame.payload[1 : len(frame.payload) - frame.payload[0]]


def _is_request(fields: list[tuple[bytes, bytes]]) -> bool:
    """Section 8.3, for the fields that tests send."""
    pseudo = [name for name, _ in fields if name.startswith(b":")]
    return (
        sorted(pseudo) == [b":method", b":path", b":scheme"]
        and [name for name, _ in fields[:3]] == pseudo
        and all(name == name.lower() and name != b"connection" for name, _ in fields)
    )
