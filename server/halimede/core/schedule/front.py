"""The front of a queue: the requests that may run as one batch.

A batch is cut from the front of the order of requests, never around one:

- It takes requests as long as they are `compatible`, the strategy includes them, and they have at most `limit` rows
  together, until the rows reach the largest preferred size (max_batch_size if none is configured). A request that does
  not join closes the batch. So the room that a level leaves is filled with the first requests of the next levels.
- The limit is max_batch_size. With priority levels or a strategy it is the largest preferred size, as in Triton.
- If the oldest request of the batch has waited for max_queue_delay, all these requests run.
- Otherwise, if their rows were a preferred size at some request, those up to the last such request run. The rest waits
  for its own delay.
- Otherwise they run if the batch is closed or full, or without a max_queue_delay.
- Otherwise the batch waits for more requests, until the delay of its oldest one is over.
"""

from collections.abc import Iterable

from halimede.core.schedule.policy import BatchPolicy
from halimede.core.schedule.request_order import QueuedRequest
from halimede.core.schedule.scheduler import Pending
from halimede.core.schedule.strategy import BatchedRequest, BatchingStrategy, StrategyBatch
from halimede.core.types import InferenceError, internal

AT_ONCE = 0


class Front:
    """See the module's text. One object for each queue, which is formed again. Times are nanoseconds."""

    __slots__ = (
        "_is_plain",
        "_least",
        "_limit",
        "_strategy",
        "batch",
        "count",
        "delay_ns",
        "enough",
        "error",
        "first",
        "has_late",
        "is_closed",
        "is_formed",
        "level",
        "marked",
        "marked_rows",
        "oldest",
        "preferred",
        "rows",
        "takes_all",
    )

    def __init__(self, policy: BatchPolicy, strategy: BatchingStrategy | None, *, is_plain: bool) -> None:
        """`is_plain`: without priority levels and without a strategy."""
        self.preferred = frozenset(policy.preferred_batch_sizes or (policy.max_batch_size,))
        self.enough = max(self.preferred)
        # A strategy looks at each request, so none is added or removed as one of those below the least size.
        self._least = min(self.preferred) if strategy is None else 0
        self._is_plain = is_plain
        self._limit = policy.max_batch_size if is_plain else self.enough
        self._strategy = strategy
        self.delay_ns = policy.max_queue_delay_ns
        self.is_formed = False
        """False if what waits has changed, so that the other values are wrong."""
        self.count = 0
        self.rows = 0
        self.first: QueuedRequest
        self.oldest: QueuedRequest
        """The first of them to arrive. As `first`, it is only read when there are any."""
        self.level = 0
        """That of the last request that was looked at: it joined, or closed the batch."""
        self.marked = 0
        """The number of requests up to the last preferred size; 0 for none."""
        self.marked_rows = 0
        """That preferred size."""
        self.has_late = False
        """Whether a late request joins it, or closes it: then arrivals change it."""
        self.is_closed = False
        """Whether the batch is full, or the next request of the order does not join."""
        self.takes_all = False
        """Whether all requests of the order join, and would in any other order."""
        self.batch: StrategyBatch | None = None
        self.error: InferenceError | None = None
        """The strategy's failure. All requests of the batch fail with it."""

    def form(self, order: Iterable[QueuedRequest]) -> None:
        """Begin again with the first request of the order. Without any, the front is empty."""
        self.count = self.rows = self.marked = self.marked_rows = self.level = 0
        self.is_closed = self.has_late = False
        self.batch = self.error = None
        self.is_formed = True
        self._join(order)

    def add(self, request: QueuedRequest, is_idle: bool) -> None:
        """A request arrives. While an instance is idle, it does not join if it exceeds the largest preferred size."""
        rows = self.rows + request.pending.batch_size
        if self.takes_all and rows < self._least and request.pending.compatible == self.first.pending.compatible:
            # Most requests arrive so.
            self.count += 1
            self.rows = rows
            if not self._is_plain:
                self.level = max(self.level, request.level)
            return
        if is_idle and self._is_plain and self.count and rows > self.enough and not self.is_closed:
            request.begins = not self.first.is_late
        if self.has_late or request.level < self.level:
            self.is_formed = False
        elif not self.is_closed:
            self._join((request,))

    def remove(self, request: QueuedRequest) -> None:
        """A request has left the order."""
        if self.is_formed and self.takes_all and request is not self.oldest:
            self.count -= 1
            self.rows -= request.pending.batch_size
        else:
            self.is_formed = False

    def waits_for_more(self, rows: int) -> bool:
        """Whether a request of so many rows, alone in the queue, waits for its delay."""
        return self.delay_ns > 0 and rows < self.enough and rows not in self.preferred

    def ready(self, now_ns: int) -> int:
        """How many requests run as one batch now, or fail together; 0 if it waits for more."""
        if not self.count:
            return 0
        if self.error is not None or (self.delay_ns and now_ns >= self.oldest.enqueued_at + self.delay_ns):
            return self.count
        return self.marked or (self.count if self.is_closed or not self.delay_ns else 0)

    @property
    def is_fixed(self) -> bool:
        """Whether neither time nor arrivals behind its requests can change the next batch.

        With levels, an arrival may come before the request that closed it. So one of a preferred size is not fixed if
        other requests would join it.
        """
        if self.has_late or not self.is_closed:
            return False
        return self.marked in {0, self.count} or (self._is_plain and not self.delay_ns)

    def _join(self, following: Iterable[QueuedRequest]) -> None:
        """Add the requests that follow in the order, until the batch is closed. It is not closed yet."""
        count, rows, level = self.count, self.rows, self.level
        limit, least, strategy = self._limit, self._least, self._strategy
        compatible = self.first.pending.compatible if count else None
        for request in following:
            pending, level = request.pending, request.level
            if request.is_late:
                self.has_late = True
            together = rows + pending.batch_size
            if count and (request.begins or together > limit or pending.compatible != compatible):
                self.is_closed = True
                break
            if strategy is not None and not self._try_include(strategy, pending, is_first=not count):
                break
            if not count:
                self.first = self.oldest = request
                compatible = pending.compatible
            elif request.enqueued_at < self.oldest.enqueued_at:
                self.oldest = request
            count, rows = count + 1, together
            if rows >= least:
                if rows in self.preferred:
                    self.marked, self.marked_rows = count, rows
                if rows >= self.enough:
                    self.is_closed = True
                if self.is_closed:
                    break
        self.count, self.rows, self.level = count, rows, level
        self.takes_all = 0 < rows < least and not (self.is_closed or self.has_late)

    def _try_include(self, strategy: BatchingStrategy, pending: Pending, *, is_first: bool) -> bool:
        """Whether the request is part of the batch. One that the strategy does not include closes it."""
        try:
            if self.batch is None:
                self.batch = strategy.begin()
            if self.batch.include(BatchedRequest(pending)):
                return True
        except Exception as error:  # noqa: BLE001  any failure of the strategy is the answer
            self.error = failure(strategy, "begin" if self.batch is None else "include", error)
        self.is_closed = True
        # The first one runs alone. One that fails is part of it, to fail too.
        return is_first or self.error is not None

    def end(self) -> InferenceError | None:
        """The batch runs now. The failure of the strategy, if there is one: then its requests fail."""
        if self.error is None and self.batch is not None:
            try:
                self.batch.end()
            except Exception as error:  # noqa: BLE001  any failure of the strategy is the answer
                self.error = failure(self._strategy, "end", error)
        return self.error


def failure(strategy: BatchingStrategy | None, where: str, error: Exception) -> InferenceError:
    name = type(strategy).__name__
    return internal(f"batching strategy '{name}' failed in '{where}': {type(error).__name__}: {error}")
