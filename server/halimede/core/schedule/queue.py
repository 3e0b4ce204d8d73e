"""The queue of one priority level: cuts a batch when an instance is free.

Queued requests have one order: those within their timeout, in the order of arrival, before the late ones, in that of
their timeouts. A batch is cut from the front of this order, never around a request:

- It takes requests as long as they are `compatible` and have at most max_batch_size rows together, until the rows reach
  the largest preferred size (max_batch_size if none is configured). A request that does not join closes the batch.
- While an instance is free, a request that exceeds the largest preferred size does not join either: the requests that
  only waited for more run now, and the new one waits for its own delay. While all instances are busy, a larger batch
  delays no request.
- If the oldest request of the batch has waited for max_queue_delay, all these requests run.
- Otherwise, if their rows were a preferred size at some request, those up to the last such request run.
- Otherwise they run if the batch is closed or full, or without a max_queue_delay.
- Otherwise the batch waits for more requests, until the delay of its oldest one is over.

A batch that is closed or has a preferred size can be prefetched for a busy slot (`core.schedule.prefetch`). When it is
preempted, it is the front of the queue again, and is cut anew. So is a batch when a larger preferred size is reached,
and one that is not full when a request behind it leaves. One that may become larger still is prefetched again only with
at least twice the rows, so that no request is sent often. Batches with late requests are not prefetched, because
arrivals come before these.

A request whose timeout expires is rejected, or (DELAY) is late.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from halimede.core.config.model_config import TimeoutAction
from halimede.core.deadlines import Deadlines
from halimede.core.schedule.actions import Slot
from halimede.core.schedule.policy import BatchPolicy
from halimede.core.schedule.prefetch import Batch, Prefetch, TakeBack
from halimede.core.schedule.scheduler import Pending
from halimede.core.types import ErrorCode, InferenceError

AT_ONCE = 0


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in the queue.

    `batch` is its batch if that is prefetched or did not run. `begins` means that it joins no request before it.
    """

    pending: Pending
    enqueued_at: int
    batch: Batch | None = None
    begins: bool = False


class Front:
    """The first requests of the order, which may run as one batch. One object for each queue, which is formed again."""

    __slots__ = (
        "compatible",
        "count",
        "has_late",
        "is_closed",
        "is_formed",
        "marked",
        "marked_rows",
        "oldest",
        "rows",
    )

    def __init__(self) -> None:
        self.is_formed = False
        """False if what waits has changed, so that the other values are wrong."""
        self.count = 0
        self.rows = 0
        self.compatible: Hashable = None
        self.oldest = 0
        """When the first of them to arrive was enqueued."""
        self.marked = 0
        """The number of requests up to the last preferred size; 0 for none."""
        self.marked_rows = 0
        """That preferred size."""
        self.has_late = False
        """Whether a late request joins it, or closes it: then arrivals change it."""
        self.is_closed = False
        """Whether the batch is full, or the next request of the order does not join."""


class BatchQueue:
    """See the module's text. Times are nanoseconds; every method is one synchronous step."""

    def __init__(self, policy: BatchPolicy, take_back: TakeBack | None = None) -> None:
        """Without `take_back` no batch is prefetched."""
        self._policy = policy
        self._max_rows = policy.max_batch_size
        self._preferred = frozenset(policy.preferred_batch_sizes or (policy.max_batch_size,))
        self._enough, self._least = max(self._preferred), min(self._preferred)
        self._delay = policy.max_queue_delay_ns
        self.may_expire = policy.may_expire
        """Whether requests may have a deadline."""
        self.queued: dict[int, QueuedRequest] = {}
        """By key, in the order of arrival. Changed only here."""
        self._size_bytes = 0
        self._returned: deque[Batch] = deque()
        """The batches that did not run. They are ready, and before all other requests."""
        # Ordered dictionaries: requests leave from the front and, when cancelled, from anywhere.
        self._on_time: OrderedDict[int, QueuedRequest] = OrderedDict()
        self._late: OrderedDict[int, QueuedRequest] = OrderedDict()
        self._front = Front()
        self.prefetch = Prefetch(take_back, self.restore)
        """The front follows the last one of its batches."""
        self._grown_rows = 0
        """Only a batch of more rows is prefetched although it may become larger, until another batch begins."""
        self._deadlines = Deadlines[int]()

    def oldest_enqueued_at(self) -> int | None:
        """When the oldest request arrived; None if the queue is empty."""
        # A dictionary keeps the order of insertion, which is the order of arrival.
        return next((queued.enqueued_at for queued in self.queued.values()), None)

    def would_hold(self, rows: int, timeout_us: int) -> bool:
        """Whether a request of `rows` rows would wait here, for earlier requests or for a larger batch, or expire."""
        if self.queued or (self._delay > 0 and rows < self._enough and rows not in self._preferred):
            return True
        return self.may_expire and self._policy.expires_at_once(timeout_us)

    def push(self, pending: Pending, now_ns: int, is_idle: bool) -> None:
        """Add a request, or raise UNAVAILABLE when the queue is full. `is_idle` means that an instance is free.

        The byte bound does not refuse a request in an empty queue: it could never run.
        """
        count, size_bytes = len(self.queued), self._size_bytes + pending.size_bytes
        if count >= self._policy.max_queue_size or (count and size_bytes > self._policy.max_queue_bytes):
            raise InferenceError(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")
        self._size_bytes = size_bytes
        queued = QueuedRequest(pending, now_ns)
        if is_idle and self._on_time:
            front = self._form()
            queued.begins = not front.is_closed and front.rows + pending.batch_size > self._enough
        self.queued[pending.key] = self._on_time[pending.key] = queued
        front = self._front
        if front.has_late:
            front.is_formed = False
        elif front.is_formed and not front.is_closed:
            rows = front.rows + pending.batch_size
            if rows < self._least and front.count and pending.compatible == front.compatible:
                # What `_join` would do, faster: most requests arrive so.
                front.count += 1
                front.rows = rows
            else:
                self._join(front, (queued,))
        if self.may_expire and (deadline := self._policy.deadline(pending.timeout_us, now_ns)) is not None:
            self._deadlines.add(pending.key, deadline)
        if self.prefetch:
            last = self.prefetch.last
            if last is not None and last.grows and last.rows + self._form().rows in self._preferred:
                self.prefetch.try_preempt(last)

    def push_back(self, requests: Sequence[Pending], now_ns: int) -> None:
        """Return a batch that did not run. It is the first in the queue.

        Its requests no longer have a deadline, and the bounds do not apply.
        """
        if not requests:
            return
        batch = Batch([each.key for each in requests], is_returned=True)
        self._returned.appendleft(batch)
        self._size_bytes += sum(each.size_bytes for each in requests)
        for pending in requests:
            self.queued[pending.key] = QueuedRequest(pending, now_ns, batch)

    def pop_ready(self, now_ns: int) -> tuple[int, ...]:
        """Take the keys of the next batch that is ready; empty if none is ready."""
        if not self.queued:
            return ()
        if self._returned:
            keys = self._returned.popleft().keys
        elif len(self._on_time) == 1 and not self._late and not self._delay:
            # As below, but faster.
            keys = self._cut(1)
        else:
            keys = self._cut(self._ready(now_ns))
        self._forget(keys)
        self._grown_rows = 0
        return tuple(keys)

    @property
    def has_closed(self) -> bool:
        """Whether a batch waits here that can be prefetched."""
        if self._returned:
            return True
        if not self._on_time:
            return False
        front = self._front
        if not front.is_formed:
            self._form()
        if front.has_late or not (front.is_closed or front.marked):
            return False
        if self._is_whole(front):
            return True
        last = self.prefetch.last
        return front.marked_rows > self._grown_rows and not (last is not None and last.grows)

    def prefetch_next(self, slot: Slot) -> list[int]:
        """The keys of the next batch, which lies ready at the busy slot from now on. `has_closed` must be true."""
        if self._returned:
            batch = self._returned.popleft()
        else:
            grows = not self._is_whole(self._front)
            batch = Batch(self._cut(self._ready(AT_ONCE)), grows=grows)
            for key in batch.keys:
                queued = self.queued[key]
                queued.batch = batch
                batch.rows += queued.pending.batch_size
        self.prefetch.add(batch, slot)
        return batch.keys

    def restore(self, batch: Batch) -> None:
        """A prefetched batch did not begin: its requests are the front of the queue."""
        if batch.grows:
            self._grown_rows = 2 * batch.rows - 1
        if batch.is_returned:
            self._returned.appendleft(batch)
            return
        self._front.is_formed = False
        for key in reversed(batch.keys):
            self._on_time[key] = queued = self.queued[key]
            self._on_time.move_to_end(key, last=False)
            queued.batch = None

    def begin(self, batch: Batch) -> None:
        """A prefetched batch has begun: its requests leave the queue, if they have not."""
        self._forget([key for key in batch.keys if key in self.queued])
        self._grown_rows = 0

    def ready_at(self) -> int | None:
        """When `pop_ready` has a batch if nothing else happens: AT_ONCE, a time, or None for never."""
        if not self.queued:
            return None
        if self._returned:
            return AT_ONCE
        front = self._form()
        if not front.count:
            return None
        return AT_ONCE if self._ready(AT_ONCE) else front.oldest + self._delay

    def expire(self, now_ns: int) -> list[int]:
        """Reject or delay the requests whose deadline has passed. Returns the keys of those that were rejected."""
        rejected: list[int] = []
        for key in self._deadlines.pop_due(now_ns):
            queued = self.queued.get(key)
            if queued is None or not self._is_here(queued):
                continue  # it has begun
            self._leave(queued)
            if self._policy.timeout_action is TimeoutAction.DELAY:
                self._late[key] = queued
            else:
                rejected.append(key)
        self._forget(rejected)
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
        self._forget((key,))
        return True

    def end_delay(self) -> None:
        """No batch waits for its delay from now on."""
        self._delay = 0

    def clear(self) -> list[int]:
        """Empty the queue; its keys in the order of arrival. Batches that have begun are not part of it."""
        for batch in self.prefetch.preempt_all():
            self.begin(batch)
        keys = list(self.queued)
        for each in (self.queued, self._returned, self._on_time, self._late, self._deadlines):
            each.clear()
        self._front.is_formed = False
        self._size_bytes = 0
        return keys

    def _form(self) -> Front:
        """The front, with all requests that join it; empty if no request is in the order."""
        front = self._front
        if front.is_formed:
            return front
        front.count = front.rows = front.marked = front.marked_rows = 0
        front.is_closed = front.has_late = False
        front.is_formed = True
        self._join(front, self._on_time.values())
        if self._late and not front.is_closed:
            front.has_late = True
            self._join(front, self._late.values())
        return front

    def _join(self, front: Front, following: Iterable[QueuedRequest]) -> None:
        """Add the requests that follow in the order to the front, until it is closed. It is not closed yet."""
        count, rows, enough, preferred = front.count, front.rows, self._enough, self._preferred
        for queued in following:
            pending = queued.pending
            rows += pending.batch_size
            if not count:
                front.compatible, front.oldest = pending.compatible, queued.enqueued_at
            elif queued.begins or rows > self._max_rows or pending.compatible != front.compatible:
                rows -= pending.batch_size
                front.is_closed = True
                break
            elif queued.enqueued_at < front.oldest:
                front.oldest = queued.enqueued_at
            count += 1
            if rows in preferred:
                front.marked, front.marked_rows = count, rows
            if rows >= enough:
                front.is_closed = True
                break
        front.count, front.rows = count, rows

    def _ready(self, now_ns: int) -> int:
        """How many requests of the front run as one batch now; 0 if it waits for more."""
        front = self._front
        if not front.is_formed:
            self._form()
        is_over = now_ns >= front.oldest + self._delay
        if front.marked and not (self._delay and is_over):
            return front.marked
        return front.count if front.is_closed or is_over else 0

    def _is_whole(self, front: Front) -> bool:
        """Whether neither arrivals nor time can change the next batch, if it has no late requests."""
        return front.is_closed and (not self._delay or front.marked in {0, front.count})

    def _cut(self, count: int) -> list[int]:
        """Take so many requests from the front of the order; their keys."""
        if not count:
            return []
        self._front.is_formed = False
        on_time = self._on_time
        if count == len(on_time):
            keys = [*on_time]
            on_time.clear()
            return keys
        return [(on_time or self._late).popitem(last=False)[0] for _ in range(count)]

    def _is_here(self, queued: QueuedRequest) -> bool:
        """Whether the request waits here, after its batch is preempted if that was prefetched."""
        batch = queued.batch
        return batch is None or batch.slot is None or self.prefetch.try_preempt(batch)

    def _leave(self, queued: QueuedRequest) -> None:
        """Remove a request from the order, or from its batch that did not run."""
        key, batch = queued.pending.key, queued.batch
        if batch is None:
            # It may be what closed the last batch, or what made it too large to grow.
            last = self.prefetch.last
            if last is not None and last.rows < self._enough and not last.is_returned:
                self.prefetch.try_preempt(last)
            self._front.is_formed = False
            if self._on_time.pop(key, None) is None:
                del self._late[key]
            return
        batch.keys.remove(key)
        if not batch.keys:
            self._returned.remove(batch)

    def _forget(self, keys: Sequence[int]) -> None:
        """Remove requests that are in no batch and not in the order any more."""
        queued, may_expire = self.queued, self.may_expire
        for key in keys:
            self._size_bytes -= queued.pop(key).pending.size_bytes
            if may_expire:
                self._deadlines.discard(key)
