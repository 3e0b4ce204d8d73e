"""The instances of one model version: their workers and slots, and which of them are up."""

import asyncio
from collections.abc import Iterator

from halimede.core.restarts import Recovery, health_of
from halimede.core.schedule.actions import Slot
from halimede.core.types import InferenceError
from halimede.core.types.server import WorkerHealth
from halimede.runtime.clock import monotonic_ns
from halimede.workers.worker import Worker, WorkerDown


class Instances:
    """`workers` are the scheduled instances by ordinal, `worker_of` by slot. `slots` are by ordinal."""

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.worker_of: dict[Slot, Worker] = {}
        self.slots: dict[int, tuple[Slot, ...]] = {}
        self.capacity = 0
        """Number of slots of instances that are up."""
        self._passive: list[Worker] = []
        self._down: dict[int, WorkerDown] = {}
        self._recovery: Recovery | None = None

    def __repr__(self) -> str:
        return f"<Instances up={len(list(self._up()))}/{len(self.workers)}>"

    @property
    def parked(self) -> int:
        """Number of instances that ended too often and are not restarted for minutes."""
        return sum(down.parked for down in self._down.values())

    @property
    def unstartable(self) -> int:
        """Number of instances whose starts the machine has prevented for some time."""
        return sum(down.is_unstartable for down in self._down.values())

    def health(self) -> WorkerHealth:
        """The state of the worker processes."""
        # First the instances that no request waits for.
        downs = sorted(self._down.values(), key=lambda down: (not _refuses(down), down.worker.ordinal))
        return health_of([down.reason for down in downs], self._recovery, monotonic_ns())

    def add(self, worker: Worker) -> bool:
        """Add a scheduled instance. Returns whether it is up: its process may have ended already."""
        self.workers[worker.ordinal] = worker
        slots = tuple(Slot(worker.ordinal, number) for number in range(worker.concurrency))
        self.slots[worker.ordinal] = slots
        self.worker_of.update(dict.fromkeys(slots, worker))
        self._count_capacity()
        return self.is_up(worker)

    def add_passive(self, worker: Worker) -> None:
        """Add an instance that is never scheduled."""
        self._passive.append(worker)

    def is_up(self, worker: Worker) -> bool:
        return worker.ordinal not in self._down

    def take_down(self, down: WorkerDown) -> bool:
        """Note that a process ended. Returns whether its instance is scheduled: not passive, and added already."""
        self._down[down.worker.ordinal] = down
        self._count_capacity()
        return down.worker.ordinal in self.workers

    def bring_up(self, worker: Worker) -> bool:
        """Note that a process was restarted. Returns whether its instance is scheduled and was down."""
        down = self._down.pop(worker.ordinal, None)
        if down is None or worker.ordinal not in self.workers:
            return False
        self._recovery = Recovery(monotonic_ns(), down.reason)
        self._count_capacity()
        return True

    def lasting_failure(self) -> str | None:
        """Why no instance will come up soon; None while one is up or will be restarted."""
        downs = [self._down[ordinal] for ordinal in self.workers if ordinal in self._down]
        if len(downs) < len(self.workers) or not all(map(_refuses, downs)):
            return None
        return downs[-1].reason

    async def is_ready(self) -> bool:
        """Whether an instance is up and its model, if it implements readiness, reports that it is ready.

        UNAVAILABLE if no instance is ready and one does not report it in time.
        """
        up = list(self._up())
        if not up:
            return not self.workers
        # All are asked in parallel, and one positive answer is enough: a busy instance may answer late.
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(worker.is_ready()) for worker in up]
        failure: InferenceError | None = None
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    if await answer:
                        return True
                except InferenceError as error:
                    failure = error
        finally:
            for task in asked:
                task.cancel()
        if failure is not None:
            raise failure
        return False

    async def stop(self) -> None:
        """Stop all at once: each may take long."""
        await asyncio.gather(*(worker.stop() for worker in (*self.workers.values(), *self._passive)))

    def _up(self) -> Iterator[Worker]:
        return (worker for worker in self.workers.values() if self.is_up(worker))

    def _count_capacity(self) -> None:
        self.capacity = sum(worker.concurrency for worker in self._up())


def _refuses(down: WorkerDown) -> bool:
    """Whether it may be down for so long that no request waits for it."""
    return down.parked or down.is_unstartable
