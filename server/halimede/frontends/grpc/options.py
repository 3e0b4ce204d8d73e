"""Transport options of a gRPC server, as Triton's flags give them."""

from dataclasses import dataclass
from math import inf

from halimede.core.wire.grpc_call import DEFLATE, GZIP, IDENTITY
from halimede.core.wire.http2.keepalive import KeepaliveRules


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM contents. With `root_cert` a client must present a certificate that it signed (mutual TLS)."""

    server_cert: bytes
    server_key: bytes
    root_cert: bytes | None = None


@dataclass(frozen=True, slots=True)
class Transport:
    """All defaults except the message size are gRPC's own; times are milliseconds. `compression_level` is none, low,
    medium or high; an age of None means no limit."""

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
    stall_secs: float = 60.0
    message_secs: float = 60.0


def keepalive_rules(transport: Transport) -> KeepaliveRules:
    """The flags of pings and ages, in seconds."""
    return KeepaliveRules(
        ping_after=transport.keepalive_time / 1e3,
        answer_within=transport.keepalive_timeout / 1e3,
        without_calls=transport.keepalive_permit_without_calls,
        client_interval=transport.http2_min_recv_ping_interval_without_data / 1e3,
        max_strikes=transport.http2_max_ping_strikes,
        max_age=inf if transport.max_connection_age is None else transport.max_connection_age / 1e3,
        age_grace=inf if transport.max_connection_age_grace is None else transport.max_connection_age_grace / 1e3,
    )


def choose_encoding(level: str, accepted: frozenset[bytes]) -> bytes:
    """The encoding of a client's answers, as grpc chooses it: low prefers gzip, medium and high prefer deflate."""
    if level == "none":
        return IDENTITY
    ranked = [encoding for encoding in (GZIP, DEFLATE) if encoding in accepted]
    if not ranked:
        return IDENTITY
    return ranked[0] if level == "low" else ranked[-1]
