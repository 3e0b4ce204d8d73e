"""What a gRPC server can be told of its transport; times are milliseconds, as in Triton's flags."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM contents. With `root_cert` a client must show a certificate that it signed (mutual TLS)."""

    server_cert: bytes
    server_key: bytes
    root_cert: bytes | None = None


@dataclass(frozen=True, slots=True)
class Transport:
    """Defaults are gRPC's own. `compression_level` is none, low, medium or high, None ages are no limit."""

    reuse_port: bool = False
    max_message_bytes: int = 2**31 - 1
    tls: Tls | None = None
    compression_level: str = "none"
    keepalive_time: int = 7_200_000
    keepalive_timeout: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age: int | None = None
    max_connection_age_grace: int | None = None
