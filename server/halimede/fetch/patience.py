"""Time that a fetch has in all, and the pauses between tries within it."""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from halimede.fetch.faults import Exit, FetchError, TransientFault, pause_secs

log = logging.getLogger(__name__)

T = TypeVar("T")


class Patience:
    """Ends `timeout_secs` after it was made, or when `abort` is set: then no wait is begun, and those under way end."""

    def __init__(self, timeout_secs: float) -> None:
        self._timeout_secs = timeout_secs
        self._end = time.monotonic() + timeout_secs
        self.abort = threading.Event()

    def left_secs(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    def try_until_done(self, what: str, attempt: Callable[[], T]) -> T:
        """What `attempt` returns; one that fails for now is made again, until the time is over."""
        failures = 0
        while True:
            try:
                return attempt()
            except TransientFault as fault:
                failures += 1
                self.pause(what, failures, fault)

    def pause(self, what: str, failures: int, fault: TransientFault) -> None:
        """Wait before another try; UNREACHABLE where there is no time for one."""
        secs = pause_secs(failures, random.random())  # noqa: S311 - no secret, only not all at once
        if secs >= self.left_secs():
            raise FetchError(Exit.UNREACHABLE, f"{what}: {fault}; gave up after {self._timeout_secs:g} s (--timeout)")
        log.warning("%s: %s; trying again in %.1f s", what, fault, secs)
        if self.abort.wait(secs):
            raise AbortedError

    def check(self, what: str, progress: Callable[[], str]) -> None:
        """UNREACHABLE where the time is over in which everything should have come."""
        if self.abort.is_set():
            raise AbortedError
        if not self.left_secs():
            text = f"{what}: not done after {self._timeout_secs:g} s (--timeout): {progress()}"
            raise FetchError(Exit.UNREACHABLE, text)


class AbortedError(Exception):
    """Something beside it has failed, and says why."""
