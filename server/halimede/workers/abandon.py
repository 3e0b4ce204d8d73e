"""Tells work on another thread that nobody waits for it any more."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Abandon:
    """Set once, by whoever gives up waiting. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._stop: Callable[[], None] | None = None

    def set(self) -> None:
        """Stop what can be stopped now, or would begin later."""
        with self._lock:
            self._is_set = True
            stop = self._stop
        if stop is not None:
            stop()

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """`stop` is called, on any thread, when it is set meanwhile, or has been."""
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
