"""grpc.health.v1.Health: whether to send requests here."""

import asyncio

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip
from halimede.core.wire.protocol import ProtoMessage, message_class, parse
from halimede.frontends.grpc.call import Context, Drain, abort, shutting_down, write
from halimede.runtime.server import Server

SERVICES = ("", "inference.GRPCInferenceService")

# The façade tells nobody when readiness changes, so a watch looks again and again.
_LOOK_AGAIN_SECS = 0.25

_Request = message_class("grpc.health.v1.HealthCheckRequest")
_Response = message_class("grpc.health.v1.HealthCheckResponse")


class Health:
    """Check and Watch: SERVING while the server is ready, NOT_SERVING otherwise and as soon as it drains."""

    def __init__(self, server: Server, drain: Drain) -> None:
        self._server = server
        self._drain = drain

    def _status(self) -> int:
        is_serving = self._server.is_ready() and not self._drain.started
        return int(_Response.SERVING if is_serving else _Response.NOT_SERVING)

    async def check(self, request: ProtoMessage) -> ProtoMessage:
        """The status of one service; NOT_FOUND for one that is not here."""
        if request.service not in SERVICES:
            raise InferenceError(
                ErrorCode.NOT_FOUND, f"unknown service '{clip(request.service)}', expected one of {list(SERVICES)}"
            )
        return _Response(status=self._status())

    async def watch(self, _requests: object, context: Context) -> None:
        """The status now and whenever it changes, until the client or the server goes."""
        try:
            service = parse(_Request, await self._drain.receive(context)).service
        except InferenceError as error:
            failure = error
        else:
            failure = shutting_down()
            await self._watch(service, context)
        await abort(context, failure)

    async def _watch(self, service: str, context: Context) -> None:
        sent = None
        try:
            async with self._drain.scope():
                while True:
                    status = self._status() if service in SERVICES else _Response.SERVICE_UNKNOWN
                    if status != sent:
                        await write(context, _Response(status=status).SerializeToString())
                        sent = status
                    await asyncio.sleep(_LOOK_AGAIN_SECS)
        except TimeoutError:
            if sent == _Response.SERVING:
                await write(context, _Response(status=_Response.NOT_SERVING).SerializeToString())
