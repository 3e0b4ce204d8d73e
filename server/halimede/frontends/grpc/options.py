"""Transport options of a gRPC server; times are milliseconds, as in Triton's flags."""

from dataclasses import dataclass

MAX_CONCURRENT_STREAMS = 128
"""Maximum number of concurrent calls on one connection; further ones wait in the client."""

MAX_CONNECTIONS = 10_000
"""Above this number a new connection is closed at once."""

MAX_METADATA_BYTES = 16 << 10
"""Maximum metadata of one call. gRPC's default is a range, 8 to 16 KiB, in which calls are refused at random."""

MAX_PENDING_CALLS = 10_000
"""Maximum number of calls that wait for the event loop. Above it grpc ends calls at random, and above twice as many all
of them, with CANCELLED, which no client retries. A burst while the loop is busy would reach its default of 1,000."""

HANDSHAKE_TIMEOUT_MS = 10_000
"""A new connection is closed if it has not finished TLS and the HTTP/2 preface within this time."""

MAX_SENT_BYTES = 2**31 - 1
"""The largest response: protobuf's limit, as in Triton. Models decide the size of responses, not clients."""

_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM contents. With `root_cert` a client must present a certificate that it signed (mutual TLS)."""

    server_cert: bytes
    server_key: bytes
    root_cert: bytes | None = None


@dataclass(frozen=True, slots=True)
class Transport:
    """All defaults except the message size are gRPC's own. `compression_level` is none, low, medium or high; an age of
    None means no limit."""

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
    """The transport as grpc's channel arguments, plus the limits that every server has."""
    arguments = {
        # grpc's own default would let two servers on one port share its connections at random.
        "grpc.so_reuseport": int(transport.reuse_port),
        # grpc's refusal cannot name Halimede's flag. Therefore messages up to twice the limit are received, and refused
        # before parsing; above that, grpc refuses a message by its announced length.
        "grpc.max_receive_message_length": min(2 * transport.max_message_bytes, MAX_SENT_BYTES),
        "grpc.max_send_message_length": MAX_SENT_BYTES,
        # `messages` and `call` inflate with a common limit: grpc would allow each call the full limit at once.
        "grpc.per_message_decompression": 0,
        "grpc.default_compression_level": _LEVELS[transport.compression_level],
        "grpc.keepalive_time_ms": transport.keepalive_time,
        "grpc.keepalive_timeout_ms": transport.keepalive_timeout,
        # grpc's server uses its keepalive timeout only as the ping timeout, which is a minute unless it is set.
        "grpc.http2.ping_timeout_ms": transport.keepalive_timeout,
        "grpc.keepalive_permit_without_calls": int(transport.keepalive_permit_without_calls),
        # The channel argument of grpc's RECV_PING_INTERVAL option; its name lacks that word.
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
