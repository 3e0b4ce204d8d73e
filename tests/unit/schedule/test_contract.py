"""Every kind of scheduler under random events: each queued key leaves once, and each execution ends once."""

from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given, settings

from halimede.core.schedule.actions import Execute, Fail, Slot
from halimede.core.schedule.dynamic_batcher import DynamicBatchScheduler
from halimede.core.schedule.policy import BatchPolicy
from halimede.core.schedule.policy import Priorities as Levels
from halimede.core.schedule.queue import BatchQueue
from halimede.core.schedule.scheduler import Outcome, Pending, Scheduler
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason
from support.examples import drawn
from support.refusals import error_of
from support.sequence_requests import direct, oldest
from support.toy_schedulers import (
    EXPIRED,
    FULL,
    DepthTwo,
    Fifo,
    Limiter,
    Priorities,
    RateLimited,
)

TIMEOUT_NS, IDLE_NS = 5, 4


def levels_of(policy: BatchPolicy) -> DynamicBatchScheduler:
    return DynamicBatchScheduler(policy, queue=BatchQueue(policy, priorities=Levels(2, 2)))


TIMEOUTS_NS = {0: 2 * TIMEOUT_NS, 1: TIMEOUT_NS}
KINDS: dict[str, Callable[[], Scheduler]] = {
    "dynamic": lambda: DynamicBatchScheduler(BatchPolicy(max_batch_size=4)),
    "dynamic with a timeout": lambda: DynamicBatchScheduler(BatchPolicy(4, default_timeout_ns=TIMEOUT_NS)),
    "dynamic with levels": lambda: levels_of(BatchPolicy(max_batch_size=4)),
    "dynamic with levels and a timeout": lambda: levels_of(BatchPolicy(4, default_timeout_ns=TIMEOUT_NS)),
    "fifo": Fifo,
    "priorities": lambda: Priorities(TIMEOUTS_NS, max_queue_size=3),
    "depth two": DepthTwo,
    "rate limited": lambda: RateLimited(Limiter(1)),
    "iterative sequences": lambda: SequenceScheduler(oldest(sequence_slots=3, idle_ns=IDLE_NS, iterative=True)),
    "direct sequences": lambda: SequenceScheduler(direct(idle_ns=IDLE_NS)),
    "oldest sequences": lambda: SequenceScheduler(oldest(sequence_slots=3, idle_ns=IDLE_NS)),
}
EVENTS = (
    "add",
    "enqueue",
    "enqueue",
    "enqueue",
    "complete",
    "complete",
    "again",
    "gone",
    "cancel",
    "lose",
    "lose unread",
    "drain",
    "wait",
    "wait",
)
Toy = TypeVar("Toy", bound=Scheduler)
SLOTS = tuple(Slot(instance, number) for instance in range(2) for number in range(2))


class Driver:
    """Acts as the pump, and checks that the scheduler keeps the contract."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.requests: dict[int, Pending] = {}
        self.queued: set[int] = set()
        self.running: dict[Slot, list[Execute]] = {}
        self.ends: dict[int, str] = {}
        """How each request left the scheduler."""
        self.sequences: dict[int, int] = {}
        """The correlation of each client's sequence that has not ended: no two sequences have the same."""
        self.cancelled: set[int] = set()
        self.now = 0
        self.deadlines: dict[int, int] = {}
        """Of queued requests by key, unless they return from a dead worker."""
        self.sequence_slots: dict[int | str, tuple[Slot, int]] = {}
        """Where a request of the sequence was executed last."""

    def handle(self, event: str, pick: int) -> None:
        slot = SLOTS[pick % len(SLOTS)]
        match event:
            case "enqueue":
                self.enqueue(pick)
            case "cancel":
                key = pick % (len(self.requests) + 1)
                if self.scheduler.try_cancel(key):
                    self.leave(key, "cancelled")
                self.cancelled.add(key)
            case "complete" | "again" | "gone" if self.running.get(slot):
                self.complete(slot, Outcome.DONE if event == "complete" else Outcome(event))
            case "lose" | "lose unread" if slot in self.running:
                self.lose(slot, is_unread=event == "lose unread")
            case "add" if slot not in self.running:
                self.running[slot] = []
                self.scheduler.add_slot(slot)
            case "drain":
                self.drain()
            case "wait":
                self.wait()

    def enqueue(self, pick: int) -> None:
        key, client = len(self.requests) + 1, pick % 5
        # A request of an iterative model is a sequence of its own.
        starts, ends = client not in self.sequences, pick % 7 == 0 or self.scheduler.is_iterative
        correlation = self.sequences.setdefault(client, key)
        pending = Pending(
            key, 1, 4, priority=pick % 3, correlation=correlation, sequence_start=starts, sequence_end=ends
        )
        self.requests[key] = pending
        if ends:
            del self.sequences[client]
        try:
            turns = self.scheduler.enqueue(pending, self.now)
        except InferenceError:
            self.ends[key] = "refused"
            return
        assert turns in (None, 0, 1, 2)
        self.queued.add(key)
        if timeout_ns := self.timeout_ns(pending):
            self.deadlines[key] = self.now + timeout_ns

    def timeout_ns(self, pending: Pending) -> int:
        match self.scheduler:
            case Priorities():
                return TIMEOUTS_NS.get(pending.priority, 0)
            case DynamicBatchScheduler(may_expire=True):
                return TIMEOUT_NS
            case _:
                return 0

    def drain(self) -> None:
        for key in self.scheduler.drain():
            self.leave(key, "drained")

    def wait(self) -> None:
        """Nothing happens until `wake_at`."""
        self.poll()
        wake_at = self.scheduler.wake_at()
        if wake_at is None:
            return
        assert self.scheduler.poll(wake_at - 1) == [], "an action before `wake_at`"
        assert self.scheduler.wake_at() == wake_at
        self.now = wake_at
        self.poll()

    def complete(self, slot: Slot, last: Outcome) -> None:
        batch = self.running[slot].pop(0)
        if last is Outcome.AGAIN and not self.scheduler.is_iterative:
            last = Outcome.DONE
        outcomes = [Outcome.DONE] * (len(batch.requests) - 1) + [last]
        outcomes = [
            Outcome.GONE if key in self.cancelled else outcome
            for key, outcome in zip(batch.requests, outcomes, strict=True)
        ]
        for key, outcome in zip(batch.requests, outcomes, strict=True):
            if outcome is Outcome.AGAIN:
                self.queued.add(key)
            else:
                self.end(key, outcome.value)
        self.scheduler.completed(slot, 1000, outcomes if self.scheduler.follows_outcomes else ())

    def lose(self, slot: Slot, *, is_unread: bool) -> None:
        batches = self.running.pop(slot)
        unread = [[self.requests[key] for key in batch.requests] for batch in batches] if is_unread else []
        again = self.scheduler.remove_slot(slot, unread, self.now)
        assert set(again) <= {each.key for batch in unread for each in batch}
        for key in (key for batch in batches for key in batch.requests):
            if key in again:
                self.queued.add(key)
            else:
                self.end(key, "lost")

    def poll(self) -> None:
        for action in self.scheduler.poll(self.now):
            match action:
                case Execute(slot, keys, sequence_slots):
                    assert keys, "an empty batch"
                    assert len(keys) <= self.scheduler.max_batch_size
                    self.check_sequence_slots(keys, sequence_slots, slot)
                    self.check_sequences(keys)
                    for key in keys:
                        assert key in self.queued, "executed without being queued"
                        assert self.deadlines.pop(key, self.now + 1) > self.now, "executed after its deadline"
                        self.queued.remove(key)
                    self.running[slot].append(action)
                    assert len(self.running[slot]) <= getattr(self.scheduler, "depth", 1)
                case Fail(key, error):
                    is_expired = key in self.deadlines and self.deadlines[key] <= self.now
                    assert is_expired == (error.code is ErrorCode.UNAVAILABLE)
                    self.leave(key, "failed")
        assert self.scheduler.poll(self.now) == [], "a second poll has nothing to do"
        assert self.scheduler.queued == len(self.queued)
        self.check_wake_at()
        self.now += 1

    def check_wake_at(self) -> None:
        """What was due is done, and `wake_at` is the earliest of all other deadlines."""
        wake_at = self.scheduler.wake_at()
        # `test_sequence_property` has the deadlines of idle sequences.
        if not isinstance(self.scheduler, SequenceScheduler):
            assert wake_at == min(self.deadlines.values(), default=None)
        assert wake_at is None or wake_at > self.now

    def check_sequence_slots(self, keys: tuple[int, ...], sequence_slots: tuple[int, ...], slot: Slot) -> None:
        """A sequence keeps its sequence slot, and no two sequences have one at the same time."""
        if not sequence_slots:
            return
        assert len(sequence_slots) == len(set(sequence_slots)) == len(keys)
        for key, sequence_slot in zip(keys, sequence_slots, strict=True):
            correlation = self.requests[key].correlation
            if not self.requests[key].sequence_start:
                assert self.sequence_slots[correlation] == (slot, sequence_slot)
            self.sequence_slots[correlation] = slot, sequence_slot

    def check_sequences(self, keys: tuple[int, ...]) -> None:
        if not isinstance(self.scheduler, SequenceScheduler) or self.scheduler.is_iterative:
            return
        for key in keys:
            correlation = self.requests[key].correlation
            before = [each for each in range(1, key) if self.requests[each].correlation == correlation]
            assert all(self.ends.get(each) == "done" for each in before), "executed without its state"

    def leave(self, key: int, how: str) -> None:
        self.queued.remove(key)
        self.deadlines.pop(key, None)
        self.end(key, how)

    def end(self, key: int, how: str) -> None:
        assert key not in self.ends, f"{key} left as {self.ends[key]} and as {how}"
        self.ends[key] = how

    def wind_up(self) -> None:
        """Add all slots and end all batches; requests that remain wait for a request that never comes."""
        for slot in SLOTS:
            if slot not in self.running:
                self.handle("add", SLOTS.index(slot))
        self.poll()
        while any(self.running.values()):
            for slot in SLOTS:
                if self.running[slot]:
                    self.complete(slot, Outcome.DONE)
            self.poll()
        self.drain()
        self.poll()
        assert (self.queued, self.scheduler.queued) == (set(), 0)
        assert self.ends.keys() == self.requests.keys()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(script=drawn(lambda draws: draws.script(EVENTS, 15, 50), 200))
def test_every_queued_key_leaves_exactly_once(kind: str, script: list[tuple[str, int]]) -> None:
    driver = Driver(KINDS[kind]())
    for event, pick in script:
        driver.handle(event, pick >> 1)
        if pick & 1:
            driver.poll()
    driver.wind_up()


def started(scheduler: Toy, *slots: Slot) -> Toy:
    for slot in slots:
        scheduler.add_slot(slot)
    return scheduler


ONE, TWO = Slot(0), Slot(1)


def test_priorities_are_an_order_inside_the_scheduler() -> None:
    scheduler = started(Priorities(), ONE)
    scheduler.max_batch_size = 1
    for key, priority in ((1, 2), (2, 1), (3, 1)):
        scheduler.enqueue(Pending(key, 1, 4, priority=priority), 0)
    ran = []
    for _ in range(3):
        ran += scheduler.poll(0)
        scheduler.completed(ONE, 1)
    assert ran == [Execute(ONE, (key,)) for key in (2, 3, 1)]


def test_a_level_has_its_own_bound_and_timeout() -> None:
    scheduler = Priorities({1: 10, 2: 5}, max_queue_size=1)
    for key, priority in ((1, 0), (2, 1), (3, 2)):
        scheduler.enqueue(Pending(key, 1, 4, priority=priority), 0)
    assert error_of(scheduler.enqueue, Pending(4, 1, 4, priority=1), 0) is FULL
    assert scheduler.wake_at() == 5
    assert scheduler.poll(5) == [Fail(3, EXPIRED, FailureReason.EXPIRED)]
    assert scheduler.wake_at() == 10
    scheduler.add_slot(ONE)
    assert scheduler.poll(10) == [Fail(2, EXPIRED, FailureReason.EXPIRED), Execute(ONE, (1,))]


def test_a_slot_of_depth_two_has_a_batch_ready_before_the_last_one_ends() -> None:
    scheduler = started(DepthTwo(), ONE)
    scheduler.max_batch_size = 1
    for key in (1, 2, 3):
        scheduler.enqueue(Pending(key, 1, 4), 0)
    assert scheduler.poll(0) == [Execute(ONE, (1,)), Execute(ONE, (2,))]
    scheduler.completed(ONE, 1)
    assert scheduler.poll(1) == [Execute(ONE, (3,))]
    assert scheduler.remove_slot(ONE, [[Pending(3, 1, 4)]], 2) == [3], "2 was read, and is failed by the pump"


def test_a_resource_that_is_given_back_wakes_those_that_were_refused() -> None:
    limiter, woken = Limiter(1), list[str]()
    first, second = RateLimited(limiter), RateLimited(limiter)
    first.wake, second.wake = lambda: woken.append("first"), lambda: woken.append("second")
    for scheduler in (first, second):
        started(scheduler, ONE)
        scheduler.enqueue(Pending(1, 1, 4), 0)
    assert (first.poll(0), second.poll(0), woken) == ([Execute(ONE, (1,))], [], [])
    first.completed(ONE, 1)
    assert (woken, second.poll(1)) == (["second"], [Execute(ONE, (1,))])
    second.remove_slot(ONE, [], 2)
    assert limiter.free == 1, "a dead worker gives back what it took"
