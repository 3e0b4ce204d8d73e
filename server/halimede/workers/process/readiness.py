"""Asks a model in a process whether it is ready."""

import asyncio

from halimede.workers.server.connection import WorkerConnection

READY_SECS = 5.0
"""How long a model may take to report whether it is ready."""


class Readiness:
    """The readiness of one process, as its model reports it. On the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_asked_for = False
        self._last = True
        self._asked: asyncio.Future[bool] | None = None
        """The question that the process has not answered; all callers wait for the same one."""

    def begin(self, *, answers: bool) -> None:
        """A process has started. `answers`: its model implements `is_ready`."""
        self._is_asked_for = answers
        self._last = True

    async def ask(self, connection: WorkerConnection) -> bool:
        if not self._is_asked_for:
            return True
        if len(connection.batches):
            # The process answers only between batches; while one runs, the last answer stands.
            return self._last
        if self._asked is None:
            self._asked = self._loop.create_future()
            connection.ask_ready()
        try:
            return await asyncio.wait_for(asyncio.shield(self._asked), READY_SECS)
        except TimeoutError:
            return False

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
