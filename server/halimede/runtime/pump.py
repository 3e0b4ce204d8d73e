"""The pump of one model version: performs what its scheduler decides.

Everything here runs on the event loop's thread, in synchronous steps: submit, cancel, a worker's event, a timer. After
every step that can free capacity or form a batch the scheduler is polled, its actions are performed in order, and one
timer is armed at `wake_at`. A request costs one record and one callback: no task, no future.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from halimede.core.config.check_request import Checked, RequestChecker
from halimede.core.observe.stats import ModelStats
from halimede.core.schedule.actions import Execute, Fail
from halimede.core.schedule.ordering import ResponseOrder
from halimede.core.schedule.scheduler import Pending, Scheduler
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.error import of_request
from halimede.core.types.statistics import FailureReason
from halimede.runtime.clock import monotonic_ns, wall_ms
from halimede.runtime.server import OnResponse
from halimede.workers.worker import BatchDone, BatchItem, Worker

log = logging.getLogger(__name__)

CANCELLED = InferenceError(ErrorCode.CANCELLED, "request was cancelled")
STOPPING = InferenceError(
    ErrorCode.UNAVAILABLE, "Server is stopping, scheduler for model has stopped accepting new inference requests"
)


@dataclass(slots=True)
class InFlight(BatchItem):
    """One accepted request: what the worker gets, and who waits for it. Times are monotonic nanoseconds.

    One object for both, because one of each per request would cost more than all else that the pump does.
    """

    pump: "Pump"
    on_response: OnResponse
    received_ns: int
    queued_ns: int
    size_bytes: int


MAX_IN_FLIGHT_BYTES = 1 << 30
LONGEST_SLEEP_MS = 3_600_000
"""A request's own timeout may be thousands of years, which no timer takes."""


class LiveRequests:
    """Every request in flight, of all models, by ticket, and the bytes of input that they hold together.

    The queue of each model is bounded; this bounds their sum and what executes. One request alone may be larger.
    """

    __slots__ = ("by_ticket", "limit_bytes", "size_bytes")

    def __init__(self, limit_bytes: int = MAX_IN_FLIGHT_BYTES) -> None:
        self.by_ticket: dict[int, InFlight] = {}
        self.size_bytes = 0
        self.limit_bytes = limit_bytes

    def check_room(self, size_bytes: int) -> None:
        """UNAVAILABLE when a request of this size would go over the bound."""
        if self.size_bytes + size_bytes > self.limit_bytes and self.by_ticket:
            raise InferenceError(
                ErrorCode.UNAVAILABLE,
                f"Exceeds maximum queue size: requests in flight hold {self.size_bytes} bytes, "
                f"and with {size_bytes} more would go over {self.limit_bytes}",
            )

    def add(self, ticket: int, flight: InFlight) -> None:
        self.by_ticket[ticket] = flight
        self.size_bytes += flight.size_bytes

    def take(self, ticket: int) -> InFlight | None:
        flight = self.by_ticket.pop(ticket, None)
        if flight is not None:
            self.size_bytes -= flight.size_bytes
        return flight


class Pump:
    """Requests of one model version, from acceptance to their one final answer."""

    def __init__(
        self,
        name: str,
        version: str,
        scheduler: Scheduler,
        stats: ModelStats,
        checker: RequestChecker,
        live: LiveRequests,
        loop: asyncio.AbstractEventLoop,
        *,
        preserve_ordering: bool = False,
    ) -> None:
        self._name = name
        self._version = version
        self._scheduler = scheduler
        self._stats = stats
        self._checker = checker
        self._loop = loop
        self._order = ResponseOrder[tuple[OnResponse, InferenceResponse]]() if preserve_ordering else None
        self._workers: dict[int, Worker] = {}
        self._passive: list[Worker] = []
        self._live = live
        self._live_count = 0
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._timer_at: int | None = None
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return (
            f"<Pump {self._name}:{self._version} queue={self._scheduler.queued} "
            f"running={self._running}/{len(self._workers)} live={self._live_count}>"
        )

    @property
    def queued(self) -> int:
        return self._scheduler.queued

    @property
    def executing(self) -> int:
        return self._live_count - self._scheduler.queued

    def oldest_wait_ns(self) -> int:
        """How long the oldest queued request has waited; 0 when nothing is queued."""
        since = self._scheduler.oldest_enqueued_at()
        return 0 if since is None else max(0, monotonic_ns() - since)

    def add_worker(self, worker: Worker) -> None:
        self._workers[worker.ordinal] = worker
        self._scheduler.add_instance(worker.ordinal)
        self._poll()

    def add_passive(self, worker: Worker) -> None:
        """An instance that is loaded and never scheduled: its backend uses it."""
        self._passive.append(worker)

    def hold(self, size_bytes: int) -> None:
        """Stay open for a request that is on its way, and count its bytes; UNAVAILABLE when there are too many."""
        self._live.check_room(size_bytes)
        self._live.size_bytes += size_bytes
        self._live_count += 1
        self._idle.clear()

    def release(self, size_bytes: int) -> None:
        """The request that `hold` was for is here, or will not come."""
        self._live.size_bytes -= size_bytes
        self._live_count -= 1
        self._rest()

    def submit(
        self, key: int, request: InferenceRequest, checked: Checked, on_response: OnResponse, received_ns: int
    ) -> None:
        """Queue a checked request; its answer comes through `on_response`, at once if the queue is full."""
        now = monotonic_ns()
        rows = checked.batch_size
        pending = Pending(
            key,
            rows,
            checked.size_bytes,
            checked.compatible,
            request.priority,
            request.timeout_us,
            request.sequence_id,
            request.sequence_start,
            request.sequence_end,
        )
        try:
            self._live.check_room(checked.size_bytes)
            self._scheduler.enqueue(pending, now)
        except InferenceError as error:
            self._stats.record_failure(FailureReason.REJECTED, now - received_ns)
            error = InferenceError(error.code, of_request(request.id, error.message))
            on_response(self._failure(request.id, error))
            return
        if self._order is not None:
            self._order.enqueued(key)
        self._live_count += 1
        size_bytes = checked.size_bytes
        self._live.add(key, InFlight(key, request, rows, False, self, on_response, received_ns, now, size_bytes))
        self._idle.clear()
        if self._running < len(self._workers):
            self._poll()
        else:
            self._arm(self._scheduler.wake_at())

    def cancel(self, key: int) -> None:
        """The client is gone: drop the request if it is queued, raise its flag if it is running."""
        flight = self._live.by_ticket.get(key)
        if flight is None:
            return
        flight.cancelled = True
        if self._scheduler.try_cancel(key):
            self._fail(key, CANCELLED, FailureReason.CANCELED)
            self._poll()

    def on_event(self, event: BatchDone) -> None:
        """What a worker reports. Called on the loop's thread."""
        self._running -= 1
        self._scheduler.completed(event.worker.ordinal)
        # The next batch goes out before the last one is answered: the worker computes while the answers are written.
        self._poll()
        self._answer(event)

    def abort(self) -> None:
        """Fail everything that is queued or running: the server stops now. What still runs is flagged, and unheard."""
        for key in self._scheduler.drain():
            self._fail(key, STOPPING, FailureReason.OTHER)
        for key, flight in list(self._live.by_ticket.items()):
            if flight.pump is self:
                flight.cancelled = True
                self._fail(key, STOPPING, FailureReason.OTHER)

    async def drained(self) -> None:
        """Wait until every accepted request is answered."""
        await self._idle.wait()

    async def close(self) -> None:
        """Wait until every accepted request is answered, then stop the workers, side by side: one may take long."""
        await self.drained()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(worker.stop() for worker in (*self._workers.values(), *self._passive)))

    def _poll(self) -> None:
        actions = self._scheduler.poll(monotonic_ns())
        for action in actions:
            match action:
                case Execute(instance, keys):
                    self._execute(self._workers[instance], keys)
                case Fail(key, error, reason):
                    self._fail(key, error, reason)
        self._arm(self._scheduler.wake_at())

    def _execute(self, worker: Worker, keys: Sequence[int]) -> None:
        by_ticket = self._live.by_ticket
        self._running += 1
        worker.execute([by_ticket[key] for key in keys])

    def _arm(self, wake_at: int | None) -> None:
        if wake_at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = wake_at
        if wake_at is None:
            return
        # The loop's timers count whole milliseconds. Sleep the whole ones, then look again each turn of the loop: a
        # delay of 100 us is kept, and the turns between cost less than a millisecond late would.
        whole_ms = min((wake_at - monotonic_ns()) // 1_000_000, LONGEST_SLEEP_MS)
        if whole_ms >= 1:
            self._timer = self._loop.call_later(whole_ms / 1000, self._wake)
        else:
            self._timer = self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._timer_at = None
        self._poll()

    def _answer(self, done: BatchDone) -> None:
        times = done.times
        input_ns = times.input_end - times.start
        infer_ns = times.output_start - times.input_end
        output_ns = times.end - times.output_start
        if not done.failed:
            rows = 0
            for item in done.items:
                rows += item.rows
            self._stats.record_execution(rows, input_ns, infer_ns, output_ns)
        wall = wall_ms()
        for item, reply in zip(done.items, done.replies, strict=True):
            if isinstance(reply, InferenceError):
                cancelled = reply.code is ErrorCode.CANCELLED
                self._fail(item.key, reply, FailureReason.CANCELED if cancelled else FailureReason.BACKEND)
                continue
            try:
                self._checker.reshape_outputs(reply, item.rows)
            except InferenceError as error:
                self._fail(item.key, error, FailureReason.BACKEND)
                continue
            flight = self._take(item.key)
            if flight is None:
                continue
            self._stats.record_success(
                item.rows,
                monotonic_ns() - flight.received_ns,
                max(0, times.start - flight.queued_ns),
                input_ns,
                infer_ns,
                output_ns,
                wall,
            )
            response = InferenceResponse(self._name, self._version, item.request.id, reply)
            self._send(item.key, flight, response)
        self._rest()

    def _fail(self, key: int, error: InferenceError, reason: FailureReason) -> None:
        flight = self._take(key)
        if flight is None:
            return
        self._stats.record_failure(reason, monotonic_ns() - flight.received_ns)
        self._send(key, flight, self._failure(flight.request.id, error))
        self._rest()

    def _take(self, key: int) -> InFlight | None:
        """The request's record, for its one final answer; None when `abort` has answered it already."""
        flight = self._live.take(key)
        if flight is not None:
            self._live_count -= 1
        return flight

    def _rest(self) -> None:
        """Say that nothing is in flight, once the answers are out."""
        if not self._live_count:
            self._idle.set()

    def _send(self, key: int, flight: InFlight, response: InferenceResponse) -> None:
        if self._order is None:
            _call(flight.on_response, response)
            return
        for on_response, ordered in self._order.completed(key, (flight.on_response, response)):
            _call(on_response, ordered)

    def _failure(self, request_id: str, error: InferenceError) -> InferenceResponse:
        return InferenceResponse(self._name, self._version, request_id, error=error)


def _call(on_response: OnResponse, response: InferenceResponse) -> None:
    """Answer; a caller that fails must not cost the others of its batch their answers."""
    try:
        on_response(response)
    except Exception:
        about = {"model": response.model_name, "version": response.model_version, "request_id": response.id}
        log.exception("answering a request of model '%s' failed", response.model_name, extra=about)
