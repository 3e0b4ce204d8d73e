"""Probes and metrics over HTTP."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from halimede_operator.metrics import CONTENT_TYPE

Check = Callable[[], str | None]
"""Returns what is wrong; None if nothing is."""


async def serve_probes(port: int, is_alive: Check, is_ready: Check) -> web.AppRunner:
    """Serve GET /healthz and /readyz: 200, or 503 with the cause as text. Arguments are the two checks."""
    app = web.Application()
    app.router.add_get("/healthz", _probe(is_alive))
    app.router.add_get("/readyz", _probe(is_ready))
    return await _serve(app, port)


async def serve_metrics(port: int, text: Callable[[], bytes]) -> web.AppRunner:
    """Serve GET /metrics. text: what it answers, in Prometheus' text format."""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    return await _serve(app, port)


def _probe(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_request: web.Request) -> web.Response:
        wrong = check()
        return web.Response(status=200 if wrong is None else 503, text=wrong or "ok")

    return answer


async def _serve(app: web.Application, port: int) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
