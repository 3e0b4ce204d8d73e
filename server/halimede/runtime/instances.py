"""The instances of one model version: their workers and slots, and which of them are up."""

import asyncio
from collections.abc import Iterator

from halimede.core.schedule.actions import Slot
from halimede.core.supervise import Recovery, health_of
from halimede.core.types.server import WorkerHealth
from halimede.runtime.clock import monotonic_ns
from halimede.workers.worker import Worker, WorkerDown


class Instances:
    """`workers` has the scheduled ones by ordinal, `worker_of` and `slots` are by slot and by ordinal."""

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.worker_of: dict[Slot, Worker] = {}
        self.slots: dict[int, tuple[Slot, ...]] = {}
        self.capacity = 0
        """How many slots are up."""
        self._passive: list[Worker] = []
        self._down: dict[int, WorkerDown] = {}
        self._recovery: Recovery | None = None

    def __repr__(self) -> str:
        return f"<Instances up={len(list(self._up()))}/{len(self.workers)}>"

    @property
    def parked(self) -> int:
        """How many are not started again."""
        return sum(down.parked for down in self._down.values())

    def health(self) -> WorkerHealth:
        """How the worker processes are."""
        # Those that are not started again first.
        downs = sorted(self._down.values(), key=lambda down: (not down.parked, down.worker.ordinal))
        return health_of([down.reason for down in downs], self._recovery, monotonic_ns())

    def add(self, worker: Worker) -> bool:
        """Whether it is up: its process may have ended before."""
        self.workers[worker.ordinal] = worker
        slots = tuple(Slot(worker.ordinal, number) for number in range(worker.concurrency))
        self.slots[worker.ordinal] = slots
        self.worker_of.update(dict.fromkeys(slots, worker))
        self._count_capacity()
        return self.is_up(worker)

    def add_passive(self, worker: Worker) -> None:
        """One that is loaded and never scheduled."""
        self._passive.append(worker)

    def is_up(self, worker: Worker) -> bool:
        return worker.ordinal not in self._down

    def take_down(self, down: WorkerDown) -> bool:
        """Whether it is one that is scheduled, and not passive or still to be added."""
        self._down[down.worker.ordinal] = down
        self._count_capacity()
        return down.worker.ordinal in self.workers

    def bring_up(self, worker: Worker) -> bool:
        """Whether it is one that is scheduled, and was down."""
        down = self._down.pop(worker.ordinal, None)
        if down is None or worker.ordinal not in self.workers:
            return False
        self._recovery = Recovery(monotonic_ns(), down.reason)
        self._count_capacity()
        return True

    def end_of_hope(self) -> str | None:
        """Why none runs or will run again; None while one does, or will."""
        downs = [self._down[ordinal] for ordinal in self.workers if ordinal in self._down]
        if len(downs) < len(self.workers) or not all(down.parked for down in downs):
            return None
        return downs[-1].reason

    async def is_ready(self) -> bool:
        """Whether one is up and, where its model has a say in that, says that it is ready."""
        up = list(self._up())
        if not up:
            return not self.workers
        # All are asked at once and the first yes is enough: one that is busy may answer late.
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(worker.is_ready()) for worker in up]
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    return True
        finally:
            for task in asked:
                task.cancel()
        return False

    async def stop(self) -> None:
        """Side by side: one may take long."""
        await asyncio.gather(*(worker.stop() for worker in (*self.workers.values(), *self._passive)))

    def _up(self) -> Iterator[Worker]:
        return (worker for worker in self.workers.values() if self.is_up(worker))

    def _count_capacity(self) -> None:
        self.capacity = sum(worker.concurrency for worker in self._up())
