"""Calls of models' code that are queued at a model whose processes the test controls."""

import asyncio
import time
from collections.abc import Hashable
from typing import Any

import pytest

from halimede.core.config.check_request import Checked
from halimede.core.schedule.scheduler import Scheduler
from halimede.core.schedule.sequences.policy import SequencePolicy
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest
from halimede.core.types.caller import Caller, RunningBatch
from halimede.core.types.statistics import FailureReason
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.model_calls import ModelCalls
from support.loops import in_a_loop
from support.pumping import MS, Bench, outputs

LIMIT_S = 10.0
UNAVAILABLE = ErrorCode.UNAVAILABLE


class Calling:
    """Model `a` calls `m`."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self.bench = Bench(preferred_batch_size=(1,), scheduler=scheduler)
        self.calls = ModelCalls(self.bench.table)

    def call(self, key: int, timeout_ms: int, waiter: Hashable = "a batch", **asked: Any) -> None:
        caller = Caller(1, waiter, None, "a", timeout_ms * MS)
        request = InferenceRequest("m", id=str(key), **asked)
        now = monotonic_ns()
        self.bench.requests.submit(key, request, Checked(1, 4, ()), self.bench._note(key), now, caller)
        self.calls.made(key, caller, now, self.bench.pump)

    async def until_answered(self, *keys: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while [key for key, _ in self.bench.responses] != list(keys):
            assert time.monotonic() < deadline, f"{self.bench.answers}, {self.calls!r}"
            await asyncio.sleep(0.001)

    def error_of(self, key: int) -> InferenceError:
        (error,) = (response.error for each, response in self.bench.responses if each == key)
        assert error is not None
        return error


@in_a_loop
async def test_a_call_that_is_queued_for_too_long_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    calling = Calling()
    bench = calling.bench
    bench.submit(1)
    begun = time.monotonic()
    calling.call(2, timeout_ms=30)
    await calling.until_answered(2)
    assert time.monotonic() - begun >= 0.03
    error = calling.error_of(2)
    assert error.code is UNAVAILABLE
    assert error.message.startswith("model 'm' is not called: the call of model 'a' was queued for ")
    assert "(its BLS_TIMEOUT_MS is 30)" in error.message
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("model 'a': its call of model 'm' was ended after ")
    assert line.endswith(" ms in the queue (BLS_TIMEOUT_MS)")
    assert {reason: n for reason, n in bench.stats.failures.items() if n} == {FailureReason.REJECTED: 1}

    bench.workers[0].finish(reply=outputs())
    bench.submit(3)
    bench.workers[0].finish(reply=outputs())
    assert bench.answers[1:] == [(1, "ok", True), (3, "ok", True)]
    assert len(bench.table.waits) == 0


@pytest.mark.parametrize("where", ["running", "open"])
@in_a_loop
async def test_a_call_that_executes_is_never_ended(where: str) -> None:
    calling = Calling()
    bench = calling.bench
    calling.call(1, timeout_ms=10)
    if where == "open":
        bench.workers[0].finish()
    calling.call(2, timeout_ms=10_000)
    await asyncio.sleep(0.1)
    assert bench.answers == []
    if where == "running":
        bench.workers[0].finish(reply=outputs())
    else:
        bench.workers[0].send(1, outputs(), final=True)
    assert bench.answers == [(1, "ok", True)]


@in_a_loop
async def test_without_a_limit_a_call_waits() -> None:
    calling = Calling()
    calling.bench.submit(1)
    calling.call(2, timeout_ms=0)
    await asyncio.sleep(0.1)
    assert calling.bench.answers == []
    assert calling.bench.pump.queued == 1


@in_a_loop
async def test_each_call_has_the_limit_of_its_caller() -> None:
    calling = Calling()
    calling.bench.submit(1)
    calling.call(2, timeout_ms=250)
    calling.call(3, timeout_ms=60_000)
    calling.call(4, timeout_ms=20)
    await calling.until_answered(4)
    await calling.until_answered(4, 2)
    assert calling.bench.pump.queued == 1


@in_a_loop
async def test_time_counts_while_all_processes_of_the_called_model_are_down() -> None:
    calling = Calling()
    (worker,) = calling.bench.workers
    worker.die()
    calling.call(1, timeout_ms=20)
    await calling.until_answered(1)
    assert calling.error_of(1).code is UNAVAILABLE
    worker.restart()
    assert worker.executed == []


@in_a_loop
async def test_a_call_that_is_cancelled_or_begins_in_time_is_not_ended() -> None:
    calling = Calling()
    bench = calling.bench
    bench.submit(1)
    calling.call(2, timeout_ms=50)
    calling.call(3, timeout_ms=50)
    bench.pump.cancel(2)
    bench.workers[0].finish(reply=outputs())
    await asyncio.sleep(0.15)
    assert bench.answers == [(2, ErrorCode.CANCELLED, True), (1, "ok", True)]
    assert bench.workers[0].executed == [1, 3]


@in_a_loop
async def test_a_model_that_drains_is_closed_once_its_queued_calls_are_ended() -> None:
    calling = Calling()
    bench = calling.bench
    bench.workers[0].die()
    calling.call(1, timeout_ms=30)
    await asyncio.wait_for(bench.pump.close(), LIMIT_S)
    assert bench.answers == [(1, UNAVAILABLE, True)]


@in_a_loop
async def test_a_model_whose_call_was_ended_may_call_again_at_once() -> None:
    calling = Calling()
    bench = calling.bench
    bench.submit(1)
    caller = Caller(1, "a batch", None, "a", 20 * MS)
    now, checked = monotonic_ns(), Checked(1, 4, ())
    call_again = lambda _: calling.call(3, timeout_ms=20)  # noqa: E731
    bench.requests.submit(2, InferenceRequest("m"), checked, call_again, now, caller)
    calling.calls.made(2, caller, now, bench.pump)
    await calling.until_answered(3)


OWN_BATCH = RunningBatch("m", "1", 1)


@in_a_loop
async def test_a_call_that_all_instances_wait_for_is_refused() -> None:
    calling = Calling()
    calling.bench.submit(1)
    calling.call(2, timeout_ms=0, waiter=OWN_BATCH)
    assert calling.error_of(2).message == (
        "model 'm' is not called: all its instances wait for the answer, directly or through other models; more "
        "instances would serve the call"
    )


@in_a_loop
async def test_a_call_that_the_instance_of_its_sequence_waits_for_is_refused() -> None:
    calling = Calling(SequenceScheduler(SequencePolicy("m"), instances=1))
    calling.bench.submit(1, sequence_id=7, sequence_start=True)
    await calling.bench.turn()
    calling.call(2, timeout_ms=0, waiter=OWN_BATCH, sequence_id=7)
    assert calling.error_of(2).message == (
        "model 'm' is not called: the instance that has the call's sequence waits for the answer, directly or "
        "through other models; a sequence at another instance would be served"
    )


@in_a_loop
async def test_a_timeout_in_a_sequence_does_not_recommend_more_instances() -> None:
    calling = Calling(SequenceScheduler(SequencePolicy("m"), instances=1))
    calling.bench.submit(1, sequence_id=7, sequence_start=True)
    await calling.bench.turn()
    calling.call(2, timeout_ms=20, sequence_id=7)
    await calling.until_answered(2)
    assert calling.error_of(2).message.endswith(
        "; if the called model waits for its caller, a sequence at another instance would be served; if it is only "
        "busy, raise BLS_TIMEOUT_MS"
    )
