"""The pump with the schedulers of sequences: starts, ends, cancellation, loss of a worker, iterative requests."""

import logging

import pytest

from halimede.core.schedule.sequences.policy import SequencePolicy
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason
from halimede.workers.worker import BatchDone, ResponseSent
from support.loops import in_a_loop
from support.pumping import DEAD, MS, Bench, outputs, times
from support.queueing_worker import QueueingWorker, bench_of
from support.sequence_requests import direct, oldest

LOST = "sequence 7 for model 'm' has lost its state"
NO_START = (
    "inference request for sequence 7 to model 'm' must specify the START flag on the first request of the sequence"
)
KINDS = pytest.mark.parametrize("policy", [direct(4), oldest(6)], ids=["direct", "oldest"])


def errors(bench: Bench) -> list[str]:
    return [response.error.message for _, response in bench.responses if response.error is not None]


@KINDS
@in_a_loop
async def test_a_request_waits_for_the_one_before_it_in_its_sequence(policy: SequencePolicy) -> None:
    bench, worker = bench_of(SequenceScheduler(policy))
    bench.submit(1, sequence_id=7, sequence_start=True)
    bench.submit(2, sequence_id="8", sequence_start=True, sequence_end=True)
    bench.submit(3, sequence_id=7, sequence_end=True)
    await bench.turn()
    assert (worker.given, [item.sequence_slot for item in worker.batches[0]]) == ([[1, 2]], [0, 1])
    worker.finish()
    await bench.turn()
    assert (worker.given, worker.batches[0][0].sequence_slot) == ([[3]], 0)
    worker.finish()
    assert bench.answers == [(1, "ok", True), (2, "ok", True), (3, "ok", True)]
    await bench.requests.drained()


@in_a_loop
async def test_errors_of_the_sequence_scheduler_do_not_name_the_request() -> None:
    bench, _ = bench_of(SequenceScheduler(direct()))
    bench.submit(1, sequence_id=7)
    assert (bench.answers, errors(bench)) == ([(1, ErrorCode.INVALID_ARG, True)], [NO_START])
    await bench.requests.drained()


def test_a_start_on_a_live_sequence_gets_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        bench, worker = bench_of(SequenceScheduler(direct()))
        bench.submit(1, 2, sequence_id=7, sequence_start=True)
        await bench.turn()
        worker.finish()
        await bench.turn()
        assert (worker.given, worker.batches[0][0].request.sequence_start) == ([[2]], True)

    with caplog.at_level(logging.WARNING):
        in_a_loop(scenario)()
    assert [record.message for record in caplog.records] == [
        "sequence 7 for model 'm' has a conflict. The previous sequence did not end before this sequence start. "
        "Previous sequence will be terminated early."
    ]


@KINDS
@in_a_loop
async def test_a_dead_worker_loses_the_state_of_its_sequences(policy: SequencePolicy) -> None:
    bench, worker = bench_of(SequenceScheduler(policy))
    bench.submit(1, sequence_id=7, sequence_start=True)
    bench.submit(2, sequence_id=7)
    await bench.turn()
    worker.die()
    queued, executing = (response.error for _, response in bench.responses)
    assert queued is not None
    assert queued.message.startswith(LOST)
    assert executing == InferenceError(ErrorCode.INTERNAL, f"{DEAD.message} (the state of its sequence is lost)")
    bench.submit(3, sequence_id=7)
    assert (bench.answers[-1], errors(bench)[-1][: len(LOST)]) == ((3, ErrorCode.INTERNAL, True), LOST)
    bench.submit(4, sequence_id=7, sequence_start=True)
    worker.restart()
    assert worker.given == [[4]]


@KINDS
@in_a_loop
async def test_of_the_unread_requests_only_the_first_of_a_sequence_runs_again(policy: SequencePolicy) -> None:
    bench, worker = bench_of(SequenceScheduler(policy))
    bench.submit(1, sequence_id=7, sequence_start=True)
    await bench.turn()
    worker.finish()
    bench.submit(2, 3, sequence_id=7)
    bench.submit(4, sequence_id=8, sequence_start=True)
    bench.submit(5, sequence_id=8)
    await bench.turn()
    assert worker.given == [[2, 4]]
    worker.die(2, 4)
    assert bench.answers[1:] == [(2, ErrorCode.INTERNAL, True), (3, ErrorCode.INTERNAL, True)]
    unread, queued = errors(bench)
    assert (unread.endswith("signal 9 (the state of its sequence is lost)"), queued[: len(LOST)]) == (True, LOST)
    worker.restart()
    assert worker.given == [[4]]
    worker.finish()
    await bench.turn()
    assert worker.given == [[5]]


@pytest.mark.parametrize("executes", [True, False])
@in_a_loop
async def test_a_cancelled_request_ends_its_sequence(executes: bool) -> None:
    bench, worker = bench_of(SequenceScheduler(direct()))
    bench.submit(1, sequence_id=7, sequence_start=True)
    bench.submit(2, 3, sequence_id=7)
    await bench.turn()
    bench.pump.cancel(1 if executes else 2)
    assert {key for key, *_ in bench.answers} == {2, 3}
    assert {code for _, code, _ in bench.answers} == {ErrorCode.CANCELLED}
    bench.submit(4, sequence_id=7)
    assert errors(bench)[-1] == NO_START
    worker.finish()
    assert bench.answers[-1][0] == 1
    await bench.requests.drained()
    assert bench.stats.failures[FailureReason.CANCELED] == 2


@in_a_loop
async def test_a_request_that_is_answered_before_its_batch_ends_is_executed() -> None:
    bench, worker = bench_of(SequenceScheduler(direct()))
    bench.submit(1, sequence_id=7, sequence_start=True)
    await bench.turn()
    bench.submit(2, sequence_id=7)
    bench.pump.on_event(ResponseSent(worker, 1, outputs(), True, times()))
    worker.batches[0][0].cancelled = False
    items = worker.batches.pop()
    bench.pump.on_event(BatchDone(worker, items, [None], times()))
    await bench.turn()
    assert worker.given == [[2]]


@in_a_loop
async def test_the_slot_of_an_idle_sequence_is_given_away_without_another_event() -> None:
    bench, worker = bench_of(SequenceScheduler(direct(1, idle_ns=MS)))
    bench.submit(1, sequence_id=7, sequence_start=True)
    await bench.turn()
    worker.finish()
    bench.submit(2, sequence_id=8, sequence_start=True)
    while not worker.given:
        await bench.turn()
    bench.submit(3, sequence_id=7)
    assert (worker.given, bench.answers[1:]) == ([[2]], [(3, ErrorCode.INVALID_ARG, True)])


@in_a_loop
async def test_a_timeout_in_the_backlog_needs_no_other_event() -> None:
    bench, _ = bench_of(SequenceScheduler(direct(1)))
    bench.submit(1, sequence_id=7, sequence_start=True)
    await bench.turn()
    bench.submit(2, sequence_id=8, sequence_start=True)
    bench.submit(3, sequence_id=8, timeout_us=1000)
    while not bench.answers:
        await bench.turn()
    assert [code for _, code, _ in bench.answers] == [ErrorCode.UNAVAILABLE] * 2
    assert errors(bench) == ["timeout of the corresponding sequence has been expired"] * 2


def iterative_bench() -> tuple[Bench, QueueingWorker]:
    return bench_of(SequenceScheduler(oldest(6, iterative=True)))


@in_a_loop
async def test_an_iterative_request_runs_until_its_model_ends_it() -> None:
    bench, worker = iterative_bench()
    bench.submit(1, 2)
    await bench.turn()
    first = [(item.request.sequence_id, item.request.sequence_start, item.sequence_slot) for item in worker.batches[0]]
    assert first == [(1, True, 0), (2, True, 1)]
    worker.finish(1)
    assert (bench.answers, bench.pump.queued) == ([(1, "ok", True)], 1)
    bench.submit(3)
    await bench.turn()
    second = [(item.request.sequence_id, item.request.sequence_start, item.sequence_slot) for item in worker.batches[0]]
    assert sorted(second) == [(2, False, 1), (3, True, 0)]
    worker.finish(*range(2))
    await bench.turn()
    worker.finish()
    assert sorted(bench.answers) == [(1, "ok", True), (2, "ok", True), (3, "ok", True)]
    assert (bench.stats.success_count, bench.table.by_ticket) == (3, {})


@in_a_loop
async def test_a_cancelled_iterative_request_is_not_executed_again() -> None:
    bench, worker = iterative_bench()
    bench.submit(1, 2)
    await bench.turn()
    bench.pump.cancel(1)
    worker.finish(0, 1)
    await bench.turn()
    assert (bench.answers, worker.given) == ([(1, ErrorCode.CANCELLED, True)], [[2]])
    bench.pump.cancel(2)
    worker.finish(0)
    await bench.requests.drained()


@in_a_loop
async def test_an_iterative_request_fails_with_its_state() -> None:
    bench, worker = iterative_bench()
    bench.submit(1)
    await bench.turn()
    worker.finish(0)
    bench.submit(2)
    await bench.turn()
    worker.die(1, 2)
    worker.restart()
    assert (bench.answers, worker.given) == ([(1, ErrorCode.INTERNAL, True)], [[2]])
