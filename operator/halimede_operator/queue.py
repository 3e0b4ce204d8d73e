"""Runs reconciles for the keys of a WorkQueue: a bounded number at a time, and never two for one key."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from halimede_operator.core.api.spec import Key
from halimede_operator.core.workqueue import Failure, WorkQueue

log = logging.getLogger(__name__)

WORKERS = 16


@dataclass(frozen=True, slots=True)
class Done:
    """The reconcile succeeded."""

    again_in: float | None = None
    """Seconds until the next reconcile if no change comes before; None: at the resync."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The object no longer exists."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The reconcile failed and is retried."""

    failure: Failure
    why: str
    retry_after_s: float | None = None
    """The wait that the API server asked for (Retry-After)."""


Outcome = Done | Gone | Failed


class Queue:
    """A WorkQueue with its workers. Used by one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, workers: int = WORKERS) -> None:
        self._queue: WorkQueue[Key] = WorkQueue()
        self._clock = clock
        self._slots = asyncio.Semaphore(workers)
        self._changed = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._told: dict[Key, str] = {}
        """The last logged failure of each failing key: a refusal is retried often, and logged once."""

    def add(self, key: Key) -> None:
        """Something changed that the key's reconcile depends on."""
        self._queue.add(key, self._clock())
        self._changed.set()

    def retry(self) -> None:
        """Retry all failed keys now, because the API server answers again."""
        self._queue.retry(self._clock())
        self._changed.set()

    def depth(self) -> int:
        return self._queue.depth(self._clock())

    def oldest_wait_s(self) -> float:
        return self._queue.oldest_wait_s(self._clock())

    async def run(self, work: Callable[[Key], Awaitable[Outcome]]) -> None:
        """Reconcile keys until `stop` is called; return at once then."""
        while not self._stopping:
            await self._slots.acquire()
            key = await self._take()
            if key is None:
                return
            task = asyncio.create_task(self._work(key, work))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def stop(self, within_s: float) -> None:
        """Start no further reconciles and wait for the running ones; cancel those that take longer than `within_s`."""
        self._stopping = True
        self._changed.set()
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=within_s)
            for task in late:
                task.cancel()

    async def _take(self) -> Key | None:
        while not self._stopping:
            now = self._clock()
            if (key := self._queue.take(now)) is not None:
                return key
            self._changed.clear()
            wake_at = self._queue.wake_at()
            try:
                async with asyncio.timeout(None if wake_at is None else max(0.0, wake_at - now)):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return None

    async def _work(self, key: Key, work: Callable[[Key], Awaitable[Outcome]]) -> None:
        try:
            outcome = await work(key)
        except Exception as error:
            log.exception("reconcile of %s raised an exception", key)
            outcome = Failed(Failure.TRANSIENT, repr(error))
        finally:
            self._slots.release()
        now = self._clock()
        match outcome:
            case Done(again_in):
                self._told.pop(key, None)
                self._queue.done(key, now, again_in)
            case Gone():
                self._told.pop(key, None)
                self._queue.forget(key)
            case Failed(failure, why, retry_after_s):
                wait_s = self._queue.failed(
                    key, now, failure, now + retry_after_s if retry_after_s is not None else None
                )
                level = logging.INFO if failure is Failure.CONFLICT else logging.WARNING
                if failure is Failure.PERMANENT and self._told.get(key) == why:
                    level = logging.DEBUG
                self._told[key] = why
                log.log(level, "reconcile of %s failed, retry in %.1f s: %s", key, wait_s, why)
        self._changed.set()
