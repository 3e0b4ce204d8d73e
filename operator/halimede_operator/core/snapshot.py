"""The input of all decisions of a reconcile: the state of the API server and of the pods at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halimede_operator.core.spec.types import Key

Object = dict[str, Any]
"""A Kubernetes object as JSON, without managedFields."""


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """One line of a pod's repository index."""

    model: str
    version: str
    state: str
    """READY, UNAVAILABLE, LOADING, UNLOADING or '', as in the v2 index."""
    reason: str
    has_workers: bool = False
    """Its instances are worker processes, which may die while the server keeps running."""
    worker_failure: str = ""
    """Why a worker process died. Kept for some minutes after its restart."""
    out_of_memory: bool = False
    """The kernel probably killed the worker process for lack of memory."""


@dataclass(frozen=True, slots=True)
class PodDevice:
    """One device of a pod; None for what the pod does not know. Memory is in bytes."""

    uuid: str
    profile: str = ""
    """Of a MIG slice, `1g.10gb`; "" for a whole GPU, or if it is not known."""
    total_bytes: int | None = None
    before_bytes: int | None = None
    """In use before the first model was loaded."""
    peak_bytes: int | None = None
    """The most in use since then."""


@dataclass(frozen=True, slots=True)
class PodDevices:
    """What a running pod reports of its devices, and of its memory outside of them."""

    devices: tuple[PodDevice, ...] = ()
    host_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PodIndex:
    """The repository index of a running pod: what it serves, and on which devices."""

    versions: tuple[ServedVersion, ...] = ()
    error: str | None = None
    """Why the pod could not be asked; the versions are empty then."""
    devices: PodDevices | None = None
    """The last report; None if there is none, because the pod was not ready yet or its server has no such report."""


@dataclass(frozen=True, slots=True)
class Idle:
    """An object has had no request since then."""

    since: str
    of: str
    """A hash of its pods, and of how many requests each had answered."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A node has fewer devices of a resource than our pods hold there."""

    resource: str
    has: int
    held: int


@dataclass(frozen=True, slots=True)
class VolumeClaim:
    """A PersistentVolumeClaim that a pod waits for."""

    is_bound: bool
    storage_class: str | None
    """"" if the claim wants none; None if it names none, and the cluster has no default."""
    event: str
    """What provisioner and controllers said about it last; "" if nothing."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Another object whose children would have names of this object's children."""

    object: Object
    has_deployment: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    key: Key
    object: Object
    """The InferenceModel or the ModelEnsemble."""
    members: Mapping[str, Object]
    """The existing InferenceModels of an ensemble, by name."""
    children: tuple[Object, ...]
    """Objects with our labels, of every kind that we create, without pods and ReplicaSets: those with this object's uid
    as owner, and orphans (`labels.is_orphan_of`), which an earlier object of this name left."""
    replica_sets: tuple[Object, ...]
    """Of the Deployment."""
    pods: tuple[Object, ...]
    """Those that are read: `has_more_pods` if there are more."""
    indexes: Mapping[str, PodIndex]
    """By pod uid, of pods whose server container runs."""
    keda_hpa: Object | None = None
    """The HPA that KEDA made from the object's ScaledObject, also if that is deleted."""
    no_zero: str = ""
    """Why the API server refuses an HPA with 0 as minReplicas; "" if that is not known."""
    is_owner_unknown: bool = False
    """The API server did not know the object's kind a moment ago, when a child was to name it as its owner."""
    idle: Idle | None = None
    """None if it is not idle, if that is not known, or if nobody asks."""
    refused_pods: tuple[str, ...] = ()
    """Messages of ReplicaSets about pods that they may not create (condition ReplicaFailure)."""
    kubelet_events: Mapping[str, tuple[Object, ...]] = field(default_factory=dict)
    """By pod uid. For pods that wait for their sandbox: warnings about what comes before it. For pods whose images are
    not pulled: which pull secrets the kubelet could not read."""
    volume_claims: Mapping[str, VolumeClaim | None] = field(default_factory=dict)
    """PersistentVolumeClaims for which pods get no node, by name; None: it does not exist. Those that were read."""
    shortages: Mapping[str, tuple[Shortage, ...]] = field(default_factory=dict)
    """By node, of devices that pods of this object hold."""
    contenders: tuple[Contender, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Kinds of children that cannot be created in this cluster, and why."""
    allocated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By pod name, of pods whose ResourceClaims were read now: their devices, `driver/pool/device`."""
    has_more_pods: bool = False
    free_devices: str = ""
    """For an object with pods that wait for devices: which ones are free, in words."""
