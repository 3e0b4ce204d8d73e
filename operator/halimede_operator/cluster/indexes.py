"""What the pods say that they serve: their repository index, asked over HTTP beside the reconciles, so that none waits
for a pod.

A pod is asked when its status changes, and again after a while: soon while not all is READY, rarely after. A reconcile
takes what was answered last; an answer that is different wakes it.
"""

import asyncio
import heapq
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import aiohttp
import orjson

from halimede_operator.core.api.spec import Key
from halimede_operator.core.snapshot import Object, PodIndex, ServedVersion

AT_ONCE = 32
LARGEST_BYTES = 1 << 20
MOST_VERSIONS = 4096


@dataclass(frozen=True, slots=True)
class Periods:
    timeout_s: float = 2.0
    unready_s: float = 10.0
    ready_s: float = 60.0


@dataclass(slots=True)
class _Pod:
    key: Key
    version: str
    url: str
    due: float
    asking: bool = False
    index: PodIndex | None = None
    again: bool = field(default=False)
    """Its status changed while it was asked."""


class Indexes:
    """Of one loop; `run` asks until it is cancelled."""

    def __init__(
        self,
        wake: Callable[[Key], None],
        clock: Callable[[], float],
        periods: Periods = Periods(),
    ) -> None:
        self._wake = wake
        self._clock = clock
        self._periods = periods
        self._pods: dict[str, _Pod] = {}
        self._by_key: dict[Key, set[str]] = {}
        self._heap: list[tuple[float, str]] = []
        self._news = asyncio.Event()

    def of(self, key: Key, pods: Iterable[Object]) -> Mapping[str, PodIndex]:
        """What the pods of a key answered last, by uid; these, and no others of the key, are asked from now on."""
        urls = {
            pod["metadata"]["uid"]: (pod["metadata"]["resourceVersion"], url) for pod in pods if (url := index_url(pod))
        }
        for uid in self._by_key.get(key, set()) - urls.keys():
            del self._pods[uid]
        if urls:
            self._by_key[key] = set(urls)
        else:
            self._by_key.pop(key, None)
        now = self._clock()
        for uid, (version, url) in urls.items():
            pod = self._pods.get(uid)
            if pod is None:
                self._pods[uid] = _Pod(key, version, url, now)
                self._push(now, uid)
            elif pod.version != version:
                pod.version, pod.url = version, url
                if pod.asking:
                    pod.again = True
                else:
                    pod.due = now
                    self._push(now, uid)
        return {uid: index for uid in urls if (index := self._pods[uid].index) is not None}

    async def run(self) -> None:
        slots = asyncio.Semaphore(AT_ONCE)
        # No cookies, no proxies: pods are asked by address. Nothing that unpacks to more than was read.
        async with (
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False) as session,
            asyncio.TaskGroup() as group,
        ):
            while True:
                uid = await self._next()
                await slots.acquire()
                task = group.create_task(self._ask(session, uid))
                task.add_done_callback(lambda _task: slots.release())

    async def _next(self) -> str:
        while True:
            self._news.clear()
            wait: float | None = None
            while self._heap:
                due, uid = self._heap[0]
                pod = self._pods.get(uid)
                if pod is None or pod.asking or pod.due != due:
                    heapq.heappop(self._heap)
                    continue
                wait = due - self._clock()
                if wait > 0:
                    break
                heapq.heappop(self._heap)
                pod.asking = True
                return uid
            try:
                async with asyncio.timeout(wait):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _ask(self, session: aiohttp.ClientSession, uid: str) -> None:
        pod = self._pods.get(uid)
        if pod is None:
            return
        index = await ask(session, pod.url, self._periods.timeout_s)
        changed = index != pod.index
        pod.index = index
        pod.asking = False
        if self._pods.get(uid) is not pod:
            return
        is_ready = index.error is None and all(version.state == "READY" for version in index.versions)
        period_s = self._periods.ready_s if is_ready else self._periods.unready_s
        pod.due = self._clock() + (0.0 if pod.again else period_s * random.uniform(0.9, 1.0))  # noqa: S311 - no secret
        pod.again = False
        self._push(pod.due, uid)
        if changed:
            self._wake(pod.key)

    def _push(self, due: float, uid: str) -> None:
        heapq.heappush(self._heap, (due, uid))
        self._news.set()


def index_url(pod: Object) -> str | None:
    """Where a pod's index is; None where its server does not run, or has no HTTP port."""
    status = pod.get("status") or {}
    address = status.get("podIP")
    runs = any(
        container.get("name") == "server" and "running" in (container.get("state") or {})
        for container in status.get("containerStatuses") or ()
    )
    if not address or not runs:
        return None
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if container["name"] == "server" and port.get("name") == "http":
                host = f"[{address}]" if ":" in address else address
                return f"http://{host}:{port['containerPort']}/v2/repository/index"
    return None


async def ask(session: aiohttp.ClientSession, url: str, timeout_s: float) -> PodIndex:
    try:
        async with session.post(
            url, data=b"{}", timeout=aiohttp.ClientTimeout(total=timeout_s), allow_redirects=False
        ) as response:
            data = await response.content.read(LARGEST_BYTES)
            while len(data) <= LARGEST_BYTES and (more := await response.content.read(LARGEST_BYTES)):
                data += more
            if response.status != 200:
                return PodIndex(error=f"HTTP {response.status}")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return PodIndex(error=f"{type(error).__name__}: {error}" if str(error) else "no answer in time")
    return parse_index(data)


def parse_index(data: bytes) -> PodIndex:
    if len(data) > LARGEST_BYTES:
        return PodIndex(error="the index is too long")
    try:
        lines = orjson.loads(data)
        if len(lines) > MOST_VERSIONS:
            return PodIndex(error="the index is too long")
        versions = [
            ServedVersion(
                _text(line["name"]),
                str(line.get("version", "")),
                _text(line.get("state", "")),
                _text(line.get("reason", "")),
            )
            for line in lines
        ]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return PodIndex(error="the answer is no index")
    return PodIndex(tuple(sorted(versions, key=lambda line: (line.model, line.version))))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value
