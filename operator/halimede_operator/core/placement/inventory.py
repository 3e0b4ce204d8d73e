"""What the cluster has and what pods hold of it, from nodes and pods of the API server.

Only nodes with devices are kept, with sums of what their pods request, and pods without a node that request devices.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from halimede_operator.core.labels import ENSEMBLE_LABEL, MANAGED_BY, MANAGED_BY_LABEL, MODEL_LABEL
from halimede_operator.core.placement.devices import PREFIX, devices_in
from halimede_operator.core.placement.node_filter import Labels, NodeFilter, Taint, Term, filter_of
from halimede_operator.core.reading import at, clean, condition, decimal, moment_at, name_at, objects_at, text_at
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.quantities import quantity
from halimede_operator.core.spec.types import Key, Kind

UNSCHEDULABLE = Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
"""Of a cordoned node. Kubernetes sets it a moment after `spec.unschedulable`."""
MAX_WAITING = 1000
"""Pods without a node that are kept."""
GKE_PARTITION = "cloud.google.com/gke-gpu-partition-size"
"""The profile of a node whose slices are offered as `nvidia.com/gpu`, in Google's Kubernetes Engine."""
GKE_SHARING = ("cloud.google.com/gke-gpu-sharing-strategy", "cloud.google.com/gke-max-shared-clients-per-gpu")
"""Labels that only nodes with shared GPUs have there."""
_SHARED = ".shared"
_SHARED_PRODUCT = "-SHARED"
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
    ends_at: str = ""
    """When the grace period of these pods is over, which are being deleted; "" for others."""


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

    def count_of(self, resource: str) -> int:
        """How many healthy devices of a resource it has, free or not."""
        return sum(device.count for device in self.devices if device.resource == resource)

    @property
    def product(self) -> str:
        """The card's product, also if its slices are offered under the strategy `single`."""
        return self.labels.get(f"{PREFIX}gpu.product", "").partition(_SINGLE)[0].removesuffix(_SHARED_PRODUCT)

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
        """How many pods of the object request this resource, on these nodes or without a node, and are not ending."""
        placed = sum(
            holding.pods
            for node in nodes
            for holding in node.holdings
            if holding.key == key and holding.amounts.devices[resource] and not holding.ends_at
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
    ends_at: str = ""
    """When its grace period is over; "" if it is not being deleted."""


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
    ends_at = moment_at(pod, "metadata", "deletionTimestamp") or ""
    return PodSummary(node, created, _key_of(pod, namespace), namespace, amounts, conditions, ends_at)


def _key_of(pod: Object, namespace: str) -> Key | None:
    labels = at(pod, "metadata", "labels")
    if text_at(labels, MANAGED_BY_LABEL) != MANAGED_BY:
        return None
    for label, kind in ((MODEL_LABEL, Kind.INFERENCE_MODEL), (ENSEMBLE_LABEL, Kind.MODEL_ENSEMBLE)):
        if name := name_at(labels, label):
            return Key(kind, namespace, name)
    return None


def inventory_of(nodes: Iterable[Object], pods: Iterable[PodSummary]) -> Inventory:
    holdings: dict[str, dict[tuple[Key | None, str, str], Holding]] = {}
    waiting = []
    for pod in pods:
        if pod.filter is not None:
            waiting.append((pod.created, Claim(pod.filter, pod.amounts, pod.key)))
            continue
        held = holdings.setdefault(pod.node, {})
        owner = pod.key, pod.namespace, pod.ends_at
        before = held.get(owner)
        held[owner] = Holding(
            pod.key,
            pod.namespace,
            pod.amounts if before is None else _sum(before.amounts, pod.amounts),
            1 if before is None else before.pods + 1,
            pod.ends_at,
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
    return any(_advertised(node)) or at(node, "metadata", "labels", f"{PREFIX}gpu.present") == "true"


def _advertised(node: Object) -> Iterable[tuple[str, int]]:
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
        devices=tuple(_device(name, count, labels) for name, count in _advertised(node)),
        holdings=holdings,
    )


def _device(resource: str, count: int, labels: Labels) -> Device:
    base = resource.removeprefix(PREFIX).removesuffix(_SHARED)
    is_slice = base.startswith("mig-")
    profile = base.removeprefix("mig-") if is_slice else single_profile(labels)
    memory = decimal(labels.get(f"{PREFIX}{base}.memory"))
    is_shared = resource.endswith(_SHARED) or _is_shared(labels, f"{PREFIX}{base}")
    return Device(resource, profile, count, memory, is_shared)


def _is_shared(labels: Labels, base: str) -> bool:
    """base: the resource, without its ending if that is `.shared`."""
    strategy = labels.get(f"{base}.sharing-strategy", "none")
    by_gke = base == f"{PREFIX}gpu" and any(label in labels for label in GKE_SHARING)
    return strategy not in {"none", ""} or by_gke or bool(sharing_values(labels, base))


def sharing_values(labels: Labels, base: str) -> dict[str, str]:
    """Those of a node's labels that say by their value that its devices are shared: of labels whose other values have
    no fixed meaning. base: the resource, without its ending if that is `.shared`."""
    replicas, product = f"{base}.replicas", f"{base}.product"
    found = {replicas: labels[replicas]} if (decimal(labels.get(replicas)) or 0) > 1 else {}
    return found | ({product: labels[product]} if labels.get(product, "").endswith(_SHARED_PRODUCT) else {})


def single_profile(labels: Labels) -> str:
    """The profile of a node whose slices are offered as `nvidia.com/gpu` (strategy `single`, or by GKE), as in resource
    names; "" for any other node."""
    return product_profile(labels) or gke_profile(labels)


def product_profile(labels: Labels) -> str:
    """The profile in the product, as GPU feature discovery writes it with the strategy `single`; "" without one."""
    return _profile(labels.get(f"{PREFIX}gpu.product", "").partition(_SINGLE)[2].removesuffix(_SHARED_PRODUCT))


def gke_profile(labels: Labels) -> str:
    """The profile in GKE's label; "" if there is none."""
    return _profile(labels.get(GKE_PARTITION, ""))


def _profile(written: str) -> str:
    profile = written.replace("+", ".")
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
        {**(limits if isinstance(limits, Mapping) else {}), **(requests if isinstance(requests, Mapping) else {})}
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
