"""Bounds of the queue of the dynamic batcher."""

import pytest

from halimede.core.schedule.actions import Execute, Slot
from halimede.core.schedule.policy import BatchPolicy
from halimede.core.types import ErrorCode, InferenceError
from support.refusals import error_of
from support.scheduling import TOOK, arrive, busy_scheduler, expired, finish_all, pending

FULL = InferenceError(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")


def test_a_full_queue_refuses_and_counts_only_queued_requests():
    scheduler = busy_scheduler(BatchPolicy(max_queue_size=2))
    arrive(scheduler, pending(1), 1)
    arrive(scheduler, pending(2), 2)

    assert error_of(scheduler.enqueue, pending(3), 3) == FULL
    assert scheduler.queued == 2
    scheduler.completed(Slot(0), TOOK)
    assert scheduler.poll(4) == [Execute(Slot(0), (1,))]
    assert arrive(scheduler, pending(3), 5) == []


def test_bytes_of_a_request_count_until_it_leaves_the_queue_in_any_way():
    policy = BatchPolicy(max_queue_bytes=100, default_timeout_ns=1000, allow_timeout_override=True)
    scheduler = busy_scheduler(policy)
    arrive(scheduler, pending(1, size_bytes=60, timeout_us=1), 0)  # until 1000
    assert error_of(scheduler.enqueue, pending(2, size_bytes=41), 0) == FULL
    arrive(scheduler, pending(2, size_bytes=40), 1)
    assert scheduler.poll(1000) == [expired(1)]
    arrive(scheduler, pending(3, size_bytes=60), 1000)
    assert scheduler.try_cancel(3)
    arrive(scheduler, pending(4, size_bytes=60), 1000)
    scheduler.completed(Slot(0), TOOK)
    assert scheduler.poll(1000) == [Execute(Slot(0), (2,))]
    arrive(scheduler, pending(5, size_bytes=40), 1000)
    assert scheduler.drain() == [4, 5]
    arrive(scheduler, pending(6, size_bytes=60), 1000)
    arrive(scheduler, pending(7, size_bytes=40), 1000)

    with pytest.raises(InferenceError):
        scheduler.enqueue(pending(8, size_bytes=1), 1000)


def test_an_empty_queue_accepts_one_request_above_the_byte_bound():
    scheduler = busy_scheduler(BatchPolicy(max_queue_bytes=100))
    scheduler.enqueue(pending(1, size_bytes=101), 0)

    with pytest.raises(InferenceError):
        scheduler.enqueue(pending(2, size_bytes=0), 0)
    assert scheduler.queued == 1


def test_a_refused_request_does_not_close_the_open_batch():
    scheduler = busy_scheduler(BatchPolicy(max_batch_size=4, max_queue_size=1))
    arrive(scheduler, pending(1, shape="a"), 0)
    with pytest.raises(InferenceError):
        scheduler.enqueue(pending(2, shape="b"), 1)
    with pytest.raises(InferenceError):
        scheduler.enqueue(pending(2, shape="b"), 1)

    assert finish_all(scheduler, 2) == [Execute(Slot(0), (1,))]
