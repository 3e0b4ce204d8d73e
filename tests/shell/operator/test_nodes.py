"""Nodes whose devices pods hold, read beside the reconciles."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from halimede_operator.api_server.connection import Connection
from halimede_operator.cluster.client import KubeClient
from halimede_operator.cluster.nodes import Nodes
from halimede_operator.core.snapshot import Shortage
from halimede_operator.core.spec.types import Key, Kind
from support.kube_api import Fault, KubeApi, kube_api

HALF = "nvidia.com/mig-3g.40gb"
ONE, OTHER = (Key(Kind.INFERENCE_MODEL, "prod", name) for name in ("one", "other"))
LOOK = r"GET /api/v1/nodes/"


def pod(node: str = "a") -> dict[str, Any]:
    limits = {"cpu": "2", HALF: "1"}
    return {"spec": {"nodeName": node, "containers": [{"resources": {"limits": limits}}]}}


def without_devices() -> dict[str, Any]:
    return {"spec": {"nodeName": "a", "containers": [{"name": "server"}]}}


def offer(api: KubeApi, node: str, count: int) -> None:
    # Nodes have no namespace.
    api.put("nodes", None, node, status={"capacity": {"cpu": "8", HALF: str(count)}, "allocatable": {HALF: str(count)}})  # type: ignore[arg-type]


def run(scenario: Callable[[KubeApi, Nodes, list[Key]], Awaitable[None]], folder: Path, may_read: bool = True) -> None:
    async def whole() -> None:
        async with kube_api() as api:
            connection = Connection(str(api.kubeconfig(folder)))
            await connection.refresh()
            client = KubeClient(connection, lambda: True)
            woken: list[Key] = []
            nodes = Nodes(client, woken.append, may_read=may_read, period_s=0.01)
            looking = asyncio.create_task(nodes.run())
            try:
                await scenario(api, nodes, woken)
                assert not looking.done()
            finally:
                looking.cancel()
                await asyncio.wait({looking})
                await client.close()

    asyncio.run(whole())


async def looked(api: KubeApi, times: int = 3) -> None:
    """Wait for this many more answered reads; the first may have been in flight before."""
    before = api.counted(LOOK)
    await api.until(lambda: api.counted(LOOK) > before + times)


def test_a_lost_device_wakes_the_objects_with_pods_on_its_node(tmp_path: Path) -> None:
    """O-63."""

    async def scenario(api: KubeApi, nodes: Nodes, woken: list[Key]) -> None:
        offer(api, "a", 2)
        offer(api, "b", 1)
        assert nodes.short_of(ONE, [pod("a")]) == {}
        assert nodes.short_of(OTHER, [pod("a"), pod("b")]) == {}
        await looked(api)
        assert woken == []

        offer(api, "a", 1)
        await api.until(lambda: len(woken) == 2)
        assert set(woken) == {ONE, OTHER}
        assert nodes.short_of(ONE, [pod("a")]) == {"a": (Shortage(HALF, 1, 2),)}
        await looked(api)
        assert len(woken) == 2, "reported once"

        # One of the two pods goes, and the other's device is there.
        assert nodes.short_of(ONE, []) == {}
        await api.until(lambda: len(woken) == 3)
        assert (woken[2], nodes.short_of(OTHER, [pod("a"), pod("b")])) == (OTHER, {})

    run(scenario, tmp_path)


def test_a_shortage_seen_once_is_not_reported(tmp_path: Path) -> None:
    """A kubelet that starts has no devices until the plugin has registered."""

    async def scenario(api: KubeApi, nodes: Nodes, woken: list[Key]) -> None:
        offer(api, "a", 1)
        nodes.short_of(ONE, [pod()])
        await looked(api)
        gone = {"metadata": {"name": "a"}, "status": {"capacity": {"cpu": "8"}}}
        api.faults.append(Fault(LOOK, body=gone, times=1))
        await looked(api, 5)
        assert (woken, nodes.short_of(ONE, [pod()])) == ([], {})

    run(scenario, tmp_path)


def test_shortages_are_kept_while_the_api_server_does_not_answer(tmp_path: Path) -> None:
    async def scenario(api: KubeApi, nodes: Nodes, woken: list[Key]) -> None:
        offer(api, "a", 0)
        nodes.short_of(ONE, [pod()])
        await api.until(lambda: woken == [ONE])
        api.faults.append(Fault(LOOK, status=503))
        await looked(api)
        assert nodes.short_of(ONE, [pod()]) == {"a": (Shortage(HALF, 0, 1),)}

    run(scenario, tmp_path)


def test_a_deleted_node_has_no_shortage(tmp_path: Path) -> None:
    async def scenario(api: KubeApi, nodes: Nodes, woken: list[Key]) -> None:
        nodes.short_of(ONE, [pod("gone")])
        await looked(api)
        assert woken == []

    run(scenario, tmp_path)


def test_nodes_are_read_while_pods_hold_devices_there(tmp_path: Path) -> None:
    async def scenario(api: KubeApi, nodes: Nodes, woken: list[Key]) -> None:
        offer(api, "a", 1)
        nodes.short_of(OTHER, [without_devices()])
        nodes.short_of(ONE, [pod()])
        await looked(api)
        nodes.short_of(ONE, [])
        offer(api, "b", 1)
        nodes.short_of(OTHER, [pod("b")])
        await looked(api)
        assert "/b?" in api.requests[-1]
        begin = len(api.requests)
        await looked(api)
        assert all("/b?" in request for request in api.requests[begin:])

    run(scenario, tmp_path)


def test_an_operator_of_some_namespaces_reads_no_nodes(tmp_path: Path) -> None:
    async def scenario(api: KubeApi, nodes: Nodes, woken: list[Key]) -> None:
        offer(api, "a", 0)
        assert nodes.short_of(ONE, [pod()]) == {}
        await asyncio.sleep(0.1)  # ten times its period
        assert api.requests == []

    run(scenario, tmp_path, may_read=False)
