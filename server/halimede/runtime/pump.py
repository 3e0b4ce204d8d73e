"""The pump of one model version: performs what its scheduler decides.

Everything here runs on the event loop's thread, in synchronous steps: submit, cancel, a worker's event, a timer. After
every step that can free capacity or form a batch the scheduler is polled, its actions are performed in order, and one
timer is armed at `wake_at`. Requests and ends of batches are followed by one poll as the loop's turn ends, so that what
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
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from halimede.core.config.check_request import Checked, RequestChecker
from halimede.core.observe.stats import ModelStats, outcome_of
from halimede.core.schedule.actions import Execute
from halimede.core.schedule.company import Company
from halimede.core.schedule.ordering import ResponseOrder
from halimede.core.schedule.scheduler import Pending, Scheduler
from halimede.core.schedule.waits import Held, Place, Queued
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.caller import Caller
from halimede.core.types.error import of_request
from halimede.core.types.statistics import FailureReason, ResponseOutcome
from halimede.runtime.clock import monotonic_ns, wall_ms
from halimede.runtime.live import Account, InFlight, LiveRequests
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


class RunningBatch(NamedTuple):
    """A batch that runs: by its model, and by its first request, which runs once."""

    model: str
    version: str
    first: int


class Answers(NamedTuple):
    """What the requests of a batch get, while it runs or afterwards: its instance does not wait for that."""

    batch: RunningBatch


class Instance(NamedTuple):
    """All that an instance does: its code holds up every batch of it."""

    pump: "Pump"
    ordinal: int


class Beside(NamedTuple):
    """What an instance's code does on its own: nobody knows who waits for that."""

    instance: Instance


@dataclass(slots=True)
class Open:
    """What is known of an open request: beside its record, so that a request that is answered once does not pay for it.

    `first` is the first request of its batch, `answers` are those that were sent, `last_ns` is when the last of them
    was, before it when the batch began to compute, `has_failed` whether one was an error.
    """

    worker: Worker
    first: int
    last_ns: int
    batch_is_over: bool = False
    answers: int = 0
    has_failed: bool = False


SLOT_STRIDE = 256
"""A scheduler knows one instance per slot of a worker, ordinal + slot * SLOT_STRIDE: no model has more instances."""

LONGEST_SLEEP_MS = 3_600_000
"""A request's own timeout may be thousands of years, which no timer takes."""


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
        self._workers: dict[int, Worker] = {}
        self._passive: list[Worker] = []
        self._down: dict[int, WorkerDown] = {}
        self._refusal: InferenceError | None = None
        # By the scheduler's instances: where each is, and the batch that it runs. `_capacity` are those that are up.
        self._slots: dict[int, tuple[Worker, int]] = {}
        self._running: dict[int, list[InFlight]] = {}
        self._capacity = 0
        # Of the batch that called last, by its first request: most batches call more than once.
        self._caller: tuple[int, Caller] | None = None
        self._open: dict[int, Open] = {}
        self._company = Company(scheduler.max_batch_size)
        self._polls_soon = False
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._timer_at: int | None = None

    def __repr__(self) -> str:
        return (
            f"<Pump {self._name}:{self._version} queue={self._scheduler.queued} "
            f"running={len(self._running)}/{self._capacity} live={self._live_count}>"
        )

    @property
    def queued(self) -> int:
        return self._scheduler.queued

    @property
    def executing(self) -> int:
        return self._live_count - self._scheduler.queued

    @property
    def parked(self) -> int:
        return sum(down.parked for down in self._down.values())

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
        return self._capacity > 0 or not self._workers

    async def is_ready(self) -> bool:
        """Whether an instance is up and, where its model has a say in that, says that it is ready."""
        up = [worker for worker in self._workers.values() if worker.ordinal not in self._down]
        if not up:
            return not self._workers
        # All are asked at once and the first yes is enough: one that is busy may answer late.
        asked = [self._loop.create_task(worker.is_ready()) for worker in up]
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    return True
        finally:
            for task in asked:
                task.cancel()
        return False

    def add_worker(self, worker: Worker) -> None:
        self._workers[worker.ordinal] = worker
        for slot, instance in enumerate(_instances(worker)):
            self._slots[instance] = worker, slot
        if worker.ordinal in self._down:
            self._refuse_if_parked()
        else:
            self._take_up(worker)
        self._poll()

    def add_passive(self, worker: Worker) -> None:
        """An instance that is loaded and never scheduled: its backend uses it."""
        self._passive.append(worker)

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
        instance = None
        try:
            live = self._live
            if live.size_bytes + size_bytes > live.limit_bytes:
                live.check_room(size_bytes)
            if not self._live_count and self._company.share == 1:
                # Alone in the model: there is nobody to share a batch or to wait for.
                instance = self._scheduler.try_start(rows)
            if instance is None:
                pending = Pending(
                    key,
                    rows,
                    size_bytes,
                    checked.compatible,
                    request.priority,
                    request.timeout_us,
                    request.sequence_id,
                    request.sequence_start,
                    request.sequence_end,
                )
                self._scheduler.enqueue(pending, now)
        except InferenceError as error:
            self._stats.record_failure(FailureReason.REJECTED, now - received_ns)
            error = InferenceError(error.code, of_request(request.id, error.message))
            on_response(self._failure(request.id, error))
            return
        if self._order is not None:
            self._order.enqueued(key)
        flight = InFlight(key, request, rows, False, self, on_response, received_ns, now, size_bytes, caller)
        self._accept(key, flight)
        if instance is not None:
            self._execute(instance, [flight])
        elif len(self._running) < self._capacity:
            self._poll_soon()
        elif self._scheduler.may_expire:
            self._arm(self._scheduler.wake_at())

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
        if worker is not None and worker.ordinal not in self._down:
            worker.cancel(key)
        opened = self._open.get(key)
        if opened is not None and opened.batch_is_over:
            self._forget(key, opened)

    def refuse(self, key: int, error: InferenceError) -> None:
        """See `Acceptor.refuse`."""
        flight = self._live.by_ticket.get(key)
        if flight is None:
            return
        was_queued = self._scheduler.try_cancel(key)
        if not was_queued:
            flight.cancelled = True
            worker = self._worker_of(key)
            if worker is not None and worker.ordinal not in self._down:
                worker.cancel(key)
        self._fail(key, error, FailureReason.REJECTED)
        if was_queued:
            self._poll()

    def is_busy(self) -> bool:
        # An instance that is down comes back free.
        return len(self._running) >= len(self._slots) and self._scheduler.queued > 0

    def place_of(self, key: int) -> Place:
        """Whose turn a request waits for."""
        for instance, batch in self._running.items():
            for item in batch:
                if item.key == key:
                    holders = self._holders(instance)
                    return Held((*holders, Answers(self._name_of(batch[0].key))))
        opened = self._open.get(key)
        if opened is not None:
            return Held((self.instance(opened.worker.ordinal), Answers(self._name_of(opened.first))))
        if key not in self._live.by_ticket:
            return None
        # An instance that is down comes back free.
        return Queued([self._holders(instance) for instance in self._slots])

    def _holders(self, instance: int) -> Sequence[Hashable]:
        """What holds up one of the scheduler's instances."""
        batch = self.batch_on(instance)
        whole = self.instance(instance % SLOT_STRIDE)
        return (whole,) if batch is None else (whole, batch)

    def _name_of(self, first: int) -> RunningBatch:
        return RunningBatch(self._name, self._version, first)

    def instance(self, ordinal: int) -> Instance:
        return Instance(self, ordinal)

    def batch_on(self, instance: int) -> "RunningBatch | None":
        """What runs on one of the scheduler's instances, named so that no other batch ever has the same name."""
        batch = self._running.get(instance)
        return RunningBatch(self._name, self._version, batch[0].key) if batch else None

    def caller_on(self, instance: int) -> Caller:
        """Who calls from the batch that runs there: as deep as the calls that led to it, and one more."""
        batch = self._running.get(instance)
        if not batch:
            return Caller(1)
        key = batch[0].key
        made = self._caller
        if made is None or made[0] != key:
            callers = [item.caller for item in batch]
            depth = max((caller.depth for caller in callers if caller is not None), default=0)
            made = self._caller = key, Caller(depth + 1, self.batch_on(instance))
        return made[1]

    def caller_beside(self, ordinal: int, keys: Iterable[int]) -> Caller:
        """Who calls beside an instance's batches, for one or some of these requests of it, as deep as any of them.

        When all are of one batch their answers wait for it. Otherwise nobody knows which do.
        """
        depth = 0
        firsts: set[int] = set()
        for key in keys:
            flight = self._live.by_ticket.get(key)
            if flight is None:
                continue
            if flight.caller is not None:
                depth = max(depth, flight.caller.depth)
            if len(firsts) < 2 and (first := self._first_of(key)) is not None:
                firsts.add(first)
        waiter = Answers(self._name_of(firsts.pop())) if len(firsts) == 1 else Beside(self.instance(ordinal))
        return Caller(depth + 1, waiter)

    def _first_of(self, key: int) -> int | None:
        """The first request of a request's batch, None while it has none."""
        opened = self._open.get(key)
        if opened is not None:
            return opened.first
        batches = (batch for batch in self._running.values() if any(item.key == key for item in batch))
        return next((batch[0].key for batch in batches), None)

    def acknowledge(self, key: int, responses: int) -> None:
        """The client took so many more answers, none of them final; ignored when the request is not open any more."""
        opened = self._open.get(key)
        if opened is not None and opened.worker.ordinal not in self._down:
            opened.worker.acknowledge(key, responses)

    def on_event(self, event: WorkerEvent) -> None:
        """What a worker reports. Called on the loop's thread."""
        if isinstance(event, BatchDone):
            instance = event.worker.ordinal + event.slot * SLOT_STRIDE
            batch = self._running.get(instance)
            # The end of a batch that its worker's death took with it frees nothing: the slot is gone, or taken again.
            if batch is not None and batch[0].key == event.items[0].key:
                del self._running[instance]
                self._company.note(self._live_count, self._capacity, event.times.end - event.times.start)
                if self._scheduler.completed(instance):
                    self._poll_soon(waits=False)
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
        for instance, batch in self._running.items():
            for item in batch:
                self._slots[instance][0].cancel(item.key)
        for key, opened in self._open.items():
            if opened.worker.ordinal not in self._down:
                opened.worker.cancel(key)
        for key, flight in list(self._live.by_ticket.items()):
            if flight.pump is self:
                flight.cancelled = True
                self._fail(key, STOPPING, FailureReason.OTHER)

    async def close(self) -> None:
        """Wait until every accepted request is answered, then stop the workers, side by side: one may take long."""
        await self.drained()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(worker.stop() for worker in (*self._workers.values(), *self._passive)))

    def _poll_soon(self, *, waits: bool = True) -> None:
        """Poll as this turn of the loop ends, so that all that comes in it shares a batch; for one alone at once.

        Where more are likely to come, one turn later if it `waits`, or as soon as they are there.
        """
        share = self._company.share
        if self._live_count == 1 if share == 1 else self._scheduler.queued >= share:
            self._poll()
        elif not self._polls_soon:
            self._polls_soon = True
            if waits and share > 1:
                self._loop.call_soon(self._loop.call_soon, self._poll_now)
            else:
                self._loop.call_soon(self._poll_now)

    def _poll_now(self) -> None:
        self._polls_soon = False
        self._poll()

    def _poll(self) -> None:
        by_ticket = self._live.by_ticket
        for action in self._scheduler.poll(monotonic_ns()):
            if isinstance(action, Execute):
                self._execute(action.instance, [by_ticket[key] for key in action.requests])
            else:
                self._fail(action.request, action.error, action.reason)
        self._arm(self._scheduler.wake_at())

    def _execute(self, instance: int, batch: list[InFlight]) -> None:
        self._running[instance] = batch
        worker, slot = self._slots[instance]
        worker.execute([*batch], slot)

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
        wall = wall_ms()
        stats, live, is_open = self._stats, self._live, self._open
        rows = 0
        for at, (item, reply) in enumerate(zip(done.items, done.replies, strict=True)):
            rows += item.rows
            key = item.key
            if not isinstance(reply, list) or (is_open and key in is_open):
                self._answer_otherwise(item, done, reply, done.parameters.get(at))
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
        self, item: BatchItem, done: BatchDone, reply: Outputs | InferenceError | None, parameters: Parameters | None
    ) -> None:
        """Not by the first and only answer: with an error, or of a request that is open or will be."""
        if reply is None or item.key in self._open:
            self._end_batch_of(item, done, reply, parameters)
        elif isinstance(reply, InferenceError):
            self._fail_executed(item.key, reply, done.times)

    def _end_batch_of(
        self, item: BatchItem, done: BatchDone, reply: Outputs | InferenceError | None, parameters: Parameters | None
    ) -> None:
        """The batch of a request that is open, or will be from now on, is over."""
        flight = self._live.by_ticket.get(item.key)
        if flight is None:
            return
        opened = self._open.get(item.key)
        if opened is None:
            opened = self._open[item.key] = Open(done.worker, done.items[0].key, done.times.input_end)
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
        opened = self._open.get(sent.key)
        if opened is None and (batch := self._batch_of(sent.worker, sent.key)):
            opened = self._open[sent.key] = Open(sent.worker, batch[0].key, sent.times.input_end)
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
        opened = self._open.get(key)
        if opened is not None:
            return opened.worker
        for instance, batch in self._running.items():
            for item in batch:
                if item.key == key:
                    return self._slots[instance][0]
        return None

    def _batch_of(self, worker: Worker, key: int) -> Sequence[InFlight]:
        """The batch that a worker runs a request in, empty when it does not."""
        batches = (self._running.get(instance, ()) for instance in _instances(worker))
        return next((batch for batch in batches if any(item.key == key for item in batch)), ())

    def _on_down(self, down: WorkerDown) -> None:
        worker = down.worker
        self._down[worker.ordinal] = down
        if worker.ordinal not in self._workers:
            return  # passive, or still to be added
        for instance in _instances(worker):
            self._scheduler.remove_instance(instance)
            batch = self._running.pop(instance, [])
            for item in batch:
                if item.key in self._live.by_ticket:
                    self._open.setdefault(item.key, Open(worker, batch[0].key, item.queued_ns))
        self._count_capacity()
        self._refuse_if_parked()

    def _refuse_if_parked(self) -> None:
        """Without a worker that runs or will, nothing is worth waiting for."""
        downs = [self._down[ordinal] for ordinal in self._workers if ordinal in self._down]
        if len(downs) < len(self._workers) or not all(down.parked for down in downs):
            self._refusal = None
            return
        refusal = InferenceError(ErrorCode.UNAVAILABLE, f"model '{self._name}' is not ready: {downs[-1].reason}")
        # First, because whoever is answered may ask again at once.
        self._refusal = refusal
        for key in self._scheduler.drain():
            self._fail(key, refusal, FailureReason.REJECTED)

    def _on_up(self, worker: Worker) -> None:
        if self._down.pop(worker.ordinal, None) is None or worker.ordinal not in self._workers:
            return
        self._stats.worker_restarts += 1
        self._take_up(worker)
        self._poll()

    def _take_up(self, worker: Worker) -> None:
        self._refusal = None
        for instance in _instances(worker):
            self._scheduler.add_instance(instance)
        self._count_capacity()

    def _count_capacity(self) -> None:
        self._capacity = sum(
            worker.concurrency for worker in self._workers.values() if worker.ordinal not in self._down
        )

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
            if self._open:
                self._open.pop(key, None)
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


def _instances(worker: Worker) -> Iterator[int]:
    """The scheduler's instances that a worker's slots are, in the order of the slots."""
    return (worker.ordinal + slot * SLOT_STRIDE for slot in range(worker.concurrency))


def _report(error: Exception, response: InferenceResponse) -> None:
    """A caller that fails must not cost the others of its batch their answers."""
    about = {"model": response.model_name, "version": response.model_version, "request_id": response.id}
    log.error("answering a request of model '%s' failed", response.model_name, exc_info=error, extra=about)
