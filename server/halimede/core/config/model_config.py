"""The model configuration as data: every field of Triton's ModelConfig under its protocol name.

The order of the fields is the order in which `GET /v2/models/<m>/config` prints them. A message field that is not set
is None; a scalar that is not set has the protocol's default (0, "", False, the first enum member). `ONEOFS` lists the
groups of fields of which at most one may be set. A unit test compares this file with
`core/wire/protocol/model_config.proto`, field by field. So the classes have as many fields as the protocol's messages.
`global_` is the protocol's `global`, a keyword of Python.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, ClassVar

from halimede.core.sequences.plan import ControlKind
from halimede.core.types import DataType

Int32 = Annotated[int, -(2**31), 2**31 - 1]
Int64 = Annotated[int, -(2**63), 2**63 - 1]
UInt32 = Annotated[int, 0, 2**32 - 1]
UInt64 = Annotated[int, 0, 2**64 - 1]


@dataclass(frozen=True, slots=True)
class RateLimiterResource:
    name: str = ""
    global_: bool = False
    count: UInt32 = 0


@dataclass(frozen=True, slots=True)
class ModelRateLimiter:
    resources: tuple[RateLimiterResource, ...] = ()
    priority: UInt32 = 0


class InstanceKind(Enum):
    KIND_AUTO = 0
    KIND_GPU = 1
    KIND_CPU = 2
    KIND_MODEL = 3


class SecondaryDeviceKind(Enum):
    KIND_NVDLA = 0


@dataclass(frozen=True, slots=True)
class SecondaryDevice:
    kind: SecondaryDeviceKind = SecondaryDeviceKind.KIND_NVDLA
    device_id: Int64 = 0


@dataclass(frozen=True, slots=True)
class ModelInstanceGroup:
    name: str = ""
    kind: InstanceKind = InstanceKind.KIND_AUTO
    count: Int32 = 0
    rate_limiter: ModelRateLimiter | None = None
    gpus: tuple[Int32, ...] = ()
    secondary_devices: tuple[SecondaryDevice, ...] = ()
    profile: tuple[str, ...] = ()
    passive: bool = False
    host_policy: str = ""


@dataclass(frozen=True, slots=True)
class ModelTensorReshape:
    shape: tuple[Int64, ...] = ()


class InputFormat(Enum):
    FORMAT_NONE = 0
    FORMAT_NHWC = 1
    FORMAT_NCHW = 2


@dataclass(frozen=True, slots=True)
class ModelInput:
    name: str = ""
    data_type: DataType = DataType.INVALID
    format: InputFormat = InputFormat.FORMAT_NONE
    dims: tuple[Int64, ...] = ()
    reshape: ModelTensorReshape | None = None
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False
    optional: bool = False
    is_non_linear_format_io: bool = False


@dataclass(frozen=True, slots=True)
class ModelOutput:
    name: str = ""
    data_type: DataType = DataType.INVALID
    dims: tuple[Int64, ...] = ()
    reshape: ModelTensorReshape | None = None
    label_filename: str = ""
    is_shape_tensor: bool = False
    is_non_linear_format_io: bool = False


class BatchInputKind(Enum):
    BATCH_ELEMENT_COUNT = 0
    BATCH_ACCUMULATED_ELEMENT_COUNT = 1
    BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = 2
    BATCH_MAX_ELEMENT_COUNT_AS_SHAPE = 3
    BATCH_ITEM_SHAPE = 4
    BATCH_ITEM_SHAPE_FLATTEN = 5


def inner_dims(tensor: ModelInput | ModelOutput) -> tuple[int, ...]:
    """The tensor's dims as the backend, or the steps of an ensemble, see them."""
    return tensor.dims if tensor.reshape is None else tensor.reshape.shape


@dataclass(frozen=True, slots=True)
class BatchInput:
    kind: BatchInputKind = BatchInputKind.BATCH_ELEMENT_COUNT
    target_name: tuple[str, ...] = ()
    data_type: DataType = DataType.INVALID
    source_input: tuple[str, ...] = ()


class BatchOutputKind(Enum):
    BATCH_SCATTER_WITH_INPUT_SHAPE = 0


@dataclass(frozen=True, slots=True)
class BatchOutput:
    target_name: tuple[str, ...] = ()
    kind: BatchOutputKind = BatchOutputKind.BATCH_SCATTER_WITH_INPUT_SHAPE
    source_input: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LatestVersions:
    num_versions: UInt32 = 0


@dataclass(frozen=True, slots=True)
class AllVersions:
    pass


@dataclass(frozen=True, slots=True)
class SpecificVersions:
    versions: tuple[Int64, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelVersionPolicy:
    ONEOFS: ClassVar[tuple[tuple[str, ...], ...]] = (("latest", "all", "specific"),)

    latest: LatestVersions | None = None
    all: AllVersions | None = None
    specific: SpecificVersions | None = None


class ModelPriority(Enum):
    PRIORITY_DEFAULT = 0
    PRIORITY_MAX = 1
    PRIORITY_MIN = 2


@dataclass(frozen=True, slots=True)
class OptimizationGraph:
    level: Int32 = 0


@dataclass(frozen=True, slots=True)
class CudaGraphShape:
    dim: tuple[Int64, ...] = ()


@dataclass(frozen=True, slots=True)
class CudaGraphLowerBound:
    batch_size: Int32 = 0
    input: Mapping[str, CudaGraphShape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CudaGraphSpec:
    batch_size: Int32 = 0
    input: Mapping[str, CudaGraphShape] = field(default_factory=dict)
    graph_lower_bound: CudaGraphLowerBound | None = None


@dataclass(frozen=True, slots=True)
class OptimizationCuda:
    graphs: bool = False
    busy_wait_events: bool = False
    graph_spec: tuple[CudaGraphSpec, ...] = ()
    output_copy_stream: bool = False


@dataclass(frozen=True, slots=True)
class Accelerator:
    name: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExecutionAccelerators:
    gpu_execution_accelerator: tuple[Accelerator, ...] = ()
    cpu_execution_accelerator: tuple[Accelerator, ...] = ()


@dataclass(frozen=True, slots=True)
class PinnedMemoryBuffer:
    enable: bool = False


@dataclass(frozen=True, slots=True)
class ModelOptimizationPolicy:
    graph: OptimizationGraph | None = None
    priority: ModelPriority = ModelPriority.PRIORITY_DEFAULT
    cuda: OptimizationCuda | None = None
    execution_accelerators: ExecutionAccelerators | None = None
    input_pinned_memory: PinnedMemoryBuffer | None = None
    output_pinned_memory: PinnedMemoryBuffer | None = None
    gather_kernel_buffer_threshold: UInt32 = 0
    eager_batching: bool = False


class TimeoutAction(Enum):
    REJECT = 0
    DELAY = 1


@dataclass(frozen=True, slots=True)
class ModelQueuePolicy:
    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: UInt64 = 0
    allow_timeout_override: bool = False
    max_queue_size: UInt32 = 0


@dataclass(frozen=True, slots=True)
class ModelDynamicBatching:
    preferred_batch_size: tuple[Int32, ...] = ()
    max_queue_delay_microseconds: UInt64 = 0
    preserve_ordering: bool = False
    priority_levels: UInt64 = 0
    default_priority_level: UInt64 = 0
    default_queue_policy: ModelQueuePolicy | None = None
    priority_queue_policy: Mapping[UInt64, ModelQueuePolicy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceControl:
    kind: ControlKind = ControlKind.CONTROL_SEQUENCE_START
    int32_false_true: tuple[Int32, ...] = ()
    fp32_false_true: tuple[float, ...] = ()
    bool_false_true: tuple[bool, ...] = ()
    data_type: DataType = DataType.INVALID


@dataclass(frozen=True, slots=True)
class SequenceControlInput:
    name: str = ""
    control: tuple[SequenceControl, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceInitialState:
    ONEOFS: ClassVar[tuple[tuple[str, ...], ...]] = (("zero_data", "data_file"),)

    data_type: DataType = DataType.INVALID
    dims: tuple[Int64, ...] = ()
    zero_data: bool | None = None
    data_file: str | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class SequenceState:
    input_name: str = ""
    output_name: str = ""
    data_type: DataType = DataType.INVALID
    dims: tuple[Int64, ...] = ()
    initial_state: tuple[SequenceInitialState, ...] = ()
    use_same_buffer_for_input_output: bool = False
    use_growable_memory: bool = False


@dataclass(frozen=True, slots=True)
class StrategyDirect:
    max_queue_delay_microseconds: UInt64 = 0
    minimum_slot_utilization: float = 0.0


@dataclass(frozen=True, slots=True)
class StrategyOldest:
    max_candidate_sequences: Int32 = 0
    preferred_batch_size: tuple[Int32, ...] = ()
    max_queue_delay_microseconds: UInt64 = 0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class ModelSequenceBatching:
    ONEOFS: ClassVar[tuple[tuple[str, ...], ...]] = (("direct", "oldest"),)

    direct: StrategyDirect | None = None
    oldest: StrategyOldest | None = None
    max_sequence_idle_microseconds: UInt64 = 0
    control_input: tuple[SequenceControlInput, ...] = ()
    state: tuple[SequenceState, ...] = ()
    iterative_sequence: bool = False


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    model_name: str = ""
    model_version: Int64 = 0
    input_map: Mapping[str, str] = field(default_factory=dict)
    output_map: Mapping[str, str] = field(default_factory=dict)
    model_namespace: str = ""
    # Halimede's own field. None if not set, so Triton's tools do not see it in configurations that do not use it.
    when: str | None = None


@dataclass(frozen=True, slots=True)
class ModelEnsembling:
    step: tuple[EnsembleStep, ...] = ()
    max_inflight_requests: UInt32 = 0


@dataclass(frozen=True, slots=True)
class ModelParameter:
    string_value: str = ""


@dataclass(frozen=True, slots=True)
class WarmupInput:
    ONEOFS: ClassVar[tuple[tuple[str, ...], ...]] = (("zero_data", "random_data", "input_data_file"),)

    data_type: DataType = DataType.INVALID
    dims: tuple[Int64, ...] = ()
    zero_data: bool | None = None
    random_data: bool | None = None
    input_data_file: str | None = None


@dataclass(frozen=True, slots=True)
class ModelWarmup:
    name: str = ""
    batch_size: UInt32 = 0
    inputs: Mapping[str, WarmupInput] = field(default_factory=dict)
    count: UInt32 = 0


@dataclass(frozen=True, slots=True)
class ModelOperations:
    op_library_filename: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelTransactionPolicy:
    decoupled: bool = False


@dataclass(frozen=True, slots=True)
class RepositoryAgent:
    name: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelRepositoryAgents:
    agents: tuple[RepositoryAgent, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelResponseCache:
    enable: bool = False


@dataclass(frozen=True, slots=True)
class MetricIdentifier:
    family: str = ""


@dataclass(frozen=True, slots=True)
class HistogramOptions:
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricControl:
    ONEOFS: ClassVar[tuple[tuple[str, ...], ...]] = (("histogram_options",),)

    metric_identifier: MetricIdentifier | None = None
    histogram_options: HistogramOptions | None = None


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    metric_control: tuple[MetricControl, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    ONEOFS: ClassVar[tuple[tuple[str, ...], ...]] = (("dynamic_batching", "sequence_batching", "ensemble_scheduling"),)

    name: str = ""
    platform: str = ""
    backend: str = ""
    runtime: str = ""
    version_policy: ModelVersionPolicy | None = None
    max_batch_size: Int32 = 0
    input: tuple[ModelInput, ...] = ()
    output: tuple[ModelOutput, ...] = ()
    batch_input: tuple[BatchInput, ...] = ()
    batch_output: tuple[BatchOutput, ...] = ()
    optimization: ModelOptimizationPolicy | None = None
    dynamic_batching: ModelDynamicBatching | None = None
    sequence_batching: ModelSequenceBatching | None = None
    ensemble_scheduling: ModelEnsembling | None = None
    instance_group: tuple[ModelInstanceGroup, ...] = ()
    default_model_filename: str = ""
    cc_model_filenames: Mapping[str, str] = field(default_factory=dict)
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, ModelParameter] = field(default_factory=dict)
    model_warmup: tuple[ModelWarmup, ...] = ()
    model_operations: ModelOperations | None = None
    model_transaction_policy: ModelTransactionPolicy | None = None
    model_repository_agents: ModelRepositoryAgents | None = None
    response_cache: ModelResponseCache | None = None
    model_metrics: ModelMetrics | None = None

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may have any number of responses."""
        policy = self.model_transaction_policy
        return policy is not None and policy.decoupled
