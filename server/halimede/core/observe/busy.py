"""How long each instance of a model is busy.

An instance is busy while it has an execution under way: from the moment when the pump gives it a batch until the pump
gets the end of the batch. So the time counts while the execution runs, and the total never decreases: a mark by the
worker's clock, which ends before the loop learns of it, could be lower than what an earlier scrape has shown.
"""

from collections import deque
from dataclasses import dataclass

STEP_NS = 1_000_000_000
STEPS = 15
"""The ratio is the mean of so many steps, and of the step that has begun."""


@dataclass(frozen=True, slots=True)
class Busy:
    """How long the instance number `ordinal` was busy since its load, and its mean over the last 15 s, from 0 to 1."""

    ordinal: int
    total_ns: int
    ratio: float


class BusyTime:
    """The busy time of one instance since `now_ns`. Times are monotonic nanoseconds.

    The total at the end of each second is kept for 15 s, so a batch costs a comparison, and the memory is bounded.
    """

    __slots__ = ("_batches", "_edge_ns", "_edges", "_since_ns", "_total_ns")

    def __init__(self, now_ns: int) -> None:
        self._batches = 0
        self._since_ns = 0
        """When the first of the batches under way began."""
        self._total_ns = 0
        """Without the batches under way."""
        self._edges = deque([(now_ns, 0)], maxlen=STEPS + 1)
        """The last ends of steps, and the total at each."""
        self._edge_ns = now_ns + STEP_NS
        """The next end of a step."""

    def __repr__(self) -> str:
        return f"<BusyTime batches={self._batches} total={self._total_ns / 1e9:.3f}s>"

    def begin(self, now_ns: int) -> None:
        """The instance gets a batch. It may have others."""
        if now_ns >= self._edge_ns:
            self._pass_edges(now_ns)
        if not self._batches:
            self._since_ns = now_ns
        self._batches += 1

    def end(self, now_ns: int) -> None:
        """A batch ends."""
        if now_ns >= self._edge_ns:
            self._pass_edges(now_ns)
        self._batches -= 1
        if not self._batches:
            self._total_ns += now_ns - self._since_ns

    def total_ns(self, now_ns: int) -> int:
        """The busy time until now, with the executions under way."""
        return self._total_ns + (now_ns - self._since_ns if self._batches else 0)

    def ratio(self, now_ns: int) -> float:
        """The mean over the last 15 to 16 s, or since the load if that is shorter. From 0 to 1."""
        if now_ns >= self._edge_ns:
            self._pass_edges(now_ns)
        begin_ns, before_ns = self._edges[0]
        took_ns = now_ns - begin_ns
        # Times of one turn of the loop may be out of order by microseconds.
        return min(1.0, (self.total_ns(now_ns) - before_ns) / took_ns) if took_ns > 0 else 0.0

    def value(self, ordinal: int, now_ns: int) -> Busy:
        """What a scrape shows of it."""
        return Busy(ordinal, self.total_ns(now_ns), self.ratio(now_ns))

    def _pass_edges(self, now_ns: int) -> None:
        """Keep the totals at the ends of the steps that have passed. Older ones than 15 are not needed."""
        passed = (now_ns - self._edge_ns) // STEP_NS
        last_ns = self._edge_ns + passed * STEP_NS
        for at_ns in range(last_ns - min(passed, STEPS) * STEP_NS, last_ns + 1, STEP_NS):
            self._edges.append((at_ns, self.total_ns(at_ns)))
        self._edge_ns = last_ns + STEP_NS
