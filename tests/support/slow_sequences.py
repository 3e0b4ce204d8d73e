"""The rules of sequence scheduling in their simplest form: lists and scans of all sequences, no derived state."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from halimede.core.schedule.actions import Action, Execute, Fail, Slot, Warn
from halimede.core.schedule.policy import BatchPolicy
from halimede.core.schedule.scheduler import Outcome, Pending
from halimede.core.schedule.sequences.admission import (
    CANCELLED,
    EXPIRED,
    conflict,
    lost_state,
    missing_start,
    queue_full,
)
from halimede.core.schedule.sequences.policy import SequencePolicy
from halimede.core.types import InferenceError
from halimede.core.types.statistics import FailureReason


@dataclass(slots=True, eq=False)
class Slow:
    """A sequence. `eligible_since` is when its first request came to the queue of the oldest strategy."""

    correlation: int | str
    requests: list[tuple[Pending, int]] = field(default_factory=list)
    running: Pending | None = None
    held_slot: tuple[Slot, int] | None = None
    assigned: int = 0
    is_open: bool = True
    is_lost: bool = False
    is_closed: bool = False
    eligible_since: int | None = None
    expires: tuple[int, int] | None = None
    idle_at: int | None = None


class SlowSequences:
    def __init__(self, policy: SequencePolicy) -> None:
        self.policy = policy
        self.slots: list[Slot] = []
        self.busy: dict[Slot, list[Slow]] = {}
        self.live: list[Slow] = []
        """All sequences, those in the backlog in its order."""
        self.finished: list[Slow] = []
        self.due: list[Action] = []
        self.order: list[int] = []
        """The keys of the queued requests, in the order in which they were queued."""
        self.serial = 0
        self.arrived: dict[int, int] = {}
        self.eligible: list[Slow] = []
        """In the order of the offers."""

    @property
    def queued(self) -> int:
        return sum(len(each.requests) for each in self.live)

    def enqueue(self, pending: Pending, now: int) -> None:
        same = [each for each in self.live if each.correlation == pending.correlation and each.is_open]
        found = same[0] if same and not self.policy.iterative else None
        if not pending.sequence_start:
            if found is None:
                raise missing_start(pending.correlation, self.policy)
            if found.is_lost:
                raise lost_state(pending.correlation, self.policy)
        if self.queued >= self.policy.max_queue_size:
            raise queue_full()
        if found is not None and found.is_lost:
            self.live.remove(found)
            found = None
        if found is None:
            found = Slow(pending.correlation)
            waits = bool(self.backlog())
            self.live.append(found)
            if not waits and (held_slot := self.free_slot()):
                self.assign(found, held_slot)
        elif pending.sequence_start:
            self.due.append(Warn(conflict(pending.correlation, self.policy)))
        found.requests.append((pending, now))
        self.arrived[pending.key] = now
        self.order.append(pending.key)
        found.idle_at = None
        if pending.sequence_end or self.policy.iterative:
            found.is_open = False
        if found.held_slot is None and pending.timeout_us:
            self.serial += 1
            deadline = (now + pending.timeout_us * 1000, self.serial)
            if found.expires is None or deadline[0] < found.expires[0]:
                found.expires = deadline
        self.make_eligible(found, now)

    def backlog(self) -> list[Slow]:
        return [each for each in self.live if each.held_slot is None and each.requests]

    def free_slot(self) -> tuple[Slot, int] | None:
        taken = [each.held_slot for each in self.live if each.held_slot is not None]
        used = {slot: sum(held_slot[0] == slot for held_slot in taken) for slot in self.slots}
        for slot in sorted(self.slots, key=lambda slot: (used[slot], slot)):
            for sequence_slot in range(self.policy.sequence_slots):
                if (slot, sequence_slot) not in taken:
                    return slot, sequence_slot
        return None

    def assign(self, one: Slow, held_slot: tuple[Slot, int]) -> None:
        self.serial += 1
        one.held_slot, one.assigned, one.expires = held_slot, self.serial, None

    def make_eligible(self, one: Slow, now: int) -> None:
        """If the first request of the sequence may run, give it a place in the queue of its slot."""
        if one.held_slot is None or one.running is not None or not one.requests or one.eligible_since is not None:
            return
        one.eligible_since = now
        self.eligible.append(one)

    def poll(self, now: int) -> list[Action]:
        actions, self.due = self.due, []
        expired = [each for each in self.live if each.expires and each.expires[0] <= now]
        for one in sorted(expired, key=lambda one: one.expires or (0, 0)):
            actions += self.end(one, EXPIRED, FailureReason.EXPIRED)
        for one in self.finished:
            if self.policy.iterative and one.requests:
                one.requests[0] = (one.requests[0][0], now)
                self.arrived[one.requests[0][0].key] = now
            self.make_eligible(one, now)
            if one in self.live and one.held_slot and not one.requests and one.running is None and not one.is_closed:
                one.idle_at = now + self.policy.idle_ns
        self.finished = []
        for one in [each for each in self.live if each.idle_at is not None and each.idle_at <= now]:
            self.end(one, CANCELLED, FailureReason.CANCELED)
        while (waiting := self.backlog()) and (held_slot := self.free_slot()):
            self.assign(waiting[0], held_slot)
            self.make_eligible(waiting[0], now)
        for slot in self.idle_slots():
            batch = self.batch_of(slot, now)
            if batch:
                self.busy[slot] = batch
                actions.append(self.execute(slot, batch))
        return actions

    def idle_slots(self) -> list[Slot]:
        return [slot for slot in self.slots if slot not in self.busy]

    def batch_of(self, slot: Slot, now: int) -> list[Slow]:
        at = self.ready_at(slot)
        if at is None or at > now:
            return []
        waiting = self.waiting(slot)
        if isinstance(self.policy.strategy, BatchPolicy):
            front, preferred, _ = self.front(slot)
            return front[: preferred if preferred and not self.is_delay_over(front, now) else len(front)]
        oldest = min(waiting, key=lambda one: (one.requests[0][1], one.requests[0][0].key))
        shape = oldest.requests[0][0].compatible
        return sorted((one for one in waiting if one.requests[0][0].compatible == shape), key=sequence_slot_of)

    def waiting(self, slot: Slot) -> list[Slow]:
        return [one for one in self.eligible if one.held_slot and one.held_slot[0] == slot]

    def ready_at(self, slot: Slot) -> int | None:
        waiting, strategy = self.waiting(slot), self.policy.strategy
        if not waiting:
            return None
        if isinstance(strategy, BatchPolicy):
            front, preferred, is_closed = self.front(slot)
            if preferred or is_closed:
                return 0
            return (
                min(one.eligible_since for one in front if one.eligible_since is not None) + strategy.max_queue_delay_ns
            )
        enough = len(waiting) >= strategy.minimum_utilization * self.policy.sequence_slots
        if enough or not strategy.max_queue_delay_ns:
            return 0
        return min(one.requests[0][1] for one in waiting) + strategy.max_queue_delay_ns

    def front(self, slot: Slot) -> tuple[list[Slow], int, bool]:
        """The first requests that may share a batch, the number of them up to the last preferred size, and whether no
        other can join. Each has one row."""
        strategy = self.policy.strategy
        assert isinstance(strategy, BatchPolicy)
        sizes = strategy.preferred_batch_sizes or (strategy.max_batch_size,)
        waiting = self.waiting(slot)
        shapes = [one.requests[0][0].compatible for one in waiting]
        alike = next((at for at, shape in enumerate(shapes) if shape != shapes[0]), len(shapes))
        front = waiting[: min(alike, max(sizes))]
        preferred = max((size for size in sizes if size <= len(front)), default=0)
        return front, preferred, len(front) < len(waiting) or len(front) == max(sizes)

    def is_delay_over(self, front: list[Slow], now: int) -> bool:
        assert isinstance(self.policy.strategy, BatchPolicy)
        delay = self.policy.strategy.max_queue_delay_ns
        return delay > 0 and now >= min(one.eligible_since for one in front if one.eligible_since is not None) + delay

    def execute(self, slot: Slot, batch: list[Slow]) -> Execute:
        keys = []
        for one in batch:
            one.running = one.requests.pop(0)[0]
            one.eligible_since = None
            self.eligible.remove(one)
            self.order.remove(one.running.key)
            keys.append(one.running.key)
        return Execute(slot, tuple(keys), tuple(sequence_slot_of(one) for one in batch))

    def wake_at(self) -> int | None:
        times = [each.expires[0] for each in self.live if each.expires]
        times += [each.idle_at for each in self.live if each.idle_at is not None]
        times += [at for slot in self.idle_slots() if (at := self.ready_at(slot)) is not None]
        return min(times, default=None)

    def end(self, one: Slow, error: InferenceError, reason: FailureReason) -> list[Fail]:
        fails = [Fail(pending.key, error, reason) for pending, _ in one.requests]
        self.order = [key for key in self.order if key not in [fail.request for fail in fails]]
        one.requests, one.is_open, one.is_closed, one.idle_at, one.expires = [], False, True, None, None
        self.eligible = [each for each in self.eligible if each is not one]
        if one.running is None:
            self.live.remove(one)
        return fails

    def try_cancel(self, key: int) -> bool:
        for one in self.live:
            if one.running is not None and one.running.key == key:
                self.due += self.end(one, CANCELLED, FailureReason.CANCELED)
                return False
            if any(pending.key == key for pending, _ in one.requests):
                fails = self.end(one, CANCELLED, FailureReason.CANCELED)
                self.due += [fail for fail in fails if fail.request != key]
                return True
        return False

    def completed(self, slot: Slot, outcomes: Sequence[Outcome]) -> None:
        for one, outcome in zip(self.busy.pop(slot), outcomes, strict=True):
            pending, one.running = one.running, None
            assert pending is not None
            if one.is_closed:
                self.live.remove(one)
            elif outcome is Outcome.GONE:
                self.due += self.end(one, CANCELLED, FailureReason.CANCELED)
            elif outcome is Outcome.AGAIN:
                pending.sequence_start = False
                one.requests.insert(0, (pending, self.arrived[pending.key]))
                self.order.append(pending.key)
                self.finished.append(one)
            elif pending.sequence_end or self.policy.iterative:
                self.live.remove(one)
            else:
                self.finished.append(one)

    def add_slot(self, slot: Slot) -> None:
        self.slots.append(slot)

    def remove_slot(self, slot: Slot, unread: Sequence[Sequence[Pending]], now: int) -> list[int]:
        self.slots.remove(slot)
        self.busy.pop(slot, None)
        keys = [pending.key for batch in unread for pending in batch]
        again: list[int] = []
        returned: list[Slow] = []
        here = [each for each in self.live if each.held_slot and each.held_slot[0] == slot]
        for one in sorted(here, key=lambda one: one.assigned):
            one.held_slot, one.eligible_since = None, None
            self.eligible = [each for each in self.eligible if each is not one]
            running, one.running = one.running, None
            if running is not None and running.key in keys and running.sequence_start and not one.is_closed:
                one.requests.insert(0, (running, self.arrived[running.key]))
                self.order.append(running.key)
                again.append(running.key)
            if one.requests and one.requests[0][0].sequence_start:
                returned.append(one)
                continue
            was_open = one.is_open
            error = lost_state(one.correlation, self.policy)
            self.due += self.end(one, error, FailureReason.BACKEND)
            if was_open:
                one.is_open = one.is_lost = True
                one.idle_at = now + self.policy.idle_ns
                self.live.append(one)
        for one in returned:
            self.live.remove(one)
        self.live = sorted(returned, key=lambda one: one.requests[0][0].key) + self.live
        return again

    def drain(self) -> list[int]:
        keys = [*self.order]
        for one in [each for each in self.live if each.requests]:
            self.end(one, CANCELLED, FailureReason.CANCELED)
        return keys


def sequence_slot_of(one: Slow) -> int:
    assert one.held_slot is not None
    return one.held_slot[1]
