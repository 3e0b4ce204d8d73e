"""The dynamic batcher: batches from a queue, given to free instances."""

from collections import deque

from halimede.core.schedule.actions import Action, Execute, Fail
from halimede.core.schedule.policy import BatchPolicy
from halimede.core.schedule.queue import BatchQueue
from halimede.core.schedule.scheduler import Pending
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason


class DynamicBatchScheduler:
    """A `Scheduler` over one `BatchQueue`. It starts with the instances 0 to `instances` - 1, all free.

    Expired requests are dealt with first, so that what is late at the same moment as an instance gets free is rejected.
    """

    def __init__(self, policy: BatchPolicy, instances: int = 0) -> None:
        self._queue = BatchQueue(policy)
        self.max_batch_size = policy.max_batch_size
        self.may_expire = self._queue.may_expire
        # Free longest first: a model's instances on several devices take turns, and none is left cold.
        self._free: deque[int] = deque(range(instances))
        self._busy: set[int] = set()

    def __repr__(self) -> str:
        running, instances = len(self._busy), len(self._busy) + len(self._free)
        return f"<{type(self).__name__} queue={self.queued} running={running}/{instances}>"

    def enqueue(self, pending: Pending, now_ns: int) -> None:
        self._queue.push(pending, now_ns, bool(self._free))

    def try_start(self, batch_size: int) -> int | None:
        if not self._free or self._queue.would_hold(batch_size):
            return None
        instance = self._free.popleft()
        self._busy.add(instance)
        return instance

    def poll(self, now_ns: int) -> list[Action]:
        queue, free = self._queue, self._free
        actions: list[Action] = []
        if self.may_expire:
            for key in queue.expire(now_ns):
                error = InferenceError(ErrorCode.UNAVAILABLE, "Request timeout expired")
                actions.append(Fail(key, error, FailureReason.REJECTED))
        while free and (keys := queue.pop_ready(now_ns)):
            instance = free.popleft()
            self._busy.add(instance)
            actions.append(Execute(instance, keys))
        return actions

    def wake_at(self) -> int | None:
        """See `Scheduler`. 0, which is in the past, when there is work for a `poll` that has not been made."""
        deadline = self._queue.next_deadline() if self.may_expire else None
        ready = self._queue.ready_at() if self._free else None
        if deadline is None or ready is None:
            return ready if deadline is None else deadline
        return min(deadline, ready)

    def try_cancel(self, key: int) -> bool:
        return self._queue.try_remove(key)

    def completed(self, instance: int) -> bool:
        """See `Scheduler`. Ignored from an instance that was removed meanwhile."""
        if instance in self._busy:
            self._busy.remove(instance)
            self._free.append(instance)
        return bool(self._queue.queued)

    def add_instance(self, instance: int) -> None:
        if instance not in self._free:
            self._busy.discard(instance)
            self._free.append(instance)

    def remove_instance(self, instance: int) -> None:
        if instance in self._free:
            self._free.remove(instance)
        self._busy.discard(instance)

    def drain(self) -> list[int]:
        return self._queue.clear()

    @property
    def queued(self) -> int:
        return len(self._queue.queued)

    def oldest_enqueued_at(self) -> int | None:
        return self._queue.oldest_enqueued_at()
