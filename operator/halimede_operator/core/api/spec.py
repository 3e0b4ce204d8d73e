"""What an InferenceModel and a ModelEnsemble ask for, after defaults: the specs as values.

`parse` makes them from objects of the API server. Quantities and durations are kept as Kubernetes writes them where
they are handed on, and in units of their own where we count with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

GROUP = "halimede.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

UNREAD = "unread"
"""Beside the spec of an object of which no more than that was kept: why there is none."""

Json = Mapping[str, Any]
"""A part of a Kubernetes object, or of a model's configuration, that is handed on as it is."""


class Kind(StrEnum):
    INFERENCE_MODEL = "InferenceModel"
    MODEL_ENSEMBLE = "ModelEnsemble"

    @property
    def plural(self) -> str:
        return {Kind.INFERENCE_MODEL: "inferencemodels", Kind.MODEL_ENSEMBLE: "modelensembles"}[self]


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One object: what the queue holds."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a spec."""

    path: str
    """As kubectl would write it: `spec.model.uri`, `spec.steps[1].modelRef.name`."""
    message: str
    """What is wrong, and what would be right."""


@dataclass(frozen=True, slots=True)
class CaBundle:
    config_map: str
    key: str


@dataclass(frozen=True, slots=True)
class Model:
    """Where a model's files come from and what is changed about them: `spec.model`."""

    name: str
    """As it is served; the object's name by default."""
    uri: str
    digest: str | None
    format: str | None
    credentials_secret: str | None
    ca_bundle: CaBundle | None
    config: Json
    """Overrides as ModelConfig's JSON with the proto's names, `version_policy` among them; {} without any."""


class AcceleratorType(StrEnum):
    NONE = "None"
    GPU = "GPU"
    MIG = "MIG"


@dataclass(frozen=True, slots=True)
class Accelerator:
    type: AcceleratorType = AcceleratorType.NONE
    count: int = 1
    mig_profile: str | None = None

    @property
    def resource_name(self) -> str | None:
        """The extended resource that a pod asks for, `nvidia.com/mig-1g.10gb`; None without an accelerator."""
        match self.type:
            case AcceleratorType.NONE:
                return None
            case AcceleratorType.GPU:
                return "nvidia.com/gpu"
            case AcceleratorType.MIG:
                return f"nvidia.com/mig-{(self.mig_profile or '').replace('+', '.')}"


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
    """How long what is in flight may take at SIGTERM: `spec.serving.drainTimeout`."""


@dataclass(frozen=True, slots=True)
class Image:
    reference: str | None = None
    """None: the platform's, for GPUs or without."""
    pull_policy: str | None = None
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """What both kinds say of their pods."""

    replicas: int = 1
    suspend: bool = False
    accelerator: Accelerator = Accelerator()
    resources: Json = field(default_factory=dict)
    scheduling: Scheduling = Scheduling()
    serving: Serving = Serving()
    cache: Cache = Cache()
    image: Image = Image()
    env: tuple[Json, ...] = ()
    service_account_name: str | None = None
    pod_template: Json = field(default_factory=dict)
    """A strategic overlay over the pod template: metadata and spec; lists with names merge by name."""
    max_unavailable: int | str | None = 1
    """Of the PodDisruptionBudget; None for no budget (`spec.disruption: {disabled: true}`)."""
    network_policy: bool = False
    allow_from: tuple[Json, ...] = ()
    """NetworkPolicyPeers that may reach the ports, beside the operator."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    model: Model
    workload: Workload


@dataclass(frozen=True, slots=True)
class EnsembleTensor:
    name: str
    data_type: str
    """As KServe writes it: FP32, BYTES."""
    shape: tuple[int, ...]
    source: str | None = None
    """Of an output: `step.output`, whose value it is."""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    model: str
    """Name of the InferenceModel, in the same namespace."""
    version: int | None
    inputs: Mapping[str, str]
    """The model's input -> `request.TENSOR` or `step.output`."""
    outputs: Mapping[str, str]
    """The model's output -> the name by which later steps know it."""
    when: str | None = None


@dataclass(frozen=True, slots=True)
class EnsembleSpec:
    name: str
    """As it is served: the object's name."""
    max_batch_size: int
    inputs: tuple[EnsembleTensor, ...]
    outputs: tuple[EnsembleTensor, ...]
    steps: tuple[Step, ...]
    workload: Workload


Spec = ModelSpec | EnsembleSpec
