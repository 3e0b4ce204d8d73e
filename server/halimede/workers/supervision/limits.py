"""Time limits of executions."""

import asyncio
from collections.abc import Callable, Iterable


class TimeLimits:
    """One timer per batch, by its number. False if no limit is configured."""

    def __init__(self, limit_ms: int, on_exceeded: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._limit_ms = limit_ms
        self._on_exceeded = on_exceeded
        self._loop = loop
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def __bool__(self) -> bool:
        return self._limit_ms > 0

    def begin(self, number: int) -> None:
        self._timers[number] = self._loop.call_later(self._limit_ms / 1000, self._on_exceeded)

    def end(self, number: int, waiting: Iterable[int]) -> None:
        """A batch has ended: restart the timers of the batches that wait in its slot."""
        self._cancel(number)
        for other in waiting:
            self._cancel(other)
            self.begin(other)

    def clear(self) -> None:
        for number in list(self._timers):
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        timer = self._timers.pop(number, None)
        if timer is not None:
            timer.cancel()
