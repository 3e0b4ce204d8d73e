"""Which devices are free, in words."""

from typing import Any

import pytest

from halimede_operator.core.api.spec import Accelerator, AcceleratorType, GpuFilter, Workload
from halimede_operator.core.placement.choice import demand_of
from halimede_operator.core.placement.explain import explain
from halimede_operator.core.placement.ledger import Ledger
from halimede_operator.core.snapshot import Object
from support.device_nodes import A100, inventory, node, pod
from support.operator_specs import model_key

SLICE = "nvidia.com/mig-"


def text(nodes: list[Object], pods: list[Object], accelerator: Accelerator, **template: Any) -> str:
    demand = demand_of(model_key("digits"), Workload(accelerator=accelerator), {"spec": template})
    return explain(demand, Ledger(inventory(nodes, pods)))


def mig(gib: int, **fields: Any) -> Accelerator:
    return Accelerator(AcceleratorType.MIG, mig_min_memory_mib=gib * 1024, **fields)


NODES = [node("a", ("1g.10gb", "1g.10gb")), node("b", ("2g.20gb",))]


def test_too_small_devices_and_the_nearest_that_fits_are_named() -> None:
    held = [pod(f"{SLICE}2g.20gb", on="b", of="bert")]
    assert text(NODES, held, mig(12)) == (
        "need 1x a slice with 12 GiB (12.6 GiB with headroom); 2x 1g.10gb free on node a, which has 9.75 GiB; "
        "nearest: 2g.20gb on b, held by im/bert"
    )


def test_of_other_namespaces_nothing_is_said() -> None:
    held = [
        pod(f"{SLICE}2g.20gb", on="b", of="secret", namespace="other"),
        pod("", on="b", of="bert"),
    ]
    assert text(NODES, held, mig(12)).endswith("held by a pod of another namespace")
    assert text(NODES, [pod(f"{SLICE}2g.20gb", on="b")], mig(12)).endswith("held by a pod that is not of the operator")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([], "need 1x GPU; no node has devices"),
        (
            [node("a", ("1g.10gb",))],
            "1x 1g.10gb free on node a, which is of another kind; no node has devices that fit",
        ),
        ([node("a", (), ready=False)], "1x GPU free on node a, which is not ready"),
        ([node("a", (), taints=[{"key": "team", "effect": "NoSchedule"}])], "which has the taint team"),
        ([node("a", (), cpu="1")], "1x GPU free on node a, where CPU, memory or the number of pods is short"),
        ([node("a", ())], "1x GPU free on node a, which the scheduler will give to it"),
    ],
)
def test_each_free_device_has_a_reason(nodes: list[Object], expected: str) -> None:
    containers = [{"resources": {"requests": {"cpu": "2"}}}]
    assert expected in text(nodes, [], Accelerator(AcceleratorType.GPU), containers=containers)


def test_several_devices_of_one_pod_are_needed_together() -> None:
    nodes = [node("a", ()), node("b", (), ())]
    assert "1x GPU free on node a, where 3 are needed together" in text(nodes, [], Accelerator(AcceleratorType.GPU, 3))


def test_filters_and_whole_gpus_are_part_of_the_need() -> None:
    gpu = GpuFilter((A100.product,), 40960, (8, 0))
    assert text([], [], mig(12, allow_whole=True, gpu=gpu)).startswith(
        "need 1x a slice or a whole GPU with 12 GiB (12.6 GiB with headroom) of NVIDIA-A100-SXM4-80GB with at least "
        "40 GiB of compute capability 8.0;"
    )


def test_nodes_that_are_partitioned_wrongly_are_named() -> None:
    invalid = node("a", ())
    invalid["metadata"]["labels"]["nvidia.com/gpu.product"] += "-MIG-INVALID"
    pending = node("b", ())
    pending["metadata"]["labels"]["nvidia.com/mig.config.state"] = "pending"
    for made, expected in ((invalid, "strategy 'single' does not allow"), (pending, "its partitioning is pending")):
        del made["status"]["allocatable"]["nvidia.com/gpu"]
        assert expected in text([made, node("c", ("1g.10gb",))], [], Accelerator(AcceleratorType.GPU))


def test_long_texts_are_cut() -> None:
    nodes = [node(f"node-{number}", ("1g.10gb", "2g.20gb", "3g.40gb")) for number in range(20)]
    found = text(nodes, [], Accelerator(AcceleratorType.GPU))
    assert "others free on 57 more nodes or of more kinds" in found
    assert len(found) < 500
