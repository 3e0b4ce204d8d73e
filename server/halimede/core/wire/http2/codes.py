"""Numbers of HTTP/2 (RFC 9113), and the two kinds of errors."""

from enum import IntEnum


class FrameType(IntEnum):
    """Section 6."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Setting(IntEnum):
    """Section 6.5.2."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class H2Code(IntEnum):
    """Section 7: why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


# Flags of frames. Each type defines its own; equal bits have different names.
END_STREAM = 0x01
ACK = 0x01
END_HEADERS = 0x04
PADDED = 0x08
PRIORITY_FIELDS = 0x20

MAX_STREAM_ID = 2**31 - 1
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
MIN_MAX_FRAME_SIZE = 16_384
MAX_MAX_FRAME_SIZE = 2**24 - 1


class _Fault(Exception):
    def __init__(self, code: H2Code, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class ConnectionFault(_Fault):
    """The connection must end, with GOAWAY of this code (section 5.4.1)."""


class StreamFault(_Fault):
    """One stream must end, with RST_STREAM of this code (section 5.4.2)."""
