"""What a service is, and the servers that the settings describe: HTTP and gRPC, in the core's process or in a front-end
process, and the metrics."""

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from halimede.core.accounts import MemoryBounds
from halimede.core.observe.access_lines import AccessLog
from halimede.core.observe.start_summary import GRPC, HTTP
from halimede.core.types import Buffer, invalid
from halimede.core.wire.steps import Steps
from halimede.facade.server import Server
from halimede.frontends.grpc.options import Tls, Transport
from halimede.frontends.grpc.server import GrpcServer
from halimede.frontends.http.server import HttpServer
from halimede.frontends.metrics import MetricsServer
from halimede.frontends.port import PortLimits
from halimede.frontends.sockets import bind, bound_port, release
from halimede.frontends.totals import PortTotals
from halimede.frontends.turns import Turns
from halimede.frontends.unix_socket import UNIX
from halimede.log import admits_access, log_access
from halimede.settings import AccessLevel, Settings

log = logging.getLogger("halimede.app")


class Service(Protocol):
    """Front ends, or the metrics, in this process or in processes of their own.

    Order of use: `bind`, `start`, optionally `send_away`, `drain`, `close`. All ports of a server are bound before any
    service starts.
    """

    def bind(self) -> Mapping[str, str]:
        """Bind the ports; returns the address (with the port) of each by its name in the log. OSError as
        `sockets.bind`."""

    async def start(self) -> None:
        """Serve on the ports. InferenceError if a process fails."""

    def send_away(self) -> None:
        """Continue to serve, and ask clients to connect elsewhere."""

    async def drain(self) -> None:
        """Accept no connections, and return when all requests are answered and all connections closed."""

    async def close(self) -> None:
        """Close every connection now, and the ports. Also after `drain`. A second call has no effect."""

    def note_change(self) -> None:
        """The models that serve change in this turn of the loop, or the state of the server has changed."""

    def reopen_log(self) -> None:
        """Let processes of its own reopen their log files."""

    def dropped_lines(self) -> int:
        """Log lines that processes of its own dropped."""


class LocalService:
    """A service in this process, at the port that the settings have for it."""

    def __init__(self, name: str, settings: Settings, server: HttpServer | GrpcServer | MetricsServer) -> None:
        """`name` is its name in the log."""
        self._name = name
        self._settings = settings
        self._server = server
        self._sockets: list[socket.socket] = []
        """Those that the server does not own yet."""

    def bind(self) -> Mapping[str, str]:
        self._sockets, address = bind_port(self._name, self._settings)
        return {self._name: address}

    async def start(self) -> None:
        sockets, self._sockets = self._sockets, []
        self._server.serve(sockets)

    def send_away(self) -> None:
        self._server.send_away()

    async def drain(self) -> None:
        await self._server.drain()

    async def close(self) -> None:
        release(self._sockets)
        self._sockets = []
        await self._server.close()

    def note_change(self) -> None:
        """No effect: the core is asked each time."""

    def reopen_log(self) -> None:
        """No effect: its log is that of this process."""

    def dropped_lines(self) -> int:
        return 0


def bind_port(name: str, settings: Settings) -> tuple[list[socket.socket], str]:
    """The sockets of a service, and its address (with the port). OSError as `sockets.bind`."""
    if name == HTTP:
        address = settings.http_address
        sockets = bind(address, settings.http_port, "HTTP", reuse_port=settings.reuse_http_port)
    elif name == GRPC:
        address = settings.grpc_address
        sockets = bind(address, settings.grpc_port, "GRPC", reuse_port=settings.reuse_grpc_port, any_family=True)
    else:
        address = settings.metrics_address
        sockets = bind(address, settings.metrics_port, "Metrics")
    return sockets, address if address.startswith(UNIX) else f"{address}:{bound_port(sockets)}"


def make_servers(
    settings: Settings, server: Server, memory: MemoryBounds, totals: Mapping[str, PortTotals] = MappingProxyType({})
) -> dict[str, HttpServer | GrpcServer]:
    """The servers of HTTP and gRPC by their names in the log, not bound yet. They share the turns of the loop.

    `totals` by the same names. InferenceError and OSError for certificates that cannot be used.
    """
    access_log = None
    if settings.log_access is not AccessLevel.OFF:
        access_log = AccessLog(admits_access, log_access, successes=settings.log_access is AccessLevel.ALL)
    turns, port_limits = Turns(settings.trusted_proxies), PortLimits().within(memory)
    servers: dict[str, HttpServer | GrpcServer] = {}
    if settings.allow_http:
        servers[HTTP] = HttpServer(
            server,
            max_input_size=settings.http_max_input_size,
            log=log.error,
            restricted=settings.http_restricted_api,
            forward=settings.http_header_forward_pattern,
            cors_origins=settings.http_cors_origin,
            access_log=access_log,
            log_request=log.debug if settings.log_verbose else None,
            port_limits=port_limits,
            totals=totals.get(HTTP),
            memory=memory,
            turns=turns,
        )
    if settings.allow_grpc:
        servers[GRPC] = GrpcServer(
            server,
            _transport(settings),
            restricted=settings.grpc_restricted_protocol,
            forward=settings.grpc_header_forward_pattern,
            max_response_pool_size=settings.grpc_max_response_pool_size,
            access_log=access_log,
            port_limits=port_limits,
            totals=totals.get(GRPC),
            memory=memory,
            turns=turns,
        )
    return servers


def make_metrics(settings: Settings, render: Callable[[], Steps[Sequence[Buffer]]]) -> MetricsServer:
    """The server of the metrics, which `render` makes, not bound yet. Successful scrapes are not logged."""
    return MetricsServer(
        render,
        log=log.error,
        access_log=None if settings.log_access is AccessLevel.OFF else AccessLog(admits_access, log_access),
        log_request=log.debug if settings.log_verbose else None,
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
        raise invalid(f"{flag} is required with --grpc-use-ssl")
    try:
        return path.read_bytes()
    except OSError as error:
        raise invalid(f"{flag}: '{path}' cannot be read: {error.strerror}") from None
