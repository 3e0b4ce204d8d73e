"""The next batch of a busy instance is prefetched, and preempted when it is needed elsewhere."""

import pytest

from halimede.core.config.model_config import TimeoutAction
from halimede.core.schedule.actions import Slot
from halimede.core.schedule.dynamic_batcher import DynamicBatchScheduler
from halimede.core.schedule.policy import BatchPolicy, Priorities
from halimede.core.schedule.queue import BatchQueue
from halimede.core.schedule.scheduler import Pending
from halimede.core.types import InferenceError
from support.prefetching import Instances, dynamic
from support.scheduling import expired, pending
from support.strategies import Groups

A, B = Slot(0), Slot(1)
MS = 1_000_000


each_queue = pytest.mark.parametrize("levels", [None, Priorities(2, 2)], ids=["one level", "levels"])


@each_queue
def test_a_full_batch_waits_at_the_busy_instance(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=2), levels=levels)
    played.arrive(*map(pending, range(1, 6)))
    assert played.batches == {A: [(1, 2), (3, 4)]}
    assert played.scheduler.queued == 3, "the requests of a batch that has not begun are queued"
    played.end(A)
    assert (played.begun, played.scheduler.queued) == ([(1, 2), (3, 4)], 1)


@each_queue
def test_a_batch_that_can_grow_is_not_prefetched(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=4), levels=levels)
    played.arrive(pending(1))
    played.arrive(pending(2), pending(3), pending(4))
    assert played.batches == {A: [(1,)]}
    played.arrive(pending(5))
    assert played.batches == {A: [(1,), (2, 3, 4, 5)]}


PREFERRED = BatchPolicy(max_batch_size=16, preferred_batch_sizes=(4, 8), allow_timeout_override=True)


def test_a_batch_that_lies_ready_becomes_a_larger_preferred_size():
    played = dynamic(PREFERRED)
    played.arrive(pending(1, rows=8))
    played.arrive(*map(pending, range(2, 9)))
    assert played.batches == {A: [(1,), (2, 3, 4, 5)]}
    played.arrive(pending(9))
    assert played.batches == {A: [(1,), (2, 3, 4, 5, 6, 7, 8, 9)]}
    played.arrive(pending(10))
    played.end(A)
    played.end(A)
    assert played.begun[1:] == [(2, 3, 4, 5, 6, 7, 8, 9), (10,)]


def test_a_batch_that_has_begun_does_not_become_larger():
    played = dynamic(PREFERRED)
    played.arrive(pending(1, rows=8))
    played.arrive(*map(pending, range(2, 6)))
    played.end(A, report=False)
    played.arrive(*map(pending, range(6, 10)))
    played.report(A)
    assert played.batches == {A: [(2, 3, 4, 5), (6, 7, 8, 9)]}


def test_a_batch_that_lies_ready_is_cut_anew_when_a_request_behind_it_leaves():
    for leaves in ("cancelled", "expired"):
        played = dynamic(PREFERRED)
        played.arrive(pending(1, rows=8))
        played.arrive(pending(2, rows=4))
        played.arrive(pending(3, rows=1, timeout_us=1000), pending(4, rows=2), pending(5, rows=2))
        assert played.batches == {A: [(1,), (2,)]}
        if leaves == "cancelled":
            assert played.cancel(3)
        else:
            played.pass_time(MS)
        assert played.batches == {A: [(1,), (2, 4, 5)]}, leaves


@each_queue
def test_a_batch_is_cut_anew_when_the_request_that_closed_it_leaves(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=4), levels=levels)
    played.arrive(pending(1, rows=4))
    played.arrive(pending(2), pending(3, shape="other"), pending(4))
    assert played.batches == {A: [(1,), (2,)]}
    assert played.cancel(3)
    played.end(A)
    assert played.batches == {A: [(2, 4)]}


def test_requests_behind_a_batch_of_another_shape_do_not_join_one_before_it():
    played = dynamic(PREFERRED, 2)
    played.arrive(pending(1, rows=8))
    played.arrive(pending(2, rows=8))
    played.arrive(pending(3, rows=4))
    played.arrive(pending(4, rows=8, shape="other"))
    played.arrive(pending(5, rows=4))
    assert played.batches == {A: [(1,), (3,)], B: [(2,), (4,)]}


def test_a_request_before_the_one_that_closed_a_batch_joins_it():
    played = dynamic(BatchPolicy(max_batch_size=4), 1, Priorities(2, 1))
    played.arrive(pending(1, rows=4))
    played.arrive(pending(2), Pending(3, 1, 4, "other", priority=2))
    assert played.batches == {A: [(1,), (2,)]}
    played.arrive(pending(4))
    played.end(A)
    assert played.batches == {A: [(2, 4)]}


def test_no_request_is_sent_often_if_many_sizes_are_preferred():
    played = dynamic(BatchPolicy(max_batch_size=16, preferred_batch_sizes=tuple(range(1, 17))))
    played.arrive(pending(1, rows=16))
    for key in range(2, 18):
        played.arrive(pending(key))
    assert played.batches == {A: [(1,), tuple(range(2, 18))]}
    assert played.taken_back == 4, "batches of 1, 2, 4 and 8 requests"


def test_after_a_batch_that_became_larger_a_smaller_one_lies_ready():
    played = dynamic(PREFERRED)
    played.arrive(pending(1, rows=8))
    played.arrive(pending(2, rows=4))
    played.arrive(pending(3, rows=4))
    played.end(A)
    played.arrive(pending(4, rows=4))
    assert played.batches == {A: [(2, 3), (4,)]}


def test_after_a_batch_that_lost_its_request_another_lies_ready():
    played = dynamic(PREFERRED)
    played.arrive(pending(1, rows=8))
    played.arrive(pending(2, rows=4))
    assert played.cancel(2)
    played.end(A)
    played.arrive(pending(3))
    played.arrive(pending(4, rows=4))
    assert played.batches == {A: [(3,), (4,)]}


def test_after_a_batch_that_another_instance_took_the_next_lies_ready():
    played = dynamic(BatchPolicy(max_batch_size=16, preferred_batch_sizes=(4, 16)), 2)
    played.arrive(pending(1, rows=16))
    played.arrive(pending(2, rows=16))
    played.arrive(pending(3, rows=4))
    assert played.batches == {A: [(1,), (3,)], B: [(2,)]}
    played.end(B)
    played.arrive(pending(4, rows=4))
    assert played.batches == {A: [(1,), (4,)], B: [(3,)]}


def test_cancelled_requests_do_not_make_an_instance_get_batches_without_end():
    played = dynamic(PREFERRED)
    played.arrive(pending(1, rows=8))
    for key in range(2, 100):
        played.arrive(pending(key, rows=4))
        assert played.cancel(key)
    assert played.taken_back == 1


def test_an_instance_has_at_most_one_batch_more():
    played = dynamic(BatchPolicy(), 2)
    played.arrive(*map(pending, range(1, 8)))
    assert played.batches == {A: [(1,), (3,)], B: [(2,), (4,)]}


def test_nothing_is_prefetched_that_cannot_be_taken_back():
    played = dynamic(BatchPolicy(max_batch_size=2), prefetches=False)
    played.arrive(*map(pending, range(1, 6)))
    assert played.batches == {A: [(1, 2)]}


@each_queue
def test_the_requests_of_a_prefetched_batch_count_against_the_bound(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=1, max_queue_size=2), levels=levels)
    for key in (1, 2, 3):
        played.arrive(pending(key))
    assert played.batches == {A: [(1,), (2,)]}
    with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
        played.scheduler.enqueue(pending(4), 0)


@each_queue
def test_a_cancelled_request_leaves_a_batch_that_has_not_begun(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=2), levels=levels)
    played.arrive(*map(pending, range(1, 5)))
    assert played.cancel(4)
    assert played.batches == {A: [(1, 2)]}
    played.end(A)
    assert played.begun == [(1, 2), (3,)]


@each_queue
def test_a_request_that_has_begun_cannot_be_cancelled(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=1), levels=levels)
    played.arrive(pending(1), pending(2))
    played.end(A, report=False)
    assert not played.cancel(2), "it runs, although the scheduler has not been told"
    played.report(A)
    assert (played.begun, played.scheduler.queued) == ([(1,), (2,)], 0)


@each_queue
def test_an_instance_gives_back_one_batch_for_each_that_it_runs(levels: Priorities | None):
    """Else clients that cancel their requests would make the server send batches without end."""
    played = dynamic(BatchPolicy(max_batch_size=1), levels=levels)
    played.arrive(*map(pending, range(1, 6)))
    for key in (2, 3, 4):
        assert played.cancel(key)
    assert (played.taken_back, played.batches) == (1, {A: [(1,)]})
    played.arrive(pending(6))
    played.end(A)
    assert played.batches == {A: [(5,), (6,)]}


@each_queue
def test_a_request_expires_in_a_batch_that_has_not_begun(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=2, allow_timeout_override=True), levels=levels)
    played.arrive(pending(1), pending(2), pending(3, timeout_us=1000), pending(4))
    assert played.batches == {A: [(1, 2), (3, 4)]}
    played.pass_time(MS)
    assert played.failed == [expired(3)]
    assert played.batches == {A: [(1, 2)]}
    played.end(A)
    assert played.begun == [(1, 2), (4,)]


@each_queue
def test_a_request_that_has_begun_does_not_expire(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=1, default_timeout_ns=MS), levels=levels)
    played.arrive(pending(1), pending(2))
    played.end(A, report=False)
    played.pass_time(MS)
    assert played.failed == []
    played.report(A)
    assert (played.begun, played.scheduler.queued) == ([(1,), (2,)], 0)


@each_queue
def test_a_late_request_of_a_batch_is_delayed(levels: Priorities | None):
    policy = BatchPolicy(1, default_timeout_ns=MS, timeout_action=TimeoutAction.DELAY)
    played = dynamic(policy, levels=levels)
    played.arrive(pending(1), pending(2), pending(3))
    played.pass_time(MS // 2)
    played.arrive(pending(4))
    played.pass_time(MS // 2)
    for _ in range(4):
        played.end(A)
    assert played.begun == [(1,), (4,), (2,), (3,)]


@each_queue
def test_a_free_instance_takes_the_batch_of_a_busy_one(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=1), 2, levels=levels)
    played.arrive(pending(1), pending(2), pending(3))
    assert played.batches == {A: [(1,), (3,)], B: [(2,)]}
    played.end(B)
    assert played.batches == {A: [(1,)], B: [(3,)]}


@each_queue
def test_a_batch_does_not_wait_for_a_slow_instance(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=1), 2, levels=levels)
    played.arrive(*map(pending, range(1, 9)))
    assert played.batches == {A: [(1,), (3,)], B: [(2,), (4,)]}
    played.end(B)
    played.end(B)
    assert played.batches == {A: [(1,)], B: [(5,), (3,)]}, "others have overtaken 3 twice"
    played.end(A)
    assert played.batches[A] == [(6,), (7,)], "after its batch it gets one again"


def test_a_request_of_a_higher_level_runs_before_a_batch_that_has_not_begun():
    played = dynamic(BatchPolicy(max_batch_size=1), 1, Priorities(2, 2))
    played.arrive(pending(1), pending(2), pending(3))
    assert played.batches == {A: [(1,), (2,)]}
    played.arrive(Pending(4, 1, 4, priority=1))
    assert played.batches == {A: [(1,)]}
    played.end(A)
    assert played.batches == {A: [(4,), (2,)]}, "prefetched again, in the order of arrival"
    for _ in range(3):
        played.end(A)
    assert played.begun == [(1,), (4,), (2,), (3,)]


def test_a_request_of_a_higher_level_does_not_stop_a_batch_that_has_begun():
    played = dynamic(BatchPolicy(max_batch_size=1), 1, Priorities(2, 2))
    played.arrive(pending(1), pending(2), pending(3))
    played.end(A, report=False)
    played.arrive(Pending(4, 1, 4, priority=1))
    played.report(A)
    assert played.batches == {A: [(2,), (4,)]}


def test_a_request_of_the_same_level_leaves_the_batch_where_it_is():
    played = dynamic(BatchPolicy(max_batch_size=1), 1, Priorities(2, 2))
    played.arrive(pending(1))
    played.arrive(Pending(2, 1, 4, priority=1))
    played.arrive(Pending(3, 1, 4, priority=1), pending(4))
    assert (played.batches, played.taken_back) == ({A: [(1,), (2,)]}, 0)


def test_all_instances_give_back_batches_for_a_higher_level():
    """The next instance that ends its batch must run it, whichever that is."""
    played = dynamic(BatchPolicy(max_batch_size=1), 2, Priorities(2, 2))
    played.arrive(*map(pending, range(1, 6)))
    assert played.batches == {A: [(1,), (3,)], B: [(2,), (4,)]}
    played.arrive(Pending(6, 1, 4, priority=1))
    played.end(B)
    assert played.batches == {A: [(1,)], B: [(6,), (3,)]}
    played.end(A)
    assert played.batches == {A: [(4,), (5,)], B: [(6,), (3,)]}


def test_a_request_that_moves_up_runs_before_a_batch_that_has_not_begun():
    played = dynamic(BatchPolicy(max_batch_size=1), 1, Priorities(3, 3, aging_ns=MS))
    played.arrive(pending(1), pending(2))
    played.pass_time(MS // 2)
    # Now 2 is prefetched. It moves up first, and is prefetched again by the end of the running batch.
    played.arrive(Pending(3, 1, 4, priority=2))
    assert (played.batches, played.taken_back) == ({A: [(1,)]}, 1)
    played.end(A)
    assert played.batches == {A: [(3,), (2,)]}
    played.pass_time(MS // 2)
    assert (played.batches, played.taken_back) == ({A: [(3,)]}, 2)
    played.end(A)
    assert played.begun == [(1,), (3,), (2,)]


def test_a_request_that_moves_up_overtakes_a_batch_that_has_not_begun():
    played = dynamic(BatchPolicy(max_batch_size=1), 1, Priorities(3, 3, aging_ns=MS))
    played.arrive(pending(1))
    played.arrive(pending(2))
    # So nothing is prefetched until 1 ends.
    assert played.cancel(2)
    played.arrive(pending(3))
    played.pass_time(MS // 2)
    played.arrive(Pending(4, 1, 4, priority=2), Pending(5, 1, 4, priority=2))
    played.end(A)
    assert played.batches == {A: [(4,), (5,)]}
    # In level 2 it is before 5, because it arrived earlier.
    played.pass_time(MS // 2)
    played.end(A)
    assert played.begun == [(1,), (4,), (3,)]


def test_a_late_request_is_not_prefetched():
    """A request of its level that arrives comes before it."""
    policy = BatchPolicy(1, default_timeout_ns=MS, timeout_action=TimeoutAction.DELAY)
    played = dynamic(policy, 1, Priorities(2, 2))
    played.arrive(*map(pending, (1, 2, 3, 4)))
    played.pass_time(MS)
    played.end(A)
    assert played.batches == {A: [(2,)]}
    played.arrive(pending(5))
    for _ in range(3):
        played.end(A)
    assert played.begun == [(1,), (2,), (5,), (3,), (4,)]


def test_a_batch_that_becomes_larger_with_time_is_not_prefetched():
    """Until the delay is over the preferred size runs, then all that fit."""
    policy = BatchPolicy(max_batch_size=4, preferred_batch_sizes=(2, 4), max_queue_delay_ns=MS)
    played = dynamic(policy, 1, Priorities(2, 2))
    played.arrive(pending(1, rows=4))
    played.arrive(pending(2, rows=2), pending(3), pending(4, rows=2))
    assert played.batches == {A: [(1,)]}
    played.pass_time(MS)
    played.end(A)
    assert played.begun == [(1,), (2, 3)]


def test_the_rows_of_a_batch_that_came_back_count():
    played = dynamic(BatchPolicy(max_batch_size=4, max_queue_delay_ns=MS), 1, Priorities(2, 2))
    played.arrive(*map(pending, range(1, 9)))
    assert played.batches == {A: [(1, 2, 3, 4), (5, 6, 7, 8)]}
    assert played.cancel(5)
    played.end(A)
    assert played.batches == {}, "three of four rows wait for the delay"
    played.arrive(pending(9))
    assert played.begun[-1] == (6, 7, 8, 9)


def test_the_shapes_of_a_batch_that_came_back_count():
    played = dynamic(BatchPolicy(max_batch_size=4, max_queue_delay_ns=MS), 1, Priorities(2, 2))
    played.arrive(*[pending(key, shape="a") for key in range(1, 9)])
    played.arrive(pending(9, shape="b"))
    assert played.cancel(7)
    assert played.cancel(8)
    played.end(A)
    assert played.batches == {A: [(5, 6)]}, "closed by the request of another shape, so it does not wait"


def test_the_delay_of_a_request_is_its_own():
    """Not that of a batch that has begun, of which the scheduler has not heard."""
    played = dynamic(BatchPolicy(max_batch_size=2, max_queue_delay_ns=MS), 2, Priorities(2, 2))
    played.arrive(*map(pending, range(1, 7)))
    assert played.batches == {A: [(1, 2), (5, 6)], B: [(3, 4)]}
    played.end(A, report=False)
    played.now = MS // 2
    played.arrive(pending(7))
    played.end(B)
    assert played.scheduler.wake_at() == MS // 2 + MS


def test_bounds_of_levels_count_the_requests_of_a_prefetched_batch():
    policies = {2: BatchPolicy(max_queue_size=2)}
    played = dynamic(BatchPolicy(max_batch_size=1), 1, Priorities(2, 2, policies))
    for key in (1, 2, 3):
        played.arrive(pending(key))
    assert played.batches == {A: [(1,), (2,)]}
    with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
        played.scheduler.enqueue(pending(4), 0)
    played.end(A)
    played.arrive(pending(4))
    assert played.scheduler.queued == 2


def test_no_batch_of_a_strategy_is_prefetched():
    """It would see the requests of a batch again that is taken back."""
    policy = BatchPolicy(max_batch_size=2)
    played = Instances(
        lambda take_back: DynamicBatchScheduler(policy, 1, BatchQueue(policy, take_back, strategy=Groups()))
    )
    played.arrive(*map(pending, range(1, 6)))
    assert played.batches == {A: [(1, 2)]}


@each_queue
def test_unread_batches_of_a_dead_instance_run_first(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=2), levels=levels)
    played.arrive(*map(pending, range(1, 7)))
    assert played.die(A, unread=(3, 4)) == [3, 4]
    played.start(A)
    assert played.batches == {A: [(3, 4), (5, 6)]}


@each_queue
def test_an_unread_batch_of_a_dead_instance_is_prefetched_for_another(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=2), 2, levels)
    played.arrive(*map(pending, range(1, 5)))
    assert played.die(A, unread=(1, 2)) == [1, 2]
    assert played.batches == {B: [(3, 4), (1, 2)]}


@each_queue
def test_a_dead_instance_takes_a_batch_with_it_that_it_had_begun(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=2), levels=levels)
    played.arrive(*map(pending, range(1, 7)))
    assert played.die(A) == []
    assert played.scheduler.queued == 2
    played.start(A)
    assert played.batches == {A: [(5, 6)]}


@each_queue
def test_an_emptied_queue_has_the_batch_that_has_not_begun(levels: Priorities | None):
    played = dynamic(BatchPolicy(max_batch_size=1), 2, levels=levels)
    played.arrive(*map(pending, range(1, 6)))
    played.end(A, report=False)
    assert played.scheduler.drain() == [4, 5], "3 has begun"
    played.report(A)
    played.end(A)
    assert played.scheduler.queued == 0
    played.arrive(pending(6))
    assert played.batches[A] == [(6,)]
