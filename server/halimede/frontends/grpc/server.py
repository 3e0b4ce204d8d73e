"""The gRPC front end: Triton's inference service, health and reflection on one port of the running event loop."""

import errno
import socket

import grpc  # type: ignore[import-untyped]  # grpcio ships no types

from halimede.core.wire.protocol import POOL, message_class
from halimede.frontends.grpc.call import Drain, MethodHandler, unary
from halimede.frontends.grpc.control import Control
from halimede.frontends.grpc.health import Health
from halimede.frontends.grpc.infer import Infer
from halimede.frontends.grpc.reflection import Reflection
from halimede.runtime.server import Server

MAX_MESSAGE_BYTES = 2**31 - 1

_INFERENCE = "inference.GRPCInferenceService"
_HEALTH = "grpc.health.v1.Health"
_REFLECTIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

_NO_LIMIT_SECS = 365 * 24 * 3600.0


class GrpcServer:
    """One listening port: `bind`, `start`, then `drain` or `stop`. Make it while the event loop is running."""

    def __init__(self, server: Server, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._drain = Drain()
        self._is_started = False
        self._grpc = grpc.aio.server(
            handlers=(_Methods(_method_handlers(server, self._drain)),),
            options=(
                # Two servers on one port would share its connections at random; the second is to fail instead.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
            ),
        )

    def bind(self, address: str, port: int) -> int:
        """Take the port (0: any free one) and return it. Connections are accepted, and wait until `start`.

        OSError `failed to start GRPC service: Socket '<address>:<port>' already in use`, or with another cause.
        """
        target = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        # grpc says neither why it failed nor that it got only some of a name's addresses.
        _try_bind(address, port, target)
        try:
            return int(self._grpc.add_insecure_port(target))
        except RuntimeError:
            raise OSError(f"failed to start GRPC service: cannot listen on '{target}'") from None

    async def start(self) -> None:
        """Serve."""
        self._is_started = True
        await self._grpc.start()

    async def drain(self) -> None:
        """Close the port, send clients away, say NOT_SERVING, and return when the last call in flight is answered."""
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

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> MethodHandler | None:
        return self._handlers.get(handler_call_details.method)


def _method_handlers(server: Server, drain: Drain) -> dict[str, MethodHandler]:
    """Every method's handler, by the method's path. They take and give bytes: bad ones are answered by our own text."""
    infer = Infer(server, drain)
    health = Health(server, drain)
    reflection = Reflection((_INFERENCE, _HEALTH, *_REFLECTIONS), drain)
    handlers = {
        f"/{_INFERENCE}/ModelInfer": grpc.unary_unary_rpc_method_handler(infer.model_infer),
        f"/{_INFERENCE}/ModelStreamInfer": grpc.stream_stream_rpc_method_handler(infer.model_stream_infer),
        f"/{_HEALTH}/Check": unary(message_class("grpc.health.v1.HealthCheckRequest"), "Check", health.check),
        f"/{_HEALTH}/Watch": grpc.unary_stream_rpc_method_handler(health.watch),
    }
    for service in _REFLECTIONS:
        handlers[f"/{service}/ServerReflectionInfo"] = grpc.stream_stream_rpc_method_handler(reflection.info)
    methods = POOL.FindServiceByName(_INFERENCE).methods_by_name
    for name, answer in Control(server).answers().items():
        request = message_class(methods[name].input_type.full_name)
        handlers[f"/{_INFERENCE}/{name}"] = unary(request, name, answer)
    return handlers


def _try_bind(address: str, port: int, target: str) -> None:
    try:
        places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"failed to start GRPC service: address '{address}': {error.strerror}") from None
    for family, kind, protocol, _, place in places:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    text = f"Socket '{target}' already in use"
                else:
                    text = f"cannot listen on '{target}': {error.strerror}"
                raise OSError(f"failed to start GRPC service: {text}") from None
