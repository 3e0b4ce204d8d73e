"""Long computations are split into steps, in turn."""

import asyncio
from collections.abc import Generator
from typing import Any

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.wire.steps import Steps
from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.framing import Head
from halimede.frontends.steps import PERMITS, SMALL_BYTES, StepQueue
from support.loops import in_a_loop


class OneExchange:
    """A connection with one exchange in progress."""

    MOST_BYTES = 1 << 30

    def __init__(self, events: list[str] | None = None) -> None:
        """`events` gets faults."""
        self.events = [] if events is None else events
        connection: Any = self
        self.exchange: Exchange | None = Exchange(connection, Head(b"GET", b"/", {}, b"", 0), b"")

    def count(self, _exchange: Exchange, size: int) -> None:
        if size >= self.MOST_BYTES:
            raise InferenceError(ErrorCode.UNAVAILABLE, "no room")

    def fail(self, _exchange: Exchange, error: BaseException) -> None:
        self.events.append(f"crash {error}")


def open_exchange(events: list[str] | None = None) -> Exchange:
    exchange = OneExchange(events).exchange
    assert exchange is not None
    return exchange


class Recorder:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.queue = StepQueue()

    def steps(self, name: str, count: int, end: Exception | None = None) -> Steps[str]:
        try:
            for number in range(count):
                self.events.append(f"{name}{number}")
                yield 0
            if end is not None:
                raise end
        finally:
            self.events.append(f"{name} ends")
        return name

    def run(self, name: str, count: int, end: Exception | None = None, exchange: Exchange | None = None) -> None:
        self.queue.run(
            exchange or open_exchange(self.events),
            self.steps(name, count, end),
            lambda result: self.events.append(f"result {result}"),
            lambda error: self.events.append(f"error {error.message}"),
        )

    async def turns(self, count: int) -> list[str]:
        """The events of this number of turns of the loop."""
        for _ in range(count):
            await asyncio.sleep(0)
        seen, self.events = self.events, []
        return seen


@in_a_loop
async def test_each_loop_turn_does_one_step_of_one_request() -> None:
    recorder = Recorder()
    recorder.run("a", 3)
    recorder.run("b", 1)
    assert await recorder.turns(1) == ["a0"]
    assert await recorder.turns(1) == ["b0"]
    assert await recorder.turns(1) == ["a1"]
    assert await recorder.turns(1) == ["b ends", "result b"]
    assert await recorder.turns(10) == ["a2", "a ends", "result a"]
    recorder.run("c", 0)
    assert await recorder.turns(1) == ["c ends", "result c"]


@in_a_loop
async def test_errors_end_one_request_and_not_the_others() -> None:
    recorder = Recorder()
    recorder.run("a", 0, InferenceError(ErrorCode.INVALID_ARG, "bad"))
    recorder.run("b", 0, RuntimeError("bug"))
    recorder.run("c", 1)
    assert await recorder.turns(10) == [
        "a ends",
        "error bad",
        "b ends",
        "crash bug",
        "c0",
        "c ends",
        "result c",
    ]


@in_a_loop
async def test_the_steps_of_a_disconnected_client_end_early() -> None:
    recorder = Recorder()
    client = OneExchange()
    recorder.run("a", 5, exchange=client.exchange)
    assert await recorder.turns(1) == ["a0"]
    client.exchange = None
    assert await recorder.turns(10) == ["a ends"]


@in_a_loop
async def test_a_result_may_start_more_steps() -> None:
    recorder = Recorder()
    exchange = open_exchange()
    recorder.queue.run(exchange, recorder.steps("a", 0), lambda _: recorder.run("b", 1), lambda _: None)
    assert await recorder.turns(10) == ["a ends", "b0", "b ends", "result b"]


class Body:
    """A body that grows by `sizes` bytes, one per step."""

    def __init__(self, queue: StepQueue, *sizes: int) -> None:
        self.exchange = open_exchange()
        self.held = 0
        self.is_closed = False
        self.outcome = ""
        queue.run(self.exchange, self._steps(sizes), self._end, lambda error: self._end(error.message))

    def _steps(self, sizes: tuple[int, ...]) -> Generator[int, None, str]:
        try:
            for size in sizes:
                self.held += size
                yield size
        finally:
            self.is_closed = True
        return "whole"

    def _end(self, outcome: str) -> None:
        self.outcome = outcome

    def leave(self) -> None:
        connection: Any = self.exchange._connection
        connection.exchange = None
        if self.exchange.on_gone is not None:
            self.exchange.on_gone()


async def turns_of(bodies: list[Body], count: int) -> list[str]:
    for _ in range(count):
        await asyncio.sleep(0)
    return [body.outcome for body in bodies]


@in_a_loop
async def test_the_number_of_large_bodies_is_limited_to_the_slots() -> None:
    queue = StepQueue()
    large = [Body(queue, SMALL_BYTES, *[1] * 5) for _ in range(PERMITS + 2)]
    small = Body(queue, SMALL_BYTES)
    assert await turns_of(large, 7 * len(large)) == ["whole"] * PERMITS + [""] * 2
    # Waiting bodies are one step above the limit of small ones.
    assert [body.held for body in large[PERMITS:]] != [0, 0]
    assert small.outcome == "whole"
    assert await turns_of(large, 20) == ["whole"] * (PERMITS + 2)


@in_a_loop
async def test_a_client_that_disconnects_while_waiting_frees_its_bytes() -> None:
    queue = StepQueue()
    large = [Body(queue, SMALL_BYTES + 1, *[1] * 50) for _ in range(PERMITS + 2)]
    await turns_of(large, 2 * len(large))
    large[PERMITS].leave()
    large[0].leave()
    assert large[PERMITS].is_closed
    outcomes = await turns_of(large, 60 * len(large))
    assert outcomes == ["", *["whole"] * (PERMITS - 1), "", "whole"]
    assert large[0].is_closed


@in_a_loop
async def test_a_request_without_room_for_its_bytes_ends() -> None:
    queue = StepQueue()
    body = Body(queue, 10, OneExchange.MOST_BYTES, 1)
    assert await turns_of([body], 4) == ["no room"]
    assert (body.is_closed, body.held) == (True, 10 + OneExchange.MOST_BYTES)
    another = Body(queue, 1)
    assert await turns_of([another], 4) == ["whole"]
