"""Frames of HTTP/2 for pure tests: made from plain values, and read from what a connection sends."""

from collections.abc import Sequence
from struct import pack

from support.h2client import PREFACE, Frame, frame

__all__ = ["PREFACE", "REQUEST", "Frame", "frame", "frames_of"]

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
