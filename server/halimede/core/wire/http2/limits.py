"""The limits of one connection of HTTP/2."""

from dataclasses import dataclass

MAX_BLOCK_BYTES = 32 << 10
"""The header block of a request, in all its frames, before it is decoded."""

MAX_CONTINUATIONS = 16

USUAL_FIELDS = 100
"""The fields of a header block that a client sends without any cost. No known client of gRPC sends half as many."""

LARGE_REQUEST_BYTES = 64 << 10
"""The first request of a connection with more DATA permits larger frames, which cost less."""

RECENTLY_CLOSED = 32
"""For so many closed streams it is known why they closed."""


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
