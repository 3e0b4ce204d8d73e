"""Random events against a scheduler that prefetches batches: nothing is lost, nothing runs twice, no instance idles."""

from dataclasses import replace
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.core.config.model_config import TimeoutAction
from halimede.core.schedule.actions import Slot
from halimede.core.schedule.policy import BatchPolicy, Priorities
from halimede.core.schedule.scheduler import Pending
from halimede.core.types import InferenceError
from support.examples import Draws, drawn, examples
from support.prefetching import Instances, dynamic

US = 1000
MAX_ROWS = 4

Kind = Literal["arrive", "cancel", "end", "report", "pass time", "die", "start"]
EVENTS: tuple[Kind, ...] = (
    *("arrive",) * 8,
    *("end",) * 3,
    *("report",) * 3,
    "cancel",
    "cancel",
    "pass time",
    "pass time",
    "die",
    "start",
)
Script = list[tuple[Kind, int]]


def script(draws: Draws) -> Script:
    return draws.script(EVENTS, 0, 60)


def policy(draws: Draws) -> BatchPolicy:
    return BatchPolicy(
        max_batch_size=MAX_ROWS,
        preferred_batch_sizes=draws.pick(((), (2,), (2, 4))),
        max_queue_delay_ns=draws.pick((0, 0, 5 * US)),
        timeout_action=draws.pick(tuple(TimeoutAction)),
        default_timeout_ns=draws.pick((0, 7 * US)),
        allow_timeout_override=True,
    )


def priorities(draws: Draws) -> Priorities:
    return Priorities(levels=3, default=2, aging_ns=draws.pick((0, 0, 6 * US)))


def perhaps_priorities(draws: Draws) -> Priorities | None:
    return draws.pick((None, priorities(draws)))


class Play:
    """Performs events, and knows of each request what has become of it."""

    def __init__(self, played: Instances, count: int) -> None:
        self.played = played
        self.scheduler = played.scheduler
        self.slots = [Slot(instance) for instance in range(count)]
        self.up = set(self.slots)
        self.requests: dict[int, Pending] = {}
        self.cancelled: set[int] = set()
        self.lost: set[int] = set()

    def perform(self, kind: Kind, pick: int) -> None:
        played = self.played
        slot = self.slots[pick % len(self.slots)]
        waiting = played.batches.get(slot, [])
        match kind:
            case "arrive":
                key = len(self.requests) + 1
                rows, shape = (1, 1, 2, 5)[pick % 4], ("a", "a", "b")[pick % 3]
                timeout_us = (0, 0, 3)[pick // 7 % 3]
                self.requests[key] = Pending(key, rows, 4, shape, pick // 21 % 4, timeout_us)
                played.arrive(self.requests[key])
            case "cancel":
                key = max(1, len(self.requests) - pick % 6)
                begun = {one for batch in played.begun for one in batch}
                if played.cancel(key):
                    assert key not in begun, "it runs"
                    self.cancelled.add(key)
            case "end" if waiting and slot in self.up:
                played.end(slot, report=pick % 3 > 0 and slot not in played.unreported)
            case "report" if slot in played.unreported:
                played.report(slot)
            case "pass time":
                played.pass_time((1, US, 4 * US, 20 * US)[pick % 4])
            case "die" if slot in self.up and slot not in played.unreported:
                self.up.discard(slot)
                unread = waiting[1] if len(waiting) > 1 and pick % 2 else ()
                self.lost |= {key for batch in waiting for key in batch} - set(unread)
                assert sorted(played.die(slot, unread)) == sorted(unread)
            case "start" if slot not in self.up:
                self.up.add(slot)
                played.start(slot)
        self.check()

    def check(self) -> None:
        played = self.played
        begun = [key for batch in played.begun for key in batch]
        expired = [fail.request for fail in played.failed]
        left = [*begun, *expired, *self.cancelled, *(self.lost - set(begun))]
        assert len(left) == len(set(left)), "a request leaves once"
        unknown = sum(ends for ends in played.unreported.values())
        if not unknown:
            assert self.scheduler.queued == len(self.requests) - len(left), "the others are queued"
        for batch in played.begun:
            assert len(batch) == 1 or sum(self.requests[key].batch_size for key in batch) <= MAX_ROWS
            assert len({self.requests[key].compatible for key in batch}) == 1
        idle = [slot for slot in self.up if slot not in played.batches and slot not in played.unreported]
        if idle:
            assert all(len(batches) < 2 for batches in played.batches.values()), "idle beside a batch that waits"
            wake_at = self.scheduler.wake_at()
            assert wake_at is None or wake_at > played.now, "idle beside work that is due"

    def wind_up(self) -> None:
        """End everything: then each request has left."""
        played = self.played
        for slot in self.slots:
            if slot not in self.up:
                self.up.add(slot)
                played.start(slot)
        while self.scheduler.queued or played.batches or played.unreported:
            played.end_each(self.slots)
            played.pass_time(20 * US)
            self.check()


@settings(max_examples=examples(400), deadline=None)
@given(drawn(lambda draws: (policy(draws), perhaps_priorities(draws), 1 + draws.below(3), script(draws)), 260))
def test_each_request_leaves_once_and_no_instance_idles(case: tuple[BatchPolicy, Priorities | None, int, Script]):
    policy, levels, count, script = case
    play = Play(dynamic(policy, count, levels), count)
    for kind, pick in script:
        try:
            play.perform(kind, pick)
        except InferenceError:
            raise AssertionError("the queue is not bounded here") from None
    play.wind_up()
    begun = {key for batch in play.played.begun for key in batch}
    assert begun | play.cancelled | play.lost | {fail.request for fail in play.played.failed} == set(play.requests)


@settings(max_examples=examples(400), deadline=None)
@given(drawn(lambda draws: (policy(draws), perhaps_priorities(draws), script(draws)), 260))
def test_the_same_batches_run_as_without_prefetching(case: tuple[BatchPolicy, Priorities | None, Script]):
    """One instance, which reports the end of a batch at once."""
    policy, levels, script = case
    if levels is None:
        # With a delay, a batch of a preferred size that lies ready does not take later requests when its delay is over.
        policy = replace(policy, max_queue_delay_ns=0)
    plays = [dynamic(policy, 1, levels, prefetches=prefetches) for prefetches in (True, False)]
    for key, (kind, pick) in enumerate(script, 1):
        for played in plays:
            match kind:
                case "arrive":
                    rows, shape = (1, 1, 2, 4)[pick // 12 % 4], "aab"[pick % 3]
                    played.arrive(Pending(key, rows, 4, shape, pick % 4, (0, 0, 3)[pick // 4 % 3]))
                case "cancel":
                    played.cancel(max(1, key - pick % 6))
                case "end" if played.batches:
                    played.end(Slot(0))
                case "pass time":
                    played.pass_time((1, US, 4 * US, 20 * US)[pick % 4])
        prefetching, usual = plays
        assert prefetching.begun == usual.begun
        assert prefetching.failed == usual.failed


@settings(max_examples=examples(40), deadline=None)
@given(st.none() | st.just(Priorities(3, 2)), st.integers(1, 3), st.integers(5, 40), st.integers(0, 1 << 16))
def test_batches_are_as_full_as_without_prefetching(levels: Priorities | None, count: int, callers: int, seed: int):
    """Closed-loop callers, each of which sends its next request when it is answered."""

    def rows_per_batch(*, prefetches: bool) -> float:
        played = dynamic(BatchPolicy(max_batch_size=MAX_ROWS), count, levels, prefetches=prefetches)
        key = 0
        for _ in range(callers):
            key += 1
            played.scheduler.enqueue(Pending(key, 1, 4, priority=key % 3), played.now)
        played.poll()
        picks = seed
        for _ in range(200):
            busy = sorted(played.batches)
            slot, picks = busy[picks % len(busy)], picks * 5 + 1
            answered = len(played.batches[slot][0])
            played.end(slot)
            for _ in range(answered):
                key += 1
                played.scheduler.enqueue(Pending(key, 1, 4, priority=key % 3), played.now)
            played.poll()
        return sum(map(len, played.begun[-100:])) / 100

    if callers >= 2 * MAX_ROWS * count:
        assert rows_per_batch(prefetches=True) >= rows_per_batch(prefetches=False)
