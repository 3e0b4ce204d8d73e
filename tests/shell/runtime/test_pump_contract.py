"""The pump performs the whole contract of schedulers, with schedulers that use more of it than the dynamic one."""

from dataclasses import dataclass, field

import pytest

from halimede.core.types import ErrorCode
from halimede.runtime.pump import Pump
from halimede.workers.worker import BatchDone, BatchItem, Outputs, ResponseSent, WorkerDown, WorkerUp
from support.pumping import DEAD, MS, Bench, outputs, run_on_loop, times
from support.toy_schedulers import (
    LOST,
    DepthTwo,
    DirectSequences,
    Fifo,
    Iterative,
    Limiter,
    OldestSequences,
    Priorities,
    RateLimited,
)


@dataclass(slots=True)
class QueueingWorker:
    """Accepts several batches for its slot and ends them in order."""

    pump: Pump
    ordinal: int = 0
    name: str = "m_0"
    concurrency: int = 1
    batches: list[list[BatchItem]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    def execute(self, items: list[BatchItem], slot: int = 0) -> None:
        self.batches.append(items)

    def cancel(self, key: int) -> None:
        self.cancelled.append(key)

    def finish(self, *again: int) -> None:
        """The oldest batch ends; the requests at these positions are to be executed again."""
        items = self.batches.pop(0)
        replies: list[Outputs | None] = [None if at in again else outputs() for at in range(len(items))]
        self.pump.on_event(BatchDone(self, items, replies, times(), again=again))

    def die(self, *unread: int) -> None:
        """Go down; the batches that it has read fail."""
        batches, self.batches = self.batches, []
        self.pump.on_event(WorkerDown(self, "signal 9", parked=False, unread=unread))
        for items in batches:
            if items[0].key not in unread:
                self.pump.on_event(BatchDone(self, items, [DEAD] * len(items), times(), failed=True))

    def restart(self) -> None:
        self.pump.on_event(WorkerUp(self))

    @property
    def given(self) -> list[list[int]]:
        return [[item.key for item in batch] for batch in self.batches]


def bench_of(scheduler: Fifo, rows: int = 1) -> tuple[Bench, QueueingWorker]:
    scheduler.max_batch_size = rows
    bench = Bench(workers=0, decoupled=False, scheduler=scheduler)
    worker = QueueingWorker(bench.pump)
    bench.pump.add_worker(worker)
    return bench, worker


def test_a_worker_gets_its_next_batch_before_the_last_one_ends() -> None:
    async def scenario() -> None:
        bench, worker = bench_of(DepthTwo())
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

    run_on_loop(scenario)


def test_a_dead_worker_gives_back_the_ready_batch_that_it_had_not_read() -> None:
    async def scenario() -> None:
        bench, worker = bench_of(DepthTwo())
        bench.submit(1, 2)
        await bench.turn()
        running, ready = worker.batches
        bench.pump.on_event(WorkerDown(worker, "signal 9", parked=False, unread={2}))
        assert (bench.pump.queued, bench.executing) == (1, 1)
        [item], [unread] = running, ready
        assert (item.key, unread.key) == (1, 2)

    run_on_loop(scenario)


def test_an_iterative_request_runs_until_its_model_ends_it() -> None:
    async def scenario() -> None:
        bench, worker = bench_of(Iterative(), rows=4)
        bench.submit(1, 2)
        await bench.turn()
        worker.finish(0)
        assert (bench.answers, bench.pump.queued) == ([(2, "ok", True)], 1)
        await bench.turn()
        assert worker.given == [[1]]
        worker.finish(0)
        await bench.turn()
        worker.finish()
        assert bench.answers == [(2, "ok", True), (1, "ok", True)]
        assert (bench.stats.success_count, bench.table.by_ticket) == (2, {})

    run_on_loop(scenario)


def test_a_request_is_a_start_only_in_its_first_execution() -> None:
    async def scenario() -> None:
        bench, worker = bench_of(Iterative())
        bench.submit(1, sequence_id=7, sequence_start=True, sequence_end=True)
        await bench.turn()
        for is_start in (True, False, False):
            [[item]] = worker.batches
            assert (item.request.sequence_start, item.request.sequence_end) == (is_start, True)
            worker.finish(0)
            await bench.turn()
        worker.finish()
        assert bench.answers == [(1, "ok", True)]

    run_on_loop(scenario)


def test_a_response_between_two_executions_reaches_the_client() -> None:
    async def scenario() -> None:
        bench, worker = bench_of(Iterative())
        bench.submit(1)
        await bench.turn()
        worker.finish(0)
        bench.pump.on_event(ResponseSent(worker, 1, outputs(), False, times()))
        await bench.turn()
        bench.pump.on_event(ResponseSent(worker, 1, outputs(), False, times()))
        worker.finish()
        assert bench.answers == [(1, "ok", False), (1, "ok", False), (1, "ok", True)]

    run_on_loop(scenario)


def test_a_request_that_waits_for_its_next_execution_is_cancelled() -> None:
    async def scenario() -> None:
        bench, worker = bench_of(Iterative())
        bench.submit(1)
        await bench.turn()
        worker.finish(0)
        bench.pump.cancel(1)
        await bench.turn()
        assert (bench.answers, worker.given, worker.cancelled) == ([(1, ErrorCode.CANCELLED, True)], [], [])
        bench.pump.on_event(ResponseSent(worker, 1, outputs(), False, times()))
        assert len(bench.answers) == 1

    run_on_loop(scenario)


def test_a_cancelled_iterative_request_is_not_executed_again() -> None:
    async def scenario() -> None:
        bench, worker = bench_of(Iterative())
        bench.submit(1)
        await bench.turn()
        bench.pump.cancel(1)
        worker.finish(0)
        await bench.turn()
        assert (bench.answers, worker.given) == ([(1, ErrorCode.CANCELLED, True)], [])

    run_on_loop(scenario)


def test_a_batch_that_must_not_be_repeated_fails_with_its_worker() -> None:
    class Stateful(Fifo):
        def remove_slot(self, *lost: object) -> list[int]:
            return []

    async def scenario() -> None:
        bench, worker = bench_of(Stateful())
        bench.submit(1)
        await bench.turn()
        bench.pump.on_event(WorkerDown(worker, "worker exited once (last: signal 9)", parked=False, unread={1}))
        assert bench.answers == [(1, ErrorCode.INTERNAL, True)]
        assert str(bench.responses[0][1].error) == (
            "Failed to process the request(s) for model instance 'm_0', message: worker exited once (last: signal 9)"
        )

    run_on_loop(scenario)


def test_a_pump_wakes_another_one_that_waits_for_a_shared_resource() -> None:
    async def scenario() -> None:
        limiter = Limiter(1)
        schedulers = RateLimited(limiter), RateLimited(limiter)
        (first, one), (second, two) = bench_of(schedulers[0]), bench_of(schedulers[1])
        schedulers[0].wake, schedulers[1].wake = first.pump.wake, second.pump.wake
        first.submit(1)
        await first.turn()
        second.submit(2)
        await second.turn()
        assert (one.given, two.given) == ([[1]], [])
        one.finish()
        await second.turn()
        assert two.given == [[2]]

    run_on_loop(scenario)


SEQUENCES = pytest.mark.parametrize("kind", [DirectSequences, OldestSequences])


@SEQUENCES
def test_a_request_waits_for_the_one_before_it_in_its_sequence(kind: type[DirectSequences]) -> None:
    async def scenario() -> None:
        bench, worker = bench_of(kind(), rows=4)
        bench.submit(1, sequence_id=7, sequence_start=True)
        bench.submit(2, sequence_id=8, sequence_start=True, sequence_end=True)
        bench.submit(3, sequence_id=7, sequence_end=True)
        await bench.turn()
        assert worker.given == [[1, 2]]
        worker.finish()
        await bench.turn()
        assert worker.given == [[3]]
        worker.finish()
        assert bench.answers == [(1, "ok", True), (2, "ok", True), (3, "ok", True)]

    run_on_loop(scenario)


@SEQUENCES
def test_of_the_unread_requests_only_the_first_of_a_sequence_runs_again(kind: type[DirectSequences]) -> None:
    async def scenario() -> None:
        bench, worker = bench_of(kind(), rows=4)
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
        assert "signal 9" in str(bench.responses[1][1].error)
        assert bench.responses[2][1].error is LOST
        worker.restart()
        assert worker.given == [[4]]
        worker.finish()
        await bench.turn()
        assert worker.given == [[5]]

    run_on_loop(scenario)


@SEQUENCES
def test_queued_requests_of_a_sequence_fail_as_soon_as_its_state_is_lost(kind: type[DirectSequences]) -> None:
    async def scenario() -> None:
        bench, worker = bench_of(kind())
        bench.submit(1, sequence_id=7, sequence_start=True)
        bench.submit(2, sequence_id=7)
        await bench.turn()
        worker.die()
        assert [(key, response.error) for key, response in bench.responses] == [(2, LOST), (1, DEAD)]

    run_on_loop(scenario)


def test_a_request_ends_at_the_timeout_of_its_level() -> None:
    async def scenario() -> None:
        bench, worker = bench_of(Priorities({1: MS}))
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

    run_on_loop(scenario)


def test_the_place_of_an_idle_sequence_is_given_away_without_another_event() -> None:
    async def scenario() -> None:
        scheduler = DirectSequences(idle_ns=MS)
        scheduler.positions = 1
        bench, worker = bench_of(scheduler)
        bench.submit(1, sequence_id=7, sequence_start=True)
        await bench.turn()
        worker.finish()
        bench.submit(2, sequence_id=8, sequence_start=True)
        while not worker.given:
            await bench.turn()
        bench.submit(3, sequence_id=7)
        assert (worker.given, bench.answers[1:]) == ([[2]], [(3, ErrorCode.INVALID_ARG, True)])

    run_on_loop(scenario)
