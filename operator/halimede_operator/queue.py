"""Runs reconciles for the keys of a WorkQueue: a bounded number at a time, and never two for one key."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any

from halimede_operator.core.process.workqueue import Failure, WorkQueue
from halimede_operator.core.spec.types import Key

log = logging.getLogger(__name__)

WORKERS = 16
MOST_OF_NAMESPACE = 12
"""Workers of one namespace; the others stay free for other namespaces."""


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


class Metered:
    """Awaits an awaitable and adds up the CPU time of this thread that its steps take."""

    def __init__(self, awaitable: Awaitable[Outcome]) -> None:
        self._awaitable = awaitable
        self.used_s = 0.0

    def __await__(self) -> Generator[Any, Any, Outcome]:  # Any: what the event loop and its futures exchange
        steps = self._awaitable.__await__()
        thrown: BaseException | None = None
        while True:
            begun = time.thread_time()
            try:
                waits_for = next(steps) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            finally:
                self.used_s += time.thread_time() - begun
            thrown = None
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - also a cancellation is for the awaitable
                thrown = error


class Queue:
    """A WorkQueue with its workers. Used by one event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        workers: int = WORKERS,
        most_of_namespace: int = MOST_OF_NAMESPACE,
        extra_cost_s: Callable[[Key], float] = lambda _key: 0.0,
    ) -> None:
        """extra_cost_s: what a reconcile of the key costs beside its CPU time, as CPU time."""
        self._queue: WorkQueue[Key] = WorkQueue(lambda key: key.namespace, most_of_namespace)
        self._clock = clock
        self._extra_cost_s = extra_cost_s
        self._slots = asyncio.Semaphore(workers)
        self._changed = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._told: dict[Key, str] = {}
        """The last logged failure of each failing key: a refusal is retried often, and logged once."""

    def add(self, key: Key) -> None:
        """Enqueue a key, because something changed that its reconcile depends on."""
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
        metered = Metered(work(key))
        try:
            outcome = await metered
        except Exception as error:
            log.exception("reconcile of %s raised an exception", key)
            outcome = Failed(Failure.TRANSIENT, repr(error))
        finally:
            self._slots.release()
        now, cost_s = self._clock(), metered.used_s + self._extra_cost_s(key)
        match outcome:
            case Done(again_in):
                self._told.pop(key, None)
                self._queue.done(key, now, again_in, cost_s)
            case Gone():
                self._told.pop(key, None)
                self._queue.forget(key, cost_s)
            case Failed(failure, why, retry_after_s):
                not_before = now + retry_after_s if retry_after_s is not None else None
                wait_s = self._queue.failed(key, now, failure, not_before, cost_s)
                level = logging.INFO if failure is Failure.CONFLICT else logging.WARNING
                if failure is Failure.PERMANENT and self._told.get(key) == why:
                    level = logging.DEBUG
                self._told[key] = why
                log.log(level, "reconcile of %s failed, retry in %.1f s: %s", key, wait_s, why)
        self._changed.set()
