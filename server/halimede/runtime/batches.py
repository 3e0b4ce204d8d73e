"""The batches that the workers of one model version have, by slot, and how long each instance is busy with them."""

from collections import deque
from collections.abc import Iterator, Sequence

from halimede.core.observe.busy import Busy, BusyTime
from halimede.core.schedule.actions import Slot
from halimede.runtime.requests import InFlight


class RunningBatches:
    """`running` has the batch that each slot runs; only this class changes it."""

    __slots__ = ("_busy", "_ready", "running")

    def __init__(self) -> None:
        self.running: dict[Slot, list[InFlight]] = {}
        self._ready: dict[Slot, deque[list[InFlight]]] = {}
        """Batches that the worker starts after the running one."""
        self._busy: dict[int, BusyTime] = {}
        """By the ordinal of the instance. It is kept while the instance is down."""

    def __repr__(self) -> str:
        return f"<Batches running={len(self.running)}>"

    def __iter__(self) -> Iterator[tuple[Slot, list[InFlight]]]:
        """Every batch that a worker has, the running ones first."""
        yield from self.running.items()
        for slot, ready in self._ready.items():
            for batch in ready:
                yield slot, batch

    def add(self, ordinal: int, now_ns: int) -> None:
        """Add an instance."""
        self._busy[ordinal] = BusyTime(now_ns)

    def busy(self, now_ns: int) -> list[Busy]:
        """How long each instance was busy, with the batches that it runs."""
        return [time.value(ordinal, now_ns) for ordinal, time in self._busy.items()]

    def begin(self, slot: Slot, batch: list[InFlight], now_ns: int) -> None:
        """The worker gets a batch, which runs at once or after the running one."""
        if slot in self.running:
            self._ready.setdefault(slot, deque()).append(batch)
            return
        self.running[slot] = batch
        self._busy[slot.instance].begin(now_ns)
        for flight in batch:
            flight.begun_ns = now_ns

    def take_back(self, slot: Slot) -> None:
        """The worker has given back the last batch of the slot, which it had not begun."""
        ready = self._ready[slot]
        ready.pop()
        if not ready:
            del self._ready[slot]

    def try_end(self, slot: Slot, first: int, now_ns: int) -> bool:
        """End the batch that runs in a slot; False when that is another one, or none."""
        batch = self.running.get(slot)
        if batch is None or batch[0].key != first:
            return False
        if self._ready and (ready := self._ready.get(slot)):
            self.running[slot] = batch = ready.popleft()
            if not ready:
                del self._ready[slot]
            for flight in batch:
                flight.begun_ns = now_ns
            return True
        del self.running[slot]
        self._busy[slot.instance].end(now_ns)
        return True

    def remove(self, slot: Slot, now_ns: int) -> list[list[InFlight]]:
        """Remove a slot. Returns its batches in order."""
        batches = [batch for at, batch in self if at == slot]
        if self.running.pop(slot, None) is not None:
            self._busy[slot.instance].end(now_ns)
        self._ready.pop(slot, None)
        return batches

    def find(self, key: int) -> tuple[Slot, Sequence[InFlight]] | None:
        """The slot and the batch of a request that a worker executes; None when it does not execute."""
        for slot, batch in self.running.items():
            for item in batch:
                if item.key == key:
                    return slot, batch
        return None

    def slot_of(self, key: int) -> Slot | None:
        """The slot of a request that a worker has, also one that it has not begun."""
        return next((slot for slot, batch in self for item in batch if item.key == key), None)
