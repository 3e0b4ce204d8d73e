"""The requests of one ensemble's version: performs what their runs decide.

A run (`core.ensemble.run`) decides which steps are called, with what, and what the answer is. Here its calls are made
as any other inference, and their answers given back to it. There is no task and no future per request or step, and
nothing is copied. A call may be answered before `infer` returns; that answer waits in a queue until what was decided
before is done, so that nothing recurses however long the graph is.

Calls above `max_inflight_requests` wait at their step's gate. One for which a model's own code waits goes on at once:
what is under way there may wait for that model.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from halimede.core.config.check_request import Checked, RequestChecker
from halimede.core.ensemble.admission import Gate, Key
from halimede.core.ensemble.graph import Graph
from halimede.core.ensemble.run import Acknowledge, CallStep, EnsembleRun, GiveAnswer, RunAction
from halimede.core.observe.stats import ModelStats, outcome_of
from halimede.core.schedule.waits import Held, Place
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.caller import Caller, Computed
from halimede.core.types.error import of_request
from halimede.core.types.server import WorkerHealth
from halimede.core.types.statistics import FailureReason, ResponseOutcome
from halimede.runtime.acceptor import Acceptor
from halimede.runtime.alarm import Alarm
from halimede.runtime.clock import monotonic_ns, wall_ms
from halimede.runtime.live import Account, InFlight, LiveRequests
from halimede.runtime.pump import CANCELLED, STOPPING
from halimede.runtime.server import OnResponse

log = logging.getLogger(__name__)

MAX_REQUESTS = 4096
"""Requests of one ensemble in flight."""

NS_PER_US = 1000


class Inferences(Protocol):
    """The part of a server that an ensemble uses."""

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller | None = None) -> int: ...

    def cancel(self, ticket: int) -> None: ...

    def acknowledge(self, ticket: int, responses: int = 1) -> None: ...


@dataclass(slots=True)
class EnsembleRequest(InFlight):
    """One accepted request. `calls` are those under way, by number, with their tickets, 0 where there is none yet.

    `answers` were sent, of which the client has not taken `ahead` yet; `held` are the calls whose models are told of an
    answer that it was taken once the client goes on. `waited_ns` is what its calls spent at gates, `computed` what they
    took to compute. `last_ns` is when it began or was answered last.
    """

    run: EnsembleRun
    steps_caller: Caller
    computed: Computed
    last_ns: int
    calls: dict[int, int] = field(default_factory=dict)
    answers: int = 0
    ahead: int = 0
    held: list[int] = field(default_factory=list)
    has_failed: bool = False
    waited_ns: int = 0
    is_over: bool = False


@dataclass(slots=True)
class Waiting:
    """A call at its step's gate, since when."""

    flight: EnsembleRequest
    action: CallStep
    since_ns: int


Decide = Callable[..., Sequence[RunAction]]


class Ensemble(Account):
    """Implements `runtime.acceptor.Acceptor`. `members` are the acceptors of the steps' models, None for one that does
    not serve."""

    def __init__(
        self,
        version: str,
        graph: Graph,
        stats: ModelStats,
        live: LiveRequests,
        inferences: Inferences,
        members: Callable[[], Sequence[Acceptor | None]],
        checker: RequestChecker,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(live)
        self._name = graph.name
        self._version = version
        self._graph = graph
        self._stats = stats
        self._inferences = inferences
        self._members = members
        self._checker = checker
        self._reshapes = checker.reshapes_outputs
        limit = graph.max_inflight_requests
        self._gates = [Gate(limit) for _ in graph.steps] if limit else []
        self._waiting: dict[Key, Waiting] = {}
        self._alarm = Alarm(loop, self._expire)
        self._events: deque[tuple[EnsembleRequest, Decide, tuple[Any, ...]]] = deque()
        self._is_acting = False

    def __repr__(self) -> str:
        waiting = f" waiting={len(self._waiting)}" if self._gates else ""
        return (
            f"<Ensemble {self._name}:{self._version} steps={len(self._graph.steps)} live={self._live_count}{waiting}>"
        )

    @property
    def queued(self) -> int:
        """Those that have a call at a gate; all others have begun as they were accepted."""
        return len({key for key, _ in self._waiting})

    @property
    def executing(self) -> int:
        return self._live_count - self.queued

    @property
    def parked(self) -> int:
        return 0

    def worker_health(self) -> WorkerHealth:
        return WorkerHealth()

    def oldest_wait_ns(self) -> int:
        """How long the oldest call has waited at its gate; 0 when none waits."""
        # They stand in the order in which they came.
        oldest = next(iter(self._waiting.values()), None)
        return 0 if oldest is None else max(0, monotonic_ns() - oldest.since_ns)

    @property
    def refusal(self) -> InferenceError | None:
        for member in self._members():
            if member is not None and member.refusal is not None:
                text = f"ensemble '{self._name}' is not ready: {member.refusal.message}"
                return InferenceError(member.refusal.code, text)
        return None

    def is_available(self) -> bool:
        return all(member is not None and member.is_available() for member in self._members())

    async def is_ready(self) -> bool:
        members = self._members()
        asked = [member.is_ready() for member in members if member is not None]
        return all(await asyncio.gather(*asked)) and len(asked) == len(members)

    def submit(
        self,
        key: int,
        request: InferenceRequest,
        checked: Checked,
        on_response: OnResponse,
        received_ns: int,
        caller: Caller | None = None,
    ) -> None:
        """Begin a checked request; its answers come through `on_response`, perhaps before this returns."""
        size_bytes = checked.size_bytes
        try:
            if self._live_count >= MAX_REQUESTS:
                raise InferenceError(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")
            live = self._live
            if live.size_bytes + size_bytes > live.limit_bytes:
                live.check_room(size_bytes)
        except InferenceError as error:
            self._stats.record_failure(FailureReason.REJECTED, monotonic_ns() - received_ns)
            error = InferenceError(error.code, of_request(request.id, error.message))
            on_response(InferenceResponse(self._name, self._version, request.id, error=error))
            return
        run = EnsembleRun(self._graph, request)
        rows = checked.batch_size
        computed = Computed()
        steps_caller = (
            Caller(1, None, computed)
            if caller is None
            else Caller(caller.depth + 1, _waiter(key, caller), computed, caller.model, caller.queue_timeout_ns)
        )
        flight = EnsembleRequest(
            key,
            request,
            rows,
            False,
            self,
            on_response,
            received_ns,
            received_ns,
            size_bytes,
            run,
            steps_caller,
            computed,
            received_ns,
            caller=caller,
        )
        self._accept(key, flight)
        self._act(flight, run.begin)

    def cancel(self, key: int) -> None:
        """The client is gone: end the steps that are under way, and begin no more."""
        flight = self._flight(key)
        if flight is None or flight.cancelled:
            return
        flight.cancelled = True
        self._act(flight, flight.run.cancel)

    def try_refuse(self, key: int, error: InferenceError) -> bool:  # noqa: ARG002
        """False: the calls of its steps are queued, each at the step's model."""
        return False

    def is_busy(self) -> bool:
        """False: what is looked at are the calls of its steps, each as it is made."""
        return False

    def place_of(self, key: int) -> Place:
        return Held((key,)) if self._flight(key) is not None else None

    def acknowledge(self, key: int, responses: int) -> None:
        """The client took so many more answers: steps that were held back go on."""
        flight = self._flight(key)
        if flight is None:
            return
        flight.ahead = max(0, flight.ahead - responses)
        self._release(flight)

    def abort(self) -> None:
        """Answer all requests with an error: the server stops now. What their steps still do is unheard."""
        for waiting in list(self._waiting.values()):
            self._leave_gate(waiting)
        for flight in list(self._live.by_ticket.values()):
            if flight.pump is self and isinstance(flight, EnsembleRequest):
                flight.cancelled = True
                self._answer(flight, self._failure(flight, STOPPING))

    async def close(self) -> None:
        """Wait until every accepted request is answered."""
        await self.drained()
        self._alarm.set(None)

    def _flight(self, key: int) -> EnsembleRequest | None:
        flight = self._live.by_ticket.get(key)
        return flight if isinstance(flight, EnsembleRequest) else None

    def _act(self, flight: EnsembleRequest, decide: Decide, *what: Any) -> None:
        """Do what is decided, after all that is being done already, in whose midst this may be called. Any: `decide`'s
        arguments."""
        events = self._events
        if self._is_acting:
            events.append((flight, decide, what))
            return
        self._is_acting = True
        try:
            self._perform(flight, decide, what)
            while events:
                self._perform(*events.popleft())
        finally:
            self._is_acting = False

    def _perform(self, flight: EnsembleRequest, decide: Decide, what: tuple[Any, ...]) -> None:
        try:
            for action in decide(*what):
                if isinstance(action, CallStep):
                    if self._gates:
                        self._call(flight, action)
                    elif not flight.is_over:
                        self._infer(flight, action)
                elif isinstance(action, GiveAnswer):
                    self._answer(flight, action.response)
                elif isinstance(action, Acknowledge):
                    flight.held.append(action.call)
                    self._release(flight)
                else:
                    self._cancel_call(flight, action.call)
        except Exception:
            # Whatever it was: the one request must not stay unanswered for it.
            about = {"model": self._name, "version": self._version}
            log.exception("ensemble '%s': a request failed in the server", self._name, extra=about)
            failed = f"in ensemble '{self._name}', the server failed"
            self._give_up(flight, InferenceError(ErrorCode.INTERNAL, failed))

    def _call(self, flight: EnsembleRequest, action: CallStep) -> None:
        """Make a call, or have it wait at its step's gate."""
        if flight.is_over:
            return
        gate = self._gates[action.step]
        if flight.steps_caller.waiter is not None:
            gate.enter()
            self._infer(flight, action)
            return
        now = monotonic_ns()
        timeout_us = action.request.timeout_us
        key = (flight.key, action.call)
        try:
            if gate.try_enter(key, now + timeout_us * NS_PER_US if timeout_us else None):
                self._infer(flight, action)
                return
        except InferenceError as error:
            self._refuse_call(flight, action, error)
            return
        self._waiting[key] = Waiting(flight, action, now)
        flight.calls[action.call] = 0
        if timeout_us:
            self._arm()

    def _infer(self, flight: EnsembleRequest, action: CallStep) -> None:
        call = action.call
        calls = flight.calls
        calls[call] = 0
        on_response = (
            partial(self._answered_at_gate, flight, call, action.step)
            if self._gates
            else partial(self._answered, flight, call)
        )
        ticket = self._inferences.infer(action.request, on_response, flight.steps_caller)
        if call in calls:
            calls[call] = ticket

    def _answered(self, flight: EnsembleRequest, call: int, response: InferenceResponse) -> None:
        if response.final:
            flight.calls.pop(call, None)
        if flight.is_over:
            return
        self._act(flight, flight.run.on_response, call, response)
        if response.error is not None and self._waiting:
            self._withdraw(flight)

    def _answered_at_gate(self, flight: EnsembleRequest, call: int, step: int, response: InferenceResponse) -> None:
        self._answered(flight, call, response)
        if response.final:
            self._pass_on(self._gates[step])

    def _pass_on(self, gate: Gate) -> None:
        """A call has left the gate; another one may go on."""
        key = gate.leave()
        if key is None:
            return
        waiting = self._waiting.pop(key)
        now = monotonic_ns()
        waited_ns = now - waiting.since_ns
        waiting.flight.waited_ns += waited_ns
        request = waiting.action.request
        if request.timeout_us:
            # It is one wait for one step, here and in the queue of its model.
            request.timeout_us = max(1, request.timeout_us - waited_ns // NS_PER_US)
            self._arm()
        self._act(waiting.flight, self._go_on, waiting)

    def _go_on(self, waiting: Waiting) -> Sequence[RunAction]:
        """Make a call that was let through its gate; nothing more is decided by it."""
        if waiting.flight.is_over:
            self._pass_on(self._gates[waiting.action.step])
        else:
            self._infer(waiting.flight, waiting.action)
        return ()

    def _refuse_call(self, flight: EnsembleRequest, action: CallStep, error: InferenceError) -> None:
        """Answer a call that was not made."""
        request = action.request
        error = InferenceError(error.code, of_request(request.id, error.message))
        self._answered(flight, action.call, InferenceResponse(request.model_name, "", request.id, error=error))

    def _leave_gate(self, waiting: Waiting) -> None:
        self._gates[waiting.action.step].try_remove((waiting.flight.key, waiting.action.call))
        del self._waiting[waiting.flight.key, waiting.action.call]

    def _arm(self) -> None:
        """Have the next deadline of a call at a gate kept."""
        self._alarm.set(min((at for gate in self._gates if (at := gate.wake_at()) is not None), default=None))

    def _expire(self) -> None:
        now = monotonic_ns()
        for gate in self._gates:
            for key in gate.expire(now):
                waiting = self._waiting.pop(key)
                waiting.flight.waited_ns += now - waiting.since_ns
                error = InferenceError(ErrorCode.UNAVAILABLE, "Request timeout expired")
                self._refuse_call(waiting.flight, waiting.action, error)
        self._arm()

    def _withdraw(self, flight: EnsembleRequest) -> None:
        """Take back the calls of a request that has failed that still wait at gates."""
        for call, ticket in list(flight.calls.items()):
            if not ticket:
                self._cancel_call(flight, call)

    def _cancel_call(self, flight: EnsembleRequest, call: int) -> None:
        waiting = self._waiting.get((flight.key, call))
        if waiting is not None:
            self._leave_gate(waiting)
            del flight.calls[call]
            request = waiting.action.request
            response = InferenceResponse(request.model_name, "", request.id, error=CANCELLED)
            self._act(flight, flight.run.on_response, call, response)
            return
        ticket = flight.calls.get(call)
        if ticket:
            self._inferences.cancel(ticket)

    def _release(self, flight: EnsembleRequest) -> None:
        """Let steps go on: as many of their answers are held back as are ahead of the client, the latest ones."""
        count = len(flight.held) - flight.ahead
        if count <= 0:
            return
        for call in flight.held[:count]:
            ticket = flight.calls.get(call)
            if ticket:
                self._inferences.acknowledge(ticket)
        del flight.held[:count]

    def _give_up(self, flight: EnsembleRequest, error: InferenceError) -> None:
        """The one request fails, whatever its steps still do."""
        calls = list(flight.calls.items())
        # First: its steps may be answered while they are cancelled, which would end it otherwise.
        self._answer(flight, self._failure(flight, error))
        for call, ticket in calls:
            waiting = self._waiting.get((flight.key, call))
            if waiting is not None:
                self._leave_gate(waiting)
            elif ticket:
                self._inferences.cancel(ticket)

    def _answer(self, flight: EnsembleRequest, response: InferenceResponse) -> None:
        if flight.is_over:
            return
        response.model_version = self._version
        if self._reshapes and response.outputs:
            self._reshape(flight, response)
        now = monotonic_ns()
        if self._stats.decoupled:
            self._note_response(flight, response, now)
        if not response.final:
            flight.ahead += 1
            self._send(flight, response)
            return
        flight.is_over = True
        self._live.take(flight.key)
        self._live_count -= 1
        if response.error is not None or flight.has_failed:
            is_cancelled = (
                flight.cancelled and response.error is not None and response.error.code is ErrorCode.CANCELLED
            )
            reason = FailureReason.CANCELED if is_cancelled else FailureReason.OTHER
            self._stats.record_failure(reason, now - flight.received_ns)
        else:
            # The sums of all calls: steps that run side by side may take longer together than the request.
            computed = flight.computed
            spent = computed.input_ns, computed.infer_ns, computed.output_ns
            self._stats.record_execution(flight.rows, *spent)
            self._stats.record_success(flight.rows, now - flight.received_ns, flight.waited_ns, *spent, wall_ms())
            if flight.caller is not None and flight.caller.computed is not None:
                flight.caller.computed.add(*spent)
        self._send(flight, response)
        self._rest()

    def _reshape(self, flight: EnsembleRequest, response: InferenceResponse) -> None:
        """Give the outputs the shapes that clients are told of, or fail the answer whose steps gave others."""
        try:
            self._checker.reshape_outputs(response.outputs, flight.rows)
        except InferenceError as error:
            response.error = InferenceError(error.code, f"in ensemble '{self._name}', {error.message}")
            response.outputs, response.parameters = [], {}

    def _note_response(self, flight: EnsembleRequest, response: InferenceResponse, now_ns: int) -> None:
        outcome = outcome_of(response)
        flight.has_failed |= outcome in (ResponseOutcome.FAIL, ResponseOutcome.CANCEL)
        self._stats.record_response(flight.answers, outcome, now_ns - flight.last_ns, 0)
        flight.last_ns = now_ns
        if outcome is ResponseOutcome.SUCCESS and not flight.answers:
            self._stats.record_first_response(now_ns - flight.received_ns)
        flight.answers += 1

    def _send(self, flight: EnsembleRequest, response: InferenceResponse) -> None:
        try:
            flight.on_response(response)
        except Exception:
            about = {"model": self._name, "version": self._version, "request_id": response.id}
            log.exception("answering a request of ensemble '%s' failed", self._name, extra=about)

    def _failure(self, flight: EnsembleRequest, error: InferenceError) -> InferenceResponse:
        return InferenceResponse(self._name, self._version, flight.request.id, error=error)


def _waiter(key: int, caller: Caller) -> int | None:
    return key if caller.waiter is not None else None
