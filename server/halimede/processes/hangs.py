"""Ends processes that hang (`core.hangs` decides), so that they are started again as dead ones are."""

import asyncio
import logging
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Protocol

from halimede.core.hangs import ProcessKind, ProcessStat, Silence, check_interval_ns, parse_stat

log = logging.getLogger(__name__)

_NS_PER_SEC = 1_000_000_000


class Watched(Protocol):
    """A process that is watched."""

    @property
    def kind(self) -> ProcessKind: ...

    def shows_life(self) -> bool:
        """Whether it has shown life since the last call. Does not block."""

    def end_hung(self, silence_secs: float) -> None:
        """End it, because it has hung for so long. Does not block."""


class HangChecks:
    """The processes that are watched. `add` and `discard` are thread-safe."""

    def __init__(self, limit_secs: float) -> None:
        self._limit_ns = int(limit_secs * _NS_PER_SEC)
        self._lock = threading.Lock()
        self._silences: dict[Watched, Silence] = {}
        self.ended: Counter[ProcessKind] = Counter()
        """How many processes were ended because they hung."""

    def __repr__(self) -> str:
        return f"<HangChecks processes={len(self._silences)} ended={sum(self.ended.values())}>"

    def add(self, process: Watched) -> None:
        """Watch the process from now on."""
        with self._lock:
            self._silences[process] = Silence(self._limit_ns)

    def discard(self, process: Watched) -> None:
        """Watch the process no longer; no effect if it is not watched."""
        with self._lock:
            self._silences.pop(process, None)

    async def run(self) -> None:
        """Check all processes again and again, until cancelled.

        On the loop: a front end may wait for the core's loop, and while that loop does not run, nothing is checked.
        """
        while True:
            self._check(time.monotonic_ns())
            await asyncio.sleep(check_interval_ns(self._limit_ns) / _NS_PER_SEC)

    def _check(self, now_ns: int) -> None:
        with self._lock:
            silences = list(self._silences.items())
        for process, silence in silences:
            if not silence.check(now_ns, is_alive=process.shows_life()):
                continue
            secs = silence.ns / _NS_PER_SEC
            log.error("%r hangs: it has shown no sign of life for %.1f s, and is ended", process, secs)
            try:
                process.end_hung(secs)
            except Exception:
                # The machine may have no thread left. The others are checked, and this one again.
                log.exception("%r could not be ended", process)
                continue
            self.ended[process.kind] += 1
            self.discard(process)


def read_stat(pid: int) -> ProcessStat | None:
    """The state of a process; None if it does not exist any more."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat") as file:
        return parse_stat(file.read())
    return None
