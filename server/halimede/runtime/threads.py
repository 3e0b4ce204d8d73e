"""Blocking work (reading a repository, loading a model) off the event loop, on daemon threads.

Not an executor: its threads are joined at exit, and a model that hangs in its load must not keep the process alive.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(name: str, work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own. Cancelling stops the waiting, not the thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None here is the T that work returned

    def target() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as caught:  # noqa: BLE001  # SystemExit of a model's code must reach the waiter, not vanish
            error = caught if isinstance(caught, Exception) else RuntimeError(f"{type(caught).__name__}: {caught}")
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop is closed: no task waits for the result

    threading.Thread(target=target, name=name, daemon=True).start()
    return await future
