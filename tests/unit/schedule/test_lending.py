"""A busy instance is lent its next batch, and gives it back when it is needed elsewhere."""

import pytest

from halimede.core.config.model_config import TimeoutAction
from halimede.core.schedule.actions import Slot
from halimede.core.schedule.default import DefaultScheduler
from halimede.core.schedule.dynamic import DynamicBatchScheduler
from halimede.core.schedule.levels import LevelQueue
from halimede.core.schedule.policy import BatchPolicy, Priorities
from halimede.core.schedule.scheduler import Pending
from halimede.core.types import InferenceError
from support.lending import Instances
from support.scheduling import expired, pending

A, B = Slot(0), Slot(1)
MS = 1_000_000


def instances(policy: BatchPolicy, count: int = 1, priorities: Priorities | None = None) -> Instances:
    queue = LevelQueue(policy, priorities) if priorities is not None else None
    return Instances(DynamicBatchScheduler(policy, count, queue, lends=True))


def test_a_full_batch_waits_at_the_busy_instance():
    played = instances(BatchPolicy(max_batch_size=2))
    played.arrive(*map(pending, range(1, 6)))
    assert played.batches == {A: [(1, 2), (3, 4)]}
    assert played.scheduler.queued == 3, "the requests of a batch that has not begun are queued"
    played.end(A)
    assert (played.begun, played.scheduler.queued) == ([(1, 2), (3, 4)], 1)


def test_a_batch_that_can_grow_is_not_lent():
    played = instances(BatchPolicy(max_batch_size=4))
    played.arrive(pending(1))
    played.arrive(pending(2), pending(3), pending(4))
    assert played.batches == {A: [(1,)]}
    played.arrive(pending(5))
    assert played.batches == {A: [(1,), (2, 3, 4, 5)]}


def test_an_instance_has_at_most_one_batch_more():
    played = Instances(DefaultScheduler(BatchPolicy(), 2, lends=True))
    played.arrive(*map(pending, range(1, 8)))
    assert played.batches == {A: [(1,), (3,)], B: [(2,), (4,)]}


def test_nothing_is_lent_without_leave():
    played = Instances(DynamicBatchScheduler(BatchPolicy(max_batch_size=2), 1))
    played.arrive(*map(pending, range(1, 6)))
    assert played.batches == {A: [(1, 2)]}


def test_the_requests_of_a_lent_batch_count_against_the_bound():
    played = instances(BatchPolicy(max_batch_size=1, max_queue_size=2))
    for key in (1, 2, 3):
        played.arrive(pending(key))
    assert played.batches == {A: [(1,), (2,)]}
    with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
        played.scheduler.enqueue(pending(4), 0)


def test_a_cancelled_request_leaves_a_batch_that_has_not_begun():
    played = instances(BatchPolicy(max_batch_size=2))
    played.arrive(*map(pending, range(1, 5)))
    assert played.cancel(4)
    assert played.batches == {A: [(1, 2)]}
    played.end(A)
    assert played.begun == [(1, 2), (3,)]


def test_a_request_that_has_begun_cannot_be_cancelled():
    played = instances(BatchPolicy(max_batch_size=1))
    played.arrive(pending(1), pending(2))
    played.end(A, report=False)
    assert not played.cancel(2), "it runs, although the scheduler has not been told"
    played.report(A)
    assert (played.begun, played.scheduler.queued) == ([(1,), (2,)], 0)


def test_an_instance_gives_back_one_batch_for_each_that_it_runs():
    """Else clients that cancel their requests would make the server send batches without end."""
    played = instances(BatchPolicy(max_batch_size=1))
    played.arrive(*map(pending, range(1, 6)))
    for key in (2, 3, 4):
        assert played.cancel(key)
    assert (played.taken_back, played.batches) == (1, {A: [(1,)]})
    played.arrive(pending(6))
    played.end(A)
    assert played.batches == {A: [(5,), (6,)]}


def test_a_request_expires_in_a_batch_that_has_not_begun():
    played = instances(BatchPolicy(max_batch_size=2, allow_timeout_override=True))
    played.arrive(pending(1), pending(2), pending(3, timeout_us=1000), pending(4))
    assert played.batches == {A: [(1, 2), (3, 4)]}
    played.pass_time(MS)
    assert played.failed == [expired(3)]
    assert played.batches == {A: [(1, 2)]}
    played.end(A)
    assert played.begun == [(1, 2), (4,)]


def test_a_request_that_has_begun_does_not_expire():
    played = instances(BatchPolicy(max_batch_size=1, default_timeout_ns=MS))
    played.arrive(pending(1), pending(2))
    played.end(A, report=False)
    played.pass_time(MS)
    assert played.failed == []
    played.report(A)
    assert (played.begun, played.scheduler.queued) == ([(1,), (2,)], 0)


def test_a_late_request_of_a_batch_is_delayed():
    policy = BatchPolicy(1, default_timeout_ns=MS, timeout_action=TimeoutAction.DELAY)
    played = instances(policy)
    played.arrive(pending(1), pending(2), pending(3))
    played.pass_time(MS // 2)
    played.arrive(pending(4))
    played.pass_time(MS // 2)
    for _ in range(4):
        played.end(A)
    assert played.begun == [(1,), (4,), (2,), (3,)]


def test_a_free_instance_takes_the_batch_of_a_busy_one():
    played = instances(BatchPolicy(max_batch_size=1), 2)
    played.arrive(pending(1), pending(2), pending(3))
    assert played.batches == {A: [(1,), (3,)], B: [(2,)]}
    played.end(B)
    assert played.batches == {A: [(1,)], B: [(3,)]}


def test_a_batch_does_not_wait_for_a_slow_instance():
    played = instances(BatchPolicy(max_batch_size=1), 2)
    played.arrive(*map(pending, range(1, 9)))
    assert played.batches == {A: [(1,), (3,)], B: [(2,), (4,)]}
    played.end(B)
    played.end(B)
    assert played.batches == {A: [(1,)], B: [(5,), (3,)]}, "others have overtaken 3 twice"
    played.end(A)
    assert played.batches[A] == [(6,), (7,)], "after its batch it is lent one again"


def test_a_queue_of_levels_lends_nothing():
    """A higher priority may arrive before a batch begins."""
    played = instances(BatchPolicy(max_batch_size=1), 1, Priorities(2, 2))
    played.arrive(pending(1), pending(2), pending(3))
    assert played.batches == {A: [(1,)]}
    played.arrive(Pending(4, 1, 4, priority=1))
    for _ in range(4):
        played.end(A)
    assert played.begun == [(1,), (4,), (2,), (3,)]


def test_unread_batches_of_a_dead_instance_run_first():
    played = instances(BatchPolicy(max_batch_size=2))
    played.arrive(*map(pending, range(1, 7)))
    assert played.die(A, unread=(3, 4)) == [3, 4]
    played.start(A)
    assert played.batches == {A: [(3, 4), (5, 6)]}


def test_a_dead_instance_takes_a_batch_with_it_that_it_had_begun():
    played = instances(BatchPolicy(max_batch_size=2))
    played.arrive(*map(pending, range(1, 7)))
    assert played.die(A) == []
    assert played.scheduler.queued == 2
    played.start(A)
    assert played.batches == {A: [(5, 6)]}


def test_an_emptied_queue_has_the_batch_that_has_not_begun():
    played = instances(BatchPolicy(max_batch_size=1), 2)
    played.arrive(*map(pending, range(1, 6)))
    played.end(A, report=False)
    assert played.scheduler.drain() == [4, 5], "3 has begun"
    played.report(A)
    played.end(A)
    assert played.scheduler.queued == 0
    played.arrive(pending(6))
    assert played.batches[A] == [(6,)]
