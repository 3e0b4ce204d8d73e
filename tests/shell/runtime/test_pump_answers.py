"""The pump and worker processes that send answers before, with or after the end of a batch."""

import pytest

from halimede.core.config.model_config import ModelOutput, ModelTensorReshape
from halimede.core.types import DataType, ErrorCode, InferenceError, Tensor
from halimede.core.types.statistics import Duration, FailureReason, ResponseStatistics
from support.loops import in_a_loop
from support.pumping import MS, Bench, outputs, times

BOOM = InferenceError(ErrorCode.INTERNAL, "boom")
INTERNAL, CANCELLED, UNAVAILABLE = ErrorCode.INTERNAL, ErrorCode.CANCELLED, ErrorCode.UNAVAILABLE


@in_a_loop
async def test_a_request_stays_open_after_its_batch_until_its_final_answer() -> None:
    bench = Bench()
    bench.submit(1, 2)
    worker = bench.workers[0]
    worker.send(1, outputs())
    worker.finish()
    await bench.turn()
    assert worker.executed == [1, 2]
    worker.send(1, outputs())
    worker.send(1, None, final=True)
    worker.finish()
    assert bench.answers == [(1, "ok", False), (1, "ok", False), (1, "end", True)]
    worker.send(2, outputs(), final=True)
    assert bench.answers[3:] == [(2, "ok", True)]
    assert (bench.table.by_ticket, bench.table.decoded.held_bytes) == ({}, 0)
    await bench.pump.close()


@in_a_loop
async def test_an_answer_before_the_end_of_its_batch_may_be_final() -> None:
    bench = Bench(decoupled=False)
    bench.submit(1)
    bench.workers[0].send(1, outputs(), final=True, parameters={"early": True})
    assert [response.parameters for _, response in bench.responses] == [{"early": True}]
    bench.workers[0].finish()
    assert bench.answers == [(1, "ok", True)]
    assert (bench.stats.success_count, bench.stats.execution_count) == (1, 1)
    await bench.pump.close()


@in_a_loop
async def test_an_ordinary_model_that_sends_no_answer_fails_its_request() -> None:
    bench = Bench(decoupled=False)
    bench.submit(1)
    bench.workers[0].finish()
    bench.workers[0].send(1, None, final=True)
    error = bench.responses[0][1].error
    assert error == InferenceError(INTERNAL, "expected a single response, got 0")


@in_a_loop
async def test_parameters_of_a_batch_go_to_their_own_answers() -> None:
    bench = Bench()
    bench.submit(1, 2, 3)
    bench.workers[0].finish(reply=outputs(), parameters={0: {"text": "a", "flag": True}})
    await bench.turn()
    bench.workers[0].finish(reply=outputs(), parameters={1: {"count": 2, "share": 0.5}})
    assert [(key, response.parameters) for key, response in bench.responses] == [
        (1, {"text": "a", "flag": True}),
        (2, {}),
        (3, {"count": 2, "share": 0.5}),
    ]


@in_a_loop
async def test_answers_for_requests_that_are_not_open_are_ignored() -> None:
    bench = Bench(workers=2, preferred_batch_size=(1,))
    bench.submit(1, 2, 3)
    await bench.turn()
    first, second = bench.workers
    first.send(1, outputs())
    second.send(1, outputs(), final=True)  # the other worker's
    first.send(3, outputs())  # queued
    first.send(2, outputs(), final=True)  # the other worker's
    first.send(99, outputs(), final=True)
    first.send(1, None, final=True)
    first.send(1, None, final=True)
    first.send(1, outputs())
    assert bench.answers == [(1, "ok", False), (1, "end", True)]
    first.finish()
    await bench.turn()
    second.finish(reply=outputs())
    first.finish(reply=outputs())
    assert bench.answers[2:] == [(2, "ok", True), (3, "ok", True)]
    assert bench.table.by_ticket == {}


@in_a_loop
async def test_the_end_of_a_batch_may_carry_the_final_answer() -> None:
    bench = Bench()
    bench.submit(1)
    bench.workers[0].send(1, outputs())
    bench.workers[0].finish(reply=outputs(), parameters={0: {"last": True}})
    assert bench.answers == [(1, "ok", False), (1, "ok", True)]
    assert bench.responses[1][1].parameters == {"last": True}
    assert [each.success.count for each in bench.stats.snapshot().responses] == [1, 1]


@in_a_loop
async def test_a_failed_batch_ends_a_request_with_partial_answers() -> None:
    bench = Bench()
    bench.submit(1)
    bench.workers[0].send(1, outputs())
    bench.workers[0].finish(reply=BOOM)
    assert bench.answers == [(1, "ok", False), (1, INTERNAL, True)]
    assert (bench.stats.success_count, bench.stats.failures[FailureReason.BACKEND]) == (0, 1)
    await bench.pump.close()


@in_a_loop
async def test_partial_answers_keep_the_order_of_the_requests() -> None:
    bench = Bench(workers=3, preserve_ordering=True, preferred_batch_size=(1,))
    bench.submit(1, 2, 3)
    await bench.turn()
    for number, worker in enumerate(bench.workers, 1):
        worker.finish()
        worker.send(number, outputs())
    assert bench.answers == [(1, "ok", False)]
    bench.workers[1].send(2, None, final=True)
    bench.pump.cancel(3)
    assert bench.answers == [(1, "ok", False)]
    bench.workers[0].send(1, None, final=True)
    assert bench.answers[1:] == [
        (1, "end", True),
        (2, "ok", False),
        (2, "end", True),
        (3, "ok", False),
        (3, CANCELLED, True),
    ]
    await bench.pump.close()


@in_a_loop
async def test_an_answer_that_does_not_fit_its_reshape_becomes_an_error() -> None:
    reshape = ModelTensorReshape(shape=(1,))
    bench = Bench(output=ModelOutput(name="OUT", data_type=DataType.FP32, dims=(1, 1), reshape=reshape))
    bench.submit(1)
    bench.workers[0].finish()
    bench.workers[0].send(1, outputs())
    bench.workers[0].send(1, [Tensor("OUT", DataType.FP32, (1, 3), b"\0" * 12)])
    bench.workers[0].send(1, None, final=True)
    assert bench.answers == [(1, "ok", False), (1, INTERNAL, False), (1, "end", True)]
    assert bench.responses[0][1].outputs[0].shape == (1, 1, 1)


@in_a_loop
async def test_answers_are_counted_by_index_and_requests_once() -> None:
    bench = Bench()
    bench.submit(1)
    worker = bench.workers[0]
    worker.finish(when=times(5, 10, 11, 12))
    worker.send(1, outputs(), when=times(5, 10, 30, 31))
    worker.send(1, outputs(), when=times(5, 10, 36, 38))
    worker.send(1, None, final=True, when=times(5, 10, 40, 40))
    snapshot = bench.stats.snapshot()
    assert snapshot.responses == [
        ResponseStatistics(
            Duration(1, 20 * MS), Duration(1, 1 * MS), success=Duration(1, 21 * MS)
        ),  # since the start of compute, the others since the one before was sent
        ResponseStatistics(Duration(1, 6 * MS), Duration(1, 2 * MS), success=Duration(1, 8 * MS)),
        ResponseStatistics(Duration(1, 4 * MS), empty_response=Duration(1, 4 * MS)),
    ]
    inference = snapshot.inference
    assert (inference.success.count, inference.fail.count, inference.queue.count) == (1, 0, 1)
    assert (inference.compute_input, inference.compute_infer) == (Duration(1, 5 * MS), Duration(1, 30 * MS))
    assert (snapshot.inference_count, snapshot.execution_count) == (1, 1)
    assert (sum(bench.stats.first_response_buckets), bench.stats.first_response_ns > 0) == (1, True)


@in_a_loop
async def test_a_request_with_an_error_among_its_answers_has_failed() -> None:
    bench = Bench(preferred_batch_size=(1,))
    worker = bench.workers[0]
    bench.submit(1, 2, 3)
    worker.send(1, outputs())
    worker.send(1, BOOM)
    worker.finish()
    worker.send(1, None, final=True)
    await bench.turn()
    worker.finish(reply=BOOM)
    await bench.turn()
    worker.finish()
    bench.pump.cancel(3)
    assert bench.answers[2:] == [(1, "end", True), (2, INTERNAL, True), (3, CANCELLED, True)]
    assert bench.stats.success_count == 0
    assert bench.stats.failures[FailureReason.BACKEND] == 2
    counts = [
        (each.success.count, each.fail.count, each.empty_response.count, each.cancel.count)
        for each in bench.stats.snapshot().responses
    ]
    assert counts == [(1, 1, 0, 1), (0, 1, 0, 0), (0, 0, 1, 0)]


@pytest.mark.parametrize("decoupled", [False, True])
@in_a_loop
async def test_only_decoupled_models_have_statistics_by_response(decoupled: bool) -> None:
    bench = Bench(decoupled=decoupled)
    bench.submit(1)
    bench.workers[0].send(1, outputs(), final=True)
    bench.workers[0].finish()
    assert bool(bench.stats.snapshot().responses) is decoupled
    assert bool(bench.stats.first_response_buckets) is decoupled
