"""The specs of InferenceModels and ModelEnsembles as values, with defaults applied.

`parse` makes them from objects of the API server. Quantities and durations that are passed on stay as Kubernetes writes
them; those that we compute with are numbers, with the unit in the name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

GROUP = "halimede.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

UNREAD = "unread"
"""Field beside `spec` in a cached object whose spec was too large to keep: the reason as text."""

_PLAIN_RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage"})
"""Of all others the API server knows more rules than parsing."""

Json = Mapping[str, Any]
"""A part of a Kubernetes object, or of a model's configuration, that is passed on unchanged."""


class Kind(StrEnum):
    INFERENCE_MODEL = "InferenceModel"
    MODEL_ENSEMBLE = "ModelEnsemble"

    @property
    def plural(self) -> str:
        return {Kind.INFERENCE_MODEL: "inferencemodels", Kind.MODEL_ENSEMBLE: "modelensembles"}[self]


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Identifies one object; the work queue holds keys."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a spec."""

    path: str
    """As kubectl would write it: `spec.model.uri`, `spec.steps[1].modelRef.name`."""
    message: str
    """What is wrong, and which value would be valid."""


@dataclass(frozen=True, slots=True)
class CaBundle:
    config_map: str
    key: str


@dataclass(frozen=True, slots=True)
class Model:
    """`spec.model`: where a model's files are, and overrides of its configuration."""

    name: str
    """The name under which it is served; the object's name by default."""
    uri: str
    digest: str | None
    format: str | None
    credentials_secret: str | None
    ca_bundle: CaBundle | None
    config: Json
    """Overrides as ModelConfig's JSON, with `versionPolicy` of `spec.model.versionPolicy`; {} without any."""


class AcceleratorType(StrEnum):
    NONE = "None"
    GPU = "GPU"
    MIG = "MIG"
    SHARED = "Shared"
    DRA = "DRA"


@dataclass(frozen=True, slots=True)
class GpuFilter:
    """`spec.accelerator.gpu`: which cards are good enough, also for slices of them."""

    products: tuple[str, ...] = ()
    """Values of the label nvidia.com/gpu.product of a whole card; empty: any."""
    min_memory_mib: int | None = None
    """Of the device that the pod gets, so of the slice if it gets one."""
    min_capability: tuple[int, int] | None = None


DEVICE_REQUEST = "device"
"""The name of the accelerator's own request in a claim."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """Devices of one class in a claim."""

    name: str
    device_class: str
    selectors: tuple[str, ...] = ()
    """CEL expressions; the pod gets devices of the first one for which some are free. Empty: any of the class."""
    count: int = 1


@dataclass(frozen=True, slots=True)
class DeviceClaim:
    """The devices of one pod, which kube-scheduler allocates (Dynamic Resource Allocation)."""

    device_class: str
    selectors: tuple[str, ...] = ()
    """As of a request."""
    count: int = 1
    additional: tuple[DeviceRequest, ...] = ()
    """Other devices that the pod gets too, on the same node."""

    @property
    def requests(self) -> tuple[DeviceRequest, ...]:
        """All requests, the accelerator's first."""
        return (DeviceRequest(DEVICE_REQUEST, self.device_class, self.selectors, self.count), *self.additional)


@dataclass(frozen=True, slots=True)
class Accelerator:
    type: AcceleratorType = AcceleratorType.NONE
    count: int = 1
    """Devices of each pod."""
    process_per_device: bool = False
    move_after_seconds: int = 120
    """A pod that cannot be placed for so long gets devices of another kind, if others fit."""
    mig_profile: str | None = None
    """With the name of NVIDIA's tools: 1g.10gb+me. None with `mig_min_memory_mib`."""
    mig_min_memory_mib: int | None = None
    """What the model needs, without the headroom that placement adds."""
    allow_whole: bool = False
    gpu: GpuFilter = GpuFilter()
    shared_resource: str = "nvidia.com/gpu.shared"
    claim: DeviceClaim | None = None
    """With type DRA, and only then."""

    @property
    def is_wanted(self) -> bool:
        return self.type is not AcceleratorType.NONE


class CacheMedium(StrEnum):
    EMPTY_DIR = "EmptyDir"
    HOST_PATH = "HostPath"
    PVC = "PVC"


@dataclass(frozen=True, slots=True)
class Cache:
    medium: CacheMedium = CacheMedium.EMPTY_DIR
    claim: str | None = None
    sub_path: str | None = None
    size_limit: str | None = None


class TopologySpread(StrEnum):
    NONE = "None"
    NODE = "Node"
    ZONE = "Zone"


@dataclass(frozen=True, slots=True)
class Scheduling:
    node_selector: Json = field(default_factory=dict)
    tolerations: tuple[Json, ...] = ()
    affinity: Json = field(default_factory=dict)
    topology_spread: TopologySpread = TopologySpread.NONE
    priority_class_name: str | None = None
    runtime_class_name: str | None = None
    scheduler_name: str | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    http: bool = True
    grpc: bool = True
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    max_message_bytes: int | None = None
    drain_seconds: int = 25
    """How long requests in flight may take after SIGTERM: `spec.serving.drainTimeout`."""
    arguments: tuple[str, ...] = ()
    """Further flags, `spec.serving.args`."""


@dataclass(frozen=True, slots=True)
class Image:
    reference: str | None = None
    """None: the platform's image, for GPUs or without."""
    pull_policy: str | None = None
    pull_secrets: tuple[str, ...] = ()


class RolloutPolicy(StrEnum):
    """How pods of a new spec replace those of the old one."""

    AUTO = "Auto"
    """Surge if a device is free for the first new pod, else InPlace."""
    SURGE = "Surge"
    """An old pod goes when a new one serves: needs room and devices for one more pod."""
    IN_PLACE = "InPlace"
    """One old pod goes first, and the new one takes its devices."""
    RECREATE = "Recreate"
    """All old pods go first."""


class UpgradePolicy(StrEnum):
    """When pods get the settings of a changed operator, such as another image of the server."""

    MANUAL = "Manual"
    """Not before the policy changes."""
    ON_SPEC_CHANGE = "OnSpecChange"
    """With the next change of the object that makes new pods."""
    AUTO = "Auto"
    """At once."""


@dataclass(frozen=True, slots=True)
class Rollout:
    policy: RolloutPolicy = RolloutPolicy.AUTO
    progress_seconds: int = 600
    """How long a new pod may take to serve, without the time of its fetch."""
    paused: bool = False
    auto_rollback: bool = True
    """Restore the last revision that was ready if the new one does not become ready in time."""
    upgrade_policy: UpgradePolicy = UpgradePolicy.ON_SPEC_CHANGE
    rebalance: bool = False
    """Move to smaller devices that are free, if another object waits for those of this one."""


class Provider(StrEnum):
    """Who changes the number of replicas."""

    HPA = "HPA"
    """A HorizontalPodAutoscaler that the operator makes."""
    KEDA = "KEDA"
    """A ScaledObject that the operator makes, from which KEDA makes a HorizontalPodAutoscaler."""
    EXTERNAL = "External"
    """Somebody else, with whatever writes the Deployment's scale."""


class Preset(StrEnum):
    """What to scale on (`core.scaling.presets`)."""

    QUEUE = "queue"
    CONCURRENCY = "concurrency"
    GPU = "gpu"


class ZeroBy(StrEnum):
    """Who takes the last replica away, and gives the first one back."""

    OPERATOR = "Operator"
    HPA = "HPA"
    KEDA = "KEDA"


@dataclass(frozen=True, slots=True)
class ScaleToZero:
    idle_seconds: int
    """How long the object must be idle."""
    by: ZeroBy = ZeroBy.OPERATOR


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """`spec.autoscaling`."""

    max_replicas: int
    min_replicas: int = 1
    provider: Provider = Provider.HPA
    preset: Preset | None = Preset.QUEUE
    """None with `metrics`, and with the provider External."""
    target: str | None = None
    """Of the preset's first metric, as a quantity; None: the preset's."""
    metrics: tuple[Json, ...] = ()
    """MetricSpecs of autoscaling/v2."""
    behavior: Json = field(default_factory=dict)
    scale_to_zero: ScaleToZero | None = None
    prometheus_address: str | None = None
    """URL that KEDA queries; None: the platform's."""
    prometheus_authentication: str | None = None
    """Name of KEDA's TriggerAuthentication for it."""

    @property
    def sleeps(self) -> bool:
        """Whether the operator sets the Deployment to 0 when the object is idle."""
        return self.scale_to_zero is not None and self.scale_to_zero.by is ZeroBy.OPERATOR


@dataclass(frozen=True, slots=True)
class Workload:
    """The settings of pods that both kinds have."""

    replicas: int = 1
    suspend: bool = False
    accelerator: Accelerator = Accelerator()
    resources: Json = field(default_factory=dict)
    scheduling: Scheduling = Scheduling()
    serving: Serving = Serving()
    cache: Cache = Cache()
    image: Image = Image()
    rollout: Rollout = Rollout()
    env: tuple[Json, ...] = ()
    service_account_name: str | None = None
    pod_template: Json = field(default_factory=dict)
    """Metadata and spec to merge over the pod template (`children.overlay`); lists of named items merge by name."""
    max_unavailable: int | str | None = 1
    """Of the PodDisruptionBudget; None: no budget (`spec.disruption: {disabled: true}`)."""
    network_policy: bool = False
    allow_from: tuple[Json, ...] = ()
    """NetworkPolicyPeers that may connect to the ports, in addition to the operator."""
    autoscaling: Autoscaling | None = None

    @property
    def has_unchecked_parts(self) -> bool:
        """Whether the pod template has parts that parsing does not check and leaves to the API server."""
        has_field = any("fieldRef" in (variable.get("valueFrom") or {}) for variable in self.env)
        has_resource = any(amounts.keys() - _PLAIN_RESOURCES for amounts in self.resources.values())
        return bool(self.pod_template or self.scheduling.affinity) or has_field or has_resource


@dataclass(frozen=True, slots=True)
class ModelSpec:
    model: Model
    workload: Workload


@dataclass(frozen=True, slots=True)
class EnsembleTensor:
    name: str
    data_type: str
    """In KServe's spelling: FP32, BYTES."""
    shape: tuple[int, ...]
    source: str | None = None
    """For an output of the ensemble: the `step.output` whose value it is."""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    model: str
    """Name of the InferenceModel, in the same namespace."""
    version: int | None
    inputs: Mapping[str, str]
    """The model's input -> `request.TENSOR` or `step.output`."""
    outputs: Mapping[str, str]
    """The model's output -> its name for later steps."""
    when: str | None = None


@dataclass(frozen=True, slots=True)
class EnsembleSpec:
    name: str
    """The name under which it is served: the object's name."""
    max_batch_size: int
    inputs: tuple[EnsembleTensor, ...]
    outputs: tuple[EnsembleTensor, ...]
    steps: tuple[Step, ...]
    workload: Workload


Spec = ModelSpec | EnsembleSpec
