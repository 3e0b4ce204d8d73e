"""The server's metric families. Names, types and help texts of `nv_*` are Triton's, because dashboards depend on them.

A family is announced even if it has no series, except the one for decoupled models; unknown values have no series.
`halimede_*` are for autoscalers, which need a series to exist: each has one from the moment a model is loaded. There
are no `nv_pinned_memory_pool_*`, because this server has no such pool.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from halimede.core.observe.exposition import FamilyText, Number
from halimede.core.observe.samples import GpuSample, InstanceSample, ModelSample, SystemSample
from halimede.core.types import ModelReadyState

NS_PER_US = 1000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


STATES = (ModelReadyState.READY, ModelReadyState.LOADING, ModelReadyState.UNLOADING, ModelReadyState.UNAVAILABLE)


@dataclass(frozen=True, slots=True)
class Family:
    """Name, type and help as published; unit, and when it counts, for the reference pages."""

    name: str
    kind: str
    help_text: str
    unit: str
    counts: str

    def text(self) -> FamilyText:
        return FamilyText(self.name, self.kind, self.help_text)


S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Valued(Family, Generic[S]):
    """A family with one value per subject; None for an unknown value."""

    value: Callable[[S], Number | None]


@dataclass(frozen=True, slots=True)
class Group:
    """Related families, for the reference pages."""

    title: str
    about: str
    labels: tuple[str, ...]
    families: tuple[Family, ...]


MODEL_FAMILIES: tuple[Valued[ModelSample], ...] = (
    Valued(
        "nv_inference_request_success",
        "counter",
        "Number of successful inference requests, all batch sizes",
        "requests",
        "When the last answer of a request is sent, and none of its answers is an error.",
        lambda model: model.stats.success_count,
    ),
    Valued(
        "nv_inference_count",
        "counter",
        "Number of inferences performed (does not include cached requests)",
        "rows",
        "With each successful request, by its batch size.",
        lambda model: model.stats.inference_count,
    ),
    Valued(
        "nv_inference_exec_count",
        "counter",
        "Number of model executions performed (does not include cached requests)",
        "executions",
        "When an instance finishes a batch. A batch that fails in a backend other than `python` does not count.",
        lambda model: model.stats.execution_count,
    ),
    Valued(
        "nv_inference_request_duration_us",
        "counter",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        "microseconds",
        "With each successful request: from its arrival to its last answer.",
        lambda model: model.stats.request_ns // NS_PER_US,
    ),
    Valued(
        "nv_inference_queue_duration_us",
        "counter",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        "microseconds",
        "With each successful request: from its arrival until an instance gets its batch.",
        lambda model: model.stats.queue.ns // NS_PER_US,
    ),
    Valued(
        "nv_inference_compute_input_duration_us",
        "counter",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        "microseconds",
        "With each successful request: from the end of queueing until the model begins to compute. Each request of "
        "a batch adds the time of the whole batch, and an ensemble has the sums of its steps; this holds for the "
        "next two metrics too.",
        lambda model: model.stats.input_ns // NS_PER_US,
    ),
    Valued(
        "nv_inference_compute_infer_duration_us",
        "counter",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        "microseconds",
        "With each successful request: from the start to the end of the computation, which is the last answer for "
        "a decoupled model or one with a response sender.",
        lambda model: model.stats.infer_ns // NS_PER_US,
    ),
    Valued(
        "nv_inference_compute_output_duration_us",
        "counter",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        "microseconds",
        "With each successful request: from the end of the computation until the server has the (last) answer.",
        lambda model: model.stats.output_ns // NS_PER_US,
    ),
    Valued(
        "nv_inference_pending_request_count",
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
        "requests",
        "At the scrape.",
        lambda model: model.load.queued,
    ),
    Valued(
        "nv_model_load_duration_secs",
        "gauge",
        "Model load time in seconds",
        "seconds",
        "When the model is loaded; includes the start of its instances.",
        lambda model: model.load_seconds,
    ),
    Valued(
        "halimede_queue_requests",
        "gauge",
        "Requests that are queued and not executing",
        "requests",
        "At the scrape; the same as `nv_inference_pending_request_count`. In an ensemble only requests with a call "
        "that waits because of `max_inflight_requests`: all others are requests of its steps' models.",
        lambda model: model.load.queued,
    ),
    Valued(
        "halimede_executing_requests",
        "gauge",
        "Requests that an instance is executing",
        "requests",
        "At the scrape; a request of a decoupled model counts until its last answer. 0 for an ensemble: its steps' "
        "models execute.",
        lambda model: model.load.executing,
    ),
    Valued(
        "halimede_queue_oldest_request_seconds",
        "gauge",
        "How long the oldest queued request has waited, 0 when none is queued",
        "seconds",
        "At the scrape.",
        lambda model: model.load.oldest_wait_ns / NS_PER_S,
    ),
    Valued(
        "halimede_worker_restarts_total",
        "counter",
        "Processes of instances that were restarted after they ended",
        "processes",
        "When the new process is ready. Instances on threads have no process.",
        lambda model: model.stats.worker_restarts,
    ),
    Valued(
        "halimede_parked_instances",
        "gauge",
        "Instances that are not restarted for minutes because their processes ended too often",
        "instances",
        "From the fifth end of an instance's process within a minute, or the fifth start in a row that fails, "
        "until it runs again.",
        lambda model: model.load.parked,
    ),
    Valued(
        "halimede_unstartable_instances",
        "gauge",
        "Instances whose processes the machine does not start: no file, no memory, no process",
        "instances",
        "From the time when a start is tried only every 10 seconds until the instance runs again.",
        lambda model: model.load.unstartable,
    ),
    Valued(
        "halimede_ensemble_requests",
        "gauge",
        "Requests of the ensemble whose steps are executed",
        "requests",
        "At the scrape. Only ensembles: the requests of their steps count at the steps' models.",
        lambda model: model.load.in_steps,
    ),
    Valued(
        "halimede_sequences_open",
        "gauge",
        "Sequences that have a slot of an instance or wait for one",
        "sequences",
        "At the scrape. Only models with `sequence_batching`, except iterative ones.",
        lambda model: None if model.load.sequences is None else model.load.sequences.open,
    ),
    Valued(
        "halimede_sequence_slots",
        "gauge",
        "Sequences that the instances can have at a time",
        "sequences",
        "At the scrape; without instances whose process has ended. Models as above.",
        lambda model: None if model.load.sequences is None else model.load.sequences.sequence_slots,
    ),
)

INSTANCE_FAMILIES: tuple[Valued[InstanceSample], ...] = (
    Valued(
        "halimede_instance_busy_seconds_total",
        "counter",
        "Time that the instance had an execution under way",
        "seconds",
        "At the scrape, so an execution counts while it runs. Executions of one instance that overlap count once.",
        lambda instance: instance.busy.total_ns / NS_PER_S,
    ),
    Valued(
        "halimede_instance_busy_ratio",
        "gauge",
        "Part of the last 15 seconds that the instance had an execution under way [0.0 - 1.0]",
        "ratio",
        "At the scrape, over the last 15 to 16 s; over the time since the load if that is shorter.",
        lambda instance: instance.busy.ratio,
    ),
)


def _sampled(name: str, kind: str, help_text: str, unit: str, value: Callable[[S], Number | None]) -> Valued[S]:
    """A family whose values the sampler reads."""
    return Valued(name, kind, help_text, unit, "Read every `--metrics-interval-ms`.", value)


GPU_FAMILIES: tuple[Valued[GpuSample], ...] = (
    _sampled("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0)", "ratio", lambda gpu: gpu.utilization),
    _sampled(
        "nv_gpu_memory_total_bytes", "gauge", "GPU total memory, in bytes", "bytes", lambda gpu: gpu.memory_total_bytes
    ),
    _sampled(
        "nv_gpu_memory_used_bytes", "gauge", "GPU used memory, in bytes", "bytes", lambda gpu: gpu.memory_used_bytes
    ),
    _sampled("nv_gpu_power_usage", "gauge", "GPU power usage in watts", "watts", lambda gpu: gpu.power_usage_watts),
    _sampled(
        "nv_gpu_power_limit", "gauge", "GPU power management limit in watts", "watts", lambda gpu: gpu.power_limit_watts
    ),
    _sampled(
        "nv_energy_consumption",
        "counter",
        "GPU energy consumption in joules since the Triton Server started",
        "joules",
        lambda gpu: gpu.energy_joules,
    ),
)

SYSTEM_FAMILIES: tuple[Valued[SystemSample], ...] = (
    _sampled(
        "nv_cpu_utilization",
        "gauge",
        "CPU utilization rate [0.0 - 1.0]",
        "ratio",
        lambda system: system.cpu_utilization,
    ),
    _sampled(
        "nv_cpu_memory_total_bytes",
        "gauge",
        "CPU total memory (RAM), in bytes",
        "bytes",
        lambda system: system.memory_total_bytes,
    ),
    _sampled(
        "nv_cpu_memory_used_bytes",
        "gauge",
        "CPU used memory (RAM), in bytes",
        "bytes",
        lambda system: system.memory_used_bytes,
    ),
)

FAILURES = Family(
    "nv_inference_request_failure",
    "counter",
    "Number of failed inference requests, all batch sizes",
    "requests",
    "When the last answer of a request is sent and one of its answers is an error. `reason` is `REJECTED` (refused, or "
    "not executed in time), `CANCELED` (its client has disconnected), `BACKEND` (the model) or `OTHER`.",
)
DURATIONS = Family(
    "halimede_request_duration_seconds",
    "histogram",
    "Duration of successful requests, queueing included",
    "seconds",
    "With each successful request, as `nv_inference_request_duration_us`.",
)
WAITS = Family(
    "halimede_queue_duration_seconds",
    "histogram",
    "Time that requests were queued",
    "seconds",
    "When a request ends. `outcome` is `success` (as `nv_inference_queue_duration_us`), `error` (its execution "
    "failed), `timeout` (its timeout ended while it was queued), `cancelled` (its client has disconnected) or "
    "`rejected` (refused; 0 s if the queue was full). Ensembles have none: the models of their steps count.",
)
FIRST_RESPONSES = Family(
    "nv_inference_first_response_histogram_ms",
    "histogram",
    "Duration from request to first response in milliseconds",
    "milliseconds",
    "When a request of a decoupled model gets its first answer with outputs. Other models have none.",
)
STATE = Family(
    "halimede_model_version_state",
    "gauge",
    "1 for the state that a model version is in, 0 for the others",
    "",
    "At the scrape. `state` is `READY`, `LOADING`, `UNLOADING` or `UNAVAILABLE` (its load failed, or all its instances "
    "are parked or cannot be started), as the repository index has it. A version that was unloaded has no series.",
)
DROPPED = Family(
    "halimede_log_dropped_lines_total",
    "counter",
    "Log lines that were not written, because the queue was full or a write failed",
    "lines",
    "When a line is dropped.",
)
HUNG = Family(
    "halimede_hung_processes_total",
    "counter",
    "Processes of the server that hung and were ended",
    "processes",
    "When a process is ended because it hung for `--hang-timeout-secs`. `process` is `frontend`, `worker` (of a model) "
    "or `zygote` (it starts the others).",
)
"""Families with rendering code of their own."""

GROUPS = (
    Group(
        "Requests",
        "For each loaded model version and each ensemble. They start at 0 with each load. If all instances of a model "
        "are on one GPU or MIG slice, the `nv_inference_*` metrics, failures too, have its UUID as the label "
        "`gpu_uuid`; a model on several devices has no such label, because its counters are sums over all of them.",
        ("model", "version"),
        (*MODEL_FAMILIES, DURATIONS, FIRST_RESPONSES),
    ),
    Group("Queues", "For each loaded model version.", ("model", "outcome", "version"), (WAITS,)),
    Group(
        "Instances",
        "For each instance of a loaded model version. `instance` is its name, `device` the UUID of its GPU or MIG "
        "slice, `cpu`, or `model` if the model chooses its devices.",
        ("device", "instance", "model", "version"),
        INSTANCE_FAMILIES,
    ),
    Group("Failures", "For each loaded model version.", ("model", "reason", "version"), (FAILURES,)),
    Group("States", "For each model version that is ready or should be.", ("model", "state", "version"), (STATE,)),
    Group(
        "GPUs",
        "For each GPU or MIG slice that the server uses, by its UUID. A slice has memory, and utilization if the "
        "driver measures it (NVML's GPM, from Hopper on). No series with `--allow-gpu-metrics=false`.",
        ("gpu_uuid",),
        GPU_FAMILIES,
    ),
    Group(
        "CPU and memory",
        "For the container, or the machine; no series with `--allow-cpu-metrics=false`.",
        (),
        SYSTEM_FAMILIES,
    ),
    Group("The server", "", (), (DROPPED,)),
    Group("Processes of the server", "", ("process",), (HUNG,)),
)
"""All families of the page, for the reference pages."""


def sample_names(name: str, kind: str) -> tuple[str, ...]:
    """The names of a family's series; `kind` in upper or lower case."""
    if kind.lower() != "histogram":
        return (name,)
    return (name, f"{name}_bucket", f"{name}_sum", f"{name}_count")


PAGE_NAMES = frozenset(
    name for group in GROUPS for family in group.families for name in sample_names(family.name, family.kind)
)
"""The names of all series that this page may contain."""
