"""The frames of HTTP/2 as bytes (RFC 9113 sections 4 and 6), for one frame each."""

from collections.abc import Mapping
from struct import Struct

from halimede.core.wire.http2.codes import ACK, FrameType, H2Code, Setting

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9

_HEAD = Struct(">IBI")
"""Length and type in one number, flags, stream."""
_SETTING = Struct(">HI")
_NUMBER = Struct(">I")
_DATA, _HEADERS = FrameType.DATA, FrameType.HEADERS

unpack_head = _HEAD.unpack_from
"""`unpack_head(data, at)`: length << 8 | type, flags, stream with its reserved bit."""
pack_head = _HEAD.pack
"""`pack_head(length << 8 | type, flags, stream)`: the nine bytes before a payload."""
unpack_number = _NUMBER.unpack_from


def frame(kind: FrameType, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return pack_head(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: Mapping[Setting, int]) -> bytes:
    payload = b"".join(_SETTING.pack(setting, value) for setting, value in values.items())
    return frame(FrameType.SETTINGS, 0, 0, payload)


def unpack_settings(payload: memoryview) -> list[tuple[int, int]]:
    """Numbers and values, in order; numbers may be unknown ones. The length must be a multiple of six."""
    return list(_SETTING.iter_unpack(payload))


SETTINGS_ACK = frame(FrameType.SETTINGS, ACK, 0)


def ping(payload: bytes, *, ack: bool = False) -> bytes:
    """`payload` is eight bytes."""
    return frame(FrameType.PING, ACK if ack else 0, 0, payload)


def goaway(last_stream_id: int, code: H2Code, text: str = "") -> bytes:
    """`last_stream_id`: streams above it were not processed, and the client may send them again elsewhere."""
    payload = _NUMBER.pack(last_stream_id) + _NUMBER.pack(code) + text.encode()
    return frame(FrameType.GOAWAY, 0, 0, payload)


def rst_stream(stream_id: int, code: H2Code) -> bytes:
    return frame(FrameType.RST_STREAM, 0, stream_id, _NUMBER.pack(code))


def window_update(stream_id: int, size: int) -> bytes:
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, _NUMBER.pack(size))
