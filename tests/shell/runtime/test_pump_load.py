"""What a pump shows of its load: busy time of its instances, and how long failed requests were queued."""

import asyncio
import time

from halimede.core.config.model_config import ModelQueuePolicy
from halimede.core.observe.load import Load
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import QueueOutcome
from support.loops import in_a_loop
from support.pumping import Bench, outputs

BOOM = InferenceError(ErrorCode.INTERNAL, "boom")


def busy_ns(bench: Bench) -> list[int]:
    return [each.total_ns for each in bench.pump.load().busy]


def is_busy(bench: Bench) -> list[bool]:
    """Whether the busy time of each instance grows."""
    return [before < after for before, after in zip(busy_ns(bench), busy_ns(bench), strict=True)]


def waits(bench: Bench) -> dict[QueueOutcome, int]:
    """How many requests failed, by outcome; none for an outcome without any."""
    counts = {outcome: sum(waits.buckets) for outcome, waits in bench.stats.failed_waits.items()}
    return {outcome: count for outcome, count in counts.items() if count}


@in_a_loop
async def test_instances_are_busy_while_they_have_a_batch() -> None:
    bench = Bench(workers=2, concurrency=2, preferred_batch_size=(1,))
    assert bench.pump.load() == Load(busy=bench.pump.load().busy)
    assert busy_ns(bench) == [0, 0]
    bench.submit(1, 2, 3)
    await bench.turn()
    assert (is_busy(bench), bench.pump.load().executing) == ([True, True], 3)
    first, second = bench.workers
    for worker in (first, second):
        worker.finish(0, outputs())
    # One of them has a second slot with a batch.
    assert sorted(is_busy(bench)) == [False, True]
    for worker in (first, second):
        if worker.batches:
            worker.finish(1, outputs())
    assert is_busy(bench) == [False, False]
    assert all(ns > 0 for ns in busy_ns(bench))


@in_a_loop
async def test_a_dead_process_is_not_busy() -> None:
    bench = Bench(preferred_batch_size=(1,))
    bench.submit(1, 2)
    await bench.turn()
    (worker,) = bench.workers
    failures = worker.die()
    assert is_busy(bench) == [False]
    worker.restart()
    assert is_busy(bench) == [True], "the second request"
    for failure in failures:
        bench.pump.on_event(failure)
    assert is_busy(bench) == [True], "the late failure ends no other batch"
    worker.finish(reply=outputs())
    assert is_busy(bench) == [False]
    assert waits(bench) == {QueueOutcome.ERROR: 1}


@in_a_loop
async def test_a_failed_request_has_waited_until_its_execution() -> None:
    bench = Bench(decoupled=False, preferred_batch_size=(1,))
    begun_ns = time.monotonic_ns()
    bench.submit(1)
    await bench.turn()
    await asyncio.sleep(0.05)
    bench.workers[0].finish(reply=BOOM)
    assert waits(bench) == {QueueOutcome.ERROR: 1}
    without_execution_ns = time.monotonic_ns() - begun_ns - 50_000_000
    assert bench.stats.failed_waits[QueueOutcome.ERROR].ns <= without_execution_ns


@in_a_loop
async def test_each_outcome_of_a_queued_request() -> None:
    policy = ModelQueuePolicy(default_timeout_microseconds=50_000, max_queue_size=2)
    bench = Bench(preferred_batch_size=(1,), default_queue_policy=policy)
    bench.submit(1)
    await bench.turn()
    bench.submit(2, 3, 4)
    bench.pump.cancel(3)
    assert waits(bench) == {QueueOutcome.REJECTED: 1, QueueOutcome.CANCELLED: 1}
    async with asyncio.timeout(10):
        while bench.pump.queued:
            await asyncio.sleep(0.001)
    assert waits(bench) == {QueueOutcome.REJECTED: 1, QueueOutcome.CANCELLED: 1, QueueOutcome.TIMEOUT: 1}
    assert bench.stats.failed_waits[QueueOutcome.TIMEOUT].ns >= 50_000_000
    assert bench.stats.failed_waits[QueueOutcome.REJECTED].ns < bench.stats.failed_waits[QueueOutcome.TIMEOUT].ns
