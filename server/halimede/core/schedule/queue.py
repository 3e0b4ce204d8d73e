"""The queue of one priority level: forms batches, keeps deadlines and bounds.

Batches are decided when a request arrives, never when an instance becomes free. The only input about slots is whether
one is free at an arrival. The queue is a FIFO of closed batches and one open batch at its tail:

- An arriving request closes the open batch if it does not fit into it: more than max_batch_size rows together, or
  not `compatible`. A later request is never taken ahead of an earlier one to fill a batch.
- While an instance is free, more rows than the largest preferred size do not fit either: the open batch, which
  only waited for more requests, runs now, and the new request waits for its own delay. While all instances are busy,
  a larger batch delays no request, and only max_batch_size counts.
- It then joins the open batch, or begins one. The batch closes when its number of rows is a preferred size, or reaches
  the largest preferred size (max_batch_size if none is configured).
- A closed batch never grows and is ready at once. The open batch is ready when its oldest request has waited for
  max_queue_delay; until it is taken it may grow further.
- A request that is removed (cancelled, timed out) leaves the rest of its batch unchanged: the batch is not refilled.

A closed batch can be lent to an instance that is busy: it lies ready there, and begins when the instance is free. Its
requests stay in the queue until then: bounds, deadlines and cancellation hold for them. What has to leave the queue
before is reclaimed first.

A request whose timeout expires is rejected, or (DELAY) moved to a separate queue, from which batches are made only when
no other batch is ready.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from halimede.core.config.model_config import TimeoutAction
from halimede.core.deadlines import Deadlines
from halimede.core.schedule.actions import Slot
from halimede.core.schedule.policy import BatchPolicy
from halimede.core.schedule.scheduler import Pending
from halimede.core.types import ErrorCode, InferenceError

AT_ONCE = 0


@dataclass(slots=True, eq=False)
class Batch:
    """Keys in the order of arrival. `eq=False`: batches are compared by identity."""

    keys: list[int]
    rows: int
    compatible: Hashable
    lent_to: Slot | None = None
    overtaken: int = 0
    """How many batches that were lent later have begun before it."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in the queue. `batch` is None in the queue of delayed requests."""

    pending: Pending
    enqueued_at: int
    batch: Batch | None


class BatchQueue:
    """See the module's text. Times are nanoseconds; every method is one synchronous step."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._max_rows = policy.max_batch_size
        self._preferred = frozenset(policy.preferred_batch_sizes)
        self._enough = max(policy.preferred_batch_sizes, default=policy.max_batch_size)
        self._delay = policy.max_queue_delay_ns
        self.may_expire = policy.may_expire
        """Whether requests may have a deadline."""
        self.queued: dict[int, QueuedRequest] = {}
        """By key, in the order of arrival. Changed only here."""
        self._size_bytes = 0
        # Ordered dictionaries: batches and delayed requests leave from the front and, when cancelled, from anywhere.
        self._closed: OrderedDict[Batch, None] = OrderedDict()
        self._open: Batch | None = None
        self._delayed: OrderedDict[int, QueuedRequest] = OrderedDict()
        self._deadlines = Deadlines[int]()
        self.reclaim: Callable[[Batch, Slot], bool] = not_lent
        """Takes back a lent batch, which is closed again; False if it has begun."""

    def oldest_enqueued_at(self) -> int | None:
        """When the oldest request arrived; None if the queue is empty."""
        # A dictionary keeps the order of insertion, which is the order of arrival.
        return next((queued.enqueued_at for queued in self.queued.values()), None)

    def would_hold(self, rows: int) -> bool:
        """Whether a request of `rows` rows would wait here, for earlier requests or for a larger batch."""
        return bool(self.queued) or (self._delay > 0 and rows < self._enough and rows not in self._preferred)

    def push(self, pending: Pending, now_ns: int, is_idle: bool) -> None:
        """Add a request, or raise UNAVAILABLE when the queue is full. `is_idle` means that an instance is free.

        The byte bound does not refuse a request in an empty queue: it could never run.
        """
        count, size_bytes = len(self.queued), self._size_bytes + pending.size_bytes
        if count >= self._policy.max_queue_size or (count and size_bytes > self._policy.max_queue_bytes):
            raise InferenceError(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")
        self._size_bytes = size_bytes

        batch = self._open
        if batch is not None and (
            batch.rows + pending.batch_size > (self._enough if is_idle else self._max_rows)
            or batch.compatible != pending.compatible
        ):
            self._closed[batch] = None
            batch = None
        if batch is None:
            self._open = batch = Batch([pending.key], pending.batch_size, pending.compatible)
        else:
            batch.keys.append(pending.key)
            batch.rows += pending.batch_size
        if batch.rows >= self._enough or batch.rows in self._preferred:
            self._closed[batch] = None
            self._open = None

        self.queued[pending.key] = QueuedRequest(pending, now_ns, batch)
        if self.may_expire and (timeout_ns := self._policy.timeout_ns(pending.timeout_us)):
            self._deadlines.add(pending.key, now_ns + timeout_ns)

    def push_back(self, requests: Sequence[Pending], now_ns: int) -> None:
        """Return a batch that did not run. It is closed, and first in the queue.

        Its requests no longer have a deadline, and the bounds do not apply.
        """
        if not requests:
            return
        batch = Batch([each.key for each in requests], sum(each.batch_size for each in requests), ())
        self._closed[batch] = None
        self._closed.move_to_end(batch, last=False)
        self._size_bytes += sum(each.size_bytes for each in requests)
        for pending in requests:
            self.queued[pending.key] = QueuedRequest(pending, now_ns, batch)

    def pop_ready(self, now_ns: int) -> tuple[int, ...]:
        """Take the keys of the next batch that is ready; empty if none is ready."""
        if self._closed:
            batch = self._closed.popitem(last=False)[0]
        elif self._open is not None and self._open_ready_at(self._open) <= now_ns:
            batch, self._open = self._open, None
        elif self._delayed:
            return self._pop_delayed()
        else:
            return ()
        for key in batch.keys:
            self._forget(self.queued[key])
        return tuple(batch.keys)

    @property
    def has_closed(self) -> bool:
        """Whether a closed batch waits here, which can be lent."""
        return bool(self._closed)

    def lend(self, slot: Slot) -> Batch:
        """The next closed batch, which lies ready at the slot's instance from now on. `has_closed` must be true."""
        batch = self._closed.popitem(last=False)[0]
        batch.lent_to, batch.overtaken = slot, 0
        return batch

    def take_back(self, batch: Batch) -> None:
        """A lent batch did not begin: it is the next one."""
        batch.lent_to = None
        self._closed[batch] = None
        self._closed.move_to_end(batch, last=False)

    def begin(self, batch: Batch) -> None:
        """A lent batch has begun: its requests leave the queue, if they have not."""
        for key in batch.keys:
            if (queued := self.queued.get(key)) is not None:
                self._forget(queued)

    def ready_at(self) -> int | None:
        """When `pop_ready` has a batch if nothing else happens: AT_ONCE, a time, or None for never."""
        if self._closed or self._delayed:
            return AT_ONCE
        return None if self._open is None else self._open_ready_at(self._open)

    def expire(self, now_ns: int) -> list[int]:
        """Reject or delay the requests whose deadline has passed. Returns the keys of those that were rejected."""
        rejected: list[int] = []
        for key in self._deadlines.pop_due(now_ns):
            queued = self.queued.get(key)
            if queued is None or not self._is_here(queued):
                continue  # it has begun
            self._leave(queued)
            if self._policy.timeout_action is TimeoutAction.DELAY:
                queued.batch = None
                self._delayed[key] = queued
            else:
                self._forget(queued)
                rejected.append(key)
        return rejected

    def next_deadline(self) -> int | None:
        """The earliest deadline of a request in the queue."""
        return self._deadlines.next()

    def try_remove(self, key: int) -> bool:
        """Remove one request; False when it is not queued."""
        queued = self.queued.get(key)
        if queued is None or not self._is_here(queued):
            return False
        self._leave(queued)
        self._forget(queued)
        return True

    def end_delay(self) -> None:
        """No batch waits for its delay from now on."""
        self._delay = 0

    def clear(self) -> list[int]:
        """Empty the queue; its keys in the order of arrival."""
        keys = list(self.queued)
        self.queued.clear()
        self._closed.clear()
        self._delayed.clear()
        self._deadlines.clear()
        self._open = None
        self._size_bytes = 0
        return keys

    def _open_ready_at(self, batch: Batch) -> int:
        return self.queued[batch.keys[0]].enqueued_at + self._delay

    def _pop_delayed(self) -> tuple[int, ...]:
        """Take the first delayed requests that may share a batch. They are late, so they do not wait for more."""
        keys: list[int] = []
        rows = 0
        compatible: Hashable = None
        for queued in self._delayed.values():
            pending = queued.pending
            if keys and (rows + pending.batch_size > self._max_rows or pending.compatible != compatible):
                break
            keys.append(pending.key)
            rows += pending.batch_size
            compatible = pending.compatible
        for key in keys:
            self._forget(self._delayed.pop(key))
        return tuple(keys)

    def _is_here(self, queued: QueuedRequest) -> bool:
        """Whether the request waits here, after its batch is reclaimed if that was lent."""
        batch = queued.batch
        return batch is None or batch.lent_to is None or self.reclaim(batch, batch.lent_to)

    def _leave(self, queued: QueuedRequest) -> None:
        """Remove a request from its batch, or from the delayed requests."""
        key, batch = queued.pending.key, queued.batch
        if batch is None:
            del self._delayed[key]
            return
        batch.keys.remove(key)
        batch.rows -= queued.pending.batch_size
        if batch.keys:
            return
        if batch is self._open:
            self._open = None
        else:
            del self._closed[batch]

    def _forget(self, queued: QueuedRequest) -> None:
        del self.queued[queued.pending.key]
        self._size_bytes -= queued.pending.size_bytes
        if self.may_expire:
            self._deadlines.discard(queued.pending.key)


def not_lent(_batch: Batch, _slot: Slot) -> bool:
    """Nothing is lent."""
    return False
