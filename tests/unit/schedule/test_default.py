"""The scheduler of a model without `dynamic_batching`: one request per execution."""

from halimede.core.config.model_config import ModelConfig, TimeoutAction
from halimede.core.schedule.actions import Execute, Fail, Slot
from halimede.core.schedule.dynamic_batcher import DynamicBatchScheduler
from halimede.core.schedule.make import make_scheduler
from halimede.core.schedule.policy import BatchPolicy
from halimede.core.schedule.scheduler import Pending, Scheduler
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason
from support.refusals import error_of

TOOK = 1_000_000


def default(instances: int) -> Scheduler:
    scheduler = make_scheduler(ModelConfig(max_batch_size=8))
    for instance in range(instances):
        scheduler.add_slot(Slot(instance))
    return scheduler


def test_every_request_runs_alone_in_the_order_of_arrival():
    scheduler = default(instances=1)
    for key in (1, 2, 3):
        scheduler.enqueue(Pending(key, 1, 4), key)

    given = []
    for now in (10, 11, 12):
        given.append(scheduler.poll(now))
        scheduler.completed(Slot(0), TOOK)

    assert given == [[Execute(Slot(0), (1,))], [Execute(Slot(0), (2,))], [Execute(Slot(0), (3,))]]


def test_requests_spread_over_the_instances():
    scheduler = default(instances=2)
    for key in (1, 2, 3):
        scheduler.enqueue(Pending(key, 1, 4), 0)

    assert scheduler.poll(0) == [Execute(Slot(0), (1,)), Execute(Slot(1), (2,))]
    scheduler.completed(Slot(1), TOOK)
    assert scheduler.poll(1) == [Execute(Slot(1), (3,))]


def test_a_request_of_many_rows_is_one_execution():
    scheduler = default(instances=2)
    scheduler.enqueue(Pending(1, 8, 4), 0)
    scheduler.enqueue(Pending(2, 3, 4), 0)

    assert scheduler.poll(0) == [Execute(Slot(0), (1,)), Execute(Slot(1), (2,))]


def test_it_never_waits_for_other_requests():
    scheduler = default(instances=1)
    scheduler.enqueue(Pending(1, 1, 4), 0)

    assert scheduler.poll(0) == [Execute(Slot(0), (1,))]


def test_its_queue_is_bounded():
    scheduler = DynamicBatchScheduler(BatchPolicy(max_queue_size=1))
    scheduler.enqueue(Pending(1, 1, 4), 0)

    assert error_of(scheduler.enqueue, Pending(2, 1, 4), 0) == InferenceError(
        ErrorCode.UNAVAILABLE, "Exceeds maximum queue size"
    )


def test_timeouts_reject_or_delay():
    rejecting = DynamicBatchScheduler(BatchPolicy(default_timeout_ns=100))
    delaying = DynamicBatchScheduler(BatchPolicy(default_timeout_ns=100, timeout_action=TimeoutAction.DELAY))
    for scheduler in (rejecting, delaying):
        scheduler.enqueue(Pending(1, 2, 4), 0)
        scheduler.enqueue(Pending(2, 2, 4), 0)
        scheduler.enqueue(Pending(3, 2, 4), 50)
        scheduler.add_slot(Slot(0))

    timed_out = InferenceError(ErrorCode.UNAVAILABLE, "Request timeout expired")
    assert rejecting.poll(100) == [
        Fail(1, timed_out, FailureReason.EXPIRED),
        Fail(2, timed_out, FailureReason.EXPIRED),
        Execute(Slot(0), (3,)),
    ]
    assert delaying.poll(100) == [Execute(Slot(0), (3,))]
    delaying.completed(Slot(0), TOOK)
    assert delaying.poll(100) == [Execute(Slot(0), (1,))]
    delaying.completed(Slot(0), TOOK)
    assert delaying.poll(100) == [Execute(Slot(0), (2,))]
