"""After any events in any order, every accepted request has one final answer and the pump is empty."""

from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.worker import WorkerEvent
from support.loops import in_a_loop
from support.pumping import Bench, PlayedProcess, outputs

BOOM = InferenceError(ErrorCode.INTERNAL, "boom")

STEPS = (
    "turn",
    "submit",
    "submit",
    "cancel",
    "answer",
    "answer",
    "end",
    "finish",
    "leave open",
    "break",
    "acknowledge",
)
FAULTS = ("die", "die unread", "park", "restart", "late failure", "stray answer", "stray end", "abort")

Step = tuple[str, int]
steps = st.lists(st.tuples(st.sampled_from((*STEPS, *STEPS, *FAULTS)), st.integers(0, 1 << 16)), max_size=80)


class Play:
    """Performs steps that Hypothesis picked; a step that is impossible in the current state does nothing."""

    def __init__(self, workers: int, concurrency: int, preserve_ordering: bool) -> None:
        self.bench = Bench(
            workers, concurrency=concurrency, preserve_ordering=preserve_ordering, preferred_batch_size=(2,)
        )
        self.next_key = 1
        # The messages that are due after a death, per worker: before the restart, or later.
        self.failures: list[WorkerEvent] = []

    async def perform(self, step: str, pick: int) -> None:
        bench = self.bench
        worker = bench.workers[pick % len(bench.workers)]
        key = self._held(worker, pick)
        slot = _chosen(sorted(worker.batches), pick)
        match step:
            case "turn":
                await bench.turn()
            case "submit":
                bench.submit(self.next_key)
                self.next_key += 1
            case "cancel":
                bench.pump.cancel(pick % self.next_key)
            case "answer" if key is not None:
                worker.send(key, BOOM if pick % 5 == 0 else outputs())
            case "end" if key is not None:
                worker.send(key, (None, BOOM, outputs())[pick % 3], final=True)
            case "finish" if slot is not None:
                worker.finish(slot, outputs())
            case "leave open" if slot is not None:
                worker.finish(slot)
            case "break" if slot is not None:
                worker.finish(slot, BOOM)
            case "acknowledge":
                bench.pump.acknowledge(pick % self.next_key, 1)
            case "die" | "die unread" | "park":
                self.failures += worker.die(parked=step == "park", has_read=step != "die unread")
            case "restart" if not worker.is_up:
                worker.restart()
            case "late failure" if self.failures:
                bench.pump.on_event(self.failures.pop(pick % len(self.failures)))
            case "stray answer":
                worker.send(pick % (self.next_key + 3), outputs(), final=pick % 2 == 0)
            case "stray end" if slot is not None:
                items = worker.batches[slot]
                worker.finish(slot, outputs())
                if slot not in worker.batches:
                    worker.batches[slot] = items
                    worker.finish(slot)
            case "abort":
                bench.pump.abort()

    async def wind_up(self) -> None:
        """Restart every worker and end all its batches."""
        for failure in self.failures:
            self.bench.pump.on_event(failure)
        for worker in self.bench.workers:
            if not worker.is_up:
                worker.restart()
        await self.bench.turn()
        while any(worker.batches or worker.open for worker in self.bench.workers):
            for worker in self.bench.workers:
                for slot in list(worker.batches):
                    worker.finish(slot)
                for key in list(worker.open):
                    worker.send(key, None, final=True)
            await self.bench.turn()

    def _held(self, worker: PlayedProcess, pick: int) -> int | None:
        running = [item.key for batch in worker.batches.values() for item in batch]
        return _chosen(sorted({*running, *worker.open}), pick)


def _chosen(of: list[int], pick: int) -> int | None:
    return of[pick % len(of)] if of else None


@settings(max_examples=400, deadline=None)
@given(steps, st.integers(1, 3), st.integers(1, 2), st.booleans())
@example([("submit", 0), ("answer", 0), ("die unread", 0)], 2, 1, False)  # a batch that is not read, but was answered
def test_every_request_gets_one_final_answer_after_any_events(
    script: list[Step], workers: int, concurrency: int, preserve_ordering: bool
) -> None:
    async def scenario() -> None:
        play = Play(workers, concurrency, preserve_ordering)
        for step, pick in script:
            await play.perform(step, pick)
        await play.wind_up()
        bench = play.bench

        finals = Counter(key for key, _, final in bench.answers if final)
        assert finals == dict.fromkeys(range(1, play.next_key), 1)
        over: set[int] = set()
        for key, _, final in bench.answers:
            assert key not in over, "an answer after the final one"
            if final:
                over.add(key)
        executed = Counter(key for worker in bench.workers for key in worker.executed)
        assert max(executed.values(), default=1) == 1, "a request ran twice"
        assert bench.stats.success_count + sum(bench.stats.failures.values()) == play.next_key - 1

        assert (bench.table.by_ticket, bench.table.decoded.held_bytes) == ({}, 0)
        assert (bench.pump.queued, bench.executing) == (0, 0)
        assert repr(bench.pump) == f"<Pump m:1 queue=0 running=0/{workers * concurrency} live=0>"
        await bench.pump.close()

    in_a_loop(scenario)()


@settings(max_examples=100, deadline=None)
@given(steps, st.integers(2, 3))
def test_answers_keep_the_order_of_their_requests_after_any_events(script: list[Step], workers: int) -> None:
    async def scenario() -> None:
        play = Play(workers, 1, preserve_ordering=True)
        for step, pick in script:
            if step != "park":  # Requests that are refused at once have no place in the order.
                await play.perform(step, pick)
        await play.wind_up()
        keys = [key for key, _, _ in play.bench.answers]
        assert keys == sorted(keys)

    in_a_loop(scenario)()
