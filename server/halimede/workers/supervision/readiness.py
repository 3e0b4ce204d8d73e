"""Asks a model in a process whether it is ready."""

import asyncio
from collections.abc import Sized
from typing import Protocol

from halimede.core.types import unavailable

READY_SECS = 5.0
"""How long a model may take to report whether it is ready."""


class Askable(Protocol):
    """The part of a connection to a process that is used here."""

    @property
    def batches(self) -> Sized:
        """Its running batches."""

    def ask_ready(self) -> None:
        """Ask the model, which answers by `Readiness.on_ready`."""


class Readiness:
    """The readiness of one process, as its model reports it within `limit_s` seconds. On the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._is_asked_for = False
        self._last = True
        self._asked: asyncio.Future[bool] | None = None
        """The question that the process has not answered; all callers wait for the same one."""

    def begin(self, *, answers: bool) -> None:
        """A process has started. `answers`: its model implements `is_ready`."""
        self._is_asked_for = answers
        self._last = True

    async def ask(self, connection: Askable) -> bool:
        """Whether the model is ready; UNAVAILABLE if it does not answer in time."""
        if not self._is_asked_for:
            return True
        if self._asked is None and len(connection.batches):
            # The process answers only between batches; while one runs, the last answer stands.
            return self._last
        what = "in-flight"
        if self._asked is None:
            what = "user-defined"
            self._asked = self._loop.create_future()
            connection.ask_ready()
        try:
            return await asyncio.wait_for(asyncio.shield(self._asked), self._limit_s)
        except TimeoutError:
            raise unavailable(f"Timed out waiting for {what} is_ready() response") from None

    def on_ready(self, is_ready: bool) -> None:
        """The model has answered."""
        self._last = is_ready
        self._settle(is_ready)

    def on_gone(self) -> None:
        """The process has ended."""
        self._settle(False)

    def _settle(self, is_ready: bool) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.set_result(is_ready)
