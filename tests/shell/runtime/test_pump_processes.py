"""The pump and worker processes that die, restart or are parked."""

import asyncio

import pytest

from halimede.core.config.model_config import ModelQueuePolicy
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.server import WorkerHealth
from halimede.core.types.statistics import FailureReason
from halimede.workers.worker import WorkerDown
from support.loops import in_a_loop
from support.pumping import Bench, PlayedProcess, outputs

BOOM = InferenceError(ErrorCode.INTERNAL, "boom")


INTERNAL, CANCELLED, UNAVAILABLE = ErrorCode.INTERNAL, ErrorCode.CANCELLED, ErrorCode.UNAVAILABLE


@in_a_loop
async def test_each_slot_executes_one_batch_at_a_time() -> None:
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


@in_a_loop
async def test_requests_wait_until_a_worker_restarts() -> None:
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


@in_a_loop
async def test_a_late_failure_of_a_dead_process_frees_no_slot_in_use() -> None:
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


@in_a_loop
async def test_an_up_event_of_a_running_worker_starts_no_second_batch() -> None:
    bench = Bench(preferred_batch_size=(1,))
    bench.submit(1, 2)
    bench.workers[0].restart()
    await bench.turn()
    assert bench.workers[0].executed == [1]


@in_a_loop
async def test_the_restart_of_a_passive_worker_changes_nothing() -> None:
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


@in_a_loop
async def test_worker_health_shows_a_failure_also_after_a_restart() -> None:
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


@in_a_loop
async def test_other_workers_continue_when_one_dies() -> None:
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


@in_a_loop
async def test_the_death_of_a_worker_fails_its_open_requests() -> None:
    bench = Bench()
    bench.submit(1)
    bench.workers[0].send(1, outputs())
    bench.workers[0].finish()
    for failure in bench.workers[0].die():
        bench.pump.on_event(failure)
    assert bench.answers == [(1, "ok", False), (1, INTERNAL, True)]
    await bench.pump.close()


@in_a_loop
async def test_a_request_of_a_dead_worker_may_get_its_own_error() -> None:
    bench = Bench()
    bench.submit(1)
    bench.workers[0].die()
    bench.workers[0].send(1, BOOM, final=True)
    assert bench.answers == [(1, INTERNAL, True)]
    await bench.pump.close()


@in_a_loop
async def test_a_worker_may_be_dead_when_it_is_added() -> None:
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


@in_a_loop
async def test_requests_are_refused_at_once_when_all_workers_are_parked() -> None:
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


@in_a_loop
async def test_requests_wait_for_a_start_until_it_is_prevented_for_long() -> None:
    bench = Bench(workers=2, preferred_batch_size=(1,))
    first, second = bench.workers
    first.die("worker exited 5 times (last: signal 11)", parked=True)
    second.die()
    bench.submit(1)
    reason = "worker cannot be started: cannot fork: Cannot allocate memory"
    bench.pump.on_event(WorkerDown(second, reason, parked=False))
    assert (bench.answers, bench.pump.load().unstartable) == ([], 0)
    bench.pump.on_event(WorkerDown(second, reason, parked=False, is_unstartable=True))
    bench.submit(2)
    assert bench.answers == [(1, UNAVAILABLE, True), (2, UNAVAILABLE, True)]
    assert bench.pump.refusal == InferenceError(UNAVAILABLE, f"model 'm' is not ready: {reason}")
    assert (bench.pump.load().parked, bench.pump.load().unstartable) == (1, 1)
    second.restart()
    bench.submit(3)
    second.finish(reply=outputs())
    assert bench.answers[2:] == [(3, "ok", True)]
    assert bench.pump.load().unstartable == 0
    await bench.pump.close()


@in_a_loop
async def test_a_model_is_ready_when_one_of_its_instances_is_ready() -> None:
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
    bench.workers[0].times_out = True
    with pytest.raises(InferenceError, match="no answer"):
        await bench.pump.is_ready()
    bench.workers[0].die()
    assert not await bench.pump.is_ready()


@in_a_loop
async def test_a_timeout_fires_while_every_worker_is_down() -> None:
    bench = Bench(default_queue_policy=ModelQueuePolicy(default_timeout_microseconds=1_000))
    bench.workers[0].die()
    bench.submit(1)
    while not bench.answers:
        await asyncio.sleep(0.001)
    assert bench.answers == [(1, UNAVAILABLE, True)]


@in_a_loop
async def test_an_unread_batch_of_a_dead_worker_goes_to_another_worker() -> None:
    bench = Bench(workers=2)
    first, second = bench.workers
    bench.submit(1)
    assert (first.executed, second.executed) == ([1], [])
    assert first.die(has_read=False) == []
    assert (bench.answers, second.executed) == ([], [1])
    second.finish(reply=outputs())
    assert bench.answers == [(1, "ok", True)]


@in_a_loop
async def test_an_unread_batch_is_the_first_of_the_next_process() -> None:
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


@in_a_loop
async def test_a_cancelled_request_of_an_unread_batch_is_not_executed() -> None:
    bench = Bench(preferred_batch_size=(2,))
    (worker,) = bench.workers
    bench.submit(1, 2)
    await bench.turn()
    bench.pump.cancel(1)
    worker.die(has_read=False)
    assert bench.answers == [(1, CANCELLED, True)]
    worker.restart()
    assert worker.executed == [2]


@in_a_loop
async def test_an_unread_batch_is_refused_when_all_workers_are_parked() -> None:
    bench = Bench()
    (worker,) = bench.workers
    bench.submit(1)
    worker.die(has_read=False)
    worker.die("worker exited 5 times (last: signal 11)", parked=True)
    assert bench.answers == [(1, UNAVAILABLE, True)]
    assert str(bench.responses[0][1].error) == "model 'm' is not ready: worker exited 5 times (last: signal 11)"
