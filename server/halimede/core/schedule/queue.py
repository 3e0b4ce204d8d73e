"""The queue of a model: cuts a batch from the front of one order when an instance is free.

The order is that of `core.schedule.request_order`, the rules for a batch are those of `core.schedule.front`. Without
priority levels and without a strategy there is one more: while an instance is free, a request that exceeds the largest
preferred size does not join. The requests that only waited for more run now, and the new one waits for its own delay.
While all instances are busy, a larger batch delays no request.

A batch that neither arrivals nor time can change can be prefetched for a busy slot (`core.schedule.prefetch`). When it
is preempted, it is the front of the queue again, and is cut anew. That happens when a request arrives, or moves, that
comes before one of its requests or before the one that closed it, and when that one leaves: so what runs next is the
same as without. Batches with late requests are not prefetched, because arrivals come before these, nor those of a
strategy, which would see their requests again.

Without levels, a batch of a preferred size is prefetched too, although it may become larger. When a larger preferred
size is reached, it is preempted. After that, only one with at least twice the rows is prefetched, so that no request is
sent often.

Each level has the bound and the timeout of its policy, for the requests that arrived there. A request whose timeout
expires is rejected, or (DELAY) is late: it stays in its level, after all others.

With ageing, a request that has waited for `aging_ns` in a level moves to the next higher one. There the earlier arrival
of the first moved request and the first own request is next. Ageing changes the order and nothing else. Moves and
timeouts are made in the order of their times, so the result does not depend on when the queue is polled.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from halimede.core.config.model_config import TimeoutAction
from halimede.core.deadlines import Deadlines
from halimede.core.schedule.actions import Fail, Slot
from halimede.core.schedule.front import AT_ONCE, Front
from halimede.core.schedule.policy import BatchPolicy, Priorities
from halimede.core.schedule.prefetch import Batch, Prefetch, TakeBack
from halimede.core.schedule.request_order import QueuedRequest, RequestOrder
from halimede.core.schedule.scheduler import Pending
from halimede.core.schedule.strategy import BatchingStrategy
from halimede.core.types import unavailable
from halimede.core.types.statistics import FailureReason


class BatchQueue:
    """See the module's text. Times are nanoseconds; every method is one synchronous step."""

    def __init__(
        self,
        policy: BatchPolicy,
        take_back: TakeBack | None = None,
        priorities: Priorities | None = None,
        strategy: BatchingStrategy | None = None,
    ) -> None:
        """`policy` has the sizes and the delay of batches, and applies to levels without a policy of their own.

        Without `take_back` no batch is prefetched.
        """
        self._policy = policy
        self._priorities = priorities
        self._strategy = strategy
        self._is_plain = priorities is None and strategy is None
        self._policies = [policy] if priorities is None else [policy, *priorities.policies.values()]
        self._aging_ns = 0 if priorities is None else priorities.aging_ns
        self.may_expire = self._aging_ns > 0 or any(each.may_expire for each in self._policies)
        """Whether time changes the queue: requests may have a deadline, or move."""
        self.queued: dict[int, QueuedRequest] = {}
        """By key, in the order of arrival. Changed only here."""
        self.failed: list[Fail] = []
        """Requests that failed with the strategy. The scheduler clears it."""
        self._counts: dict[int, int] = {}
        """Queued requests by the level of their arrival. Not counted without levels."""
        self._size_bytes = 0
        self._returned: deque[Batch] = deque()
        """The batches that did not run. They are ready, and before all other requests."""
        self._order = RequestOrder(1 if priorities is None else priorities.default)
        """The queued requests that are in no batch."""
        self._front = Front(policy, strategy, is_plain=self._is_plain)
        self._prefetches = take_back is not None and strategy is None
        self.prefetch = Prefetch(take_back, self.restore)
        """The front follows the last one of its batches."""
        self._grown_rows = 0
        """Only a batch of more rows is prefetched although it may become larger, until another batch begins."""
        self._deadlines = Deadlines[int]()
        self._moves = Deadlines[int]()

    def oldest_enqueued_at(self) -> int | None:
        """When the oldest request arrived; None if the queue is empty."""
        # A dictionary keeps the order of insertion, which is the order of arrival.
        return next((queued.enqueued_at for queued in self.queued.values()), None)

    def would_hold(self, rows: int, timeout_us: int) -> bool:
        """Whether a request of `rows` rows would wait here, for earlier requests or for a larger batch, or expire.

        True if it would expire in any level, or if a strategy must see it.
        """
        if self.queued or self._strategy is not None or self._front.waits_for_more(rows):
            return True
        return self.may_expire and any(policy.expires_at_once(timeout_us) for policy in self._policies)

    def push(self, pending: Pending, now_ns: int, is_idle: bool) -> None:
        """Add a request, or raise UNAVAILABLE when its level is full. `is_idle` means that an instance is free.

        The byte bound is one for all levels. It does not refuse a request in an empty queue: it could never run.
        """
        key, front, priorities = pending.key, self._front, self._priorities
        level, policy, count = 1, self._policy, len(self.queued)
        if priorities is not None:
            level = priorities.level_of(pending.priority)
            policy, count = priorities.policies.get(level, policy), self._counts.get(level, 0)
        size_bytes = self._size_bytes + pending.size_bytes
        if count >= policy.max_queue_size or (self.queued and size_bytes > self._policy.max_queue_bytes):
            raise unavailable("Exceeds maximum queue size")
        request = QueuedRequest(pending, now_ns, level, level)
        if is_idle and count and self._is_plain and not front.is_formed:
            front.form(self._order)
        if front.is_formed:
            front.add(request, is_idle)
        self.queued[key] = request
        self._size_bytes = size_bytes
        if priorities is None:
            self._order.usual.own[key] = request  # as `append`, but faster
        else:
            self._order.append(request)
            self._counts[level] = count + 1
        if self.may_expire:
            if (deadline := policy.deadline(pending.timeout_us, now_ns)) is not None:
                self._deadlines.add(key, deadline)
            self._note_move(request, now_ns)
        if self.prefetch.batches:
            self._preempt_for(request)

    def push_back(self, requests: Sequence[Pending], now_ns: int) -> None:
        """Return a batch that did not run. It is the first in the queue.

        Its requests no longer have a deadline, and the bounds do not apply.
        """
        if not requests:
            return
        batch = Batch([each.key for each in requests], is_returned=True)
        self._returned.appendleft(batch)
        for pending in requests:
            level = 1
            if self._priorities is not None:
                level = self._priorities.level_of(pending.priority)
                self._counts[level] = self._counts.get(level, 0) + 1
            self.queued[pending.key] = QueuedRequest(pending, now_ns, level, level, batch=batch)
            self._size_bytes += pending.size_bytes

    def pop_ready(self, now_ns: int) -> tuple[int, ...]:
        """Take the keys of the next batch that is ready; empty if none is ready. May add to `failed`."""
        if not self.queued:
            return ()
        if self._returned:
            batch = self._returned.popleft()
            self.begin(batch)
            return tuple(batch.keys)
        while count := self._ready(now_ns):
            error = None if self._strategy is None else self._front.end()
            keys = self._cut(count)
            self._forget(keys)
            self._grown_rows = 0
            if error is None:
                return tuple(keys)
            self.failed += [Fail(key, error, FailureReason.OTHER) for key in keys]
        return ()

    def can_prefetch(self, busy: int) -> bool:
        """Whether a batch waits here that can be prefetched for one of so many busy slots."""
        if not (self._prefetches and self.queued and self.prefetch.has_eligible(busy)):
            return False
        if self._returned:
            return True
        front = self._front
        if not front.is_formed:
            front.form(self._order)
        if front.has_late or not (front.is_closed or front.marked):
            return False
        if front.is_fixed or not self._is_plain:
            return front.is_fixed
        last = self.prefetch.last
        return front.marked_rows > self._grown_rows and not (last is not None and last.grows)

    def prefetch_next(self, slot: Slot) -> list[int]:
        """The keys of the next batch, which lies ready at the busy slot from now on. `can_prefetch` must be true."""
        if self._returned:
            batch = self._returned.popleft()
        else:
            grows = not self._front.is_fixed
            batch = Batch(self._cut(self._front.ready(AT_ONCE)), grows=grows)
            for key in batch.keys:
                request = self.queued[key]
                request.batch, batch.level = batch, request.level
                batch.rows += request.pending.batch_size
        self.prefetch.add(batch, slot)
        return batch.keys

    def restore(self, batch: Batch) -> None:
        """A prefetched batch did not begin: its requests are the first of their levels."""
        if batch.grows:
            self._grown_rows = 2 * batch.rows - 1
        if batch.is_returned:
            self._returned.appendleft(batch)
            return
        requests = [self.queued[key] for key in batch.keys]
        for request in requests:
            request.batch = None
        self._order.prepend(requests)
        self._front.is_formed = False

    def begin(self, batch: Batch) -> None:
        """A batch that was cut earlier has begun: its requests leave the queue, if they have not."""
        self._forget([key for key in batch.keys if key in self.queued])
        self._grown_rows = 0

    def ready_at(self) -> int | None:
        """When `pop_ready` has a batch, or the order changes, if nothing else happens.

        AT_ONCE, a time, or None for never.
        """
        if not self.queued:
            return None
        if self._returned:
            return AT_ONCE
        front = self._form()
        if not front.count:
            return None
        if front.ready(AT_ONCE):
            return AT_ONCE
        ready, moves = front.oldest.enqueued_at + front.delay_ns, self._moves.next()
        return ready if moves is None else min(ready, moves)

    def expire(self, now_ns: int) -> list[int]:
        """Make all moves and timeouts that are due. Returns the keys of the requests that were rejected."""
        rejected: list[int] = []
        while (move := self._moves.next()) is not None and move <= now_ns:
            # In the order of their times: both put requests at the end of a line.
            rejected += self._expire(move - 1)
            for key in self._moves.pop_due(move):
                self._move(self.queued[key], move)
        return rejected + self._expire(now_ns)

    def next_deadline(self) -> int | None:
        """The earliest deadline of a request in the queue."""
        return self._deadlines.next()

    def try_remove(self, key: int) -> bool:
        """Remove one request; False when it is not queued."""
        request = self.queued.get(key)
        if request is None or not self._try_leave(request):
            return False
        self._forget((key,))
        return True

    def end_delay(self) -> None:
        """No batch waits for its delay from now on."""
        self._front.delay_ns = 0

    def clear(self) -> list[int]:
        """Empty the queue; its keys in the order of arrival. Batches that have begun are not part of it."""
        for batch in self.prefetch.preempt_all():
            self.begin(batch)
        keys = list(self.queued)
        for each in (self.queued, self._counts, self._returned, self._order, self._deadlines, self._moves):
            each.clear()
        self._front.is_formed = False
        self._size_bytes = 0
        return keys

    def _form(self) -> Front:
        """The front, with all requests that join it; empty if no request is in the order."""
        front = self._front
        if not front.is_formed:
            front.form(self._order)
        return front

    def _ready(self, now_ns: int) -> int:
        """How many requests of the front run as one batch now, or fail together."""
        front = self._front
        if len(self.queued) == 1 and self._strategy is None and not (front.delay_ns or self.prefetch.batches):
            return 1  # as below, but faster
        return self._form().ready(now_ns)

    def _cut(self, count: int) -> list[int]:
        self._front.is_formed = False
        return self._order.pop(count)

    def _preempt_for(self, arrival: QueuedRequest) -> None:
        """Preempt the batches that an arrival comes before, and the last one if the arrival may join it."""
        self.prefetch.preempt_from(arrival.level + 1)
        last = self.prefetch.last
        if last is not None and last.grows:
            may_join = last.rows + self._form().rows in self._front.preferred
        else:
            may_join = not self._is_plain and self._order.first is arrival  # before what closed the batch
        if may_join:
            self._preempt_last()

    def _preempt_last(self) -> None:
        """Preempt the batch that was prefetched last if another request may join it now."""
        last = self.prefetch.last
        if last is not None and last.rows < self._front.enough and not last.is_returned:
            self.prefetch.try_preempt(last)

    def _try_leave(self, request: QueuedRequest) -> bool:
        """Remove a request from the order, or from its batch that did not run; False if it has begun.

        Batches that this changes are preempted.
        """
        batch = request.batch
        if batch is not None and batch.slot is not None and not self.prefetch.try_preempt(batch):
            return False
        batch = request.batch
        if batch is None:
            # It may be what closed the last batch, or what made it too large to grow.
            self._preempt_last()
            self._order.remove(request)
            self._front.remove(request)
            return True
        batch.keys.remove(request.pending.key)
        if not batch.keys:
            self._returned.remove(batch)
        return True

    def _expire(self, now_ns: int) -> list[int]:
        """Delay or reject the requests whose deadline has come; the keys of those that were rejected."""
        rejected: list[int] = []
        for key in self._deadlines.pop_due(now_ns):
            request = self.queued[key]
            if not self._try_leave(request):
                continue  # it has begun
            policy = self._policy
            if self._priorities is not None:
                policy = self._priorities.policies.get(request.arrival_level, policy)
            if policy.timeout_action is TimeoutAction.DELAY:
                request.is_late = True
                self._order.append(request)
                self._front.is_formed = False
            else:
                rejected.append(key)
        self._forget(rejected)
        return rejected

    def _move(self, request: QueuedRequest, now_ns: int) -> None:
        """Move a request to the next higher level, unless it has begun."""
        if self._try_leave(request):
            request.level -= 1
            self._order.append(request)
            self._front.is_formed = False
            self._note_move(request, now_ns)
            self.prefetch.preempt_from(request.level)

    def _note_move(self, request: QueuedRequest, now_ns: int) -> None:
        """Note when the request moves from its level, if it does."""
        if request.level > 1 and self._aging_ns:
            self._moves.add(request.pending.key, now_ns + self._aging_ns)

    def _forget(self, keys: Iterable[int]) -> None:
        """Remove requests that are in no batch and not in the order any more."""
        queued, counts, may_expire = self.queued, self._counts, self.may_expire
        for key in keys:
            request = queued.pop(key)
            self._size_bytes -= request.pending.size_bytes
            if counts:
                level = request.arrival_level
                counts[level] -= 1
                if not counts[level]:
                    del counts[level]
            if may_expire:
                self._deadlines.discard(key)
                self._moves.discard(key)
