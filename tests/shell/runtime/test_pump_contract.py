"""The pump performs the whole contract of schedulers, with schedulers that use more of it than the dynamic one."""

from halimede.core.types import ErrorCode
from halimede.workers.worker import WorkerDown
from support.loops import in_a_loop
from support.pumping import MS, Bench
from support.queueing_worker import QueueingWorker, bench_of
from support.toy_schedulers import DepthTwo, Fifo, Limiter, Priorities, RateLimited


def one_by_one(scheduler: Fifo) -> tuple[Bench, QueueingWorker]:
    scheduler.max_batch_size = 1
    return bench_of(scheduler)


@in_a_loop
async def test_a_worker_gets_its_next_batch_before_the_last_one_ends() -> None:
    bench, worker = one_by_one(DepthTwo())
    bench.submit(1, 2, 3)
    await bench.turn()
    assert worker.given == [[1], [2]]
    bench.pump.cancel(2)
    assert worker.cancelled == [2], "it is the worker's"
    worker.finish()
    await bench.turn()
    assert (bench.answers, worker.given) == ([(1, "ok", True)], [[2], [3]])
    worker.finish()
    worker.finish()
    assert bench.answers[1:] == [(2, "ok", True), (3, "ok", True)]
    await bench.requests.drained()


@in_a_loop
async def test_a_dead_worker_gives_back_the_ready_batch_that_it_had_not_read() -> None:
    bench, worker = one_by_one(DepthTwo())
    bench.submit(1, 2)
    await bench.turn()
    running, ready = worker.batches
    bench.pump.on_event(WorkerDown(worker, "signal 9", parked=False, unread={2}))
    assert (bench.pump.queued, bench.executing) == (1, 1)
    [item], [unread] = running, ready
    assert (item.key, unread.key) == (1, 2)


@in_a_loop
async def test_a_batch_that_must_not_be_repeated_fails_with_its_worker() -> None:
    class Stateful(Fifo):
        def remove_slot(self, *lost: object) -> list[int]:
            return []

    bench, worker = one_by_one(Stateful())
    bench.submit(1)
    await bench.turn()
    bench.pump.on_event(WorkerDown(worker, "worker exited once (last: signal 9)", parked=False, unread={1}))
    assert bench.answers == [(1, ErrorCode.INTERNAL, True)]
    assert str(bench.responses[0][1].error) == (
        "Failed to process the request(s) for model instance 'm_0', message: worker exited once (last: signal 9)"
    )


@in_a_loop
async def test_a_pump_wakes_another_one_that_waits_for_a_shared_resource() -> None:
    limiter = Limiter(1)
    schedulers = RateLimited(limiter), RateLimited(limiter)
    (first, one), (second, two) = one_by_one(schedulers[0]), one_by_one(schedulers[1])
    schedulers[0].wake, schedulers[1].wake = first.pump.wake, second.pump.wake
    first.submit(1)
    await first.turn()
    second.submit(2)
    await second.turn()
    assert (one.given, two.given) == ([[1]], [])
    one.finish()
    await second.turn()
    assert two.given == [[2]]


@in_a_loop
async def test_a_request_ends_at_the_timeout_of_its_level() -> None:
    bench, worker = one_by_one(Priorities({1: MS}))
    bench.submit(1)
    await bench.turn()
    bench.submit(2, priority=2)
    bench.submit(3, priority=1)
    while not bench.answers:
        await bench.turn()
    assert bench.answers == [(3, ErrorCode.UNAVAILABLE, True)]
    worker.finish()
    await bench.turn()
    assert worker.given == [[2]]
