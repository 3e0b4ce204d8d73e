"""A description of every field of the model configuration: type, default, meaning, and how this server treats it.

Types come from `model_config`, treatments from `support.TABLE`; the meanings are written here. The reference pages of
the documentation are generated from `descriptions()`, so they cannot describe a field that does not exist.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from halimede.core.config.message_types import FieldKind, FieldType, ValueType, message_type
from halimede.core.config.model_config import (
    Accelerator,
    AllVersions,
    BatchInput,
    BatchOutput,
    CudaGraphLowerBound,
    CudaGraphShape,
    CudaGraphSpec,
    EnsembleStep,
    ExecutionAccelerators,
    HistogramOptions,
    LatestVersions,
    MetricControl,
    MetricIdentifier,
    ModelConfig,
    ModelDynamicBatching,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelMetrics,
    ModelOperations,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelParameter,
    ModelQueuePolicy,
    ModelRateLimiter,
    ModelRepositoryAgents,
    ModelResponseCache,
    ModelSequenceBatching,
    ModelTensorReshape,
    ModelTransactionPolicy,
    ModelVersionPolicy,
    ModelWarmup,
    OptimizationCuda,
    OptimizationGraph,
    PinnedMemoryBuffer,
    RateLimiterResource,
    RepositoryAgent,
    SecondaryDevice,
    SequenceControl,
    SequenceControlInput,
    SequenceInitialState,
    SequenceState,
    SpecificVersions,
    StrategyDirect,
    StrategyOldest,
    WarmupInput,
)
from halimede.core.config.support import TABLE, Treatment
from halimede.core.types import DataType


@dataclass(frozen=True, slots=True)
class FieldDescription:
    """One field, under its name in a configuration file.

    `type` is text (`int32`, `list of ModelInput`, `map of string to string`, `InstanceKind`). `default` is the
    protocol's, in text format: `unset` for a message or oneof member, `[]` and `{}` for lists and maps. `values` are
    an enum's names. `message` is the name of the field's message type, "" for a plain value. `oneof` lists the fields,
    including this one, of which at most one may be set; () if there is no such rule. `why` gives the reason for
    NO_EFFECT in a few words, or limits NOT_YET; for the backends in `honoured_by` the field is honoured.
    """

    name: str
    type: str
    default: str
    meaning: str
    treatment: Treatment
    why: str = ""
    honoured_by: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    message: str = ""
    oneof: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MessageDescription:
    name: str
    fields: tuple[FieldDescription, ...]


def descriptions() -> tuple[MessageDescription, ...]:
    """All messages, ModelConfig first and each before the messages of its fields."""
    waiting: list[type] = [ModelConfig]
    seen: dict[type, MessageDescription] = {}
    while waiting:
        message = waiting.pop(0)
        if message in seen:
            continue
        types = message_type(message).by_name.values()
        seen[message] = MessageDescription(message.__name__, tuple(_described(message, target) for target in types))
        # The messages of its fields follow directly.
        waiting[:0] = [target.value.message for target in types if target.value.message is not None]
    return tuple(seen.values())


def _described(message: type, target: FieldType) -> FieldDescription:
    support = TABLE[message][target.attribute]
    word = _type_word(target.value)
    if target.entry is not None:
        word = f"map of {_type_word(target.entry.by_name['key'].value)} to {word}"
    elif target.repeated:
        word = f"list of {word}"
    return FieldDescription(
        target.name,
        word,
        _default(target),
        MEANINGS[message][target.attribute],
        support.treatment,
        support.why,
        honoured_by=support.honoured_by,
        values=tuple(target.value.members),
        message=target.value.message.__name__ if target.value.message is not None else "",
        oneof=target.oneof,
    )


def _type_word(value: ValueType) -> str:
    if value.message is not None:
        return str(value.message.__name__)
    match value.kind:
        case FieldKind.INTEGER:
            return ("uint" if value.low == 0 else "int") + str((value.high - value.low).bit_length())
        case FieldKind.ENUM:
            return type(value.zero).__name__
    return value.kind.name.lower()


def _default(target: FieldType) -> str:
    if target.entry is not None:
        return "{}"
    if target.repeated:
        return "[]"
    if target.explicit:
        return "unset"
    match target.value.zero:
        case bool():
            return "false"
        case str():
            return '""'
        case DataType() as datatype:
            return datatype.config_name
        case Enum() as member:
            return member.name
    return "0"


MEANINGS: Mapping[type, Mapping[str, str]] = {
    ModelConfig: {
        "name": "The model's name, which must be that of its directory; may be left out.",
        "platform": "The kind of model file, such as `onnxruntime_onnx`; an older way to name the backend.",
        "backend": "The backend that runs the model, such as `onnxruntime`; by default the file's name decides.",
        "runtime": "The library or program of the backend; `model.py` for models in Python.",
        "version_policy": "Which versions are served; only the latest if it is left out.",
        "max_batch_size": "The maximum number of rows in a batch; above 0, tensors have a first dimension of rows.",
        "input": "The tensors that the model takes.",
        "output": "The tensors that the model returns.",
        "batch_input": "Inputs that the server makes from all requests of a batch, for models with ragged inputs.",
        "batch_output": "Outputs that the server divides among the requests of a batch other than by rows.",
        "optimization": "Hints and switches for speed.",
        "dynamic_batching": "Form batches from the requests of several clients.",
        "sequence_batching": "Route the requests of one sequence to one instance, in order.",
        "ensemble_scheduling": "Make this a pipeline of other models.",
        "instance_group": "How many instances run, and on which devices.",
        "default_model_filename": "The model file's name in a version directory; the backend has a default.",
        "cc_model_filenames": "Other model files for GPUs of given compute capabilities.",
        "metric_tags": "Labels of all metrics of the model, with an underscore before each name.",
        "parameters": "Settings that the backend or the server reads, such as ISOLATION, PADDING and BATCH_SIZES.",
        "model_warmup": "Requests that the server sends to each instance before clients may.",
        "model_operations": "Libraries of custom operations to load with the model.",
        "model_transaction_policy": "How many answers a request may get.",
        "model_repository_agents": "Plug-ins that process the model's files before each load.",
        "response_cache": "Answer repeated requests from a cache.",
        "model_metrics": "Settings of single metrics.",
    },
    ModelVersionPolicy: {
        "latest": "Serve the versions with the greatest numbers.",
        "all": "Serve every version.",
        "specific": "Serve the versions of a list.",
    },
    LatestVersions: {"num_versions": "How many versions; at least 1."},
    AllVersions: {},
    SpecificVersions: {"versions": "The versions to serve; those that do not exist are left out."},
    ModelInput: {
        "name": "The input's name in requests and in the model.",
        "data_type": "The type of its elements.",
        "format": "The layout of an image; it requires three dims and changes no data.",
        "dims": "The shape without the batch dimension, -1 for a dimension of any size.",
        "reshape": "The shape for the model, if it differs from the client's.",
        "is_shape_tensor": "Its values, not its data, give the shape of other tensors (TensorRT).",
        "allow_ragged_batch": "Requests of different shapes may share a batch; the model gets all elements, flat.",
        "optional": "A request may leave it out.",
        "is_non_linear_format_io": "The client sends it in the layout of the engine (TensorRT).",
    },
    ModelOutput: {
        "name": "The output's name in answers and in the model.",
        "data_type": "The type of its elements.",
        "dims": "The shape without the batch dimension, -1 for a dimension of any size.",
        "reshape": "The shape from the model, if it differs from the client's.",
        "label_filename": "A text file in the model directory with one label per line, for classifications.",
        "is_shape_tensor": "Its values describe a shape (TensorRT).",
        "is_non_linear_format_io": "The client gets it in the layout of the engine (TensorRT).",
    },
    ModelTensorReshape: {"shape": "The shape for the model, with as many elements as dims."},
    BatchInput: {
        "kind": "What is computed from the batch.",
        "target_name": "The model's inputs that get it.",
        "data_type": "The type of its elements.",
        "source_input": "The inputs that it is computed from.",
    },
    BatchOutput: {
        "target_name": "The model's outputs that are divided.",
        "kind": "The rule for the division.",
        "source_input": "The inputs whose shapes the rule uses.",
    },
    ModelOptimizationPolicy: {
        "graph": "How far the runtime optimises the graph.",
        "priority": "The model's priority among all models of the server.",
        "cuda": "CUDA graphs, streams and events.",
        "execution_accelerators": "Libraries that run parts of the model faster.",
        "input_pinned_memory": "Stage inputs in pinned memory on their way to a GPU.",
        "output_pinned_memory": "Stage outputs in pinned memory on their way from a GPU.",
        "gather_kernel_buffer_threshold": "The number of input buffers from which on a kernel gathers them.",
        "eager_batching": "Prepare the next batch while one runs.",
    },
    OptimizationGraph: {"level": "0 for all optimisations, 1 for extended ones, -1 for basic ones, 2 for none."},
    OptimizationCuda: {
        "graphs": "Record executions as CUDA graphs.",
        "busy_wait_events": "Wait for the GPU in a busy loop.",
        "graph_spec": "The shapes to record graphs for.",
        "output_copy_stream": "Copy outputs on a stream of their own.",
    },
    CudaGraphSpec: {
        "batch_size": "The rows of the recorded batch.",
        "input": "The shape of each input.",
        "graph_lower_bound": "The smallest shapes for which the graph may be used.",
    },
    CudaGraphLowerBound: {
        "batch_size": "The fewest rows.",
        "input": "The smallest shape of each input.",
    },
    CudaGraphShape: {"dim": "The shape, without the batch dimension."},
    ExecutionAccelerators: {
        "gpu_execution_accelerator": "For instances on GPUs, the first that can run a part of the model does.",
        "cpu_execution_accelerator": "For instances on CPUs, the first that can run a part of the model does.",
    },
    Accelerator: {
        "name": "The library's name in the backend, such as `tensorrt`.",
        "parameters": "Its settings.",
    },
    PinnedMemoryBuffer: {"enable": "Whether pinned memory is used."},
    ModelDynamicBatching: {
        "preferred_batch_size": "Sizes at which a batch runs at once, largest first; max_batch_size if none is given.",
        "max_queue_delay_microseconds": "How long a request may wait for others to join its batch.",
        "preserve_ordering": "Answer requests in the order of their arrival.",
        "priority_levels": "The number of priorities, 1 is the highest; 0 for none.",
        "default_priority_level": "The priority of requests without one.",
        "default_queue_policy": "The limits of the queue.",
        "priority_queue_policy": "Other limits for single priorities.",
    },
    ModelQueuePolicy: {
        "timeout_action": "What happens to a request that waited too long: it fails, or it goes behind the others.",
        "default_timeout_microseconds": "How long a request may wait; 0 for no limit.",
        "allow_timeout_override": "Whether requests may set their own timeout; the default is its maximum.",
        "max_queue_size": "The maximum number of waiting requests; others are refused. 0 for the server's own limit.",
    },
    ModelSequenceBatching: {
        "direct": "Give each sequence a place of its own in the batches of an instance; the default.",
        "oldest": "Form batches from the oldest requests of several sequences.",
        "max_sequence_idle_microseconds": "How long a sequence without requests is kept; 1 s if left out.",
        "control_input": "Inputs with the starts, ends and identities of sequences.",
        "state": "Tensors that the server keeps between the requests of a sequence.",
        "iterative_sequence": "The model may request another execution for the same request in its answer.",
    },
    StrategyDirect: {
        "max_queue_delay_microseconds": "How long a batch may wait for requests of other sequences.",
        "minimum_slot_utilization": "The share of places, 0 to 1, that must be filled so that a batch does not wait.",
    },
    StrategyOldest: {
        "max_candidate_sequences": "The most sequences that an instance processes at a time; 0 for `max_batch_size`.",
        "preferred_batch_size": "Sizes at which a batch runs at once, largest first.",
        "max_queue_delay_microseconds": "How long a request may wait for others to join its batch.",
        "preserve_ordering": "Answer requests in the order of their arrival.",
    },
    SequenceControlInput: {
        "name": "The input's name in the model.",
        "control": "The meaning of the input; exactly one.",
    },
    SequenceControl: {
        "kind": "The meaning: start, end, whether there is a request, or the sequence's identity.",
        "int32_false_true": "The INT32 values for no and yes.",
        "fp32_false_true": "The FP32 values for no and yes.",
        "bool_false_true": "The BOOL values for no and yes.",
        "data_type": "The type of the identity.",
    },
    SequenceState: {
        "input_name": "The model's input that gets the state.",
        "output_name": "The model's output with the next state.",
        "data_type": "The type of its elements.",
        "dims": "The shape without the batch dimension, -1 for a dimension of any size.",
        "initial_state": "The state of a new sequence; zeros if it is left out.",
        "use_same_buffer_for_input_output": "Keep the state in one buffer, so that its shape cannot change.",
        "use_growable_memory": "Keep it in CUDA memory that can grow. Refused: states are in the host's memory.",
    },
    SequenceInitialState: {
        "data_type": "The type of its elements.",
        "dims": "Its shape; every dimension has a fixed size.",
        "zero_data": "All elements are 0, or empty texts.",
        "data_file": "A file in the directory `initial_state` with its bytes.",
        "name": "A name, for error messages.",
    },
    ModelEnsembling: {
        "step": "The models to call, in any order: each runs when its inputs are available.",
        "max_inflight_requests": "The maximum number of requests in one step; 0 for no limit.",
    },
    EnsembleStep: {
        "model_name": "The model to call.",
        "model_version": "Its version, -1 for the latest.",
        "input_map": "The pipeline's tensor for each of the model's inputs.",
        "output_map": "The pipeline's tensor for each of the model's outputs.",
        "model_namespace": "The repository of the model, if several have a model of that name.",
        "when": "A condition, such as `score > 0.5`: if it is false the step is skipped. Not a field of Triton's.",
    },
    ModelInstanceGroup: {
        "name": "The group's name, which is part of the names of its instances; the model's if it is left out.",
        "kind": "The kind of device; KIND_AUTO uses GPUs if the backend can use them and they exist.",
        "count": "The number of instances, per GPU on GPUs; the backend has a default.",
        "rate_limiter": "What an execution must obtain before it starts.",
        "gpus": "The GPUs by their indexes; all if it is left out.",
        "secondary_devices": "Further devices that instances use.",
        "profile": "The optimisation profiles that instances use (TensorRT).",
        "passive": "Make instances that get no requests.",
        "host_policy": "The name of a set of settings that bind instances to processors and memory.",
    },
    ModelRateLimiter: {
        "resources": "What an execution occupies while it runs.",
        "priority": "How the model shares with others: one of priority 2 gets half the turns of one of priority 1.",
    },
    RateLimiterResource: {
        "name": "The resource's name.",
        "global_": "Whether all devices share it.",
        "count": "How much of it one execution occupies.",
    },
    SecondaryDevice: {
        "kind": "The kind of device.",
        "device_id": "Its number.",
    },
    ModelParameter: {"string_value": "The setting's value; always text."},
    ModelWarmup: {
        "name": "A name, for the log.",
        "batch_size": "The number of rows of the request, all of them equal.",
        "inputs": "The data of each input.",
        "count": "How many times it is sent; at least once.",
    },
    WarmupInput: {
        "data_type": "The type of its elements.",
        "dims": "Its shape without the batch dimension; every dimension has a fixed size.",
        "zero_data": "All elements are 0, or empty texts.",
        "random_data": "The elements are random.",
        "input_data_file": "A file in the directory `warmup` with its bytes.",
    },
    ModelOperations: {"op_library_filename": "The libraries, as files."},
    ModelTransactionPolicy: {"decoupled": "A request may get any number of answers, at any time."},
    ModelRepositoryAgents: {"agents": "The plug-ins, in the order in which they are called."},
    RepositoryAgent: {
        "name": "The plug-in's name.",
        "parameters": "Its settings.",
    },
    ModelResponseCache: {"enable": "Whether this model's answers are kept; the server must have a cache too."},
    ModelMetrics: {"metric_control": "One setting per metric."},
    MetricControl: {
        "metric_identifier": "The metric that is configured.",
        "histogram_options": "The options of a histogram.",
    },
    MetricIdentifier: {"family": "The metric's name, such as `nv_inference_first_response_histogram_ms`."},
    HistogramOptions: {"buckets": "The upper bounds of the buckets, ascending."},
}
"""By message and field name, as in `support.TABLE`: one line each."""
