"""Tests that are coroutines."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
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


def with_opened(
    opened: Callable[[Path], AbstractAsyncContextManager[Any]],
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """For tests that are coroutines: their first argument is what `opened` opens in the test's folder."""

    def decorate(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        async def run(tmp_path: Path, **fixtures: object) -> None:
            async with opened(tmp_path) as first:
                await scenario(first, **fixtures)

        _, *others = inspect.signature(scenario).parameters.values()
        folder = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test = functools.update_wrapper(in_a_loop(run), scenario)
        test.__signature__ = inspect.Signature([folder, *others])  # type: ignore[attr-defined]  # pytest reads it
        return test

    return decorate
