"""The Prometheus text format (version 0.0.4): one writer per family."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf, isnan

Number = int | float


class FamilyText:
    """The lines of one family. The family is announced even if it has no series.

    Samples take their labels as text from `label_text`, so that a model's labels are escaped once per scrape and not
    once per line. `kind` is counter, gauge or histogram.
    """

    __slots__ = ("_lines", "_name")

    def __init__(self, name: str, kind: str, help_text: str) -> None:
        escaped = help_text.replace("\\", "\\\\").replace("\n", "\\n")
        self._name = name
        self._lines = [f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"]

    def sample(self, labels: str, value: Number) -> None:
        """One series of the family; `labels` "" for a series without labels."""
        braced = f"{{{labels}}}" if labels else ""
        self._lines.append(f"{self._name}{braced} {number_text(value)}\n")

    def histogram(self, labels: str, edges: Sequence[str], counts: Sequence[int], total: Number) -> None:
        """One series of a histogram family.

        `edges` are the upper edges as text, the last one `+Inf`; `counts` has the events in each single bucket, and
        `total` is the sum of the events' values.
        """
        name = self._name
        before = f"{name}_bucket{{{labels}," if labels else f"{name}_bucket{{"
        cumulative = list(accumulate(counts))
        self._lines += [f'{before}le="{edge}"}} {count}\n' for edge, count in zip(edges, cumulative, strict=True)]
        braced = f"{{{labels}}}" if labels else ""
        self._lines.append(f"{name}_sum{braced} {number_text(total)}\n{name}_count{braced} {cumulative[-1]}\n")

    def to_bytes(self) -> bytes:
        # A name from a directory may contain bytes that are not UTF-8; such a name must not fail the whole scrape.
        return "".join(self._lines).encode("utf-8", "replace")

    def take_bytes(self) -> bytes:
        """Return the lines so far and forget them: for a family that is rendered in steps."""
        taken = self.to_bytes()
        self._lines.clear()
        return taken


def label_text(labels: Mapping[str, str]) -> str:
    """Labels in alphabetical order, escaped: `model="resnet",version="1"`."""
    return ",".join([f'{name}="{_escape(labels[name])}"' for name in sorted(labels)])


def edge_texts(edges_seconds: Iterable[Number]) -> tuple[str, ...]:
    """Upper edges of histogram buckets as `le` values, `+Inf` after them."""
    return (*(number_text(edge) for edge in edges_seconds), "+Inf")


def number_text(value: Number) -> str:
    """A sample's value; integral values are printed as integers, as in Triton."""
    if isinstance(value, int):
        return str(value)
    if isnan(value):
        return "NaN"
    if value in (inf, -inf):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
