"""The pump with a worker that the test controls: exactly one answer per request, in all cases."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from halimede.core.accounts import UNBOUNDED, MemoryBounds
from halimede.core.config.check_request import Checked, RequestChecker
from halimede.core.config.model_config import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelOutput,
    ModelQueuePolicy,
    ModelTensorReshape,
)
from halimede.core.observe.stats import ModelStats
from halimede.core.schedule.make import make_scheduler
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from halimede.core.types.statistics import FailureReason
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.pump import Pump
from halimede.runtime.requests import RequestTable, VersionRequests
from halimede.workers.worker import BatchDone, BatchItem, BatchTimes
from support.loops import in_a_loop
from support.refusals import error_of


class PlayedWorker:
    """Holds its batches until the test finishes them."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.name = f"m_{ordinal}"
        self.concurrency = 1
        self.batches: list[list[BatchItem]] = []
        self.stopped = False

    def execute(self, items: list[BatchItem], slot: int = 0) -> None:
        self.batches.append(items)

    def take_back(self, _slot: int) -> bool:
        if len(self.batches) < 2:
            return False
        self.batches.pop()
        return True

    def cancel(self, key: int) -> None:
        """An instance on a thread checks its items' flags."""

    async def stop(self) -> None:
        self.stopped = True


OUTPUT = ModelOutput(name="OUT", data_type=DataType.FP32, dims=(1,))


def config(output: ModelOutput, max_batch_size: int, **batching: object) -> ModelConfig:
    return ModelConfig(
        name="m",
        max_batch_size=max_batch_size,
        input=(ModelInput(name="IN", data_type=DataType.FP32, dims=(1,)),),
        output=(output,),
        dynamic_batching=ModelDynamicBatching(**batching),
    )


class Bench:
    """A pump with workers that the test controls, and the answers of its requests."""

    def __init__(
        self,
        workers: int = 1,
        limit_bytes: int = 1 << 30,
        output: ModelOutput = OUTPUT,
        max_batch_size: int = 4,
        memory: MemoryBounds = UNBOUNDED,
        **batching: object,
    ) -> None:
        made = config(output, max_batch_size, **batching)
        self.table = RequestTable(limit_bytes, memory=memory)
        self.stats = ModelStats("m", "1")
        in_order = bool(batching.get("preserve_ordering"))
        requests = partial(VersionRequests, self.table, self.stats, preserve_ordering=in_order)
        self.pump = Pump(partial(make_scheduler, made), requests, RequestChecker(made), asyncio.get_running_loop())
        self.requests = self.pump.requests
        self.workers = [PlayedWorker(ordinal) for ordinal in range(workers)]
        for worker in self.workers:
            self.pump.add_worker(worker)
        self.answers: list[tuple[int, object]] = []

    def submit(self, *keys: int, timeout_us: int = 0) -> None:
        for key in keys:
            request = InferenceRequest("m", id=str(key), timeout_us=timeout_us)
            self.requests.submit(key, request, Checked(1, 4, ()), self._answer(key), monotonic_ns())

    def _answer(self, key: int) -> Callable[[InferenceResponse], None]:
        def on_response(response: InferenceResponse) -> None:
            assert response.id == str(key)
            self.answers.append((key, response.error.code if response.error is not None else "ok"))

        return on_response

    @property
    def executing(self) -> int:
        return self.requests.count - self.pump.queued

    async def turn(self) -> None:
        """Let the loop's turn end, so that its requests are executed."""
        await asyncio.sleep(0)

    def finish(self, worker: int = 0, error: InferenceError | None = None) -> None:
        items = self.workers[worker].batches.pop(0)
        now = monotonic_ns()
        replies = [error or [Tensor("OUT", DataType.FP32, (1, 1), b"\0" * 4)] for _ in items]
        done = BatchDone(self.workers[worker], items, replies, BatchTimes(now, now, now, now), failed=error is not None)
        self.pump.on_event(done)

    def running(self, worker: int = 0) -> list[list[int]]:
        return [[item.key for item in batch] for batch in self.workers[worker].batches]


@in_a_loop
async def test_a_backlog_forms_a_batch_behind_the_running_one() -> None:
    bench = Bench()
    bench.submit(1, 2, 3)
    assert bench.running() == [[1]]
    bench.finish()
    assert bench.answers == [(1, "ok")]
    await bench.turn()
    assert bench.running() == [[2, 3]]
    bench.finish()
    assert bench.answers == [(1, "ok"), (2, "ok"), (3, "ok")]
    assert (bench.table.by_ticket, bench.table.decoded.held_bytes) == ({}, 0)
    assert (bench.stats.success_count, bench.stats.execution_count) == (3, 2)


@in_a_loop
async def test_a_lone_request_is_executed_at_once() -> None:
    bench = Bench()
    for key in range(1, 4):
        bench.submit(key)
        assert bench.running() == [[key]]
        bench.finish()
        assert bench.answers[-1] == (key, "ok")


@in_a_loop
async def test_requests_of_one_loop_turn_share_a_batch() -> None:
    bench = Bench(workers=2)
    bench.submit(1, 2, 3)
    await bench.turn()
    assert (bench.running(0), bench.running(1)) == ([[1]], [[2, 3]])


@in_a_loop
async def test_a_new_request_joins_the_queue_in_the_turn_in_which_a_batch_ends() -> None:
    bench = Bench()
    bench.submit(1, 2)
    bench.finish()
    bench.submit(3)
    await bench.turn()
    assert bench.running() == [[2, 3]]
    assert bench.answers == [(1, "ok")]


@in_a_loop
async def test_clients_that_send_again_after_a_batch_share_the_next_one() -> None:
    bench = Bench(max_batch_size=16)
    bench.submit(*range(1, 10))
    assert bench.running() == [[1]]
    bench.finish()
    # Half of the earlier number, and before the answers are processed.
    assert bench.running() == [[2, 3, 4, 5, 6, 7, 8, 9]]
    bench.finish()

    bench.submit(10)
    await bench.turn()
    bench.submit(11)
    assert bench.running() == []
    await bench.turn()
    assert bench.running() == [[10, 11]]
    bench.finish()
    # Two were expected: the pump waits for no others.
    bench.submit(12)
    assert bench.running() == [[12]]


@in_a_loop
async def test_half_of_many_expected_requests_start_without_waiting() -> None:
    bench = Bench(max_batch_size=16)
    bench.submit(*range(1, 10))
    bench.finish()
    bench.finish()
    bench.submit(10, 11, 12)
    assert bench.running() == []
    bench.submit(13, 14)
    assert bench.running() == [[10, 11, 12, 13]]
    bench.finish()
    await bench.turn()
    await bench.turn()
    assert bench.running() == [[14]]


@in_a_loop
async def test_a_queued_request_that_is_cancelled_never_runs() -> None:
    bench = Bench()
    bench.submit(1, 2, 3)
    bench.pump.cancel(2)
    assert bench.answers == [(2, ErrorCode.CANCELLED)]
    bench.finish()
    await bench.turn()
    assert bench.running() == [[3]]
    assert bench.stats.failures[FailureReason.CANCELED] == 1


@in_a_loop
async def test_a_running_request_that_is_cancelled_gets_its_flag_and_one_answer() -> None:
    bench = Bench()
    bench.submit(1)
    flag = bench.workers[0].batches[0][0]
    bench.pump.cancel(1)
    bench.pump.cancel(1)
    assert (flag.cancelled, bench.answers) == (True, [])
    bench.finish(error=InferenceError(ErrorCode.CANCELLED, ""))
    assert bench.answers == [(1, ErrorCode.CANCELLED)]
    assert bench.stats.failures[FailureReason.CANCELED] == 1


@in_a_loop
async def test_failed_batch_fails_only_its_own_requests() -> None:
    bench = Bench()
    bench.submit(1, 2)
    bench.finish(error=InferenceError(ErrorCode.INTERNAL, "boom"))
    await bench.turn()
    bench.finish()
    assert bench.answers == [(1, ErrorCode.INTERNAL), (2, "ok")]
    assert bench.stats.failures[FailureReason.BACKEND] == 1
    assert bench.stats.execution_count == 1


@in_a_loop
async def test_a_full_queue_answers_at_once() -> None:
    bench = Bench(default_queue_policy=ModelQueuePolicy(max_queue_size=2))
    bench.submit(1, 2, 3, 4)
    assert bench.answers == [(4, ErrorCode.UNAVAILABLE)]
    assert bench.stats.failures[FailureReason.REJECTED] == 1


@in_a_loop
async def test_the_bytes_in_flight_are_bounded_over_all_models() -> None:
    bench = Bench(limit_bytes=8)
    bench.submit(1, 2, 3)
    assert bench.answers == [(3, ErrorCode.UNAVAILABLE)]
    bench.finish()
    bench.submit(4)
    assert bench.table.decoded.held_bytes == 8
    assert Bench(limit_bytes=1).submit(1) is None


@pytest.mark.parametrize(("free_bytes", "answers"), [(16, []), (15, [(1, ErrorCode.UNAVAILABLE)])])
@in_a_loop
async def test_a_request_above_the_bound_is_taken_if_there_is_memory_for_it(
    free_bytes: int, answers: list[tuple[int, ErrorCode]]
) -> None:
    bench = Bench(limit_bytes=1, memory=MemoryBounds(has_free=lambda size_bytes: size_bytes <= free_bytes))
    bench.submit(1)
    assert bench.answers == answers


@in_a_loop
async def test_refused_request_leaves_no_record_and_blocks_no_other() -> None:
    policy = ModelQueuePolicy(max_queue_size=1)
    bench = Bench(preserve_ordering=True, preferred_batch_size=(1,), default_queue_policy=policy)
    bench.submit(1, 2, 3)
    assert bench.answers == [(3, ErrorCode.UNAVAILABLE)]
    assert (bench.requests.count, list(bench.table.by_ticket), bench.table.decoded.held_bytes) == (2, [1, 2], 8)
    bench.finish()
    await bench.turn()
    bench.submit(4)
    bench.finish()
    assert bench.answers[1:] == [(1, "ok"), (2, "ok")]
    assert bench.stats.failures[FailureReason.REJECTED] == 1


@in_a_loop
async def test_a_finished_request_is_counted_and_answered_once() -> None:
    bench = Bench()
    bench.submit(1)
    flight = bench.requests.record_of(1)
    bench.finish()
    bench.requests.fail(flight, InferenceError(ErrorCode.INTERNAL, "late"), FailureReason.OTHER)
    assert (bench.answers, bench.requests.count) == ([(1, "ok")], 0)
    assert (bench.stats.success_count, sum(bench.stats.failures.values())) == (1, 0)


@in_a_loop
async def test_requests_that_are_still_checked_count_as_in_flight() -> None:
    bench = Bench(limit_bytes=8)
    bench.requests.hold(7)
    assert error_of(bench.requests.hold, 7).code is ErrorCode.UNAVAILABLE
    bench.submit(1)
    assert bench.answers == [(1, ErrorCode.UNAVAILABLE)]
    bench.requests.release(7)
    # One alone may be larger.
    bench.requests.hold(9)
    bench.requests.release(9)


@in_a_loop
async def test_a_timeout_fires_without_another_event() -> None:
    bench = Bench(default_queue_policy=ModelQueuePolicy(default_timeout_microseconds=20_000))
    bench.submit(1, 2)
    begun = monotonic_ns()
    async with asyncio.timeout(10):
        while not bench.answers:
            await asyncio.sleep(0.001)
    assert bench.answers == [(2, ErrorCode.UNAVAILABLE)]
    assert monotonic_ns() - begun >= 19_000_000


@in_a_loop
async def test_a_delay_of_a_fraction_of_a_millisecond_ends_without_another_event() -> None:
    bench = Bench(max_queue_delay_microseconds=300)
    bench.submit(1)
    assert bench.running() == []
    async with asyncio.timeout(10):
        while not bench.running():
            await asyncio.sleep(0)
    assert bench.running() == [[1]]


@in_a_loop
async def test_answers_keep_the_order_of_the_requests_if_configured() -> None:
    bench = Bench(workers=2, preserve_ordering=True, preferred_batch_size=(1,))
    bench.submit(1, 2, 3)
    await bench.turn()
    bench.finish(1)
    assert bench.answers == []
    bench.finish(0, InferenceError(ErrorCode.INTERNAL, "boom"))
    assert bench.answers == [(1, ErrorCode.INTERNAL), (2, "ok")]


@in_a_loop
async def test_close_waits_for_accepted_requests() -> None:
    bench = Bench()
    bench.submit(1, 2)
    closing = asyncio.ensure_future(bench.pump.close())
    await asyncio.sleep(0)
    bench.finish()
    await asyncio.sleep(0)
    assert not closing.done()
    bench.finish()
    await closing
    assert bench.workers[0].stopped
    assert bench.answers == [(1, "ok"), (2, "ok")]


@in_a_loop
async def test_abort_answers_everything_and_ignores_late_results() -> None:
    bench = Bench()
    bench.submit(1, 2)
    bench.pump.abort()
    assert sorted(bench.answers) == [(1, ErrorCode.UNAVAILABLE), (2, ErrorCode.UNAVAILABLE)]
    bench.finish()
    assert len(bench.answers) == 2
    await bench.pump.close()


@pytest.mark.parametrize("workers", [1, 3])
@in_a_loop
async def test_every_request_is_answered_once_under_a_mixed_load(workers: int) -> None:
    bench = Bench(workers=workers, default_queue_policy=ModelQueuePolicy(max_queue_size=50))
    for key in range(1, 400):
        bench.submit(key)
        if key % 7 == 0:
            bench.pump.cancel(key - 3)
        if key % 3 == 0:
            for worker in range(workers):
                if bench.workers[worker].batches:
                    bench.finish(worker, InferenceError(ErrorCode.INTERNAL, "x") if key % 5 == 0 else None)
            await bench.turn()
    while bench.table.by_ticket:
        for worker in range(workers):
            if bench.workers[worker].batches:
                bench.finish(worker)
        await bench.turn()
    assert sorted(key for key, _ in bench.answers) == list(range(1, 400))


@in_a_loop
async def test_an_output_that_does_not_fit_its_reshape_fails_only_its_request() -> None:
    reshape = ModelTensorReshape(shape=(1,))
    bench = Bench(output=ModelOutput(name="OUT", data_type=DataType.FP32, dims=(1, 1), reshape=reshape))
    bench.submit(1, 2, 3)
    bench.finish()
    await bench.turn()
    items = bench.workers[0].batches.pop(0)
    now = monotonic_ns()
    good, bad = Tensor("OUT", DataType.FP32, (1, 1), b"\0" * 4), Tensor("OUT", DataType.FP32, (1, 3), b"\0" * 12)
    bench.pump.on_event(BatchDone(bench.workers[0], items, [[bad], [good]], BatchTimes(now, now, now, now)))
    assert bench.answers == [(1, "ok"), (2, ErrorCode.INTERNAL), (3, "ok")]
    await bench.pump.close()


@in_a_loop
async def test_failing_callback_does_not_affect_other_requests() -> None:
    bench = Bench()
    bench.submit(1)

    def broken(response: InferenceResponse) -> None:
        raise ValueError("a front end's own fault")

    bench.requests.submit(2, InferenceRequest("m"), Checked(1, 4, ()), broken, monotonic_ns())
    bench.submit(3)
    bench.finish()
    await bench.turn()
    bench.finish()
    assert bench.answers == [(1, "ok"), (3, "ok")]
    assert bench.table.by_ticket == {}
    await bench.pump.close()
