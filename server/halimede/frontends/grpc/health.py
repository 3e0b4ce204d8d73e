"""grpc.health.v1.Health: whether clients should send requests to this server."""

import asyncio

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip
from halimede.core.wire.protocol import ProtoMessage, message_class
from halimede.frontends.grpc.call import Context, Drain, LoggedCall, abort, parse_small, shutting_down, write
from halimede.runtime.server import Server

SERVICES = ("", "inference.GRPCInferenceService")

# The server does not report changes of readiness, so all watches share one poll.
_POLL_SECS = 0.25

_Request = message_class("grpc.health.v1.HealthCheckRequest")
_Response = message_class("grpc.health.v1.HealthCheckResponse")


class HealthService:
    """Check and Watch: SERVING while the server is ready, NOT_SERVING otherwise and as soon as it drains."""

    def __init__(self, server: Server, drain: Drain) -> None:
        self._server = server
        self._drain = drain
        self._watches = 0
        self._seen: int | None = None
        # Set, and replaced, when a poll finds another status.
        self._changed = asyncio.Event()
        self._next_poll: asyncio.TimerHandle | None = None

    def _status(self) -> int:
        is_serving = self._server.is_ready() and not self._drain.started
        return int(_Response.SERVING if is_serving else _Response.NOT_SERVING)

    async def check(self, request: ProtoMessage) -> ProtoMessage:
        """The status of one service; NOT_FOUND if it does not exist."""
        if request.service not in SERVICES:
            raise InferenceError(
                ErrorCode.NOT_FOUND, f"unknown service '{clip(request.service)}', expected one of {list(SERVICES)}"
            )
        return _Response(status=self._status())

    async def watch(self, _call: LoggedCall, context: Context) -> None:
        """Send the status now and whenever it changes, until the client disconnects or the server drains."""
        try:
            service = parse_small("Watch", _Request, await self._drain.receive(context)).service
        except InferenceError as error:
            failure = error
        else:
            failure = shutting_down()
            self._watches += 1
            try:
                if self._next_poll is None:
                    self._poll()
                await self._watch(service, context)
            finally:
                self._watches -= 1
        await abort(context, failure)

    def _poll(self) -> None:
        """Poll, and repeat while watches exist: a client may have a hundred of them on each connection."""
        status = self._status()
        if status != self._seen:
            self._seen = status
            self._changed.set()
            self._changed = asyncio.Event()
        self._next_poll = asyncio.get_running_loop().call_later(_POLL_SECS, self._poll) if self._watches else None

    async def _watch(self, service: str, context: Context) -> None:
        sent = None
        try:
            while True:
                # Taken before the write, so that a change during the write is not missed.
                changed = self._changed
                # The polled status, not the current one, so that all watches get the same sequence of changes.
                status = self._seen if service in SERVICES else _Response.SERVICE_UNKNOWN
                if status != sent:
                    await write(context, _Response(status=status).SerializeToString())
                    sent = status
                async with self._drain.scope():
                    await changed.wait()
        except TimeoutError:
            if sent == _Response.SERVING:
                await write(context, _Response(status=_Response.NOT_SERVING).SerializeToString())
