"""Instances that take a batch more than they run, for a scheduler that prefetches."""

from collections.abc import Callable, Iterable

from halimede.core.schedule.actions import Action, Execute, Fail, Slot, Warn
from halimede.core.schedule.dynamic_batcher import DynamicBatchScheduler
from halimede.core.schedule.policy import BatchPolicy, Priorities
from halimede.core.schedule.prefetch import TakeBack
from halimede.core.schedule.queue import BatchQueue
from halimede.core.schedule.scheduler import Pending
from halimede.core.schedule.sequences.policy import SequencePolicy
from halimede.core.schedule.sequences.scheduler import SequenceScheduler

TOOK = 5_000_000


Played = DynamicBatchScheduler | SequenceScheduler


class Instances:
    """Runs the batches of each slot in order. An instance begins its next batch when it ends one, before the scheduler
    is told of the end.

    `batches` has the running batch of each busy slot and the one that waits, `begun` all that have begun, in order.
    """

    def __init__(self, make: Callable[[TakeBack | None], Played], *, prefetches: bool = True) -> None:
        self.scheduler = make(self._take_back if prefetches else None)
        self.now = 0
        self.batches: dict[Slot, list[tuple[int, ...]]] = {}
        self.unreported: dict[Slot, int] = {}
        """How many batches have ended of which the scheduler is not told."""
        self.begun: list[tuple[int, ...]] = []
        self.failed: list[Fail] = []
        self.requests: dict[int, Pending] = {}
        self.taken_back = 0

    def arrive(self, *requests: Pending) -> None:
        """They arrive in one turn of the loop."""
        for request in requests:
            self.scheduler.enqueue(request, self.now)
            self.requests[request.key] = request
        self.poll()

    def cancel(self, key: int) -> bool:
        cancelled = self.scheduler.try_cancel(key)
        self.poll()
        return cancelled

    def pass_time(self, ns: int) -> None:
        self.now += ns
        self.poll()

    def end(self, slot: Slot, *, report: bool = True) -> None:
        """The running batch ends, and the waiting one begins."""
        batches = self.batches[slot]
        batches.pop(0)
        if batches:
            self.begun.append(batches[0])
        self.unreported[slot] = self.unreported.get(slot, 0) + 1
        if report:
            self.report(slot)

    def report(self, slot: Slot) -> None:
        """The scheduler is told of the end of one batch."""
        self.unreported[slot] -= 1
        self.scheduler.completed(slot, TOOK)
        if not self.unreported[slot]:
            del self.unreported[slot]
            if not self.batches[slot]:
                del self.batches[slot]
        self.poll()

    def die(self, slot: Slot, unread: tuple[int, ...] = ()) -> list[int]:
        """The keys that are queued again. `unread` are the keys of the waiting batch if it was not read."""
        self.batches.pop(slot, None)
        self.unreported.pop(slot, None)
        requests = [self.requests[key] for key in unread]
        again = list(self.scheduler.remove_slot(slot, [requests] if unread else [], self.now))
        self.poll()
        return again

    def start(self, slot: Slot) -> None:
        self.scheduler.add_slot(slot)
        self.poll()

    def end_each(self, slots: Iterable[Slot]) -> None:
        """Report all ends, and end one batch of each slot."""
        for slot in slots:
            while slot in self.unreported:
                self.report(slot)
            if slot in self.batches:
                self.end(slot)

    def poll(self) -> None:
        for action in self.scheduler.poll(self.now):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        if isinstance(action, Fail):
            self.failed.append(action)
            return
        if isinstance(action, Warn):
            return
        assert isinstance(action, Execute)
        batches = self.batches.setdefault(action.slot, [])
        if not batches:
            self.begun.append(action.requests)
        batches.append(action.requests)
        assert len(batches) + self.unreported.get(action.slot, 0) <= 2, "more than one batch waits"

    def _take_back(self, slot: Slot) -> bool:
        batches = self.batches.get(slot, [])
        if len(batches) < 2:
            return False
        batches.pop()
        self.taken_back += 1
        return True


def dynamic(
    policy: BatchPolicy, instances: int = 1, levels: Priorities | None = None, *, prefetches: bool = True
) -> Instances:
    """Instances of a dynamic scheduler, with the queue for levels if there are any."""

    def make(take_back: TakeBack | None) -> DynamicBatchScheduler:
        return DynamicBatchScheduler(policy, instances, BatchQueue(policy, take_back, levels))

    return Instances(make, prefetches=prefetches)


def sequences(policy: SequencePolicy, instances: int = 1, *, prefetches: bool = True) -> Instances:
    """Instances of a scheduler of sequences."""
    return Instances(lambda take_back: SequenceScheduler(policy, instances, take_back), prefetches=prefetches)
