"""The HTTPS server: bounded in connections, requests at a time, and their time."""

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from halimede_operator.api_server.errors import ApiError
from halimede_operator.metrics_api.core import answers
from halimede_operator.metrics_api.core.errors import MetricsError, Reason
from halimede_operator.metrics_api.core.requests import parse_request
from halimede_operator.metrics_api.metrics import SUCCESS, Metrics
from halimede_operator.metrics_api.service import Service, as_metrics_error
from halimede_operator.metrics_api.tls import Tls

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
MAX_ACTIVE = 16
"""How many requests ask Prometheus or the API server at a time."""
MAX_WAITING = 128
REQUEST_LIMIT_S = 10.0
HANDSHAKE_LIMIT_S = 5.0
LOG_EVERY_S = 10.0


class Server:
    def __init__(self, service: Service, tls: Tls, metrics: Metrics) -> None:
        self._service, self._tls, self._metrics = service, tls, metrics
        self._active = asyncio.Semaphore(MAX_ACTIVE)
        self._requests = 0
        """How many requests are active or wait. Changed by `_handle` alone."""
        self._logged_at_s = -LOG_EVERY_S

    async def start(self, port: int) -> Callable[[], Awaitable[None]]:
        """Start to listen. Return the function that stops the server. Raises OSError if the port is in use."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, access_log=None, lingering_time=0, keepalive_timeout=60)
        await runner.setup()
        # Not a TCPSite, which limits neither connections nor the time of a handshake.
        make = runner.server

        def accept() -> asyncio.Protocol:
            return make() if make is not None and len(make.connections) < MAX_CONNECTIONS else _Refusal()

        listener = await asyncio.get_running_loop().create_server(
            accept, None, port, ssl=self._tls.listening, ssl_handshake_timeout=HANDSHAKE_LIMIT_S
        )
        log.info("serving on port %d", listener.sockets[0].getsockname()[1])

        async def stop() -> None:
            listener.close()
            await runner.cleanup()

        return stop

    async def _handle(self, request: web.Request) -> web.Response:
        try:
            answer = await self._within_limits(request)
        except MetricsError as error:
            return self._failed(error)
        except ApiError as error:
            return self._failed(as_metrics_error(error))
        except TimeoutError:
            return self._failed(MetricsError(Reason.ServiceUnavailable, f"no answer within {REQUEST_LIMIT_S:g} s"))
        except Exception:
            log.exception("a request failed: %s", request.path)
            return self._failed(MetricsError(Reason.InternalError, "internal error"))
        self._metrics.requested(SUCCESS)
        return _json(200, answer)

    async def _within_limits(self, request: web.Request) -> dict[str, object]:
        if request.method != "GET":
            raise MetricsError(Reason.MethodNotAllowed, f"{request.method}: metrics can only be read, with GET")
        if self._requests >= MAX_ACTIVE + MAX_WAITING:
            raise MetricsError(Reason.TooManyRequests, f"{self._requests} other requests are being answered")
        connection = request.transport.get_extra_info("ssl_object") if request.transport else None
        certificate = self._tls.certificate_of(connection) if isinstance(connection, ssl.SSLObject) else None
        self._requests += 1
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S), self._active:
                return await self._service.answer(
                    lambda: parse_request(request.path, request.query), tuple(request.headers.items()), certificate
                )
        finally:
            self._requests -= 1

    def _failed(self, error: MetricsError) -> web.Response:
        if error.reason in (Reason.ServiceUnavailable, Reason.InternalError):
            self._say(error.message)
        self._metrics.requested(error.reason.name)
        answer = _json(error.reason.value, answers.status(error))
        match error.reason:
            case Reason.Unauthorized:
                # The connection may be older than the CA that we trust now.
                answer.force_close()
            case Reason.TooManyRequests:
                answer.headers["Retry-After"] = "1"
            case _:
                pass
        return answer

    def _say(self, failure: str) -> None:
        """Log a failure that is not the client's, at most one every LOG_EVERY_S."""
        now_s = time.monotonic()
        if now_s >= self._logged_at_s + LOG_EVERY_S:
            self._logged_at_s = now_s
            log.warning("a request failed: %s", failure)


class _Refusal(asyncio.Protocol):
    """Closes a connection above MAX_CONNECTIONS."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _json(status: int, document: dict[str, object]) -> web.Response:
    return web.Response(
        status=status,
        body=orjson.dumps(document),
        content_type="application/json",
        headers={"Cache-Control": "no-cache, private"},
    )
