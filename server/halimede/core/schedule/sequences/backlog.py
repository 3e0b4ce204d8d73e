"""The sequences that wait for a sequence slot, in the order in which they began.

A timeout of a request applies only here, and ends its whole sequence: the earliest one counts. A sequence with a
sequence slot has no timeout.
"""

from collections import OrderedDict
from collections.abc import Iterable

from halimede.core.deadlines import Deadlines
from halimede.core.schedule.sequences.live import LiveSequence


class Backlog:
    """Times are nanoseconds. Changes `expires_at` of its sequences."""

    __slots__ = ("_deadlines", "_sequences")

    def __init__(self) -> None:
        self._sequences: OrderedDict[LiveSequence, None] = OrderedDict()
        self._deadlines = Deadlines[LiveSequence]()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: LiveSequence) -> bool:
        return sequence in self._sequences

    def count_requests(self) -> int:
        """The queued requests of its sequences. Slow: it looks at all of them."""
        return sum(len(sequence.queue) for sequence in self._sequences)

    def append(self, sequence: LiveSequence) -> None:
        self._sequences[sequence] = None

    def put_back(self, sequences: Iterable[LiveSequence]) -> None:
        """Return sequences, in this order, to the front: they had sequence slots before. They have no timeout any
        more."""
        for sequence in reversed([*sequences]):
            self._sequences[sequence] = None
            self._sequences.move_to_end(sequence, last=False)

    def expire_at(self, sequence: LiveSequence, deadline_ns: int) -> None:
        """Note the timeout of a request of a sequence in the backlog."""
        if sequence.expires_at is None or deadline_ns < sequence.expires_at:
            sequence.expires_at = deadline_ns
            self._deadlines.discard(sequence)
            self._deadlines.add(sequence, deadline_ns)

    def pop_first(self) -> LiveSequence:
        sequence = self._sequences.popitem(last=False)[0]
        self._forget(sequence)
        return sequence

    def remove(self, sequence: LiveSequence) -> None:
        del self._sequences[sequence]
        self._forget(sequence)

    def due(self, now_ns: int) -> list[LiveSequence]:
        """The sequences whose timeout has passed. The caller removes them."""
        return self._deadlines.pop_due(now_ns)

    def next_deadline(self) -> int | None:
        return self._deadlines.next()

    def _forget(self, sequence: LiveSequence) -> None:
        sequence.expires_at = None
        self._deadlines.discard(sequence)
