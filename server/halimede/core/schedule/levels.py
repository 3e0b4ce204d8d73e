"""The queue of several priority levels, or of a custom batching strategy: forms a batch when an instance is free.

All queued requests have one order: by level (1 is the highest), and within a level those within their timeout before
the delayed ones, each in the order of arrival. Batches are cut from the front of this order, never around a request:

- A batch takes requests as long as they are `compatible`, the strategy includes them, and the rows do not exceed the
  largest preferred size (max_batch_size if none is configured). A request that does not join closes the batch.
  So the room that a level leaves is filled with the first requests of the next levels.
- If the oldest request of the batch has waited for max_queue_delay, all these requests run.
- Otherwise, if their rows were a preferred size at some request, those up to the last such request run. The rest waits
  for its own delay.
- Otherwise they run if the batch is closed or full, or without a max_queue_delay.
- Otherwise the batch waits for more requests, until the delay of its oldest one is over.

These are Triton's rules for a model with priority levels. While a batch waits for more, it holds all queued requests.

A batch that cannot grow can be prefetched for a busy slot (`core.schedule.prefetch`). It is preempted when a request
arrives, or moves, that comes before one of its requests or before the one that closed it, and when that one leaves: so
what runs next is the same as without. Not prefetched are batches with late requests, and those of a strategy, which
would see their requests again.

Each level has the bound and the timeout of its policy, for the requests that arrived there. A request whose timeout
expires is rejected, or (DELAY) is late: it stays in its level, after all others.

With ageing, a request that has waited for `aging_ns` in a level moves to the next higher one. There the earlier arrival
of the first moved request and the first own request is next. Ageing changes the order and nothing else. Moves and
timeouts are made in the order of their times, so the result does not depend on when the queue is polled.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import replace

from halimede.core.config.model_config import TimeoutAction
from halimede.core.deadlines import Deadlines
from halimede.core.schedule.actions import Fail, Slot
from halimede.core.schedule.level_order import RETURNED, LevelOrder, LevelRequest
from halimede.core.schedule.policy import BatchPolicy, Priorities
from halimede.core.schedule.prefetch import Batch, Prefetch, TakeBack
from halimede.core.schedule.queue import AT_ONCE
from halimede.core.schedule.scheduler import Pending
from halimede.core.schedule.strategy import BatchedRequest, BatchingStrategy, StrategyBatch
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason


class Forming:
    """The requests at the front of the order that may run as one batch, and the strategy's object for them."""

    __slots__ = ("batch", "error", "has_late", "is_closed", "later", "level", "marked", "oldest", "requests", "rows")

    def __init__(self) -> None:
        self.requests: list[LevelRequest] = []
        self.rows = 0
        self.oldest = 0
        """When the first of them to arrive was enqueued."""
        self.marked = 0
        """The number of requests up to the last preferred size; 0 for none."""
        self.has_late = False
        """Whether a late request joins it, or closes it: then arrivals change it."""
        self.is_closed = False
        self.level = 0
        """That of the last request that was looked at: it joined, or closed the batch."""
        self.later: deque[LevelRequest] = deque()
        """Arrivals after the last of `requests` that were not looked at yet."""
        self.batch: StrategyBatch | None = None
        self.error: InferenceError | None = None
        """The strategy's failure. All `requests` fail with it."""


class LevelQueue:
    """See the module's text. Has the methods of `BatchQueue`. Times are nanoseconds."""

    def __init__(
        self,
        policy: BatchPolicy,
        priorities: Priorities | None = None,
        strategy: BatchingStrategy | None = None,
        take_back: TakeBack | None = None,
    ) -> None:
        """`policy` has the sizes and the delay of batches, and applies to levels without a policy of their own.

        Without `take_back` no batch is prefetched.
        """
        self._policy = policy
        self._priorities = priorities or Priorities()
        self._strategy = strategy
        self._preferred = frozenset(policy.preferred_batch_sizes or (policy.max_batch_size,))
        self._enough, self._least = max(self._preferred), min(self._preferred)
        policies = (policy, *self._priorities.policies.values())
        self.may_expire = self._priorities.aging_ns > 0 or any(each.may_expire for each in policies)
        """Whether time changes the queue: requests may have a deadline, or move."""
        self.queued: OrderedDict[int, LevelRequest] = OrderedDict()
        """By key, in the order of arrival. Changed only here."""
        self.failed: list[Fail] = []
        """Requests that failed with the strategy. The scheduler clears it."""
        self._order = LevelOrder()
        """The queued requests that are not prefetched."""
        self.prefetch = Prefetch(take_back, self.restore)
        self._counts: dict[int, int] = {}
        """Queued requests by the level of their arrival."""
        self._size_bytes = 0
        self._rows = 0
        """Of the requests that are not prefetched."""
        self._compatible: Hashable = None
        self._is_uniform = True
        """False if requests that are not prefetched may differ in `compatible`."""
        self._forming: Forming | None = None
        self._deadlines = Deadlines[int]()
        self._moves = Deadlines[int]()

    def oldest_enqueued_at(self) -> int | None:
        """When the oldest request arrived; None if the queue is empty."""
        return next((request.enqueued_at for request in self.queued.values()), None)

    def would_hold(self, rows: int, timeout_us: int) -> bool:
        """As `BatchQueue.would_hold`. True if the request would expire in any level, or if a strategy must see it."""
        if self.queued or self._strategy is not None:
            return True
        if self._policy.max_queue_delay_ns > 0 and rows < self._enough and rows not in self._preferred:
            return True
        policies = (self._policy, *self._priorities.policies.values())
        return self.may_expire and any(policy.expires_at_once(timeout_us) for policy in policies)

    def push(self, pending: Pending, now_ns: int, is_idle: bool) -> None:  # noqa: ARG002  as `BatchQueue.push`
        """Add a request, or raise UNAVAILABLE when its level is full.

        The byte bound is one for all levels. It does not refuse a request in an empty queue: it could never run.
        """
        key, queued = pending.key, self.queued
        level = self._priorities.level_of(pending.priority)
        policy = self._priorities.policies.get(level, self._policy)
        count, size_bytes = self._counts.get(level, 0), self._size_bytes + pending.size_bytes
        if count >= policy.max_queue_size or (queued and size_bytes > self._policy.max_queue_bytes):
            raise InferenceError(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")
        if not self._order:
            self._compatible, self._is_uniform = pending.compatible, True
        elif self._is_uniform and pending.compatible != self._compatible:
            self._is_uniform = False
        queued[key] = request = LevelRequest(pending, now_ns, level, level)
        self._order.append(request)
        self._counts[level] = count + 1
        self._size_bytes = size_bytes
        self._rows += pending.batch_size
        if self.may_expire:
            if (deadline := policy.deadline(pending.timeout_us, now_ns)) is not None:
                self._deadlines.add(key, deadline)
            if level > 1 and self._priorities.aging_ns:
                self._moves.add(key, now_ns + self._priorities.aging_ns)
        forming = self._forming
        if forming is not None:
            last = forming.later[-1].level if forming.later else forming.level
            # Late requests are behind an arrival of their level.
            if level < last or forming.has_late:
                self._forming = None
            elif not forming.is_closed:
                forming.later.append(request)
        if self.prefetch:
            self.prefetch.preempt_from(level + 1)
            if next(iter(self._order)) is request:
                self._preempt_last()  # the request comes before what closed it

    def push_back(self, requests: Sequence[Pending], now_ns: int) -> None:
        """Return a batch that did not run. It is closed, and first in the queue.

        Its requests no longer have a deadline, and the bounds do not apply.
        """
        if not requests:
            return
        returned = []
        for pending in requests:
            level = self._priorities.level_of(pending.priority)
            self.queued[pending.key] = request = LevelRequest(pending, now_ns, level, RETURNED)
            returned.append(request)
            self._counts[level] = self._counts.get(level, 0) + 1
            self._size_bytes += pending.size_bytes
            self._rows += pending.batch_size
        self._order.put_back(returned)

    def pop_ready(self, now_ns: int) -> tuple[int, ...]:
        """Take the keys of the next batch that is ready; empty if none is ready. May add to `failed`."""
        if self._order.returned:
            return self._take(list(self._order.returned[0].values()))
        while self._order:
            if self._is_below_preferred() and now_ns < self._oldest() + self._policy.max_queue_delay_ns:
                break
            forming = self._form()
            requests = self._ready(forming, now_ns)
            if not requests:
                break
            self._forming = None
            error = forming.error
            if error is None and forming.batch is not None:
                try:
                    forming.batch.end()
                except Exception as raised:  # noqa: BLE001  any failure of the strategy is the answer
                    error = _failure(self._strategy, "end", raised)
            keys = self._take(requests)
            if error is None:
                return keys
            self.failed += [Fail(key, error, FailureReason.OTHER) for key in keys]
        return ()

    def ready_at(self) -> int | None:
        """When `pop_ready` has a batch, or the order changes, if nothing else happens.

        AT_ONCE, a time, or None for never.
        """
        if not self._order:
            return None
        if self._order.returned:
            return AT_ONCE
        if self._is_below_preferred():
            ready = self._oldest() + self._policy.max_queue_delay_ns
        else:
            forming = self._form()
            if self._ready(forming, AT_ONCE):
                return AT_ONCE
            ready = forming.oldest + self._policy.max_queue_delay_ns
        moves = self._moves.next()
        return ready if moves is None else min(ready, moves)

    @property
    def has_closed(self) -> bool:
        """Whether a batch waits here that can be prefetched."""
        return bool(self._full())

    def prefetch_next(self, slot: Slot) -> list[int]:
        """The keys of the next batch, which lies ready at the busy slot from now on. `has_closed` must be true."""
        requests = self._full()
        self._forming = None
        batch = Batch([request.pending.key for request in requests], level=requests[-1].level)
        for request in requests:
            self._order.remove(request)
            request.batch = batch
            batch.rows += request.pending.batch_size
            self._rows -= request.pending.batch_size
        self.prefetch.add(batch, slot)
        return batch.keys

    def restore(self, batch: Batch) -> None:
        """A prefetched batch did not begin: its requests are the first of their levels."""
        requests = [self.queued[key] for key in batch.keys]
        for request in requests:
            request.batch = None
            self._rows += request.pending.batch_size
        self._order.prepend(requests)
        self._forming, self._is_uniform = None, False

    def begin(self, batch: Batch) -> None:
        """A prefetched batch has begun: its requests leave the queue, if they have not."""
        for key in batch.keys:
            if key in self.queued:
                self._forget(self.queued[key])

    def expire(self, now_ns: int) -> list[int]:
        """Make all moves and timeouts that are due. Returns the keys of the requests that were rejected."""
        if not self._priorities.aging_ns:
            return self._expire(now_ns)
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
        if request is None or not self._is_here(request):
            return False
        self._forming = None
        self._take([request])
        return True

    def end_delay(self) -> None:
        """No batch waits for its delay from now on."""
        self._policy = replace(self._policy, max_queue_delay_ns=0)

    def clear(self) -> list[int]:
        """Empty the queue; its keys in the order of arrival. Batches that have begun are not part of it."""
        for batch in self.prefetch.preempt_all():
            self.begin(batch)
        keys = list(self.queued)
        for each in (self.queued, self._order, self._counts):
            each.clear()
        self._deadlines.clear()
        self._moves.clear()
        self._size_bytes = self._rows = 0
        self._forming = None
        return keys

    def _oldest(self) -> int:
        return next(request.enqueued_at for request in self.queued.values() if request.batch is None)

    def _is_below_preferred(self) -> bool:
        """Whether the batch holds all requests and waits, in any order of these. Saves looking at each of them."""
        return (
            self._rows < self._least
            and self._is_uniform
            and self._strategy is None
            and self._policy.max_queue_delay_ns > 0
        )

    def _form(self) -> Forming:
        """Add what may join the batch at the front of the queue, which is not empty."""
        forming = self._forming
        if forming is None:
            forming = self._forming = Forming()
            for request in self._order:
                if not self._try_include(forming, request):
                    break
            else:
                self._compatible = forming.requests[0].pending.compatible
                self._is_uniform = True
        else:
            while forming.later and not forming.is_closed:
                self._try_include(forming, forming.later.popleft())
        return forming

    def _full(self) -> list[LevelRequest]:
        """The requests of the next batch if that can be prefetched: it cannot grow, and time does not change it."""
        if self._strategy is not None or not self._order or self._order.returned:
            return []
        forming = self._form()
        is_whole = forming.is_closed or forming.rows >= self._enough
        if not is_whole or forming.has_late or forming.marked not in {0, len(forming.requests)}:
            return []
        return forming.requests

    def _is_here(self, request: LevelRequest) -> bool:
        """Whether the request waits here and can leave its place, after batches that this changes are preempted."""
        batch = request.batch
        if batch is not None:
            return self.prefetch.try_preempt(batch)
        self._preempt_last()  # the request may be what closed it
        return True

    def _preempt_last(self) -> None:
        """Preempt the batch that was prefetched last if another request may join it now."""
        last = self.prefetch.last
        if last is not None and last.rows < self._enough:
            self.prefetch.try_preempt(last)

    def _try_include(self, forming: Forming, request: LevelRequest) -> bool:
        """Add a request to the batch; False if the batch is closed now."""
        requests, pending = forming.requests, request.pending
        forming.level = request.level
        forming.has_late |= request.is_late
        if requests and (
            forming.rows + pending.batch_size > self._enough or pending.compatible != requests[0].pending.compatible
        ):
            forming.is_closed = True
            return False
        if self._strategy is not None:
            try:
                if forming.batch is None:
                    forming.batch = self._strategy.begin()
                is_included = bool(forming.batch.include(BatchedRequest(pending)))
            except Exception as error:  # noqa: BLE001  any failure of the strategy is the answer
                forming.error = _failure(self._strategy, "begin" if forming.batch is None else "include", error)
                is_included = False
            if not is_included:
                forming.is_closed = True
                if requests and forming.error is None:
                    return False
        forming.oldest = min(forming.oldest, request.enqueued_at) if requests else request.enqueued_at
        requests.append(request)
        forming.rows += pending.batch_size
        if forming.rows in self._preferred:
            forming.marked = len(requests)
        return not forming.is_closed

    def _ready(self, forming: Forming, now_ns: int) -> list[LevelRequest]:
        """The requests that run as one batch now, or fail together; empty if the batch waits for more."""
        delay = self._policy.max_queue_delay_ns
        if forming.error is not None or (delay and now_ns >= forming.oldest + delay):
            return forming.requests
        if forming.marked:
            return forming.requests[: forming.marked]
        if forming.is_closed or not delay or forming.rows >= self._enough:
            return forming.requests
        return []

    def _expire(self, now_ns: int) -> list[int]:
        """Delay or reject the requests whose deadline has come; the keys of those that were rejected."""
        rejected: list[int] = []
        for key in self._deadlines.pop_due(now_ns):
            request = self.queued[key]
            if not self._is_here(request):
                continue  # it has begun
            if not self._try_delay(request):
                self._take([request])
                rejected.append(key)
        return rejected

    def _move(self, request: LevelRequest, now_ns: int) -> None:
        """Move a request to the next higher level, unless it has begun."""
        if not self._is_here(request):
            return
        self._forming = None
        self._order.remove(request)
        request.level -= 1
        self._order.append(request)
        if request.level > 1:
            self._moves.add(request.pending.key, now_ns + self._priorities.aging_ns)
        self.prefetch.preempt_from(request.level)

    def _try_delay(self, request: LevelRequest) -> bool:
        """Make a request late whose timeout has expired; False if its policy rejects it."""
        self._forming = None
        policy = self._priorities.policies.get(request.arrival_level, self._policy)
        if policy.timeout_action is not TimeoutAction.DELAY:
            return False
        self._order.remove(request)
        request.is_late = True
        self._order.append(request)
        return True

    def _take(self, requests: Sequence[LevelRequest]) -> tuple[int, ...]:
        """Remove requests from the queue; their keys."""
        for request in requests:
            self._order.remove(request)
            self._rows -= request.pending.batch_size
            self._forget(request)
        return tuple([request.pending.key for request in requests])

    def _forget(self, request: LevelRequest) -> None:
        """Remove a request of which nothing waits in the order any more."""
        pending, level, counts = request.pending, request.arrival_level, self._counts
        del self.queued[pending.key]
        self._size_bytes -= pending.size_bytes
        if counts[level] == 1:
            del counts[level]
        else:
            counts[level] -= 1
        if self.may_expire:
            self._deadlines.discard(pending.key)
            if self._priorities.aging_ns:
                self._moves.discard(pending.key)


def _failure(strategy: BatchingStrategy | None, where: str, error: Exception) -> InferenceError:
    name = type(strategy).__name__
    return InferenceError(
        ErrorCode.INTERNAL, f"batching strategy '{name}' failed in '{where}': {type(error).__name__}: {error}"
    )
