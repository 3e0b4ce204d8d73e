"""Long computations on the event loop, cut into steps: one step of one request per loop turn.

The bytes that a request's steps hold count with its body. A request that holds more than `SMALL_BYTES` needs one of
`PERMITS` permits to continue, and waits until one is free. Without this limit all bodies would inflate at once.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from halimede.core.types import InferenceError
from halimede.core.wire.steps import Steps

T = TypeVar("T")

PERMITS = 4
"""Number of requests that may become large at the same time. More do not add throughput: there is one loop."""

SMALL_BYTES = 256 << 10
"""Bytes that a request may hold in addition to its body without a permit."""


class Waiting(Protocol):
    """A request whose client waits for its answer: an exchange of HTTP, or a call of gRPC."""

    on_gone: Callable[[], None] | None
    """Called if the client leaves."""

    @property
    def is_open(self) -> bool:
        """Whether an answer can still be sent."""

    def count(self, size: int) -> None:
        """Count more bytes held for the request. UNAVAILABLE when too many are held."""

    def break_off(self, error: Exception) -> None:
        """End the request by an error that its handler does not know of."""


@dataclass(slots=True, eq=False)
class _Work:
    client: Waiting
    steps: Steps[Any]
    on_result: Callable[[Any], None]
    on_error: Callable[[InferenceError], None]
    held_bytes: int = 0
    has_permit: bool = False


class StepQueue:
    """Runs generators of steps in turn, round robin.

    However many large requests there are, the loop is blocked for one step at a time. Exceptions other than
    InferenceError break off their request.
    """

    def __init__(self) -> None:
        self._running: deque[_Work] = deque()
        self._free_permits = PERMITS
        self._for_permit: deque[_Work] = deque()

    def run(
        self,
        client: Waiting,
        steps: Steps[T],
        on_result: Callable[[T], None],
        on_error: Callable[[InferenceError], None],
    ) -> None:
        """Run `steps` to their end, then call one of the two. The steps end early when the client disconnects."""
        self._running.append(_Work(client, steps, on_result, on_error))
        if len(self._running) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        work = self._running[0]
        is_over = True
        try:
            is_over = self._step(work)
        except Exception as error:  # noqa: BLE001 -- other requests' steps continue, and this client gets an answer
            work.client.break_off(error)
        self._running.popleft()
        if is_over:
            self._release_permit(work)
        elif self._may_continue(work):
            self._running.append(work)
        if self._running:
            asyncio.get_running_loop().call_soon(self._turn)

    def _may_continue(self, work: _Work) -> bool:
        """Whether the work is small or has a permit; otherwise it waits for one."""
        if work.has_permit or work.held_bytes <= SMALL_BYTES:
            return True
        if self._free_permits:
            self._free_permits -= 1
            work.has_permit = True
            return True
        self._for_permit.append(work)
        work.client.on_gone = partial(self._leave, work)
        return False

    def _leave(self, work: _Work) -> None:
        """Drop work that waits: its client has disconnected."""
        self._for_permit.remove(work)
        work.steps.close()

    def _release_permit(self, work: _Work) -> None:
        if not work.has_permit:
            return
        if not self._for_permit:
            self._free_permits += 1
            return
        following = self._for_permit.popleft()
        following.client.on_gone = None
        following.has_permit = True
        self._running.append(following)

    def _step(self, work: _Work) -> bool:
        """Run one step. Returns whether it was the last."""
        if not work.client.is_open:
            work.steps.close()
            return True
        try:
            if size := next(work.steps):
                work.client.count(size)
                work.held_bytes += size
        except StopIteration as stop:
            work.on_result(stop.value)
        except InferenceError as error:
            work.steps.close()
            work.on_error(error)
        else:
            return False
        return True
