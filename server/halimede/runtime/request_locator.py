"""Where the requests of one pump are: which worker has a request, and what it waits for."""

from halimede.core.schedule.actions import Slot
from halimede.core.schedule.scheduler import Scheduler
from halimede.core.schedule.wait_graph import ANSWERED, Dependencies
from halimede.core.types.caller import Answers, RunningBatch
from halimede.runtime.batches import RunningBatches
from halimede.runtime.instances import Instances
from halimede.runtime.requests import InFlight, VersionRequests
from halimede.workers.worker import Worker


class RequestLocator:
    __slots__ = ("_batches", "_instances", "_requests", "_scheduler")

    def __init__(
        self, requests: VersionRequests, scheduler: Scheduler, instances: Instances, batches: RunningBatches
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._instances = instances
        self._batches = batches

    def worker_of(self, flight: InFlight) -> Worker | None:
        """The worker that has a request or has it open; None when it is queued."""
        if flight.opened is not None:
            return flight.opened.worker
        slot = self._batches.slot_of(flight.key)
        return None if slot is None else self._instances.worker_of[slot]

    def dependencies_of(self, key: int) -> Dependencies:
        """See `runtime.requests.Executor.dependencies_of`."""
        found = self._batches.find(key)
        if found is not None:
            running = self._name_of(found[1][0].key)
            return Dependencies([(running, Answers(running))])
        flight = self._requests.find(key)
        if flight is None:
            return ANSWERED
        if flight.opened is not None:
            return Dependencies([(Answers(self._name_of(flight.opened.first)),)])
        slot = self._scheduler.awaited_slot(key)
        # An instance that is down is free when it comes back.
        holders = (self._batch_on(each) for each in (self._instances.worker_of if slot is None else (slot,)))
        return Dependencies([() if holder is None else (holder,) for holder in holders], in_sequence=slot is not None)

    def _name_of(self, first: int) -> RunningBatch:
        return RunningBatch(self._requests.name, self._requests.version, first)

    def _batch_on(self, slot: Slot) -> RunningBatch | None:
        batch = self._batches.running.get(slot)
        return self._name_of(batch[0].key) if batch else None
