"""How this server treats every field of a model configuration: one table, which must be complete.

HONOURED fields need no text. NO_EFFECT fields are accepted with a note, because responses are the same without them.
NOT_YET fields could change a response, or restrict what may be loaded, but are not implemented: they are refused by
name. A field that has its default value is never reported.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, auto
from typing import Any

from halimede.core.config import model_config
from halimede.core.types import Problem


class Treatment(Enum):
    """HONOURED on a message field means that the fields of the message are checked one by one."""

    HONOURED = auto()
    NO_EFFECT = auto()
    NOT_YET = auto()


@dataclass(frozen=True, slots=True)
class Support:
    """`why` completes the note on a field without effect, or limits a refusal; `usual` is a value that needs no note.

    The backends in `honoured_by` honour the field.
    """

    treatment: Treatment
    why: str = ""
    usual: object = None
    honoured_by: tuple[str, ...] = ()


HONOURED = Support(Treatment.HONOURED)
NOT_YET = Support(Treatment.NOT_YET)


def _no_effect(why: str, usual: object = None, *, honoured_by: tuple[str, ...] = ()) -> Support:
    return Support(Treatment.NO_EFFECT, why, usual, honoured_by)


def _all(support: Support, *names: str) -> dict[str, Support]:
    return dict.fromkeys(names, support)


_TENSORRT = ("tensorrt",)
_CUDA = _no_effect(
    "only TensorRT takes CUDA graphs and events from the configuration",
    model_config.OptimizationCuda(),
    honoured_by=_TENSORRT,
)
_PINNED = _no_effect(
    "tensors are not staged in pinned memory", model_config.PinnedMemoryBuffer(enable=True), honoured_by=_TENSORRT
)
_BACKEND_HINT = _no_effect("it is a hint for backends that do not exist here")
_OP_LIBRARIES = Support(Treatment.NOT_YET, " for backends other than tensorflow", honoured_by=("tensorflow",))
_WARMUP = _no_effect("warm-up is not supported yet: the first requests may take longer")
_CACHE = _no_effect("the response cache is not supported yet: the model runs for every request")
_METRICS = _no_effect("settings of single metrics are not supported yet")
_RATES = _no_effect("rate limiting is not supported yet: executions start without waiting for resources")

TABLE: Mapping[type, Mapping[str, Support]] = {
    model_config.ModelConfig: {
        **_all(HONOURED, "name", "platform", "backend", "version_policy", "max_batch_size", "input", "output"),
        # Triton shows this for backends that are Python programs; here they always are.
        "runtime": Support(Treatment.NOT_YET, " with another value than model.py", usual="model.py"),
        **_all(HONOURED, "batch_input", "batch_output"),
        **_all(HONOURED, "optimization", "dynamic_batching", "sequence_batching", "ensemble_scheduling"),
        **_all(HONOURED, "instance_group", "default_model_filename"),
        "cc_model_filenames": HONOURED,
        "model_warmup": _WARMUP,
        **_all(HONOURED, "metric_tags", "parameters", "model_transaction_policy"),
        # Only their fields have an effect: an empty message requests nothing.
        **_all(HONOURED, "model_operations", "model_repository_agents", "response_cache", "model_metrics"),
    },
    model_config.ModelVersionPolicy: _all(HONOURED, "latest", "all", "specific"),
    model_config.LatestVersions: _all(HONOURED, "num_versions"),
    model_config.AllVersions: {},
    model_config.SpecificVersions: _all(HONOURED, "versions"),
    model_config.ModelInput: {
        **_all(HONOURED, "name", "data_type", "format", "dims", "reshape", "allow_ragged_batch", "optional"),
        "is_shape_tensor": Support(Treatment.NOT_YET, honoured_by=_TENSORRT),
        "is_non_linear_format_io": NOT_YET,
    },
    model_config.ModelOutput: {
        **_all(HONOURED, "name", "data_type", "dims", "reshape", "label_filename"),
        "is_shape_tensor": Support(Treatment.NOT_YET, honoured_by=_TENSORRT),
        "is_non_linear_format_io": NOT_YET,
    },
    model_config.ModelTensorReshape: _all(HONOURED, "shape"),
    model_config.BatchInput: _all(HONOURED, "kind", "target_name", "data_type", "source_input"),
    model_config.BatchOutput: _all(HONOURED, "target_name", "kind", "source_input"),
    model_config.ModelOptimizationPolicy: {
        **_all(HONOURED, "graph", "execution_accelerators"),
        "priority": _no_effect("all models run at the same priority", honoured_by=_TENSORRT),
        "cuda": _CUDA,
        **_all(_PINNED, "input_pinned_memory", "output_pinned_memory"),
        "gather_kernel_buffer_threshold": _no_effect("inputs are not gathered by a kernel"),
        "eager_batching": _BACKEND_HINT,
    },
    model_config.OptimizationGraph: _all(HONOURED, "level"),
    model_config.OptimizationCuda: {
        **_all(_CUDA, "graphs", "busy_wait_events", "graph_spec"),
        "output_copy_stream": _no_effect("an instance runs one batch at a time, so its copies overlap with nothing"),
    },
    model_config.CudaGraphSpec: _all(_CUDA, "batch_size", "input", "graph_lower_bound"),
    model_config.CudaGraphLowerBound: _all(_CUDA, "batch_size", "input"),
    model_config.CudaGraphShape: _all(_CUDA, "dim"),
    model_config.ExecutionAccelerators: _all(HONOURED, "gpu_execution_accelerator", "cpu_execution_accelerator"),
    model_config.Accelerator: _all(HONOURED, "name", "parameters"),
    model_config.PinnedMemoryBuffer: _all(_PINNED, "enable"),
    model_config.ModelDynamicBatching: {
        **_all(HONOURED, "preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering"),
        **_all(HONOURED, "default_queue_policy", "priority_levels", "default_priority_level", "priority_queue_policy"),
    },
    model_config.ModelQueuePolicy: _all(
        HONOURED, "timeout_action", "default_timeout_microseconds", "allow_timeout_override", "max_queue_size"
    ),
    model_config.ModelSequenceBatching: _all(
        HONOURED, "direct", "oldest", "max_sequence_idle_microseconds", "control_input", "state", "iterative_sequence"
    ),
    model_config.StrategyDirect: _all(HONOURED, "max_queue_delay_microseconds", "minimum_slot_utilization"),
    model_config.StrategyOldest: _all(
        HONOURED, "max_candidate_sequences", "preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering"
    ),
    model_config.SequenceControlInput: _all(HONOURED, "name", "control"),
    model_config.SequenceControl: _all(
        HONOURED, "kind", "int32_false_true", "fp32_false_true", "bool_false_true", "data_type"
    ),
    model_config.SequenceState: _all(
        HONOURED,
        "input_name",
        "output_name",
        "data_type",
        "dims",
        "initial_state",
        "use_same_buffer_for_input_output",
        "use_growable_memory",
    ),
    model_config.SequenceInitialState: _all(HONOURED, "data_type", "dims", "zero_data", "data_file", "name"),
    model_config.ModelEnsembling: _all(HONOURED, "step", "max_inflight_requests"),
    model_config.EnsembleStep: {
        **_all(HONOURED, "model_name", "model_version", "input_map", "output_map", "when"),
        "model_namespace": NOT_YET,
    },
    model_config.ModelInstanceGroup: {
        **_all(HONOURED, "name", "kind", "count", "rate_limiter", "gpus", "passive"),
        "secondary_devices": _no_effect("no backend here uses a secondary device"),
        "profile": _no_effect("only TensorRT engines have optimization profiles", honoured_by=_TENSORRT),
        "host_policy": _no_effect("instances are not bound to processors or memory"),
    },
    model_config.ModelRateLimiter: _all(_RATES, "resources", "priority"),
    model_config.RateLimiterResource: _all(_RATES, "name", "global_", "count"),
    model_config.SecondaryDevice: _all(_no_effect("no backend here uses a secondary device"), "kind", "device_id"),
    model_config.ModelParameter: _all(HONOURED, "string_value"),
    model_config.ModelWarmup: _all(_WARMUP, "name", "batch_size", "inputs", "count"),
    model_config.WarmupInput: _all(_WARMUP, "data_type", "dims", "zero_data", "random_data", "input_data_file"),
    model_config.ModelOperations: {"op_library_filename": _OP_LIBRARIES},
    model_config.ModelTransactionPolicy: _all(HONOURED, "decoupled"),
    model_config.ModelRepositoryAgents: _all(NOT_YET, "agents"),
    model_config.RepositoryAgent: _all(NOT_YET, "name", "parameters"),
    model_config.ModelResponseCache: _all(_CACHE, "enable"),
    model_config.ModelMetrics: _all(_METRICS, "metric_control"),
    model_config.MetricControl: _all(_METRICS, "metric_identifier", "histogram_options"),
    model_config.MetricIdentifier: _all(_METRICS, "family"),
    model_config.HistogramOptions: _all(_METRICS, "buckets"),
}
"""By message and field name. Entries below a field that is not honoured repeat its treatment and are not read."""


def check_support(
    config: model_config.ModelConfig, backend: str = ""
) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """Fields that are set but have no effect here: refusals, which fail the load, and notes for the log.

    `backend` is the model's, "" if it is not known.
    """
    refusals: list[Problem] = []
    notes: list[Problem] = []
    for path, support in _findings(config, "", backend):
        if support.treatment is Treatment.NOT_YET:
            refusals.append(
                Problem(f"'{path}' is not supported yet{support.why}, remove it from the model configuration", path)
            )
        else:
            notes.append(_note(path, support.why))
    return tuple(refusals), tuple(notes)


def check_devices(config: model_config.ModelConfig, kinds: Collection[str]) -> tuple[Problem, ...]:
    """Notes on GPU settings if no instance runs on a GPU. `kinds` are the kinds of the instances."""
    accelerators = config.optimization.execution_accelerators if config.optimization is not None else None
    if accelerators is None or not accelerators.gpu_execution_accelerator or "GPU" in kinds:
        return ()
    path = "optimization.execution_accelerators.gpu_execution_accelerator"
    return (_note(path, "no instance runs on a GPU"),)


def _note(path: str, why: str) -> Problem:
    return Problem(f"'{path}' has no effect: {why}", path)


def _findings(message: Any, path: str, backend: str) -> Iterator[tuple[str, Support]]:
    """Every field in the message, at any depth, that is set and not honoured, with its path."""
    rules = TABLE[type(message)]
    for field in fields(message):
        value = getattr(message, field.name)
        support = rules[field.name]
        if value in (None, (), {}, field.default, support.usual):
            continue
        at = f"{path}{field.name.rstrip('_')}"
        if support.treatment is not Treatment.HONOURED and backend not in support.honoured_by:
            yield at, support
        elif is_dataclass(value):
            yield from _findings(value, f"{at}.", backend)
        elif isinstance(value, tuple):
            for i, element in enumerate(value):
                if is_dataclass(element):
                    yield from _findings(element, f"{at}[{i}].", backend)
        elif isinstance(value, Mapping):
            for key, element in value.items():
                if is_dataclass(element):
                    yield from _findings(element, f'{at}["{key}"].', backend)
