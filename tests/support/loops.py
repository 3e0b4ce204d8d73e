"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def in_a_loop(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, run in a new event loop. An exception that only the loop sees fails the test too."""

    @functools.wraps(scenario)
    def run(*arguments: object, **fixtures: object) -> None:
        failures: list[Exception] = []

        def on_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            failures.append(context.get("exception") or RuntimeError(context["message"]))

        async def within_time() -> None:
            asyncio.get_running_loop().set_exception_handler(on_failure)
            async with asyncio.timeout(100):
                await scenario(*arguments, **fixtures)

        asyncio.run(within_time())
        if failures:
            raise failures[0]

    return run
