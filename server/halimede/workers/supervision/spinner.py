"""Lets the server's loop spin for the next frame of a process instead of blocking: it polls in every turn."""

import asyncio
import os
import time
from collections.abc import Sized

from halimede.core.spin import SPIN_NS, SpinPolicy


class Spinner:
    """Spins for the end of a short batch, and for the next call of a model that calls others. On the loop."""

    def __init__(self, policy: SpinPolicy, running: Sized, loop: asyncio.AbstractEventLoop) -> None:
        """`running`: the batches of the process; the loop does not spin without any."""
        self._policy = policy
        self._running = running
        self._loop = loop
        self.last_took_ns = SPIN_NS
        """The round-trip time of the last batch."""
        self._until: int | None = None
        self._is_spinning = False
        self._answered_ns = 0
        self._calls_soon = False
        """Whether the model made its last call soon after the answer to the one before, sent at `_answered_ns`."""

    def on_execute(self, requests: int, now_ns: int) -> None:
        """A batch was sent."""
        if self._until is None and self._policy.is_worth(self.last_took_ns, requests):
            self._spin(now_ns)

    def on_call(self) -> None:
        """The model's code has called another model."""
        self._calls_soon = self._policy.is_worth(time.monotonic_ns() - self._answered_ns, 1)
        self._until = None

    def on_answered(self) -> None:
        """The model's code was sent an answer to its call."""
        self._answered_ns = time.monotonic_ns()
        if self._calls_soon:
            self._spin(self._answered_ns)

    def _spin(self, now_ns: int) -> None:
        self._until = now_ns + SPIN_NS
        if not self._is_spinning:
            self._is_spinning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        until = self._until
        if until is not None and self._running and time.monotonic_ns() < until:
            os.sched_yield()
            self._loop.call_soon(self._turn)
        else:
            self._until = None
            self._is_spinning = False
