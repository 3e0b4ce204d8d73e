"""The pump of one model version: performs what its scheduler decides.

Everything here runs on the event loop's thread, in synchronous steps: submit, cancel, a worker's event, a timer. After
every step that can free capacity or form a batch the scheduler is polled, its actions are performed in order, and one
timer is armed at `wake_at`. The scheduler says whether it is polled at once or as the loop's turn ends, so that what
comes in one turn runs together; a request that is alone in the model does not wait for that. A request costs one record
and one callback: no task, no future.

What becomes of a request that was given to a worker:

- The end of its batch answers it; most requests know nothing else.
- An answer beside its batch's end, or a batch's end that leaves it without one, opens it: `Open` is kept until its
  final answer. A model may take as long for that as it likes, so an open request whose client has gone is answered and
  forgotten as soon as its batch is over.
- Its worker goes down: it is open until the worker's own events fail it.

No slot of a worker that is down is given a batch. Requests wait as long as one worker is to come back.
"""

import asyncio
import logging
from collections.abc import Collection, Hashable

from halimede.core.config.check_request import Checked, RequestChecker
from halimede.core.observe.stats import ModelStats, outcome_of
from halimede.core.schedule.actions import Execute, Slot
from halimede.core.schedule.ordering import ResponseOrder
from halimede.core.schedule.scheduler import Outcome, Pending, Scheduler
from halimede.core.schedule.waits import Place
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.caller import Caller
from halimede.core.types.error import of_request
from halimede.core.types.server import WorkerHealth
from halimede.core.types.statistics import FailureReason, ResponseOutcome
from halimede.runtime.alarm import Alarm
from halimede.runtime.batches import Batches, Open
from halimede.runtime.clock import monotonic_ns, wall_ms
from halimede.runtime.instances import Instances
from halimede.runtime.live import Account, InFlight, LiveRequests
from halimede.runtime.request_places import RequestPlaces
from halimede.runtime.server import OnResponse
from halimede.workers.worker import (
    BatchDone,
    BatchItem,
    BatchTimes,
    Outputs,
    Parameters,
    ResponseSent,
    Worker,
    WorkerDown,
    WorkerEvent,
)

log = logging.getLogger(__name__)

CANCELLED = InferenceError(ErrorCode.CANCELLED, "request was cancelled")
STOPPING = InferenceError(
    ErrorCode.UNAVAILABLE, "Server is stopping, scheduler for model has stopped accepting new inference requests"
)


class Pump(Account):
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
        super().__init__(live)
        self._name = name
        self._version = version
        self._scheduler = scheduler
        self._stats = stats
        self._checker = checker
        self._reshapes = checker.reshapes_outputs
        self._loop = loop
        self._order = ResponseOrder[tuple[OnResponse, InferenceResponse]]() if preserve_ordering else None
        self._refusal: InferenceError | None = None
        self._instances = Instances()
        self._batches = Batches()
        self._places = RequestPlaces(name, version, self._instances, self._batches, live)
        self._polls_soon = False
        self._alarm = Alarm(loop, self._poll)

    def __repr__(self) -> str:
        return (
            f"<Pump {self._name}:{self._version} queue={self._scheduler.queued} "
            f"running={len(self._batches.running)}/{self._instances.capacity} live={self._live_count}>"
        )

    @property
    def queued(self) -> int:
        return self._scheduler.queued

    @property
    def executing(self) -> int:
        return self._live_count - self._scheduler.queued

    @property
    def parked(self) -> int:
        return self._instances.parked

    def worker_health(self) -> WorkerHealth:
        return self._instances.health()

    def oldest_wait_ns(self) -> int:
        """How long the oldest queued request has waited; 0 when nothing is queued."""
        since = self._scheduler.oldest_enqueued_at()
        return 0 if since is None else max(0, monotonic_ns() - since)

    @property
    def refusal(self) -> InferenceError | None:
        """Why no request is taken any more: every instance has died too often. None while there is hope."""
        return self._refusal

    def is_available(self) -> bool:
        """Whether an instance is up. A model all of whose instances are passive has none to wait for."""
        return self._instances.capacity > 0 or not self._instances.workers

    async def is_ready(self) -> bool:
        """Whether an instance is up and, where its model has a say in that, says that it is ready."""
        return await self._instances.is_ready()

    def add_worker(self, worker: Worker) -> None:
        if self._instances.add(worker):
            self._take_up(worker)
        else:
            self._refuse_if_parked()
        self._poll()

    def add_passive(self, worker: Worker) -> None:
        """An instance that is loaded and never scheduled: its backend uses it."""
        self._instances.add_passive(worker)

    def submit(
        self,
        key: int,
        request: InferenceRequest,
        checked: Checked,
        on_response: OnResponse,
        received_ns: int,
        caller: Caller | None = None,
    ) -> None:
        """Queue a checked request; its answer comes through `on_response`, at once if the queue is full."""
        now = monotonic_ns()
        if self._refusal is not None:
            self._stats.record_failure(FailureReason.REJECTED, now - received_ns)
            on_response(self._failure(request.id, self._refusal))
            return
        rows, size_bytes = checked.batch_size, checked.size_bytes
        flight = InFlight(key, request, rows, False, self, on_response, received_ns, now, size_bytes, caller=caller)
        slot = turns = None
        try:
            live = self._live
            if live.size_bytes + size_bytes > live.limit_bytes:
                live.check_room(size_bytes)
            if not self._live_count:
                # Alone in the model: there is no request to share a batch with.
                slot = self._scheduler.try_start(rows)
            if slot is None:
                turns = self._scheduler.enqueue(_pending(flight, checked.compatible), now)
        except InferenceError as error:
            self._stats.record_failure(FailureReason.REJECTED, now - received_ns)
            error = InferenceError(error.code, of_request(request.id, error.message))
            on_response(self._failure(request.id, error))
            return
        if self._order is not None:
            self._order.enqueued(key)
        self._accept(key, flight)
        if slot is not None:
            self._execute(slot, [flight])
        elif turns is not None:
            self._poll_in(turns)
        elif self._scheduler.may_expire:
            self._alarm.set(self._scheduler.wake_at())

    def cancel(self, key: int) -> None:
        """The client is gone: drop the request if it is queued, tell its worker if it is running or open."""
        flight = self._live.by_ticket.get(key)
        if flight is None or flight.cancelled:
            return
        flight.cancelled = True
        if self._scheduler.try_cancel(key):
            self._fail(key, CANCELLED, FailureReason.CANCELED)
            self._poll()
            return
        worker = self._worker_of(key)
        if worker is not None and self._instances.is_up(worker):
            worker.cancel(key)
        opened = self._batches.open.get(key)
        if opened is not None and opened.batch_is_over:
            self._forget(key, opened)

    def try_refuse(self, key: int, error: InferenceError) -> bool:
        """See `Acceptor.try_refuse`."""
        if not self._scheduler.try_cancel(key):
            return False
        self._fail(key, error, FailureReason.REJECTED)
        self._poll()
        return True

    def is_busy(self) -> bool:
        # An instance that is down comes back free.
        return len(self._batches.running) >= len(self._instances.worker_of) and self._scheduler.queued > 0

    def place_of(self, key: int) -> Place:
        return self._places.of(key)

    def acknowledge(self, key: int, responses: int) -> None:
        """The client took so many more answers, none of them final; ignored when the request is not open any more."""
        opened = self._batches.open.get(key)
        if opened is not None and self._instances.is_up(opened.worker):
            opened.worker.acknowledge(key, responses)

    def on_event(self, event: WorkerEvent) -> None:
        """What a worker reports. Called on the loop's thread."""
        if isinstance(event, BatchDone):
            slot = self._instances.slots[event.worker.ordinal][event.slot]
            # The end of a batch that its worker's death took with it frees nothing: the slot is gone, or taken again.
            if self._batches.try_end(slot, event.items[0].key):
                outcomes = self._outcomes(event) if self._scheduler.follows_outcomes else ()
                turns = self._scheduler.completed(slot, event.times.end - event.times.start, outcomes)
                if turns is not None:
                    self._poll_in(turns)
            self._answer(event)
        elif isinstance(event, ResponseSent):
            self._on_response_sent(event)
        elif isinstance(event, WorkerDown):
            self._on_down(event)
        else:
            self._on_up(event.worker)

    def abort(self) -> None:
        """Fail everything, queued, running or open: the server stops now. What still runs is told, and unheard."""
        for key in self._scheduler.drain():
            self._fail(key, STOPPING, FailureReason.OTHER)
        # Not by `_worker_of`, which looks through all batches for each.
        for slot, batch in self._batches:
            for item in batch:
                self._instances.worker_of[slot].cancel(item.key)
        for key, opened in self._batches.open.items():
            if self._instances.is_up(opened.worker):
                opened.worker.cancel(key)
        for key, flight in list(self._live.by_ticket.items()):
            if flight.pump is self:
                flight.cancelled = True
                self._fail(key, STOPPING, FailureReason.OTHER)

    async def close(self) -> None:
        """Wait until every accepted request is answered, then stop the workers, side by side: one may take long."""
        await self.drained()
        self._alarm.set(None)
        await self._instances.stop()

    def _poll_in(self, turns: int) -> None:
        """Poll at once, or as this turn of the loop ends, or the next one. Ignored where that is to be done already."""
        if not turns:
            self._poll()
        elif not self._polls_soon:
            self._polls_soon = True
            if turns == 1:
                self._loop.call_soon(self._poll_now)
            else:
                self._loop.call_soon(self._loop.call_soon, self._poll_now)

    def wake(self) -> None:
        """Poll soon: what another pump's scheduler has given back may be what this one's waits for."""
        self._poll_in(1)

    def _poll_now(self) -> None:
        self._polls_soon = False
        self._poll()

    def _poll(self) -> None:
        by_ticket = self._live.by_ticket
        for action in self._scheduler.poll(monotonic_ns()):
            if isinstance(action, Execute):
                self._execute(action.slot, [by_ticket[key] for key in action.requests])
            else:
                self._fail(action.request, action.error, action.reason)
        self._alarm.set(self._scheduler.wake_at())

    def _execute(self, slot: Slot, batch: list[InFlight]) -> None:
        worker = self._instances.worker_of[slot]
        self._batches.begin(slot, batch, worker)
        worker.execute([*batch], slot.number)

    def _outcomes(self, done: BatchDone) -> list[Outcome]:
        outcomes = []
        for at, (item, reply) in enumerate(zip(done.items, done.replies, strict=True)):
            flight = self._live.by_ticket.get(item.key)
            if flight is None or flight.cancelled or isinstance(reply, InferenceError):
                outcomes.append(Outcome.GONE)
            else:
                outcomes.append(Outcome.AGAIN if at in done.again else Outcome.DONE)
        return outcomes

    def _answer(self, done: BatchDone) -> None:
        times = done.times
        input_ns = times.input_end - times.start
        infer_ns = times.output_start - times.input_end
        output_ns = times.end - times.output_start
        wall = wall_ms()
        stats, live, is_open = self._stats, self._live, self._batches.open
        rows = 0
        for at, (item, reply) in enumerate(zip(done.items, done.replies, strict=True)):
            rows += item.rows
            key = item.key
            if not isinstance(reply, list) or (is_open and key in is_open):
                self._answer_otherwise(at, item, done, reply)
                continue
            if self._reshapes:
                try:
                    self._checker.reshape_outputs(reply, item.rows)
                except InferenceError as error:
                    self._fail_executed(key, error, times)
                    continue
            # None of these is open here, so that nothing but its record is known of it.
            flight = live.take(key)
            if flight is None:
                continue
            self._live_count -= 1
            response = InferenceResponse(self._name, self._version, item.request.id, reply, {}, None, True)
            if done.parameters and at in done.parameters:
                response.parameters = dict(done.parameters[at])
            now = monotonic_ns()
            if flight.caller is not None and flight.caller.computed is not None:
                # First: the answer may be the last one that its ensemble waits for.
                flight.caller.computed.add(input_ns, infer_ns, output_ns)
            # Counted while the answer is on its way.
            self._send(key, flight, response)
            stats.record_success(
                item.rows,
                now - flight.received_ns,
                max(0, times.start - flight.queued_ns),
                input_ns,
                infer_ns,
                output_ns,
                wall,
            )
        if not done.failed:
            stats.record_execution(rows, input_ns, infer_ns, output_ns)
        self._rest()

    def _answer_otherwise(
        self, at: int, item: BatchItem, done: BatchDone, reply: Outputs | InferenceError | None
    ) -> None:
        """Not by the first and only answer: with an error, or of a request that is open or will be."""
        if reply is None and at in done.again and not item.cancelled:
            return  # it is queued, or runs already
        if reply is None or item.key in self._batches.open:
            self._end_batch_of(item, done, reply, done.parameters.get(at))
        elif isinstance(reply, InferenceError):
            self._fail_executed(item.key, reply, done.times)

    def _end_batch_of(
        self, item: BatchItem, done: BatchDone, reply: Outputs | InferenceError | None, parameters: Parameters | None
    ) -> None:
        """The batch of a request that is open, or will be from now on, is over."""
        flight = self._live.by_ticket.get(item.key)
        if flight is None:
            return
        opened = self._batches.open.get(item.key)
        if opened is None:
            opened = self._batches.open[item.key] = Open(done.worker, done.items[0].key, done.times.input_end)
        if reply is not None:
            self._pass_on(
                flight, opened, ResponseSent(done.worker, item.key, reply, True, done.times, parameters or {})
            )
            return
        opened.batch_is_over = True
        if flight.cancelled:
            self._forget(item.key, opened)

    def _on_response_sent(self, sent: ResponseSent) -> None:
        flight = self._live.by_ticket.get(sent.key)
        if flight is None:
            return
        opened = self._batches.open.get(sent.key)
        if opened is None and (found := self._batches.find(sent.key)) and found[0].instance == sent.worker.ordinal:
            opened = self._batches.open[sent.key] = Open(sent.worker, found[1][0].key, sent.times.input_end)
        if opened is None or opened.worker is not sent.worker:
            return
        if flight.cancelled and not sent.final:
            return
        self._pass_on(flight, opened, sent)
        self._rest()

    def _pass_on(self, flight: InFlight, opened: Open, sent: ResponseSent) -> None:
        """Count an answer of an open request and send it to who asked."""
        times = sent.times
        reply = sent.reply
        if reply is None and not opened.answers and not self._stats.decoupled:
            reply = InferenceError(ErrorCode.INTERNAL, "expected a single response, got 0")
        if flight.cancelled and self._stats.decoupled and not isinstance(reply, InferenceError):
            # Answers before this one were kept from the client, so that this one would end what is not whole.
            reply = CANCELLED
        if isinstance(reply, list):
            try:
                self._checker.reshape_outputs(reply, flight.rows)
            except InferenceError as error:
                reply = error
        if isinstance(reply, InferenceError):
            opened.has_failed = True
            response = InferenceResponse(self._name, self._version, flight.request.id, error=reply, final=sent.final)
        else:
            response = InferenceResponse(
                self._name, self._version, flight.request.id, reply or [], dict(sent.parameters), final=sent.final
            )
        now = monotonic_ns()
        outcome = outcome_of(response)
        since = max(times.input_end, opened.last_ns)
        output_start = max(times.output_start, since)
        self._stats.record_response(opened.answers, outcome, output_start - since, times.end - output_start)
        if outcome is ResponseOutcome.SUCCESS and not opened.answers:
            self._stats.record_first_response(now - flight.received_ns)
        opened.answers += 1
        # Not when it came: the model computes the next one while this one is on its way.
        opened.last_ns = output_start
        if sent.final:
            self._take(sent.key)
            if opened.has_failed:
                cancelled = outcome is ResponseOutcome.CANCEL
                reason = FailureReason.CANCELED if cancelled else FailureReason.BACKEND
                self._stats.record_failure(reason, now - flight.received_ns)
            else:
                spent = (
                    times.input_end - times.start,
                    times.output_start - times.input_end,
                    times.end - times.output_start,
                )
                queue_ns = max(0, times.start - flight.queued_ns)
                self._stats.record_success(flight.rows, now - flight.received_ns, queue_ns, *spent, wall_ms())
                if flight.caller is not None and flight.caller.computed is not None:
                    flight.caller.computed.add(*spent)
        self._send(sent.key, flight, response)

    def _forget(self, key: int, opened: Open) -> None:
        """Answer an open request whose client has gone. Its model may answer for ever: nobody listens any more."""
        waited_ns = max(0, monotonic_ns() - opened.last_ns)
        self._stats.record_response(opened.answers, ResponseOutcome.CANCEL, waited_ns, 0)
        self._fail(key, CANCELLED, FailureReason.CANCELED)

    def _worker_of(self, key: int) -> Worker | None:
        """Who executes a request or has it open; None when it is queued or over."""
        opened = self._batches.open.get(key)
        if opened is not None:
            return opened.worker
        found = self._batches.find(key)
        return None if found is None else self._instances.worker_of[found[0]]

    def _on_down(self, down: WorkerDown) -> None:
        if not self._instances.take_down(down):
            return
        again: set[int] = set()
        for slot in self._instances.slots[down.worker.ordinal]:
            again.update(self._remove(slot, down))
        self._refuse_if_parked()
        if again:
            self._poll()

    def _remove(self, slot: Slot, down: WorkerDown) -> Collection[int]:
        """A slot is gone. What its worker has not begun is the scheduler's again, as far as it wants that.

        All else is open until the worker's own events fail it.
        """
        unread: list[list[InFlight]] = []
        for batch in self._batches.remove(slot):
            live = [item for item in batch if item.key in self._live.by_ticket]
            if batch[0].key in down.unread:
                unread.append(live)
                continue
            for item in live:
                self._batches.open.setdefault(item.key, Open(down.worker, batch[0].key, item.queued_ns))
        waiting = [[_pending(item, ()) for item in batch if not item.cancelled] for batch in unread]
        again = self._scheduler.remove_slot(slot, [batch for batch in waiting if batch], monotonic_ns())
        text = f"Failed to process the request(s) for model instance '{down.worker.name}', message: {down.reason}"
        for item in (item for batch in unread for item in batch if item.key not in again):
            if item.cancelled:
                self._fail(item.key, CANCELLED, FailureReason.CANCELED)
            else:
                self._fail(item.key, InferenceError(ErrorCode.INTERNAL, text), FailureReason.BACKEND)
        return again

    def _refuse_if_parked(self) -> None:
        """Without a worker that runs or will, nothing is worth waiting for."""
        reason = self._instances.end_of_hope()
        if reason is None:
            self._refusal = None
            return
        refusal = InferenceError(ErrorCode.UNAVAILABLE, f"model '{self._name}' is not ready: {reason}")
        # First, because whoever is answered may ask again at once.
        self._refusal = refusal
        for key in self._scheduler.drain():
            self._fail(key, refusal, FailureReason.REJECTED)

    def _on_up(self, worker: Worker) -> None:
        if self._instances.bring_up(worker):
            self._stats.worker_restarts += 1
            self._take_up(worker)
            self._poll()

    def _take_up(self, worker: Worker) -> None:
        self._refusal = None
        for slot in self._instances.slots[worker.ordinal]:
            self._scheduler.add_slot(slot)

    def _fail_executed(self, key: int, error: InferenceError, times: BatchTimes) -> None:
        """The end of its batch answers a request with an error, before any other answer."""
        cancelled = error.code is ErrorCode.CANCELLED
        if self._stats.decoupled and key in self._live.by_ticket:
            outcome = ResponseOutcome.CANCEL if cancelled else ResponseOutcome.FAIL
            self._stats.record_response(
                0, outcome, times.output_start - times.input_end, times.end - times.output_start
            )
        self._fail(key, error, FailureReason.CANCELED if cancelled else FailureReason.BACKEND)

    def _fail(self, key: int, error: InferenceError, reason: FailureReason) -> None:
        flight = self._take(key)
        if flight is None:
            return
        self._stats.record_failure(reason, monotonic_ns() - flight.received_ns)
        self._send(key, flight, self._failure(flight.request.id, error))
        self._rest()

    def _take(self, key: int) -> InFlight | None:
        """The request's record, for its one final answer; None when it has been answered already."""
        flight = self._live.take(key)
        if flight is not None:
            self._live_count -= 1
            if self._batches.open:
                self._batches.open.pop(key, None)
        return flight

    def _send(self, key: int, flight: InFlight, response: InferenceResponse) -> None:
        if self._order is None:
            try:
                flight.on_response(response)
            except Exception as error:  # noqa: BLE001  see `_report`
                _report(error, response)
            return
        for on_response, ordered in self._order.completed(key, (flight.on_response, response), response.final):
            try:
                on_response(ordered)
            except Exception as error:  # noqa: BLE001  see `_report`
                _report(error, ordered)

    def _failure(self, request_id: str, error: InferenceError) -> InferenceResponse:
        return InferenceResponse(self._name, self._version, request_id, error=error)


def _pending(flight: InFlight, compatible: Hashable) -> Pending:
    """What the scheduler is told of a request."""
    request = flight.request
    return Pending(
        flight.key,
        flight.rows,
        flight.size_bytes,
        compatible,
        request.priority,
        request.timeout_us,
        request.sequence_id,
        request.sequence_start,
        request.sequence_end,
    )


def _report(error: Exception, response: InferenceResponse) -> None:
    """A caller that fails must not cost the others of its batch their answers."""
    about = {"model": response.model_name, "version": response.model_version, "request_id": response.id}
    log.error("answering a request of model '%s' failed", response.model_name, exc_info=error, extra=about)
