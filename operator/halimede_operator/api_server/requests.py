"""Requests to the API server with the newest credentials."""

import asyncio
import ssl
import sys
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp

from halimede_operator.api_server.connection import Connection
from halimede_operator.api_server.decoding import decode
from halimede_operator.api_server.errors import ApiError, error_of

JSON = "application/json"
CONNECT_LIMIT_S = 5.0


class Requests:
    def __init__(self, connection: Connection, user_agent: str, max_bytes: int = sys.maxsize) -> None:
        """Needs a running event loop. max_bytes: of an answer; the rest is not read.

        Not the library's own client, because that one encodes bodies itself, as JSON that is not YAML. Proxies and
        passwords of the environment are not meant for the API server, and aiohttp would look them up in a thread before
        every request.
        """
        self._connection, self._user_agent, self._max_bytes = connection, user_agent, max_bytes
        self._session = aiohttp.ClientSession(trust_env=False)
        self._context: ssl.SSLContext | None = None

    async def close(self) -> None:
        await self._session.close()

    async def send(
        self,
        verb: str,
        path: str,
        data: bytes | None,
        query: Mapping[str, str] | None,
        content_type: str = JSON,
        *,
        accept: str = JSON,
        timeout_s: float,
        decoder: Callable[[bytes], dict[str, Any]] = decode,
    ) -> tuple[int, dict[str, Any]]:  # Any: JSON
        """The status and the object of a successful answer. Raises ApiError.

        decoder: raises ValueError if the body is not JSON.
        """
        headers = {"Content-Type": content_type, "Accept": accept, "User-Agent": self._user_agent}
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_LIMIT_S))

        async def attempt() -> tuple[int, Mapping[str, str], bytes]:
            url = self._connection.host + path + (f"?{urlencode(query)}" if query else "")
            given = {**headers, **await self._connection.headers()}
            try:
                if self._context is None:
                    self._context = self._connection.ssl_context()
                async with self._session.request(
                    verb, url, headers=given, data=data, timeout=timeout, ssl=self._context
                ) as answer:
                    return answer.status, answer.headers, await read_at_most(answer.content, self._max_bytes)
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                raise ApiError(verb, path, 0, "Unreachable", str(error) or type(error).__name__) from error

        status, answered, body = await attempt()
        if status == 401:
            # The files may have newer credentials than those that we read.
            try:
                await self._connection.refresh()
            except Exception as error:
                raise ApiError(verb, path, 401, "Unauthorized", f"credentials cannot be read: {error}") from error
            self._context = None
            status, answered, body = await attempt()
        if not 200 <= status < 300:
            raise error_of(verb, path, status, answered, body)
        try:
            return status, decoder(body)
        except ValueError as error:
            raise ApiError(verb, path, 0, "Malformed", "the answer is not JSON") from error


async def read_at_most(content: aiohttp.StreamReader, limit: int) -> bytes:
    """The first `limit` bytes of a body."""
    try:
        return await content.readexactly(limit)
    except asyncio.IncompleteReadError as whole:
        return whole.partial
