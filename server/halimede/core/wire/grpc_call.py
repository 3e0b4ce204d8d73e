"""gRPC's rules for requests and answers on HTTP/2 (its document "gRPC over HTTP2"): header fields, status, messages.

A request has the path of its method, a `content-type` of gRPC, and optionally a deadline, the encodings of messages,
and metadata. An answer is a header block, messages, and trailers with the status; without messages, trailers alone.
"""

import re
from dataclasses import dataclass

from halimede.core.wire.http2.fields import RequestFields, literal

IDENTITY, GZIP, DEFLATE = b"identity", b"gzip", b"deflate"
ENCODINGS = (IDENTITY, DEFLATE, GZIP)

_CONTENT_TYPE = b"application/grpc"
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_SECS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_FIELD_BYTES = 32
"""What each field counts in addition to its name and value, as in HTTP/2's MAX_HEADER_LIST_SIZE."""

# Fields of HTTP and gRPC, which are not metadata of the application.
_NOT_METADATA = frozenset(
    {b"te", b"content-type", b"content-length", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding",
     b"grpc-message-type", b"host"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallHead:
    """The fields of one call.

    `is_grpc`: the request has gRPC's method and content type. `timeout_s` is None without a deadline. `encoding` is
    that of compressed messages, `accepts` those that the client reads. `metadata` are names and values of text; a
    binary value (`-bin`) is not among them. `size_bytes` counts all fields.
    """

    path: str
    is_grpc: bool
    timeout_s: float | None
    encoding: bytes
    accepts: frozenset[bytes]
    metadata: tuple[tuple[str, str], ...]
    size_bytes: int
    fault: str = ""
    """What is wrong with the fields, "" if nothing is."""


def read_head(request: RequestFields) -> CallHead:
    """The head of a call. Repeated fields of gRPC's own: the last counts."""
    own: dict[bytes, bytes] = {}
    metadata: list[tuple[str, str]] = []
    size = len(request.path)
    for name, value in request.fields:
        size += len(name) + len(value) + _FIELD_BYTES
        if name in _NOT_METADATA:
            own[name] = value
        elif not name.endswith(b"-bin"):
            metadata.append((name.decode("ascii"), value.decode("utf-8", "replace")))
    timeout = own.get(b"grpc-timeout")
    fault = ""
    timeout_s = None
    if timeout is not None:
        timeout_s = read_timeout(timeout)
        if timeout_s is None:
            fault = "grpc-timeout is no number of at most eight digits with a unit of H, M, S, m, u or n"
    accepted = own.get(b"grpc-accept-encoding", b"").replace(b" ", b"").split(b",")
    content_type = own.get(b"content-type", b"")
    return CallHead(
        path=request.path.decode("utf-8", "replace"),
        is_grpc=request.method == b"POST"
        and content_type.startswith(_CONTENT_TYPE)
        and content_type[len(_CONTENT_TYPE) :][:1] in (b"", b"+", b";"),
        timeout_s=timeout_s,
        encoding=own.get(b"grpc-encoding", IDENTITY),
        accepts=frozenset(accepted) & frozenset(ENCODINGS),
        metadata=tuple(metadata),
        size_bytes=size,
        fault=fault,
    )


def read_timeout(text: bytes) -> float | None:
    """The seconds of a `grpc-timeout`; None for an invalid one."""
    match = _TIMEOUT.fullmatch(text)
    return None if match is None else int(match[1]) * _UNIT_SECS[match[2]]


# Answers. All blocks are literals that are not indexed, so that they are the same for all connections.

_STATUS_200 = b"\x88"
"""`:status 200`, field 8 of HPACK's static table."""

_OPENING = _STATUS_200 + literal(b"content-type", _CONTENT_TYPE)
_OPENINGS = {
    IDENTITY: _OPENING,
    **{encoding: _OPENING + literal(b"grpc-encoding", encoding) for encoding in (GZIP, DEFLATE)},
}
_STATUS = {number: literal(b"grpc-status", b"%d" % number) for number in range(17)}

OK_TRAILERS = _STATUS[0]


def opening(encoding: bytes = IDENTITY) -> bytes:
    """The header block of an answer with messages."""
    return _OPENINGS[encoding]


def trailers(status: int, message: str) -> bytes:
    """The block after the messages. `message` must be short enough for clients: see `status_message`."""
    return _STATUS[status] + (literal(b"grpc-message", percent_encode(message)) if message else b"")


def trailers_only(status: int, message: str) -> bytes:
    """The block of an answer without messages."""
    return _OPENING + trailers(status, message)


def percent_encode(message: str) -> bytes:
    """The value of `grpc-message`: printable ASCII except `%` is unchanged, all other bytes of the UTF-8 become %XX."""
    raw = message.encode("utf-8", "replace")
    return b"".join([bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in raw])


NOT_GRPC_TEXT = b"this port serves gRPC: POST with content-type application/grpc\n"
NOT_GRPC_BLOCK = literal(b":status", b"415") + literal(b"content-type", b"text/plain; charset=utf-8")
"""The answer to a request that does not speak gRPC: its header block, and its body."""
