"""Instant queries of Prometheus' HTTP API."""

import ssl
import time
from pathlib import Path

import aiohttp

from halimede_operator.api_server.requests import read_at_most
from halimede_operator.metrics_api.core.errors import MetricsError, Reason
from halimede_operator.metrics_api.core.results import has_samples
from halimede_operator.metrics_api.metrics import Metrics

TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024


class Prometheus:
    def __init__(self, url: str, token_file: Path | None, ca_file: Path | None, metrics: Metrics) -> None:
        self._url = f"{url}/api/v1/query"
        self._token_file, self._ca_file = token_file, ca_file
        self._metrics = metrics
        # Proxies and passwords of the environment are not meant for Prometheus.
        self._session = aiohttp.ClientSession(
            trust_env=False, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), cookie_jar=aiohttp.DummyCookieJar()
        )
        self._context: ssl.SSLContext | None = None
        self._read_at_ns: int | None = None
        """Modification time of the file of CAs that the context has."""

    async def close(self) -> None:
        await self._session.close()

    async def query(self, expression: str) -> tuple[int, bytes]:
        """The status and the body of the answer. Raises MetricsError if there is none."""
        begun_s = time.monotonic()
        try:
            return await self._query(expression)
        finally:
            self._metrics.queried(time.monotonic() - begun_s)

    async def check(self) -> None:
        """Ask for a constant. Raises MetricsError if Prometheus does not answer, or with an error."""
        has_samples(*await self._query("vector(1)"))
        self._metrics.answered()

    async def _query(self, expression: str) -> tuple[int, bytes]:
        # Sent as a form, because a query may name more pods than an address has room for.
        form = {"query": expression, "timeout": f"{TIMEOUT_S:g}s"}
        try:
            headers = {}
            if self._token_file is not None:
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            # A redirection would carry the token elsewhere.
            async with self._session.post(
                self._url, data=form, headers=headers, ssl=self._ssl(), allow_redirects=False
            ) as answer:
                body = await read_at_most(answer.content, MAX_ANSWER_BYTES + 1)
                if len(body) > MAX_ANSWER_BYTES:
                    raise _failed(f"its answer is larger than {MAX_ANSWER_BYTES} bytes")
                return answer.status, body
        except TimeoutError as error:
            raise _failed(f"no answer from {self._url} within {TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failed(f"{self._url}: {error or type(error).__name__}") from error

    def _ssl(self) -> ssl.SSLContext | bool:
        if self._ca_file is None:
            return True
        changed_ns = self._ca_file.stat().st_mtime_ns
        if self._context is None or changed_ns != self._read_at_ns:
            self._context = ssl.create_default_context(cafile=str(self._ca_file))
            self._read_at_ns = changed_ns
        return self._context


def _failed(why: str) -> MetricsError:
    return MetricsError(Reason.ServiceUnavailable, f"Prometheus cannot be asked: {why}")
