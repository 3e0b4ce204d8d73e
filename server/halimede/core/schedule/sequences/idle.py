"""The sequences without queued and executing requests, and when they end.

An idle sequence ends after the idle time. Once only few requests are expected, it ends after a second at most while
others wait for a sequence slot. Once none is expected, it ends at once.
"""

from halimede.core.deadlines import Deadlines
from halimede.core.schedule.sequences.live import LiveSequence

FEW_IDLE_NS = 1_000_000_000
"""The idle time at most, if few requests are expected and others wait for a sequence slot: enough for requests on their
way."""

_ANY_TIME = 1 << 100
"""Later than every deadline: a timeout is at most 2**64 microseconds."""


class IdleSequences:
    """Times are nanoseconds. `others_wait` tells whether sequences wait for a sequence slot."""

    __slots__ = ("_deadlines", "_early_at", "_expects_more", "_idle_ns")

    def __init__(self, idle_ns: int) -> None:
        self._idle_ns = idle_ns
        self._deadlines = Deadlines[LiveSequence]()
        self._expects_more = True
        self._early_at: int | None = None
        """When the shorter idle time begins to count, once few requests are expected."""

    def add(self, sequence: LiveSequence, now_ns: int) -> None:
        self._deadlines.add(sequence, now_ns + self._idle_ns)

    def discard(self, sequence: LiveSequence) -> None:
        self._deadlines.discard(sequence)

    def expect_few(self, now_ns: int) -> None:
        """Sequences that are idle for `FEW_IDLE_NS` at `now_ns` get as long again, for requests on their way."""
        self._early_at = now_ns + FEW_IDLE_NS

    def expect_no_more(self) -> None:
        self._expects_more = False

    @property
    def expects_few(self) -> bool:
        """Whether a sequence that begins to wait for a sequence slot can change when others end."""
        return self._early_at is not None

    def pop_due(self, now_ns: int, *, others_wait: bool) -> list[LiveSequence]:
        """Remove and return the sequences that end."""
        if not self._expects_more:
            return self._deadlines.pop_due(_ANY_TIME)
        if self._early_at is None or now_ns < self._early_at:
            return self._deadlines.pop_due(now_ns)
        return self._deadlines.pop_due(now_ns + self._early_ns(others_wait))

    def next_end(self, *, others_wait: bool) -> int | None:
        """When the next sequence ends; None for never."""
        at = self._deadlines.next()
        if at is None or self._early_at is None:
            return at
        return min(at, max(at - self._early_ns(others_wait), self._early_at))

    def _early_ns(self, others_wait: bool) -> int:
        return max(0, self._idle_ns - FEW_IDLE_NS) if others_wait else 0
