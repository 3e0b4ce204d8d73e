"""The pump of one model version: performs what its scheduler decides.

Everything here runs on the event loop's thread, in synchronous steps: start, cancel, a worker's event, a timer. After
every step that can free capacity or form a batch the scheduler is polled, its actions are performed in order, and one
timer is armed at `wake_at`. The scheduler decides whether it is polled at once or at the end of the loop's turn, so
that requests of one turn run together; a request that is alone in the model does not wait for that. A request costs one
record and one callback: no task, no future.

A request that a worker has received ends in one of these ways:

- The end of its batch answers it. Most requests end so.
- It is open (`runtime.batch_answers`) until its final response.
- Its worker goes down: the request is open until the worker's own events fail it.
- Its model requests another execution, and sends its final response before that: the request leaves the queue.

A slot of a worker that is down gets no batch. Requests wait as long as one worker will be restarted.
"""

import asyncio
import logging
from collections.abc import Callable, Hashable

from halimede.core.config.check_request import RequestChecker
from halimede.core.observe.load import Load
from halimede.core.schedule.actions import Fail, Forget, Slot, Warn
from halimede.core.schedule.prefetch import TakeBack
from halimede.core.schedule.scheduler import Outcome, Pending, Scheduler
from halimede.core.schedule.wait_graph import Dependencies
from halimede.core.types import InferenceError
from halimede.core.types.error import EndedSequenceError, internal, unavailable
from halimede.core.types.server import WorkerHealth
from halimede.core.types.statistics import FailureReason
from halimede.runtime.alarm import Alarm, TurnEnd
from halimede.runtime.batch_answers import BatchAnswers
from halimede.runtime.batches import RunningBatches
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.executor import MakeRequests
from halimede.runtime.instances import Instances
from halimede.runtime.request_locator import RequestLocator
from halimede.runtime.requests import CANCELLED, LOST_STATE, STOPPING, InFlight, Open, Sent, VersionRequests
from halimede.workers.worker import BatchDone, ResponseSent, Worker, WorkerDown, WorkerEvent

log = logging.getLogger(__name__)


class Pump:
    """Implements `runtime.executor.VersionExecutor` with the instances of a model."""

    def __init__(
        self,
        make_scheduler: Callable[[TakeBack], Scheduler],
        make_requests: MakeRequests,
        checker: RequestChecker,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        scheduler = self._scheduler = make_scheduler(self._take_back)
        requests = self.requests = make_requests(self)
        self.refusal: InferenceError | None = None
        self._instances = Instances()
        self._batches = RunningBatches()
        self._answers = BatchAnswers(requests, self._batches, checker, has_null_rows=scheduler.has_null_rows)
        self._locator = RequestLocator(requests, scheduler, self._instances, self._batches)
        self._turn_end = TurnEnd(loop, self._poll)
        self._alarm = Alarm(loop, self._poll)

    def __repr__(self) -> str:
        requests = self.requests
        return (
            f"<Pump {requests.name}:{requests.version} queue={self._scheduler.queued} "
            f"running={len(self._batches.running)}/{self._instances.capacity} live={requests.count}>"
        )

    @property
    def queued(self) -> int:
        return self._scheduler.queued

    def worker_health(self) -> WorkerHealth:
        return self._instances.health()

    def load(self) -> Load:
        now, scheduler = monotonic_ns(), self._scheduler
        since = scheduler.oldest_enqueued_at()
        return Load(
            scheduler.queued,
            self.requests.count - scheduler.queued,
            0 if since is None else max(0, now - since),
            self._instances.parked,
            self._instances.unstartable,
            self._batches.busy(now),
            scheduler.sequences(),
        )

    def is_available(self) -> bool:
        """Whether an instance is up, or the model has only passive instances."""
        return self._instances.capacity > 0 or not self._instances.workers

    async def is_ready(self) -> bool:
        return await self._instances.is_ready()

    def add_worker(self, worker: Worker) -> None:
        self._batches.add(worker.ordinal, monotonic_ns())
        if self._instances.add(worker):
            self._take_up(worker)
        else:
            self._refuse_if_down()
        self._poll()

    def add_passive(self, worker: Worker) -> None:
        """Add an instance that is never scheduled: its backend uses it."""
        self._instances.add_passive(worker)

    def start(self, flight: InFlight, compatible: Hashable) -> None:
        """See `runtime.requests.Executor.start`."""
        if self.refusal is not None:
            self.requests.fail(flight, self.refusal, FailureReason.REJECTED)
            return
        scheduler = self._scheduler
        if scheduler.is_iterative:
            # The ticket identifies the sequence: no other request of the server has it.
            request = flight.request
            request.sequence_id, request.sequence_start, request.sequence_end = flight.key, True, False
        if self.requests.count == 1:
            # Alone in the model: no other request exists to share a batch with.
            slot = scheduler.try_start(flight.rows, flight.request.form.timeout_us)
            if slot is not None:
                self._execute(slot, [flight], flight.queued_ns)
                return
        turns = scheduler.enqueue(_pending(flight, compatible), flight.queued_ns)
        if turns is not None:
            self._turn_end.set(turns)
        elif scheduler.may_expire:
            self._alarm.set(scheduler.wake_at())

    def cancel(self, key: int, *, reads_on: bool = False) -> None:
        """Drop a queued request; notify the worker if the request executes or is open.

        With `reads_on`, a request that executes continues, and its model may ignore the cancellation, as in Triton. Not
        those of sequences: their later requests are cancelled too.
        """
        flight = self.requests.find(key)
        if flight is None or flight.cancelled:
            return
        if reads_on and self.requests.stats.decoupled and not self._scheduler.follows_outcomes:
            worker = self._locator.worker_of(flight)
            if worker is not None:
                if self._instances.is_up(worker):
                    worker.ask_cancel(key)
                return
        flight.cancelled = True
        if self._scheduler.try_cancel(key):
            if flight.opened is not None and self._instances.is_up(flight.opened.worker):
                # It was executed before, and its model may still work for it.
                flight.opened.worker.cancel(key)
            self.requests.fail(flight, CANCELLED, FailureReason.CANCELED)
            self._poll()
            return
        worker = self._locator.worker_of(flight)
        if worker is not None and self._instances.is_up(worker):
            worker.cancel(key)
        self._answers.abandon(flight)
        if self._scheduler.follows_outcomes:
            # For queued requests that are cancelled with it.
            self._poll()

    def try_refuse(self, key: int, error: InferenceError) -> bool:
        """See `runtime.requests.Executor.try_refuse`."""
        if not self._scheduler.try_cancel(key):
            return False
        _fail(self.requests, key, error, FailureReason.REJECTED)
        self._poll()
        return True

    def is_busy(self) -> bool:
        # An instance that is down is free when it comes back. A request of a sequence waits for one instance only.
        is_full = len(self._batches.running) >= len(self._instances.worker_of) or self._scheduler.follows_outcomes
        return is_full and self._scheduler.queued > 0

    def dependencies_of(self, key: int) -> Dependencies:
        return self._locator.dependencies_of(key)

    def acknowledge(self, key: int, responses: int) -> None:
        """Notify the worker of an open request."""
        flight = self.requests.find(key)
        if flight is not None and flight.opened is not None and self._instances.is_up(flight.opened.worker):
            flight.opened.worker.acknowledge(key, responses)

    def on_event(self, event: WorkerEvent) -> None:
        """Perform what an event of a worker causes. Called on the loop's thread."""
        if isinstance(event, BatchDone):
            if event.again:
                _repeat(event, self.requests)
            slot = self._instances.slots[event.worker.ordinal][event.slot]
            # After the end of its worker a batch frees no slot: the slot is removed, or runs another batch.
            if self._batches.try_end(slot, event.items[0].key, monotonic_ns()):
                outcomes = _outcomes(event, self.requests) if self._scheduler.follows_outcomes else ()
                turns = self._scheduler.completed(slot, event.times.end - event.times.start, outcomes)
                if turns is not None:
                    self._turn_end.set(turns)
            self._answers.on_batch_end(event)
        elif isinstance(event, ResponseSent):
            # Before the answer: its callback may cause a poll, which must not execute a finished request.
            scheduler = self._scheduler
            ends = event.final and scheduler.is_iterative and self._answers.is_open(event)
            leaves_queue = ends and scheduler.try_cancel(event.key)
            self._answers.on_response(event)
            if leaves_queue:
                self._turn_end.set(1)
        elif isinstance(event, WorkerDown):
            self._on_down(event)
        else:
            self._on_up(event.worker)

    def abort(self) -> None:
        """Finish all requests with an error. Workers are notified to cancel what they execute."""
        for key in self._scheduler.drain():
            _fail(self.requests, key, STOPPING, FailureReason.OTHER)
        # Not by `worker_of`, which searches all batches for each request.
        for slot, batch in self._batches:
            for item in batch:
                self._instances.worker_of[slot].cancel(item.key)
        for flight in self.requests:
            if flight.opened is not None and self._instances.is_up(flight.opened.worker):
                flight.opened.worker.cancel(flight.key)
            flight.cancelled = True
            self.requests.fail(flight, STOPPING, FailureReason.OTHER)

    def expect_few(self) -> None:
        self._scheduler.expect_few(monotonic_ns())
        self._poll()

    def expect_no_more(self) -> None:
        self._scheduler.expect_no_more()
        self._poll()

    async def close(self) -> None:
        """Wait until every request is finished, then stop all workers at once: each may take long."""
        await self.requests.drained()
        self._alarm.set(None)
        await self._instances.stop()

    def wake(self) -> None:
        """Poll soon: another pump's scheduler has freed a resource that this scheduler may wait for."""
        self._turn_end.set(1)

    def _poll(self) -> None:
        now = monotonic_ns()
        for action in self._scheduler.poll(now):
            if isinstance(action, Fail):
                _fail(self.requests, action.request, action.error, action.reason)
                continue
            if isinstance(action, Warn):
                about = {"model": self.requests.name, "version": self.requests.version}
                log.warning("%s", action.text, extra=about)
                continue
            if isinstance(action, Forget):
                self._instances.worker_of[action.slot].forget(action.sequence_slot)
                continue
            batch = [self.requests.record_of(key) for key in action.requests]
            if action.sequence_slots:
                for flight, sequence_slot in zip(batch, action.sequence_slots, strict=True):
                    flight.sequence_slot = sequence_slot
            self._execute(action.slot, batch, now)
        self._alarm.set(self._scheduler.wake_at())

    def _execute(self, slot: Slot, batch: list[InFlight], now_ns: int) -> None:
        worker = self._instances.worker_of[slot]
        self._batches.begin(slot, batch, now_ns)
        if self._scheduler.follows_outcomes:
            for flight in batch:
                if flight.opened is not None:
                    # It was executed before and is open since.
                    opened = flight.opened
                    opened.worker, opened.first, opened.batch_is_over = worker, batch[0].key, False
        worker.execute([*batch], slot.number)

    def _take_back(self, slot: Slot) -> bool:
        """See `core.schedule.prefetch.TakeBack`."""
        if not self._instances.worker_of[slot].take_back(slot.number):
            return False
        self._batches.take_back(slot)
        return True

    def _on_down(self, down: WorkerDown) -> None:
        if not self._instances.take_down(down):
            return
        # Requests fail after all slots are removed: a callback may submit a request, which must not get such a slot.
        lost = [flight for slot in self._instances.slots[down.worker.ordinal] for flight in self._remove(slot, down)]
        self._refuse_if_down()
        text = f"Failed to process the request(s) for model instance '{down.worker.name}', message: {down.reason}"
        if self._scheduler.follows_outcomes:
            text += LOST_STATE
        for flight in lost:
            if flight.cancelled:
                self.requests.fail(flight, CANCELLED, FailureReason.CANCELED)
            else:
                self.requests.fail(flight, internal(text), FailureReason.BACKEND)
        # For what was queued again, and for queued requests that have lost their sequence with the slot.
        self._poll()

    def _remove(self, slot: Slot, down: WorkerDown) -> list[InFlight]:
        """Remove a slot. Requests that the worker has not begun return to the scheduler if it takes them back.

        Returns the requests of batches that were not begun and that the scheduler does not take back. All other
        requests are open until the worker's own events fail them.
        """
        unread: list[list[InFlight]] = []
        for batch in self._batches.remove(slot, monotonic_ns()):
            unfinished = [flight for flight in batch if self.requests.find(flight.key) is not None]
            if batch[0].key in down.unread:
                unread.append(unfinished)
                continue
            for flight in unfinished:
                if flight.opened is None:
                    flight.opened = Open(down.worker, batch[0].key, Sent(flight.queued_ns))
                flight.opened.has_lost_state = self._scheduler.follows_outcomes
        # A worker may answer a request of a batch that it has not read. The client must not get that response twice.
        may_have_response = self._scheduler.follows_outcomes
        waiting = [
            [
                _pending(flight, ())
                for flight in batch
                if not flight.cancelled and (flight.opened is None or may_have_response)
            ]
            for batch in unread
        ]
        again = self._scheduler.remove_slot(slot, [batch for batch in waiting if batch], monotonic_ns())
        for batch in unread:
            for flight in batch:
                flight.begun_ns = 0
        return [flight for batch in unread for flight in batch if flight.key not in again]

    def _refuse_if_down(self) -> None:
        """Refuse all requests when no worker runs or will be restarted soon."""
        reason = self._instances.lasting_failure()
        if reason is None:
            self.refusal = None
            return
        name = self.requests.name
        refusal = unavailable(f"model '{name}' is not ready: {reason}")
        # Before the queued requests are answered: their clients may send the next request at once.
        self.refusal = refusal
        for key in self._scheduler.drain():
            _fail(self.requests, key, refusal, FailureReason.REJECTED)

    def _on_up(self, worker: Worker) -> None:
        if self._instances.bring_up(worker):
            self.requests.stats.worker_restarts += 1
            self._take_up(worker)
            self._poll()

    def _take_up(self, worker: Worker) -> None:
        self.refusal = None
        for slot in self._instances.slots[worker.ordinal]:
            self._scheduler.add_slot(slot)


def _fail(requests: VersionRequests, key: int, error: InferenceError, reason: FailureReason) -> None:
    requests.fail(requests.record_of(key), error, reason)


def _pending(flight: InFlight, compatible: Hashable) -> Pending:
    """The scheduler's view of a request."""
    request = flight.request
    return Pending(
        flight.key,
        flight.rows,
        flight.size_bytes,
        compatible,
        request.form.priority,
        request.form.timeout_us,
        request.sequence_id,
        request.sequence_start,
        request.sequence_end,
        request,
    )


def _repeat(done: BatchDone, requests: VersionRequests) -> None:
    """Prepare the requests of a batch that are to be executed again: only the first execution has START.

    They are open, because their model may respond to them before the next execution.
    """
    for at in done.again:
        done.items[at].request.sequence_start = False
        flight = requests.find(done.items[at].key)
        if flight is None:
            continue
        # The time of an execution is no time in the queue.
        flight.queued_ns += done.times.end - done.times.start
        flight.begun_ns = 0
        if flight.opened is None:
            flight.opened = Open(done.worker, done.items[0].key, Sent(done.times.input_end))


def _outcomes(done: BatchDone, requests: VersionRequests) -> list[Outcome]:
    """The outcome of each request of a batch, for schedulers that need it."""
    outcomes = []
    for at, item in enumerate(done.items):
        if item.cancelled:
            outcomes.append(Outcome.GONE)
        elif isinstance(done.replies[at], EndedSequenceError):
            outcomes.append(Outcome.ENDED)
        elif at in done.again and requests.find(item.key) is not None:
            outcomes.append(Outcome.AGAIN)
        else:
            outcomes.append(Outcome.DONE)
    return outcomes
