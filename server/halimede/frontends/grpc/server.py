"""The gRPC front end: Triton's inference service, health and reflection on one port of the running event loop."""

import asyncio
import logging
import re
from types import MappingProxyType

import grpc  # type: ignore[import-untyped]  # grpcio ships no types

from halimede.core.observe.access_lines import AccessLog
from halimede.core.types import Restrictions, Secret
from halimede.core.wire.forwarding import Forwarding
from halimede.core.wire.protocol import POOL, message_class
from halimede.frontends.grpc.access import CATEGORIES, HEALTH, INFERENCE, REFLECTIONS
from halimede.frontends.grpc.address import cannot_listen, check_tcp, check_unix
from halimede.frontends.grpc.call import (
    Context,
    Drain,
    LoggedCall,
    MethodHandler,
    abort,
    answered_in_parts,
    answered_once,
    refused,
    shutting_down,
    unary,
)
from halimede.frontends.grpc.control import Control
from halimede.frontends.grpc.goaway import send_away
from halimede.frontends.grpc.health import HealthService
from halimede.frontends.grpc.infer import MAX_UNANSWERED, InferService
from halimede.frontends.grpc.options import Transport, channel_arguments
from halimede.frontends.grpc.reflection import Reflection
from halimede.frontends.grpc.tls import server_credentials
from halimede.frontends.unix_socket import UNIX
from halimede.runtime.server import Server

log = logging.getLogger(__name__)

_DEFAULT_TRANSPORT = Transport()
_NO_RESTRICTIONS: Restrictions = MappingProxyType({})
_NO_LIMIT_SECS = 365 * 24 * 3600.0

QUIET_SECS = 0.05
LONGEST_REFUSAL_SECS = 1.0
"""Before a stop stops grpc, it refuses calls until none has arrived for some time, at most for this long."""


class GrpcServer:
    """One listening port: `bind`, `start`, perhaps `send_away`, then `drain` or `stop`.

    Make it while the event loop is running.
    """

    def __init__(
        self,
        server: Server,
        transport: Transport = _DEFAULT_TRANSPORT,
        restricted: Restrictions = _NO_RESTRICTIONS,
        forward: re.Pattern[str] | None = None,
        max_response_pool_size: int = MAX_UNANSWERED,
        access_log: AccessLog | None = None,
    ) -> None:
        """Calls of a `restricted` category need its secret in their metadata. Metadata whose names match `forward`
        become parameters of the call's requests. A stream is not read further while `max_response_pool_size` of its
        requests or responses wait."""
        self._drain = Drain()
        self._transport = transport
        self._is_started = False
        self._port = 0
        forwarding = None if forward is None else Forwarding(forward, restricted)
        infer = InferService(server, self._drain, transport.max_message_bytes, forwarding, max_response_pool_size)
        handlers = _method_handlers(server, infer, self._drain, access_log)
        secrets = {method: restricted[CATEGORIES[method]] for method in handlers if CATEGORIES[method] in restricted}
        methods = _RestrictedMethods(handlers, secrets, access_log) if secrets else _Methods(handlers, access_log)
        self._methods = methods
        self._grpc = grpc.aio.server(
            # Without verbose logging, calls pay nothing for it.
            handlers=(_LoggedMethods(methods) if log.isEnabledFor(logging.DEBUG) else methods,),
            options=channel_arguments(transport),
        )

    def bind(self, address: str, port: int) -> int:
        """Bind the port (0: any free one) and return it; 0 for an address `unix:<path>`, which has none.

        Connections are accepted, and wait until `start`. OSError `failed to start GRPC service: Socket
        '<address>:<port>' already in use`, or with another cause.
        """
        if address.startswith(UNIX):
            check_unix(address)
            self._add_port(address)
            return 0
        target = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        check_tcp(address, port, target, reuse_port=self._transport.reuse_port)
        self._port = self._add_port(target)
        return self._port

    def _add_port(self, target: str) -> int:
        tls = self._transport.tls
        try:
            if tls is None:
                return int(self._grpc.add_insecure_port(target))
            return int(self._grpc.add_secure_port(target, server_credentials(tls)))
        except RuntimeError:
            raise cannot_listen(target) from None

    async def start(self) -> None:
        """Start to serve."""
        self._is_started = True
        await self._grpc.start()

    async def send_away(self) -> None:
        """Continue to serve, and make clients connect elsewhere, until cancelled. No effect with TLS or a unix
        socket."""
        if self._port and self._transport.tls is None:
            await send_away(self._port)

    async def drain(self) -> None:
        """Refuse calls, report NOT_SERVING, close the port, and return when the last call in flight is answered.

        Calls that reach grpc after it is stopped, before the client has learnt of the stop, end as a bare CANCELLED,
        which no client retries elsewhere. So calls are first refused for a while.
        """
        self._drain.start()
        await self._methods.refuse_until_quiet()
        await self.stop(_NO_LIMIT_SECS)

    async def stop(self, grace_secs: float) -> None:
        """As `drain`, but cut off calls that are still in flight after the grace. May be called while draining."""
        self._drain.start()
        if not self._is_started:
            # grpc releases a bound port only if it has served.
            await self.start()
        await self._grpc.stop(grace_secs)


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio ships no types
    """grpc's lookup of method handlers, called once per call."""

    def __init__(self, handlers: dict[str, MethodHandler], access_log: AccessLog | None) -> None:
        self._handlers = handlers
        self._access_log = access_log
        self._refused = 0

    async def refuse_until_quiet(self) -> None:
        """Refuse all calls except health checks from now on; return when few calls arrive."""

        async def refuse(_call: LoggedCall, context: Context) -> None:
            self._refused += 1
            await abort(context, shutting_down())

        # Replaces the handlers, so that calls before the drain pay nothing for this check.
        self._handlers = {
            method: (
                handler if method.startswith(f"/{HEALTH}/") else answered_in_parts(method, refuse, self._access_log)
            )
            for method, handler in self._handlers.items()
        }
        loop = asyncio.get_running_loop()
        end = loop.time() + LONGEST_REFUSAL_SECS
        before = -1
        while before != self._refused and loop.time() < end:
            before = self._refused
            await asyncio.sleep(QUIET_SECS)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> MethodHandler:
        method = handler_call_details.method
        handler = self._handlers.get(method)
        if handler is not None:
            return handler
        # grpc would send the same text, but without a line in the access log.
        return refused(method, grpc.StatusCode.UNIMPLEMENTED, "Method not found!", self._access_log)


class _LoggedMethods(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio ships no types
    """Logs the name of every call, in Triton's words."""

    def __init__(self, methods: _Methods) -> None:
        self._methods = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> MethodHandler:
        name = handler_call_details.method.rpartition("/")[2]
        handler = f"{name}Handler" if name in {"ModelInfer", "ModelStreamInfer"} else name
        log.debug("Process for %s, rpc_ok=1, 0 step START", handler)
        return self._methods.service(handler_call_details)


class _RestrictedMethods(_Methods):
    """As _Methods, but refuses restricted calls without their secret, before any message is read."""

    def __init__(
        self, handlers: dict[str, MethodHandler], secrets: dict[str, Secret], access_log: AccessLog | None
    ) -> None:
        super().__init__(handlers, access_log)
        self._secrets = secrets

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> MethodHandler:
        method = handler_call_details.method
        secret = self._secrets.get(method)
        if secret is None or any(
            name == secret.header and secret.is_given(value) for name, value in handler_call_details.invocation_metadata
        ):
            return super().service(handler_call_details)
        text = f"This protocol is restricted, expecting header '{secret.header}'"
        return refused(method, grpc.StatusCode.UNAVAILABLE, text, self._access_log)


def _method_handlers(
    server: Server, infer: InferService, drain: Drain, access_log: AccessLog | None
) -> dict[str, MethodHandler]:
    """The handler of every method, by path. They take bytes, so that the server reports invalid ones itself."""
    health = HealthService(server, drain)
    reflection = Reflection((INFERENCE, HEALTH, *REFLECTIONS), drain)
    once = {f"/{INFERENCE}/ModelInfer": infer.model_infer}
    in_parts = {
        f"/{INFERENCE}/ModelStreamInfer": infer.model_stream_infer,
        f"/{HEALTH}/Watch": health.watch,
        **{f"/{service}/ServerReflectionInfo": reflection.info for service in REFLECTIONS},
    }
    check = f"/{HEALTH}/Check"
    handlers = {
        **{method: answered_once(method, behaviour, access_log) for method, behaviour in once.items()},
        **{method: answered_in_parts(method, behaviour, access_log) for method, behaviour in in_parts.items()},
        check: unary(check, message_class("grpc.health.v1.HealthCheckRequest"), health.check, drain, access_log),
    }
    methods = POOL.FindServiceByName(INFERENCE).methods_by_name
    for name, answer in Control(server).answers().items():
        method = f"/{INFERENCE}/{name}"
        request = message_class(methods[name].input_type.full_name)
        handlers[method] = unary(method, request, answer, drain, access_log)
    return handlers
