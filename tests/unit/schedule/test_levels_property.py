"""Random events against the queue of priority levels: a slow, obvious model must agree with it, and invariants hold."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings

from halimede.core.config.model_config import TimeoutAction
from halimede.core.schedule.actions import Action, Execute, Fail, Slot
from halimede.core.schedule.dynamic_batcher import DynamicBatchScheduler
from halimede.core.schedule.policy import BatchPolicy, Priorities
from halimede.core.schedule.queue import BatchQueue
from halimede.core.schedule.scheduler import Pending
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason
from support.batcher_events import Add, Advance, Cancel, Complete, Lose, Wake, outcome
from support.examples import Draws, drawn, examples
from support.strategies import Groups

US = 1000
TOOK = 500 * US
TIMED_OUT = InferenceError(ErrorCode.UNAVAILABLE, "Request timeout expired")
FULL = InferenceError(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")
BROKEN = InferenceError(ErrorCode.INTERNAL, "batching strategy 'Groups' failed in 'include': ValueError: 13")


@dataclass(slots=True)
class Waiting:
    pending: Pending
    enqueued_at: int
    arrival_level: int
    level: int
    """0 for a batch that did not run."""
    deadline: int | None
    moves_at: int | None
    moves_order: int = 0
    """Among moves of the same time."""
    late_since: int = 0
    """The place among the late requests of the level; 0 for a request that is not late."""
    moved: int = 0
    """The place among those that moved to this level; 0 for the level's own."""
    batch: int = 0


@dataclass(slots=True)
class SlowLevels:
    """The rules of `core.schedule.levels` with one list and linear scans, and no state beside the requests."""

    policy: BatchPolicy
    priorities: Priorities
    groups: Groups | None
    free: list[Slot]
    waiting: list[Waiting] = field(default_factory=list)
    """In the order of arrival."""
    places: int = 0

    def place(self) -> int:
        self.places += 1
        return self.places

    def policy_of(self, level: int) -> BatchPolicy:
        return self.priorities.policies.get(level, self.policy)

    def enqueue(self, pending: Pending, now: int) -> None:
        in_range = 1 <= pending.priority <= self.priorities.levels
        level = pending.priority if in_range else self.priorities.default
        policy = self.policy_of(level)
        if sum(one.arrival_level == level for one in self.waiting) >= policy.max_queue_size:
            raise FULL
        size_bytes = sum(one.pending.size_bytes for one in self.waiting) + pending.size_bytes
        if self.waiting and size_bytes > self.policy.max_queue_bytes:
            raise FULL
        timeout = policy.default_timeout_ns
        if policy.allow_timeout_override and pending.timeout_us:
            timeout = min(pending.timeout_us * US, timeout or pending.timeout_us * US)
        wait = 0 if timeout <= policy.pick_up_ns else timeout
        aging = self.priorities.aging_ns
        self.waiting.append(
            Waiting(
                *(pending, now, level, level),
                deadline=now + wait if timeout else None,
                moves_at=now + aging if aging and level > 1 else None,
                moves_order=self.place(),
            )
        )

    def push_back(self, batch: list[Pending], now: int) -> None:
        number = -self.place()
        for pending in batch:
            level = pending.priority if 1 <= pending.priority <= self.priorities.levels else self.priorities.default
            self.waiting.append(Waiting(pending, now, level, 0, None, None, batch=number))

    def poll(self, now: int) -> list[Action]:
        actions: list[Action] = []
        while due := self.due(now):
            at, is_timeout, one = due
            if not is_timeout:
                one.level -= 1
                one.moves_at = at + self.priorities.aging_ns if one.level > 1 else None
                one.moved = one.moves_order = self.place()
                one.late_since = one.moved if one.late_since else 0
            elif self.policy_of(one.arrival_level).timeout_action is TimeoutAction.DELAY:
                one.deadline, one.late_since = None, self.place()
            else:
                self.waiting.remove(one)
                actions.append(Fail(one.pending.key, TIMED_OUT, FailureReason.EXPIRED))
        broken: list[Action] = []
        while self.free:
            batch, error = self.next_batch(now)
            if not batch:
                break
            for one in batch:
                self.waiting.remove(one)
            keys = tuple(one.pending.key for one in batch)
            if error is None:
                actions.append(Execute(self.free.pop(0), keys))
            else:
                broken += [Fail(key, error, FailureReason.OTHER) for key in keys]
        return actions + broken

    def due(self, now: int) -> tuple[int, bool, Waiting] | None:
        """The first move or timeout that is due; moves come before timeouts of the same time."""
        moves = [(one.moves_at, False, at) for at, one in enumerate(self.waiting) if one.moves_at is not None]
        timeouts = [(one.deadline, True, at) for at, one in enumerate(self.waiting) if one.deadline is not None]
        due = [each for each in moves + timeouts if each[0] <= now]
        if not due:
            return None
        first, is_timeout, _ = min(due)
        alike = [self.waiting[at] for time, kind, at in due if (time, kind) == (first, is_timeout)]
        return first, is_timeout, alike[0] if is_timeout else min(alike, key=lambda one: one.moves_order)

    def in_order(self) -> Iterator[Waiting]:
        yield from sorted((one for one in self.waiting if one.level == 0), key=lambda one: one.batch)
        for level in sorted({one.level for one in self.waiting} - {0}):
            here = [one for one in self.waiting if one.level == level]
            on_time = [one for one in here if not one.late_since]
            own = [one for one in on_time if not one.moved]
            moved = sorted((one for one in on_time if one.moved), key=lambda one: one.moved)
            while own or moved:
                line = moved if not own or (moved and moved[0].enqueued_at <= own[0].enqueued_at) else own
                yield line.pop(0)
            yield from sorted((one for one in here if one.late_since), key=lambda one: one.late_since)

    def next_batch(self, now: int) -> tuple[list[Waiting], InferenceError | None]:
        queue = list(self.in_order())
        if not queue:
            return [], None
        if queue[0].level == 0:
            return [one for one in queue if one.level == 0 and one.batch == queue[0].batch], None
        preferred = self.policy.preferred_batch_sizes or (self.policy.max_batch_size,)
        group = self.groups.begin() if self.groups is not None else None
        batch: list[Waiting] = []
        rows = marked = 0
        is_closed = False
        for one in queue:
            too_large = rows + one.pending.batch_size > max(preferred)
            if batch and (too_large or one.pending.compatible != batch[0].pending.compatible):
                is_closed = True
                break
            if self.groups is not None and group is not None:
                if one.pending.size_bytes == self.groups.bad_bytes:
                    return [*batch, one], BROKEN
                is_closed = not group.takes(one.pending.size_bytes)
                if is_closed and batch:
                    break
            batch.append(one)
            rows += one.pending.batch_size
            marked = len(batch) if rows in preferred else marked
            if is_closed:
                break
        delay = self.policy.max_queue_delay_ns
        if delay and now >= min(one.enqueued_at for one in batch) + delay:
            return batch, None
        if marked:
            return batch[:marked], None
        is_ready = is_closed or not delay or rows >= max(preferred)
        return (batch, None) if is_ready else ([], None)

    def wake_at(self) -> int | None:
        times = [one.deadline for one in self.waiting if one.deadline is not None]
        if self.free and self.waiting:
            times += [one.moves_at for one in self.waiting if one.moves_at is not None]
            times.append(min(one.enqueued_at for one in self.waiting) + self.policy.max_queue_delay_ns)
        return min(times, default=None)

    def try_cancel(self, key: int) -> bool:
        before = len(self.waiting)
        self.waiting = [one for one in self.waiting if one.pending.key != key]
        return len(self.waiting) < before


@dataclass(frozen=True, slots=True)
class Enqueue:
    rows: int
    shape: str
    size_bytes: int
    timeout_us: int
    priority: int


Event = Enqueue | Cancel | Complete | Lose | Add | Advance | Wake

Script = list[tuple[Event, bool]]
EVENTS: tuple[type[Event], ...] = (
    *(Enqueue,) * 12,
    *(Cancel,) * 2,
    *(Complete,) * 3,
    *(Advance,) * 2,
    *(Wake, Add, Lose),
)


def arrival(draws: Draws) -> Enqueue:
    return Enqueue(
        draws.pick((1, 1, 1, 2, 3, 7)),
        draws.pick("aaaab"),
        draws.pick((0, 1, 4, 9, 13)),
        draws.pick((0, 0, 3, 25)),
        draws.pick((0, 1, 2, 3, 3, 9)),
    )


def event(draws: Draws) -> Event:
    kind = draws.pick(EVENTS)
    if kind is Enqueue:
        return arrival(draws)
    if kind is Cancel:
        return Cancel(draws.below(6))
    if kind is Advance:
        return Advance(draws.pick((1, US, 7 * US, 30 * US)))
    if kind is Wake:
        return Wake()
    slot = Slot(draws.below(3))
    if kind is Lose:
        return Lose(slot, draws.pick((False, True)))
    return Complete(slot) if kind is Complete else Add(slot)


def script(draws: Draws) -> Script:
    # As the pump, which does not poll after an arrival while every instance is busy.
    return [(event(draws), draws.pick((True, True, False))) for _ in range(draws.below(61))]


def arrivals(draws: Draws) -> list[Enqueue]:
    return [arrival(draws) for _ in range(1 + draws.below(40))]


def queue(draws: Draws) -> dict[str, Any]:
    return {
        "max_queue_size": draws.pick((4096, 4096, 3)),
        "timeout_action": draws.pick(tuple(TimeoutAction)),
        "default_timeout_ns": draws.pick((0, 7 * US, 30 * US)),
        "allow_timeout_override": draws.pick((False, True)),
        "pick_up_ns": draws.pick((0, 5 * US)),
    }


def policy(draws: Draws) -> BatchPolicy:
    return BatchPolicy(
        7,
        draws.pick(((), (), (4,), (2, 4), (7,), (3, 5, 7))),
        draws.pick((0, 5 * US, 20 * US)),
        max_queue_bytes=draws.pick((1 << 20, 1 << 20, 30)),
        **queue(draws),
    )


def priorities(draws: Draws) -> Priorities:
    return Priorities(
        levels=3,
        default=1 + draws.below(3),
        policies={level: BatchPolicy(**queue(draws)) for level in draws.some((1, 2, 3), 2)},
        aging_ns=draws.pick((0, 0, 4 * US, 11 * US)),
    )


class Both:
    """The scheduler and the model, compared after every event, and the invariants."""

    def __init__(self, policy: BatchPolicy, priorities: Priorities, *, has_strategy: bool) -> None:
        self.policy, self.priorities = policy, priorities
        self.groups = Groups() if has_strategy else None
        free = [Slot(0), Slot(1)]
        self.scheduler = DynamicBatchScheduler(policy, len(free), BatchQueue(policy, None, priorities, self.groups))
        self.model = SlowLevels(policy, priorities, Groups() if has_strategy else None, free)
        self.now = 0
        self.requests: dict[int, Pending] = {}
        self.ends: dict[int, str] = {}
        self.accepted: set[int] = set()
        self.running: dict[Slot, tuple[int, ...]] = {}

    def handle(self, event: Event) -> None:
        scheduler, model = self.scheduler, self.model
        match event:
            case Enqueue():
                self.enqueue(event)
            case Cancel(back):
                key = len(self.requests) - back
                is_cancelled = scheduler.try_cancel(key)
                assert is_cancelled == model.try_cancel(key)
                if is_cancelled:
                    self.end(key, "cancelled")
            case Complete(slot) if slot in self.running:
                for key in self.running.pop(slot):
                    self.end(key, "done")
                scheduler.completed(slot, TOOK)
                model.free.append(slot)
            case Lose(slot, is_unread) if slot in self.running or slot in model.free:
                keys = self.running.pop(slot, ())
                unread = [self.requests[key] for key in keys] if is_unread else []
                assert scheduler.remove_slot(slot, [unread], self.now) == [each.key for each in unread]
                model.push_back(unread, self.now)
                for key in keys if not is_unread else ():
                    self.end(key, "lost")
                model.free = [one for one in model.free if one != slot]
            case Add(slot) if slot not in self.running and slot not in model.free:
                scheduler.add_slot(slot)
                model.free.append(slot)
            case Advance(ns):
                self.now += ns
                self.poll()
            case Wake():
                self.poll()
                self.wake()

    def enqueue(self, event: Enqueue) -> None:
        key = len(self.requests) + 1
        pending = Pending(key, event.rows, event.size_bytes, event.shape, event.priority, event.timeout_us)
        self.requests[key] = pending
        mine = outcome(self.scheduler.enqueue, pending, self.now)
        assert mine == outcome(self.model.enqueue, pending, self.now)
        if mine is None:
            self.accepted.add(key)

    def end(self, key: int, how: str) -> None:
        assert key not in self.ends, f"request {key} ends twice: {self.ends[key]}, {how}"
        self.ends[key] = how

    def poll(self) -> None:
        was_free = list(self.model.free)
        before = list(self.model.in_order()) if not self.priorities.aging_ns else []
        actions = self.scheduler.poll(self.now)
        assert actions == self.model.poll(self.now)
        assert self.scheduler.poll(self.now) == []
        for action in actions:
            match action:
                case Execute(slot, keys):
                    self.check_batch(keys)
                    was_free.remove(slot)
                    self.running[slot] = keys
                case Fail(key):
                    self.end(key, "failed")
        self.check_order(before, actions)
        self.check_rest()

    def check_batch(self, keys: tuple[int, ...]) -> None:
        members = [self.requests[key] for key in keys]
        sizes = self.policy.preferred_batch_sizes or (self.policy.max_batch_size,)
        assert len(members) == 1 or sum(member.batch_size for member in members) <= max(sizes)
        assert len({member.compatible for member in members}) == 1

    def check_order(self, before: list[Waiting], actions: list[Action]) -> None:
        """Without ageing, what runs is never behind a request of a higher level that stays."""
        ran = {key for action in actions if isinstance(action, Execute) for key in action.requests}
        stays = [one.level for one in before if one.pending.key in self.waiting_keys()]
        assert all(one.level <= min(stays, default=9) for one in before if one.pending.key in ran)

    def waiting_keys(self) -> set[int]:
        return {one.pending.key for one in self.model.waiting}

    def check_rest(self) -> None:
        wake_at = self.scheduler.wake_at()
        assert wake_at == self.model.wake_at()
        assert wake_at is None or wake_at > self.now
        waiting = self.waiting_keys()
        in_service = {key for keys in self.running.values() for key in keys}
        assert waiting | in_service | self.ends.keys() == self.accepted
        assert self.scheduler.queued == len(waiting)
        oldest = next((one.enqueued_at for one in self.model.waiting), None)
        assert self.scheduler.oldest_enqueued_at() == oldest
        if self.model.free and oldest is not None:
            assert self.now < oldest + self.policy.max_queue_delay_ns, "an instance is free and work is due"

    def wake(self) -> None:
        at = self.scheduler.wake_at()
        if at is None:
            self.now += 1000 * US
            self.poll()
            return
        self.now = at - 1
        self.poll()
        assert self.scheduler.wake_at() == at, "nothing was due a nanosecond early"
        self.now = at
        queued = self.scheduler.queued
        self.poll()
        moved_on = self.scheduler.wake_at()
        assert moved_on is None or moved_on > at or self.scheduler.queued < queued, "there was something to do"


@settings(max_examples=examples(400), deadline=None)
@given(drawn(lambda draws: (policy(draws), priorities(draws), draws.pick((False, True)), script(draws)), 520))
def test_levels_agree_with_the_rules(case: tuple[BatchPolicy, Priorities, bool, Script]):
    policy, priorities, has_strategy, script = case
    both = Both(policy, priorities, has_strategy=has_strategy)
    for event, then_poll in script:
        both.handle(event)
        if then_poll:
            both.poll()

    assert both.scheduler.drain() == [one.pending.key for one in both.model.waiting]
    assert both.scheduler.queued == 0


@settings(max_examples=examples(100), deadline=None)
@given(drawn(lambda draws: (policy(draws), priorities(draws), draws.pick((False, True)), arrivals(draws)), 240))
def test_every_request_leaves_when_only_the_timer_polls(case: tuple[BatchPolicy, Priorities, bool, list[Enqueue]]):
    policy, priorities, has_strategy, arrivals = case
    both = Both(policy, priorities, has_strategy=has_strategy)
    for arrival in arrivals:
        both.enqueue(arrival)
    while both.scheduler.queued:
        both.poll()
        for slot in list(both.running):
            both.handle(Complete(slot))
        both.poll()
        both.now = max(both.now, both.scheduler.wake_at() or 0)
    for slot in list(both.running):
        both.handle(Complete(slot))

    assert both.ends.keys() == both.accepted
