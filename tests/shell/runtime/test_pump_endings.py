"""Requests of worker processes that are cancelled, refused or aborted, and messages to their workers."""

import asyncio

import pytest

from halimede.core.config.check_request import Checked
from halimede.core.schedule.wait_graph import ANSWERED, Dependencies
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.caller import Answers, RunningBatch
from halimede.core.types.statistics import FailureReason
from halimede.runtime.clock import monotonic_ns
from support.loops import in_a_loop
from support.pumping import Bench, outputs

INTERNAL, CANCELLED, UNAVAILABLE = ErrorCode.INTERNAL, ErrorCode.CANCELLED, ErrorCode.UNAVAILABLE


@in_a_loop
async def test_a_cancelled_running_request_is_ended_by_its_worker() -> None:
    bench = Bench(workers=2, preferred_batch_size=(1,))
    bench.submit(1, 2)
    await bench.turn()
    bench.workers[1].send(2, outputs())
    bench.pump.cancel(2)
    bench.pump.cancel(2)
    assert [worker.cancelled for worker in bench.workers] == [[], [2]]
    assert bench.workers[1].batches[0][0].cancelled
    bench.workers[1].send(2, outputs())  # for a finished request
    assert bench.answers == [(2, "ok", False)]
    bench.workers[1].send(2, InferenceError(CANCELLED, ""), final=True)
    assert bench.answers[1:] == [(2, CANCELLED, True)]
    assert bench.stats.failures[FailureReason.CANCELED] == 1


@in_a_loop
async def test_a_request_made_while_a_dead_workers_requests_fail_waits_for_a_new_one() -> None:
    bench = Bench(concurrency=2, preferred_batch_size=(1,))
    worker = bench.workers[0]

    def submit_next(response: InferenceResponse) -> None:
        assert response.error == InferenceError(CANCELLED, "request was cancelled")
        bench.submit(2)

    request = InferenceRequest("m", id="1")
    bench.requests.submit(1, request, Checked(1, 4, ()), submit_next, monotonic_ns())
    bench.pump.cancel(1)
    worker.die(has_read=False)  # the second slot must not run request 2: `execute` asserts that the worker is up
    assert (bench.answers, bench.pump.queued) == ([], 1)
    worker.restart()
    await bench.turn()
    worker.finish(0, outputs())
    assert bench.answers == [(2, "ok", True)]
    await bench.pump.close()


@in_a_loop
async def test_a_cancelled_request_is_never_counted_as_a_success() -> None:
    bench = Bench()
    bench.submit(1)
    bench.pump.cancel(1)
    bench.workers[0].send(1, outputs())
    bench.workers[0].send(1, None, final=True)
    assert bench.answers == [(1, CANCELLED, True)]
    assert (bench.stats.success_count, bench.stats.failures[FailureReason.CANCELED]) == (0, 1)


@in_a_loop
async def test_a_cancelled_open_request_ends_at_once() -> None:
    bench = Bench()
    bench.submit(1)
    worker = bench.workers[0]
    worker.finish()
    worker.send(1, outputs())
    bench.pump.cancel(1)
    assert bench.answers == [(1, "ok", False), (1, CANCELLED, True)]
    assert worker.cancelled == [1]
    await bench.pump.close()
    worker.send(1, outputs())
    worker.send(1, None, final=True)
    assert len(bench.answers) == 2


@in_a_loop
async def test_a_request_cancelled_while_it_runs_ends_with_its_batch() -> None:
    bench = Bench()
    bench.submit(1)
    bench.pump.cancel(1)
    assert bench.answers == []
    bench.workers[0].finish()
    assert bench.answers == [(1, CANCELLED, True)]
    await bench.pump.close()


@in_a_loop
async def test_a_cancelled_request_whose_client_reads_on_continues() -> None:
    bench = Bench()
    bench.submit(1, 2)
    worker = bench.workers[0]
    for key in (1, 2):
        bench.pump.cancel(key, reads_on=True)
    # The second one was queued.
    assert (bench.answers, worker.asked_to_cancel) == ([(2, CANCELLED, True)], [1])
    worker.send(1, outputs())
    worker.finish()
    worker.send(1, outputs())
    assert bench.answers[1:] == [(1, "ok", False)] * 2
    # Nobody reads it any more.
    bench.pump.cancel(1)
    assert (bench.answers[3:], worker.cancelled) == ([(1, CANCELLED, True)], [1])
    await bench.pump.close()


@in_a_loop
async def test_acknowledgements_go_to_the_worker_of_the_request() -> None:
    bench = Bench(workers=2, preferred_batch_size=(1,))
    bench.submit(1, 2)
    await bench.turn()
    bench.workers[1].send(2, outputs())
    bench.pump.acknowledge(2, 1)
    bench.workers[1].finish()
    bench.pump.acknowledge(2, 3)
    bench.workers[1].send(2, None, final=True)
    bench.pump.acknowledge(2, 1)
    assert [worker.acknowledged for worker in bench.workers] == [[], [(2, 1), (2, 3)]]


@in_a_loop
async def test_a_dead_worker_gets_no_messages() -> None:
    bench = Bench()
    bench.submit(1, 2)
    bench.workers[0].finish()
    await bench.turn()
    bench.workers[0].die()
    bench.pump.acknowledge(1, 1)
    bench.pump.cancel(1)
    bench.pump.abort()
    assert (bench.workers[0].acknowledged, bench.workers[0].cancelled) == ([], [])
    assert bench.answers == [(1, CANCELLED, True), (2, UNAVAILABLE, True)]


@in_a_loop
async def test_abort_ends_all_requests_and_cancels_them_at_their_workers() -> None:
    bench = Bench(preferred_batch_size=(1,))
    bench.submit(1, 2, 3)
    worker = bench.workers[0]
    worker.finish()
    await bench.turn()
    bench.pump.abort()
    assert bench.answers == [(3, UNAVAILABLE, True), (1, UNAVAILABLE, True), (2, UNAVAILABLE, True)]
    assert sorted(worker.cancelled) == [1, 2]
    worker.send(1, outputs(), final=True)
    worker.finish()
    assert len(bench.answers) == 3
    await bench.pump.close()
    assert worker.stopped


@in_a_loop
async def test_close_waits_for_open_requests() -> None:
    bench = Bench()
    bench.submit(1)
    bench.workers[0].finish()
    closing = asyncio.ensure_future(bench.pump.close())
    await asyncio.sleep(0)
    assert not closing.done()
    bench.workers[0].send(1, None, final=True)
    await closing


@pytest.mark.parametrize("where", ["queued", "running", "open"])
@in_a_loop
async def test_a_request_is_refused_only_while_it_is_queued(where: str) -> None:
    bench = Bench(preferred_batch_size=(1,))
    (worker,) = bench.workers
    stuck = InferenceError(UNAVAILABLE, "no instance will answer")
    bench.submit(1, 2)
    await bench.turn()
    if where == "open":
        worker.send(1, outputs())
        worker.finish()
    bench.responses.clear()
    key, is_queued = (2, True) if where == "queued" else (1, False)
    assert [bench.pump.try_refuse(key, stuck) for _ in range(2)] == [is_queued, False]
    refusals = [(each, response.error, response.final) for each, response in bench.responses]
    assert refusals == ([(key, stuck, True)] if is_queued else [])
    assert worker.cancelled == []
    assert (key in bench.table.by_ticket) is not is_queued
    if where != "open":
        worker.finish(reply=outputs())
    worker.send(1, outputs(), final=True)
    await bench.turn()
    assert worker.executed == ([1] if is_queued else [1, 2])
    assert [each for each, response in bench.responses if each == key and response.final] == [key]


@in_a_loop
async def test_the_place_of_a_request_names_what_it_waits_for() -> None:
    bench = Bench(preferred_batch_size=(1,))
    (worker,) = bench.workers
    pump = bench.pump
    bench.submit(1, 2)
    await bench.turn()
    first, second = RunningBatch("m", "1", 1), RunningBatch("m", "1", 2)
    assert (pump.dependencies_of(1), pump.dependencies_of(2)) == (
        Dependencies([(first, Answers(first))]),
        Dependencies([(first,)]),
    )
    worker.finish()
    assert (pump.dependencies_of(1), pump.dependencies_of(3)) == (Dependencies([(Answers(first),)]), ANSWERED)
    assert pump.dependencies_of(2) == Dependencies([()]), "nothing runs before the turn ends"
    await bench.turn()
    assert pump.dependencies_of(2) == Dependencies([(second, Answers(second))])


@in_a_loop
async def test_a_request_of_a_batch_that_has_not_begun_is_queued() -> None:
    bench = Bench(preferred_batch_size=(1,), decoupled=False)
    (worker,) = bench.workers
    bench.submit(1, 2)
    await bench.turn()
    first, second = RunningBatch("m", "1", 1), RunningBatch("m", "1", 2)
    assert [item.key for item in worker.next[0]] == [2]
    assert (bench.pump.queued, bench.executing) == (1, 1)
    assert bench.pump.dependencies_of(2) == Dependencies([(first,)])
    worker.finish(reply=outputs())
    assert bench.pump.dependencies_of(2) == Dependencies([(second, Answers(second))])
    assert (bench.pump.queued, bench.executing) == (0, 1)


@in_a_loop
async def test_a_request_sent_from_the_callback_of_a_refusal_is_refused() -> None:
    bench = Bench(preferred_batch_size=(1,))

    def ask_again(response: InferenceResponse) -> None:
        bench.submit(3)

    bench.submit(1)
    bench.requests.submit(2, InferenceRequest("m"), Checked(1, 4, ()), ask_again, monotonic_ns())
    bench.workers[0].die(parked=True)
    assert bench.answers == [(3, UNAVAILABLE, True)]
    assert list(bench.table.by_ticket) == [1]
