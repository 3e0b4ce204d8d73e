"""The two strategies: which of the sequences with a request make the next batch of an instance.

A batcher gets the sequences of one instance whose first queued request may run (`offer`), so a batch has at most one
request of each sequence.

- Direct: a batch has all requests that are offered, in the order of the seats. With a delay and a minimum utilization
  it waits, until the share of the seats with a request reaches the minimum, or the oldest request has waited for the
  delay. If the requests are not all `compatible`, the oldest one chooses: the others stay offered.
- Oldest: the instance has a `BatchQueue`, as a dynamic batcher has. Requests are in the order in which they are
  offered; preferred sizes and the delay count as they do there, and batches are lent as there.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from halimede.core.schedule.actions import Slot
from halimede.core.schedule.policy import BatchPolicy
from halimede.core.schedule.queue import AT_ONCE, Batch, BatchQueue
from halimede.core.schedule.sequences.live import LiveSequence, QueuedRequest
from halimede.core.schedule.sequences.policy import DirectPolicy


class Batcher(Protocol):
    """The offered sequences of one instance. Times are nanoseconds."""

    def __len__(self) -> int:
        """The number of sequences that are offered."""

    def offer(self, sequence: LiveSequence, now_ns: int, *, is_idle: bool) -> None:
        """The first queued request of the sequence may run. `is_idle` means that the instance runs no batch."""

    def try_withdraw(self, sequence: LiveSequence) -> bool:
        """Take back an offer; False if the request has begun in a lent batch."""

    def take(self, now_ns: int) -> list[LiveSequence]:
        """Remove and return the sequences of the next batch; empty if none is ready."""

    def ready_at(self) -> int | None:
        """When `take` has a batch if nothing else happens: AT_ONCE, a time, or None for never."""

    def end_delay(self) -> None:
        """No batch waits for its delay from now on."""


class DirectBatcher:
    """See the module's text."""

    __slots__ = ("_offered", "_policy", "_seats")

    def __init__(self, policy: DirectPolicy, seats: int) -> None:
        self._policy = policy
        self._seats = seats
        self._offered: dict[int, LiveSequence] = {}
        """By seat."""

    def __len__(self) -> int:
        return len(self._offered)

    def offer(self, sequence: LiveSequence, now_ns: int, *, is_idle: bool) -> None:  # noqa: ARG002
        self._offered[sequence.seat] = sequence

    def try_withdraw(self, sequence: LiveSequence) -> bool:
        del self._offered[sequence.seat]
        return True

    def take(self, now_ns: int) -> list[LiveSequence]:
        ready_at = self.ready_at()
        if ready_at is None or ready_at > now_ns:
            return []
        compatible = _oldest(self._offered.values()).pending.compatible
        batch = [each for each in self._offered.values() if each.queue[0].pending.compatible == compatible]
        batch.sort(key=_seat)
        for sequence in batch:
            del self._offered[sequence.seat]
        return batch

    def ready_at(self) -> int | None:
        offered, policy = self._offered, self._policy
        if not offered:
            return None
        waits = policy.max_queue_delay_ns and len(offered) < policy.minimum_utilization * self._seats
        return _oldest(offered.values()).enqueued_at + policy.max_queue_delay_ns if waits else AT_ONCE

    def end_delay(self) -> None:
        self._policy = DirectPolicy()


class OldestBatcher:
    """See the module's text."""

    __slots__ = ("_offered", "_queue", "lent")

    def __init__(self, policy: BatchPolicy, reclaim: Callable[[Batch, Slot], bool]) -> None:
        """`reclaim` as that of a `BatchQueue`."""
        self._queue = BatchQueue(policy)
        self._queue.reclaim = reclaim
        self._offered: dict[int, LiveSequence] = {}
        """By the key of its request."""
        self.lent: Batch | None = None

    def __len__(self) -> int:
        return len(self._offered)

    def offer(self, sequence: LiveSequence, now_ns: int, *, is_idle: bool) -> None:
        pending = sequence.queue[0].pending
        self._queue.push(pending, now_ns, is_idle)
        self._offered[pending.key] = sequence

    def try_withdraw(self, sequence: LiveSequence) -> bool:
        key = sequence.queue[0].pending.key
        if not self._queue.try_remove(key):
            return False
        del self._offered[key]
        return True

    def take(self, now_ns: int) -> list[LiveSequence]:
        return [self._offered.pop(key) for key in self._queue.pop_ready(now_ns)]

    def ready_at(self) -> int | None:
        return self._queue.ready_at()

    def end_delay(self) -> None:
        self._queue.end_delay()

    @property
    def can_lend(self) -> bool:
        """Whether a batch can be lent, and none is."""
        return self.lent is None and self._queue.has_closed

    def lend(self, slot: Slot) -> list[LiveSequence]:
        """Lend the next batch to the slot. Its sequences stay offered."""
        self.lent = self._queue.lend(slot)
        return self.lent_sequences()

    def lent_sequences(self) -> list[LiveSequence]:
        return [] if self.lent is None else [self._offered[key] for key in self.lent.keys]

    def take_back(self) -> None:
        """The lent batch did not begin: it is the next one."""
        if self.lent is not None:
            self._queue.take_back(self.lent)
            self.lent = None

    def begin(self) -> list[LiveSequence]:
        """The lent batch, if there is one, has begun: remove and return its sequences."""
        batch, self.lent = self.lent, None
        if batch is None:
            return []
        self._queue.begin(batch)
        return [self._offered.pop(key) for key in batch.keys]


def _seat(sequence: LiveSequence) -> int:
    return sequence.seat


def _oldest(sequences: Iterable[LiveSequence]) -> QueuedRequest:
    return min((sequence.queue[0] for sequence in sequences), key=_age)


def _age(request: QueuedRequest) -> tuple[int, int]:
    return request.enqueued_at, request.pending.key
