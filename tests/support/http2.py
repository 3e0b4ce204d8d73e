"""Frames of HTTP/2 for pure tests: made from plain values, and read from what a connection sends."""

from collections.abc import Sequence
from struct import pack
from typing import Any

from halimede.core.wire.http2.connection import Http2Connection
from halimede.core.wire.http2.events import (
    ConnectionFails,
    DataArrives,
    Event,
    Pinged,
    RequestBegins,
    RequestEnds,
    StreamHasRoom,
    StreamIsReset,
)
from halimede.core.wire.http2.limits import Http2Limits
from halimede.core.wire.http2.streams import Stream
from support.h2client import PREFACE, Frame, frame

__all__ = ["PREFACE", "REQUEST", "Frame", "Wire", "frame", "frames_of"]

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY_FIELDS = 0x20

Fields = Sequence[tuple[bytes, bytes]]

REQUEST: Fields = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a"),
    (b"te", b"trailers"),
)


def block(fields: Fields) -> bytes:
    """A header block of literals that are not indexed; names and values are shorter than 127 bytes."""
    parts = [b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in fields]
    return b"".join(parts)


def headers(stream: int, fields: Fields = REQUEST, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags, stream, block(fields))


def request(stream: int, *extra: tuple[bytes, bytes]) -> bytes:
    """A request without DATA."""
    return headers(stream, (*REQUEST, *extra), END_HEADERS | END_STREAM)


def padded(payload: bytes, padding: int) -> bytes:
    return bytes((padding,)) + payload + bytes(padding)


def settings(**values: int) -> bytes:
    """SETTINGS by number, such as `s4=0`."""
    return frame(SETTINGS, 0, 0, b"".join(pack(">HI", int(name[1:]), value) for name, value in values.items()))


def window_update(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, pack(">I", size))


def rst_stream(stream: int, code: int = 8) -> bytes:
    return frame(RST_STREAM, 0, stream, pack(">I", code))


def goaway(last_stream: int, code: int, text: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, pack(">II", last_stream, code) + text)


def frames_of(raw: bytes) -> list[Frame]:
    """The frames of what was sent, which must be whole."""
    found = []
    while raw:
        end = 9 + int.from_bytes(raw[:3], "big")
        assert len(raw) >= end, "a frame is not whole"
        found.append(Frame(raw[3], raw[4], int.from_bytes(raw[5:9], "big"), raw[9:end]))
        raw = raw[end:]
    return found


def told(event: Event[str, Any]) -> tuple[object, ...]:
    """An event as a plain value, with numbers of streams instead of their records."""
    match event:
        case RequestBegins(stream, head, is_end):
            return "begins", stream.id, head, is_end
        case DataArrives(stream, data, size, is_end):
            return "data", stream.id, bytes(data), size, is_end
        case RequestEnds(stream):
            return "ends", stream.id
        case StreamIsReset(stream, fault):
            return "reset", stream.id, fault
        case StreamHasRoom(stream):
            return "room", stream.id
        case Pinged():
            return ("pinged",)
        case ConnectionFails(fault, streams):
            return "fails", fault.code, [stream.id for stream in streams]


class Wire:
    """A connection as its client sees it: bytes in, what the application is told, and frames out."""

    def __init__(self, limits: Http2Limits | None = None, greeting: bytes = PREFACE + frame(SETTINGS)) -> None:
        """The client has greeted, and the server's first frames are read, unless there is no `greeting`."""
        self.now = 0.0
        self.connection: Http2Connection[str, Any] = Http2Connection(
            lambda request: request.path.decode(), limits or Http2Limits(), self.now
        )
        self.out = self.connection.out
        if greeting:
            assert self.receive(greeting) == []
            self.sent()

    def receive(self, *pieces: bytes) -> list[tuple[object, ...]]:
        """What the application is told of these bytes."""
        found: list[tuple[object, ...]] = []
        for piece in pieces:
            found += [told(event) for event in self.connection.receive(memoryview(piece), self.now)]
            while self.connection.reader.has_unread and not self.connection.is_failed:
                found += [told(event) for event in self.connection.receive(memoryview(b""), self.now)]
        return found

    def fault(self, *pieces: bytes) -> int:
        """The code with which the connection ends at these bytes; the GOAWAY has it too."""
        *_, (kind, code, _streams) = self.receive(*pieces)
        assert kind == "fails"
        last = self.sent()[-1]
        assert (last.kind, int.from_bytes(last.payload[4:8], "big")) == (GOAWAY, code)
        return int(code)  # type: ignore[call-overload]  # the code is a number

    def sent(self) -> list[Frame]:
        """The frames that were sent since the last call."""
        return frames_of(b"".join(self.out.take()))

    def stream(self, number: int) -> Stream[Any]:
        return self.connection.table.open[number]

    def write(self, room: float) -> list[tuple[object, ...]]:
        """The transport has room."""
        self.out.room = room
        return [told(event) for event in self.out.write_waiting()]
