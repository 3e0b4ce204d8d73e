import asyncio
import gzip
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from aiohttp import web

from halimede_operator.cluster.indexes import Indexes, Periods, parse_devices, parse_index, server_url
from halimede_operator.core.snapshot import PodDevice, PodDevices, PodIndex, ServedVersion
from halimede_operator.core.spec.types import Key, Kind

DIGITS = Key(Kind.INFERENCE_MODEL, "prod", "digits")
READY = PodIndex((ServedVersion("digits", "1", "READY", ""),))


def pod(
    port: int = 8000, version: str = "1", ip: str = "127.0.0.1", uid: str = "pod", state: str = "running"
) -> dict[str, Any]:
    return {
        "metadata": {"uid": uid, "resourceVersion": version},
        "spec": {
            "containers": [
                {"name": "sidecar", "ports": [{"name": "http", "containerPort": 1}]},
                {
                    "name": "server",
                    "ports": [{"name": "grpc", "containerPort": 2}, {"name": "http", "containerPort": port}],
                },
            ]
        },
        "status": {"podIP": ip, "containerStatuses": [{"name": "server", "state": {state: {}}}]},
    }


@pytest.mark.parametrize(
    ("value", "url"),
    [
        (pod(), "http://127.0.0.1:8000"),
        (pod(ip="fd00::1"), "http://[fd00::1]:8000"),
        (pod(ip=""), None),
        (pod(state="waiting"), None),
        ({**pod(), "spec": {"containers": [{"name": "server"}]}}, None),
        ({**pod(), "status": {}}, None),
    ],
)
def test_server_url_has_the_servers_http_port(value: dict[str, Any], url: str | None):
    assert server_url(value) == url


@pytest.mark.parametrize(
    ("data", "index"),
    [
        (b"[]", PodIndex()),
        (
            json.dumps([{"name": "b", "version": "1", "state": "READY"}, {"name": "a", "reason": "why"}]).encode(),
            PodIndex((ServedVersion("a", "", "", "why"), ServedVersion("b", "1", "READY", ""))),
        ),
        (
            json.dumps(
                [
                    {"name": "a", "state": "READY", "workers": {}},
                    {"name": "b", "state": "READY", "workers": {"failure": "signal 9", "out_of_memory": True}},
                ]
            ).encode(),
            PodIndex(
                (
                    ServedVersion("a", "", "READY", "", has_workers=True),
                    ServedVersion("b", "", "READY", "", True, "signal 9", True),
                )
            ),
        ),
        (b'[{"name":"a","workers":[1]}]', PodIndex(error="the answer is not an index")),
        (b'[{"name":"a","workers":{"failure":7}}]', PodIndex(error="the answer is not an index")),
        (b"<html>", PodIndex(error="the answer is not an index")),
        (b"{}", PodIndex()),
        (b"[1]", PodIndex(error="the answer is not an index")),
        (b"1", PodIndex(error="the answer is not an index")),
        (b'[{"name":"a"},{"name":1}]', PodIndex(error="the answer is not an index")),
        (b'[{"name":"a","state":{}}]', PodIndex(error="the answer is not an index")),
        (b'[{"name":"a","reason":[]}]', PodIndex(error="the answer is not an index")),
        (b"[" * 2000 + b"]" * 2000, PodIndex(error="the answer is not an index")),
        (b"[" + b"1," * 9999 + b"1]", PodIndex(error="the index is too long")),
        (b" " * (2 << 20), PodIndex(error="the index is too long")),
    ],
)
def test_an_index_is_parsed(data: bytes, index: PodIndex):
    assert parse_index(data) == index


REPORT = {
    "devices": [
        {
            "index": 0,
            "uuid": "MIG-1",
            "kind": "MIG",
            "profile": "1g.10gb",
            "memory_total_bytes": 900,
            "memory_used_bytes": 50,
            "memory_before_bytes": 5,
            "memory_peak_bytes": 60,
            "instances": [],
        },
        {"index": 1, "uuid": "GPU-2"},
    ],
    "host": {"memory_peak_bytes": 70},
}
DEVICES = PodDevices((PodDevice("MIG-1", "1g.10gb", 900, 5, 60), PodDevice("GPU-2")), 70)


@pytest.mark.parametrize(
    ("data", "devices"),
    [
        (json.dumps(REPORT).encode(), DEVICES),
        (b'{"devices": [], "host": {}}', PodDevices()),
        (b'{"devices": []}', PodDevices()),
        (
            b'{"devices": [{"uuid": "MIG-1", "profile": "<b>", "memory_peak_bytes": -1}], "host": {"memory_peak_bytes": "x"}}',
            PodDevices((PodDevice("MIG-1"),)),
        ),
        (b'{"devices": [{"uuid": "MIG-1,MIG-2"}]}', None),
        (b'{"devices": [{"uuid": "a b"}]}', None),
        (b'{"devices": [{}]}', None),
        (b'{"devices": [7]}', None),
        (b'{"devices": {}}', None),
        (b"[]", None),
        (b"7", None),
        (b"<html>", None),
        (json.dumps({"devices": [{"uuid": f"MIG-{number}"} for number in range(65)]}).encode(), None),
        (b'{"devices": []' + b" " * (1 << 20) + b"}", None),
    ],
)
def test_a_report_of_devices_is_parsed(data: bytes, devices: PodDevices | None):
    assert parse_devices(data) == devices


@dataclass
class Pods:
    """Plays the server of a pod."""

    port: int
    answer: Callable[[], Awaitable[web.StreamResponse]]
    indexes: Indexes
    woken: list[Key]
    devices: Callable[[], Awaitable[web.StreamResponse]] | None = None
    """None: an old server, without such a report."""
    asked: int = 0
    asked_devices: int = 0

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_so():
                await asyncio.sleep(0.01)


def run(scenario: Callable[[Pods], Awaitable[None]], periods: Periods) -> None:
    async def ready() -> web.StreamResponse:
        return web.json_response([{"name": "digits", "version": "1", "state": "READY"}])

    async def whole() -> None:
        async def index(_request: web.Request) -> web.StreamResponse:
            pods.asked += 1
            return await pods.answer()

        async def devices(_request: web.Request) -> web.StreamResponse:
            pods.asked_devices += 1
            return web.Response(status=404) if pods.devices is None else await pods.devices()

        app = web.Application()
        app.router.add_post("/v2/repository/index", index)
        app.router.add_get("/v2/halimede/devices", devices)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        woken: list[Key] = []
        indexes = Indexes(woken.append, time.monotonic, periods)
        pods = Pods(runner.addresses[0][1], ready, indexes, woken)
        running = asyncio.create_task(indexes.run())
        await scenario(pods)
        running.cancel()
        await asyncio.wait({running})
        await runner.cleanup()

    asyncio.run(whole())


NEVER_AGAIN = Periods(timeout_s=5.0, unready_s=1000.0, ready_s=1000.0)


def test_a_pod_is_asked_again_when_its_status_changes():
    async def scenario(pods: Pods) -> None:
        assert pods.indexes.of(DIGITS, [pod(pods.port)]) == {}
        await pods.until(lambda: pods.woken == [DIGITS])
        for _ in range(3):
            assert pods.indexes.of(DIGITS, [pod(pods.port)]) == {"pod": READY}
        assert pods.asked == 1
        pods.indexes.of(DIGITS, [pod(pods.port, version="2")])
        await pods.until(lambda: pods.asked == 2)
        assert pods.woken == [DIGITS], "the same answer is no news"

    run(scenario, NEVER_AGAIN)


async def report() -> web.StreamResponse:
    return web.json_response(REPORT)


def test_a_ready_pod_is_asked_for_its_devices_once_in_a_while():
    async def scenario(pods: Pods) -> None:
        pods.devices = report
        pods.indexes.of(DIGITS, [pod(pods.port)])
        await pods.until(lambda: pods.asked >= 4)
        assert pods.indexes.of(DIGITS, [pod(pods.port)]) == {"pod": replace(READY, devices=DEVICES)}
        assert (pods.asked_devices, pods.woken) == (1, [DIGITS])

    run(scenario, Periods(timeout_s=5.0, ready_s=0.02, devices_s=1000.0))

    async def later(pods: Pods) -> None:
        pods.indexes.of(DIGITS, [pod(pods.port)])
        await pods.until(lambda: pods.asked_devices >= 3)

    run(later, Periods(timeout_s=5.0, ready_s=0.02, devices_s=0.02))


def test_an_unready_pod_is_not_asked_for_its_devices():
    async def scenario(pods: Pods) -> None:
        async def loading() -> web.StreamResponse:
            return web.json_response([{"name": "digits", "version": "1", "state": "LOADING"}])

        pods.answer = loading
        pods.indexes.of(DIGITS, [pod(pods.port)])
        await pods.until(lambda: pods.asked >= 3)
        assert pods.asked_devices == 0

    run(scenario, Periods(timeout_s=5.0, unready_s=0.02))


def test_a_bad_report_is_ignored_and_the_last_good_one_stays():
    async def scenario(pods: Pods) -> None:
        async def moved() -> web.StreamResponse:
            return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})

        async def endless() -> web.StreamResponse:
            return web.Response(body=b'{"devices": []' + b" " * (3 << 20) + b"}")

        async def broken() -> web.StreamResponse:
            return web.Response(body=b"[")

        pods.indexes.of(DIGITS, [pod(pods.port)])
        await pods.until(lambda: pods.asked_devices >= 2)
        assert pods.indexes.of(DIGITS, [pod(pods.port)]) == {"pod": READY}
        pods.devices = report
        await pods.until(lambda: len(pods.woken) == 2)
        for bad in (moved, endless, broken):
            pods.devices, asked = bad, pods.asked_devices
            await pods.until(lambda asked=asked: pods.asked_devices >= asked + 2)
        assert pods.indexes.of(DIGITS, [pod(pods.port)]) == {"pod": replace(READY, devices=DEVICES)}
        assert pods.woken == [DIGITS, DIGITS]

    run(scenario, Periods(timeout_s=5.0, ready_s=0.02, devices_s=0.0))


def test_devices_stay_while_the_index_cannot_be_read():
    async def scenario(pods: Pods) -> None:
        async def failing() -> web.StreamResponse:
            return web.Response(status=500)

        pods.devices = report
        pods.indexes.of(DIGITS, [pod(pods.port)])
        await pods.until(lambda: len(pods.woken) == 1)
        pods.answer = failing
        await pods.until(lambda: len(pods.woken) == 2)
        assert pods.indexes.of(DIGITS, [pod(pods.port)]) == {"pod": PodIndex(error="HTTP 500", devices=DEVICES)}

    run(scenario, Periods(timeout_s=5.0, unready_s=1000.0, ready_s=0.02))


def test_an_unready_pod_is_asked_again_and_wakes_when_it_is_ready():
    async def scenario(pods: Pods) -> None:
        ready = pods.answer

        async def loading() -> web.StreamResponse:
            return web.json_response([{"name": "digits", "version": "1", "state": "LOADING"}])

        pods.answer = loading
        pods.indexes.of(DIGITS, [pod(pods.port)])
        await pods.until(lambda: pods.asked == 3)
        pods.answer = ready
        await pods.until(lambda: len(pods.woken) == 2)
        assert pods.indexes.of(DIGITS, [pod(pods.port)]) == {"pod": READY}

    run(scenario, Periods(timeout_s=5.0, unready_s=0.05, ready_s=1000.0))


def test_a_ready_pod_is_asked_again():
    async def scenario(pods: Pods) -> None:
        pods.indexes.of(DIGITS, [pod(pods.port)])
        await pods.until(lambda: pods.asked == 3)

    run(scenario, Periods(timeout_s=5.0, unready_s=1000.0, ready_s=0.05))


def test_a_pod_with_workers_is_asked_often_and_wakes_when_one_dies():
    async def scenario(pods: Pods) -> None:
        health: dict[str, Any] = {}

        async def python_model() -> web.StreamResponse:
            return web.json_response([{"name": "digits", "version": "1", "state": "READY", "workers": health}])

        pods.answer = python_model
        pods.indexes.of(DIGITS, [pod(pods.port)])
        await pods.until(lambda: pods.asked == 3)
        assert pods.woken == [DIGITS]
        health |= {"failure": "worker exited: signal 9", "out_of_memory": False}
        await pods.until(lambda: len(pods.woken) == 2)

    run(scenario, Periods(timeout_s=5.0, unready_s=1000.0, workers_s=0.05, ready_s=1000.0))


def test_a_workers_death_is_noticed_within_ten_seconds():
    workers = PodIndex((ServedVersion("digits", "1", "READY", "", has_workers=True),))
    periods = Periods()

    assert periods.after(workers) + periods.timeout_s <= 10
    assert periods.after(READY) == periods.ready_s


def test_a_pod_that_does_not_answer_has_an_error_and_delays_no_other():
    async def scenario(pods: Pods) -> None:
        ready = pods.answer

        async def silent() -> web.StreamResponse:
            pods.answer = ready
            await asyncio.Event().wait()
            raise AssertionError

        pods.answer = silent
        pods.indexes.of(DIGITS, [pod(pods.port, uid="silent")])
        await pods.until(lambda: pods.asked == 1)
        pods.indexes.of(DIGITS, [pod(pods.port, uid="silent"), pod(pods.port, uid="other")])
        await pods.until(lambda: len(pods.woken) == 2)
        found = pods.indexes.of(DIGITS, [pod(pods.port, uid="silent"), pod(pods.port, uid="other")])
        assert found == {"silent": PodIndex(error="no answer in time"), "other": READY}

    run(scenario, Periods(timeout_s=0.5, unready_s=1000.0, ready_s=1000.0))


def test_deleted_pods_are_no_longer_asked():
    async def scenario(pods: Pods) -> None:
        pods.indexes.of(DIGITS, [pod(pods.port)])
        await pods.until(lambda: pods.asked == 2)
        pods.indexes.of(DIGITS, [])
        asked = pods.asked
        await asyncio.sleep(0.3)
        assert pods.asked <= asked + 1, "one may have been under way"

    run(scenario, Periods(timeout_s=5.0, unready_s=0.05, ready_s=0.05))


def test_an_answer_that_is_too_long_or_invalid_is_an_error():
    async def scenario(pods: Pods) -> None:
        async def endless() -> web.StreamResponse:
            return web.Response(body=b"[" + b" " * (3 << 20))

        async def moved() -> web.StreamResponse:
            return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})

        pods.answer = endless
        pods.indexes.of(DIGITS, [pod(pods.port)])
        await pods.until(lambda: len(pods.woken) == 1)
        assert pods.indexes.of(DIGITS, [pod(pods.port)]) == {"pod": PodIndex(error="the index is too long")}
        pods.answer = moved
        pods.indexes.of(DIGITS, [pod(pods.port, version="2")])
        await pods.until(lambda: len(pods.woken) == 2)
        assert pods.indexes.of(DIGITS, [pod(pods.port, version="2")]) == {"pod": PodIndex(error="HTTP 302")}

    run(scenario, NEVER_AGAIN)


def test_a_compressed_answer_is_not_decompressed():
    """Compressed, it would be a thousandth of this size on the wire."""

    async def scenario(pods: Pods) -> None:
        async def packed() -> web.StreamResponse:
            return web.Response(body=gzip.compress(b"[]"), headers={"Content-Encoding": "gzip"})

        pods.answer = packed
        pods.indexes.of(DIGITS, [pod(pods.port)])
        await pods.until(lambda: pods.woken == [DIGITS])
        assert pods.indexes.of(DIGITS, [pod(pods.port)]) == {"pod": PodIndex(error="the answer is not an index")}

    run(scenario, Periods(unready_s=30))
