"""What a gRPC server can be told of its transport; times are milliseconds, as in Triton's flags."""

from dataclasses import dataclass

MAX_CONCURRENT_STREAMS = 128
"""Calls at a time on one connection; a client's further ones wait at the client."""

MAX_CONNECTIONS = 10_000
"""Above it a new connection is closed at once."""

MAX_METADATA_BYTES = 16 << 10
"""Of one call. gRPC's default for it is a range, 8 to 16 KiB, in which calls are refused at random."""

MAX_PENDING_CALLS = 10_000
"""Calls that may wait for the event loop to take them. Above it grpc ends calls at random, above twice as many all, and
as CANCELLED, which no client tries again: its own limit of 1,000 is reached by a burst while the loop is busy."""

HANDSHAKE_TIMEOUT_MS = 10_000
"""A new connection that has not finished TLS and the HTTP/2 preface by then is closed."""

MAX_SENT_BYTES = 2**31 - 1
"""The largest answer: what protobuf can carry, as in Triton. Not clients but models decide how large answers are."""

_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM contents. With `root_cert` a client must show a certificate that it signed (mutual TLS)."""

    server_cert: bytes
    server_key: bytes
    root_cert: bytes | None = None


@dataclass(frozen=True, slots=True)
class Transport:
    """All defaults except the message size are gRPC's own. `compression_level` is none, low, medium or high; an age
    of None is no limit."""

    reuse_port: bool = False
    max_message_bytes: int = 64 << 20
    tls: Tls | None = None
    compression_level: str = "none"
    keepalive_time: int = 7_200_000
    keepalive_timeout: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_min_recv_ping_interval_without_data: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age: int | None = None
    max_connection_age_grace: int | None = None


def channel_arguments(transport: Transport) -> list[tuple[str, int]]:
    """The transport as grpc's channel arguments, and the limits that are the same for every server."""
    arguments = {
        # Without the wish for it, two servers on one port would share its connections at random.
        "grpc.so_reuseport": int(transport.reuse_port),
        # grpc's refusal cannot name our flag. So up to twice the limit is received, refused by us before it is parsed;
        # from there on grpc refuses a message by its announced length.
        "grpc.max_receive_message_length": min(2 * transport.max_message_bytes, MAX_SENT_BYTES),
        "grpc.max_send_message_length": MAX_SENT_BYTES,
        # `messages` and `call` inflate, counted: grpc would inflate up to the limit in all calls at once.
        "grpc.per_message_decompression": 0,
        "grpc.default_compression_level": _LEVELS[transport.compression_level],
        "grpc.keepalive_time_ms": transport.keepalive_time,
        "grpc.keepalive_timeout_ms": transport.keepalive_timeout,
        # grpc's server heeds its keepalive timeout only as that of pings, which is a minute unless it is told.
        "grpc.http2.ping_timeout_ms": transport.keepalive_timeout,
        "grpc.keepalive_permit_without_calls": int(transport.keepalive_permit_without_calls),
        # The argument of grpc's RECV_PING_INTERVAL option, whose name lacks the word.
        "grpc.http2.min_ping_interval_without_data_ms": transport.http2_min_recv_ping_interval_without_data,
        "grpc.http2.max_ping_strikes": transport.http2_max_ping_strikes,
        "grpc.max_connection_age_ms": transport.max_connection_age,
        "grpc.max_connection_age_grace_ms": transport.max_connection_age_grace,
        "grpc.max_concurrent_streams": MAX_CONCURRENT_STREAMS,
        "grpc.server.max_pending_requests": MAX_PENDING_CALLS,
        "grpc.server.max_pending_requests_hard_limit": 2 * MAX_PENDING_CALLS,
        "grpc.max_allowed_incoming_connections": MAX_CONNECTIONS,
        "grpc.max_metadata_size": MAX_METADATA_BYTES,
        "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES,
        "grpc.server_handshake_timeout_ms": HANDSHAKE_TIMEOUT_MS,
    }
    return [(name, value) for name, value in arguments.items() if value is not None]
