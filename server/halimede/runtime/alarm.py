"""Timers of the event loop: at a time in nanoseconds, or at the end of a turn."""

import asyncio
from collections.abc import Callable

from halimede.runtime.clock import monotonic_ns

LONGEST_SLEEP_MS = 3_600_000
"""A request's timeout may be thousands of years, more than the loop's timers support."""


class Alarm:
    """Calls back once, at the time that was set last."""

    __slots__ = ("_at", "_callback", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._at: int | None = None

    def set(self, at_ns: int | None) -> None:
        """Replace the time that was set before; None for never."""
        if at_ns == self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._at = at_ns
        if at_ns is not None:
            self._sleep(at_ns - monotonic_ns())

    def _sleep(self, remaining_ns: int) -> None:
        # The loop's timers count whole milliseconds. Sleep the whole ones, then check the clock at each turn of the
        # loop: this keeps a delay of 100 us, and turns for less than a millisecond cost less than being late.
        whole_ms = min(remaining_ns // 1_000_000, LONGEST_SLEEP_MS)
        if whole_ms >= 1:
            self._timer = self._loop.call_later(whole_ms / 1000, self._ring)
        else:
            self._timer = self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self._timer = None
        at = self._at
        if at is None:
            return
        remaining_ns = at - monotonic_ns()
        if remaining_ns > 0:
            self._sleep(remaining_ns)
            return
        self._at = None
        self._callback()


class TurnEnd:
    """Calls back once at the end of a turn of the loop, however often it is set."""

    __slots__ = ("_callback", "_is_set", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._is_set = False

    def set(self, turns: int) -> None:
        """Call back at once (0), or at the end of this turn (1) or of the next one (2) if it is not set already."""
        if turns == 0:
            self._callback()
            return
        if self._is_set:
            return
        self._is_set = True
        if turns == 1:
            self._loop.call_soon(self._ring)
        else:
            self._loop.call_soon(self._loop.call_soon, self._ring)

    def _ring(self) -> None:
        self._is_set = False
        self._callback()
