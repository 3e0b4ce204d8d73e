"""What the cluster has and what pods hold of it, from nodes and pods of the API server.

Only nodes with devices are kept, with sums of what their pods request, and pods without a node that request devices.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from halimede_operator.core.api.quantities import quantity
from halimede_operator.core.api.spec import Key, Kind
from halimede_operator.core.devices import PREFIX, devices_in
from halimede_operator.core.labels import ENSEMBLE_LABEL, MANAGED_BY, MANAGED_BY_LABEL, MODEL_LABEL
from halimede_operator.core.placement.node_filter import Labels, NodeFilter, Taint, Term, filter_of
from halimede_operator.core.reading import at, clean, condition, decimal, name_at, objects_at, text_at
from halimede_operator.core.snapshot import Object

UNSCHEDULABLE = Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
"""Of a cordoned node. Kubernetes sets it a moment after `spec.unschedulable`."""
MAX_WAITING = 1000
"""Pods without a node that are kept."""
_SHARED = ".shared"
_SINGLE = "-MIG-"
_PROFILE = re.compile(r"[0-9]+g\.[0-9]+gb([.-][a-z.]+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Amounts:
    """What one pod requests, or what is free on a node."""

    milli_cpu: int = 0
    memory_bytes: int = 0
    devices: Counter[str] = field(default_factory=Counter)
    """Number by resource."""

    def times(self, count: int) -> "Amounts":
        devices = Counter({resource: count * each for resource, each in self.devices.items()})
        return Amounts(count * self.milli_cpu, count * self.memory_bytes, devices)


@dataclass(frozen=True, slots=True)
class Device:
    """The devices of one resource on one node."""

    resource: str
    """nvidia.com/mig-1g.10gb."""
    profile: str
    """Of a slice, as resource names have it: 1g.10gb.me. "" for whole GPUs."""
    count: int
    """Healthy ones, free or not."""
    memory_mib: int | None
    """Of one device, by the node's label; None if the label is missing."""
    is_shared: bool

    @property
    def text(self) -> str:
        """For people: the profile as NVIDIA's tools write it, else GPU."""
        return shown_profile(self.profile) or ("shared GPU" if self.is_shared else "GPU")


@dataclass(frozen=True, slots=True)
class Holding:
    """Devices and more that the pods of one owner request on one node."""

    key: Key | None
    """The InferenceModel or ModelEnsemble; None for pods that the operator does not manage."""
    namespace: str
    amounts: Amounts
    pods: int = 1


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    labels: Labels
    taints: tuple[Taint, ...]
    is_ready: bool
    milli_cpu: int
    memory_bytes: int
    pods: int
    """The most pods that it takes."""
    devices: tuple[Device, ...]
    holdings: tuple[Holding, ...] = ()

    @property
    def product(self) -> str:
        """The card's product, also if its slices are offered under the strategy `single`."""
        return self.labels.get(f"{PREFIX}gpu.product", "").partition(_SINGLE)[0].removesuffix("-SHARED")

    @property
    def misconfiguration(self) -> str:
        """Why its devices cannot be used, if NVIDIA's labels say so; "" otherwise."""
        if self.labels.get(f"{PREFIX}gpu.product", "").endswith("-MIG-INVALID"):
            return "its cards are partitioned in a way that the MIG strategy 'single' does not allow"
        state = self.labels.get(f"{PREFIX}mig.config.state", "")
        return f"its partitioning is {state}" if state in {"pending", "rebooting", "failed"} else ""


@dataclass(frozen=True, slots=True)
class Claim:
    """Devices that a pod without a node will take, or one that does not exist yet."""

    filter: NodeFilter
    amounts: Amounts
    key: Key | None = None
    terms: tuple[Term, ...] = ()
    """Further conditions on nodes, one of which must be true: those of a placement."""


@dataclass(frozen=True, slots=True)
class Inventory:
    nodes: tuple[Node, ...] = ()
    """Those that offer devices or should (`has_devices`), sorted by name."""
    waiting: tuple[Claim, ...] = ()
    """Pods without a node that request devices, oldest first."""

    def pods_of(self, key: Key, resource: str, nodes: Iterable[Node]) -> int:
        """How many pods of the object request this resource, on these nodes or without a node."""
        placed = sum(
            holding.pods
            for node in nodes
            for holding in node.holdings
            if holding.key == key and holding.amounts.devices[resource]
        )
        return placed + sum(claim.key == key and claim.amounts.devices[resource] > 0 for claim in self.waiting)


@dataclass(frozen=True, slots=True)
class PodSummary:
    """The part of a pod that the inventory needs."""

    node: str
    created: str
    key: Key | None
    namespace: str
    amounts: Amounts
    filter: NodeFilter | None
    """None for a pod with a node."""


def summary_of(pod: Object, device_nodes: frozenset[str]) -> PodSummary | None:
    """What to keep of a pod; None for a pod that has ended, or that holds and wants nothing of nodes with devices.

    device_nodes: names of the nodes with devices.
    """
    if text_at(pod, "status", "phase") in {"Failed", "Succeeded"}:
        return None
    node = name_at(pod, "spec", "nodeName")
    if (node and node not in device_nodes) or objects_at(pod, "spec", "schedulingGates"):
        return None
    amounts = amounts_of(pod)
    if not node and (not amounts.devices or at(pod, "metadata", "deletionTimestamp") is not None):
        return None
    conditions = None if node else filter_of(pod)
    if conditions is not None and conditions.is_too_large:
        return None
    namespace = name_at(pod, "metadata", "namespace")
    created = text_at(pod, "metadata", "creationTimestamp")
    return PodSummary(node, created, _key_of(pod, namespace), namespace, amounts, conditions)


def _key_of(pod: Object, namespace: str) -> Key | None:
    labels = at(pod, "metadata", "labels")
    if text_at(labels, MANAGED_BY_LABEL) != MANAGED_BY:
        return None
    for label, kind in ((MODEL_LABEL, Kind.INFERENCE_MODEL), (ENSEMBLE_LABEL, Kind.MODEL_ENSEMBLE)):
        if name := name_at(labels, label):
            return Key(kind, namespace, name)
    return None


def inventory_of(nodes: Iterable[Object], pods: Iterable[PodSummary]) -> Inventory:
    holdings: dict[str, dict[tuple[Key | None, str], Holding]] = {}
    waiting = []
    for pod in pods:
        if pod.filter is not None:
            waiting.append((pod.created, Claim(pod.filter, pod.amounts, pod.key)))
            continue
        held = holdings.setdefault(pod.node, {})
        before = held.get((pod.key, pod.namespace))
        held[pod.key, pod.namespace] = Holding(
            pod.key,
            pod.namespace,
            pod.amounts if before is None else _sum(before.amounts, pod.amounts),
            1 if before is None else before.pods + 1,
        )
    found = (_node(node, tuple(holdings.get(name_at(node, "metadata", "name"), {}).values())) for node in nodes)
    return Inventory(
        tuple(sorted(found, key=lambda node: node.name)),
        tuple(claim for _, claim in sorted(waiting, key=lambda pair: pair[0])[:MAX_WAITING]),
    )


def node_part(node: Object) -> Object:
    """The parts of a node that are used. Its list of images, for instance, is long."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    return {
        "metadata": {name: node["metadata"].get(name) for name in ("name", "labels")},
        "spec": {name: spec.get(name) for name in ("taints", "unschedulable")},
        "status": {name: status.get(name) for name in ("allocatable", "conditions")},
    }


def has_devices(node: Object) -> bool:
    """Whether the node offers devices, or is labelled as one that does."""
    return any(_offered(node)) or at(node, "metadata", "labels", f"{PREFIX}gpu.present") == "true"


def _offered(node: Object) -> Iterable[tuple[str, int]]:
    return sorted(devices_in(at(node, "status", "allocatable")))


def _node(node: Object, holdings: tuple[Holding, ...]) -> Node:
    found = at(node, "metadata", "labels")
    labels = {str(key): str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}
    taints = [
        Taint(name_at(taint, "key"), name_at(taint, "value"), name_at(taint, "effect"))
        for taint in objects_at(node, "spec", "taints")
    ]
    if at(node, "spec", "unschedulable") is True and UNSCHEDULABLE not in taints:
        taints.append(UNSCHEDULABLE)
    allocatable = at(node, "status", "allocatable")
    return Node(
        name=name_at(node, "metadata", "name"),
        labels=labels,
        taints=tuple(taints),
        is_ready=condition(node, "Ready").get("status") == "True",
        milli_cpu=_milli(at(allocatable, "cpu")),
        memory_bytes=_whole(at(allocatable, "memory")),
        pods=decimal(at(allocatable, "pods")) or 0,
        devices=tuple(_device(name, count, labels) for name, count in _offered(node)),
        holdings=holdings,
    )


def _device(resource: str, count: int, labels: Labels) -> Device:
    base = resource.removeprefix(PREFIX).removesuffix(_SHARED)
    is_slice = base.startswith("mig-")
    profile = base.removeprefix("mig-") if is_slice else single_profile(labels)
    strategy = labels.get(f"{PREFIX}{base}.sharing-strategy", "none")
    memory = decimal(labels.get(f"{PREFIX}{base}.memory"))
    return Device(resource, profile, count, memory, resource.endswith(_SHARED) or strategy not in {"none", ""})


def single_profile(labels: Labels) -> str:
    """The profile of a node whose slices are offered as `nvidia.com/gpu` (strategy `single`), as in resource names;
    "" for any other node."""
    profile = labels.get(f"{PREFIX}gpu.product", "").partition(_SINGLE)[2].removesuffix("-SHARED").replace("+", ".")
    return profile if _PROFILE.fullmatch(profile) else ""


def shown_profile(profile: str) -> str:
    """The profile of a resource name as NVIDIA's tools write it: 1g.10gb.me is 1g.10gb+me."""
    size, unit, attributes = clean(profile, 64).partition("gb.")
    return f"{size}gb+{attributes}" if unit else size


def amounts_of(pod: object) -> Amounts:
    """What a pod, or a pod template, requests: the sum of its containers, or an init container if that needs more."""
    running = _sum_all(objects_at(pod, "spec", "containers"))
    sidecars = Amounts()
    most = running
    for container in objects_at(pod, "spec", "initContainers"):
        own = _requests(container)
        if text_at(container, "restartPolicy") == "Always":
            sidecars = _sum(sidecars, own)
            own = sidecars
        else:
            own = _sum(sidecars, own)
        most = _larger(most, own)
    most = _larger(most, _sum(running, sidecars))
    own = at(pod, "spec", "resources")
    if own is not None:
        # Requests of the pod as a whole replace the sum of its containers.
        whole = _requests({"resources": own})
        most = Amounts(whole.milli_cpu or most.milli_cpu, whole.memory_bytes or most.memory_bytes, most.devices)
    overhead = at(pod, "spec", "overhead")
    return _sum(most, _amounts(overhead)) if isinstance(overhead, Mapping) else most


def _sum_all(containers: Iterable[object]) -> Amounts:
    found = Amounts()
    for container in containers:
        found = _sum(found, _requests(container))
    return found


def _requests(container: object) -> Amounts:
    """A container's requests. Where it has only a limit, Kubernetes requests as much."""
    limits, requests = at(container, "resources", "limits"), at(container, "resources", "requests")
    return _amounts(
        {
            **(limits if isinstance(limits, Mapping) else {}),
            **(requests if isinstance(requests, Mapping) else {}),
        }
    )


def _amounts(quantities: Mapping[str, object]) -> Amounts:
    return Amounts(
        _milli(quantities.get("cpu")), _whole(quantities.get("memory")), Counter(dict(devices_in(quantities)))
    )


def _sum(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(one.milli_cpu + other.milli_cpu, one.memory_bytes + other.memory_bytes, one.devices + other.devices)


def _larger(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(
        max(one.milli_cpu, other.milli_cpu), max(one.memory_bytes, other.memory_bytes), one.devices | other.devices
    )


def _milli(value: object) -> int:
    amount = quantity(value)
    return math.ceil(amount * 1000) if amount is not None else 0


def _whole(value: object) -> int:
    amount = quantity(value)
    return math.ceil(amount) if amount is not None else 0
