"""The next batch of a busy slot: prefetched while another one runs, and preempted while it has not begun.

A slot that ends a batch must not wait for the event loop, which may be busy for milliseconds. So a busy slot gets one
batch more, which its instance begins when it has ended the running one. Its requests stay queued until then: bounds,
deadlines and cancellation hold for them. The queue says which batches can be prefetched, and preempts one when

- one of its requests is cancelled, expires, or moves to another priority level;
- it is to be cut anew, because it can become larger or a request of a higher priority level arrives.

The dynamic scheduler preempts one for another slot that is free. `end` preempts those whose slots take too long. A
sequence stays at its instance, so the queue of an instance has one slot, and neither happens.
"""

from collections.abc import Callable
from dataclasses import dataclass

from halimede.core.schedule.actions import Slot

TakeBack = Callable[[Slot], bool]
"""Takes back the batch that a slot has not begun; False if it has none. The slot then has the batch that it runs."""


@dataclass(slots=True, eq=False)
class Batch:
    """A batch that is prefetched, or that did not run. `eq=False`: batches are compared by identity."""

    keys: list[int]
    rows: int = 0
    slot: Slot | None = None
    """Where it lies ready."""
    level: int = 0
    """The lowest priority level of its requests, in a queue with levels."""
    grows: bool = False
    """Whether it was prefetched although it may become larger."""
    passed: int = 0
    """How many batches that were prefetched later have begun before it."""
    is_returned: bool = False
    """Whether it did not run. It is not cut again: which other requests could join it is not known."""


class Prefetch:
    """The prefetched batches of one queue, at most one for each slot."""

    __slots__ = ("_preempted", "_restore", "_take_back", "batches")

    def __init__(self, take_back: TakeBack | None, restore: Callable[[Batch], None]) -> None:
        """Without `take_back` nothing is prefetched. `restore` returns the requests of a preempted batch to the queue.

        `take_back` is called inside any method that may preempt.
        """
        self._take_back = take_back
        self._restore = restore
        self.batches: dict[Slot, Batch] = {}
        """In the order in which they were prefetched. Changed only here."""
        self._preempted: set[Slot] = set()
        """Slots that get no batch more until they end theirs, because one was preempted. So clients that cancel
        requests cannot make the server send the same batches again and again."""

    @property
    def last(self) -> Batch | None:
        """The batch that was prefetched last, which what waits in the queue follows."""
        return next(reversed(self.batches.values()), None)

    def has_eligible(self, busy: int) -> bool:
        """Whether one of so many busy slots is eligible."""
        return len(self.batches) + len(self._preempted) < busy

    def is_eligible(self, slot: Slot) -> bool:
        """Whether a busy slot may get a batch more."""
        return slot not in self.batches and slot not in self._preempted

    def add(self, batch: Batch, slot: Slot) -> None:
        batch.slot, batch.passed = slot, 0
        self.batches[slot] = batch

    def try_preempt(self, batch: Batch) -> bool:
        """Return the requests of a prefetched batch to the queue. False if it has begun: `end` of its slot follows."""
        slot = batch.slot
        if self._take_back is None or slot is None or not self._take_back(slot):
            return False
        self.remove(slot)
        if not batch.grows:  # the queue bounds how often such batches are prefetched
            self._preempted.add(slot)
        self._restore(batch)
        return True

    def try_preempt_one(self) -> bool:
        """Preempt a batch for a free slot. The one that was prefetched last begins last."""
        if not self.batches:
            return False
        return any(self.try_preempt(batch) for batch in reversed([*self.batches.values()]))

    def preempt_from(self, level: int) -> None:
        """Preempt the batches that have a request of this priority level or of a lower one."""
        for batch in reversed([*self.batches.values()]):
            if batch.level >= level:
                self.try_preempt(batch)

    def preempt_all(self) -> list[Batch]:
        """Returns those that have begun. They stay until `end` of their slots."""
        return [batch for batch in [*self.batches.values()] if not self.try_preempt(batch)]

    def end(self, slot: Slot, slots: int) -> Batch | None:
        """The slot has ended a batch and begins its prefetched one, which is returned; None if it has none.

        Earlier ones that this happens to as often as there are `slots` are preempted: their slots take too long.
        """
        batch = self.batches.get(slot)
        if batch is not None:
            for earlier in [*self.batches.values()]:
                if earlier is batch:
                    break
                earlier.passed += 1
                if earlier.passed >= slots:
                    self.try_preempt(earlier)
        return self.remove(slot)

    def remove(self, slot: Slot) -> Batch | None:
        """Forget a slot. Returns its prefetched batch."""
        self._preempted.discard(slot)
        batch = self.batches.pop(slot, None)
        if batch is not None:
            batch.slot = None
        return batch
