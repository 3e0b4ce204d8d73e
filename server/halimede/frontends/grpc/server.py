"""The gRPC front end: Triton's inference service, health and reflection on one port of the running event loop."""

import asyncio
import logging
import random
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from halimede.core.accounts import UNBOUNDED, MemoryBounds
from halimede.core.observe.access_lines import AccessLog
from halimede.core.types import ApiCategory, Restrictions, Secret
from halimede.core.wire.control_size import MAX_CONTROL_BYTES, control_too_large
from halimede.core.wire.forwarding import Forwarding
from halimede.core.wire.grpc_call import IDENTITY, CallHead, read_head
from halimede.core.wire.grpc_messages import MessageTooLarge
from halimede.core.wire.http2.fields import RequestFields
from halimede.core.wire.protocol import POOL, message_class
from halimede.facade.server import Server
from halimede.frontends.grpc.access import CATEGORIES, HEALTH, INFERENCE, REFLECTIONS
from halimede.frontends.grpc.call import INTERNAL, RESOURCE_EXHAUSTED, UNAVAILABLE, UNIMPLEMENTED, Call, Method, Route
from halimede.frontends.grpc.connection import GrpcConnection
from halimede.frontends.grpc.control import VIEW_ANSWERS, Control
from halimede.frontends.grpc.health import HealthService
from halimede.frontends.grpc.infer import InferContext
from halimede.frontends.grpc.infer_stream import MAX_UNANSWERED, InferStreams
from halimede.frontends.grpc.limits import GrpcLimits, Shared
from halimede.frontends.grpc.options import Transport, choose_encoding, keepalive_rules
from halimede.frontends.grpc.reflection import Reflection
from halimede.frontends.grpc.tls import server_context
from halimede.frontends.grpc.unary import UnaryMethod, by_task, from_view
from halimede.frontends.port import Port, PortLimits
from halimede.frontends.totals import PortTotals
from halimede.frontends.turns import Turns

log = logging.getLogger(__name__)

_DEFAULT_TRANSPORT = Transport()
_NO_RESTRICTIONS: Restrictions = MappingProxyType({})

DRAIN_SWEEP_S = 0.25

AGE_VARIATION = 0.1
"""Ages of connections vary by this share, as in grpc."""


class GrpcServer:
    """One listening port. Order of use: `serve`, optionally `send_away`, `drain`, `close`.

    `shared` and `access_log` are for its connections. Make it while the event loop is running.
    """

    def __init__(
        self,
        server: Server,
        transport: Transport = _DEFAULT_TRANSPORT,
        restricted: Restrictions = _NO_RESTRICTIONS,
        forward: re.Pattern[str] | None = None,
        max_response_pool_size: int = MAX_UNANSWERED,
        access_log: AccessLog | None = None,
        limits: GrpcLimits | None = None,
        port_limits: PortLimits | None = None,
        totals: PortTotals | None = None,
        memory: MemoryBounds = UNBOUNDED,
        turns: Turns | None = None,
    ) -> None:
        """Calls of a `restricted` category need its secret in their metadata. Metadata whose names match `forward`
        become parameters of the call's requests. A stream is not read further while `max_response_pool_size` of its
        requests or responses wait. Messages are within `memory`. `turns` are shared with the process's other servers.
        OSError for certificates that cannot be used."""
        self.access_log = access_log
        self.turns = turns or Turns()
        limits = (limits or GrpcLimits()).for_messages(
            transport.max_message_bytes, transport.stall_secs, transport.message_secs
        )
        self.shared = Shared(limits, keepalive_rules(transport), None if totals is None else totals.held_bytes, memory)
        self._transport = transport
        self._health = HealthService(server)
        self._tasks: set[asyncio.Task[Any]] = set()
        context = InferContext(server, None if forward is None else Forwarding(forward, restricted))
        # The other half has room for one message of any size.
        streams = InferStreams(context, limits.max_connection_held_bytes // 2, max_response_pool_size)
        self._methods = _methods(server, self._health, context, streams, transport.max_message_bytes, self._tasks)
        self._secrets: Mapping[str, Secret] = {
            path: restricted[CATEGORIES[path]] for path in self._methods if CATEGORIES[path] in restricted
        }
        self._connections: set[GrpcConnection] = set()
        self._port = Port(
            lambda: GrpcConnection(self, asyncio.get_running_loop()),
            lambda: GrpcConnection(self, asyncio.get_running_loop(), self._route_control),
            service="GRPC",
            limits=port_limits or PortLimits(),
            log=log.error,
            unsent_bytes=lambda: self.shared.unsent_bytes,
            tls=None if transport.tls is None else server_context(transport.tls),
            totals=totals,
        )

    def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on sockets that `sockets.bind` made, which the server owns from then on."""
        self._port.serve(sockets)

    def send_away(self) -> None:
        """Continue to serve, and ask each client to make further calls on another connection."""
        self.shared.is_leaving = True
        self._sweep_often()
        for connection in self._connections:
            connection.send_away()

    async def drain(self) -> None:
        """Report NOT_SERVING, close the port, and return when all calls are answered and all connections closed.

        Clients learn which of their calls are served. There is no deadline, but clients that stall are cut off after
        the limits' `drain_stall_s`.
        """
        self._health.drain()
        self.shared.is_leaving = self.shared.is_draining = True
        limits = self.shared.limits
        self.shared.limits = replace(limits, stall_s=min(limits.stall_s, limits.drain_stall_s))
        self._sweep_often()
        await self._port.stop_accepting()
        for connection in tuple(self._connections):
            connection.shut_down()
        await self._port.wait_closed()

    async def close(self) -> None:
        """Close every connection and end every task now. Also after `drain`. A second call has no effect."""
        self.shared.is_leaving = self.shared.is_draining = True
        await self._port.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _sweep_often(self) -> None:
        self._port.limits = replace(self._port.limits, sweep_s=min(self._port.limits.sweep_s, DRAIN_SWEEP_S))

    # The connections' calls.

    def admit(self, connection: GrpcConnection) -> None:
        """Register a new connection."""
        self._connections.add(connection)
        self._port.admit(connection)

    def forget(self, connection: GrpcConnection) -> None:
        """A connection is closed."""
        self._connections.discard(connection)
        self._port.forget(connection)

    def shed(self) -> None:
        """Close the slowest readers if too much is unsent."""
        self._port.shed()

    def crashed(self, where: str, error: BaseException) -> None:
        """Log an internal fault."""
        self._port.crashed(where, error)

    def age_factor(self) -> float:
        """Varies the age of connections, so that the clients of a server do not all connect anew at once."""
        return random.uniform(1 - AGE_VARIATION, 1 + AGE_VARIATION)  # noqa: S311 -- not a secret

    def route(self, fields: RequestFields) -> Route:
        """What becomes of the calls with these fields. A connection asks once for the same fields."""
        head = read_head(fields)
        method = self._methods.get(head.path)
        if method is None:
            return _refused(head, UNIMPLEMENTED, "Method not found!")
        most = self.shared.limits.max_metadata_bytes
        if head.size_bytes > most:
            text = f"the metadata of the call has {head.size_bytes} bytes, at most {most} are taken"
            return _refused(head, RESOURCE_EXHAUSTED, text)
        if head.fault:
            return _refused(head, INTERNAL, head.fault)
        secret = self._secrets.get(head.path)
        if secret is not None and not any(
            name == secret.header and secret.is_given(value) for name, value in head.metadata
        ):
            return _refused(head, UNAVAILABLE, f"This protocol is restricted, expecting header '{secret.header}'")
        return Route(head, method, choose_encoding(self._transport.compression_level, head.accepts))

    def _route_control(self, fields: RequestFields) -> Route:
        """As `route`, for a connection of the port's reserve."""
        route = self.route(fields)
        if route.method.category is not ApiCategory.INFERENCE:
            return route
        return _refused(route.head, UNAVAILABLE, "the server has as many connections as it can serve")


def _refused(head: CallHead, status: int, text: str) -> Route:
    def refuse(call: Call) -> None:
        call.end(status, text)

    name = _name(head.path)
    return Route(head, Method(name, None, refuse, False, 0, partial(MessageTooLarge, max_bytes=0)), IDENTITY)


def _methods(
    server: Server,
    health: HealthService,
    context: InferContext,
    streams: InferStreams,
    max_message_bytes: int,
    tasks: "set[asyncio.Task[Any]]",
) -> dict[str, Method]:
    """Every method, by path."""
    large = partial(MessageTooLarge, max_bytes=max_message_bytes)
    begins = {
        f"/{INFERENCE}/ModelInfer": (context.begin_unary, True),
        f"/{INFERENCE}/ModelStreamInfer": (streams.begin, False),
    }
    reflection = Reflection((INFERENCE, HEALTH, *REFLECTIONS))
    check = UnaryMethod(message_class("grpc.health.v1.HealthCheckRequest"), by_task(health.check, tasks))
    small = {
        f"/{HEALTH}/Watch": (health.begin_watch, True),
        **{f"/{service}/ServerReflectionInfo": (reflection.begin, False) for service in REFLECTIONS},
        f"/{HEALTH}/Check": (check.begin, True),
    }
    described = POOL.FindServiceByName(INFERENCE).methods_by_name
    handlers = {name: by_task(answer, tasks) for name, answer in Control(server).answers().items()}
    handlers |= {name: from_view(encode, server) for name, encode in VIEW_ANSWERS.items()}
    for name, handle in handlers.items():
        request = message_class(described[name].input_type.full_name)
        small[f"/{INFERENCE}/{name}"] = UnaryMethod(request, handle).begin, True
    methods = {}
    for path, (begin, is_unary) in begins.items():
        methods[path] = Method(_name(path), CATEGORIES[path], begin, is_unary, max_message_bytes, large)
    for path, (begin, is_unary) in small.items():
        name = _name(path)
        too_large = partial(control_too_large, name)
        methods[path] = Method(name, CATEGORIES[path], begin, is_unary, MAX_CONTROL_BYTES, too_large)
    return methods


def _name(path: str) -> str:
    return path.rpartition("/")[2]
