"""Batches of the dynamic batcher: preferred sizes, delays, instances, cancelled requests."""

from collections.abc import Callable

import pytest

from halimede.core.config.model_config import TimeoutAction
from halimede.core.schedule.actions import Execute, Slot
from halimede.core.schedule.dynamic_batcher import DynamicBatchScheduler
from halimede.core.schedule.policy import BatchPolicy
from support.scheduling import TOOK, arrive, busy_scheduler, finish_all, pending

MS = 1_000_000


def test_a_request_that_would_run_alone_at_once_is_not_queued():
    scheduler = DynamicBatchScheduler(BatchPolicy(max_batch_size=8), instances=2)

    assert (scheduler.try_start(1), scheduler.queued) == (Slot(0), 0)
    assert arrive(scheduler, pending(2), 5) == [Execute(Slot(1), (2,))]
    assert scheduler.try_start(1) is None
    assert arrive(scheduler, pending(3), 6) == []
    assert scheduler.completed(Slot(0), TOOK) == 1
    assert scheduler.try_start(1) is None, "there is one before it"
    assert scheduler.poll(7) == [Execute(Slot(0), (3,))]
    assert scheduler.completed(Slot(1), TOOK) is None


def test_a_request_that_waits_for_a_larger_batch_is_queued():
    policy = BatchPolicy(max_batch_size=8, preferred_batch_sizes=(2, 4), max_queue_delay_ns=MS)
    scheduler = DynamicBatchScheduler(policy, instances=4)

    assert [scheduler.try_start(rows) for rows in (1, 2, 3, 4, 5)] == [None, Slot(0), None, Slot(1), Slot(2)]


def test_a_request_that_finds_an_idle_instance_runs_at_once():
    scheduler = DynamicBatchScheduler(BatchPolicy(max_batch_size=8), instances=1)

    assert arrive(scheduler, pending(1), 5) == [Execute(Slot(0), (1,))]
    assert scheduler.poll(5) == []
    assert (scheduler.queued, scheduler.oldest_enqueued_at(), scheduler.wake_at()) == (0, None, None)


def test_requests_that_wait_for_a_busy_instance_share_a_batch():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=4))
    for key in range(1, 7):
        assert arrive(scheduler, pending(key), key) == []
    assert (scheduler.queued, scheduler.oldest_enqueued_at(), scheduler.wake_at()) == (6, 1, None)

    assert finish_all(scheduler, 10) == [Execute(Slot(0), (1, 2, 3, 4)), Execute(Slot(0), (5, 6))]


@pytest.mark.parametrize(
    "end", [lambda each: each.expect_few(2), DynamicBatchScheduler.expect_no_more], ids=["few", "none"]
)
def test_without_delays_a_partial_batch_runs_at_once(end: Callable[[DynamicBatchScheduler], None]):
    policy = BatchPolicy(max_batch_size=8, max_queue_delay_ns=1 << 80)
    scheduler = DynamicBatchScheduler(policy, instances=1)
    for key in (1, 2):
        assert arrive(scheduler, pending(key), key) == []
    end(scheduler)

    assert scheduler.poll(2) == [Execute(Slot(0), (1, 2))]
    assert arrive(scheduler, pending(3), 3) == []
    assert finish_all(scheduler, 4) == [Execute(Slot(0), (3,))]
    assert (scheduler.try_start(1), scheduler.wake_at()) == (Slot(0), None)


@pytest.mark.parametrize(
    ("sizes", "requests", "batches"),
    [((4, 8), 10, [8, 2]), ((2, 6), 6, [6]), ((2, 6), 11, [6, 2, 2, 1]), ((4,), 7, [4, 3]), ((4, 8), 3, [3])],
)
def test_a_backlog_is_cut_into_the_largest_preferred_sizes(sizes: tuple[int, ...], requests: int, batches: list[int]):
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=16, preferred_batch_sizes=sizes))
    for key in range(1, requests + 1):
        assert arrive(scheduler, pending(key), key) == []

    ran = [action.requests for action in finish_all(scheduler, 20) if isinstance(action, Execute)]
    assert [len(keys) for keys in ran] == batches
    assert [key for keys in ran for key in keys] == [*range(1, requests + 1)]


def test_a_batch_that_skips_a_preferred_size_closes_at_the_largest():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=16, preferred_batch_sizes=(4, 8)))
    for key in range(1, 5):
        arrive(scheduler, pending(key, rows=3), key)

    # 3 and 6 rows are no preferred size, 9 are more than the largest one.
    assert finish_all(scheduler, 20) == [Execute(Slot(0), (1, 2, 3)), Execute(Slot(0), (4,))]


PREFERRED = BatchPolicy(max_batch_size=16, preferred_batch_sizes=(4, 8), max_queue_delay_ns=300 * MS)


def test_a_batch_below_a_preferred_size_waits_for_the_whole_delay():
    scheduler = DynamicBatchScheduler(PREFERRED, instances=1)
    for key, now in ((1, 0), (2, 10 * MS), (3, 20 * MS)):
        assert arrive(scheduler, pending(key), now) == []
        assert scheduler.wake_at() == 300 * MS
    assert scheduler.poll(300 * MS - 1) == []

    assert scheduler.poll(300 * MS) == [Execute(Slot(0), (1, 2, 3))]
    assert scheduler.wake_at() is None


def test_a_preferred_size_runs_at_once_and_the_rest_waits_anew():
    scheduler = DynamicBatchScheduler(PREFERRED, instances=2)
    given = [arrive(scheduler, pending(key), key * MS) for key in range(1, 6)]

    assert given == [[], [], [], [Execute(Slot(0), (1, 2, 3, 4))], []]
    assert scheduler.wake_at() == 305 * MS
    assert scheduler.poll(305 * MS - 1) == []
    assert scheduler.poll(305 * MS) == [Execute(Slot(1), (5,))]


def test_thirteen_requests_make_three_batches_of_four_and_one_of_one():
    scheduler = DynamicBatchScheduler(PREFERRED, instances=4)
    given = [action for key in range(1, 14) for action in arrive(scheduler, pending(key), 0)]

    assert given == [Execute(Slot(0), (1, 2, 3, 4)), Execute(Slot(1), (5, 6, 7, 8)), Execute(Slot(2), (9, 10, 11, 12))]
    assert scheduler.wake_at() == 300 * MS
    assert scheduler.poll(300 * MS) == [Execute(Slot(3), (13,))]


def test_a_request_beyond_the_largest_preferred_size_opens_a_new_batch():
    policy = BatchPolicy(max_batch_size=8, preferred_batch_sizes=(2, 6), max_queue_delay_ns=3000 * MS)
    scheduler = DynamicBatchScheduler(policy, instances=1)
    assert arrive(scheduler, pending(1, rows=3), 0) == []

    assert arrive(scheduler, pending(2, rows=4), 500 * MS) == [Execute(Slot(0), (1,))]
    scheduler.completed(Slot(0), TOOK)
    assert (scheduler.poll(501 * MS), scheduler.wake_at()) == ([], 3500 * MS)
    assert scheduler.poll(3500 * MS) == [Execute(Slot(0), (2,))]


@pytest.mark.parametrize(
    ("rows", "batches"),
    [
        ((3, 4), [(1,), ()]),
        ((3, 2, 2), [(1, 2), (3,)]),
        ((1, 4, 3), [(1, 2), ()]),
        ((7,), [(1,)]),
        ((5, 3), [(1,), ()]),
        ((3, 5, 1), [(1,), (2, 3)]),
    ],
)
def test_batches_for_an_idle_instance_are_those_of_triton(rows: tuple[int, ...], batches: list[tuple[int, ...]]):
    # As the real Triton 2.51 forms them; () is a request that still waits.
    policy = BatchPolicy(max_batch_size=8, preferred_batch_sizes=(2, 6), max_queue_delay_ns=3000 * MS)
    scheduler = DynamicBatchScheduler(policy, instances=3)
    given = [
        action.requests
        for key, count in enumerate(rows, 1)
        for action in arrive(scheduler, pending(key, rows=count), key * 500 * MS)
        if isinstance(action, Execute)
    ]

    assert given + [()] * (scheduler.queued > 0) == batches


def test_a_batch_exceeds_preferred_sizes_while_every_instance_is_busy():
    policy = BatchPolicy(max_batch_size=16, preferred_batch_sizes=(4, 8), max_queue_delay_ns=3000 * MS)
    scheduler = busy_scheduler(policy)
    for key in range(1, 5):
        assert arrive(scheduler, pending(key, rows=5), key * MS) == []

    assert finish_all(scheduler, 10 * MS) == [Execute(Slot(0), (1, 2)), Execute(Slot(0), (3, 4))]


def test_a_delay_without_preferred_sizes_ends_when_the_batch_is_full():
    scheduler = DynamicBatchScheduler(BatchPolicy(max_batch_size=2, max_queue_delay_ns=MS), instances=1)

    assert arrive(scheduler, pending(1), 0) == []
    assert arrive(scheduler, pending(2), 10) == [Execute(Slot(0), (1, 2))]


def test_a_request_that_does_not_fit_closes_the_batch_before_it():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=16))
    for key, rows in ((1, 9), (2, 9), (3, 2)):
        arrive(scheduler, pending(key, rows=rows), key)

    assert finish_all(scheduler, 10) == [Execute(Slot(0), (1,)), Execute(Slot(0), (2, 3))]


def test_a_request_of_another_shape_closes_the_batch_before_it():
    scheduler = DynamicBatchScheduler(BatchPolicy(max_batch_size=16, max_queue_delay_ns=300 * MS), instances=2)
    assert arrive(scheduler, pending(1, shape=(3,)), 0) == []
    assert arrive(scheduler, pending(2, shape=(3,)), 1) == []

    assert arrive(scheduler, pending(3, shape=(4,)), 2) == [Execute(Slot(0), (1, 2))]
    assert scheduler.wake_at() == 300 * MS + 2


def test_a_later_batch_never_overtakes_a_full_one():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=4))
    for key, shape in ((1, "a"), (2, "b"), (3, "a"), (4, "b")):
        arrive(scheduler, pending(key, shape=shape), key)

    assert finish_all(scheduler, 10) == [Execute(Slot(0), (key,)) for key in (1, 2, 3, 4)]


def test_a_batch_whose_delay_is_over_grows_while_no_instance_is_free():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=4, max_queue_delay_ns=10))
    arrive(scheduler, pending(1), 0)
    assert scheduler.wake_at() is None
    assert scheduler.poll(100) == []
    for key in range(2, 7):
        arrive(scheduler, pending(key), 100)

    scheduler.completed(Slot(0), TOOK)
    assert scheduler.poll(105) == [Execute(Slot(0), (1, 2, 3, 4))]
    scheduler.completed(Slot(0), TOOK)
    # The second batch was begun at 100, so it may wait a little longer now that there is an instance.
    assert (scheduler.poll(105), scheduler.wake_at()) == ([], 110)
    assert scheduler.poll(110) == [Execute(Slot(0), (5, 6))]


def test_instances_take_turns():
    scheduler = DynamicBatchScheduler(BatchPolicy(), instances=3)
    used: list[int] = []
    for key in range(6):
        (action,) = arrive(scheduler, pending(key), key)
        assert isinstance(action, Execute)
        used.append(action.slot.instance)
        scheduler.completed(action.slot, TOOK)

    assert used == [0, 1, 2, 0, 1, 2]


def test_slots_can_be_added_and_removed():
    scheduler = DynamicBatchScheduler(BatchPolicy(), instances=0)
    assert arrive(scheduler, pending(1), 0) == []
    assert arrive(scheduler, pending(2), 0) == []
    assert scheduler.wake_at() is None

    scheduler.add_slot(Slot(7))
    assert scheduler.poll(1) == [Execute(Slot(7), (1,))]
    scheduler.remove_slot(Slot(7), (), 0)
    scheduler.completed(Slot(7), TOOK)
    assert scheduler.poll(2) == []
    scheduler.add_slot(Slot(7))
    scheduler.add_slot(Slot(7))
    assert scheduler.poll(3) == [Execute(Slot(7), (2,))]

    scheduler.completed(Slot(7), TOOK)
    scheduler.remove_slot(Slot(7), (), 0)
    assert arrive(scheduler, pending(3), 4) == []


def test_an_unread_batch_is_executed_again_before_all_others():
    scheduler = DynamicBatchScheduler(BatchPolicy(max_batch_size=4), instances=2)
    batch = [pending(1), pending(2)]
    for each in batch:
        scheduler.enqueue(each, 0)
    assert scheduler.poll(0) == [Execute(Slot(0), (1, 2))]
    for key in (3, 4):
        arrive(scheduler, pending(key), 1)
    assert scheduler.queued == 1

    assert scheduler.remove_slot(Slot(0), [batch], 5) == [1, 2]
    assert (scheduler.queued, scheduler.oldest_enqueued_at()) == (3, 1)
    assert scheduler.try_cancel(2)
    scheduler.completed(Slot(1), TOOK)
    assert scheduler.poll(6) == [Execute(Slot(1), (1,))]
    scheduler.completed(Slot(1), TOOK)
    assert scheduler.poll(7) == [Execute(Slot(1), (4,))]


def run_together(scheduler: DynamicBatchScheduler, requests: int, took_ns: int) -> None:
    """A batch of this many requests begins and ends."""
    for key in range(requests):
        scheduler.enqueue(pending(100 + key), 0)
    assert scheduler.poll(0) == [Execute(Slot(0), tuple(range(100, 100 + requests)))]
    assert scheduler.completed(Slot(0), took_ns) is None


def test_requests_of_one_turn_are_polled_together():
    scheduler = DynamicBatchScheduler(BatchPolicy(max_batch_size=16), instances=1)
    assert scheduler.enqueue(pending(1), 0) == 1
    assert scheduler.poll(0) == [Execute(Slot(0), (1,))]
    assert scheduler.enqueue(pending(2), 1) is None, "no slot is free"
    assert scheduler.completed(Slot(0), TOOK) == 1


def test_a_batch_waits_for_closed_loop_clients_up_to_its_expected_size():
    scheduler = DynamicBatchScheduler(BatchPolicy(max_batch_size=16), instances=1)
    run_together(scheduler, 4, TOOK)
    assert scheduler.try_start(1) is None
    assert [scheduler.enqueue(pending(key), 1) for key in range(1, 5)] == [2, 2, 2, 0]
    assert scheduler.poll(1) == [Execute(Slot(0), (1, 2, 3, 4))]


def test_the_expected_size_after_a_fast_batch_is_half_as_large():
    scheduler = DynamicBatchScheduler(BatchPolicy(max_batch_size=16), instances=1)
    run_together(scheduler, 8, took_ns=100)
    assert [scheduler.enqueue(pending(key), 1) for key in range(1, 5)] == [2, 2, 2, 0]


def test_a_batch_below_its_expected_size_waits_as_the_last_batch_ends():
    scheduler = DynamicBatchScheduler(BatchPolicy(max_batch_size=16), instances=1)
    for key in range(4):
        scheduler.enqueue(pending(key), 0)
    scheduler.poll(0)
    for key in range(4, 8):
        scheduler.enqueue(pending(key), 0)
    # Of 8 requests in the model 8 are expected, and 4 are there.
    assert scheduler.completed(Slot(0), TOOK) == 1


def test_a_batch_of_the_expected_size_starts_as_the_last_batch_ends():
    scheduler = DynamicBatchScheduler(BatchPolicy(max_batch_size=16), instances=1)
    scheduler.enqueue(pending(0), 0)
    scheduler.poll(0)
    for key in range(1, 9):
        scheduler.enqueue(pending(key), 0)
    assert scheduler.completed(Slot(0), 100) == 0


def test_a_queued_request_can_be_cancelled_and_a_running_one_cannot():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=4))
    for key in range(1, 4):
        arrive(scheduler, pending(key), key)

    assert [scheduler.try_cancel(key) for key in (2, 2, 0, 99)] == [True, False, False, False]
    assert finish_all(scheduler, 10) == [Execute(Slot(0), (1, 3))]


def test_the_rest_of_a_waiting_batch_runs_when_a_request_is_cancelled():
    scheduler = DynamicBatchScheduler(PREFERRED, instances=1)
    for key, rows in ((1, 1), (2, 2), (3, 2)):
        assert arrive(scheduler, pending(key, rows), key) == []

    assert scheduler.try_cancel(1)
    assert scheduler.poll(10) == [Execute(Slot(0), (2, 3))]


def test_later_requests_fill_the_batches_of_cancelled_ones():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=2))
    for key in range(1, 6):
        arrive(scheduler, pending(key), key)
    for key in (1, 3, 4):
        assert scheduler.try_cancel(key)

    assert finish_all(scheduler, 10) == [Execute(Slot(0), (2, 5))]


def test_the_next_request_replaces_a_cancelled_one_in_an_open_batch():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=4))
    arrive(scheduler, pending(1, rows=3), 1)
    arrive(scheduler, pending(2), 2)
    arrive(scheduler, pending(3, rows=2), 3)
    arrive(scheduler, pending(4), 4)
    assert scheduler.try_cancel(3)
    arrive(scheduler, pending(5, rows=3), 5)

    assert finish_all(scheduler, 10) == [Execute(Slot(0), (1, 2)), Execute(Slot(0), (4, 5))]


def test_after_a_cancel_the_delay_counts_from_the_next_oldest_request():
    scheduler = DynamicBatchScheduler(BatchPolicy(max_batch_size=4, max_queue_delay_ns=100), instances=1)
    arrive(scheduler, pending(1), 0)
    arrive(scheduler, pending(2), 40)
    assert scheduler.try_cancel(1)

    assert scheduler.wake_at() == 140
    assert scheduler.try_cancel(2)
    assert (scheduler.wake_at(), scheduler.queued) == (None, 0)


def test_drain_returns_queued_requests_in_order_and_empties_the_queue():
    scheduler = busy_scheduler(
        BatchPolicy(
            max_batch_size=2, timeout_action=TimeoutAction.DELAY, default_timeout_ns=100, allow_timeout_override=True
        )
    )
    for key, timeout_us in ((1, 0), (2, 0), (3, 0)):
        arrive(scheduler, pending(key, timeout_us=timeout_us), key)
    scheduler.poll(102)  # 1 and 2 are delayed now

    assert scheduler.drain() == [1, 2, 3]
    assert (scheduler.queued, scheduler.oldest_enqueued_at(), scheduler.wake_at()) == (0, None, None)
    scheduler.completed(Slot(0), TOOK)
    assert scheduler.poll(1000) == []


def test_repr_shows_queue_and_instances():
    scheduler = busy_scheduler(BatchPolicy())
    scheduler.add_slot(Slot(1))
    scheduler.enqueue(pending(1), 0)

    assert repr(scheduler) == "<DynamicBatchScheduler queue=1 running=1/2>"
