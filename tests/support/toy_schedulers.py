"""Minimal schedulers of planned kinds. Each satisfies the contract of `Scheduler`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from halimede.core.deadlines import Deadlines
from halimede.core.schedule.actions import Action, Execute, Fail, Slot
from halimede.core.schedule.scheduler import Outcome, Pending
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason

LOST = InferenceError(ErrorCode.INTERNAL, "the state of the sequence was lost")
EXPIRED = InferenceError(ErrorCode.UNAVAILABLE, "Request timeout expired")
FULL = InferenceError(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")


class Fifo:
    """One queue in order of arrival, and one batch at a time per slot. The other schedulers override parts of it."""

    max_batch_size = 4
    may_expire = False
    follows_outcomes = False
    depth = 1
    """Number of batches that a slot has at a time."""

    def __init__(self) -> None:
        self.waiting: dict[int, Pending] = {}
        self.given: dict[Slot, list[Execute]] = {}

    def enqueue(self, pending: Pending, now_ns: int) -> int | None:
        self.waiting[pending.key] = pending
        return 1

    def try_start(self, batch_size: int) -> Slot | None:
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

    def drain(self) -> list[int]:
        keys = list(self.waiting)
        self.waiting.clear()
        return keys

    @property
    def queued(self) -> int:
        return len(self.waiting)

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
            expired.append(Fail(key, EXPIRED, FailureReason.REJECTED))
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


class Iterative(Fifo):
    """A request is executed until its model finishes it, always in the slot that has its state."""

    follows_outcomes = True

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[int, Pending] = {}
        self.home: dict[int, Slot] = {}
        """Slots of requests that were executed before."""
        self.lost: list[int] = []

    def poll(self, now_ns: int) -> list[Action]:
        actions: list[Action] = [
            Fail(key, LOST, FailureReason.OTHER) for key in self.lost if self.waiting.pop(key, None)
        ]
        self.lost.clear()
        for slot, given in self.given.items():
            if not given and (keys := self.next_batch(slot)):
                actions.append(self.give(Execute(slot, keys)))
        return actions

    def next_batch(self, slot: Slot) -> tuple[int, ...]:
        keys = [key for key in self.waiting if self.home.get(key, slot) == slot][: self.max_batch_size]
        for key in keys:
            self.running[key] = self.waiting.pop(key)
        return tuple(keys)

    def completed(self, slot: Slot, took_ns: int, outcomes: Sequence[Outcome] = ()) -> int | None:
        if self.given.get(slot):
            for key, outcome in zip(self.given[slot][0].requests, outcomes, strict=True):
                pending = self.running.pop(key)
                self.home.pop(key, None)
                if outcome is Outcome.AGAIN:
                    self.waiting[key] = pending
                    self.home[key] = slot
        return super().completed(slot, took_ns)

    def remove_slot(self, slot: Slot, unread: Sequence[Sequence[Pending]], now_ns: int) -> Collection[int]:
        for batch in self.given.get(slot, ()):
            for key in batch.requests:
                del self.running[key]
        fresh = [[each for each in batch if each.key not in self.home] for batch in unread]
        self.lost += [key for key, home in self.home.items() if home == slot and key in self.waiting]
        self.home = {key: home for key, home in self.home.items() if home != slot}
        return super().remove_slot(slot, fresh, now_ns)

    def try_cancel(self, key: int) -> bool:
        if key in self.waiting:
            self.home.pop(key, None)
        return super().try_cancel(key)


@dataclass(slots=True)
class Sequenced:
    """A sequence: the slot of its state, its requests in order, the running one, and whether a worker has received one."""

    place: tuple[Slot, int] | None = None
    waiting: list[Pending] = field(default_factory=list)
    running: Pending | None = None
    has_state: bool = False
    is_lost: bool = False


class DirectSequences(Fifo):
    """A sequence occupies one position of one slot, from its first request to its last.

    It ends, too, when it was idle for `idle_ns`: no request waits or runs. `completed` does not get the time, so the
    idle time begins with the poll that follows.
    """

    follows_outcomes = True
    positions = 2

    def __init__(self, idle_ns: int = 1_000_000_000) -> None:
        super().__init__()
        self.sequences: dict[int | str, Sequenced] = {}
        self.idle_ns = idle_ns
        self.idle = Deadlines[int | str]()
        self.newly_idle: set[int | str] = set()
        """Idle sequences that the next poll gives a deadline."""

    @property
    def queued(self) -> int:
        return sum(len(each.waiting) for each in self.sequences.values())

    def enqueue(self, pending: Pending, now_ns: int) -> int | None:
        if pending.sequence_start:
            self.sequences.setdefault(pending.correlation, Sequenced())
        sequence = self.sequences.get(pending.correlation)
        if sequence is None or sequence.is_lost:
            raise InferenceError(ErrorCode.INVALID_ARG, "the request belongs to no sequence that has begun")
        sequence.waiting.append(pending)
        self.newly_idle.discard(pending.correlation)
        self.idle.discard(pending.correlation)
        return 1

    def wake_at(self) -> int | None:
        return self.idle.next()

    def poll(self, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        for correlation in self.idle.pop_due(now_ns):
            del self.sequences[correlation]
        for correlation in self.newly_idle:
            self.idle.add(correlation, now_ns + self.idle_ns)
        self.newly_idle.clear()
        for correlation, sequence in list(self.sequences.items()):
            if sequence.is_lost:
                actions += [Fail(each.key, LOST, FailureReason.OTHER) for each in sequence.waiting]
                sequence.waiting.clear()
                if sequence.running is None:
                    del self.sequences[correlation]
        self.place_waiting()
        for slot, given in self.given.items():
            if not given and (ready := self.ready_in(slot)):
                actions.append(self.give(self.batch_of(slot, ready)))
        return actions

    def place_waiting(self) -> None:
        taken = {each.place for each in self.sequences.values()}
        free = [(slot, at) for slot in self.given for at in range(self.positions) if (slot, at) not in taken]
        for sequence in [each for each in self.sequences.values() if each.place is None and not each.is_lost]:
            if free:
                sequence.place = free.pop(0)

    def ready_in(self, slot: Slot) -> dict[int, Sequenced]:
        """The sequences with a request for the slot, by position."""
        return {
            each.place[1]: each
            for each in self.sequences.values()
            if each.place is not None and each.place[0] == slot and each.waiting and not each.is_lost
        }

    def batch_of(self, slot: Slot, ready: dict[int, Sequenced]) -> Execute:
        """The next request of each sequence, in the order of the positions."""
        seats = tuple(sorted(ready))
        return Execute(slot, tuple(self.take(ready[seat]) for seat in seats), seats)

    def take(self, sequence: Sequenced) -> int:
        pending = sequence.running = sequence.waiting.pop(0)
        return pending.key

    def completed(self, slot: Slot, took_ns: int, outcomes: Sequence[Outcome] = ()) -> int | None:
        if self.given.get(slot):
            for key, outcome in zip(self.given[slot][0].requests, outcomes, strict=True):
                correlation, sequence = self.sequence_running(key)
                pending, sequence.running = sequence.running, None
                sequence.has_state = True
                if outcome is Outcome.GONE:
                    sequence.is_lost = True
                    sequence.place = None
                elif pending is not None and pending.sequence_end:
                    del self.sequences[correlation]
                elif not sequence.waiting and not sequence.is_lost:
                    self.newly_idle.add(correlation)
        return super().completed(slot, took_ns)

    def sequence_running(self, key: int) -> tuple[int | str, Sequenced]:
        return next(
            (correlation, each)
            for correlation, each in self.sequences.items()
            if each.running is not None and each.running.key == key
        )

    def remove_slot(self, slot: Slot, unread: Sequence[Sequence[Pending]], now_ns: int) -> Collection[int]:
        self.given.pop(slot, None)
        fresh = {pending.key for batch in unread for pending in batch}
        again = []
        for correlation, sequence in self.sequences.items():
            if sequence.place is None or sequence.place[0] != slot:
                continue
            running, sequence.running, sequence.place = sequence.running, None, None
            if sequence.has_state or (running is not None and running.key not in fresh):
                sequence.is_lost = True
                self.newly_idle.discard(correlation)
                self.idle.discard(correlation)
            elif running is not None:
                sequence.waiting.insert(0, running)
                again.append(running.key)
        return again

    def try_cancel(self, key: int) -> bool:
        for sequence in self.sequences.values():
            if any(each.key == key for each in sequence.waiting):
                sequence.waiting = [each for each in sequence.waiting if each.key != key]
                sequence.is_lost = True
                return True
        return False

    def drain(self) -> list[int]:
        keys = [each.key for sequence in self.sequences.values() for each in sequence.waiting]
        for sequence in self.sequences.values():
            sequence.is_lost |= bool(sequence.waiting)
            sequence.waiting.clear()
        return keys


class OldestSequences(DirectSequences):
    """A slot has several candidate sequences; a batch has at most one request of each, the oldest first."""

    positions = 6

    def batch_of(self, slot: Slot, ready: dict[int, Sequenced]) -> Execute:
        oldest = sorted(ready, key=lambda seat: ready[seat].waiting[0].key)[: self.max_batch_size]
        return Execute(slot, tuple(self.take(ready[seat]) for seat in oldest), tuple(oldest))
