"""What a service is, and the HTTP and gRPC servers that the settings describe, in the core process or in a front-end
process."""

import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from halimede.core.accounts import MemoryBounds
from halimede.core.observe.access_lines import AccessLog
from halimede.core.types import ErrorCode, InferenceError
from halimede.frontends.grpc.options import Tls, Transport
from halimede.frontends.grpc.server import GrpcServer
from halimede.frontends.http.server import HttpServer
from halimede.frontends.port import PortLimits
from halimede.frontends.sockets import bind, bound_port
from halimede.frontends.totals import PortTotals
from halimede.frontends.turns import Turns
from halimede.frontends.unix_socket import UNIX
from halimede.log import admits_access, log_access
from halimede.runtime.server import Server
from halimede.settings import AccessLevel, Settings

log = logging.getLogger("halimede.app")


class Service(Protocol):
    """Front ends, or the metrics, in this process or in processes of their own.

    Order of use: `bind`, `start`, optionally `send_away`, `drain`, `close`. All ports of a server are bound before any
    service starts.
    """

    def bind(self) -> Mapping[str, str]:
        """Bind the ports; returns the place (address and port) of each by its name in the log. OSError as
        `sockets.bind`."""

    async def start(self) -> None:
        """Serve on the ports. InferenceError if a process fails."""

    def send_away(self) -> None:
        """Continue to serve, and ask clients to connect elsewhere."""

    async def drain(self) -> None:
        """Accept no connections, and return when all requests are answered and all connections closed."""

    async def close(self) -> None:
        """Close every connection now, and the ports. Also after `drain`. A second call has no effect."""

    def on_models_changed(self) -> None:
        """The models that serve have changed."""

    def reopen_log(self) -> None:
        """Let processes of its own reopen their log files."""

    def dropped_lines(self) -> int:
        """Log lines that processes of its own dropped."""


def bind_http(settings: Settings) -> list[socket.socket]:
    """HTTP's sockets. OSError as `sockets.bind`."""
    return bind(settings.http_address, settings.http_port, "HTTP", reuse_port=settings.reuse_http_port)


def bind_grpc(settings: Settings) -> list[socket.socket]:
    """gRPC's sockets. OSError as `sockets.bind`."""
    address, port = settings.grpc_address, settings.grpc_port
    return bind(address, port, "GRPC", reuse_port=settings.reuse_grpc_port, any_family=True)


def place_of(address: str, sockets: Sequence[socket.socket]) -> str:
    """Address and port of these sockets, for the log."""
    return address if address.startswith(UNIX) else f"{address}:{bound_port(sockets)}"


def access_log_of(settings: Settings) -> AccessLog | None:
    """The access log, None if it is off."""
    if settings.log_access is AccessLevel.OFF:
        return None
    return AccessLog(admits_access, log_access, successes=settings.log_access is AccessLevel.ALL)


def make_turns(settings: Settings) -> Turns:
    """How the clients of this process share the turns of its loop."""
    return Turns(settings.trusted_proxies)


def make_http(
    settings: Settings,
    server: Server,
    turns: Turns,
    access_log: AccessLog | None,
    memory: MemoryBounds,
    totals: PortTotals | None = None,
) -> HttpServer:
    """The HTTP server, which is not bound yet."""
    http = HttpServer(
        server,
        max_input_size=settings.http_max_input_size,
        log=log.error,
        restricted=settings.http_restricted_api,
        forward=settings.http_header_forward_pattern,
        cors_origins=settings.http_cors_origin,
        port_limits=PortLimits().within(memory),
        totals=totals,
        memory=memory,
        turns=turns,
    )
    if settings.log_verbose:
        http.log_requests(log.debug)
    if access_log is not None:
        http.log_access(access_log)
    return http


def make_grpc(
    settings: Settings,
    server: Server,
    turns: Turns,
    access_log: AccessLog | None,
    memory: MemoryBounds,
    totals: PortTotals | None = None,
) -> GrpcServer:
    """The gRPC server, which is not bound yet. InferenceError and OSError for certificates that cannot be used."""
    return GrpcServer(
        server,
        _transport(settings),
        restricted=settings.grpc_restricted_protocol,
        forward=settings.grpc_header_forward_pattern,
        max_response_pool_size=settings.grpc_max_response_pool_size,
        access_log=access_log,
        port_limits=PortLimits().within(memory),
        totals=totals,
        memory=memory,
        turns=turns,
    )


def _transport(settings: Settings) -> Transport:
    return Transport(
        max_message_bytes=settings.grpc_max_input_size,
        tls=_tls(settings),
        compression_level=settings.grpc_infer_response_compression_level.value,
        keepalive_time=settings.grpc_keepalive_time,
        keepalive_timeout=settings.grpc_keepalive_timeout,
        keepalive_permit_without_calls=settings.grpc_keepalive_permit_without_calls,
        http2_min_recv_ping_interval_without_data=settings.grpc_http2_min_recv_ping_interval_without_data,
        http2_max_ping_strikes=settings.grpc_http2_max_ping_strikes,
        max_connection_age=settings.grpc_max_connection_age,
        max_connection_age_grace=settings.grpc_max_connection_age_grace,
        stall_secs=settings.grpc_stall_timeout_secs,
        message_secs=settings.grpc_message_timeout_secs,
    )


def _tls(settings: Settings) -> Tls | None:
    if not settings.grpc_use_ssl:
        return None
    return Tls(
        _read_pem("--grpc-server-cert", settings.grpc_server_cert),
        _read_pem("--grpc-server-key", settings.grpc_server_key),
        _read_pem("--grpc-root-cert", settings.grpc_root_cert) if settings.grpc_use_ssl_mutual else None,
    )


def _read_pem(flag: str, path: Path | None) -> bytes:
    if path is None:
        raise InferenceError(ErrorCode.INVALID_ARG, f"{flag} is required with --grpc-use-ssl")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InferenceError(ErrorCode.INVALID_ARG, f"{flag}: '{path}' cannot be read: {error.strerror}") from None
