"""One timer of the event loop, at a time in nanoseconds."""

import asyncio
from collections.abc import Callable

from halimede.runtime.clock import monotonic_ns

LONGEST_SLEEP_MS = 3_600_000
"""A request's own timeout may be thousands of years, which no timer takes."""


class Alarm:
    """Calls back at the time that it was set to last, or somewhat before; whoever set it looks at the clock again."""

    __slots__ = ("_at", "_callback", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._at: int | None = None

    def set(self, at_ns: int | None) -> None:
        """Instead of the time before; None for never."""
        if at_ns == self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._at = at_ns
        if at_ns is None:
            return
        # The loop's timers count whole milliseconds. Sleep the whole ones, then look again each turn of the loop: a
        # delay of 100 us is kept, and the turns between cost less than a millisecond late would.
        whole_ms = min((at_ns - monotonic_ns()) // 1_000_000, LONGEST_SLEEP_MS)
        if whole_ms >= 1:
            self._timer = self._loop.call_later(whole_ms / 1000, self._ring)
        else:
            self._timer = self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._at = None
        self._callback()
