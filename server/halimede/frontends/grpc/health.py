"""grpc.health.v1.Health: whether clients should send requests to this server."""

import asyncio
from functools import partial

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip
from halimede.core.wire.grpc_messages import Message
from halimede.core.wire.protocol import ProtoMessage, message_class
from halimede.facade.server import Server
from halimede.frontends.grpc.call import Call, shutting_down
from halimede.frontends.grpc.opening import fail_without_message, parse_small

SERVICES = ("", "inference.GRPCInferenceService")

# The server does not report changes of readiness, so all watches share one poll.
_POLL_SECS = 0.25

_Request = message_class("grpc.health.v1.HealthCheckRequest")
_Response = message_class("grpc.health.v1.HealthCheckResponse")


class HealthService:
    """Check and Watch: SERVING while the server is ready, NOT_SERVING otherwise and as soon as it drains."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_draining = False
        # Each watch with its service, and the status that it was sent last.
        self._watches: dict[Call, tuple[str, int | None]] = {}
        self._seen = int(_Response.UNKNOWN)
        self._next_poll: asyncio.TimerHandle | None = None

    def drain(self) -> None:
        """Report NOT_SERVING from now on."""
        self._is_draining = True

    def _status(self) -> int:
        is_serving = self._server.is_ready() and not self._is_draining
        return int(_Response.SERVING if is_serving else _Response.NOT_SERVING)

    async def check(self, request: ProtoMessage) -> ProtoMessage:
        """The status of one service; NOT_FOUND if it does not exist."""
        if request.service not in SERVICES:
            raise InferenceError(
                ErrorCode.NOT_FOUND, f"unknown service '{clip(request.service)}', expected one of {list(SERVICES)}"
            )
        return _Response(status=self._status())

    def begin_watch(self, call: Call) -> None:
        """Send the status now and whenever it changes, until the client leaves or the server drains."""
        call.on_message = partial(self._watch, call)
        call.on_half_closed = partial(fail_without_message, call)

    def _watch(self, call: Call, message: Message) -> None:
        service = parse_small(call, _Request, message).service
        call.on_message = call.on_half_closed = None
        call.on_room = partial(self._update, call)
        call.on_drain = partial(self._end, call)
        call.on_gone = partial(self._forget, call)
        self._watches[call] = service, None
        if self._next_poll is None:
            self._poll()
        else:
            # The polled status, not the current one, so that all watches get the same sequence of changes.
            self._update(call)

    def _poll(self) -> None:
        """Poll, and repeat while watches exist: a client may have a hundred of them on each connection."""
        self._seen = self._status()
        for call in tuple(self._watches):
            self._update(call)
        self._next_poll = asyncio.get_running_loop().call_later(_POLL_SECS, self._poll) if self._watches else None

    def _update(self, call: Call) -> None:
        """Send the status if it has changed. A client that does not read gets only the last one when it reads again."""
        service, sent = self._watches[call]
        status = self._seen if service in SERVICES else int(_Response.SERVICE_UNKNOWN)
        if status != sent and call.has_room:
            self._watches[call] = service, status
            _send(call, status)

    def _forget(self, call: Call) -> None:
        del self._watches[call]

    def _end(self, call: Call) -> None:
        _, sent = self._watches.pop(call)
        if sent == _Response.SERVING:
            _send(call, int(_Response.NOT_SERVING))
        call.fail(shutting_down())


def _send(call: Call, status: int) -> None:
    message = _Response(status=status).SerializeToString()
    call.send((message,), len(message))
