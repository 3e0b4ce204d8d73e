"""A worker that accepts several batches for its slot, with a pump."""

from dataclasses import dataclass, field

from halimede.core.schedule.scheduler import Scheduler
from halimede.runtime.pump import Pump
from halimede.workers.worker import BatchDone, BatchItem, BatchTimes, Outputs, WorkerDown, WorkerUp
from support.pumping import DEAD, Bench, outputs, times


@dataclass(slots=True)
class QueueingWorker:
    """Accepts several batches for its slot and ends them in order."""

    pump: Pump
    ordinal: int = 0
    name: str = "m_0"
    concurrency: int = 1
    batches: list[list[BatchItem]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    def execute(self, items: list[BatchItem], slot: int = 0) -> None:
        self.batches.append(items)

    def take_back(self, _slot: int) -> bool:
        if len(self.batches) < 2:
            return False
        self.batches.pop()
        return True

    def cancel(self, key: int) -> None:
        self.cancelled.append(key)

    def finish(self, *again: int, when: BatchTimes | None = None) -> None:
        """The oldest batch ends; the requests at these positions are to be executed again."""
        items = self.batches.pop(0)
        replies: list[Outputs | None] = [None if at in again else outputs() for at in range(len(items))]
        self.pump.on_event(BatchDone(self, items, replies, when or times(), again=again))

    def die(self, *unread: int) -> None:
        """Go down; the batches that it has read fail."""
        batches, self.batches = self.batches, []
        self.pump.on_event(WorkerDown(self, "signal 9", parked=False, unread=unread))
        for items in batches:
            if items[0].key not in unread:
                self.pump.on_event(BatchDone(self, items, [DEAD] * len(items), times(), failed=True))

    def restart(self) -> None:
        self.pump.on_event(WorkerUp(self))

    @property
    def given(self) -> list[list[int]]:
        return [[item.key for item in batch] for batch in self.batches]


def bench_of(scheduler: Scheduler) -> tuple[Bench, QueueingWorker]:
    bench = Bench(workers=0, decoupled=False, scheduler=scheduler)
    worker = QueueingWorker(bench.pump)
    bench.pump.add_worker(worker)
    return bench, worker
