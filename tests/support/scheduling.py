"""Requests, and a scheduler with one instance, for tests of batches."""

from collections.abc import Hashable

from halimede.core.schedule.actions import Action, Execute, Fail, Slot
from halimede.core.schedule.dynamic_batcher import DynamicBatchScheduler
from halimede.core.schedule.policy import BatchPolicy
from halimede.core.schedule.scheduler import Pending
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason

TOOK = 1_000_000


def pending(key: int, rows: int = 1, shape: Hashable = (), size_bytes: int = 4, timeout_us: int = 0) -> Pending:
    return Pending(key, rows, size_bytes, shape, timeout_us=timeout_us)


def arrive(scheduler: DynamicBatchScheduler, request: Pending, now_ns: int) -> list[Action]:
    scheduler.enqueue(request, now_ns)
    return scheduler.poll(now_ns)


def expired(key: int) -> Fail:
    return Fail(key, InferenceError(ErrorCode.UNAVAILABLE, "Request timeout expired"), FailureReason.EXPIRED)


def busy_scheduler(policy: BatchPolicy) -> DynamicBatchScheduler:
    """A scheduler whose one instance runs request 0."""
    scheduler = DynamicBatchScheduler(policy, instances=1)
    scheduler.enqueue(pending(0, rows=policy.max_batch_size), 0)
    assert scheduler.poll(0) == [Execute(Slot(0), (0,))]
    return scheduler


def finish_all(scheduler: DynamicBatchScheduler, now_ns: int) -> list[Action]:
    """Complete instance 0 until it gets no further batch, at one time, and collect the actions."""
    actions: list[Action] = []
    scheduler.completed(Slot(0), TOOK)
    while given := scheduler.poll(now_ns):
        actions += given
        scheduler.completed(Slot(0), TOOK)
    return actions
