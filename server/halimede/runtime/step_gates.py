"""The calls of an ensemble that wait at their step's gate (`max_inflight_requests`), and the timer of their timeouts.

A call for which a model's own code waits enters at once: the calls under way may wait for that model.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from halimede.core.ensemble.admission import Gate, Key
from halimede.core.ensemble.run import CallStep
from halimede.runtime.alarm import Alarm
from halimede.runtime.clock import monotonic_ns

NS_PER_US = 1000

R = TypeVar("R")
"""A request of the ensemble."""


@dataclass(slots=True)
class Waiting(Generic[R]):
    """A call that waits at its step's gate since `since_ns`."""

    key: Key
    owner: R
    call: CallStep
    since_ns: int


class StepGates(Generic[R]):
    """One gate per step. `limit` is how many calls of a step may be under way."""

    def __init__(
        self, steps: int, limit: int, on_expired: Callable[[Waiting[R]], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._gates = [Gate(limit) for _ in range(steps)]
        self._waiting: dict[Key, Waiting[R]] = {}
        self._on_expired = on_expired
        self._alarm = Alarm(loop, self._expire)

    def __repr__(self) -> str:
        return f"<StepGates waiting={len(self._waiting)}>"

    def __len__(self) -> int:
        """Number of waiting calls."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting[R]]:
        """Every waiting call in the order of arrival. Iterates over a copy, which may be changed meanwhile."""
        return iter(list(self._waiting.values()))

    def enter(self, step: int) -> None:
        """Let a call pass even if the gate is full."""
        self._gates[step].enter()

    def try_enter(self, key: Key, owner: R, call: CallStep) -> bool:
        """Whether the call passes. If not, it waits, at most for its timeout. UNAVAILABLE when too many wait."""
        now = monotonic_ns()
        timeout_us = call.request.timeout_us
        if self._gates[call.step].try_enter(key, now + timeout_us * NS_PER_US if timeout_us else None):
            return True
        self._waiting[key] = Waiting(key, owner, call, now)
        if timeout_us:
            self._arm()
        return False

    def leave(self, step: int) -> Waiting[R] | None:
        """Note that a call has ended. Returns the call that passes in its place, if one waits."""
        key = self._gates[step].leave()
        if key is None:
            return None
        waiting = self._waiting.pop(key)
        request = waiting.call.request
        if request.timeout_us:
            # One timeout covers the wait here and the wait in the queue of the step's model.
            waited_us = (monotonic_ns() - waiting.since_ns) // NS_PER_US
            request.form = replace(request.form, timeout_us=max(1, request.timeout_us - waited_us))
            self._arm()
        return waiting

    def try_remove(self, key: Key) -> Waiting[R] | None:
        """Remove a call that waits. Returns it, None when it does not wait."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._gates[waiting.call.step].try_remove(key)
        return waiting

    def close(self) -> None:
        self._alarm.set(None)

    def _arm(self) -> None:
        self._alarm.set(min((at for gate in self._gates if (at := gate.wake_at()) is not None), default=None))

    def _expire(self) -> None:
        now = monotonic_ns()
        for gate in self._gates:
            for key in gate.expire(now):
                # The end of one call may remove other calls of its request that expire now, too.
                waiting = self._waiting.pop(key, None)
                if waiting is not None:
                    self._on_expired(waiting)
        self._arm()
