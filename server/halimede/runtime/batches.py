"""What the workers of one model version have: the batches in their slots, and the requests that these left open."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halimede.core.schedule.actions import Slot
from halimede.runtime.live import InFlight
from halimede.workers.worker import Worker


@dataclass(slots=True)
class Open:
    """What is known of an open request: beside its record, so that a request that is answered once does not pay for it.

    `first` is the first request of its batch, `answers` are those that were sent, `last_ns` is when the last of them
    was, before it when the batch began to compute, `has_failed` whether one was an error.
    """

    worker: Worker
    first: int
    last_ns: int
    batch_is_over: bool = False
    answers: int = 0
    has_failed: bool = False


class Batches:
    """`running` has the batch that each slot runs, `open` the open requests by key. Read by the pump, too."""

    __slots__ = ("_ready", "open", "running")

    def __init__(self) -> None:
        self.running: dict[Slot, list[InFlight]] = {}
        self._ready: dict[Slot, deque[list[InFlight]]] = {}
        """Batches that lie ready behind the one that runs."""
        self.open: dict[int, Open] = {}

    def __repr__(self) -> str:
        return f"<Batches running={len(self.running)} open={len(self.open)}>"

    def __iter__(self) -> Iterator[tuple[Slot, list[InFlight]]]:
        """Every batch that a worker has, the running ones first."""
        yield from self.running.items()
        for slot, ready in self._ready.items():
            for batch in ready:
                yield slot, batch

    def begin(self, slot: Slot, batch: list[InFlight], worker: Worker) -> None:
        """A worker has been given a batch, which runs at once or lies ready."""
        if slot in self.running:
            self._ready.setdefault(slot, deque()).append(batch)
        else:
            self.running[slot] = batch
        if self.open:
            # Those that were executed before, and left something open.
            for item in batch:
                if opened := self.open.get(item.key):
                    opened.worker, opened.first, opened.batch_is_over = worker, batch[0].key, False

    def try_end(self, slot: Slot, first: int) -> bool:
        """End the batch that runs in a slot; False when that is another one, or none."""
        batch = self.running.get(slot)
        if batch is None or batch[0].key != first:
            return False
        del self.running[slot]
        if self._ready and (ready := self._ready.get(slot)):
            self.running[slot] = ready.popleft()
            if not ready:
                del self._ready[slot]
        return True

    def remove(self, slot: Slot) -> list[list[InFlight]]:
        """The slot is gone. What was in it, in order."""
        batches = [batch for at, batch in self if at == slot]
        self.running.pop(slot, None)
        self._ready.pop(slot, None)
        return batches

    def find(self, key: int) -> tuple[Slot, Sequence[InFlight]] | None:
        """Where a request is executed, and its batch; None when it is not."""
        for slot, batch in self:
            for item in batch:
                if item.key == key:
                    return slot, batch
        return None
