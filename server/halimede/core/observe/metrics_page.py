"""The page of the server's metrics: the values of a scrape as Prometheus' text format.

`metrics` declares the families.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from types import MappingProxyType

from halimede.core.hangs import ProcessKind
from halimede.core.observe.exposition import FamilyText, edge_texts, label_text
from halimede.core.observe.metrics import (
    DROPPED,
    DURATIONS,
    FAILURES,
    FIRST_RESPONSES,
    GPU_FAMILIES,
    HUNG,
    INSTANCE_FAMILIES,
    MODEL_FAMILIES,
    NS_PER_MS,
    NS_PER_S,
    STATE,
    STATES,
    SYSTEM_FAMILIES,
    WAITS,
    S,
    Valued,
)
from halimede.core.observe.samples import GpuSample, ModelSample, StateSample, SystemSample
from halimede.core.observe.stats import BUCKET_EDGES_NS, FIRST_RESPONSE_EDGES_NS, ModelStats
from halimede.core.types.statistics import QueueOutcome

MODELS_PER_STEP = 32
"""Number of models rendered in one turn of the event loop: a millisecond."""
PART_PER_STEP_BYTES = 64 << 10
OF_REQUESTS = "nv_inference_"
"""The beginning of the names of families that have the label `gpu_uuid`, as in Triton."""

_EDGES = edge_texts(edge / NS_PER_S for edge in BUCKET_EDGES_NS)
_NO_EDGES, _NO_EVENTS = edge_texts(()), (0,)
_EDGES_MS = edge_texts(edge / NS_PER_MS for edge in FIRST_RESPONSE_EDGES_NS)


def render(
    models: Iterable[ModelSample],
    system: SystemSample | None,
    gpus: Sequence[GpuSample],
    *,
    states: Iterable[StateSample] = (),
    dropped_log_lines: int = 0,
    hung_processes: Mapping[ProcessKind, int] = MappingProxyType({}),
    latencies: bool = True,
    first_responses: bool = True,
    custom: Generator[int, None, list[bytes]] | None = None,
) -> Generator[int, None, list[bytes]]:
    """The body of a scrape in parts, rendered in steps of about a millisecond, as a thousand models take long.

    Each model is taken from `models` and all of its values are read within one step, so the values are consistent.
    `system` is None if the machine is not sampled; without `latencies` there are no `nv_*_duration_us`, without
    `first_responses` there is no histogram of them. `custom` renders the parts that come after all others, in steps of
    its own.
    """
    valued = [each for each in MODEL_FAMILIES if latencies or not each.name.endswith("_duration_us")]
    texts = [(each.value, each.text(), each.name.startswith(OF_REQUESTS)) for each in valued]
    failures, durations, waits, state_text = FAILURES.text(), DURATIONS.text(), WAITS.text(), STATE.text()
    busy_texts = [(each.value, each.text()) for each in INSTANCE_FAMILIES]
    first_text: FamilyText | None = None
    for number, model in enumerate(models, 1):
        tags, head, tail = _labels(model)
        labels = f"{head},{tail}"
        nv_head, nv_labels = head, labels
        if model.gpu_uuid:
            nv_head = f"{tags}{label_text({'gpu_uuid': model.gpu_uuid})},{head[len(tags) :]}"
            nv_labels = f"{nv_head},{tail}"
        for value, text, is_nv in texts:
            known = value(model)
            if known is not None:
                text.sample(nv_labels if is_nv else labels, known)
        stats = model.stats
        for reason, count in stats.failures.items():
            failures.sample(f'{nv_head},reason="{reason.value}",{tail}', count)
        durations.histogram(labels, _EDGES, stats.request_buckets, stats.request_ns / NS_PER_S)
        if stats.has_queue:
            _add_waits(waits, head, tail, stats)
        for instance in model.instances:
            of_instance = (
                f"{tags}{label_text({'device': instance.device, 'instance': instance.name})},{labels[len(tags) :]}"
            )
            for of, text in busy_texts:
                text.sample(of_instance, of(instance) or 0)
        if first_responses and stats.first_response_buckets:
            first_text = first_text or FIRST_RESPONSES.text()
            first_ms = stats.first_response_ns / NS_PER_MS
            first_text.histogram(nv_labels, _EDGES_MS, stats.first_response_buckets, first_ms)
        if number % MODELS_PER_STEP == 0:
            yield 0
    for number, sample in enumerate(states, 1):
        head, tail = label_text({"model": sample.model}), label_text({"version": sample.version})
        for state in STATES:
            state_text.sample(f'{head},state="{state.value}",{tail}', int(sample.state is state))
        if number % MODELS_PER_STEP == 0:
            yield 0

    parts: list[bytes] = []
    of_instances = (text for _, text in busy_texts)
    of_models = [*(text for _, text, _ in texts), *of_instances, failures, durations, waits, state_text]
    if first_text is not None:
        of_models.append(first_text)
    for text in of_models:
        parts.append(text.to_bytes())
        if len(parts[-1]) > PART_PER_STEP_BYTES:
            yield 0
    parts += _texts(GPU_FAMILIES, [(label_text({"gpu_uuid": gpu.uuid}), gpu) for gpu in gpus])
    parts += _texts(SYSTEM_FAMILIES, [] if system is None else [("", system)])
    dropped = DROPPED.text()
    dropped.sample("", dropped_log_lines)
    parts.append(dropped.to_bytes())
    hung = HUNG.text()
    for kind in ProcessKind:
        hung.sample(label_text({"process": kind.value}), hung_processes.get(kind, 0))
    parts.append(hung.to_bytes())
    if custom is not None:
        parts += yield from custom
    return parts


def _add_waits(waits: FamilyText, head: str, tail: str, stats: ModelStats) -> None:
    """Add a histogram for each outcome. Until the first failure with an outcome, the one for it has a single bucket.

    Sum and count exist from the start, so no rate of them lacks the first failure. All buckets would double the page.
    """
    of_success = f'{head},outcome="{QueueOutcome.SUCCESS.value}",{tail}'
    waits.histogram(of_success, _EDGES, stats.queue.buckets, stats.queue.ns / NS_PER_S)
    for outcome, waited in stats.failed_waits.items():
        of_outcome = f'{head},outcome="{outcome.value}",{tail}'
        if any(waited.buckets):
            waits.histogram(of_outcome, _EDGES, waited.buckets, waited.ns / NS_PER_S)
        else:
            waits.histogram(of_outcome, _NO_EDGES, _NO_EVENTS, 0)


def _texts(families: Iterable[Valued[S]], subjects: Sequence[tuple[str, S]]) -> list[bytes]:
    parts: list[bytes] = []
    for each in families:
        text = each.text()
        for labels, subject in subjects:
            value = each.value(subject)
            if value is not None:
                text.sample(labels, value)
        parts.append(text.to_bytes())
    return parts


def _labels(model: ModelSample) -> tuple[str, str, str]:
    """The labels of a model's tags with a comma behind them, those up to `model`, and `version`.

    Labels are in alphabetical order: further ones go after the tags, which begin with an underscore, or before
    `version`.
    """
    tags = label_text({_tag_label(tag): value for tag, value in model.tags.items()})
    before = f"{tags}," if tags else ""
    return before, before + label_text({"model": model.stats.name}), label_text({"version": model.stats.version})


def _tag_label(tag: str) -> str:
    """A tag's label: one leading underscore, as in Triton, avoids collisions; invalid characters become underscores.

    Prometheus reserves two leading underscores: it refuses a scrape that has them, or drops them.
    """
    legal = "".join([char if char.isascii() and char.isalnum() else "_" for char in tag])
    return "_" + legal.lstrip("_")
