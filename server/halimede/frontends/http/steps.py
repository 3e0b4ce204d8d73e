"""Long computations on the event loop, cut into steps: one step of one request per loop turn."""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from halimede.core.types import InferenceError
from halimede.frontends.http.protocol import Exchange

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields where the loop may get a turn, after at most some milliseconds; returns its result."""


@dataclass(slots=True)
class _Work:
    exchange: Exchange
    steps: Steps[Any]
    on_result: Callable[[Any], None]
    on_error: Callable[[InferenceError], None]


class StepQueue:
    """Runs generators of steps side by side, round robin.

    However many large requests there are, the loop is held for one step at a time. `on_crash` gets what is no
    InferenceError.
    """

    def __init__(self, on_crash: Callable[[Exchange, Exception], None]) -> None:
        self._on_crash = on_crash
        self._waiting: deque[_Work] = deque()

    def run(
        self,
        exchange: Exchange,
        steps: Steps[T],
        on_result: Callable[[T], None],
        on_error: Callable[[InferenceError], None],
    ) -> None:
        """Run `steps` to their end, then call one of the two. The steps end early when the client goes."""
        self._waiting.append(_Work(exchange, steps, on_result, on_error))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        work = self._waiting[0]
        is_over = True
        try:
            is_over = self._step(work)
        except Exception as error:  # noqa: BLE001 -- the other requests' steps go on, and this client gets an answer
            self._on_crash(work.exchange, error)
        self._waiting.popleft()
        if not is_over:
            self._waiting.append(work)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)

    def _step(self, work: _Work) -> bool:
        """One step; whether it was the last."""
        if not work.exchange.is_open:
            work.steps.close()
            return True
        try:
            next(work.steps)
        except StopIteration as stop:
            work.on_result(stop.value)
        except InferenceError as error:
            work.on_error(error)
        else:
            return False
        return True
