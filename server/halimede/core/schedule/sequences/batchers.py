"""The two strategies: which of the sequences with a request make the next batch of an instance.

A batcher gets the sequences of one instance whose first queued request is eligible to run (`add`), so a batch has at
most one request of each sequence.

- Direct: a batch has all eligible requests, in the order of the sequence slots. With a delay and a minimum utilization
  it waits, until the share of the sequence slots with a request reaches the minimum, or the oldest request has waited
  for the delay. If the requests are not all `compatible`, the oldest one chooses: the others stay eligible. Nothing is
  prefetched, because a batch grows until it begins.
- Oldest: the instance has a `BatchQueue`, as a dynamic batcher has. Requests are in the order in which they became
  eligible; preferred sizes, the delay and prefetching are as there.
"""

from collections.abc import Iterable
from typing import Protocol

from halimede.core.schedule.actions import Slot
from halimede.core.schedule.front import AT_ONCE
from halimede.core.schedule.policy import BatchPolicy
from halimede.core.schedule.prefetch import TakeBack
from halimede.core.schedule.queue import BatchQueue
from halimede.core.schedule.sequences.live import LiveSequence, QueuedRequest
from halimede.core.schedule.sequences.policy import DirectPolicy


class Batcher(Protocol):
    """The eligible sequences of one instance. Times are nanoseconds."""

    def __len__(self) -> int:
        """The number of eligible sequences."""

    def add(self, sequence: LiveSequence, now_ns: int, *, is_idle: bool) -> None:
        """The first queued request of the sequence may run. `is_idle` means that the instance runs no batch."""

    def try_remove(self, sequence: LiveSequence) -> bool:
        """Remove a sequence; False if its request has begun in a prefetched batch."""

    def take(self, now_ns: int) -> list[LiveSequence]:
        """Remove and return the sequences of the next batch; empty if none is ready."""

    def ready_at(self) -> int | None:
        """When `take` has a batch if nothing else happens: AT_ONCE, a time, or None for never."""

    def end_delay(self) -> None:
        """No batch waits for its delay from now on."""

    def can_prefetch(self) -> bool:
        """Whether the instance, which runs a batch, may get its next one now."""

    def prefetch(self) -> list[LiveSequence]:
        """The sequences of the next batch, which lies ready at the instance from now on. They stay eligible."""

    def end(self) -> list[LiveSequence]:
        """The instance has ended its batch and begins the prefetched one: remove and return its sequences."""

    def preempt(self) -> list[LiveSequence]:
        """Preempt the prefetched batch. Returns its sequences if it has begun."""


class DirectBatcher:
    """See the module's text."""

    __slots__ = ("_eligible", "_policy", "_sequence_slots")

    def __init__(self, policy: DirectPolicy, sequence_slots: int) -> None:
        self._policy = policy
        self._sequence_slots = sequence_slots
        self._eligible: dict[int, LiveSequence] = {}
        """By sequence slot."""

    def __len__(self) -> int:
        return len(self._eligible)

    def add(self, sequence: LiveSequence, now_ns: int, *, is_idle: bool) -> None:  # noqa: ARG002
        self._eligible[sequence.sequence_slot] = sequence

    def try_remove(self, sequence: LiveSequence) -> bool:
        del self._eligible[sequence.sequence_slot]
        return True

    def take(self, now_ns: int) -> list[LiveSequence]:
        ready_at = self.ready_at()
        if ready_at is None or ready_at > now_ns:
            return []
        compatible = _oldest(self._eligible.values()).pending.compatible
        batch = [each for each in self._eligible.values() if each.queue[0].pending.compatible == compatible]
        batch.sort(key=_sequence_slot)
        for sequence in batch:
            del self._eligible[sequence.sequence_slot]
        return batch

    def ready_at(self) -> int | None:
        eligible, policy = self._eligible, self._policy
        if not eligible:
            return None
        waits = policy.max_queue_delay_ns and len(eligible) < policy.minimum_utilization * self._sequence_slots
        return _oldest(eligible.values()).enqueued_at + policy.max_queue_delay_ns if waits else AT_ONCE

    def end_delay(self) -> None:
        self._policy = DirectPolicy()

    def can_prefetch(self) -> bool:
        return False

    def prefetch(self) -> list[LiveSequence]:
        return []

    def end(self) -> list[LiveSequence]:
        return []

    def preempt(self) -> list[LiveSequence]:
        return []


class OldestBatcher:
    """See the module's text."""

    __slots__ = ("_eligible", "_queue", "_slot")

    def __init__(self, policy: BatchPolicy, slot: Slot, take_back: TakeBack | None) -> None:
        self._queue = BatchQueue(policy, take_back)
        self._slot = slot
        self._eligible: dict[int, LiveSequence] = {}
        """By the key of its request."""

    def __len__(self) -> int:
        return len(self._eligible)

    def add(self, sequence: LiveSequence, now_ns: int, *, is_idle: bool) -> None:
        pending = sequence.queue[0].pending
        self._queue.push(pending, now_ns, is_idle)
        self._eligible[pending.key] = sequence

    def try_remove(self, sequence: LiveSequence) -> bool:
        key = sequence.queue[0].pending.key
        if not self._queue.try_remove(key):
            return False
        del self._eligible[key]
        return True

    def take(self, now_ns: int) -> list[LiveSequence]:
        return [self._eligible.pop(key) for key in self._queue.pop_ready(now_ns)]

    def ready_at(self) -> int | None:
        return self._queue.ready_at()

    def end_delay(self) -> None:
        self._queue.end_delay()

    def can_prefetch(self) -> bool:
        return self._queue.can_prefetch(1)

    def prefetch(self) -> list[LiveSequence]:
        return [self._eligible[key] for key in self._queue.prefetch_next(self._slot)]

    def end(self) -> list[LiveSequence]:
        batch = self._queue.prefetch.end(self._slot, 1)
        if batch is None:
            return []
        self._queue.begin(batch)
        return [self._eligible.pop(key) for key in batch.keys]

    def preempt(self) -> list[LiveSequence]:
        return [self._eligible[key] for batch in self._queue.prefetch.preempt_all() for key in batch.keys]


def _sequence_slot(sequence: LiveSequence) -> int:
    return sequence.sequence_slot


def _oldest(sequences: Iterable[LiveSequence]) -> QueuedRequest:
    return min((sequence.queue[0] for sequence in sequences), key=_age)


def _age(request: QueuedRequest) -> tuple[int, int]:
    return request.enqueued_at, request.pending.key
