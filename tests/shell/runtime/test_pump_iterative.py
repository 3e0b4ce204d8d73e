"""Requests of iterative models: they are executed until their model ends them."""

from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.types import ErrorCode
from halimede.workers.worker import ResponseSent
from support.loops import in_a_loop
from support.pumping import MS, outputs, times
from support.queueing_worker import bench_of
from support.sequence_requests import oldest


def iterative(max_batch_size: int = 1) -> SequenceScheduler:
    return SequenceScheduler(oldest(max_batch_size=max_batch_size, iterative=True))


@in_a_loop
async def test_a_response_between_two_executions_reaches_the_client() -> None:
    bench, worker = bench_of(iterative())
    bench.submit(1)
    await bench.turn()
    worker.finish(0)
    bench.pump.on_event(ResponseSent(worker, 1, outputs(), False, times()))
    await bench.turn()
    bench.pump.on_event(ResponseSent(worker, 1, outputs(), False, times()))
    worker.finish()
    assert bench.answers == [(1, "ok", False), (1, "ok", False), (1, "ok", True)]


@in_a_loop
async def test_a_request_that_waits_for_its_next_execution_is_cancelled() -> None:
    bench, worker = bench_of(iterative())
    bench.submit(1)
    await bench.turn()
    worker.finish(0)
    bench.pump.cancel(1)
    await bench.turn()
    assert (bench.answers, worker.given, worker.cancelled) == ([(1, ErrorCode.CANCELLED, True)], [], [1])
    bench.pump.on_event(ResponseSent(worker, 1, outputs(), False, times()))
    assert len(bench.answers) == 1


@in_a_loop
async def test_a_final_response_ends_a_request_that_is_queued_again() -> None:
    bench, worker = bench_of(iterative())
    bench.submit(1, 2)
    await bench.turn()
    worker.finish(0)
    await bench.turn()
    # Request 1 waits for request 2, which executes, and then for its own next execution.
    assert worker.given == [[2]]
    bench.pump.on_event(ResponseSent(worker, 1, outputs(), True, times()))
    assert (bench.answers, bench.pump.queued) == ([(1, "ok", True)], 0)
    worker.finish()
    await bench.turn()
    assert bench.answers == [(1, "ok", True), (2, "ok", True)]
    bench.submit(3)
    await bench.turn()
    assert worker.given == [[3]]


@in_a_loop
async def test_a_final_response_ends_a_request_during_its_next_execution() -> None:
    bench, worker = bench_of(iterative())
    bench.submit(1)
    await bench.turn()
    worker.finish(0)
    await bench.turn()
    bench.pump.on_event(ResponseSent(worker, 1, outputs(), True, times()))
    worker.finish(0)
    bench.submit(2)
    await bench.turn()
    assert (bench.answers, worker.given) == ([(1, "ok", True)], [[2]])


@in_a_loop
async def test_executions_do_not_count_as_time_in_the_queue() -> None:
    bench, worker = bench_of(iterative())
    bench.submit(1)
    await bench.turn()
    (flight,) = bench.table.by_ticket.values()
    queued_ms = flight.queued_ns // MS
    for after_ms, again in ((10, (0,)), (5_015, (0,)), (10_030, ())):
        # Waits of 10, 5 and 15 ms before executions of 5,000 ms.
        start = queued_ms + after_ms
        worker.finish(*again, when=times(start, start, start + 4_999, start + 5_000))
        await bench.turn()
    assert 29 <= bench.stats.queue.ns / MS <= 31, "10 + 5 + 15, without the executions"
