"""A proxy to the API server that can be broken: `python -m cluster.faulty_api SOCKET PKI`.

It terminates TLS with the API server's own certificate and forwards bearer tokens. Client certificates are not
forwarded, and connections are not upgraded (`kubectl exec`). Commands are `{"mode": MODE, "rules": [...]}`:

MODE is `pass`, `refuse` (no connection is accepted, and open ones are closed) or `hang` (no bytes are forwarded until
it passes again). A rule applies to requests whose method and path match its expressions, `times` of them or all (null).
They wait `delay_s` first. Then they are answered with `status`, or with `lose` forwarded and not answered, or as usual.
"""

import asyncio
import re
import ssl
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from cluster.commands import listen
from cluster.control import ADDRESS, FAULTY_PORT, PORT

# What belongs to one connection, and what is written anew.
OF_A_CONNECTION = {"connection", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
REASONS = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}
MESSAGE = "it was made to fail"
LONGEST_BODY_BYTES = 16 << 20


@dataclass
class Rule:
    method: str = ".*"
    path: str = ".*"
    times: int | None = None
    delay_s: float = 0.0
    status: int | None = None
    lose: bool = False

    def try_take(self, request: web.BaseRequest) -> bool:
        """Whether it holds for this request, which then counts."""
        if (
            self.times == 0
            or not re.fullmatch(self.method, request.method)
            or not re.search(self.path, request.raw_path)
        ):
            return False
        if self.times is not None:
            self.times -= 1
        return True


class FaultyApi:
    def __init__(self, pki: Path, session: aiohttp.ClientSession) -> None:
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(pki / "apiserver.crt", pki / "apiserver.key")
        self._session = session
        self._rules: list[Rule] = []
        self._moves = asyncio.Event()
        app = web.Application(client_max_size=LONGEST_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        self._site: web.TCPSite | None = None

    async def start(self) -> None:
        await self._runner.setup()
        await self.set({"mode": "pass", "rules": []})

    async def set(self, order: Any) -> list[int | None]:
        """Replace mode and rules. Returns how often each of the former rules could still hold."""
        left = [rule.times for rule in self._rules]
        self._rules = [Rule(**rule) for rule in order["rules"]]
        mode = order["mode"]
        if mode == "hang":
            self._moves.clear()
        else:
            self._moves.set()
        if mode == "refuse" and self._site:
            await self._site.stop()
            self._site = None
            assert self._runner.server
            for connection in list(self._runner.server.connections):
                connection.force_close()
        if mode != "refuse" and not self._site:
            self._site = web.TCPSite(self._runner, ADDRESS, FAULTY_PORT, ssl_context=self._tls, reuse_address=True)
            await self._site.start()
        return left

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await self._moves.wait()
        rule = next((rule for rule in self._rules if rule.try_take(request)), Rule())
        await asyncio.sleep(rule.delay_s)
        if rule.status:
            reason = REASONS.get(rule.status, "")
            document = {
                "apiVersion": "v1",
                "kind": "Status",
                "status": "Failure",
                "code": rule.status,
                "message": MESSAGE,
                "reason": reason,
            }
            headers = {"Retry-After": "1"} if rule.status == 429 else {}
            return web.json_response(document, status=rule.status, headers=headers)
        url = URL(f"https://{ADDRESS}:{PORT}{request.raw_path}", encoded=True)
        sent = {name: value for name, value in request.headers.items() if name.lower() not in OF_A_CONNECTION}
        async with self._session.request(
            request.method, url, headers=sent, data=await request.read(), allow_redirects=False
        ) as answer:
            if rule.lose:
                await answer.read()
                assert request.transport
                request.transport.abort()
            return await self._send_on(request, answer)

    async def _send_on(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in OF_A_CONNECTION}
        response = web.StreamResponse(status=answer.status, headers=kept)
        with suppress(OSError):  # the client is gone
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await self._moves.wait()
                await response.write(chunk)
            await response.write_eof()
        return response


async def main() -> None:
    pki = Path(sys.argv[2])
    trusted = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=trusted, limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )
    async with session:
        api = FaultyApi(pki, session)
        await api.start()
        loop = asyncio.get_running_loop()
        listen(Path(sys.argv[1]), lambda order, _: asyncio.run_coroutine_threadsafe(api.set(order), loop).result())
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
