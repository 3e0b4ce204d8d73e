"""How long a store may fail, and the pauses between retries. What is retried is in `store_errors`."""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from halimede.fetch.errors import FetchError, TransientError
from halimede_spec.fetch_exit import FetchExit

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_SECS = 10.0
SILENCE_SECS = 30.0
"""How long a connection may deliver no data."""
FIRST_TRIES_SECS = 2.0
FIRST_ANSWER_SECS = 4.0
"""Time limit for all tries, and for each of them, if the first failure has to be reported at once."""
REPORT_RECOVERY_SECS = 10.0
FIRST_PAUSE_SECS = 0.25
LONGEST_PAUSE_SECS = 10.0
REPAIR_PAUSE_SECS = 5.0
"""The longest pause before a failure is tried again that a person must repair, and who then waits for the effect."""


def pause_secs(failures: int, jitter: float) -> float:
    """How long to wait after `failures` failures in a row, from 1; `jitter` from 0 to 1 shortens it by up to half."""
    longest: float = min(FIRST_PAUSE_SECS * 2.0 ** min(failures - 1, 16), LONGEST_PAUSE_SECS)
    return longest * (1 - jitter / 2)


class RetryPolicy:
    """Stops retrying after `timeout_secs` without progress. With `is_first` it stops within FIRST_TRIES_SECS, or after
    one try, if a URI has delivered nothing yet.

    `known` is a failure that an earlier run has reported: it is retried without end. When that URI delivers data again,
    and the fetch is not complete within REPORT_RECOVERY_SECS, the run ends to report the recovery: otherwise Kubernetes
    would show the failure for as long as the fetch takes. `abort` ends all waits.
    """

    def __init__(self, timeout_secs: float, *, is_first: bool = False, known: str = "") -> None:
        self._timeout_secs = timeout_secs
        self._first_secs = FIRST_TRIES_SECS if is_first else timeout_secs
        longest_secs = FIRST_ANSWER_SECS if is_first else timeout_secs
        self.connect_secs = min(CONNECT_SECS, longest_secs)
        """Time limit for connecting to a store."""
        self.silence_secs = min(SILENCE_SECS, longest_secs)
        """How long a connection to a store may deliver no data."""
        self._known = known
        self._answered: set[str] = set()
        self._progress_at = time.monotonic()
        self._recovered_at: float | None = None
        self.abort = threading.Event()

    def try_until_done(self, where: str, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it succeeds, and return its result. Retries transient errors within the time limit."""
        failures = 0
        while True:
            try:
                done = attempt()
            except TransientError as fault:
                failures += 1
                self.pause(where, failures, fault)
            else:
                self.progress(where)
                return done

    def try_until_repaired(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it does not end with the known failure, which a person must repair. It reads credentials
        again each time."""
        failures = 0
        while True:
            try:
                return attempt()
            except FetchError as failure:
                if failure.message != self._known:
                    raise
                failures += 1
                self._wait(failure.message, min(pause_secs(failures, random.random()), REPAIR_PAUSE_SECS))  # noqa: S311 - no secret

    def pause(self, where: str, failures: int, fault: TransientError) -> None:
        """Wait before the URI `where` is tried again; UNREACHABLE after the time limit."""
        now = time.monotonic()
        secs = pause_secs(failures, random.random())  # noqa: S311 - no secret, only not all at once
        message = f"{where}: {fault}"
        limit_secs = self._timeout_secs if where in self._answered else self._first_secs
        if message == self._known:
            self._progress_at = now
            secs = min(secs, REPAIR_PAUSE_SECS)
        elif now + secs - self._progress_at >= limit_secs:
            raise FetchError(FetchExit.UNREACHABLE, message)
        self._wait(message, secs)

    def _wait(self, message: str, secs: float) -> None:
        log.warning("%s; trying again in %.1f s", message, secs)
        if self.abort.wait(secs):
            raise AbortedError

    def progress(self, where: str, *, is_of_file: bool = False) -> None:
        """Note that the URI `where` delivered data. AbortedError after `abort`; RECOVERED if that must be reported.

        is_of_file: the data is of a file, which a store may deny although it lists it.
        """
        if self.abort.is_set():
            raise AbortedError
        now = time.monotonic()
        self._progress_at = now
        self._answered.add(where)
        if self._known.startswith((f"{where}: ", f"{where.rstrip('/')}/") if is_of_file else f"{where}: "):
            self._known, self._recovered_at = "", now
        if self._recovered_at is not None and now - self._recovered_at >= REPORT_RECOVERY_SECS:
            raise FetchError(FetchExit.RECOVERED, f"{where}: the store answers again; the next run continues")


class AbortedError(Exception):
    """Another part of the fetch has failed, and reports why."""
