"""Reads the repository index of each pod over HTTP, apart from the reconciles, so that no reconcile waits for a pod.

A pod is asked when its status changes, and periodically: often while some version is not READY, or if models have
worker processes, because these die without a change of the pod's status; rarely otherwise. A reconcile uses the last
answer, and an answer that differs wakes a reconcile.

A pod whose versions are all READY is asked for its devices too, right after its index: at first, and then every few
minutes, because the peak of its memory may have grown. A report that is missing, malformed or too long is ignored.
"""

import asyncio
import heapq
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import orjson

from halimede_operator.api_server.requests import read_at_most
from halimede_operator.core.reading import at, decimal, text_at
from halimede_operator.core.snapshot import Object, PodDevice, PodDevices, PodIndex, ServedVersion
from halimede_operator.core.spec.types import Key

MAX_CONCURRENT = 32
"""How many pods are asked at the same time."""
LARGEST_BYTES = 1 << 20
MOST_VERSIONS = 4096
MOST_DEVICES = 64

INDEX_PATH = "/v2/repository/index"
DEVICES_PATH = "/v2/halimede/devices"


@dataclass(frozen=True, slots=True)
class Periods:
    """How often pods are asked."""

    timeout_s: float = 2.0
    unready_s: float = 10.0
    workers_s: float = 8.0
    ready_s: float = 60.0
    devices_s: float = 300.0

    def after(self, index: PodIndex) -> float:
        """Seconds from this answer of a pod to the next request."""
        if not is_ready(index):
            return self.unready_s
        return self.workers_s if any(version.has_workers for version in index.versions) else self.ready_s


def is_ready(index: PodIndex) -> bool:
    """Whether the pod answered, and all its versions are READY."""
    return index.error is None and all(version.state == "READY" for version in index.versions)


@dataclass(slots=True)
class _Pod:
    key: Key
    version: str
    url: str
    due: float
    asking: bool = False
    index: PodIndex | None = None
    again: bool = field(default=False)
    """Its status changed while a request was in flight, so it is asked again at once."""
    devices_due: float = 0.0


class Indexes:
    """The last index of each pod. Used by one event loop; `run` asks pods until it is cancelled."""

    def __init__(self, wake: Callable[[Key], None], clock: Callable[[], float], periods: Periods = Periods()) -> None:
        self._wake = wake
        self._clock = clock
        self._periods = periods
        self._pods: dict[str, _Pod] = {}
        self._by_key: dict[Key, set[str]] = {}
        self._heap: list[tuple[float, str]] = []
        self._changed = asyncio.Event()

    def of(self, key: Key, pods: Iterable[Object]) -> Mapping[str, PodIndex]:
        """The last answers of these pods, by uid. From now on exactly these pods of the key are asked."""
        urls = {
            pod["metadata"]["uid"]: (pod["metadata"]["resourceVersion"], url)
            for pod in pods
            if (url := server_url(pod))
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
        slots = asyncio.Semaphore(MAX_CONCURRENT)
        # No cookies and no proxies: pods are asked by address. No decompression: it could exceed LARGEST_BYTES.
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
            self._changed.clear()
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
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _ask(self, session: aiohttp.ClientSession, uid: str) -> None:
        pod = self._pods.get(uid)
        if pod is None:
            return
        index = await ask(session, pod.url, self._periods.timeout_s)
        devices = pod.index.devices if pod.index is not None else None
        if is_ready(index) and pod.devices_due <= self._clock():
            devices = await ask_devices(session, pod.url, self._periods.timeout_s) or devices
            pod.devices_due = self._clock() + self._periods.devices_s * random.uniform(0.9, 1.0)  # noqa: S311 - no secret
        index = replace(index, devices=devices)
        changed = index != pod.index
        pod.index = index
        pod.asking = False
        if self._pods.get(uid) is not pod:
            return
        period_s = self._periods.after(index)
        pod.due = self._clock() + (0.0 if pod.again else period_s * random.uniform(0.9, 1.0))  # noqa: S311 - no secret
        pod.again = False
        self._push(pod.due, uid)
        if changed:
            self._wake(pod.key)

    def _push(self, due: float, uid: str) -> None:
        heapq.heappush(self._heap, (due, uid))
        self._changed.set()


def server_url(pod: Object, port_name: str = "http") -> str | None:
    """URL of a port of a pod's server; None if it does not run or has no such port."""
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
            if container["name"] == "server" and port.get("name") == port_name:
                host = f"[{address}]" if ":" in address else address
                return f"http://{host}:{port['containerPort']}"
    return None


async def ask(session: aiohttp.ClientSession, url: str, timeout_s: float) -> PodIndex:
    """Request the index of one pod. A failure becomes the index's `error`."""
    try:
        status, data = await request(session, "POST", url + INDEX_PATH, timeout_s)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return PodIndex(error=f"{type(error).__name__}: {error}" if str(error) else "no answer in time")
    return parse_index(data) if status == 200 else PodIndex(error=f"HTTP {status}")


async def ask_devices(session: aiohttp.ClientSession, url: str, timeout_s: float) -> PodDevices | None:
    """Request the devices of one pod; None if it gives no valid report."""
    try:
        status, data = await request(session, "GET", url + DEVICES_PATH, timeout_s)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    return parse_devices(data) if status == 200 else None


async def request(session: aiohttp.ClientSession, method: str, url: str, timeout_s: float) -> tuple[int, bytes]:
    """Status and body. Of a body that is too long, LARGEST_BYTES + 1 bytes are read."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    data = b"{}" if method == "POST" else None
    async with session.request(method, url, data=data, timeout=timeout, allow_redirects=False) as response:
        return response.status, await read_at_most(response.content, LARGEST_BYTES + 1)


def parse_index(data: bytes) -> PodIndex:
    """Parse the body of an answer. Invalid data becomes the index's `error`."""
    if len(data) > LARGEST_BYTES:
        return PodIndex(error="the index is too long")
    try:
        lines = orjson.loads(data)
        if len(lines) > MOST_VERSIONS:
            return PodIndex(error="the index is too long")
        versions = [_version(line) for line in lines]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return PodIndex(error="the answer is not an index")
    return PodIndex(tuple(sorted(versions, key=lambda line: (line.model, line.version))))


def _version(line: Mapping[str, Any]) -> ServedVersion:
    workers = line.get("workers")
    failed = workers or {}
    return ServedVersion(
        _text(line["name"]),
        str(line.get("version", "")),
        _text(line.get("state", "")),
        _text(line.get("reason", "")),
        workers is not None,
        _text(failed.get("failure", "")),
        failed.get("out_of_memory") is True,
    )


_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
_PROFILE = re.compile(r"[0-9a-z.+-]{1,32}")


def parse_devices(data: bytes) -> PodDevices | None:
    """Parse the body of a report of devices; None if it is not one, or is too long."""
    if len(data) > LARGEST_BYTES:
        return None
    try:
        report = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    listed = at(report, "devices")
    if not isinstance(listed, list) or len(listed) > MOST_DEVICES:
        return None
    devices = tuple(_device(line) for line in listed)
    if any(_UUID.fullmatch(device.uuid) is None for device in devices):
        return None
    return PodDevices(devices, decimal(at(report, "host", "memory_peak_bytes")))


def _device(line: object) -> PodDevice:
    profile = text_at(line, "profile")
    return PodDevice(
        text_at(line, "uuid"),
        profile if _PROFILE.fullmatch(profile) else "",
        decimal(at(line, "memory_total_bytes")),
        decimal(at(line, "memory_before_bytes")),
        decimal(at(line, "memory_peak_bytes")),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value
