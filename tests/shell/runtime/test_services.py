"""What models ask of the server and tell it."""

from collections.abc import Hashable

import pytest

from halimede.core.config.check_request import Checked
from halimede.core.observe.custom_metrics import CustomMetrics
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.caller import Caller
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.pump import SLOT_STRIDE, Answers, Beside, Instance
from halimede.runtime.server import OnResponse
from halimede.runtime.services import ModelServices
from support.pumping import Bench, outputs, story


def test_thousands_of_updates_that_fail_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    metrics = CustomMetrics()
    family = metrics.new_family("m#1", "hits", "", "COUNTER")
    metric = metrics.new_metric("m#1", family, {}, None)
    updates = [(metric, "increment", 2.0), *[(metric, "increment", -1.0)] * 4_000, (metric, "increment", 3.0)]
    ModelServices(metrics).update_metrics("m#1", updates)
    assert metrics.value("m#1", metric) == 5
    [line] = [record.getMessage() for record in caplog.records]
    assert (line.startswith("model 'm': "), line.endswith(" (3999 more updates failed)")) == (True, True)


class Played:
    """A server that keeps who asked for what."""

    def __init__(self) -> None:
        self.callers: list[Caller | None] = []
        self.held_up: list[tuple[int, Hashable]] = []

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller | None = None) -> int:
        self.callers.append(caller)
        return len(self.callers)

    def hold_up(self, ticket: int, waiter: Hashable) -> None:
        self.held_up.append((ticket, waiter))


def test_a_call_says_what_waits_for_it_and_how_deep_it_lies() -> None:
    async def tell() -> None:
        bench = Bench(concurrency=2, preferred_batch_size=(1,))
        services, server = ModelServices(CustomMetrics()), Played()
        services.models = server  # type: ignore[assignment]  # all that a call needs of it
        services.register("m#1", bench.pump)
        request = InferenceRequest("m", id="1")
        bench.pump.submit(1, request, Checked(1, 4, ()), lambda _: None, monotonic_ns(), Caller(4))
        bench.submit(2)
        await bench.turn()

        def ask(slot: int | None, *requests: int) -> Caller | None:
            services.infer("m#1", 0, slot, requests, InferenceRequest("other"), lambda _: None)
            return server.callers[-1]

        first, second = bench.pump.batch_on(0), bench.pump.batch_on(SLOT_STRIDE)
        assert (ask(0), ask(1)) == (Caller(5, first), Caller(1, second))
        # Beside the batches: as deep as any of the requests that is left, and their answers wait where all are of one
        # batch.
        unknown = Beside(bench.pump.instance(0))
        assert (ask(None, 1, 2), ask(None, 99), ask(None)) == (
            Caller(5, unknown),
            Caller(1, unknown),
            Caller(1, unknown),
        )
        assert (ask(None, 1), ask(None, 2, 99)) == (Caller(5, Answers(first)), Caller(1, Answers(second)))
        bench.workers[0].finish(0)
        assert ask(None, 1) == Caller(5, Answers(first)), "it is open"

    story(tell)


def test_a_call_holds_up_the_batch_in_a_slot_or_the_whole_instance() -> None:
    async def tell() -> None:
        bench = Bench()
        services, server = ModelServices(CustomMetrics()), Played()
        services.hold_up("m#1", 0, None, 7)
        services.models = server  # type: ignore[assignment]  # all that this needs of it
        services.register("m#1", bench.pump)
        bench.submit(1)
        services.hold_up("m#1", 0, 0, 7)
        services.hold_up("m#1", 0, 1, 8)  # nothing runs there any more
        services.hold_up("m#1", 0, None, 9)
        assert server.held_up == [(7, bench.pump.batch_on(0)), (9, Instance(bench.pump, 0))]

    story(tell)


def test_who_calls_is_known_anew_for_each_batch_and_forgotten_with_its_answer() -> None:
    async def tell() -> None:
        bench = Bench()
        (worker,) = bench.workers
        callers = []
        for key, caller in enumerate((Caller(4, "a batch"), Caller(1, "another"), None), 1):
            request = InferenceRequest("m", id=str(key))
            bench.pump.submit(key, request, Checked(1, 4, ()), lambda _: None, monotonic_ns(), caller)
            callers.append((bench.pump.caller_on(0), bench.pump.batch_on(0), len(bench.live.waits)))
            assert bench.pump.caller_on(0) is bench.pump.caller_on(0)
            worker.finish(reply=outputs())

        batches = [batch for _, batch, _ in callers]
        assert len(set(batches)) == 3
        assert callers == [
            (Caller(5, batches[0]), batches[0], 1),
            (Caller(2, batches[1]), batches[1], 1),
            (Caller(1, batches[2]), batches[2], 0),
        ]
        assert bench.pump.caller_on(0) == Caller(1), "nothing runs there"

    story(tell)


def test_a_call_of_a_model_that_is_not_there_any_more_is_refused() -> None:
    async def tell() -> None:
        services, answers = ModelServices(CustomMetrics()), list[InferenceResponse]()
        pump = Bench().pump

        def ask() -> InferenceError | None:
            assert services.infer("m#1", 0, 0, (), InferenceRequest("other", id="a"), answers.append) == 0
            return answers[-1].error

        refusal = InferenceError(ErrorCode.UNAVAILABLE, "the server is not up yet")
        services.register("m#1", pump)
        assert ask() == refusal
        services.models = Played()  # type: ignore[assignment]  # all that a call needs of it
        services.forget("m#1")
        assert ask() == refusal
        assert [(answer.model_name, answer.id, answer.final) for answer in answers] == [("other", "a", True)] * 2

    story(tell)
