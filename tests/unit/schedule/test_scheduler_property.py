"""Random scripts of events against the batcher: a slow, obvious model must agree with it, and invariants must hold."""

from dataclasses import dataclass, replace
from itertools import accumulate

from hypothesis import given, settings

from halimede.core.config.model_config import TimeoutAction
from halimede.core.schedule.actions import Action, Execute, Fail, Slot
from halimede.core.schedule.dynamic_batcher import DynamicBatchScheduler
from halimede.core.schedule.expected_batch import MIN_REQUESTS
from halimede.core.schedule.policy import BatchPolicy
from halimede.core.schedule.scheduler import Pending
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason
from support.batcher_events import Add, Advance, Cancel, Complete, Lose, Wake, outcome
from support.examples import Draws, drawn, examples

US = 1000
TOOK = 500 * US
TIMED_OUT = InferenceError(ErrorCode.UNAVAILABLE, "Request timeout expired")
FULL = InferenceError(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")


@dataclass(slots=True)
class Waiting:
    pending: Pending
    enqueued_at: int
    deadline: int | None
    arrival: int
    begins: bool = False
    is_late: bool = False


class SlowScheduler:
    """The rules in their simplest form: lists and linear scans, without derived state."""

    def __init__(self, policy: BatchPolicy, instances: int) -> None:
        self.policy = policy
        self.preferred = policy.preferred_batch_sizes or (policy.max_batch_size,)
        self.free = [Slot(instance) for instance in range(instances)]
        self.returned: list[list[Waiting]] = []
        self.waiting: list[Waiting] = []
        """In order: first those on time, then the late ones."""
        self.arrivals = 0

    def everyone(self) -> list[Waiting]:
        return sorted(sum(self.returned, self.waiting), key=lambda one: one.arrival)

    def push_back(self, batch: list[Pending], now: int) -> None:
        """A batch that did not run: before all others, and not cut again."""
        again = [Waiting(pending, now, None, self.arrivals + at) for at, pending in enumerate(batch)]
        self.arrivals += len(batch)
        if again:
            self.returned.insert(0, again)

    def enqueue(self, pending: Pending, now: int) -> None:
        here = self.everyone()
        size_bytes = sum(one.pending.size_bytes for one in here) + pending.size_bytes
        if len(here) >= self.policy.max_queue_size or (here and size_bytes > self.policy.max_queue_bytes):
            raise FULL
        on_time = [one for one in self.waiting if not one.is_late]
        front, _, is_closed = self.front()
        is_too_large = sum(one.pending.batch_size for one in front) + pending.batch_size > max(self.preferred)
        begins = bool(self.free and on_time) and not is_closed and is_too_large
        self.waiting.insert(len(on_time), Waiting(pending, now, self.deadline(pending, now), self.arrivals, begins))
        self.arrivals += 1

    def deadline(self, pending: Pending, now: int) -> int | None:
        timeout = self.policy.default_timeout_ns
        if self.policy.allow_timeout_override and pending.timeout_us > 0:
            asked = pending.timeout_us * US
            timeout = asked if timeout == 0 else min(asked, timeout)
        if timeout and timeout <= self.policy.pick_up_ns:
            return now
        return now + timeout if timeout else None

    def poll(self, now: int) -> list[Action]:
        actions: list[Action] = []
        due = [one for one in self.waiting if one.deadline is not None and one.deadline <= now]
        for one in sorted(due, key=lambda one: (one.deadline, one.pending.key)):
            self.waiting.remove(one)
            if self.policy.timeout_action is TimeoutAction.DELAY:
                one.deadline, one.is_late = None, True
                self.waiting.append(one)
            else:
                actions.append(Fail(one.pending.key, TIMED_OUT, FailureReason.EXPIRED))
        while self.free and (batch := self.next_batch(now)):
            actions.append(Execute(self.free.pop(0), tuple(one.pending.key for one in batch)))
        return actions

    def next_batch(self, now: int) -> list[Waiting]:
        if self.returned:
            return self.returned.pop(0)
        batch, preferred, is_closed = self.front()
        delay = self.policy.max_queue_delay_ns
        is_over = bool(batch) and now >= min(one.enqueued_at for one in batch) + delay
        if preferred and not (delay and is_over):
            batch = preferred
        elif not is_closed and not is_over:
            batch = []
        self.waiting = self.waiting[len(batch) :]
        return batch

    def front(self) -> tuple[list[Waiting], list[Waiting], bool]:
        """The first requests that may run together, those of them up to the last preferred size, and whether no other
        can join."""
        batch: list[Waiting] = []
        preferred: list[Waiting] = []
        rows = 0
        for one in self.waiting:
            rows += one.pending.batch_size
            if batch and (
                one.begins or rows > self.policy.max_batch_size or one.pending.compatible != batch[0].pending.compatible
            ):
                return batch, preferred, True
            batch.append(one)
            if rows in self.preferred:
                preferred = list(batch)
            if rows >= max(self.preferred):
                return batch, preferred, True
        return batch, preferred, False

    def wake_at(self) -> int | None:
        times = [one.deadline for one in self.waiting if one.deadline is not None]
        if self.free and self.waiting:
            times.append(min(one.enqueued_at for one in self.front()[0]) + self.policy.max_queue_delay_ns)
        return min(times, default=None)

    def try_cancel(self, key: int) -> bool:
        before = len(self.everyone())
        self.waiting = [one for one in self.waiting if one.pending.key != key]
        returned = [[one for one in batch if one.pending.key != key] for batch in self.returned]
        self.returned = [batch for batch in returned if batch]
        return len(self.everyone()) < before


@dataclass(frozen=True, slots=True)
class Enqueue:
    rows: int
    shape: str
    size_bytes: int
    timeout_us: int


@dataclass(frozen=True, slots=True)
class StartOrEnqueue:
    """An arrival that is queued only if it cannot be started at once."""

    arrival: Enqueue


Event = Enqueue | StartOrEnqueue | Cancel | Complete | Add | Lose | Advance | Wake

Script = list[tuple[Event, bool]]
# Queues fill only where arrivals outnumber everything else.
EVENTS: tuple[type[Event], ...] = (
    *(Enqueue,) * 10,
    *(StartOrEnqueue,) * 3,
    *(Cancel,) * 3,
    *(Complete,) * 2,
    *(Advance,) * 2,
    *(Wake, Add, Lose),
)


def arrival(draws: Draws) -> Enqueue:
    return Enqueue(
        draws.pick((1, 1, 2, 3, 6)),
        draws.pick("aaab"),
        draws.below(10),
        draws.pick((0, 0, 3, 25)),
    )


def event(draws: Draws) -> Event:
    kind = draws.pick(EVENTS)
    if kind is Enqueue:
        return arrival(draws)
    if kind is StartOrEnqueue:
        return StartOrEnqueue(arrival(draws))
    if kind is Cancel:
        return Cancel(draws.below(6))
    if kind is Advance:
        return Advance(draws.pick((1, US, 7 * US, 30 * US)))
    if kind is Wake:
        return Wake()
    instance = Slot(draws.below(3))
    if kind is Lose:
        return Lose(instance, draws.pick((False, True)))
    return Complete(instance) if kind is Complete else Add(instance)


def script(draws: Draws) -> Script:
    # The pump polls after most events, and not after an arrival while every instance is busy.
    return [(event(draws), draws.pick((True, True, False))) for _ in range(draws.below(61))]


def arrivals(draws: Draws) -> list[Enqueue]:
    return [arrival(draws) for _ in range(1 + draws.below(40))]


def policy(draws: Draws) -> BatchPolicy:
    return BatchPolicy(
        max_batch_size=6,
        preferred_batch_sizes=draws.pick(((), (4,), (2, 4), (6,), (3, 5, 6))),
        max_queue_delay_ns=draws.pick((0, 5 * US, 20 * US)),
        max_queue_size=draws.pick((4096, 4096, 4096, 3)),
        max_queue_bytes=draws.pick((1 << 20, 1 << 20, 1 << 20, 12)),
        timeout_action=draws.pick(tuple(TimeoutAction)),
        default_timeout_ns=draws.pick((0, 7 * US, 30 * US)),
        allow_timeout_override=draws.pick((False, True)),
        pick_up_ns=draws.pick((0, 5 * US)),
    )


class Both:
    """The batcher and the model, compared after every event, and the invariants."""

    def __init__(self, policy: BatchPolicy, instances: int) -> None:
        self.policy = policy
        self.batcher = DynamicBatchScheduler(policy, instances)
        self.model = SlowScheduler(policy, instances)
        self.now = 0
        self.requests: dict[int, Pending] = {}
        self.entered: dict[int, int] = {}
        self.left: list[int] = []
        self.again: set[int] = set()
        self.expects_others = False
        """Whether enough requests are expected together to be worth waiting for."""
        self.running: dict[Slot, tuple[int, ...]] = {}
        self.idle = {Slot(instance) for instance in range(instances)}

    def handle(self, event: Event) -> None:
        match event:
            case StartOrEnqueue(arrival):
                self.start_or_enqueue(arrival)
            case Enqueue():
                pending = self.arrived(event)
                key = pending.key
                mine = outcome(self.batcher.enqueue, pending, self.now)
                assert mine == outcome(self.model.enqueue, pending, self.now)
                if mine is None:
                    self.entered[key] = self.now
            case Cancel(back):
                key = len(self.requests) - back
                cancelled = self.batcher.try_cancel(key)
                assert cancelled == self.model.try_cancel(key)
                if cancelled:
                    self.left.append(key)
            case Complete(instance):
                if instance in self.running:
                    in_model = len(self.model.everyone()) + sum(map(len, self.running.values()))
                    share = in_model // (len(self.running) + len(self.idle))
                    self.expects_others = min(share, self.policy.max_batch_size) >= MIN_REQUESTS
                turns = self.batcher.completed(instance, TOOK)
                assert (turns is not None) == bool(self.model.everyone())
                if self.running.pop(instance, None):
                    self.set_free(instance)
            case Add(instance):
                if instance not in self.idle and instance not in self.running:
                    self.batcher.add_slot(instance)
                    self.set_free(instance)
            case Lose(instance, is_unread):
                keys = self.running.pop(instance, ())
                unread = [self.requests[key] for key in keys] if is_unread else []
                assert self.batcher.remove_slot(instance, [unread], self.now) == [each.key for each in unread]
                self.model.push_back(unread, self.now)
                self.come_back([each.key for each in unread])
                self.idle.discard(instance)
                self.model.free = [one for one in self.model.free if one != instance]
            case Advance(ns):
                self.now += ns
                self.poll()
            case Wake():
                self.poll()
                self.wake()

    def arrived(self, arrival: Enqueue) -> Pending:
        key = len(self.requests) + 1
        self.requests[key] = Pending(
            key, arrival.rows, arrival.size_bytes, arrival.shape, timeout_us=arrival.timeout_us
        )
        return self.requests[key]

    def start_or_enqueue(self, arrival: Enqueue) -> None:
        if self.model.everyone() or not self.model.free:
            assert self.batcher.try_start(arrival.rows, arrival.timeout_us) is None
            self.handle(arrival)
            return
        instance = self.batcher.try_start(arrival.rows, arrival.timeout_us)
        if instance is None:
            self.handle(arrival)
            if not self.expects_others and not self.policy.expires_at_once(arrival.timeout_us):
                assert self.model.poll(self.now) == [], "it would not have been started by a poll either"
            return
        pending = self.arrived(arrival)
        self.model.enqueue(pending, self.now)
        assert self.model.poll(self.now) == [Execute(instance, (pending.key,))]
        self.entered[pending.key] = self.now
        self.idle.remove(instance)
        self.running[instance] = (pending.key,)
        self.left.append(pending.key)

    def come_back(self, keys: list[int]) -> None:
        self.again.update(keys)
        self.left = [key for key in self.left if key not in keys]
        self.entered |= dict.fromkeys(keys, self.now)

    def set_free(self, instance: Slot) -> None:
        self.idle.add(instance)
        self.model.free.append(instance)

    def poll(self) -> None:
        actions = self.batcher.poll(self.now)
        assert actions == self.model.poll(self.now)
        assert self.batcher.poll(self.now) == []
        for action in actions:
            match action:
                case Execute(instance, keys):
                    self.check_batch(keys)
                    self.idle.remove(instance)
                    self.running[instance] = keys
                    self.left += keys
                case Fail(key):
                    self.left.append(key)
        self.check_rest()

    def wake(self) -> None:
        at = self.batcher.wake_at()
        if at is None:
            self.now += 1000 * US
            assert self.batcher.poll(self.now) == []
            return
        self.now = at - 1
        self.poll()
        assert self.batcher.wake_at() == at, "nothing was due a nanosecond early"
        self.now = at
        queued = self.batcher.queued
        self.poll()
        moved_on = self.batcher.wake_at()
        assert moved_on is None or moved_on > at or self.batcher.queued < queued, "there was something to do"

    def check_batch(self, keys: tuple[int, ...]) -> None:
        members = [self.requests[key] for key in keys]
        assert sum(member.batch_size for member in members) <= self.policy.max_batch_size
        assert len({member.compatible for member in members}) == 1
        if self.policy.timeout_action is TimeoutAction.REJECT:
            gone = {key for ran in self.running.values() for key in ran} - self.again
            assert all(key > ran for key in set(keys) - self.again for ran in gone), "arrival order"

    def check_rest(self) -> None:
        assert self.batcher.wake_at() == self.model.wake_at()
        wake_at = self.batcher.wake_at()
        assert wake_at is None or wake_at > self.now
        assert sorted(self.left) == sorted(set(self.left)), "no request leaves twice"
        waiting = sorted(self.entered.keys() - set(self.left))
        assert self.batcher.queued == len(waiting)
        oldest = min((self.entered[key] for key in waiting), default=None)
        assert self.batcher.oldest_enqueued_at() == oldest
        if self.idle and oldest is not None:
            assert self.now < oldest + self.policy.max_queue_delay_ns, "idle beside work that is due"
            rows = list(accumulate(one.pending.batch_size for one in self.model.waiting))
            assert not {*rows} & {*self.model.preferred}, "idle beside a preferred size"


@settings(max_examples=examples(400), deadline=None)
@given(drawn(lambda draws: (policy(draws), draws.below(4), script(draws)), 440))
def test_the_batcher_agrees_with_the_rules(case: tuple[BatchPolicy, int, Script]):
    policy, count, script = case
    both = Both(policy, count)
    for event, then_poll in script:
        both.handle(event)
        if then_poll:
            both.poll()

    assert both.batcher.drain() == [one.pending.key for one in both.model.everyone()]
    assert both.batcher.queued == 0


@settings(max_examples=examples(100), deadline=None)
@given(drawn(lambda draws: (policy(draws), 1 + draws.below(3), arrivals(draws)), 180))
def test_every_request_leaves_when_only_the_timer_polls(case: tuple[BatchPolicy, int, list[Enqueue]]):
    policy, count, arrivals = case
    scheduler = DynamicBatchScheduler(replace(policy, max_queue_size=4096, max_queue_bytes=1 << 20), count)
    for key, arrival in enumerate(arrivals):
        scheduler.enqueue(
            Pending(key, arrival.rows, arrival.size_bytes, arrival.shape, timeout_us=arrival.timeout_us), key
        )
    now, left = len(arrivals), list[int]()
    while scheduler.queued:
        for action in scheduler.poll(now):
            match action:
                case Execute(instance, keys):
                    left += keys
                    scheduler.completed(instance, TOOK)
                case Fail(key):
                    left.append(key)
        wake_at = scheduler.wake_at()
        assert wake_at is not None or not scheduler.queued
        now = max(now, wake_at or 0)

    assert sorted(left) == list(range(len(arrivals)))
