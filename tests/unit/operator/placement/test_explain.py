"""Which devices are free, in words."""

import dataclasses
from typing import Any

import pytest

from halimede_operator.core.placement.choice import Demand, Placement, demand_of
from halimede_operator.core.placement.explain import MAX_CHARACTERS, Tenant, Waiting, explain, holders
from halimede_operator.core.placement.ledger import Ledger
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Accelerator, AcceleratorType, GpuFilter, Workload
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
        "need 1x a slice with 12 GiB (12.6 GiB with headroom); 2x 1g.10gb free on node a, which has 9.75 GiB "
        "(nvidia.com/mig-1g.10gb.memory is 9984); nearest: 2g.20gb on b, held by im/bert"
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
            "need 1x GPU; no GPU is free; no node has devices that fit",
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
    found = text(nodes, [], mig(60))
    assert "others free on 57 more nodes or of more kinds" in found
    assert len(found) <= MAX_CHARACTERS


def wanted(accelerator: Accelerator, name: str = "digits") -> Demand:
    return demand_of(model_key(name), Workload(accelerator=accelerator), {"spec": {}})


SMALL, LARGE = f"{SLICE}1g.10gb", f"{SLICE}2g.20gb"


@pytest.mark.parametrize(
    ("namespace", "expected"),
    [
        ("prod", "held by im/m9; im/m9 would fit on the free 1g.10gb"),
        ("other", "held by a pod of another namespace; an object of another namespace would fit on the free 1g.10gb"),
    ],
)
def test_an_object_that_would_fit_on_a_smaller_free_slice_is_named(namespace: str, expected: str) -> None:
    nodes = [node("a", ("1g.10gb", "2g.20gb"))]
    found = Ledger(inventory(nodes, [pod(LARGE, on="a", of="m9", namespace=namespace)]))
    [key] = holders(wanted(mig(12)), found)
    placement = Placement(LARGE, "2g.20gb")
    tenants = {key: Tenant(dataclasses.replace(wanted(mig(9)), key=key), placement)}
    assert explain(wanted(mig(12)), found, Waiting(tenants=tenants)).endswith(expected)
    # One that needs what it has is no hint, nor one that is moving already, and while that one moves no other is.
    large = {key: Tenant(dataclasses.replace(wanted(mig(12)), key=key), placement)}
    moving = {key: dataclasses.replace(tenants[key], placement=Placement(SMALL, "1g.10gb"))}
    both = tenants | {model_key("third"): moving[key]}
    for others in (large, moving, both):
        assert "would fit" not in explain(wanted(mig(12)), found, Waiting(tenants=others))


def test_own_pods_and_those_that_are_ending_are_not_asked_to_move() -> None:
    held = [pod(LARGE, on="b", of="digits"), pod(LARGE, on="b", of="old", ends_at="2026-11-22T10:00:00Z")]
    found = Ledger(inventory(NODES, held), "2026-11-22T09:59:50Z")
    assert holders(wanted(mig(12)), found) == []
    assert "nearest: 2g.20gb on b, held by im/old and free soon" in explain(wanted(mig(12)), found)


def test_a_node_with_too_few_devices_is_not_the_nearest() -> None:
    nodes = [node("node-1", ()), node("node-2", (), ())]
    held = [pod("nvidia.com/gpu", on="node-2", of="gpu2")]
    assert text(nodes, held, Accelerator(AcceleratorType.GPU, 4)).endswith("; no node has 4 GPUs; node-2 has 2")
    nodes.append(node("node-3", (), (), (), (), taints=[{"key": "team", "effect": "NoSchedule"}]))
    assert "; no node that fits has 4 GPUs; node-2 has 2" in text(nodes, held, Accelerator(AcceleratorType.GPU, 4))
    slices = mig(8, count=3, process_per_device=True)
    assert text(NODES, [], slices).endswith("; no node has 3 1g.10gb slices; a has 2")


def test_devices_that_do_not_fit_have_a_reason_also_while_they_are_held() -> None:
    held = [pod("nvidia.com/gpu", on="a", of="bert")]
    gpu = GpuFilter(min_memory_mib=90_000)
    assert text([node("a", ())], held, Accelerator(AcceleratorType.GPU, gpu=gpu)).endswith(
        "; no GPU is free; no node has devices that fit (GPU on node a, which has 79.65 GiB (nvidia.com/gpu.memory is "
        "81559))"
    )


def test_slices_are_no_hint_for_whole_gpus() -> None:
    nodes = [node("a", ("1g.10gb",)), node("single", ("4g.40gb",), strategy="single"), node("b", ())]
    held = [pod("nvidia.com/gpu", on="b", of="bert")]
    assert text(nodes, held, Accelerator(AcceleratorType.GPU)) == (
        "need 1x GPU; no GPU is free; nearest: GPU on b, held by im/bert"
    )


def test_the_object_itself_is_never_the_holder() -> None:
    held = [pod(LARGE, on="b", of="digits")]
    assert text(NODES, held, mig(12)).endswith(
        "2x 1g.10gb free on node a, which has 9.75 GiB (nvidia.com/mig-1g.10gb.memory is 9984)"
    )
    surge = explain(wanted(mig(12)), Ledger(inventory(NODES, held)), Waiting(only_beside=True))
    assert surge.endswith(
        "its own pods hold devices that fit: with spec.rollout.policy Surge each new pod needs a free one; Auto or "
        "InPlace lets an old pod go first"
    )
    others = Ledger(inventory(NODES, [pod(LARGE, on="b", of="bert")]))
    assert "Surge" not in explain(wanted(mig(12)), others, Waiting(only_beside=True))


def test_a_free_device_of_another_kind_is_not_promised() -> None:
    nodes = [node("a", ("1g.10gb", "2g.20gb"))]
    current = Placement(SMALL, "1g.10gb")
    waits = [pod(SMALL, of="digits"), pod(SMALL, on="a", of="bert")]
    found = explain(wanted(mig(8)), Ledger(inventory(nodes, waits)), Waiting(current))
    assert "1x 2g.20gb free on node a, which it takes if it still waits after 120 s;" in found
    waits[1] = pod(SMALL, on="a", of="bert", ends_at="2026-11-22T10:00:00Z")
    found = explain(wanted(mig(8)), Ledger(inventory(nodes, waits)), Waiting(current))
    assert "1x 2g.20gb free on node a, which is of another kind than its pods request; nearest: 1g.10gb" in found


@pytest.mark.parametrize(
    ("gpu", "change", "expected"),
    [
        (GpuFilter(min_memory_mib=90_000), {}, "which has 79.65 GiB (nvidia.com/gpu.memory is 81559)"),
        (GpuFilter((A100.product,)), {}, "whose nvidia.com/gpu.product is NVIDIA-H100-80GB-HBM3"),
        (
            GpuFilter(min_capability=(9, 5)),
            {},
            "which has compute capability 9.0 (nvidia.com/gpu.compute.major and .minor)",
        ),
        (
            GpuFilter(min_capability=(10, 0)),
            {},
            "which has compute capability 9.0 (nvidia.com/gpu.compute.major and .minor)",
        ),
        (GpuFilter(min_memory_mib=1), {"memory": None}, "which has no label nvidia.com/gpu.memory"),
        (
            GpuFilter(min_memory_mib=1),
            {"memory": None, "product": None},
            "which has no labels of GPU feature discovery",
        ),
        (GpuFilter(), {"replicas": "4"}, "which is shared (nvidia.com/gpu.replicas is 4)"),
    ],
)
def test_a_gpu_that_does_not_fit_says_which_label(gpu: GpuFilter, change: dict[str, str | None], expected: str) -> None:
    made = node("a", ())
    labels = made["metadata"]["labels"]
    for name, value in change.items():
        labels.pop(f"nvidia.com/gpu.{name}", None)
        labels |= {} if value is None else {f"nvidia.com/gpu.{name}": value}
    found = text([made], [], Accelerator(AcceleratorType.GPU, gpu=gpu))
    assert f"GPU free on node a, {expected}; no node has devices that fit" in found
