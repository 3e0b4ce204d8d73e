"""Which devices an object's pods request."""

import statistics
import time
from typing import Any

import pytest

from halimede_operator.core.placement.choice import (
    Demand,
    Placement,
    better_than,
    choose,
    demand_of,
    named,
    read_placement,
    room_for,
    with_headroom,
    with_terms,
)
from halimede_operator.core.placement.explain import explain
from halimede_operator.core.placement.inventory import MAX_WAITING
from halimede_operator.core.placement.ledger import Ledger
from halimede_operator.core.placement.node_filter import holds_for
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Accelerator, AcceleratorType, GpuFilter, Workload
from support.device_nodes import A100, H100_NVL, inventory, node, pod
from support.operator_specs import model_key

GIB = 1024
SLICE = "nvidia.com/mig-"


def mig(gib: float | None = None, profile: str | None = None, **fields: Any) -> Accelerator:
    memory = None if gib is None else int(gib * GIB)
    return Accelerator(AcceleratorType.MIG, mig_profile=profile, mig_min_memory_mib=memory, **fields)


def demand(accelerator: Accelerator, replicas: int = 1, name: str = "bert", **template: Any) -> Demand:
    wanted = Workload(replicas=replicas, accelerator=accelerator)
    return demand_of(model_key(name), wanted, {"spec": {"containers": [], **template}})


def chosen(wanted: Demand, nodes: list[Object], pods: list[Object] = []) -> Placement | None:  # noqa: B006
    return choose(wanted, Ledger(inventory(nodes, pods)))


def resource(wanted: Demand, nodes: list[Object], pods: list[Object] = []) -> str | None:  # noqa: B006
    placement = chosen(wanted, nodes, pods)
    return placement and placement.resource


def allowed(placement: Placement | None, nodes: list[Object]) -> list[str]:
    """The nodes that the affinity of a placement allows."""
    assert placement is not None
    return [
        each["metadata"]["name"]
        for each in nodes
        if not placement.terms or any(holds_for(term, each["metadata"]["labels"]) for term in placement.terms)
    ]


MIXED = node("a", ("1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"))


@pytest.mark.parametrize(
    ("gib", "profile"), [(8, "1g.10gb"), (9, "1g.10gb"), (9.5, "2g.20gb"), (19, "3g.40gb"), (37, "3g.40gb"), (39, None)]
)
def test_the_smallest_slice_with_enough_memory_is_chosen(gib: float, profile: str | None) -> None:
    # 1g.10gb has 9,984 MiB, and 512 MiB or 5 % are left for CUDA.
    assert resource(demand(mig(gib)), [MIXED]) == (f"{SLICE}{profile}" if profile else None)


def test_headroom_is_512_mib_or_a_twentieth() -> None:
    assert (with_headroom(1000), with_headroom(10240), with_headroom(20480)) == (1512, 10752, 21504)


def test_memory_is_that_of_the_label_and_not_of_the_name() -> None:
    nodes = [node("nvl", ("1g.12gb", "3g.47gb"), model=H100_NVL)]
    assert resource(demand(mig(10.2)), nodes) == f"{SLICE}1g.12gb"  # 11,008 MiB
    assert resource(demand(mig(10.3)), nodes) == f"{SLICE}3g.47gb"


def test_a_name_with_two_sizes_is_limited_to_the_nodes_where_it_fits() -> None:
    # The same name has 9,856 MiB on an A100 and 9,984 on an H100.
    nodes = [node("a100", ("1g.10gb",), model=A100), node("h100", ("1g.10gb",))]
    placement = chosen(demand(mig(9.2)), nodes)
    assert placement is not None
    assert placement.resource == f"{SLICE}1g.10gb"
    assert allowed(placement, nodes) == ["h100"]


def test_a_larger_slice_is_taken_when_the_small_ones_are_held() -> None:
    held = [pod(f"{SLICE}1g.10gb", on="a"), pod(f"{SLICE}1g.10gb", on="a", namespace="other")]
    assert resource(demand(mig(8)), [MIXED], held) == f"{SLICE}2g.20gb"


def test_pods_without_a_node_count_too() -> None:
    waiting = [pod(f"{SLICE}1g.10gb"), pod(f"{SLICE}1g.10gb")]
    assert resource(demand(mig(8)), [MIXED], waiting) == f"{SLICE}2g.20gb"


def test_a_kind_that_all_replicas_get_is_preferred() -> None:
    nodes = [node("a", ("1g.10gb", "2g.20gb", "2g.20gb")), node("b", ("2g.20gb",))]
    assert resource(demand(mig(8), replicas=3), nodes) == f"{SLICE}2g.20gb"
    assert resource(demand(mig(8), replicas=1), nodes) == f"{SLICE}1g.10gb"


def test_if_everything_is_held_the_smallest_that_fits_is_named() -> None:
    held = [pod(f"{SLICE}{name}", on="a") for name in ("1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb")]
    assert resource(demand(mig(8)), [MIXED], held) == f"{SLICE}1g.10gb"


def test_devices_of_the_objects_own_pods_count_as_free() -> None:
    nodes = [node("a", ("1g.10gb", "2g.20gb"))]
    held = [pod(f"{SLICE}1g.10gb", on="a", of="bert")]
    assert resource(demand(mig(8)), nodes, held) == f"{SLICE}1g.10gb"
    assert resource(demand(mig(8), name="other"), nodes, held) == f"{SLICE}2g.20gb"


def test_choices_that_are_not_pods_yet_are_kept_for_their_objects() -> None:
    nodes, placements = inventory([node("a", ("1g.10gb", "2g.20gb"))]), []
    ledger = Ledger(nodes)
    for name in ("first", "second"):
        wanted = demand(mig(8), name=name)
        placement = choose(wanted, ledger)
        assert placement is not None
        placements.append(placement.resource)
        ledger.enter(wanted.claim(placement))
    assert placements == [f"{SLICE}1g.10gb", f"{SLICE}2g.20gb"]


def test_a_claim_that_is_withdrawn_leaves_no_room_to_its_object() -> None:
    nodes = inventory([node("a", ("1g.10gb",))])
    ledger, wanted = Ledger(nodes), demand(mig(8))
    placement = choose(wanted, ledger)
    assert placement is not None
    claim = wanted.claim(placement)
    ledger.withdraw(claim, ledger.enter(claim))
    assert [ledger.pods_that_fit(nodes.nodes[0], claim.amounts, own) for own in (None, claim.key)] == [1, 1]


def test_a_whole_gpu_is_taken_only_if_allowed_and_if_no_slice_fits() -> None:
    nodes = [MIXED, node("whole", ())]
    assert resource(demand(mig(60)), nodes) is None
    assert resource(demand(mig(60, allow_whole=True)), nodes) == "nvidia.com/gpu"
    assert resource(demand(mig(8, allow_whole=True)), nodes) == f"{SLICE}1g.10gb"


SINGLE = node("single", ("1g.10gb",) * 7, strategy="single")


def test_type_gpu_never_lands_on_a_slice() -> None:
    nodes = [SINGLE, node("whole", ()), node("invalid", ())]
    nodes[2]["metadata"]["labels"]["nvidia.com/gpu.sharing-strategy"] = "time-slicing"
    placement = chosen(demand(Accelerator(AcceleratorType.GPU)), nodes)
    assert placement is not None
    assert placement.resource == "nvidia.com/gpu"
    assert allowed(placement, nodes) == ["whole"]


def test_slices_of_the_strategy_single_are_found_by_their_product() -> None:
    nodes = [SINGLE, node("whole", ()), node("other", ("3g.40gb",) * 2, strategy="single")]
    for accelerator in (mig(8), mig(profile="1g.10gb")):
        placement = chosen(demand(accelerator), nodes)
        assert placement is not None
        assert (placement.resource, placement.profile) == ("nvidia.com/gpu", "1g.10gb")
        assert allowed(placement, nodes) == ["single"]


def test_a_profile_is_found_under_both_strategies() -> None:
    nodes = [SINGLE, node("mixed", ("1g.10gb",))]
    assert resource(demand(mig(profile="1g.10gb")), nodes) == "nvidia.com/gpu"
    assert resource(demand(mig(profile="1g.10gb")), [nodes[1]]) == f"{SLICE}1g.10gb"
    held = [pod("nvidia.com/gpu", 7, on="single")]
    assert resource(demand(mig(profile="1g.10gb")), nodes, held) == f"{SLICE}1g.10gb"


def test_profiles_with_attributes_have_a_dot_in_resource_names() -> None:
    placement = named(demand(mig(profile="1g.10gb+me")))
    assert placement is not None
    assert placement.resource == f"{SLICE}1g.10gb.me"


def test_what_no_node_has_is_requested_by_name_but_not_by_memory() -> None:
    assert resource(demand(mig(profile="4g.40gb")), [MIXED]) == f"{SLICE}4g.40gb"
    assert resource(demand(mig(40)), []) is None


@pytest.mark.parametrize(
    ("gpu", "names"),
    [
        (GpuFilter(products=(A100.product,)), ["a100"]),
        (GpuFilter(min_memory_mib=81560), ["a100"]),
        (GpuFilter(min_capability=(9, 0)), ["h100"]),
        (GpuFilter(min_capability=(8, 6)), ["ada", "h100"]),
        (GpuFilter(min_capability=(8, 0)), ["a100", "ada", "h100"]),
        (GpuFilter(), ["a100", "ada", "h100"]),
    ],
)
def test_filters_of_the_card_become_affinity(gpu: GpuFilter, names: list[str]) -> None:
    ada = node("ada", ())
    ada["metadata"]["labels"] |= {"nvidia.com/gpu.compute.major": "8", "nvidia.com/gpu.compute.minor": "9"}
    nodes = [node("a100", (), model=A100), ada, node("h100", ())]
    assert allowed(chosen(demand(Accelerator(AcceleratorType.GPU, gpu=gpu)), nodes), nodes) == names


@pytest.mark.parametrize("strategy", ["mixed", "single"])
def test_filters_of_the_card_hold_for_slices_too(strategy: str) -> None:
    nodes = [node("a100", ("1g.10gb",), model=A100, strategy=strategy), node("h100", ("1g.10gb",), strategy=strategy)]
    for gpu in (GpuFilter(products=(A100.product,)), GpuFilter(products=(A100.product,), min_capability=(8, 0))):
        for accelerator in (mig(8, gpu=gpu), mig(profile="1g.10gb", gpu=gpu)):
            assert allowed(chosen(demand(accelerator), nodes), nodes) == ["a100"]


def test_shared_devices_need_a_name_of_their_own_or_the_label() -> None:
    shared = node("shared", (), labels={"nvidia.com/gpu.sharing-strategy": "time-slicing"})
    nodes = [node("whole", ()), shared]
    accelerator = Accelerator(AcceleratorType.SHARED, shared_resource="nvidia.com/gpu")
    assert allowed(chosen(demand(accelerator), nodes), nodes) == ["shared"]
    named_so = node("named", **{"nvidia.com/gpu.shared": "4"})
    assert resource(demand(Accelerator(AcceleratorType.SHARED)), [named_so]) == "nvidia.com/gpu.shared"


@pytest.mark.parametrize(
    "change",
    [
        {"ready": False},
        {"taints": [{"key": "team", "value": "x", "effect": "NoSchedule"}]},
        {"labels": {"zone": "b"}},
        {"cpu": "1"},
        {"memory": "1Gi"},
        {"pods": "0"},
    ],
)
def test_only_nodes_that_the_scheduler_would_take_count(change: dict[str, Any]) -> None:
    requests = {"cpu": "2", "memory": "2Gi"}
    template = {"containers": [{"resources": {"requests": requests}}], "nodeSelector": {"zone": "a"}}
    small = node("small", ("1g.10gb",), **{"labels": {"zone": "a"}, **change})
    large = node("large", ("3g.40gb",), labels={"zone": "a"})
    assert resource(demand(mig(8), **template), [small, large]) == f"{SLICE}3g.40gb"
    fine = node("small", ("1g.10gb",), labels={"zone": "a"})
    assert resource(demand(mig(8), **template), [fine, large]) == f"{SLICE}1g.10gb"


def test_cordoned_nodes_do_not_count() -> None:
    cordoned = node("a", ("1g.10gb",))
    cordoned["spec"]["unschedulable"] = True
    assert resource(demand(mig(8)), [cordoned, node("b", ("3g.40gb",))]) == f"{SLICE}3g.40gb"


def test_devices_of_one_pod_must_be_on_one_node() -> None:
    nodes = [node("a", ("1g.10gb",)), node("b", ("1g.10gb",)), node("c", ("2g.20gb", "2g.20gb"))]
    assert resource(demand(mig(8, count=2, process_per_device=True)), nodes) == f"{SLICE}2g.20gb"


def test_a_move_needs_a_kind_that_more_replicas_get() -> None:
    nodes = [node("a", ("1g.10gb", "2g.20gb"))]
    current = chosen(demand(mig(8)), nodes)
    assert current is not None
    assert current.resource == f"{SLICE}1g.10gb"
    held = [pod(f"{SLICE}1g.10gb", on="a", of="other"), pod(f"{SLICE}1g.10gb", of="bert")]
    ledger = Ledger(inventory(nodes, held))
    other = better_than(current, demand(mig(8)), ledger)
    assert other is not None
    assert other.resource == f"{SLICE}2g.20gb"
    all_held = Ledger(inventory(nodes, [*held, pod(f"{SLICE}2g.20gb", on="a", of="third")]))
    assert better_than(current, demand(mig(8)), all_held) is None
    # Something smaller became free, but the pods have what they need.
    assert better_than(other, demand(mig(8)), Ledger(inventory(nodes))) is None


def test_room_can_be_counted_without_the_objects_own_pods() -> None:
    nodes = [node("a", ("1g.10gb", "1g.10gb"))]
    wanted = demand(mig(8))
    placement = chosen(wanted, nodes)
    assert placement is not None
    ledger = Ledger(inventory(nodes, [pod(f"{SLICE}1g.10gb", on="a", of="bert")]))
    assert room_for(wanted, placement, ledger) == 2
    assert room_for(wanted, placement, ledger, own=False) == 1


@pytest.mark.parametrize("parts", [20_000, 101])
def test_affinities_that_are_too_large_are_not_evaluated(parts: int) -> None:
    """Otherwise one pod of any user could delay all decisions."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = [{"matchExpressions": [{"key": f"k{number}", "operator": "Exists"}]} for number in range(parts // 2)]
    affinity = {"affinity": {"nodeAffinity": {required: {"nodeSelectorTerms": terms}}}}
    nodes = [node("a", ("1g.10gb",), labels={"k0": "yes"})]
    found = inventory(nodes, [pod(f"{SLICE}1g.10gb", **affinity)])
    assert len(found.waiting) == (parts == 101)
    large = [*terms, {"matchExpressions": [{"key": "x", "operator": "Exists"}]}]
    wanted = demand(mig(8), affinity={"nodeAffinity": {required: {"nodeSelectorTerms": large}}})
    assert choose(wanted, Ledger(inventory(nodes))) is None
    assert "have more than 100 parts" in explain(wanted, Ledger(inventory(nodes)))


def test_only_so_many_waiting_pods_are_kept() -> None:
    found = inventory([node("a", ("1g.10gb",))], [pod(f"{SLICE}1g.10gb")] * (MAX_WAITING + 1))
    assert len(found.waiting) == MAX_WAITING


def test_pods_that_are_not_to_be_scheduled_yet_do_not_count() -> None:
    gated = pod(f"{SLICE}1g.10gb", schedulingGates=[{"name": "example.com/later"}])
    assert resource(demand(mig(8)), [MIXED], [gated, gated]) == f"{SLICE}1g.10gb"


def test_requests_of_a_whole_pod_count() -> None:
    nodes = [node("a", ("1g.10gb",)), node("b", ("3g.40gb",))]
    busy = pod("", on="a", resources={"requests": {"cpu": "15"}})
    template = {"containers": [{"resources": {"requests": {"cpu": "2"}}}]}
    assert resource(demand(mig(8), **template), nodes, [busy]) == f"{SLICE}3g.40gb"


def test_any_number_of_replicas_is_entered_at_once() -> None:
    ledger = Ledger(inventory([MIXED, node("b", ("1g.10gb",))]))
    wanted = demand(mig(8), replicas=2**31 - 1)
    placement = choose(wanted, ledger)
    assert placement is not None
    claim = wanted.claim(placement)
    entered = ledger.enter(claim, wanted.replicas)
    assert entered == [("b", 1), ("a", 2)]
    assert room_for(demand(mig(8), name="other"), placement, ledger) == 0
    ledger.withdraw(claim, entered)
    assert room_for(demand(mig(8), name="other"), placement, ledger) == 3


@pytest.mark.parametrize(
    "affinity",
    [
        5,
        {"nodeAffinity": [1]},
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": "x"}},
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": 5}}},
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": {"a": 1}}}},
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": 5}],
        }}},
    ],
)  # fmt: skip
def test_a_malformed_affinity_is_left_to_the_api_server(affinity: Any) -> None:
    placement = chosen(demand(mig(profile="1g.10gb"), affinity=affinity), [MIXED])
    assert placement is not None
    assert with_terms(affinity, placement.terms) == affinity


def test_a_placement_survives_being_written() -> None:
    placement = chosen(demand(mig(8, gpu=GpuFilter(min_capability=(8, 6)))), [MIXED])
    assert placement is not None
    assert read_placement(placement.written()) == placement
    assert read_placement("") is None
    assert read_placement('{"resource": "cpu"}') is None


def test_terms_are_combined_with_those_of_the_user() -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    one, other = {"key": "x", "operator": "Exists"}, {"key": "y", "operator": "Exists"}
    mine, yours = {"key": "z", "operator": "Exists"}, {"key": "w", "operator": "Exists"}
    affinity = {"podAffinity": {}, "nodeAffinity": {required: {"nodeSelectorTerms": [
        {"matchExpressions": [one]}, {"matchFields": [other]},
    ]}}}  # fmt: skip
    made: Any = with_terms(affinity, ((mine,), (yours,)))
    assert made["podAffinity"] == {}
    assert made["nodeAffinity"][required]["nodeSelectorTerms"] == [
        {"matchExpressions": [one, mine]},
        {"matchExpressions": [one, yours]},
        {"matchFields": [other], "matchExpressions": [mine]},
        {"matchFields": [other], "matchExpressions": [yours]},
    ]
    assert with_terms({}, ()) == {}


def test_a_decision_about_many_nodes_takes_little_time() -> None:
    """The goal is 10 ms of CPU for 200 nodes."""
    nodes = [node(f"n{number:03}", ("1g.10gb",) * 7, ("2g.20gb",) * 3, ("3g.40gb",) * 2) for number in range(200)]
    held = [pod(f"{SLICE}1g.10gb", on=f"n{number:03}") for number in range(200)]
    ledger = Ledger(inventory(nodes, held))
    spent = []
    for number in range(20):
        wanted = demand(mig(8 + number % 3), name=f"m{number}")
        begun = time.process_time()
        placement = choose(wanted, ledger)
        assert placement is not None
        ledger.enter(wanted.claim(placement))
        explain(wanted, ledger)
        spent.append(time.process_time() - begun)
    assert statistics.median(spent) < 0.1


SHARING_LABELS = [
    {"nvidia.com/gpu.sharing-strategy": "mps"},
    {"nvidia.com/gpu.replicas": "4"},
    {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"},
    {"cloud.google.com/gke-gpu-sharing-strategy": "time-sharing"},
    {"cloud.google.com/gke-max-shared-clients-per-gpu": "3"},
]


@pytest.mark.parametrize("labels", SHARING_LABELS)
def test_shared_devices_are_never_whole_gpus(labels: dict[str, str]) -> None:
    shared, whole = node("shared", (), labels=labels), node("whole", (), labels={"nvidia.com/gpu.replicas": "1"})
    found = inventory([shared, whole])
    assert [each.devices[0].is_shared for each in found.nodes] == [True, False]
    wanted = demand(Accelerator(AcceleratorType.GPU))
    assert allowed(chosen(wanted, [shared, whole]), [shared, whole]) == ["whole"]
    # No node has a whole GPU, and one that comes may be taken.
    assert allowed(chosen(wanted, [shared]), [shared, whole]) == ["whole"]


@pytest.mark.parametrize("labels", SHARING_LABELS[:4])
def test_every_label_of_a_shared_device_serves_the_type_shared(labels: dict[str, str]) -> None:
    nodes = [node("shared", (), labels=labels), node("whole", ())]
    wanted = Accelerator(AcceleratorType.SHARED, shared_resource="nvidia.com/gpu", gpu=GpuFilter(min_capability=(8, 6)))
    assert allowed(chosen(demand(wanted), nodes), nodes) == ["shared"]


@pytest.mark.parametrize("label", [("replicas", "2"), ("product", "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb-SHARED")])
def test_shared_slices_are_not_handed_out(label: tuple[str, str]) -> None:
    name, value = label
    mixed = node("mixed", ("1g.10gb",), labels={f"{SLICE}1g.10gb.{name}": value})
    single = node("single", ("1g.10gb",), strategy="single", labels={f"nvidia.com/gpu.{name}": value})
    assert resource(demand(mig(8)), [mixed, single]) is None
    # The label of whole GPUs says nothing about slices with a name of their own.
    other = node("mixed", ("1g.10gb",), labels={f"nvidia.com/gpu.{name}": value})
    assert resource(demand(mig(8)), [other]) == f"{SLICE}1g.10gb"


def gke_node(name: str, **labels: str) -> Object:
    """A node of Google's Kubernetes Engine without GPU feature discovery."""
    made = node(
        name, (), labels={f"cloud.google.com/gke-{key.replace('_', '-')}": text for key, text in labels.items()}
    )
    made["metadata"]["labels"] = {
        key: text for key, text in made["metadata"]["labels"].items() if not key.startswith("nvidia.com/")
    }
    return made


def test_slices_of_gke_are_found_by_its_partition_label() -> None:
    nodes = [
        gke_node("gke", gpu_partition_size="1g.5gb"),
        gke_node("shared", gpu_partition_size="1g.5gb", gpu_sharing_strategy="time-sharing"),
        gke_node("whole"),
    ]
    placement = chosen(demand(mig(profile="1g.5gb")), nodes)
    assert placement is not None
    assert (placement.resource, placement.profile) == ("nvidia.com/gpu", "1g.5gb")
    assert allowed(placement, nodes) == ["gke"]
    assert allowed(chosen(demand(Accelerator(AcceleratorType.GPU)), nodes), nodes) == ["whole"]
    # The memory of a slice is not known from its name.
    assert chosen(demand(mig(4)), nodes[:1]) is None
    assert "1g.5gb free on node gke, which has no labels of GPU feature discovery" in explain(
        demand(mig(4)), Ledger(inventory(nodes[:1]))
    )
