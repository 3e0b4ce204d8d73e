"""Probes and metrics over HTTP."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Self

from aiohttp import web

from halimede_operator.core.process.progress import TICK_S

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Check = Callable[[], str | None]
"""Returns what is wrong; None if nothing is."""


async def serve_probes(port: int, is_alive: Check, is_ready: Check) -> web.AppRunner:
    """Serve GET /healthz and /readyz: 200, or 503 with the cause as text. Arguments are the two checks."""
    app = web.Application()
    app.router.add_get("/healthz", _probe(is_alive))
    app.router.add_get("/readyz", _probe(is_ready))
    return await _serve(app, port)


class ProbeThread:
    """Serves the probes in a thread of its own, so that they are answered while the loop of the work is busy."""

    def __init__(self, port: int, is_alive: Check, is_ready: Check, tick: Callable[[], None]) -> None:
        """tick: called every `TICK_S`. All three are called in the thread."""
        self._serve_probes: Callable[[], Awaitable[web.AppRunner]] = lambda: serve_probes(port, is_alive, is_ready)
        self._tick = tick
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        """Its loop, and the event that ends it."""
        self._ended: Future[None] = Future()

    @classmethod
    async def start(cls, port: int, is_alive: Check, is_ready: Check, tick: Callable[[], None]) -> Self:
        """Raises OSError if the port is in use."""
        made = cls(port, is_alive, is_ready, tick)
        threading.Thread(target=made._run, name="probes", daemon=True).start()
        await asyncio.wrap_future(made._started)
        return made

    async def cleanup(self) -> None:
        loop, stopped = self._started.result()
        loop.call_soon_threadsafe(stopped.set)
        await asyncio.wrap_future(self._ended)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._ended.set_result(None)

    async def _serve(self) -> None:
        stopped = asyncio.Event()
        try:
            runner = await self._serve_probes()
        except Exception as error:  # noqa: BLE001 - it is raised where the thread was started
            self._started.set_exception(error)
            return
        self._started.set_result((asyncio.get_running_loop(), stopped))
        while not stopped.is_set():
            self._tick()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await stopped.wait()
        await runner.cleanup()


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
