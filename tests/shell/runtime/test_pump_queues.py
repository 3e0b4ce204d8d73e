"""Queue policies, priorities and batching strategies through the pump, and the reasons for which failures count."""

import asyncio
import time

from halimede.core.config.model_config import ModelConfig, ModelDynamicBatching, ModelQueuePolicy, TimeoutAction
from halimede.core.schedule.make import make_scheduler
from halimede.core.schedule.policy import StartHold
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason
from support.loops import in_a_loop
from support.pumping import Bench, outputs
from support.strategies import Groups

LEVELS = {"priority_levels": 3, "default_priority_level": 2}


def failures(bench: Bench) -> dict[FailureReason, int]:
    return {reason: count for reason, count in bench.stats.failures.items() if count}


@in_a_loop
async def test_requests_of_a_higher_priority_run_first() -> None:
    bench = Bench(decoupled=False, preferred_batch_size=(1,), **LEVELS)
    bench.submit(1)
    bench.submit(2, priority=3)
    bench.submit(3)
    bench.submit(4, priority=1)
    (worker,) = bench.workers
    order = []
    while worker.batches:
        order += [item.key for batch in worker.batches.values() for item in batch]
        worker.finish(reply=outputs())
        await bench.turn()
    assert order == [1, 4, 3, 2]
    assert [key for key, _, _ in bench.answers] == [1, 4, 3, 2]


@in_a_loop
async def test_a_queued_request_expires_near_its_deadline() -> None:
    """Behind a busy instance, with a thousand queued requests of all levels that have a later deadline or none."""
    policies = {1: ModelQueuePolicy(default_timeout_microseconds=20_000_000, allow_timeout_override=True)}
    bench = Bench(decoupled=False, priority_queue_policy=policies, **LEVELS)
    bench.submit(1)
    for key in range(2, 1002):
        bench.submit(key, priority=1 + key % 3)
    begun = time.monotonic()
    bench.submit(1002, priority=1, timeout_us=2000)
    async with asyncio.timeout(10):
        while not bench.answers:
            await asyncio.sleep(0)
    took = time.monotonic() - begun
    assert bench.answers == [(1002, ErrorCode.UNAVAILABLE, True)]
    assert bench.responses[0][1].error == InferenceError(ErrorCode.UNAVAILABLE, "Request timeout expired")
    # Triton, which looks twice a second, would take half a second.
    assert 0.002 <= took < 0.4


@in_a_loop
async def test_a_full_level_refuses_while_others_accept() -> None:
    policies = {3: ModelQueuePolicy(max_queue_size=1)}
    bench = Bench(decoupled=False, priority_queue_policy=policies, **LEVELS)
    bench.submit(1)
    bench.submit(2, 3, 4, priority=3)
    bench.submit(5, priority=1)
    assert bench.answers == [(3, ErrorCode.UNAVAILABLE, True), (4, ErrorCode.UNAVAILABLE, True)]
    assert failures(bench) == {FailureReason.REJECTED: 2}


@in_a_loop
async def test_each_failure_counts_once_for_its_own_reason() -> None:
    policies = {1: ModelQueuePolicy(default_timeout_microseconds=1000), 3: ModelQueuePolicy(max_queue_size=1)}
    bench = Bench(decoupled=False, preferred_batch_size=(1,), priority_queue_policy=policies, **LEVELS)
    (worker,) = bench.workers
    bench.submit(1)
    bench.submit(2, priority=1)
    async with asyncio.timeout(10):
        while not bench.answers:
            await asyncio.sleep(0)
    assert failures(bench) == {FailureReason.REJECTED: 1}, "its timeout expired"
    bench.submit(3, 4, priority=3)
    assert failures(bench) == {FailureReason.REJECTED: 2}, "the queue is full"
    bench.submit(5)
    bench.pump.cancel(5)
    bench.pump.cancel(5)
    assert failures(bench) == {FailureReason.REJECTED: 2, FailureReason.CANCELED: 1}
    worker.finish(reply=InferenceError(ErrorCode.INTERNAL, "boom"))
    await bench.turn()
    assert failures(bench) == {
        FailureReason.REJECTED: 2,
        FailureReason.CANCELED: 1,
        FailureReason.BACKEND: 1,
    }
    bench.submit(6)
    bench.pump.abort()
    # 3 executes and 6 is queued.
    assert failures(bench) == {
        FailureReason.REJECTED: 2,
        FailureReason.CANCELED: 1,
        FailureReason.BACKEND: 1,
        FailureReason.OTHER: 2,
    }
    assert (bench.requests.count, bench.stats.success_count) == (0, 0)


@in_a_loop
async def test_answers_keep_their_order_over_instances_and_timeouts() -> None:
    policy = ModelQueuePolicy(default_timeout_microseconds=1000)
    bench = Bench(
        workers=2,
        decoupled=False,
        preserve_ordering=True,
        preferred_batch_size=(1,),
        default_queue_policy=policy,
        priority_levels=1,
        default_priority_level=1,
    )
    first, second = bench.workers
    bench.submit(1, 2, 3)
    await bench.turn()
    async with asyncio.timeout(10):
        while bench.pump.queued:
            await asyncio.sleep(0)
    second.finish(reply=outputs())
    assert bench.answers == [], "2 is done and 3 has expired; both are behind 1"
    first.finish(reply=outputs())
    assert bench.answers == [(1, "ok", True), (2, "ok", True), (3, ErrorCode.UNAVAILABLE, True)]


@in_a_loop
async def test_delayed_requests_run_without_a_stall() -> None:
    policy = ModelQueuePolicy(TimeoutAction.DELAY, default_timeout_microseconds=1000)
    bench = Bench(decoupled=False, preferred_batch_size=(1,), default_queue_policy=policy, **LEVELS)
    (worker,) = bench.workers
    bench.submit(*range(1, 21))
    await asyncio.sleep(0.002)
    begun = time.monotonic()
    while worker.batches:
        worker.finish(reply=outputs())
        await bench.turn()
    # Half a second for each of them in Triton.
    assert time.monotonic() - begun < 1
    assert [answer for _, answer, _ in bench.answers] == ["ok"] * 20


@in_a_loop
async def test_a_strategy_gets_the_requests_themselves() -> None:
    seen: list[object] = []

    class Tenants(Groups):
        def begin(self) -> "Tenants":
            return Tenants()

        def include(self, request: object) -> bool:
            seen.append((request.id, dict(request.parameters)))
            return True

        def end(self) -> None:
            seen.append("end")

    config = ModelConfig(name="m", max_batch_size=4, dynamic_batching=ModelDynamicBatching())
    bench = Bench(decoupled=False, scheduler=make_scheduler(config, strategy=Tenants()))
    bench.submit(1, parameters={"tenant": "a"})
    await bench.turn()
    assert seen == [("1", {"tenant": "a"}), "end"]


@in_a_loop
async def test_a_failing_strategy_fails_its_requests_and_the_model_serves_on() -> None:
    config = ModelConfig(name="m", max_batch_size=4, dynamic_batching=ModelDynamicBatching())
    # Every request of a Bench has 4 bytes.
    strategy = Groups(bad_bytes=4)
    bench = Bench(decoupled=False, scheduler=make_scheduler(config, strategy=strategy))
    bench.submit(1, 2)
    await bench.turn()
    assert bench.answers == [(1, ErrorCode.INTERNAL, True), (2, ErrorCode.INTERNAL, True)]
    assert failures(bench) == {FailureReason.OTHER: 2}
    strategy.bad_bytes = 0
    bench.submit(3)
    await bench.turn()
    bench.workers[0].finish(reply=outputs())
    assert bench.answers[2:] == [(3, "ok", True)]


@in_a_loop
async def test_the_first_execution_waits_for_the_configured_requests() -> None:
    config = ModelConfig(name="m", max_batch_size=4, dynamic_batching=ModelDynamicBatching())
    bench = Bench(decoupled=False, scheduler=make_scheduler(config, hold=StartHold(3)))
    (worker,) = bench.workers
    bench.submit(1)
    await bench.turn()
    bench.submit(2)
    await bench.turn()
    assert not worker.batches
    bench.submit(3)
    await bench.turn()
    assert [[item.key for item in batch] for batch in worker.batches.values()] == [[1, 2, 3]]
    worker.finish(reply=outputs())
    bench.submit(4)
    await bench.turn()
    assert [[item.key for item in batch] for batch in worker.batches.values()] == [[4]]
