"""Stops work on another thread whose result is no longer needed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Abandon:
    """A flag that the caller sets once, when it stops waiting. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._stop: Callable[[], None] | None = None

    def set(self) -> None:
        """Stop the work that is running, and any that begins later."""
        with self._lock:
            self._is_set = True
            stop = self._stop
        if stop is not None:
            stop()

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop`, on any thread, if the flag is set now or is set before the block ends."""
        with self._lock:
            self._stop = stop
            is_set = self._is_set
        if is_set:
            stop()
        try:
            yield
        finally:
            with self._lock:
                self._stop = None
