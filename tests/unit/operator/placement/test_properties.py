"""The choice against an exhaustive search on small clusters."""

import itertools
from collections import Counter
from typing import Any, NamedTuple

from hypothesis import given, settings

from cluster.gpus import H100
from halimede_operator.core.placement.choice import choose, demand_of, room_for, with_headroom
from halimede_operator.core.placement.explain import MAX_CHARACTERS, explain
from halimede_operator.core.placement.ledger import Ledger
from halimede_operator.core.placement.node_filter import holds_for
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Accelerator, AcceleratorType, GpuFilter, Workload
from support.device_nodes import A100, inventory, node, pod
from support.examples import Draws, drawn
from support.operator_specs import model_key

PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb")
MODELS = {model.product: model for model in (H100, A100)}


class Kind(NamedTuple):
    """One kind of devices on one node, as the test drew it."""

    node: str
    resource: str
    profile: str
    product: str
    memory_mib: int
    count: int


class Cluster(NamedTuple):
    nodes: list[Object]
    kinds: list[Kind]


def cluster_of(draws: Draws) -> Cluster:
    nodes, kinds = [], []
    for name in ("a", "b", "c")[: 1 + draws.below(3)]:
        model = MODELS[draws.pick(sorted(MODELS))]
        if draws.below(2):
            strategy, profile = "single", draws.pick(PROFILES)
            cards: list[tuple[str, ...]] = [(profile,) * (1 + draws.below(3))]
        else:
            strategy = "mixed"
            cards = [tuple(draws.some(PROFILES, 2)) for _ in range(1 + draws.below(2))]
        nodes.append(node(name, *cards, model=model, strategy=strategy))
        for profile, count in Counter(profile for card in cards for profile in (card or ("",))).items():
            memory = model.slices[profile][0] if profile else model.memory_mib
            resource = f"nvidia.com/mig-{profile}" if profile and strategy == "mixed" else "nvidia.com/gpu"
            kinds.append(Kind(name, resource, profile, model.product, memory, count))
    return Cluster(nodes, kinds)


def accelerator_of(draws: Draws) -> Accelerator:
    gpu = GpuFilter(products=draws.pick(((), (H100.product,))))
    fields: dict[str, Any] = {"count": 1 + draws.below(2), "gpu": gpu}
    match draws.pick(("whole", "profile", "memory")):
        case "whole":
            return Accelerator(AcceleratorType.GPU, **fields)
        case "profile":
            return Accelerator(AcceleratorType.MIG, mig_profile=draws.pick(PROFILES), **fields)
    memory = draws.pick((8, 9.3, 18, 36, 70)) * 1024
    whole = draws.pick((False, True))
    return Accelerator(AcceleratorType.MIG, mig_min_memory_mib=int(memory), allow_whole=whole, **fields)


class Demanded(NamedTuple):
    cluster: Cluster
    held: dict[Kind, int]
    """Devices that other pods have."""
    accelerator: Accelerator
    replicas: int


def demanded(draws: Draws) -> Demanded:
    cluster = cluster_of(draws)
    held = {kind: draws.below(kind.count + 1) for kind in cluster.kinds}
    return Demanded(cluster, held, accelerator_of(draws), 1 + draws.below(3))


def fits(accelerator: Accelerator, kind: Kind) -> bool:
    if accelerator.gpu.products and kind.product not in accelerator.gpu.products:
        return False
    if accelerator.type is AcceleratorType.GPU:
        return not kind.profile
    if accelerator.mig_profile is not None:
        return kind.profile == accelerator.mig_profile
    enough = kind.memory_mib >= with_headroom(accelerator.mig_min_memory_mib or 0)
    return enough and (bool(kind.profile) or accelerator.allow_whole)


def most_pods(free: dict[str, int], count: int, replicas: int) -> int:
    """The most replicas that get their devices, over all ways to give each one a node or none."""
    best = 0
    for nodes in itertools.product(["", *free], repeat=replicas):
        used = Counter({name: nodes.count(name) * count for name in free})
        if all(used[name] <= free[name] for name in free):
            best = max(best, sum(bool(name) for name in nodes))
    return best


@settings(max_examples=400, deadline=None)
@given(drawn(demanded, 60))
def test_the_choice_is_that_of_an_exhaustive_search(case: Demanded) -> None:
    cluster, held, accelerator, replicas = case
    pods = [pod(kind.resource, count, on=kind.node) for kind, count in held.items() if count]
    demand = demand_of(model_key(), Workload(replicas=replicas, accelerator=accelerator), {"spec": {}})
    ledger = Ledger(inventory(cluster.nodes, pods))
    placement = choose(demand, ledger)

    fitting = [kind for kind in cluster.kinds if fits(accelerator, kind)]
    # Kinds are equal if one resource name and one profile stand for them.
    results = []
    for resource, profile in {(kind.resource, kind.profile) for kind in fitting}:
        alike = [kind for kind in fitting if (kind.resource, kind.profile) == (resource, profile)]
        free = {kind.node: kind.count - held[kind] for kind in alike}
        enough = [kind for kind in alike if kind.count >= accelerator.count]
        if not enough:
            continue
        memory = min(kind.memory_mib for kind in enough)
        results.append((most_pods(free, accelerator.count, replicas), not profile, memory, resource, profile))
    if not results:
        is_named = accelerator.type is AcceleratorType.GPU or accelerator.mig_profile is not None
        assert (placement is not None) == is_named
        return
    most = max(result[0] for result in results)
    _, _, _, resource, profile = min(result for result in results if result[0] == most)
    assert placement is not None
    assert (placement.resource, placement.profile) == (resource, profile)
    assert min(room_for(demand, placement, ledger), replicas) == most
    # The affinity allows exactly the nodes with devices of this kind that fit, of those with the resource.
    offering = {kind.node for kind in cluster.kinds if kind.resource == placement.resource}
    labels = {node.name: node.labels for node in ledger.nodes}
    allowed = {
        name
        for name in offering
        if not placement.terms or any(holds_for(term, labels[name]) for term in placement.terms)
    }
    assert allowed == {kind.node for kind in fitting if (kind.resource, kind.profile) == (resource, profile)}


@settings(max_examples=200, deadline=None)
@given(drawn(lambda draws: (cluster_of(draws), [accelerator_of(draws) for _ in range(1 + draws.below(6))]), 80))
def test_choices_one_after_the_other_never_exceed_the_devices(case: tuple[Cluster, list[Accelerator]]) -> None:
    cluster, accelerators = case
    ledger = Ledger(inventory(cluster.nodes))
    taken: Counter[tuple[str, str]] = Counter()
    for number, accelerator in enumerate(accelerators):
        demand = demand_of(model_key(f"m{number}"), Workload(accelerator=accelerator), {"spec": {}})
        text = explain(demand, ledger)
        assert text == explain(demand, ledger)
        assert len(text) <= MAX_CHARACTERS
        if (placement := choose(demand, ledger)) is None:
            continue
        has_room = room_for(demand, placement, ledger) > 0
        entered = ledger.enter(demand.claim(placement))
        assert bool(entered) == has_room
        for name, pods in entered:
            taken[name, placement.resource] += pods * accelerator.count
    counts: Counter[tuple[str, str]] = Counter()
    for kind in cluster.kinds:
        counts[kind.node, kind.resource] += kind.count
    assert all(count <= counts[where] for where, count in taken.items())
