"""The dynamic batcher: batches from a queue, given to free slots, and prefetched for busy ones.

A prefetched batch is preempted when another slot is free, and when its slot takes so long that others have passed it.
"""

from collections import deque
from collections.abc import Sequence

from halimede.core.schedule.actions import Action, Execute, Fail, Slot
from halimede.core.schedule.expected_batch import ExpectedBatch
from halimede.core.schedule.policy import BatchPolicy
from halimede.core.schedule.queue import BatchQueue
from halimede.core.schedule.scheduler import Outcome, Pending
from halimede.core.types import unavailable
from halimede.core.types.statistics import FailureReason, SequenceCount


class DynamicBatchScheduler:
    """A `Scheduler` over one queue. It starts with one free slot of each of the instances 0 to `instances` - 1.

    Requests expire before slots are filled: a request whose deadline passes at the moment at which a slot becomes free
    is rejected.

    Requests are independent of each other, so those that a dead worker has not read are executed again.
    """

    follows_outcomes = False
    is_iterative = False
    has_null_rows = False

    def __init__(
        self, policy: BatchPolicy, instances: int = 0, queue: BatchQueue | None = None, begins_at: int = 0
    ) -> None:
        """Requests wait in `queue`; without it, in a `BatchQueue` with the policy, which prefetches nothing.

        Nothing is executed before `begins_at` requests are queued for the first time.
        """
        self._queue = queue or BatchQueue(policy)
        self._failed = self._queue.failed
        self._begins_at = begins_at
        self.max_batch_size = policy.max_batch_size
        self.may_expire = self._queue.may_expire
        # The slot that was free longest comes first, so that the instances of a model on several devices take turns.
        self._free: deque[Slot] = deque(Slot(instance) for instance in range(instances))
        self._busy: dict[Slot, int] = {}
        """Slots that run a batch, and its number of requests."""
        self._executing = 0
        """The requests of all slots."""
        self._expected = ExpectedBatch(policy.max_batch_size)

    def __repr__(self) -> str:
        running, slots = len(self._busy), len(self._busy) + len(self._free)
        return f"<{type(self).__name__} queue={self.queued} running={running}/{slots}>"

    def enqueue(self, pending: Pending, now_ns: int) -> int | None:
        """See `Scheduler`. When more requests are expected, poll one turn later, or as soon as they have arrived."""
        free = self._free
        self._queue.push(pending, now_ns, bool(free))
        if not free:
            return 1 if self._queue.can_prefetch(len(self._busy)) else None
        expected = self._expected.requests
        if expected == 1:
            return 1
        return 0 if len(self._queue.queued) >= expected else 2

    def try_start(self, batch_size: int, timeout_us: int = 0) -> Slot | None:
        if self._expected.requests > 1 or not self._free or self._begins_at:
            return None
        if self._queue.would_hold(batch_size, timeout_us):
            return None
        slot = self._free.popleft()
        self._begin(slot, 1)
        return slot

    def poll(self, now_ns: int) -> list[Action]:
        queue, free = self._queue, self._free
        actions: list[Action] = []
        if self.may_expire:
            for key in queue.expire(now_ns):
                error = unavailable("Request timeout expired")
                actions.append(Fail(key, error, FailureReason.EXPIRED))
        if self._begins_at:
            if len(queue.queued) < self._begins_at:
                return actions
            self._begins_at = 0
        while free:
            keys = queue.pop_ready(now_ns)
            if keys:
                slot = free.popleft()
                self._begin(slot, len(keys))
                actions.append(Execute(slot, keys))
            elif not queue.prefetch.try_preempt_one():
                break
        while queue.can_prefetch(len(self._busy)):
            slot = next(filter(queue.prefetch.is_eligible, self._busy))
            actions.append(Execute(slot, tuple(queue.prefetch_next(slot))))
        if self._failed:
            actions += self._failed
            self._failed.clear()
        return actions

    def wake_at(self) -> int | None:
        """See `Scheduler`. Returns 0, which is in the past, when `poll` has an action now."""
        deadline = self._queue.next_deadline() if self.may_expire else None
        ready = self._queue.ready_at() if self._free and not self._begins_at else None
        if deadline is None or ready is None:
            return ready if deadline is None else deadline
        return min(deadline, ready)

    def try_cancel(self, key: int) -> bool:
        return self._queue.try_remove(key)

    def awaited_slot(self, key: int) -> Slot | None:  # noqa: ARG002
        """None: every slot executes every request."""
        return None

    def completed(
        self,
        slot: Slot,
        took_ns: int,
        outcomes: Sequence[Outcome] = (),  # noqa: ARG002  outcomes are not followed
    ) -> int | None:
        """See `Scheduler`. Ignored for a slot that was removed meanwhile."""
        queue = self._queue
        if slot in self._busy:
            slots = len(self._busy) + len(self._free)
            self._expected.note(len(queue.queued) + self._executing, slots, took_ns)
            self._leave(slot)
            batch = queue.prefetch.end(slot, slots)
            if batch is None:
                self._free.append(slot)
            else:
                queue.begin(batch)
                self._begin(slot, len(batch.keys))
                return 0 if queue.can_prefetch(len(self._busy)) else None
        queued = len(queue.queued)
        if not queued:
            return None
        return 0 if 1 < self._expected.requests <= queued else 1

    def add_slot(self, slot: Slot) -> None:
        if slot not in self._free:
            self._leave(slot)
            self._free.append(slot)

    def remove_slot(self, slot: Slot, unread: Sequence[Sequence[Pending]], now_ns: int) -> list[int]:
        if slot in self._free:
            self._free.remove(slot)
        self._leave(slot)
        last = self._queue.prefetch.remove(slot)
        if last is not None:
            if unread and unread[-1][0].key == last.keys[0]:
                self._queue.restore(last)
                return [*last.keys, *self._return(unread[:-1], now_ns)]
            self._queue.begin(last)
        return self._return(unread, now_ns)

    def _return(self, unread: Sequence[Sequence[Pending]], now_ns: int) -> list[int]:
        """Queue batches again that have left the queue and did not run; their keys."""
        for batch in reversed(unread):
            self._queue.push_back(batch, now_ns)
        return [pending.key for batch in unread for pending in batch]

    def _begin(self, slot: Slot, requests: int) -> None:
        self._busy[slot] = requests
        self._executing += requests

    def _leave(self, slot: Slot) -> None:
        """Mark the slot as idle."""
        self._executing -= self._busy.pop(slot, 0)

    def expect_few(self, now_ns: int) -> None:  # noqa: ARG002  only sequences are idle
        self._queue.end_delay()

    def expect_no_more(self) -> None:
        self._begins_at = 0
        self._queue.end_delay()

    def drain(self) -> list[int]:
        return self._queue.clear()

    @property
    def queued(self) -> int:
        return len(self._queue.queued)

    def sequences(self) -> SequenceCount | None:
        return None

    def oldest_enqueued_at(self) -> int | None:
        return self._queue.oldest_enqueued_at()
