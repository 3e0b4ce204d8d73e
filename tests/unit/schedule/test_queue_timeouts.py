"""Queue timeouts of the dynamic batcher."""

from dataclasses import replace

import pytest

from halimede.core.config.model_config import TimeoutAction
from halimede.core.schedule.actions import Action, Execute, Slot
from halimede.core.schedule.dynamic_batcher import DynamicBatchScheduler
from halimede.core.schedule.policy import BatchPolicy, Priorities
from halimede.core.schedule.queue import BatchQueue
from support.scheduling import arrive, busy_scheduler, expired, finish_all, pending


def test_a_queued_request_is_rejected_exactly_at_its_deadline():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=4, default_timeout_ns=100))
    arrive(scheduler, pending(1), 10)
    arrive(scheduler, pending(2), 20)

    assert scheduler.wake_at() == 110
    assert scheduler.poll(109) == []
    assert scheduler.poll(110) == [expired(1)]
    assert scheduler.wake_at() == 120
    assert finish_all(scheduler, 119) == [Execute(Slot(0), (2,))]
    assert scheduler.wake_at() is None


def test_a_batch_runs_without_its_late_request():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=2, default_timeout_ns=100, allow_timeout_override=True))
    arrive(scheduler, pending(1, timeout_us=0), 0)
    arrive(scheduler, pending(2), 50)
    arrive(scheduler, pending(3), 60)

    assert finish_all(scheduler, 100) == [expired(1), Execute(Slot(0), (2, 3))]


def test_requests_with_one_deadline_are_rejected_in_order_of_arrival():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=4, default_timeout_ns=100))
    for key in (9, 3, 7):
        arrive(scheduler, pending(key), 0)

    assert scheduler.poll(100) == [expired(9), expired(3), expired(7)]


def test_a_timeout_shorter_than_the_delay_rejects_the_request():
    scheduler = DynamicBatchScheduler(
        BatchPolicy(max_batch_size=4, max_queue_delay_ns=300, default_timeout_ns=100), instances=1
    )
    arrive(scheduler, pending(1), 0)

    assert scheduler.wake_at() == 100
    assert scheduler.poll(100) == [expired(1)]


def test_an_executing_request_never_times_out():
    scheduler = DynamicBatchScheduler(BatchPolicy(default_timeout_ns=100), instances=1)

    assert arrive(scheduler, pending(1), 0) == [Execute(Slot(0), (1,))]
    assert (scheduler.wake_at(), scheduler.poll(1000)) == (None, [])


@pytest.mark.parametrize(
    ("default_us", "override", "asked_us", "effective_us"),
    [
        (0, False, 0, 0),
        (0, False, 50, 0),
        (100, False, 50, 100),
        (100, True, 0, 100),
        (100, True, 50, 50),
        (100, True, 500, 100),
        (0, True, 50, 50),
        (0, True, 2**64 - 1, 2**64 - 1),
    ],
)
def test_a_request_may_only_shorten_the_timeout_of_its_policy(
    default_us: int, override: bool, asked_us: int, effective_us: int
):
    policy = BatchPolicy(default_timeout_ns=default_us * 1000, allow_timeout_override=override)
    scheduler = busy_scheduler(policy)
    arrive(scheduler, pending(1, timeout_us=asked_us), 7)

    assert scheduler.wake_at() == (7 + effective_us * 1000 if effective_us else None)


DELAYING = BatchPolicy(max_batch_size=4, timeout_action=TimeoutAction.DELAY, default_timeout_ns=100)


def test_a_delayed_request_runs_after_those_within_their_timeout():
    scheduler = busy_scheduler(DELAYING)
    for key, now in ((1, 0), (2, 10), (3, 90)):
        arrive(scheduler, pending(key), now)
    assert scheduler.wake_at() == 100
    assert scheduler.poll(100) == []
    assert scheduler.poll(110) == []
    assert (scheduler.queued, scheduler.oldest_enqueued_at(), scheduler.wake_at()) == (3, 0, 190)

    assert finish_all(scheduler, 120) == [Execute(Slot(0), (3, 1, 2))]


def test_delayed_requests_form_batches_in_order_by_size_and_shape():
    scheduler = busy_scheduler(DELAYING)
    for key, rows, shape in ((1, 3, "a"), (2, 3, "a"), (3, 1, "a"), (4, 1, "b"), (5, 1, "a")):
        arrive(scheduler, pending(key, rows=rows, shape=shape), key)

    assert finish_all(scheduler, 200) == [
        Execute(Slot(0), (1,)),
        Execute(Slot(0), (2, 3)),
        Execute(Slot(0), (4,)),
        Execute(Slot(0), (5,)),
    ]


WAITING = BatchPolicy(
    max_batch_size=8,
    preferred_batch_sizes=(4, 8),
    max_queue_delay_ns=300,
    timeout_action=TimeoutAction.DELAY,
    default_timeout_ns=100,
)


def test_a_delayed_request_waits_for_its_delay_behind_the_others():
    scheduler = DynamicBatchScheduler(WAITING, instances=1)
    arrive(scheduler, pending(1), 0)
    arrive(scheduler, pending(2), 250)

    assert (scheduler.poll(100), scheduler.poll(299), scheduler.wake_at()) == ([], [], 300)
    assert scheduler.poll(300) == [Execute(Slot(0), (2, 1))]


def test_a_delayed_request_runs_when_a_preferred_size_is_reached():
    scheduler = DynamicBatchScheduler(WAITING, instances=1)
    arrive(scheduler, pending(1), 0)
    assert scheduler.poll(100) == []

    assert [arrive(scheduler, pending(key), 110) for key in (2, 3)] == [[], []]
    assert arrive(scheduler, pending(4), 120) == [Execute(Slot(0), (2, 3, 4, 1))]


SHORT = BatchPolicy(max_batch_size=4, allow_timeout_override=True, pick_up_ns=5_000)
LEVELS = Priorities(2, 2, {1: replace(SHORT, allow_timeout_override=False)})


@pytest.mark.parametrize("levels", [None, LEVELS], ids=["one level", "levels"])
@pytest.mark.parametrize(("timeout_us", "is_over"), [(0, False), (1, True), (5, True), (6, False)])
def test_a_timeout_of_a_few_microseconds_is_over_beside_an_idle_instance(
    timeout_us: int, is_over: bool, levels: Priorities | None
):
    queue = None if levels is None else BatchQueue(SHORT, priorities=levels)
    scheduler = DynamicBatchScheduler(SHORT, 1, queue)
    assert (scheduler.try_start(1, timeout_us) is None) == is_over
    if is_over:
        assert arrive(scheduler, pending(1, timeout_us=timeout_us), 7) == [expired(1)]
        assert arrive(scheduler, pending(2), 7) == [Execute(Slot(0), (2,))]


def test_a_short_timeout_of_the_policy_delays_each_request():
    policy = replace(DELAYING, default_timeout_ns=5_000, pick_up_ns=5_000, max_queue_delay_ns=300)
    scheduler = DynamicBatchScheduler(policy, instances=1)
    assert scheduler.try_start(4) is None
    for key in (1, 2):
        assert arrive(scheduler, pending(key), key) == []
    assert scheduler.poll(301) == [Execute(Slot(0), (1, 2))]


def test_the_rest_of_a_waiting_batch_runs_if_it_has_a_preferred_size():
    policy = BatchPolicy(8, (4, 8), max_queue_delay_ns=1 << 80, allow_timeout_override=True)
    scheduler = DynamicBatchScheduler(policy, instances=1)
    arrive(scheduler, pending(1, rows=1, timeout_us=9), 0)
    assert [arrive(scheduler, pending(key, rows=2), key) for key in (2, 3)] == [[], []]

    assert scheduler.poll(9_000) == [expired(1), Execute(Slot(0), (2, 3))]


def test_a_delayed_request_is_never_rejected_and_can_be_cancelled():
    scheduler = busy_scheduler(DELAYING)
    arrive(scheduler, pending(1), 0)
    assert scheduler.poll(10_000) == []

    assert scheduler.try_cancel(1)
    assert finish_all(scheduler, 10_000) == []


def test_deadlines_are_exact_after_many_requests_were_cancelled():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=4, allow_timeout_override=True))
    timeouts_us = {key: 2000 + key * 7919 % 1009 for key in range(1, 1001)}
    for key, timeout_us in timeouts_us.items():
        arrive(scheduler, pending(key, timeout_us=timeout_us), 0)
        if key % 10:
            assert scheduler.try_cancel(key)

    rejected: dict[Action, int] = {}
    while (now := scheduler.wake_at()) is not None:
        assert scheduler.poll(now - 1) == []
        rejected |= dict.fromkeys(scheduler.poll(now), now)

    assert rejected == {expired(key): timeout_us * 1000 for key, timeout_us in timeouts_us.items() if key % 10 == 0}


def test_a_reused_key_has_its_own_deadline():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=4, default_timeout_ns=100))
    arrive(scheduler, pending(1), 0)
    assert scheduler.try_cancel(1)
    arrive(scheduler, pending(1), 60)

    assert scheduler.poll(100) == []
    assert scheduler.wake_at() == 160
    assert scheduler.poll(160) == [expired(1)]
