"""Metrics that models declare, published on the server's page with its own.

An owner is one load of one model version. Its instances share what it declares, and a restarted instance that declares
the same again gets the same series, whose counts continue. Owners share too: a family appears once on the page, and a
series with the same labels is one series whichever owner declares it, so several owners add to the same count. A series
is removed with the last owner that holds it. An owner must delete a family as often as it declared it.

Values that Prometheus cannot read are refused, and so are values that would corrupt a count permanently, such as NaN.
Error texts begin like Triton's.
"""

from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import isfinite
from re import compile as pattern

from halimede.core.observe.exposition import FamilyText, edge_texts, label_text
from halimede.core.observe.metrics import PAGE_NAMES, sample_names
from halimede.core.types import InferenceError
from halimede.core.types.error import clip, invalid, unavailable, unsupported

MAX_FAMILIES = 5_000
MAX_FAMILIES_OF_OWNER = 1_000
MAX_SERIES = 50_000
MAX_SERIES_OF_OWNER = 10_000
"""Series as Prometheus counts them: one for each bucket of a histogram, and one each for its sum and count."""
MAX_NAME_LENGTH = 256
MAX_DESCRIPTION_BYTES = 1_024
MAX_LABELS_BYTES = 1_024
"""Maximum length of all labels of a series together, as they appear on the page."""
MAX_BUCKETS = 256

SERIES_PER_STEP = 1_000
"""Maximum number of lines in one turn of the event loop: a millisecond."""

OWN_PREFIX = "halimede_"
OPERATIONS: Mapping[str, frozenset[str]] = {
    "COUNTER": frozenset({"increment"}),
    "GAUGE": frozenset({"increment", "set"}),
    "HISTOGRAM": frozenset({"observe"}),
}
"""The operations of each kind of metric."""

_NAME = pattern(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = pattern(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(slots=True)
class _Series:
    """`value` is a histogram's sum. `counts` has the events in each single bucket; `counts` and `edges` are for
    histograms only."""

    labels: str
    edges: tuple[float, ...]
    edge_texts: tuple[str, ...]
    counts: list[int]
    value: float = 0.0
    owners: int = 0

    @property
    def size(self) -> int:
        return len(self.counts) + 2 if self.counts else 1


@dataclass(slots=True)
class _Family:
    name: str
    kind: str
    description: str
    series: dict[str, _Series] = field(default_factory=dict)
    owners: int = 0


@dataclass(slots=True)
class _HeldMetric:
    family_id: int
    family: _Family
    series: _Series


@dataclass(slots=True)
class _HeldFamily:
    family: _Family
    metric_ids: dict[str, int] = field(default_factory=dict)
    """By label text."""
    holds: int = 1


@dataclass(slots=True)
class _Owner:
    families: dict[int, _HeldFamily] = field(default_factory=dict)
    family_ids: dict[str, int] = field(default_factory=dict)
    metrics: dict[int, _HeldMetric] = field(default_factory=dict)
    size: int = 0


class CustomMetrics:
    """All metrics that models have declared. Used only on the event loop's thread.

    Every method but `forget` and `render` raises InferenceError: INVALID_ARG for invalid arguments, UNSUPPORTED for an
    operation that the kind does not have, UNAVAILABLE above a limit. Arguments come from untrusted processes, so values
    of any type get such an error. Ids are never reused, and are valid only for their owner.
    """

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._owners: dict[str, _Owner] = {}
        self._sample_names: dict[str, str] = {}
        self._size = 0
        self._ids = count(1)

    def __repr__(self) -> str:
        return f"<CustomMetrics families={len(self._families)} series={self._size} owners={len(self._owners)}>"

    def new_family(self, owner: str, name: str, description: str, kind: str) -> int:
        """Declare a family; returns the owner's id for it. If descriptions differ the first one is shown."""
        _check_family(name, description, kind)
        mine = self._owners.get(owner) or _Owner()
        family = self._families.get(name)
        if family is not None and family.kind != kind:
            raise invalid(
                f"Family name already exists with different type: '{name}' is a {family.kind}, declared by a model "
                f"that is loaded"
            )
        if name in mine.family_ids:
            family_id = mine.family_ids[name]
            mine.families[family_id].holds += 1
            return family_id
        if len(mine.families) >= MAX_FAMILIES_OF_OWNER:
            raise unavailable(f"a model may have {MAX_FAMILIES_OF_OWNER} metric families")
        if family is None:
            family = self._add_family(name, kind, description)
        family.owners += 1
        family_id = next(self._ids)
        mine.families[family_id] = _HeldFamily(family)
        mine.family_ids[name] = family_id
        self._owners[owner] = mine
        return family_id

    def delete_family(self, owner: str, family: int) -> None:
        """Undo one declaration; the owner's last one also removes its metrics of the family."""
        held = self._held_family(owner, family)
        held.holds -= 1
        if held.holds > 0:
            return
        mine = self._owners[owner]
        for metric in list(held.metric_ids.values()):
            self._drop_metric(mine, metric)
        self._drop_family(mine, family)
        if not mine.families:
            del self._owners[owner]

    def new_metric(self, owner: str, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        """Declare a series of a family; returns the owner's id for it. `buckets` are upper edges without +Inf.

        For kinds without buckets, `buckets` is None or an empty list.
        """
        held = self._held_family(owner, family)
        edges = _checked_edges(held.family.kind, buckets)
        text = _checked_labels(held.family.kind, labels)
        series = held.family.series.get(text)
        if series is not None and series.edges != edges:
            raise invalid(
                f"the series {{{text}}} of histogram '{held.family.name}' has other buckets already, declared by a "
                f"model that is loaded"
            )
        mine = self._owners[owner]
        if text in held.metric_ids:
            return held.metric_ids[text]
        is_new = series is None
        if series is None:
            is_histogram = held.family.kind == "HISTOGRAM"
            counts = [0] * (len(edges) + 1) if is_histogram else []
            series = _Series(text, edges, edge_texts(edges), counts)
        if mine.size + series.size > MAX_SERIES_OF_OWNER:
            raise unavailable(
                f"a model may have {MAX_SERIES_OF_OWNER} series of metrics, of which a bucket of a histogram is one"
            )
        if is_new:
            if self._size + series.size > MAX_SERIES:
                raise unavailable(f"all models together may have {MAX_SERIES} series of metrics")
            held.family.series[text] = series
            self._size += series.size
        series.owners += 1
        mine.size += series.size
        metric = next(self._ids)
        mine.metrics[metric] = _HeldMetric(family, held.family, series)
        held.metric_ids[text] = metric
        return metric

    def update(self, owner: str, metric: int, operation: str, value: float) -> None:
        """Update a metric: `operation` is increment, set or observe; `value` must be a finite number."""
        held = self._held_metric(owner, metric, operation)
        kind = held.family.kind
        if not isinstance(operation, str) or operation not in OPERATIONS[kind]:
            raise _unsupported(kind, operation)
        number = _finite(value)
        if number is None:
            raise invalid(f"metric '{held.family.name}': {operation} by {value!r:.40}; expected a finite number")
        series = held.series
        if operation == "set":
            series.value = number
            return
        if kind == "COUNTER" and number < 0:
            raise invalid(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
            )
        total = series.value + number
        if not isfinite(total):
            raise invalid(f"metric '{held.family.name}': {operation} by {number!r} leaves the range of numbers")
        series.value = total
        if series.counts:
            series.counts[bisect_left(series.edges, number)] += 1

    def value(self, owner: str, metric: int) -> float:
        """The current value of a counter or gauge."""
        held = self._held_metric(owner, metric, "get")
        if held.family.kind == "HISTOGRAM":
            raise _unsupported(held.family.kind, "value")
        return held.series.value

    def series(self, family: str) -> Iterator[tuple[str, float]]:
        """Labels, as on the page, and values of a family of counters or gauges; empty if there is no such family."""
        found = self._families.get(family)
        if found is None or found.kind == "HISTOGRAM":
            return iter(())
        return ((series.labels, series.value) for series in found.series.values())

    def forget(self, owner: str) -> None:
        """Remove what only this owner held, after it was unloaded. No effect if it held nothing."""
        mine = self._owners.pop(owner, None)
        if mine is None:
            return
        for metric in list(mine.metrics):
            self._drop_metric(mine, metric)
        for family in list(mine.families):
            self._drop_family(mine, family)

    def render(self) -> Generator[int, None, list[bytes]]:
        """The families as parts of a scrape, in steps of about a millisecond each."""
        parts: list[bytes] = []
        lines = 0
        # Copies, because models may declare and forget metrics between two steps.
        for family in list(self._families.values()):
            text = FamilyText(family.name, family.kind.lower(), family.description)
            lines += 1
            for series in list(family.series.values()):
                if series.counts:
                    text.histogram(series.labels, series.edge_texts, series.counts, series.value)
                else:
                    text.sample(series.labels, series.value)
                lines += series.size
                if lines >= SERIES_PER_STEP:
                    parts.append(text.take_bytes())
                    lines = 0
                    yield 0
            parts.append(text.to_bytes())
            if lines >= SERIES_PER_STEP:
                lines = 0
                yield 0
        return parts

    def _add_family(self, name: str, kind: str, description: str) -> _Family:
        for each in sample_names(name, kind):
            if each.startswith(OWN_PREFIX) or each in PAGE_NAMES:
                raise invalid(f"Family name already exists: '{name}' is a name of the server's own metrics")
            if each in self._sample_names:
                raise invalid(
                    f"Family name already exists: '{name}' has series of the same name as '{self._sample_names[each]}'"
                )
        if len(self._families) >= MAX_FAMILIES:
            raise unavailable(f"all models together may have {MAX_FAMILIES} metric families")
        self._sample_names |= dict.fromkeys(sample_names(name, kind), name)
        self._families[name] = _Family(name, kind, description)
        return self._families[name]

    def _drop_family(self, mine: _Owner, family_id: int) -> None:
        family = mine.families.pop(family_id).family
        del mine.family_ids[family.name]
        family.owners -= 1
        if family.owners == 0:
            del self._families[family.name]
            for each in sample_names(family.name, family.kind):
                del self._sample_names[each]

    def _drop_metric(self, mine: _Owner, metric: int) -> None:
        held = mine.metrics.pop(metric)
        series = held.series
        del mine.families[held.family_id].metric_ids[series.labels]
        mine.size -= series.size
        series.owners -= 1
        if series.owners == 0:
            del held.family.series[series.labels]
            self._size -= series.size

    def _held_family(self, owner: str, family: int) -> _HeldFamily:
        mine = self._owners.get(owner)
        held = mine.families.get(family) if mine is not None and isinstance(family, int) else None
        if held is None:
            raise invalid("Could not create metric. The metric family has been deleted.")
        return held

    def _held_metric(self, owner: str, metric: int, operation: str) -> _HeldMetric:
        mine = self._owners.get(owner)
        held = mine.metrics.get(metric) if mine is not None and isinstance(metric, int) else None
        if held is None:
            raise invalid(f"Could not {clip(str(operation))} metric value. Metric has been invalidated.")
        return held


def _check_family(name: str, description: str, kind: str) -> None:
    if not isinstance(kind, str) or kind not in OPERATIONS:
        raise invalid(f"Unsupported metric kind '{clip(str(kind))}'; expected {', '.join(OPERATIONS)}")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        raise invalid(
            f"Invalid metric name '{clip(str(name))}'; expected at most {MAX_NAME_LENGTH} letters, digits, "
            "underscores and colons that do not begin with a digit"
        )
    if not isinstance(description, str) or not _fits(description, MAX_DESCRIPTION_BYTES):
        raise invalid(
            f"the description of metric family '{name}' is too long or no text; expected at most "
            f"{MAX_DESCRIPTION_BYTES} bytes of UTF-8"
        )


def _checked_labels(kind: str, labels: Mapping[str, str]) -> str:
    """The labels as they appear on the page."""
    if not isinstance(labels, Mapping):
        raise invalid("Failed to create metric. Labels must be a dictionary.")
    for name, value in labels.items():
        # Prometheus reserves two leading underscores, and `le` for the buckets of histograms.
        is_legal = isinstance(name, str) and len(name) <= MAX_NAME_LENGTH and _LABEL.fullmatch(name)
        if not is_legal or name.startswith("__"):
            raise invalid(
                f"Invalid label name '{clip(str(name))}'; expected at most {MAX_NAME_LENGTH} letters, digits and "
                "underscores that begin with neither a digit nor two underscores"
            )
        if kind == "HISTOGRAM" and name == "le":
            raise invalid("Invalid label name 'le': it is reserved for the buckets of histograms")
        if not isinstance(value, str):
            raise invalid(f"the value of label '{name}' is of type {type(value).__name__}; expected text")
    text = label_text(labels)
    if not _fits(text, MAX_LABELS_BYTES):
        raise invalid(f"the labels of a metric may have {MAX_LABELS_BYTES} bytes of UTF-8 together")
    return text


def _fits(text: str, size: int) -> bool:
    """Whether the text has at most `size` bytes and is valid Unicode (no lone surrogate)."""
    try:
        return len(text) <= size and len(text.encode()) <= size
    except UnicodeEncodeError:
        return False


def _checked_edges(kind: str, buckets: Sequence[float] | None) -> tuple[float, ...]:
    if kind != "HISTOGRAM":
        if buckets:
            raise invalid(f"Failed to create metric. Unexpected buckets found: a {kind} has none")
        return ()
    if buckets is None:
        raise invalid("Failed to create metric. Missing required buckets.")
    if not isinstance(buckets, Sequence) or isinstance(buckets, str):
        raise invalid("Failed to create metric. Buckets must be a list.")
    if len(buckets) > MAX_BUCKETS:
        raise invalid(f"a histogram may have {MAX_BUCKETS} buckets, {len(buckets)} are given")
    edges: list[float] = []
    for bucket in buckets:
        edge = _finite(bucket)
        if edge is None:
            raise invalid(f"bucket {bucket!r:.40} of a histogram; expected finite numbers, +Inf is added to them")
        edges.append(edge)
    if any(low >= high for low, high in pairwise(edges)):
        raise invalid("Bucket Boundaries must be strictly sorted")
    return tuple(edges)


def _finite(value: object) -> float | None:
    """The number as a float, None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if isfinite(number) else None


def _unsupported(kind: str, operation: str) -> InferenceError:
    return unsupported(f"TRITONSERVER_METRIC_KIND_{kind} does not support {clip(str(operation)).capitalize()}")
