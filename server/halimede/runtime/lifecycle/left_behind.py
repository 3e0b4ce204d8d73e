"""Ends the wait for work that hangs.

What runs a model's own code (a load, the start of instances, a close) may never return, and a thread cannot be ended.
So nothing waits for such work for ever: an unload that has waited long, or a stop of the server, leaves a load behind,
and what does not close in time is left behind too. What such a load makes in the end is closed as it comes.
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
"""Closes what work has made that nobody waits for any more."""

MAX_LEFT_BEHIND = 64
"""Loads and closes that never ended. Each holds a thread and what it allocated, so that they may not become many."""


class LeftBehind:
    """The loads and closes that nobody waits for any more."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def check_room(self) -> None:
        """ConfigError when there are so many that nothing more may be loaded."""
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
    ) -> T:
        """What `work` returns or raises; LeftBehindError when an unload has waited for it long enough.

        Then, and when this call is cancelled, `work` is cancelled if that ends it; else it goes on by itself, and
        `discard` gets what comes of it.
        """
        give_up = record.unloads.give_up
        if give_up.is_set():
            work.close()
            raise LeftBehindError
        task = asyncio.get_running_loop().create_task(work)
        giving_up = asyncio.get_running_loop().create_task(give_up.wait())
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
        """Wait for `task` no longer, but see to what comes of it."""
        waiter = asyncio.get_running_loop().create_task(_discard_result(name, task, discard))
        self._tasks.add(waiter)
        waiter.add_done_callback(self._tasks.discard)


async def _discard_result(name: str, task: asyncio.Task[T], discard: Discard[T] | None) -> None:
    try:
        result = await task
    except asyncio.CancelledError:
        return
    except Exception as error:  # noqa: BLE001  # nobody is left who asked for it
        about = {"model": name}
        log.warning("model '%s': a load that was left behind has failed: %s", name, error, extra=about)
        return
    if discard is not None:
        await discard(result)
