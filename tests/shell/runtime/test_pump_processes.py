"""The pump before worker processes: they answer beside their batches, several times or never, they die and come back."""

import asyncio

import pytest

from halimede.core.config.check_request import Checked
from halimede.core.config.model_config import ModelOutput, ModelQueuePolicy, ModelTensorReshape
from halimede.core.schedule.wait_graph import Held, Queued
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from halimede.core.types.caller import Answers, RunningBatch
from halimede.core.types.server import WorkerHealth
from halimede.core.types.statistics import Duration, FailureReason, ResponseStatistics
from halimede.runtime.clock import monotonic_ns
from support.pumping import MS, Bench, PlayedProcess, outputs, story, times

BOOM = InferenceError(ErrorCode.INTERNAL, "boom")
INTERNAL, CANCELLED, UNAVAILABLE = ErrorCode.INTERNAL, ErrorCode.CANCELLED, ErrorCode.UNAVAILABLE


def test_a_request_stays_open_after_its_batch_until_its_final_answer() -> None:
    async def tell() -> None:
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
        assert (bench.table.by_ticket, bench.table.size_bytes) == ({}, 0)
        await bench.pump.close()

    story(tell)


def test_an_answer_before_the_end_of_its_batch_may_be_the_last() -> None:
    async def tell() -> None:
        bench = Bench(decoupled=False)
        bench.submit(1)
        bench.workers[0].send(1, outputs(), final=True, parameters={"early": True})
        assert [response.parameters for _, response in bench.responses] == [{"early": True}]
        bench.workers[0].finish()
        assert bench.answers == [(1, "ok", True)]
        assert (bench.stats.success_count, bench.stats.execution_count) == (1, 1)
        await bench.pump.close()

    story(tell)


def test_a_model_that_is_not_decoupled_and_ends_without_an_answer_has_failed() -> None:
    async def tell() -> None:
        bench = Bench(decoupled=False)
        bench.submit(1)
        bench.workers[0].finish()
        bench.workers[0].send(1, None, final=True)
        error = bench.responses[0][1].error
        assert error == InferenceError(INTERNAL, "expected a single response, got 0")

    story(tell)


def test_parameters_of_a_batch_go_to_the_answers_that_they_are_of() -> None:
    async def tell() -> None:
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

    story(tell)


def test_answers_to_what_is_not_open_are_ignored() -> None:
    async def tell() -> None:
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

    story(tell)


def test_the_end_of_a_batch_may_be_the_last_of_several_answers() -> None:
    async def tell() -> None:
        bench = Bench()
        bench.submit(1)
        bench.workers[0].send(1, outputs())
        bench.workers[0].finish(reply=outputs(), parameters={0: {"last": True}})
        assert bench.answers == [(1, "ok", False), (1, "ok", True)]
        assert bench.responses[1][1].parameters == {"last": True}
        assert [each.success.count for each in bench.stats.snapshot().responses] == [1, 1]

    story(tell)


def test_a_batch_that_fails_ends_what_was_answered_in_part() -> None:
    async def tell() -> None:
        bench = Bench()
        bench.submit(1)
        bench.workers[0].send(1, outputs())
        bench.workers[0].finish(reply=BOOM)
        assert bench.answers == [(1, "ok", False), (1, INTERNAL, True)]
        assert (bench.stats.success_count, bench.stats.failures[FailureReason.BACKEND]) == (0, 1)
        await bench.pump.close()

    story(tell)


def test_one_batch_per_slot() -> None:
    async def tell() -> None:
        bench = Bench(workers=2, concurrency=3, preferred_batch_size=(1,))
        bench.submit(*range(8))
        await bench.turn()
        first, second = bench.workers
        assert (sorted(first.batches), sorted(second.batches)) == ([0, 1, 2], [0, 1, 2])
        first.finish(1, outputs())
        await bench.turn()
        assert [item.key for item in first.batches[1]] == [6]
        for worker in bench.workers:
            for slot in range(3):
                worker.finish(slot, outputs())
        assert sorted(key for key, _ in bench.responses) == list(range(7))

    story(tell)


def test_requests_wait_for_a_worker_that_comes_back() -> None:
    async def tell() -> None:
        bench = Bench()
        bench.submit(1, 2)
        worker = bench.workers[0]
        failures = worker.die()
        assert not bench.pump.is_available()
        bench.submit(3)
        for failure in failures:
            bench.pump.on_event(failure)
        assert bench.answers == [(1, INTERNAL, True)]
        worker.restart()
        assert bench.pump.is_available()
        assert [item.key for item in worker.batches[0]] == [2, 3]
        worker.finish(reply=outputs())
        assert bench.answers[1:] == [(2, "ok", True), (3, "ok", True)]
        assert (bench.stats.execution_count, bench.stats.failures[FailureReason.BACKEND]) == (1, 1)
        await bench.pump.close()

    story(tell)


def test_the_end_of_a_batch_of_the_dead_does_not_free_a_slot_that_is_taken_again() -> None:
    async def tell() -> None:
        bench = Bench(preferred_batch_size=(1,))
        bench.submit(1, 2, 3)
        worker = bench.workers[0]
        (failure,) = worker.die()
        worker.restart()
        bench.pump.on_event(failure)
        await bench.turn()
        assert (worker.executed, bench.answers) == ([1, 2], [(1, INTERNAL, True)])
        worker.finish(reply=outputs())
        await bench.turn()
        assert worker.executed == [1, 2, 3]

    story(tell)


def test_a_worker_that_says_that_it_is_up_and_was_never_down_gets_no_second_batch() -> None:
    async def tell() -> None:
        bench = Bench(preferred_batch_size=(1,))
        bench.submit(1, 2)
        bench.workers[0].restart()
        await bench.turn()
        assert bench.workers[0].executed == [1]

    story(tell)


def test_a_passive_worker_that_dies_and_comes_back_changes_nothing() -> None:
    async def tell() -> None:
        bench = Bench(preferred_batch_size=(1,))
        passive = PlayedProcess(7, bench.pump)
        bench.pump.add_passive(passive)
        bench.submit(1, 2)
        passive.die(parked=True)
        assert (bench.pump.is_available(), bench.answers) == (True, [])
        passive.restart()
        bench.workers[0].finish(reply=outputs())
        await bench.turn()
        assert (bench.workers[0].executed, passive.executed) == ([1, 2], [])

    story(tell)


def test_the_death_of_a_worker_is_told_while_it_is_down_and_after_it() -> None:
    async def tell() -> None:
        bench = Bench(workers=2)
        first, second = bench.workers
        assert bench.pump.worker_health() == WorkerHealth()
        first.die("worker exited: signal 11")
        assert bench.pump.worker_health() == WorkerHealth("worker exited: signal 11")
        second.die("worker exited 5 times (last: signal 9 (possibly out of memory))", parked=True)
        parked = WorkerHealth("worker exited 5 times (last: signal 9 (possibly out of memory))", True)
        assert bench.pump.worker_health() == parked
        first.restart()
        assert bench.pump.worker_health() == parked
        second.restart()
        assert bench.pump.worker_health() == parked

    story(tell)


def test_the_others_go_on_when_one_worker_dies() -> None:
    async def tell() -> None:
        bench = Bench(workers=2, preferred_batch_size=(1,))
        bench.submit(1, 2, 3)
        await bench.turn()
        for failure in bench.workers[0].die():
            bench.pump.on_event(failure)
        assert bench.pump.is_available()
        bench.workers[1].finish(reply=outputs())
        await bench.turn()
        bench.workers[1].finish(reply=outputs())
        assert bench.answers == [(1, INTERNAL, True), (2, "ok", True), (3, "ok", True)]

    story(tell)


def test_a_worker_that_dies_fails_what_it_had_open() -> None:
    async def tell() -> None:
        bench = Bench()
        bench.submit(1)
        bench.workers[0].send(1, outputs())
        bench.workers[0].finish()
        for failure in bench.workers[0].die():
            bench.pump.on_event(failure)
        assert bench.answers == [(1, "ok", False), (1, INTERNAL, True)]
        await bench.pump.close()

    story(tell)


def test_a_request_that_ran_when_its_worker_died_may_be_failed_by_an_answer_of_its_own() -> None:
    async def tell() -> None:
        bench = Bench()
        bench.submit(1)
        bench.workers[0].die()
        bench.workers[0].send(1, BOOM, final=True)
        assert bench.answers == [(1, INTERNAL, True)]
        await bench.pump.close()

    story(tell)


def test_a_worker_may_die_before_the_pump_knows_it() -> None:
    async def tell() -> None:
        bench = Bench(workers=0)
        late, parked = PlayedProcess(0, bench.pump), PlayedProcess(1, bench.pump)
        late.die()
        parked.die(parked=True)
        bench.pump.add_worker(parked)
        bench.submit(1)
        bench.pump.add_worker(late)
        bench.submit(2)
        assert (bench.pump.is_available(), bench.answers) == (False, [(1, UNAVAILABLE, True)])
        late.restart()
        late.finish(reply=outputs())
        assert bench.answers[1:] == [(2, "ok", True)]

    story(tell)


def test_a_model_without_a_worker_that_will_run_again_refuses_at_once() -> None:
    async def tell() -> None:
        bench = Bench(workers=2, preferred_batch_size=(1,))
        bench.submit(1, 2, 3)
        await bench.turn()
        first, second = bench.workers
        failures = [*first.die(), *second.die("worker exited 5 times (last: signal 11)", parked=True)]
        assert bench.answers == []
        first.die("worker exited 5 times (last: signal 6)", parked=True)
        text = "model 'm' is not ready: worker exited 5 times (last: signal"
        assert bench.answers == [(3, UNAVAILABLE, True)]
        for failure in failures:
            bench.pump.on_event(failure)
        bench.submit(4)
        assert bench.answers[1:] == [(1, INTERNAL, True), (2, INTERNAL, True), (4, UNAVAILABLE, True)]
        assert str(bench.responses[-1][1].error).count(text) == 1
        assert bench.stats.failures[FailureReason.REJECTED] == 2

        second.restart()
        bench.submit(5)
        second.finish(reply=outputs())
        assert bench.answers[4:] == [(5, "ok", True)]
        await bench.pump.close()

    story(tell)


def test_a_model_is_ready_when_one_of_its_instances_says_so() -> None:
    async def tell() -> None:
        bench = Bench(workers=3)
        assert await bench.pump.is_ready()
        bench.workers[0].says_ready = False
        bench.workers[1].is_slow = True
        assert await bench.pump.is_ready()
        bench.workers[2].die()
        bench.workers[1].die()
        assert not await bench.pump.is_ready()
        bench.workers[0].says_ready = True
        assert await bench.pump.is_ready()
        bench.workers[0].die()
        assert not await bench.pump.is_ready()

    story(tell)


def test_a_timeout_fires_while_every_worker_is_down() -> None:
    async def tell() -> None:
        bench = Bench(default_queue_policy=ModelQueuePolicy(default_timeout_microseconds=1_000))
        bench.workers[0].die()
        bench.submit(1)
        while not bench.answers:
            await asyncio.sleep(0.001)
        assert bench.answers == [(1, UNAVAILABLE, True)]

    story(tell)


def test_a_running_request_that_is_cancelled_is_its_workers_to_end() -> None:
    async def tell() -> None:
        bench = Bench(workers=2, preferred_batch_size=(1,))
        bench.submit(1, 2)
        await bench.turn()
        bench.workers[1].send(2, outputs())
        bench.pump.cancel(2)
        bench.pump.cancel(2)
        assert [worker.cancelled for worker in bench.workers] == [[], [2]]
        assert bench.workers[1].batches[0][0].cancelled
        bench.workers[1].send(2, outputs())  # to nobody
        assert bench.answers == [(2, "ok", False)]
        bench.workers[1].send(2, InferenceError(CANCELLED, ""), final=True)
        assert bench.answers[1:] == [(2, CANCELLED, True)]
        assert bench.stats.failures[FailureReason.CANCELED] == 1

    story(tell)


def test_a_model_that_stops_when_its_client_has_left_has_not_succeeded() -> None:
    async def tell() -> None:
        bench = Bench()
        bench.submit(1)
        bench.pump.cancel(1)
        bench.workers[0].send(1, outputs())
        bench.workers[0].send(1, None, final=True)
        assert bench.answers == [(1, CANCELLED, True)]
        assert (bench.stats.success_count, bench.stats.failures[FailureReason.CANCELED]) == (0, 1)

    story(tell)


def test_an_open_request_that_is_cancelled_is_forgotten_at_once() -> None:
    async def tell() -> None:
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

    story(tell)


def test_a_request_whose_client_left_while_it_ran_is_forgotten_when_its_batch_is_over() -> None:
    async def tell() -> None:
        bench = Bench()
        bench.submit(1)
        bench.pump.cancel(1)
        assert bench.answers == []
        bench.workers[0].finish()
        assert bench.answers == [(1, CANCELLED, True)]
        await bench.pump.close()

    story(tell)


def test_what_clients_took_is_told_to_the_worker_that_waits_for_it() -> None:
    async def tell() -> None:
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

    story(tell)


def test_the_dead_are_told_nothing() -> None:
    async def tell() -> None:
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

    story(tell)


def test_partial_answers_keep_the_order_of_the_requests() -> None:
    async def tell() -> None:
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

    story(tell)


def test_abort_ends_queued_running_and_open_requests_and_tells_the_workers() -> None:
    async def tell() -> None:
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

    story(tell)


def test_close_waits_for_open_requests() -> None:
    async def tell() -> None:
        bench = Bench()
        bench.submit(1)
        bench.workers[0].finish()
        closing = asyncio.ensure_future(bench.pump.close())
        await asyncio.sleep(0)
        assert not closing.done()
        bench.workers[0].send(1, None, final=True)
        await closing

    story(tell)


def test_an_answer_that_does_not_fit_its_reshape_is_an_error_in_its_place() -> None:
    async def tell() -> None:
        reshape = ModelTensorReshape(shape=(1,))
        bench = Bench(output=ModelOutput(name="OUT", data_type=DataType.FP32, dims=(1, 1), reshape=reshape))
        bench.submit(1)
        bench.workers[0].finish()
        bench.workers[0].send(1, outputs())
        bench.workers[0].send(1, [Tensor("OUT", DataType.FP32, (1, 3), b"\0" * 12)])
        bench.workers[0].send(1, None, final=True)
        assert bench.answers == [(1, "ok", False), (1, INTERNAL, False), (1, "end", True)]
        assert bench.responses[0][1].outputs[0].shape == (1, 1, 1)

    story(tell)


def test_answers_are_counted_by_their_index_and_a_request_once() -> None:
    async def tell() -> None:
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

    story(tell)


def test_a_request_with_an_error_among_its_answers_has_failed() -> None:
    async def tell() -> None:
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

    story(tell)


@pytest.mark.parametrize("decoupled", [False, True])
def test_only_decoupled_models_have_figures_by_response(decoupled: bool) -> None:
    async def tell() -> None:
        bench = Bench(decoupled=decoupled)
        bench.submit(1)
        bench.workers[0].send(1, outputs(), final=True)
        bench.workers[0].finish()
        assert bool(bench.stats.snapshot().responses) is decoupled
        assert bool(bench.stats.first_response_buckets) is decoupled

    story(tell)


@pytest.mark.parametrize("where", ["queued", "running", "open"])
def test_a_request_is_refused_only_while_it_is_queued(where: str) -> None:
    async def tell() -> None:
        bench = Bench(preferred_batch_size=(1,))
        (worker,) = bench.workers
        stuck = InferenceError(UNAVAILABLE, "nobody will answer")
        bench.submit(1, 2)
        await bench.turn()
        if where == "open":
            worker.send(1, outputs())
            worker.finish()
        bench.responses.clear()
        key, is_queued = (2, True) if where == "queued" else (1, False)
        assert [bench.pump.try_refuse(key, stuck) for _ in range(2)] == [is_queued, False]
        refusals = [(told, response.error, response.final) for told, response in bench.responses]
        assert refusals == ([(key, stuck, True)] if is_queued else [])
        assert worker.cancelled == []
        assert (key in bench.table.by_ticket) is not is_queued
        if where != "open":
            worker.finish(reply=outputs())
        worker.send(1, outputs(), final=True)
        await bench.turn()
        assert worker.executed == ([1] if is_queued else [1, 2])
        assert [told for told, response in bench.responses if told == key and response.final] == [key]

    story(tell)


def test_what_holds_a_request_up() -> None:
    async def tell() -> None:
        bench = Bench(preferred_batch_size=(1,))
        (worker,) = bench.workers
        pump = bench.pump
        bench.submit(1, 2)
        await bench.turn()
        first, second = RunningBatch("m", "1", 1), RunningBatch("m", "1", 2)
        assert (pump.place_of(1), pump.place_of(2)) == (Held((first, Answers(first))), Queued([(first,)]))
        worker.finish()
        assert (pump.place_of(1), pump.place_of(3)) == (Held((Answers(first),)), None)
        assert pump.place_of(2) == Queued([()]), "nothing runs before the turn ends"
        await bench.turn()
        assert pump.place_of(2) == Held((second, Answers(second)))

    story(tell)


def test_a_caller_that_asks_again_when_it_is_refused_is_refused_again() -> None:
    async def tell() -> None:
        bench = Bench(preferred_batch_size=(1,))

        def ask_again(response: InferenceResponse) -> None:
            bench.submit(3)

        bench.submit(1)
        bench.requests.submit(2, InferenceRequest("m"), Checked(1, 4, ()), ask_again, monotonic_ns())
        bench.workers[0].die(parked=True)
        assert bench.answers == [(3, UNAVAILABLE, True)]
        assert list(bench.table.by_ticket) == [1]

    story(tell)


def test_a_batch_that_a_dead_worker_had_not_read_goes_to_another_one() -> None:
    async def tell() -> None:
        bench = Bench(workers=2)
        first, second = bench.workers
        bench.submit(1)
        assert (first.executed, second.executed) == ([1], [])
        assert first.die(has_read=False) == []
        assert (bench.answers, second.executed) == ([], [1])
        second.finish(reply=outputs())
        assert bench.answers == [(1, "ok", True)]

    story(tell)


def test_an_unread_batch_waits_for_the_next_process_before_all_others() -> None:
    async def tell() -> None:
        bench = Bench(preferred_batch_size=(1,))
        (worker,) = bench.workers
        bench.submit(1, 2)
        await bench.turn()
        worker.die(has_read=False)
        assert (bench.pump.queued, bench.executing) == (2, 0)
        bench.pump.cancel(2)
        worker.restart()
        worker.finish(reply=outputs())
        assert bench.answers == [(2, CANCELLED, True), (1, "ok", True)]
        assert (bench.stats.success_count, worker.executed) == (1, [1])

    story(tell)


def test_a_cancelled_request_of_an_unread_batch_is_not_delivered_again() -> None:
    async def tell() -> None:
        bench = Bench(preferred_batch_size=(2,))
        (worker,) = bench.workers
        bench.submit(1, 2)
        await bench.turn()
        bench.pump.cancel(1)
        worker.die(has_read=False)
        assert bench.answers == [(1, CANCELLED, True)]
        worker.restart()
        assert worker.executed == [2]

    story(tell)


def test_an_unread_batch_is_refused_when_no_worker_will_run_it() -> None:
    async def tell() -> None:
        bench = Bench()
        (worker,) = bench.workers
        bench.submit(1)
        worker.die(has_read=False)
        worker.die("worker exited 5 times (last: signal 11)", parked=True)
        assert bench.answers == [(1, UNAVAILABLE, True)]
        assert str(bench.responses[0][1].error) == "model 'm' is not ready: worker exited 5 times (last: signal 11)"

    story(tell)
