"""Run blocking calls on background threads."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> "Future[T]":
    """Run `work` on a daemon thread. The future has its result or error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # the reader of the future gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
