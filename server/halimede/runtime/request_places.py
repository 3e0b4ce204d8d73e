"""What the requests of one model version wait for, so that circles of calls are found."""

from halimede.core.schedule.actions import Slot
from halimede.core.schedule.waits import Held, Place, Queued
from halimede.core.types.caller import Answers, RunningBatch
from halimede.runtime.batches import Batches
from halimede.runtime.instances import Instances
from halimede.runtime.live import LiveRequests


class RequestPlaces:
    """Of one pump, by the batches that its workers have."""

    __slots__ = ("_batches", "_instances", "_live", "_name", "_version")

    def __init__(self, name: str, version: str, instances: Instances, batches: Batches, live: LiveRequests) -> None:
        self._name = name
        self._version = version
        self._instances = instances
        self._batches = batches
        self._live = live

    def of(self, key: int) -> Place:
        """See `runtime.acceptor.Acceptor.place_of`."""
        found = self._batches.find(key)
        if found is not None:
            running = self._name_of(found[1][0].key)
            return Held((running, Answers(running)))
        opened = self._batches.open.get(key)
        if opened is not None:
            return Held((Answers(self._name_of(opened.first)),))
        if key not in self._live.by_ticket:
            return None
        # An instance that is down comes back free.
        holders = (self._batch_on(slot) for slot in self._instances.worker_of)
        return Queued([() if holder is None else (holder,) for holder in holders])

    def _name_of(self, first: int) -> RunningBatch:
        return RunningBatch(self._name, self._version, first)

    def _batch_on(self, slot: Slot) -> RunningBatch | None:
        batch = self._batches.running.get(slot)
        return self._name_of(batch[0].key) if batch else None
