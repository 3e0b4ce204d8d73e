"""The metric families of the server. Names, types and help texts of `nv_*` are Triton's: dashboards are built on them.

A family is announced even where it has no series, but for the one that decoupled models alone have; a value that is not
known has no series. `halimede_*` are for autoscalers, which see a series only when it is there: each has one from the
moment a model is loaded. There are no `nv_pinned_memory_pool_*`, because there is no such pool.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from halimede.core.observe.exposition import FamilyText, Number, edge_texts, label_text
from halimede.core.observe.stats import BUCKET_EDGES_NS, ModelStats

NS_PER_US = 1000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

MODELS_PER_STEP = 32
"""Models between two turns of the event loop: a millisecond."""
PART_PER_STEP_BYTES = 64 << 10


@dataclass(slots=True)
class ModelSample:
    """One model version at the time of a scrape. `tags` are the configuration's metric_tags."""

    stats: ModelStats
    tags: Mapping[str, str] = field(default_factory=dict)
    pending: int = 0
    executing: int = 0
    oldest_wait_ns: int = 0
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SystemSample:
    """The machine, or the container that we live in. None where it is not known (yet). Utilization is from 0 to 1."""

    cpu_utilization: float | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU; None where the driver does not say. Utilization is from 0 to 1, energy since the server started."""

    uuid: str
    utilization: float | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    power_usage_watts: float | None
    power_limit_watts: float | None
    energy_joules: float | None


S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class _Family(Generic[S]):
    """A family with one value per subject; None for a value that is not known."""

    name: str
    kind: str
    help_text: str
    value: Callable[[S], Number | None]

    def text(self) -> FamilyText:
        return FamilyText(self.name, self.kind, self.help_text)


MODEL_FAMILIES: tuple[_Family[ModelSample], ...] = (
    _Family(
        "nv_inference_request_success",
        "counter",
        "Number of successful inference requests, all batch sizes",
        lambda model: model.stats.success_count,
    ),
    _Family(
        "nv_inference_count",
        "counter",
        "Number of inferences performed (does not include cached requests)",
        lambda model: model.stats.inference_count,
    ),
    _Family(
        "nv_inference_exec_count",
        "counter",
        "Number of model executions performed (does not include cached requests)",
        lambda model: model.stats.execution_count,
    ),
    _Family(
        "nv_inference_request_duration_us",
        "counter",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda model: model.stats.request_ns // NS_PER_US,
    ),
    _Family(
        "nv_inference_queue_duration_us",
        "counter",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda model: model.stats.queue_ns // NS_PER_US,
    ),
    _Family(
        "nv_inference_compute_input_duration_us",
        "counter",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda model: model.stats.input_ns // NS_PER_US,
    ),
    _Family(
        "nv_inference_compute_infer_duration_us",
        "counter",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda model: model.stats.infer_ns // NS_PER_US,
    ),
    _Family(
        "nv_inference_compute_output_duration_us",
        "counter",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda model: model.stats.output_ns // NS_PER_US,
    ),
    _Family(
        "nv_inference_pending_request_count",
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda model: model.pending,
    ),
    _Family(
        "nv_model_load_duration_secs",
        "gauge",
        "Model load time in seconds",
        lambda model: model.load_seconds,
    ),
    _Family(
        "halimede_queue_requests",
        "gauge",
        "Requests that are queued and not executing",
        lambda model: model.pending,
    ),
    _Family(
        "halimede_executing_requests",
        "gauge",
        "Requests that an instance is executing",
        lambda model: model.executing,
    ),
    _Family(
        "halimede_queue_oldest_request_seconds",
        "gauge",
        "How long the oldest queued request has waited, 0 when none is queued",
        lambda model: model.oldest_wait_ns / NS_PER_S,
    ),
)

GPU_FAMILIES: tuple[_Family[GpuSample], ...] = (
    _Family(
        "nv_gpu_utilization",
        "gauge",
        "GPU utilization rate [0.0 - 1.0)",
        lambda gpu: gpu.utilization,
    ),
    _Family(
        "nv_gpu_memory_total_bytes",
        "gauge",
        "GPU total memory, in bytes",
        lambda gpu: gpu.memory_total_bytes,
    ),
    _Family(
        "nv_gpu_memory_used_bytes",
        "gauge",
        "GPU used memory, in bytes",
        lambda gpu: gpu.memory_used_bytes,
    ),
    _Family(
        "nv_gpu_power_usage",
        "gauge",
        "GPU power usage in watts",
        lambda gpu: gpu.power_usage_watts,
    ),
    _Family(
        "nv_gpu_power_limit",
        "gauge",
        "GPU power management limit in watts",
        lambda gpu: gpu.power_limit_watts,
    ),
    _Family(
        "nv_energy_consumption",
        "counter",
        "GPU energy consumption in joules since the Triton Server started",
        lambda gpu: gpu.energy_joules,
    ),
)

SYSTEM_FAMILIES: tuple[_Family[SystemSample], ...] = (
    _Family(
        "nv_cpu_utilization",
        "gauge",
        "CPU utilization rate [0.0 - 1.0]",
        lambda system: system.cpu_utilization,
    ),
    _Family(
        "nv_cpu_memory_total_bytes",
        "gauge",
        "CPU total memory (RAM), in bytes",
        lambda system: system.memory_total_bytes,
    ),
    _Family(
        "nv_cpu_memory_used_bytes",
        "gauge",
        "CPU used memory (RAM), in bytes",
        lambda system: system.memory_used_bytes,
    ),
)

FAILURES = ("nv_inference_request_failure", "counter", "Number of failed inference requests, all batch sizes")
DURATIONS = ("halimede_request_duration_seconds", "histogram", "Duration of successful requests, queueing included")
WAITS = ("halimede_queue_duration_seconds", "histogram", "Time that successful requests were queued")
FIRST_RESPONSES = (
    "nv_inference_first_response_histogram_ms",
    "histogram",
    "Duration from request to first response in milliseconds",
)
DROPPED = (
    "halimede_log_dropped_lines_total",
    "counter",
    "Log lines that were not written, because the log took no more",
)
"""Families that are written in ways of their own: name, type and help."""


def sample_names(name: str, kind: str) -> tuple[str, ...]:
    """The names that a family's series have; `kind` in any case."""
    if kind.lower() != "histogram":
        return (name,)
    return (name, f"{name}_bucket", f"{name}_sum", f"{name}_count")


def _page_names() -> Iterator[str]:
    for families in (MODEL_FAMILIES, GPU_FAMILIES, SYSTEM_FAMILIES):
        for family in families:
            yield from sample_names(family.name, family.kind)
    for name, kind, _ in (FAILURES, DURATIONS, WAITS, FIRST_RESPONSES, DROPPED):
        yield from sample_names(name, kind)


PAGE_NAMES = frozenset(_page_names())
"""The names of all series that this page may have."""

_EDGES = edge_texts(edge / NS_PER_S for edge in BUCKET_EDGES_NS)
_EDGES_MS = edge_texts(edge / NS_PER_MS for edge in BUCKET_EDGES_NS)


def render(
    models: Iterable[ModelSample],
    system: SystemSample | None,
    gpus: Sequence[GpuSample],
    *,
    dropped_log_lines: int = 0,
    latencies: bool = True,
    custom: Generator[None, None, list[bytes]] | None = None,
) -> Generator[None, None, list[bytes]]:
    """The body of a scrape in parts, made in steps of about a millisecond: of a thousand models it takes a while.

    Each model is taken from `models`, and all of its values are read, within one step: they fit together. `system` is
    None when the machine is not sampled; without `latencies` there are no `nv_*_duration_us`. `custom` makes the parts
    that come after all others, in steps of its own.
    """
    families = [f for f in MODEL_FAMILIES if latencies or not f.name.endswith("_duration_us")]
    texts = [(family.value, family.text()) for family in families]
    failures, durations, waits = FamilyText(*FAILURES), FamilyText(*DURATIONS), FamilyText(*WAITS)
    first_responses: FamilyText | None = None
    for number, model in enumerate(models, 1):
        names = _labels(model)
        labels = label_text(names)
        for value, text in texts:
            known = value(model)
            if known is not None:
                text.sample(labels, known)
        stats = model.stats
        for reason, count in stats.failures.items():
            failures.sample(label_text({**names, "reason": reason.value}), count)
        durations.histogram(labels, _EDGES, stats.request_buckets, stats.request_ns / NS_PER_S)
        waits.histogram(labels, _EDGES, stats.queue_buckets, stats.queue_ns / NS_PER_S)
        if stats.first_response_buckets:
            first_responses = first_responses or FamilyText(*FIRST_RESPONSES)
            first_responses.histogram(
                labels, _EDGES_MS, stats.first_response_buckets, stats.first_response_ns / NS_PER_MS
            )
        if number % MODELS_PER_STEP == 0:
            yield

    parts: list[bytes] = []
    of_models = [*(text for _, text in texts), failures, durations, waits]
    if first_responses is not None:
        of_models.append(first_responses)
    for text in of_models:
        parts.append(text.to_bytes())
        if len(parts[-1]) > PART_PER_STEP_BYTES:
            yield
    parts += _texts(GPU_FAMILIES, [(label_text({"gpu_uuid": gpu.uuid}), gpu) for gpu in gpus])
    parts += _texts(SYSTEM_FAMILIES, [] if system is None else [("", system)])
    dropped = FamilyText(*DROPPED)
    dropped.sample("", dropped_log_lines)
    parts.append(dropped.to_bytes())
    if custom is not None:
        parts += yield from custom
    return parts


def _texts(families: Iterable[_Family[S]], subjects: Sequence[tuple[str, S]]) -> list[bytes]:
    parts: list[bytes] = []
    for family in families:
        text = family.text()
        for labels, subject in subjects:
            value = family.value(subject)
            if value is not None:
                text.sample(labels, value)
        parts.append(text.to_bytes())
    return parts


def _labels(model: ModelSample) -> dict[str, str]:
    tags = {_tag_label(tag): value for tag, value in model.tags.items()}
    return {**tags, "model": model.stats.name, "version": model.stats.version}


def _tag_label(tag: str) -> str:
    """A tag's label: Triton's one leading underscore keeps it apart from ours; what no label may hold becomes one too.

    Two leading underscores are Prometheus' own, and a scrape that has them is refused or loses them.
    """
    legal = "".join([char if char.isascii() and char.isalnum() else "_" for char in tag])
    return "_" + legal.lstrip("_")
