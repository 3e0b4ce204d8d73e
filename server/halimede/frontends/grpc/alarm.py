"""The timer of one connection: its keepalive and its age."""

import asyncio
from collections.abc import Callable
from math import inf
from time import monotonic

from halimede.core.wire.http2.keepalive import Due, Keepalive, KeepaliveRules


class Alarm:
    """Calls `on_due` for each thing that is due. It is set again after each, and by `set`."""

    __slots__ = ("_at", "_has_calls", "_is_for_calls", "_loop", "_on_due", "_timer", "keepalive")

    def __init__(
        self,
        rules: KeepaliveRules,
        age_factor: float,
        loop: asyncio.AbstractEventLoop,
        has_calls: Callable[[], bool],
        on_due: Callable[[Due, float], None],
    ) -> None:
        self.keepalive = Keepalive(rules, monotonic(), age_factor)
        self._loop = loop
        self._has_calls = has_calls
        self._on_due = on_due
        self._timer: asyncio.TimerHandle | None = None
        self._at = inf
        self._is_for_calls = False

    def set(self) -> None:
        """Wake when something is due."""
        self._is_for_calls = self._has_calls()
        wake_at = self.keepalive.wake_at(has_calls=self._is_for_calls)
        if wake_at < self._at:
            self.cancel()
            self._at = wake_at
            self._timer = self._loop.call_later(max(0.0, wake_at - monotonic()), self._wake)

    def call_begins(self) -> None:
        """Connections with calls are pinged."""
        if not self._is_for_calls:
            self.set()

    def cancel(self) -> None:
        """Wake no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._at = None, inf

    def _wake(self) -> None:
        self._timer, self._at = None, inf
        now = monotonic()
        while (due := self.keepalive.due(now, has_calls=self._has_calls())) is not None:
            self._on_due(due, now)
        self.set()
