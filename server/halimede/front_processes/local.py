"""The services of the core's process: the metrics, and HTTP and gRPC without front-end processes."""

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from halimede.core.accounts import MemoryBounds
from halimede.core.observe.access_lines import AccessLog
from halimede.core.types import Buffer
from halimede.core.wire.steps import Steps
from halimede.front_processes.services import (
    Service,
    access_log_of,
    bind_grpc,
    bind_http,
    make_grpc,
    make_http,
    make_turns,
    place_of,
)
from halimede.frontends.grpc.server import GrpcServer
from halimede.frontends.http.server import HttpServer
from halimede.frontends.metrics import MetricsServer
from halimede.frontends.sockets import bind, release
from halimede.log import admits_access, log_access
from halimede.runtime.server import Server
from halimede.settings import AccessLevel, Settings
from halimede.start_report import GRPC, HTTP, METRICS

log = logging.getLogger("halimede.app")


class LocalService:
    """A service in this process."""

    def __init__(
        self,
        name: str,
        address: str,
        bind_sockets: Callable[[], list[socket.socket]],
        server: HttpServer | GrpcServer | MetricsServer,
    ) -> None:
        """`name` is its name in the log."""
        self._name = name
        self._address = address
        self._bind_sockets = bind_sockets
        self._server = server
        self._sockets: list[socket.socket] = []
        """Those that the server does not own yet."""

    def bind(self) -> Mapping[str, str]:
        self._sockets = self._bind_sockets()
        return {self._name: place_of(self._address, self._sockets)}

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

    def on_models_changed(self) -> None:
        """No effect: it asks the core for each model."""

    def reopen_log(self) -> None:
        """No effect: its log is that of this process."""

    def dropped_lines(self) -> int:
        return 0


def local_services(settings: Settings, server: Server, memory: MemoryBounds) -> list[Service]:
    """HTTP and gRPC in this process. InferenceError and OSError for certificates that cannot be used."""
    access_log, turns = access_log_of(settings), make_turns(settings)
    services: list[Service] = []
    if settings.allow_http:
        http = make_http(settings, server, turns, access_log, memory)
        services.append(LocalService(HTTP, settings.http_address, partial(bind_http, settings), http))
    if settings.allow_grpc:
        grpc = make_grpc(settings, server, turns, access_log, memory)
        services.append(LocalService(GRPC, settings.grpc_address, partial(bind_grpc, settings), grpc))
    return services


def metrics_service(settings: Settings, render: Callable[[], Steps[Sequence[Buffer]]]) -> Service:
    """The metrics, which `render` makes. See `MetricsServer`."""
    server = MetricsServer(render, log=log.error)
    if settings.log_verbose:
        server.log_requests(log.debug)
    if settings.log_access is not AccessLevel.OFF:
        # Successful scrapes are not logged.
        server.log_access(AccessLog(admits_access, log_access))
    bind_metrics = partial(bind, settings.metrics_address, settings.metrics_port, "Metrics")
    return LocalService(METRICS, settings.metrics_address, bind_metrics, server)
