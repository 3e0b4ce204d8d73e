"""Ends the wait for work that hangs.

Work that runs a model's own code (a load, the start of instances, a close) may never return, and a thread cannot be
ended. So every wait for such work has an end: an unload that has waited long and a stop of the server leave a load
behind, and a close that takes too long is left behind too. If such a load ends later, its result is closed at once.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from halimede.core.repository.load_errors import ConfigError, LeftBehindError
from halimede.core.types import ErrorCode
from halimede.runtime.lifecycle.record import ModelRecord

log = logging.getLogger(__name__)

T = TypeVar("T")

Discard = Callable[[T], Coroutine[Any, Any, None]]
"""Closes the result of work that was left behind."""

MAX_LEFT_BEHIND = 64
"""Maximum number of loads and closes that never ended, because each holds a thread and its memory."""


class LeftBehind:
    """The loads and closes that were left behind."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def check_room(self) -> None:
        """Raise ConfigError if so many were left behind that no model may be loaded."""
        if len(self._tasks) >= MAX_LEFT_BEHIND:
            text = f"{MAX_LEFT_BEHIND} loads or unloads of models never ended, the server must be restarted"
            raise ConfigError(ErrorCode.UNAVAILABLE, text)

    async def unless_unloaded(
        self,
        record: ModelRecord,
        work: Coroutine[Any, Any, T],
        discard: Discard[T] | None = None,
        *,
        ends_by_cancelling: bool = False,
        limit_secs: float | None = None,
    ) -> T:
        """The result or error of `work`. Raises LeftBehindError if an unload has waited for it too long.

        With `limit_secs`, an unload waits no longer than this. After the error, and if this call is cancelled, `work`
        is cancelled. If that does not end it, it continues in the background and `discard` gets its result.
        """
        if record.unloads.give_up.is_set():
            work.close()
            raise LeftBehindError
        task = asyncio.get_running_loop().create_task(work)
        giving_up = asyncio.get_running_loop().create_task(record.unloads.waited(limit_secs))
        try:
            await asyncio.wait((task, giving_up), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.leave(record.name, task, discard)
            if ends_by_cancelling:
                task.cancel()
            raise
        finally:
            giving_up.cancel()
        if not task.done():
            self.leave(record.name, task, discard)
            if ends_by_cancelling:
                task.cancel()
            raise LeftBehindError
        return task.result()

    def leave(self, name: str, task: asyncio.Task[T], discard: Discard[T] | None = None) -> None:
        """Stop waiting for `task`; its result is discarded when it ends."""
        waiter = asyncio.get_running_loop().create_task(_discard_result(name, task, discard))
        self._tasks.add(waiter)
        waiter.add_done_callback(self._tasks.discard)


async def _discard_result(name: str, task: asyncio.Task[T], discard: Discard[T] | None) -> None:
    try:
        result = await task
    except asyncio.CancelledError:
        return
    except Exception as error:  # noqa: BLE001  # no caller is left
        # Not a problem: most loads that are left behind fail because a stop of the server has ended their process.
        log.debug("model '%s': a load that was left behind has failed: %s", name, error, extra={"model": name})
        return
    if discard is not None:
        await discard(result)
