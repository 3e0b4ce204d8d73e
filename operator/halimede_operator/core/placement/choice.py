"""The kinds of devices that an object accepts, and the choice between them.

A kind is a resource name with conditions on nodes. Whether a device fits is decided by NVIDIA's labels of its node, and
never by its name: 1g.12gb has 11,008 MiB. The conditions become node affinity, so that the scheduler decides by the
same labels.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from halimede_operator.core.labels import PLACEMENT
from halimede_operator.core.names import canonical_json, hash_of
from halimede_operator.core.placement.devices import PREFIX
from halimede_operator.core.placement.inventory import (
    GKE_PARTITION,
    GKE_SHARING,
    Amounts,
    Claim,
    Node,
    amounts_of,
    gke_profile,
    product_profile,
    sharing_values,
    single_profile,
)
from halimede_operator.core.placement.ledger import Ledger
from halimede_operator.core.placement.node_filter import NodeFilter, Term, filter_of
from halimede_operator.core.reading import at, decimal, json_object, objects_at, text_at
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import (
    Accelerator,
    AcceleratorType,
    DeviceClaim,
    DeviceRequest,
    GpuFilter,
    Json,
    Key,
    Workload,
)

WHOLE = f"{PREFIX}gpu"
_SLICES = f"{PREFIX}gpu.slices.gi"
"""A label that only nodes have whose slices are offered as `nvidia.com/gpu`."""
_SHARING = ["time-slicing", "mps"]
_MIN_HEADROOM_MIB = 512
_HEADROOM_SHARE = 0.05


def with_headroom(memory_mib: int) -> int:
    """The memory that a device must have for a model that needs this much: CUDA's context and fragmentation."""
    return memory_mib + max(_MIN_HEADROOM_MIB, math.ceil(memory_mib * _HEADROOM_SHARE))


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices that an object's pods request: of a resource, or with a claim."""

    resource: str
    """"" with a claim."""
    profile: str = ""
    """Of a slice, as resource names have it."""
    terms: tuple[Term, ...] = ()
    """Conditions on nodes, one of which must be true; empty: none."""
    need: str = ""
    """Hash of what it was chosen for."""
    claim: DeviceClaim | None = None
    """kube-scheduler chooses the devices."""

    @property
    def title(self) -> str:
        """For messages: what one pod needs."""
        if self.claim is None:
            return self.resource
        return " and ".join(f"device of class {request.device_class}" for request in self.claim.requests)

    def written(self) -> str:
        """As text, for the annotation."""
        if (claim := self.claim) is not None:
            parts = {"class": claim.device_class, "selectors": claim.selectors, "count": claim.count}
            more = [
                {"name": r.name, "class": r.device_class, "selectors": r.selectors, "count": r.count}
                for r in claim.additional
            ]
            return canonical_json({"claim": {**parts, "additional": more} if more else parts})
        terms = [list(term) for term in self.terms]
        return canonical_json({"resource": self.resource, "profile": self.profile, "terms": terms, "need": self.need})


@dataclass(frozen=True, slots=True)
class Devices:
    """What was decided about the devices of an object's pods."""

    placement: Placement | None = None
    unplaced: str = ""
    """Why there is no placement although the spec wants devices."""
    room: int | None = None
    """How many further pods the free devices allow; None if that was not asked."""


def placement_of(deployment: Object | None) -> Placement | None:
    """The devices that a Deployment's pods request."""
    return read_placement(text_at(deployment, "metadata", "annotations", PLACEMENT))


def read_placement(text: str) -> Placement | None:
    """The placement of an annotation, which anybody may have written; None if it is none."""
    found = json_object(text)
    if (claim := _read_claim(at(found, "claim"))) is not None:
        return Placement("", claim=claim)
    resource = text_at(found, "resource")
    if not resource.startswith(PREFIX):
        return None
    terms = found.get("terms") if found else None
    read = tuple(tuple(objects_at({"term": term}, "term")) for term in terms) if isinstance(terms, list) else ()
    return Placement(resource, text_at(found, "profile"), read, text_at(found, "need"))


def _read_claim(found: object) -> DeviceClaim | None:
    selectors, count = at(found, "selectors"), decimal(at(found, "count"))
    device_class = text_at(found, "class")
    if not device_class or not count or not isinstance(selectors, list):
        return None
    read = tuple(text for text in selectors if isinstance(text, str))
    additional = tuple(
        DeviceRequest(name, claim.device_class, claim.selectors, claim.count)
        for each in objects_at(found, "additional")
        if (name := text_at(each, "name")) and (claim := _read_claim(each)) is not None
    )
    return DeviceClaim(device_class, read, count, additional)


@dataclass(frozen=True, slots=True)
class Demand:
    """What an object's pods need of a node."""

    key: Key
    accelerator: Accelerator
    replicas: int
    pod: Amounts
    """What one pod requests, without devices."""
    filter: NodeFilter
    need: str

    def amounts(self, resource: str) -> Amounts:
        return replace(self.pod, devices=Counter({resource: self.accelerator.count}))

    def claim(self, placement: Placement) -> Claim:
        """What one pod with this placement will take."""
        return Claim(self.filter, self.amounts(placement.resource), self.key, placement.terms)


def demand_of(key: Key, workload: Workload, template: Json) -> Demand:
    """template: the object's pod template, without devices."""
    return Demand(
        key,
        workload.accelerator,
        0 if workload.suspend else workload.replicas,
        amounts_of(template),
        filter_of(template),
        need_of(workload),
    )


def need_of(workload: Workload) -> str:
    """A hash of everything in the spec that a placement depends on. While it is the same, a placement stays."""
    scheduling, accelerator = workload.scheduling, workload.accelerator
    overlay = workload.pod_template.get("spec") or {}
    return hash_of(
        canonical_json(
            [
                [accelerator.type, accelerator.count, accelerator.mig_profile, accelerator.mig_min_memory_mib],
                [accelerator.allow_whole, accelerator.shared_resource],
                [accelerator.gpu.products, accelerator.gpu.min_memory_mib, accelerator.gpu.min_capability],
                [scheduling.node_selector, scheduling.affinity.get("nodeAffinity"), scheduling.tolerations],
                [overlay.get(name) for name in ("nodeSelector", "affinity", "tolerations")],
            ]
        )
    )


@dataclass(frozen=True, slots=True)
class Option:
    """A kind of devices that exists and fits."""

    placement: Placement
    nodes: tuple[Node, ...]
    """Those that offer enough of it for one pod, and on which the pods may run."""
    memory_mib: int
    """Of the smallest device."""

    @property
    def order(self) -> tuple[bool, int, str, str]:
        """Sorts what to take first: slices before whole cards, small before large."""
        placement = self.placement
        return (not placement.profile, self.memory_mib, placement.resource, placement.profile)


def options_of(demand: Demand, ledger: Ledger) -> list[Option]:
    """The kinds of devices that the object may have; the preferred one first."""
    found = []
    for placement in kinds_of(demand.accelerator, ledger.nodes):
        count = demand.accelerator.count
        nodes = tuple(n for n in ledger.eligible(demand.claim(placement)) if n.count_of(placement.resource) >= count)
        if nodes:
            memory = min(d.memory_mib or 0 for n in nodes for d in n.devices if d.resource == placement.resource)
            found.append(Option(replace(placement, need=demand.need), nodes, memory))
    return sorted(found, key=lambda option: option.order)


def choose(demand: Demand, ledger: Ledger) -> Placement | None:
    """The smallest kind of device that all replicas get now; else the one that the most replicas get; None if no node
    have devices that fit.

    Devices that the object's own pods hold count as free, because its new pods replace them. So do those of pods that
    are ending: a pod waits for them for a while, whereas what it takes instead, it keeps.
    """
    room = [(option, room_for(demand, option.placement, ledger)) for option in options_of(demand, ledger)]
    if not room:
        return named(demand, ledger.nodes)
    enough = max(min(count, demand.replicas) for _, count in room)
    return next(option.placement for option, count in room if min(count, demand.replicas) == enough)


def better_than(current: Placement, demand: Demand, ledger: Ledger) -> Placement | None:
    """Another choice under which more replicas get devices than under the current one; None if there is none.

    Called for an object with a pod that cannot be placed.
    """
    other = choose(demand, ledger)
    if other is None or (other.resource, other.terms) == (current.resource, current.terms):
        return None
    gain = room_for(demand, other, ledger) - room_for(demand, current, ledger)
    return other if gain > 0 else None


def smaller_kind(current: Placement, demand: Demand, ledger: Ledger) -> Placement | None:
    """A smaller kind of devices of which enough for all pods of the object are free now, or kept for it; None without
    one."""
    options = options_of(demand, ledger)
    taken = next((each.order for each in options if _same_devices(each.placement, current)), None)
    for option in options:
        if taken is None or option.order >= taken:
            return None
        if room_for(demand, option.placement, ledger, ending=False) >= max(1, demand.replicas):
            return option.placement
    return None


def _same_devices(one: Placement, other: Placement) -> bool:
    return (one.resource, one.profile) == (other.resource, other.profile)


def room_for(demand: Demand, placement: Placement, ledger: Ledger, *, own: bool = True, ending: bool = True) -> int:
    """How many of the object's pods the cluster has room for. own: where its pods are, too. ending: where pods are that
    are ending, too."""
    claim = demand.claim(placement)
    key = demand.key if own else None
    return sum(ledger.pods_that_fit(node, claim.amounts, key, ending=ending) for node in ledger.eligible(claim))


def named(demand: Demand, nodes: Sequence[Node] = ()) -> Placement | None:
    """The devices that the spec itself names: an exact profile, whole cards or a shared resource; None if it names only
    an amount of memory.

    It is chosen without knowing the nodes, or if none of them has such devices: an autoscaler may create one.
    """
    accelerator = demand.accelerator
    if accelerator.type is AcceleratorType.MIG and accelerator.mig_profile is None:
        return None
    return replace(next(kinds_of(accelerator, nodes)), need=demand.need)


def kinds_of(accelerator: Accelerator, nodes: Sequence[Node]) -> Iterator[Placement]:
    """The kinds of devices that the accelerator accepts, of those that the nodes offer and those that it names."""
    gpu = accelerator.gpu
    match accelerator.type:
        case AcceleratorType.GPU:
            yield _whole(gpu, gpu.min_memory_mib, nodes)
        case AcceleratorType.DRA:
            yield Placement("", claim=accelerator.claim)
        case AcceleratorType.SHARED:
            yield _shared(accelerator.shared_resource, gpu, nodes)
        case AcceleratorType.MIG if accelerator.mig_profile is not None:
            profile = accelerator.mig_profile.replace("+", ".")
            yield _mixed(profile, gpu, gpu.min_memory_mib, nodes)
            yield from _single(profile, gpu, gpu.min_memory_mib, nodes)
        case AcceleratorType.MIG:
            memory = max(with_headroom(accelerator.mig_min_memory_mib or 0), gpu.min_memory_mib or 0)
            slices = {d.profile for n in nodes for d in n.devices if d.resource.startswith(f"{PREFIX}mig-")}
            for profile in sorted(slices):
                yield _mixed(profile, gpu, memory, nodes)
            for profile in sorted({profile for n in nodes if (profile := single_profile(n.labels))}):
                yield from _single(profile, gpu, memory, nodes)
            if accelerator.allow_whole:
                yield _whole(gpu, memory, nodes)


def _mixed(profile: str, gpu: GpuFilter, memory_mib: int | None, nodes: Sequence[Node]) -> Placement:
    base = f"{PREFIX}mig-{profile}"
    conditions = [*_not_shared(base, nodes), *_memory(f"{base}.memory", memory_mib)]
    return Placement(base, profile, _terms(gpu, [*conditions, *_products(gpu.products)]))


def _single(profile: str, gpu: GpuFilter, memory_mib: int | None, nodes: Sequence[Node]) -> Iterator[Placement]:
    """Slices of one profile that nodes offer as `nvidia.com/gpu`. Only the product has the profile, or GKE's label."""
    conditions = [*_not_shared(WHOLE, nodes), *_memory(f"{WHOLE}.memory", memory_mib)]
    products = {
        node.labels[f"{PREFIX}gpu.product"]
        for node in nodes
        if product_profile(node.labels) == profile and (not gpu.products or node.product in gpu.products)
    }
    if products:
        yield Placement(WHOLE, profile, _terms(gpu, [*conditions, *_products(sorted(products))]))
    sizes = {node.labels[GKE_PARTITION] for node in nodes if gke_profile(node.labels) == profile}
    if sizes:
        size = _condition(GKE_PARTITION, "In", *sorted(sizes))
        yield Placement(WHOLE, profile, _terms(gpu, [*conditions, size, *_products(gpu.products)]))


def _whole(gpu: GpuFilter, memory_mib: int | None, nodes: Sequence[Node]) -> Placement:
    no_slices = [_condition(label, "DoesNotExist") for label in (_SLICES, GKE_PARTITION)]
    conditions = [*no_slices, *_not_shared(WHOLE, nodes), *_memory(f"{WHOLE}.memory", memory_mib)]
    return Placement(WHOLE, "", _terms(gpu, [*conditions, *_products(gpu.products)]))


def _shared(resource: str, gpu: GpuFilter, nodes: Sequence[Node]) -> Placement:
    # With a name of its own the resource is shared; whole cards and slices may be shared without one.
    base = resource.removesuffix(".shared")
    signs: list[list[Json]] = [[]]
    if base == resource:
        signs = [[_condition(f"{base}.sharing-strategy", "In", *_SHARING)]]
        signs += [[_condition(label, "Exists")] for label in GKE_SHARING[:1] if any(label in n.labels for n in nodes)]
        signs += [[_condition(label, "In", *values)] for label, values in _seen_sharing_values(base, nodes)]
    products = [*gpu.products, *(f"{product}-SHARED" for product in gpu.products)]
    conditions = [*_memory(f"{base}.memory", gpu.min_memory_mib), *_products(products)]
    return Placement(resource, "", tuple(term for sign in signs for term in _terms(gpu, [*sign, *conditions])))


def _terms(gpu: GpuFilter, conditions: Sequence[Json]) -> tuple[Term, ...]:
    """The conditions with those of the compute capability, which has two labels and may need two terms."""
    if gpu.min_capability is None:
        return (tuple(conditions),) if conditions else ()
    major, minor = gpu.min_capability
    is_major = f"{PREFIX}gpu.compute.major"
    if minor == 0:
        return ((*conditions, _condition(is_major, "Gt", str(major - 1))),)
    same = [_condition(is_major, "In", str(major)), _condition(f"{PREFIX}gpu.compute.minor", "Gt", str(minor - 1))]
    return ((*conditions, _condition(is_major, "Gt", str(major))), (*conditions, *same))


def _memory(label: str, memory_mib: int | None) -> list[Json]:
    return [] if memory_mib is None else [_condition(label, "Gt", str(memory_mib - 1))]


def _products(products: Sequence[str]) -> list[Json]:
    return [_condition(f"{PREFIX}gpu.product", "In", *products)] if products else []


def _not_shared(base: str, nodes: Sequence[Node]) -> list[Json]:
    """Conditions that exclude shared devices of a resource, by every label that says so.

    Affinity has no condition for a number that is small or missing, nor for the end of a text. So of the labels with
    such values those values are excluded that nodes have.
    """
    by_gke = [_condition(label, "DoesNotExist") for label in GKE_SHARING] if base == WHOLE else []
    seen = [_condition(label, "NotIn", *values) for label, values in _seen_sharing_values(base, nodes)]
    return [_condition(f"{base}.sharing-strategy", "NotIn", *_SHARING), *by_gke, *seen]


def _seen_sharing_values(base: str, nodes: Iterable[Node]) -> list[tuple[str, list[str]]]:
    found: dict[str, set[str]] = {}
    for node in nodes:
        for label, value in sharing_values(node.labels, base).items():
            found.setdefault(label, set()).add(value)
    return [(label, sorted(values)) for label, values in sorted(found.items())]


def _condition(key: str, operator: str, *values: str) -> Json:
    return {"key": key, "operator": operator, "values": list(values)} if values else {"key": key, "operator": operator}


def with_terms(affinity: object, terms: Sequence[Term]) -> object:
    """A pod's affinity with the conditions of a placement: each of its own alternatives with each of these.

    An affinity that is malformed stays as it is, and the API server refuses it.
    """
    if not terms:
        return affinity
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    whole = {} if affinity is None else affinity
    nodes = at(whole, "nodeAffinity")
    nodes = {} if nodes is None else nodes
    selector = at(nodes, required)
    selector = {} if selector is None else selector
    given = at(selector, "nodeSelectorTerms") or [{}]
    if not (isinstance(whole, Mapping) and isinstance(nodes, Mapping) and isinstance(selector, Mapping)):
        return affinity
    if not isinstance(given, list | tuple) or not all(map(_is_term, given)):
        return affinity
    combined = [
        {**one, "matchExpressions": [*(one.get("matchExpressions") or ()), *term]}
        for one, term in itertools.product(given, terms)
    ]
    return {**whole, "nodeAffinity": {**nodes, required: {"nodeSelectorTerms": combined}}}


def _is_term(term: object) -> bool:
    return isinstance(term, Mapping) and isinstance(term.get("matchExpressions") or [], list | tuple)
