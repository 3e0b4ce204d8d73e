"""Long computations take turns."""

import asyncio
from collections.abc import Generator
from typing import Any

from halimede.core.types import ErrorCode, InferenceError
from halimede.frontends.http.framing import Head
from halimede.frontends.http.protocol import Exchange
from halimede.frontends.http.steps import StepQueue


class OneExchange:
    """A connection with one exchange in work."""

    def __init__(self) -> None:
        connection: Any = self
        self.exchange: Exchange | None = Exchange(connection, Head(b"GET", b"/", {}, b"", 0), b"")


def open_exchange() -> Exchange:
    exchange = OneExchange().exchange
    assert exchange is not None
    return exchange


class Story:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.queue = StepQueue(lambda _, error: self.events.append(f"crash {error}"))

    def steps(self, name: str, count: int, end: Exception | None = None) -> Generator[None, None, str]:
        try:
            for number in range(count):
                self.events.append(f"{name}{number}")
                yield
            if end is not None:
                raise end
        finally:
            self.events.append(f"{name} ends")
        return name

    def run(self, name: str, count: int, end: Exception | None = None, exchange: Exchange | None = None) -> None:
        self.queue.run(
            exchange or open_exchange(),
            self.steps(name, count, end),
            lambda result: self.events.append(f"result {result}"),
            lambda error: self.events.append(f"error {error.message}"),
        )

    async def turns(self, count: int) -> list[str]:
        """What happens in so many turns of the loop."""
        for _ in range(count):
            await asyncio.sleep(0)
        seen, self.events = self.events, []
        return seen


def test_each_loop_turn_does_one_step_of_one_request() -> None:
    async def story() -> None:
        story = Story()
        story.run("a", 3)
        story.run("b", 1)
        assert await story.turns(1) == ["a0"]
        assert await story.turns(1) == ["b0"]
        assert await story.turns(1) == ["a1"]
        assert await story.turns(1) == ["b ends", "result b"]
        assert await story.turns(10) == ["a2", "a ends", "result a"]
        story.run("c", 0)
        assert await story.turns(1) == ["c ends", "result c"]

    asyncio.run(story())


def test_errors_end_one_request_and_not_the_others() -> None:
    async def story() -> None:
        story = Story()
        story.run("a", 0, InferenceError(ErrorCode.INVALID_ARG, "bad"))
        story.run("b", 0, RuntimeError("bug"))
        story.run("c", 1)
        assert await story.turns(10) == [
            "a ends",
            "error bad",
            "b ends",
            "crash bug",
            "c0",
            "c ends",
            "result c",
        ]

    asyncio.run(story())


def test_the_steps_of_a_client_that_left_end_early() -> None:
    async def story() -> None:
        story = Story()
        client = OneExchange()
        story.run("a", 5, exchange=client.exchange)
        assert await story.turns(1) == ["a0"]
        client.exchange = None
        assert await story.turns(10) == ["a ends"]

    asyncio.run(story())


def test_a_result_may_start_more_steps() -> None:
    async def story() -> None:
        story = Story()
        exchange = open_exchange()
        story.queue.run(exchange, story.steps("a", 0), lambda _: story.run("b", 1), lambda _: None)
        assert await story.turns(10) == ["a ends", "b0", "b ends", "result b"]

    asyncio.run(story())
