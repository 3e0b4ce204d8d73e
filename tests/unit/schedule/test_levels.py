"""Priority levels of the dynamic batcher: order, batches over levels, bounds, timeouts, ageing."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from halimede.core.config.model_config import TimeoutAction
from halimede.core.schedule.actions import Action, Execute, Slot
from halimede.core.schedule.dynamic_batcher import DynamicBatchScheduler
from halimede.core.schedule.policy import BatchPolicy, Priorities
from halimede.core.schedule.queue import BatchQueue
from halimede.core.schedule.scheduler import Pending
from halimede.core.types import ErrorCode, InferenceError
from support.refusals import error_of
from support.scheduling import TOOK, arrive, expired, finish_all, pending

MS = 1_000_000
FULL = InferenceError(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")
THREE = Priorities(levels=3, default=2)
PREFERRED = BatchPolicy(max_batch_size=16, preferred_batch_sizes=(4, 8), max_queue_delay_ns=300 * MS)


def scheduler_of(policy: BatchPolicy, priorities: Priorities = THREE, instances: int = 1) -> DynamicBatchScheduler:
    return DynamicBatchScheduler(policy, instances, BatchQueue(policy, priorities=priorities))


def busy(policy: BatchPolicy, priorities: Priorities = THREE) -> DynamicBatchScheduler:
    """A scheduler whose one instance runs request 0."""
    scheduler = scheduler_of(policy, priorities)
    scheduler.enqueue(pending(0, rows=policy.max_batch_size), 0)
    assert scheduler.poll(0) == [Execute(Slot(0), (0,))]
    return scheduler


def at(key: int, priority: int, rows: int = 1, shape: object = (), timeout_us: int = 0) -> Pending:
    return replace(pending(key, rows, str(shape), timeout_us=timeout_us), priority=priority)


def batches(actions: list[Action]) -> list[tuple[int, ...]]:
    return [action.requests for action in actions if isinstance(action, Execute)]


@pytest.mark.parametrize(
    "end", [lambda each: each.expect_few(2), DynamicBatchScheduler.expect_no_more], ids=["few", "none"]
)
@pytest.mark.parametrize("sizes", [(), (4,)])
def test_without_delays_requests_of_all_levels_run_at_once(
    sizes: tuple[int, ...], end: Callable[[DynamicBatchScheduler], None]
):
    scheduler = scheduler_of(BatchPolicy(8, sizes, max_queue_delay_ns=1 << 80))
    for key, priority in ((1, 3), (2, 1)):
        assert arrive(scheduler, at(key, priority), key) == []
    end(scheduler)

    assert scheduler.wake_at() == 0
    assert scheduler.poll(2) == [Execute(Slot(0), (2, 1))]
    assert arrive(scheduler, at(3, 3), 3) == []
    assert finish_all(scheduler, 4) == [Execute(Slot(0), (3,))]


@pytest.mark.parametrize(
    ("priorities", "order"),
    [
        ((3, 2, 1), (3, 2, 1)),
        ((2, 1, 2, 1), (2, 4, 1, 3)),
        # Priority 0 and one beyond the levels are the default level, which is 2.
        ((3, 0, 1), (3, 2, 1)),
        ((3, 4, 2**32, 2), (2, 3, 4, 1)),
        ((1, 1, 1), (1, 2, 3)),
    ],
)
def test_higher_levels_run_first_and_each_in_order_of_arrival(priorities: tuple[int, ...], order: tuple[int, ...]):
    scheduler = busy(BatchPolicy(max_batch_size=1))
    for key, priority in enumerate(priorities, 1):
        assert arrive(scheduler, at(key, priority), key) == []

    assert batches(finish_all(scheduler, 10)) == [(key,) for key in order]


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        # (priority, rows, shape) of the requests 1, 2, ...
        ([(2, 1, "a"), (1, 1, "a"), (3, 1, "a")], [(2, 1, 3)]),
        ([(1, 1, "a"), (2, 1, "a")] * 4, [(1, 3, 5, 7, 2, 4, 6, 8)]),
        # Another shape closes the batch, and nothing is taken from behind it.
        ([(1, 1, "a"), (2, 1, "b"), (3, 1, "a")], [(1,), (2,), (3,)]),
        # So does a request that does not fit.
        ([(1, 9, "a"), (2, 9, "a"), (3, 2, "a")], [(1,), (2, 3)]),
        ([(1, 9, "a"), (1, 9, "a"), (1, 2, "a")], [(1,), (2, 3)]),
        ([(1, 7, "a"), (2, 9, "a"), (3, 1, "a")], [(1, 2), (3,)]),
    ],
)
def test_a_batch_is_filled_with_the_first_requests_of_the_next_levels(
    arrivals: list[tuple[int, int, str]], expected: list[tuple[int, ...]]
):
    scheduler = busy(BatchPolicy(max_batch_size=16))
    for key, (priority, rows, shape) in enumerate(arrivals, 1):
        arrive(scheduler, at(key, priority, rows, shape), key)

    assert batches(finish_all(scheduler, 20)) == expected


@pytest.mark.parametrize("priorities", [(2,) * 13, (1,) * 13, tuple(1 + key % 3 for key in range(13))])
@pytest.mark.parametrize(
    ("requests", "at_once", "later"),
    [(3, [], [3]), (4, [4], []), (5, [4], [1]), (8, [4, 4], []), (13, [4, 4, 4], [1])],
)
def test_preferred_sizes_and_delay_hold_over_levels(
    priorities: tuple[int, ...], requests: int, at_once: list[int], later: list[int]
):
    # The batches of Triton's rule DYN-4, for requests that arrive one by one.
    scheduler = scheduler_of(PREFERRED, instances=4)
    given = [action for key in range(requests) for action in arrive(scheduler, at(key, priorities[key]), 0)]

    assert [len(keys) for keys in batches(given)] == at_once
    assert scheduler.wake_at() == (300 * MS if later else None)
    assert scheduler.poll(300 * MS - 1) == []
    assert [len(keys) for keys in batches(scheduler.poll(300 * MS))] == later


def test_eight_requests_that_wait_for_an_instance_are_one_preferred_batch():
    scheduler = busy(PREFERRED)
    for key in range(1, 11):
        arrive(scheduler, at(key, 1 + key % 2), key)

    scheduler.completed(Slot(0), TOOK)
    assert scheduler.poll(20) == [Execute(Slot(0), (2, 4, 6, 8, 10, 1, 3, 5))]
    scheduler.completed(Slot(0), TOOK)
    assert (scheduler.poll(20), scheduler.wake_at()) == ([], 300 * MS + 7)


def test_a_full_batch_over_two_levels_runs_before_its_delay():
    scheduler = scheduler_of(BatchPolicy(max_batch_size=4, max_queue_delay_ns=MS))
    for key in range(1, 4):
        assert arrive(scheduler, at(key, 3), key) == []
        assert scheduler.wake_at() == MS + 1

    assert arrive(scheduler, at(4, 1), 4) == [Execute(Slot(0), (4, 1, 2, 3))]


def test_the_delay_counts_from_the_oldest_request_of_any_level():
    scheduler = scheduler_of(BatchPolicy(max_batch_size=4, max_queue_delay_ns=100))
    arrive(scheduler, at(1, 3), 10)
    arrive(scheduler, at(2, 1), 60)
    assert scheduler.wake_at() == 110
    assert scheduler.try_cancel(1)
    assert scheduler.wake_at() == 160

    assert scheduler.poll(160) == [Execute(Slot(0), (2,))]


def test_each_level_has_its_own_bound():
    small = BatchPolicy(max_queue_size=1)
    scheduler = busy(BatchPolicy(max_queue_size=2), Priorities(3, 2, {3: small}))
    for key, priority in enumerate((1, 1, 2, 2, 3), 1):
        arrive(scheduler, at(key, priority), key)

    for priority in (0, 1, 2, 3, 4):
        assert error_of(scheduler.enqueue, at(9, priority), 9) == FULL
    assert scheduler.try_cancel(1)
    assert arrive(scheduler, at(9, 1), 9) == []


def test_the_bytes_of_all_levels_count_together():
    scheduler = busy(BatchPolicy(max_queue_bytes=10))
    scheduler.enqueue(replace(at(1, 1), size_bytes=11), 1)
    assert error_of(scheduler.enqueue, replace(at(2, 3), size_bytes=1), 1) == FULL
    assert scheduler.try_cancel(1)
    scheduler.enqueue(replace(at(2, 3), size_bytes=10), 1)


def test_a_very_large_number_of_levels_takes_no_memory():
    scheduler = busy(BatchPolicy(max_batch_size=4), Priorities(2**63, 2**62))
    arrive(scheduler, at(1, 0), 1)
    arrive(scheduler, at(2, 2**63), 2)
    arrive(scheduler, at(3, 1), 3)

    assert batches(finish_all(scheduler, 10)) == [(3, 1, 2)]


REJECTING = BatchPolicy(default_timeout_ns=100)
DELAYING = BatchPolicy(timeout_action=TimeoutAction.DELAY, default_timeout_ns=100)


def test_levels_have_their_own_timeouts_and_wake_at_is_the_earliest():
    scheduler = busy(
        BatchPolicy(max_batch_size=4), Priorities(3, 3, {1: REJECTING, 2: replace(REJECTING, default_timeout_ns=70)})
    )
    for key, priority in ((1, 1), (2, 2), (3, 3)):
        arrive(scheduler, at(key, priority), key)

    assert scheduler.wake_at() == 72
    assert (scheduler.poll(71), scheduler.poll(72), scheduler.wake_at()) == ([], [expired(2)], 101)
    assert (scheduler.poll(100), scheduler.poll(101), scheduler.wake_at()) == ([], [expired(1)], None)
    assert batches(finish_all(scheduler, 1000)) == [(3,)]


@pytest.mark.parametrize(
    ("default_us", "is_override_allowed", "timeout_us", "deadline_us"),
    [(100, False, 50, 100), (100, True, 50, 50), (100, True, 500, 100), (100, True, 0, 100), (0, True, 50, 50)],
)
def test_a_request_may_shorten_the_timeout_of_its_level(
    default_us: int, is_override_allowed: bool, timeout_us: int, deadline_us: int
):
    policy = BatchPolicy(default_timeout_ns=default_us * 1000, allow_timeout_override=is_override_allowed)
    scheduler = busy(BatchPolicy(), Priorities(2, 1, {2: policy}))
    arrive(scheduler, at(1, 2, timeout_us=timeout_us), 0)

    assert scheduler.wake_at() == deadline_us * 1000


def test_delayed_requests_run_after_their_level_and_before_lower_ones():
    scheduler = busy(BatchPolicy(max_batch_size=1), Priorities(3, 2, {2: DELAYING}))
    for key, priority, now in ((1, 3, 0), (2, 2, 0), (3, 2, 10), (4, 2, 90), (5, 1, 95)):
        arrive(scheduler, at(key, priority), now)
    assert scheduler.poll(110) == []

    assert batches(finish_all(scheduler, 120)) == [(5,), (4,), (2,), (3,), (1,)]


def test_a_delayed_request_waits_for_its_delay_behind_the_others():
    policy = replace(DELAYING, max_batch_size=4, max_queue_delay_ns=300)
    scheduler = scheduler_of(policy)
    for key, priority, now in ((1, 3, 0), (2, 3, 50), (3, 1, 60)):
        arrive(scheduler, at(key, priority), now)

    assert (scheduler.poll(100), scheduler.wake_at()) == ([], 150)
    assert (scheduler.poll(160), scheduler.wake_at()) == ([], 300)
    assert scheduler.poll(300) == [Execute(Slot(0), (3, 1, 2))]


def test_a_deadline_among_a_thousand_queued_requests_is_exact():
    policy = BatchPolicy(max_batch_size=4, allow_timeout_override=True)
    scheduler = busy(policy, Priorities(4, 1))
    timeouts_us = {key: 2000 + key * 7919 % 1009 for key in range(1, 1001)}
    for key, timeout_us in timeouts_us.items():
        arrive(scheduler, at(key, key % 5, timeout_us=timeout_us), 0)

    rejected: dict[Action, int] = {}
    while (now := scheduler.wake_at()) is not None:
        assert scheduler.poll(now - 1) == []
        rejected |= dict.fromkeys(scheduler.poll(now), now)
    assert rejected == {expired(key): timeout_us * 1000 for key, timeout_us in timeouts_us.items()}


AGING = Priorities(levels=3, default=2, aging_ns=100)


def test_without_ageing_a_low_level_may_starve_and_with_it_not():
    for priorities, first in ((THREE, 50), (AGING, 1)):
        scheduler = busy(BatchPolicy(max_batch_size=1), priorities)
        arrive(scheduler, at(1, 3), 0)
        for key in range(50, 60):
            arrive(scheduler, at(key, 1), 150)
        scheduler.poll(199)
        # After 200 ns it is in level 1, and it is the oldest there.
        assert batches(finish_all(scheduler, 200))[0] == (first,)


def test_a_request_moves_one_level_each_time_and_keeps_its_place_by_age():
    scheduler = busy(BatchPolicy(max_batch_size=1), AGING)
    for key, priority, now in ((1, 3, 0), (2, 2, 50), (3, 1, 140), (4, 2, 99), (5, 1, 160)):
        arrive(scheduler, at(key, priority), now)
    # At 160: 1 is in level 2 since 100, and 2 in level 1 since 150.
    scheduler.completed(Slot(0), TOOK)
    assert scheduler.poll(160) == [Execute(Slot(0), (2,))]
    assert batches(finish_all(scheduler, 160)) == [(3,), (5,), (1,), (4,)]


def test_moves_that_nobody_polled_for_are_made_up_for():
    timely, lazy = (busy(BatchPolicy(max_batch_size=8), AGING) for _ in range(2))
    for scheduler in (timely, lazy):
        for key in range(1, 7):
            scheduler.enqueue(at(key, 1 + key % 3), key)
    for now in range(7, 250):
        assert timely.poll(now) == []

    assert finish_all(timely, 250) == finish_all(lazy, 250)


def test_timeouts_and_moves_are_made_in_the_order_of_their_times():
    delaying = replace(DELAYING, default_timeout_ns=90)
    scheduler = busy(BatchPolicy(max_batch_size=1), Priorities(3, 2, {2: delaying, 3: delaying}, aging_ns=100))
    scheduler.enqueue(at(1, 3), 0)
    scheduler.enqueue(at(2, 2), 5)

    # 2 is late in level 2 since 95, and 1 came there late at 100.
    assert batches(finish_all(scheduler, 103)) == [(2,), (1,)]


def test_moved_requests_do_not_use_up_the_bound_of_their_new_level():
    scheduler = busy(BatchPolicy(max_queue_size=1), AGING)
    arrive(scheduler, at(1, 2), 0)
    scheduler.poll(100)
    assert arrive(scheduler, at(2, 1), 100) == []
    with pytest.raises(InferenceError):
        scheduler.enqueue(at(3, 2), 100)

    assert batches(finish_all(scheduler, 100)) == [(1,), (2,)]


def test_a_late_request_that_moves_stays_late_in_its_new_level():
    scheduler = busy(BatchPolicy(max_batch_size=1), Priorities(3, 2, {3: DELAYING}, aging_ns=150))
    for key, priority, now in ((1, 3, 0), (2, 2, 140), (3, 2, 145)):
        arrive(scheduler, at(key, priority), now)

    assert batches(finish_all(scheduler, 151)) == [(2,), (3,), (1,)]


def test_an_unread_batch_returns_to_the_front_of_all_levels():
    scheduler = scheduler_of(BatchPolicy(max_batch_size=2))
    batch = [at(1, 3), at(2, 3)]
    for each in batch:
        scheduler.enqueue(each, 0)
    assert scheduler.poll(0) == [Execute(Slot(0), (1, 2))]
    arrive(scheduler, at(3, 1), 1)

    assert scheduler.remove_slot(Slot(0), [batch], 5) == [1, 2]
    assert scheduler.try_cancel(1)
    scheduler.add_slot(Slot(0))
    assert scheduler.poll(6) == [Execute(Slot(0), (2,))]
    assert batches(finish_all(scheduler, 7)) == [(3,)]


def test_drain_returns_the_keys_of_all_levels_in_order_of_arrival():
    scheduler = busy(replace(DELAYING, max_batch_size=2), AGING)
    for key, priority in ((1, 3), (2, 1), (3, 2)):
        arrive(scheduler, at(key, priority), key)
    scheduler.poll(102)

    assert scheduler.drain() == [1, 2, 3]
    assert (scheduler.queued, scheduler.oldest_enqueued_at(), scheduler.wake_at()) == (0, None, None)
    assert finish_all(scheduler, 1000) == []
    arrive(scheduler, at(4, 3), 1000)
    assert scheduler.poll(1100) == []


def test_a_lone_request_is_not_queued_unless_it_waits_for_others():
    assert scheduler_of(BatchPolicy(max_batch_size=4)).try_start(1) == Slot(0)
    waiting = scheduler_of(PREFERRED)
    assert [waiting.try_start(rows) for rows in (1, 5)] == [None, None]
    assert waiting.try_start(4) == Slot(0)


class CountedShape:
    """A value for `compatible` that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedShape.compared += 1
        return isinstance(other, CountedShape)

    __hash__ = object.__hash__


@pytest.mark.parametrize("priorities", [THREE, AGING])
def test_work_per_request_does_not_grow_with_the_queue(priorities: Priorities):
    counts = []
    for requests in (500, 4000):
        CountedShape.compared = 0
        scheduler = scheduler_of(
            BatchPolicy(max_batch_size=8000, max_queue_delay_ns=MS, max_queue_size=8000), priorities
        )
        for key in range(requests):
            assert arrive(scheduler, Pending(key, 1, 4, CountedShape(), 1 + key * 7 % 3), 0) == []
            assert scheduler.wake_at() is not None
        for key in range(0, requests, 2):
            assert scheduler.try_cancel(key)
            assert scheduler.poll(0) == []
        assert len(batches(scheduler.poll(MS))) == 1
        counts.append(CountedShape.compared / requests)

    assert counts[1] <= 1.5 * counts[0] < 6
