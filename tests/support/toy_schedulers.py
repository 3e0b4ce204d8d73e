"""Minimal schedulers of planned kinds. Each satisfies the contract of `Scheduler`."""

from collections.abc import Callable, Collection, Mapping, Sequence

from halimede.core.deadlines import Deadlines
from halimede.core.schedule.actions import Action, Execute, Fail, Slot
from halimede.core.schedule.scheduler import Outcome, Pending
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason, SequenceCount

EXPIRED = InferenceError(ErrorCode.UNAVAILABLE, "Request timeout expired")
FULL = InferenceError(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")


class Fifo:
    """One queue in order of arrival, and one batch at a time per slot. The other schedulers override parts of it."""

    max_batch_size = 4
    may_expire = False
    follows_outcomes = False
    is_iterative = False
    has_null_rows = False
    depth = 1
    """Number of batches that a slot has at a time."""

    def __init__(self) -> None:
        self.waiting: dict[int, Pending] = {}
        self.given: dict[Slot, list[Execute]] = {}

    def enqueue(self, pending: Pending, now_ns: int) -> int | None:
        self.waiting[pending.key] = pending
        return 1

    def try_start(self, batch_size: int, timeout_us: int = 0) -> Slot | None:
        return None

    def poll(self, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        while slot := next((slot for slot, given in self.given.items() if len(given) < self.depth), None):
            keys = self.next_batch(slot)
            if not keys:
                break
            actions.append(self.give(Execute(slot, keys)))
        return actions

    def next_batch(self, slot: Slot) -> tuple[int, ...]:
        keys = tuple(self.waiting)[: self.max_batch_size]
        for key in keys:
            del self.waiting[key]
        return keys

    def give(self, batch: Execute) -> Execute:
        self.given[batch.slot].append(batch)
        return batch

    def wake_at(self) -> int | None:
        return None

    def awaited_slot(self, key: int) -> Slot | None:
        return None

    def try_cancel(self, key: int) -> bool:
        return self.waiting.pop(key, None) is not None

    def completed(self, slot: Slot, took_ns: int, outcomes: Sequence[Outcome] = ()) -> int | None:
        if self.given.get(slot):
            self.given[slot].pop(0)
        return 1

    def add_slot(self, slot: Slot) -> None:
        self.given[slot] = []

    def remove_slot(self, slot: Slot, unread: Sequence[Sequence[Pending]], now_ns: int) -> Collection[int]:
        self.given.pop(slot, None)
        again = {pending.key: pending for batch in unread for pending in batch}
        self.waiting = again | self.waiting
        return list(again)

    def expect_few(self, now_ns: int) -> None:
        pass

    def expect_no_more(self) -> None:
        pass

    def drain(self) -> list[int]:
        keys = list(self.waiting)
        self.waiting.clear()
        return keys

    @property
    def queued(self) -> int:
        return len(self.waiting)

    def sequences(self) -> SequenceCount | None:
        return None

    def oldest_enqueued_at(self) -> int | None:
        return 0 if self.queued else None


class Priorities(Fifo):
    """The lowest priority number first; order of arrival within a priority. Each has a bound, and may have a timeout.

    A request that returns from a dead worker has no deadline any more.
    """

    may_expire = True

    def __init__(self, timeouts_ns: Mapping[int, int] | None = None, max_queue_size: int = 4096) -> None:
        super().__init__()
        self.timeouts_ns = timeouts_ns or {}
        self.max_queue_size = max_queue_size
        self.deadlines = Deadlines[int]()

    def enqueue(self, pending: Pending, now_ns: int) -> int | None:
        level = pending.priority
        if sum(each.priority == level for each in self.waiting.values()) >= self.max_queue_size:
            raise FULL
        if level in self.timeouts_ns:
            self.deadlines.add(pending.key, now_ns + self.timeouts_ns[level])
        return super().enqueue(pending, now_ns)

    def poll(self, now_ns: int) -> list[Action]:
        expired: list[Action] = []
        for key in self.deadlines.pop_due(now_ns):
            del self.waiting[key]
            expired.append(Fail(key, EXPIRED, FailureReason.EXPIRED))
        return expired + super().poll(now_ns)

    def next_batch(self, slot: Slot) -> tuple[int, ...]:
        self.waiting = dict(sorted(self.waiting.items(), key=lambda item: item[1].priority))
        keys = super().next_batch(slot)
        for key in keys:
            self.deadlines.discard(key)
        return keys

    def wake_at(self) -> int | None:
        return self.deadlines.next()

    def try_cancel(self, key: int) -> bool:
        self.deadlines.discard(key)
        return super().try_cancel(key)

    def drain(self) -> list[int]:
        self.deadlines.clear()
        return super().drain()


class DepthTwo(Fifo):
    """A slot has one running batch, and one that waits in the worker."""

    depth = 2


class Limiter:
    """Resource units that several models share."""

    def __init__(self, units: int) -> None:
        self.free = units
        self.refused: dict[object, Callable[[], None]] = {}

    def try_take(self, who: object, wake: Callable[[], None]) -> bool:
        if not self.free:
            self.refused[who] = wake
            return False
        self.free -= 1
        return True

    def give_back(self) -> None:
        self.free += 1
        refused, self.refused = self.refused, {}
        for wake in refused.values():
            wake()


class RateLimited(Fifo):
    """An execution takes a unit of a limiter; refused schedulers are woken when a unit is released."""

    def __init__(self, limiter: Limiter) -> None:
        super().__init__()
        self.limiter = limiter
        self.wake: Callable[[], None] = lambda: None
        """Set to the pump's `wake`."""

    def next_batch(self, slot: Slot) -> tuple[int, ...]:
        if not self.waiting or not self.limiter.try_take(self, self.wake):
            return ()
        return super().next_batch(slot)

    def completed(self, slot: Slot, took_ns: int, outcomes: Sequence[Outcome] = ()) -> int | None:
        if self.given.get(slot):
            self.limiter.give_back()
        return super().completed(slot, took_ns)

    def remove_slot(self, slot: Slot, unread: Sequence[Sequence[Pending]], now_ns: int) -> Collection[int]:
        for _ in self.given.get(slot, ()):
            self.limiter.give_back()
        return super().remove_slot(slot, unread, now_ns)
