"""The requests of one model version, from admission to the final response. The stages of a request are:

1. admit: `runtime.admission` finds the version and checks the request against the version's configuration;
2. cache: the place of a response cache is in `submit`; a request that it answers is finished and not executed;
3. queue and execute: the version's executor, which is the pump of a model's instances, or an ensemble;
4. answer: `record_response` and `send` for each response that is not final, `finish` for the final one.

`finish` is the only end of a request: it removes the record, sends the response, and counts the request. Metrics and
statistics are both made from these counts, and a trace is recorded here, too.

Everything runs on the event loop's thread.
"""

import asyncio
import logging
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

from halimede.core.accounts import UNBOUNDED, Account, ByteKind, MemoryBounds
from halimede.core.config.check_request import Checked
from halimede.core.observe.stats import ModelStats, outcome_of
from halimede.core.schedule.ordering import ResponseOrder
from halimede.core.schedule.sequences.ids import DEFAULT_MAX_ID_BYTES, SequenceIds
from halimede.core.schedule.wait_graph import ANSWERED, Dependencies, WaitGraph
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.caller import Caller, Computed
from halimede.core.types.error import of_request, unavailable
from halimede.core.types.statistics import FailureReason, ResponseOutcome
from halimede.facade.server import OnResponse
from halimede.runtime.clock import monotonic_ns, wall_ms
from halimede.workers.states import MAX_STATE_BYTES, HeldStates
from halimede.workers.worker import BatchItem, Worker

log = logging.getLogger(__name__)

MAX_IN_FLIGHT_BYTES = 1 << 30

CANCELLED = InferenceError(ErrorCode.CANCELLED, "request was cancelled")
STOPPING = unavailable("Server is stopping, scheduler for model has stopped accepting new inference requests")

LOST_STATE = " (the state of its sequence is lost)"
"""Follows the reason why a request of a sequence fails with its worker."""


class Executor(Protocol):
    """Executes the requests of one version. Keys of unknown requests are ignored."""

    def start(self, flight: "InFlight", compatible: Hashable) -> None:
        """Queue or execute an admitted request. Its responses go through `flight.requests`, perhaps before this ends.

        `compatible` is equal for requests that may share a batch. UNAVAILABLE when the queue is full, INVALID_ARG for a
        request that fits no sequence; nothing has begun then.
        """

    def cancel(self, key: int, *, reads_on: bool = False) -> None:
        """The client has disconnected, or `reads_on` what a decoupled model still sends: the final response may come
        early."""

    def try_refuse(self, key: int, error: InferenceError) -> bool:
        """Finish a queued request with an error; False when it is not queued."""

    def acknowledge(self, key: int, responses: int) -> None:
        """The client has taken `responses` more responses, none of them final."""

    def is_busy(self) -> bool:
        """Whether requests are queued that no instance can take at once: only then can a circle of calls block."""

    def dependencies_of(self, key: int) -> Dependencies:
        """What the request waits for."""


@dataclass(slots=True)
class Sent:
    """The responses of a request that were sent: how many, whether one was an error, and since when (monotonic
    nanoseconds) the next one is computed."""

    last_ns: int
    count: int = 0
    has_failed: bool = False


@dataclass(slots=True)
class Open:
    """An open request: its worker answers it separately from the end of its batch.

    `first` is the key of the first request of its batch. `has_lost_state` is set if its worker has ended, and had the
    state of its sequence.
    """

    worker: Worker
    first: int
    sent: Sent
    batch_is_over: bool = False
    has_lost_state: bool = False


@dataclass(slots=True)
class InFlight(BatchItem):
    """An admitted request: its item in a batch, and the callback for its responses. Times are monotonic nanoseconds.

    One object for both, because two objects per request would cost more than the rest of the pump. `opened` is set for
    an open request only, so that a request with one response does not pay for it.
    """

    requests: "VersionRequests"
    on_response: OnResponse
    received_ns: int
    queued_ns: int
    size_bytes: int
    opened: Open | None = None
    begun_ns: int = 0
    """When its (last) execution began; 0 while it is queued."""


class RequestTable:
    """The requests in flight of all models by ticket, and the total size of their inputs.

    The queue of each model is bounded. The table bounds the sum of all queues and of what executes; a single request
    may be larger than the bound if there is memory for it.
    """

    __slots__ = ("_memory", "by_ticket", "decoded", "ids", "states", "waits")

    def __init__(
        self,
        limit_bytes: int = MAX_IN_FLIGHT_BYTES,
        *,
        memory: MemoryBounds = UNBOUNDED,
        max_state_bytes: int = MAX_STATE_BYTES,
        max_sequence_id_bytes: int = DEFAULT_MAX_ID_BYTES,
    ) -> None:
        self.by_ticket: dict[int, InFlight] = {}
        self._memory = memory
        # Its bytes are those of the front ends, or of a model: they have been asked for.
        self.decoded = Account(ByteKind.DECODED, memory.at_most(limit_bytes))
        self.states = HeldStates(memory.at_most(max_state_bytes))
        """What is kept for the sequences of all models."""
        self.ids = SequenceIds(self.states, max_sequence_id_bytes)
        self.waits = WaitGraph(self._dependencies_of)
        """The calls between models."""

    def shortage(self, size_bytes: int) -> InferenceError | None:
        """The error of a request of this size that would exceed the bound."""
        held_bytes, limit_bytes = self.decoded.held_bytes, self.decoded.limit_bytes
        if held_bytes + size_bytes <= limit_bytes:
            return None
        if not held_bytes:
            if self._memory.has_room(size_bytes):
                return None
            return unavailable(f"the inputs take {size_bytes} bytes, and the server has too little free memory")
        return unavailable(
            f"Exceeds maximum queue size: requests in flight hold {held_bytes} bytes, "
            f"and with {size_bytes} more would go over {limit_bytes}"
        )

    def add(self, flight: InFlight) -> None:
        self.by_ticket[flight.key] = flight
        self.decoded.take(flight.size_bytes)
        caller = flight.caller
        if caller is not None and caller.waiter is not None:
            self.waits.add(flight.key, caller.waiter)

    def try_remove(self, flight: InFlight) -> bool:
        """False when the request was removed before."""
        if self.by_ticket.pop(flight.key, None) is None:
            return False
        self.decoded.give_back(flight.size_bytes)
        caller = flight.caller
        if caller is not None and caller.waiter is not None:
            self.waits.remove(flight.key)
        return True

    def _dependencies_of(self, ticket: int) -> Dependencies:
        flight = self.by_ticket.get(ticket)
        return ANSWERED if flight is None else flight.requests.executor.dependencies_of(ticket)


class VersionRequests:
    """The requests of one version, made by their executor. `count` is how many are in flight, including those of
    `hold`."""

    def __init__(
        self, table: RequestTable, stats: ModelStats, executor: Executor, *, preserve_ordering: bool = False
    ) -> None:
        self.name = stats.name
        self.version = stats.version
        self.stats = stats
        self.executor = executor
        self.count = 0
        self._table = table
        self._by_ticket = table.by_ticket
        self._order = ResponseOrder[tuple[OnResponse, InferenceResponse]]() if preserve_ordering else None
        self._idle: asyncio.Event | None = None
        """Set when nothing is in flight; exists while `drained` waits."""

    def __repr__(self) -> str:
        return f"<VersionRequests {self.name}:{self.version} in_flight={self.count}>"

    def __iter__(self) -> Iterator[InFlight]:
        """Iterate over a copy, which may be changed meanwhile. Slow: it looks at the requests of all models."""
        return iter([flight for flight in self._by_ticket.values() if flight.requests is self])

    def find(self, key: int) -> InFlight | None:
        """The record of a request; None when it is finished."""
        return self._by_ticket.get(key)

    def record_of(self, key: int) -> InFlight:
        """The record of a request that is not finished; KeyError otherwise."""
        return self._by_ticket[key]

    def hold(self, size_bytes: int) -> None:
        """Reserve a place for a request that is still checked; UNAVAILABLE when too many bytes are in flight."""
        shortage = self._table.shortage(size_bytes)
        if shortage is not None:
            raise shortage
        self._table.decoded.take(size_bytes)
        self.count += 1

    def release(self, size_bytes: int) -> None:
        """Free what `hold` has reserved."""
        self._table.decoded.give_back(size_bytes)
        self.count -= 1
        self._check_idle()

    async def drained(self) -> None:
        """Wait until every request is finished."""
        # Again: a request that was checked is released before it is submitted.
        while self.count:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    def submit(
        self,
        key: int,
        request: InferenceRequest,
        checked: Checked,
        on_response: OnResponse,
        received_ns: int,
        caller: Caller | None = None,
    ) -> None:
        """Have a checked request executed. Its responses go to `on_response`, perhaps before this returns."""
        size_bytes = checked.size_bytes
        table = self._table
        now, rows = monotonic_ns(), checked.batch_size
        flight = InFlight(key, request, rows, False, self, on_response, received_ns, now, size_bytes, caller=caller)
        decoded = table.decoded
        is_short = decoded.held_bytes + size_bytes > decoded.limit_bytes
        shortage = table.shortage(size_bytes) if is_short else None
        self._add(flight)
        try:
            if shortage is not None:
                raise shortage
            self.executor.start(flight, checked.compatible)
        except InferenceError as error:
            if self._order is not None:
                self._order.withdraw(key)
            # Triton names the request in the errors of a full queue, and not in those of its sequence scheduler.
            if error.code is ErrorCode.UNAVAILABLE:
                error = InferenceError(error.code, of_request(request.id, error.message))
            self.fail(flight, error, FailureReason.REJECTED)

    def record_response(
        self, flight: InFlight, sent: Sent, response: InferenceResponse, infer_ns: int, output_ns: int
    ) -> ResponseOutcome:
        """Count a response of a request that may have several, before it is sent. Returns what it is counted as."""
        outcome = outcome_of(response)
        self.stats.record_response(sent.count, outcome, infer_ns, output_ns)
        if outcome is ResponseOutcome.SUCCESS and not sent.count:
            self.stats.record_first_response(monotonic_ns() - flight.received_ns)
        sent.count += 1
        sent.has_failed |= outcome in (ResponseOutcome.FAIL, ResponseOutcome.CANCEL)
        return outcome

    def finish(
        self,
        flight: InFlight,
        response: InferenceResponse,
        computed: Computed | None,
        queue_ns: int = 0,
        reason: FailureReason = FailureReason.OTHER,
    ) -> None:
        """Send the final response of a request and count the request. No effect when it is finished already.

        `computed` are the compute times of a success, and `queue_ns` is how long it was queued. A failure has no times
        (None) and a `reason`.
        """
        if not self._table.try_remove(flight):
            return
        self.count -= 1
        now = monotonic_ns()
        request_ns = now - flight.received_ns
        caller = flight.caller
        if computed is not None and caller is not None and caller.computed is not None:
            # Before it is sent: it may be the last response that an ensemble waits for.
            caller.computed.add(computed.input_ns, computed.infer_ns, computed.output_ns)
        # Sent before it is counted: meanwhile the client continues.
        self.send(flight, response)
        if computed is None:
            waited_ns = (flight.begun_ns or now) - flight.queued_ns
            self.stats.record_failure(reason, request_ns, max(0, waited_ns))
        else:
            self.stats.record_success(
                flight.rows, request_ns, queue_ns, computed.input_ns, computed.infer_ns, computed.output_ns, wall_ms()
            )
        if self._idle is not None:
            self._check_idle()

    def fail(self, flight: InFlight, error: InferenceError, reason: FailureReason) -> None:
        """Finish a request with an error."""
        self.finish(flight, self.failure(flight, error), None, reason=reason)

    def send(self, flight: InFlight, response: InferenceResponse) -> None:
        """Send a response; with `preserve_ordering`, once those of all earlier requests are sent."""
        if self._order is None:
            _send(flight.on_response, response)
            return
        for on_response, ordered in self._order.completed(flight.key, (flight.on_response, response), response.final):
            _send(on_response, ordered)

    def failure(self, flight: InFlight, error: InferenceError, *, final: bool = True) -> InferenceResponse:
        """The response that carries an error."""
        return InferenceResponse(self.name, self.version, flight.request.id, error=error, final=final)

    def _add(self, flight: InFlight) -> None:
        self._table.add(flight)
        self.count += 1
        if self._order is not None:
            self._order.enqueued(flight.key)

    def _check_idle(self) -> None:
        if self._idle is not None and not self.count:
            self._idle.set()
            self._idle = None


def _send(on_response: OnResponse, response: InferenceResponse) -> None:
    try:
        on_response(response)
    except Exception:
        # The other requests of the batch must still get their responses.
        about = {"model": response.model_name, "version": response.model_version, "request_id": response.id}
        log.exception("answering a request of model '%s' failed", response.model_name, extra=about)
