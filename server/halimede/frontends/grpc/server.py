"""The gRPC front end: Triton's inference service, health and reflection on one port of the running event loop."""

import asyncio
import logging
import re
from types import MappingProxyType

import grpc  # type: ignore[import-untyped]  # grpcio ships no types

from halimede.core.types import ErrorCode, InferenceError, Restrictions, Secret
from halimede.core.wire.protocol import POOL, message_class
from halimede.frontends.grpc.access import CATEGORIES, HEALTH, INFERENCE, REFLECTIONS
from halimede.frontends.grpc.address import cannot_listen, check_tcp, check_unix
from halimede.frontends.grpc.call import Context, Drain, MethodHandler, abort, shutting_down, unary
from halimede.frontends.grpc.control import Control
from halimede.frontends.grpc.health import Health
from halimede.frontends.grpc.infer import Infer
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
"""A stop refuses calls until none has come for so long, and for so long at most, before it stops grpc."""


class GrpcServer:
    """One listening port: `bind`, `start`, then `drain` or `stop`. Make it while the event loop is running."""

    def __init__(
        self,
        server: Server,
        transport: Transport = _DEFAULT_TRANSPORT,
        restricted: Restrictions = _NO_RESTRICTIONS,
        forward: re.Pattern[str] | None = None,
        max_response_pool_size: int = 2**31 - 1,
    ) -> None:
        """Calls of a `restricted` category need its secret in their metadata. Metadata whose names `forward` matches
        become parameters of the call's requests. A stream is not read on while `max_response_pool_size` of its
        requests or answers wait."""
        self._drain = Drain()
        self._transport = transport
        self._is_started = False
        handlers = _method_handlers(server, Infer(server, self._drain, forward, max_response_pool_size), self._drain)
        secrets = {method: restricted[CATEGORIES[method]] for method in handlers if CATEGORIES[method] in restricted}
        methods = _RestrictedMethods(handlers, secrets) if secrets else _Methods(handlers)
        self._methods = methods
        self._grpc = grpc.aio.server(
            # Who wants no verbose lines pays nothing for them.
            handlers=(_LoggedMethods(methods) if log.isEnabledFor(logging.DEBUG) else methods,),
            options=channel_arguments(transport),
        )

    def bind(self, address: str, port: int) -> int:
        """Take the port (0: any free one) and return it; 0 for an address `unix:<path>`, which has none.

        Connections are accepted, and wait until `start`. OSError `failed to start GRPC service: Socket
        '<address>:<port>' already in use`, or with another cause.
        """
        if address.startswith(UNIX):
            check_unix(address)
            self._add_port(address)
            return 0
        target = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        check_tcp(address, port, target, reuse_port=self._transport.reuse_port)
        return self._add_port(target)

    def _add_port(self, target: str) -> int:
        tls = self._transport.tls
        try:
            if tls is None:
                return int(self._grpc.add_insecure_port(target))
            return int(self._grpc.add_secure_port(target, server_credentials(tls)))
        except RuntimeError:
            raise cannot_listen(target) from None

    async def start(self) -> None:
        """Serve."""
        self._is_started = True
        await self._grpc.start()

    async def drain(self) -> None:
        """Refuse calls, say NOT_SERVING, close the port, and return when the last call in flight is answered.

        What reaches grpc once it is stopped, before the client has heard of that, ends as a bare CANCELLED, which no
        client tries elsewhere: so those who call are sent away first.
        """
        self._drain.start()
        await self._methods.refuse_until_quiet()
        await self.stop(_NO_LIMIT_SECS)

    async def stop(self, grace_secs: float) -> None:
        """As `drain`, but calls that are in flight after the grace are cut off. May be called while draining."""
        self._drain.start()
        if not self._is_started:
            # grpc gives a bound port back only if it has served.
            await self.start()
        await self._grpc.stop(grace_secs)


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio ships no types
    """grpc asks it once per call who handles the method; None becomes UNIMPLEMENTED."""

    def __init__(self, handlers: dict[str, MethodHandler]) -> None:
        self._handlers = handlers
        self._refused = 0

    async def refuse_until_quiet(self) -> None:
        """From now on all calls but those of health are refused; returns when hardly any come any more."""

        async def refuse(_requests: object, context: Context) -> None:
            self._refused += 1
            await abort(context, shutting_down())

        refusal = grpc.stream_stream_rpc_method_handler(refuse)
        # In place of the handlers, so that a call pays nothing for it before.
        self._handlers = {
            method: handler if method.startswith(f"/{HEALTH}/") else refusal
            for method, handler in self._handlers.items()
        }
        loop = asyncio.get_running_loop()
        end = loop.time() + LONGEST_REFUSAL_SECS
        before = -1
        while before != self._refused and loop.time() < end:
            before = self._refused
            await asyncio.sleep(QUIET_SECS)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> MethodHandler | None:
        return self._handlers.get(handler_call_details.method)


class _LoggedMethods(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio ships no types
    """Says of every call what it is, in Triton's words."""

    def __init__(self, methods: _Methods) -> None:
        self._methods = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> MethodHandler | None:
        name = handler_call_details.method.rpartition("/")[2]
        handler = f"{name}Handler" if name in {"ModelInfer", "ModelStreamInfer"} else name
        log.debug("Process for %s, rpc_ok=1, 0 step START", handler)
        return self._methods.service(handler_call_details)


class _RestrictedMethods(_Methods):
    """As _Methods, but some calls are refused for want of a secret, before anything of them is read."""

    def __init__(self, handlers: dict[str, MethodHandler], secrets: dict[str, Secret]) -> None:
        super().__init__(handlers)
        self._secrets = secrets
        self._refusals = {secret.header: _refusal(secret) for secret in secrets.values()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> MethodHandler | None:
        secret = self._secrets.get(handler_call_details.method)
        if secret is not None and not any(
            name == secret.header and secret.is_given(value) for name, value in handler_call_details.invocation_metadata
        ):
            return self._refusals[secret.header]
        return super().service(handler_call_details)


def _refusal(secret: Secret) -> MethodHandler:
    error = InferenceError(ErrorCode.UNAVAILABLE, f"This protocol is restricted, expecting header '{secret.header}'")

    async def refuse(_requests: object, context: Context) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _method_handlers(server: Server, infer: Infer, drain: Drain) -> dict[str, MethodHandler]:
    """Every method's handler, by the method's path. They take and give bytes: bad ones are answered by our own text."""
    health = Health(server, drain)
    reflection = Reflection((INFERENCE, HEALTH, *REFLECTIONS), drain)
    handlers = {
        f"/{INFERENCE}/ModelInfer": grpc.stream_unary_rpc_method_handler(infer.model_infer),
        f"/{INFERENCE}/ModelStreamInfer": grpc.stream_stream_rpc_method_handler(infer.model_stream_infer),
        f"/{HEALTH}/Check": unary(message_class("grpc.health.v1.HealthCheckRequest"), "Check", health.check, drain),
        f"/{HEALTH}/Watch": grpc.stream_stream_rpc_method_handler(health.watch),
    }
    for service in REFLECTIONS:
        handlers[f"/{service}/ServerReflectionInfo"] = grpc.stream_stream_rpc_method_handler(reflection.info)
    methods = POOL.FindServiceByName(INFERENCE).methods_by_name
    for name, answer in Control(server).answers().items():
        request = message_class(methods[name].input_type.full_name)
        handlers[f"/{INFERENCE}/{name}"] = unary(request, name, answer, drain)
    return handlers
