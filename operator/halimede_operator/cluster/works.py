"""Asks pods for their work: those of objects that the operator takes the last replica from when they are idle.

Each pod's page of metrics is read every 10 s, apart from the reconciles. A key is woken while it is idle, so that the
decision is made right after the pods were asked; and when it is no longer idle.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from halimede_operator.cluster.indexes import MAX_CONCURRENT, request, server_url
from halimede_operator.core.scaling.idle import Work, idle_of, read_work
from halimede_operator.core.snapshot import Idle, Object
from halimede_operator.core.spec.types import Key

PERIOD_S = 10.0
TIMEOUT_S = 2.0
METRICS_PATH = "/metrics"


@dataclass(slots=True)
class _Asked:
    pods: Sequence[Object]
    idle: Idle | None
    idle_uids: frozenset[str] = frozenset()
    """The pods that `idle` was computed from."""


class Works:
    """Used by one event loop; `run` asks pods until it is cancelled."""

    def __init__(self, wake: Callable[[Key], None], now: Callable[[], str], period_s: float = PERIOD_S) -> None:
        """now: UTC time as `moment_at` writes it."""
        self._wake = wake
        self._now = now
        self._period_s = period_s
        self._asked: dict[Key, _Asked] = {}

    def idle(self, key: Key, pods: Sequence[Object], kept: Idle | None) -> Idle | None:
        """Since when the object is idle, as of the last answers. From now on exactly these pods of the key are asked.

        kept: what an earlier operator has found.
        """
        known = self._asked.get(key)
        if not pods:
            self._asked.pop(key, None)
            return None
        if known is None:
            self._asked[key] = _Asked(pods, kept)
            return None
        known.pods = pods
        return known.idle if known.idle_uids == _uids(pods) else None

    def forget(self, key: Key) -> None:
        """No pod of the key is asked any more."""
        self._asked.pop(key, None)

    async def run(self) -> None:
        slots = asyncio.Semaphore(MAX_CONCURRENT)
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False) as session:
            while True:
                await asyncio.gather(*[self._ask(session, slots, key) for key in list(self._asked)])
                await asyncio.sleep(self._period_s)

    async def _ask(self, session: aiohttp.ClientSession, slots: asyncio.Semaphore, key: Key) -> None:
        asked = self._asked.get(key)
        if asked is None:
            return
        pods = asked.pods
        answers = await asyncio.gather(*[_work(session, slots, pod) for pod in pods])
        if self._asked.get(key) is not asked or asked.pods is not pods:
            # They changed meanwhile. They are asked again in the next round.
            return
        works = {pod["metadata"]["uid"]: work for pod, work in zip(pods, answers, strict=True) if work is not None}
        before, asked.idle = asked.idle, idle_of(pods, works, asked.idle, self._now())
        asked.idle_uids = _uids(pods)
        if before is not None or asked.idle is not None:
            self._wake(key)


def _uids(pods: Sequence[Object]) -> frozenset[str]:
    return frozenset(pod["metadata"]["uid"] for pod in pods)


async def _work(session: aiohttp.ClientSession, slots: asyncio.Semaphore, pod: Object) -> Work | None:
    """None if the pod cannot be asked, or gives no valid answer."""
    url = server_url(pod, "metrics")
    if url is None:
        return None
    async with slots:
        try:
            status, page = await request(session, "GET", url + METRICS_PATH, TIMEOUT_S)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
    return read_work(page) if status == 200 else None
