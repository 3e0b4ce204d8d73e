"""What the pods report of their devices: `status.placements`, `status.memory`, and the advice in Placed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede_operator.core.placement.choice import Placement
from halimede_operator.core.pods.memory import recommended_mib
from halimede_operator.core.snapshot import Object, PodDevice, PodDevices, PodIndex, Snapshot
from halimede_operator.core.spec.types import Accelerator, AcceleratorType, ModelSpec, Workload
from support.operator_pods import NEW, OLD, READY, deployment, replica_set, serving, snapshot
from support.operator_specs import model_key, model_spec
from support.operator_status import LATER, NOW, conditions, message, status_for

MIB = 1 << 20
MEBIBYTES = st.none() | st.integers(0, 9856)
SLICE = Accelerator(AcceleratorType.MIG, mig_profile="1g.10gb")


def on(accelerator: Accelerator = SLICE) -> ModelSpec:
    return model_spec(workload=Workload(replicas=2, accelerator=accelerator))


def part(uuid: str = "MIG-1", *, before: int = 0, peak: int = 6000) -> PodDevice:
    return PodDevice(uuid, "1g.10gb", 9856 * MIB, before * MIB, peak * MIB)


def reports(*devices: PodDevice, host: int | None = 900) -> PodIndex:
    return replace(READY, devices=PodDevices(devices, None if host is None else host * MIB))


def seen(a: PodIndex | None = None, b: PodIndex | None = None, *, status: Object | None = None) -> Snapshot:
    """Two pods that serve, with these answers; None for the index alone."""
    return snapshot(
        model_key(),
        serving("bert-1-a"),
        serving("bert-1-b", node="node-2"),
        child=deployment(2),
        indexes={"bert-1-a": a or READY, "bert-1-b": b or READY},
        status=status,
    )


def test_placements_have_the_devices_of_pods_that_report_them():
    status = status_for(seen(reports(part("MIG-1"), PodDevice("GPU-2"))), on())
    assert status["placements"] == [
        "bert-1-a on node-1: 1g.10gb MIG-1, GPU-2",
        "bert-1-b on node-2",
    ]


def placed(found: Snapshot, spec: ModelSpec | None = None) -> str:
    """The message of Placed while Ready is False, because another template is to come."""
    return message(status_for(found, spec or on(), is_postponed=True), "Placed")


def test_placed_says_node_profile_and_device():
    slices = Placement("nvidia.com/mig-1g.10gb", "1g.10gb")
    first = replace(seen(reports(part("MIG-1"))), children=(deployment(2, placement=slices),))
    status = status_for(first, on())
    told = "every replica has a node: node-1 (1g.10gb MIG-1), node-2 (1g.10gb)"
    assert placed(first) == told
    # It stays while the pods have not been asked again.
    later = replace(seen(status=status), children=(deployment(2, placement=slices),))
    assert placed(later) == told
    whole = replace(seen(), children=(deployment(2, placement=Placement("nvidia.com/gpu")),))
    assert placed(whole) == "every replica has a node: node-1 (GPU), node-2 (GPU)"
    claimed = replace(seen(), allocated={"bert-1-a": ("gpu.nvidia.com/node-1/gpu-0",)})
    assert placed(claimed).endswith("node-1 (gpu.nvidia.com/node-1/gpu-0), node-2")


def test_placed_names_a_few_pods_and_devices():
    pods = [serving(f"bert-1-{number}", node=f"node-{number}") for number in range(6)]
    many = reports(*(part(f"MIG-{number}") for number in range(4)))
    found = snapshot(model_key(), *pods, child=deployment(6), indexes={"bert-1-0": many})
    spec = model_spec(workload=Workload(replicas=6, accelerator=SLICE))
    assert placed(found, spec) == (
        "every replica has a node: node-0 (1g.10gb MIG-0, 1g.10gb MIG-1, and 2 more), node-1, node-2, node-3, and 2 more"
    )


def test_at_most_16_devices_of_a_pod_are_shown():
    status = status_for(seen(reports(*(part(f"MIG-{number}") for number in range(40)))), on())
    listed = ", ".join(f"1g.10gb MIG-{number}" for number in range(16))
    assert status["placements"][0] == f"bert-1-a on node-1: {listed}"


def test_devices_and_memory_stay_while_a_pod_has_not_been_asked_again():
    """As after a restart of the operator."""
    first = status_for(seen(reports(part("MIG-1")), reports(part("MIG-2"))), on())
    assert status_for(seen(status=first), on(), now=LATER) == first
    silent = PodIndex(error="no answer in time")
    then = status_for(seen(silent, silent, status=first), on(), now=LATER)
    assert (then["placements"], then["memory"]) == (first["placements"], first["memory"])


def test_memory_is_the_peak_of_the_pod_that_needed_most():
    a = reports(part("MIG-1", before=500, peak=6500), host=900)
    b = reports(part("MIG-2", before=100, peak=5000), part("MIG-3", before=0, peak=6100), host=1200)
    assert status_for(seen(a, b), on())["memory"] == {
        "devicePeak": "6100Mi",
        "deviceTotal": "9856Mi",
        "hostPeak": "1200Mi",
        "templateHash": NEW,
        "measuredAt": NOW,
    }


def test_without_a_device_the_memory_of_the_host_is_reported():
    none = Accelerator()
    assert status_for(seen(reports()), on(none))["memory"] == {
        "hostPeak": "900Mi",
        "templateHash": NEW,
        "measuredAt": NOW,
    }
    assert "memory" not in status_for(seen(reports(host=None)), on(none))


def test_the_memory_of_a_shared_device_is_not_the_pods():
    shared = Accelerator(AcceleratorType.SHARED)
    assert status_for(seen(reports(part(), host=900)), on(shared))["memory"] == {
        "hostPeak": "900Mi",
        "templateHash": NEW,
        "measuredAt": NOW,
    }


@pytest.mark.parametrize(
    ("peak", "host", "changes"),
    [(6300, 945, False), (6301, 900, True), (6000, 946, True), (10, 10, False)],
)
def test_a_peak_is_replaced_only_if_it_grew_by_more_than_5_percent(peak: int, host: int, changes: bool):
    first = status_for(seen(reports(part(peak=6000), host=900)), on())
    then = status_for(seen(reports(part(peak=peak), host=host), status=first), on(), now=LATER)
    if changes:
        grown = {"devicePeak": f"{peak}Mi", "hostPeak": f"{host}Mi", "measuredAt": LATER}
        assert then == {**first, "memory": {**first["memory"], **grown}}
    else:
        assert then == first
    assert status_for(seen(reports(part(peak=peak), host=host), status=then), on(), now=LATER) == then


@given(st.lists(st.tuples(MEBIBYTES, MEBIBYTES), min_size=1, max_size=4))
def test_the_same_reports_change_nothing_the_second_time(peaks: list[tuple[int | None, int | None]]):
    status: Object | None = None
    for number, (peak, host) in enumerate(peaks):
        devices = () if peak is None else (part(peak=peak),)
        then = f"2026-11-22T10:00:{number:02}Z"
        status = status_for(seen(reports(*devices, host=host), status=status), on(), now=then)
        assert status_for(seen(reports(*devices, host=host), status=status), on(), now=LATER) == status


def test_figures_of_the_template_before_cause_no_advice():
    old = {"devicePeak": "1000Mi", "deviceTotal": "40448Mi", "templateHash": OLD, "measuredAt": NOW}
    assert "Placed" not in conditions(status_for(seen(status={"memory": old}), on()))


def test_the_figures_of_the_template_before_are_replaced_even_by_lower_ones():
    old = {"devicePeak": "9000Mi", "deviceTotal": "9856Mi", "templateHash": OLD, "measuredAt": NOW}
    waiting = seen(status={"memory": old})
    assert status_for(waiting, on(), now=LATER)["memory"] == old
    assert status_for(seen(reports(part(), host=None), status={"memory": old}), on(), now=LATER)["memory"] == {
        **old,
        "devicePeak": "6000Mi",
        "templateHash": NEW,
        "measuredAt": LATER,
    }


def test_pods_of_the_template_before_are_not_measured():
    pods = [serving("bert-0-a", template=OLD), serving("bert-1-b")]
    both = snapshot(
        model_key(),
        *pods,
        child=deployment(2),
        replica_sets=[replica_set(OLD, 1), replica_set(NEW, 2)],
        indexes={"bert-0-a": reports(part(peak=9000)), "bert-1-b": reports(part(peak=5000))},
    )
    assert status_for(both, on())["memory"]["devicePeak"] == "5000Mi"


def test_nothing_is_measured_while_the_template_is_not_known():
    unnamed = replica_set()
    del unnamed["metadata"]["annotations"]
    pods = snapshot(
        model_key(),
        serving("bert-1-a"),
        child=deployment(2),
        replica_sets=[unnamed],
        indexes={"bert-1-a": reports(part())},
    )
    assert "memory" not in status_for(pods, on())


@pytest.mark.parametrize(
    "memory",
    [
        7,
        {"devicePeak": "6000Mi"},
        {"measuredAt": NOW},
        {"measuredAt": "yesterday", "templateHash": NEW},
    ],
)
def test_malformed_memory_of_an_old_status_is_dropped(memory: object):
    assert "memory" not in status_for(seen(status={"memory": memory}), on())


def test_malformed_sizes_of_an_old_status_are_dropped():
    sizes = {"devicePeak": "-5Gi", "deviceTotal": "1e99", "hostPeak": ["1Gi"]}
    kept = {"templateHash": NEW, "measuredAt": NOW}
    assert status_for(seen(status={"memory": {**sizes, **kept}}), on())["memory"] == kept


@pytest.mark.parametrize(
    ("peak", "asked", "recommended"),
    [
        (6000, 9856, None),
        (4928, 9856, None),
        (4927, 9856, 5120),
        (3000, 9856, 3072),
        (1, 9856, 256),
        (0, 9856, None),
        (5000, 4096, 5120),
        (4096, 4096, None),
    ],
)
def test_another_size_is_recommended_if_the_need_is_far_off(peak: int, asked: int, recommended: int | None):
    assert recommended_mib(peak, asked) == recommended


def test_placed_recommends_a_minimum_that_suits_the_model():
    assert message(status_for(seen(reports(part(peak=3000))), on()), "Placed") == (
        "every replica has a node: node-1 (1g.10gb MIG-1), node-2; at most 3000Mi of 9856Mi of a device were in use: "
        "spec.accelerator.mig.minMemory 3072Mi suits the model better"
    )
    asked = Accelerator(AcceleratorType.MIG, mig_min_memory_mib=4096)
    assert "minMemory 5120Mi suits" in message(status_for(seen(reports(part(peak=5000))), on(asked)), "Placed")
    assert "Placed" not in conditions(status_for(seen(reports(part(peak=3000))), on(asked)))
    whole = Accelerator(AcceleratorType.GPU)
    for fits in (status_for(seen(reports(part(peak=6000))), on()), status_for(seen(reports(part(peak=1))), on(whole))):
        assert "Placed" not in conditions(fits)
