"""The requests of one version of an ensemble: performs the actions of their runs.

A run (`core.ensemble.run`) decides which steps are called, with what, and what the response is. Here its calls are made
like any other inference, and their responses are given back to it. There is no task and no future per request or step,
and nothing is copied. A call may be answered before `infer` returns. That response waits in a queue until the earlier
decisions are performed, so that nothing recurses however long the graph is.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from halimede.core.config.check_request import RequestChecker
from halimede.core.ensemble.graph import Graph
from halimede.core.ensemble.run import Acknowledge, CallStep, EnsembleRun, GiveAnswer, RunAction
from halimede.core.observe.load import Load
from halimede.core.schedule.wait_graph import ANSWERED, Dependencies
from halimede.core.types import ErrorCode, InferenceError, InferenceResponse, shortage_of
from halimede.core.types.caller import Caller, Computed
from halimede.core.types.error import internal, of_request, unavailable
from halimede.core.types.server import WorkerHealth
from halimede.core.types.statistics import FailureReason
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.executor import MakeRequests, VersionExecutor
from halimede.runtime.requests import CANCELLED, STOPPING, InFlight, Sent
from halimede.runtime.step_gates import StepGates, Waiting
from halimede.workers.supervision.services import Models

log = logging.getLogger(__name__)

MAX_REQUESTS = 4096
"""Requests of one ensemble in flight."""


@dataclass(slots=True)
class Running:
    """A request and its run. `calls` are the tickets of the calls under way by number, 0 for a call without a ticket.

    `ahead` is how many responses were sent and are not acknowledged by the client yet. `held` are the calls with a
    response that is acknowledged to the step's model only once the client acknowledges more. `waited_ns` is the time
    that its calls waited at gates, `computed` the compute time of its calls.
    """

    flight: InFlight
    run: EnsembleRun
    steps_caller: Caller
    computed: Computed
    sent: Sent
    calls: dict[int, int] = field(default_factory=dict)
    ahead: int = 0
    held: list[int] = field(default_factory=list)
    waited_ns: int = 0
    is_over: bool = False


Decide = Callable[..., Sequence[RunAction]]


class Ensemble:
    """Implements `runtime.executor.VersionExecutor`. `members` gives the executors of the steps' models, None for a
    model that is not ready."""

    def __init__(
        self,
        graph: Graph,
        make_requests: MakeRequests,
        models: Models,
        members: Callable[[], Sequence[VersionExecutor | None]],
        checker: RequestChecker,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._name = graph.name
        self._graph = graph
        self.requests = make_requests(self)
        self._models = models
        self._members = members
        self._checker = checker
        limit = graph.max_inflight_requests
        self._is_gated = limit > 0
        self._gates = StepGates[Running](len(graph.steps), limit, self._expired, loop)
        self._running: dict[int, Running] = {}
        self._events: deque[tuple[Running, Decide, tuple[Any, ...]]] = deque()
        self._is_acting = False

    def __repr__(self) -> str:
        waiting = f" waiting={len(self._gates)}" if self._is_gated else ""
        requests = self.requests
        return (
            f"<Ensemble {self._name}:{requests.version} steps={len(self._graph.steps)} live={requests.count}{waiting}>"
        )

    @property
    def queued(self) -> int:
        """Requests that have a call at a gate; all others began when they were admitted."""
        return len({waiting.key[0] for waiting in self._gates})

    @property
    def refusal(self) -> InferenceError | None:
        for member in self._members():
            if member is not None and member.refusal is not None:
                text = f"ensemble '{self._name}' is not ready: {member.refusal.message}"
                return InferenceError(member.refusal.code, text)
        return None

    def worker_health(self) -> WorkerHealth:
        return WorkerHealth()

    def load(self) -> Load:
        """See `VersionExecutor.load`. What it executes are requests of its steps' models, which count them."""
        oldest = next(iter(self._gates), None)
        oldest_wait_ns = 0 if oldest is None else max(0, monotonic_ns() - oldest.since_ns)
        return Load(self.queued, oldest_wait_ns=oldest_wait_ns, in_steps=self.requests.count - self.queued)

    def is_available(self) -> bool:
        return all(member is not None and member.is_available() for member in self._members())

    async def is_ready(self) -> bool:
        members = self._members()
        asked = [member.is_ready() for member in members if member is not None]
        return all(await asyncio.gather(*asked)) and len(asked) == len(members)

    def start(self, flight: InFlight, compatible: Hashable) -> None:  # noqa: ARG002
        """See `runtime.requests.Executor.start`. Every request has a run of its own."""
        if self.requests.count > MAX_REQUESTS:
            raise unavailable("Exceeds maximum queue size")
        run = EnsembleRun(self._graph, flight.request)
        computed = Computed()
        caller = flight.caller
        if caller is None:
            steps_caller = Caller(1, None, computed)
        else:
            waiter = flight.key if caller.waiter is not None else None
            steps_caller = Caller(caller.depth + 1, waiter, computed, caller.model, caller.queue_timeout_ns)
        running = Running(flight, run, steps_caller, computed, Sent(flight.received_ns))
        self._running[flight.key] = running
        self._act(running, run.begin)

    def cancel(self, key: int, *, reads_on: bool = False) -> None:  # noqa: ARG002
        """Cancel the calls under way, and make no further calls, which what a step still sends would need."""
        running = self._running.get(key)
        if running is None or running.flight.cancelled:
            return
        running.flight.cancelled = True
        self._act(running, running.run.cancel)

    def try_refuse(self, key: int, error: InferenceError) -> bool:  # noqa: ARG002
        """False: the calls of its steps are queued, each at the step's model."""
        return False

    def is_busy(self) -> bool:
        """False: circles are found at the calls of its steps."""
        return False

    def dependencies_of(self, key: int) -> Dependencies:
        return Dependencies([(key,)]) if key in self._running else ANSWERED

    def acknowledge(self, key: int, responses: int) -> None:
        """The client has taken `responses` more: steps that were held back continue."""
        running = self._running.get(key)
        if running is None:
            return
        running.ahead = max(0, running.ahead - responses)
        _acknowledge_steps(running, self._models)

    def abort(self) -> None:
        """Finish all requests with an error. Later responses of their steps are ignored."""
        for waiting in self._gates:
            self._gates.try_remove(waiting.key)
        for running in list(self._running.values()):
            running.flight.cancelled = True
            self._answer(running, self.requests.failure(running.flight, STOPPING))

    def expect_few(self) -> None:
        """No effect: it makes no batches."""

    def expect_no_more(self) -> None:
        """No effect: its requests wait for no others."""

    async def close(self) -> None:
        """Wait until every request is finished."""
        await self.requests.drained()
        self._gates.close()

    def _act(self, running: Running, decide: Decide, *what: Any) -> None:
        """Perform what `decide` decides, after the decisions that are being performed. Any: arguments of `decide`."""
        events = self._events
        if self._is_acting:
            events.append((running, decide, what))
            return
        self._is_acting = True
        try:
            self._perform(running, decide, what)
            while events:
                self._perform(*events.popleft())
        finally:
            self._is_acting = False

    def _perform(self, running: Running, decide: Decide, what: tuple[Any, ...]) -> None:
        try:
            for action in decide(*what):
                if isinstance(action, CallStep):
                    self._call(running, action)
                elif isinstance(action, GiveAnswer):
                    for name in action.missing:
                        log.debug("Composing models did not output tensor %s", name, extra={"model": self._name})
                    self._answer(running, action.response)
                elif isinstance(action, Acknowledge):
                    running.held.append(action.call)
                    _acknowledge_steps(running, self._models)
                else:
                    self._cancel_call(running, action.call)
            if self._gates and running.run.has_failed:
                # Its calls that still wait at gates are not made.
                for number, ticket in list(running.calls.items()):
                    if not ticket:
                        self._cancel_call(running, number)
        except Exception as error:
            # Every error must end the request, so that it does not stay unanswered.
            about = {"model": self._name, "version": self.requests.version}
            log.exception("ensemble '%s': a request failed in the server", self._name, extra=about)
            failed = f"in ensemble '{self._name}', the server failed"
            self._abort_request(running, shortage_of(error) or internal(failed))

    def _call(self, running: Running, call: CallStep) -> None:
        """Make a call, or have it wait at its step's gate."""
        if running.is_over:
            return
        if not self._is_gated:
            self._infer(running, call)
            return
        if running.steps_caller.waiter is not None:
            self._gates.enter(call.step)
            self._infer(running, call)
            return
        try:
            if self._gates.try_enter((running.flight.key, call.call), running, call):
                self._infer(running, call)
            else:
                running.calls[call.call] = 0
        except InferenceError as error:
            self._answered(running, call.call, _refused(call, error))

    def _infer(self, running: Running, call: CallStep) -> None:
        number = call.call
        calls = running.calls
        calls[number] = 0

        def on_response_behind_gate(response: InferenceResponse) -> None:
            self._answered(running, number, response)
            if response.final:
                self._open_gate(call.step)

        on_response = on_response_behind_gate if self._is_gated else partial(self._answered, running, number)
        ticket = self._models.infer(call.request, on_response, running.steps_caller)
        if number in calls:
            calls[number] = ticket

    def _answered(self, running: Running, number: int, response: InferenceResponse) -> None:
        if response.final:
            running.calls.pop(number, None)
        if running.is_over:
            return
        self._act(running, running.run.on_response, number, response)

    def _open_gate(self, step: int) -> None:
        """A call has left its step's gate: the next one continues."""
        waiting = self._gates.leave(step)
        if waiting is not None:
            waiting.owner.waited_ns += monotonic_ns() - waiting.since_ns
            self._act(waiting.owner, self._continue_call, waiting)

    def _continue_call(self, waiting: Waiting[Running]) -> Sequence[RunAction]:
        """Make a call that has passed its gate. Returns no further actions."""
        if waiting.owner.is_over:
            self._open_gate(waiting.call.step)
        else:
            self._infer(waiting.owner, waiting.call)
        return ()

    def _expired(self, waiting: Waiting[Running]) -> None:
        waiting.owner.waited_ns += monotonic_ns() - waiting.since_ns
        error = unavailable("Request timeout expired")
        self._answered(waiting.owner, waiting.call.call, _refused(waiting.call, error))

    def _cancel_call(self, running: Running, number: int) -> None:
        waiting = self._gates.try_remove((running.flight.key, number))
        if waiting is not None:
            del running.calls[number]
            request = waiting.call.request
            response = InferenceResponse(request.model_name, "", request.id, error=CANCELLED)
            self._act(running, running.run.on_response, number, response)
            return
        ticket = running.calls.get(number)
        if ticket:
            self._models.cancel(ticket)

    def _abort_request(self, running: Running, error: InferenceError) -> None:
        """Finish a request with an error, and cancel its calls."""
        calls = list(running.calls.items())
        # First: a step that is answered while it is cancelled would finish the request otherwise.
        self._answer(running, self.requests.failure(running.flight, error))
        for number, ticket in calls:
            if self._gates.try_remove((running.flight.key, number)) is None and ticket:
                self._models.cancel(ticket)

    def _answer(self, running: Running, response: InferenceResponse) -> None:
        if running.is_over:
            return
        requests, flight, sent = self.requests, running.flight, running.sent
        response.model_version = requests.version
        if self._checker.reshapes_outputs and response.outputs:
            try:
                self._checker.reshape_outputs(response.outputs, flight.rows)
            except InferenceError as error:
                response.error = InferenceError(error.code, f"in ensemble '{self._name}', {error.message}")
                response.outputs, response.parameters = [], {}
        now = monotonic_ns()
        requests.record_response(flight, sent, response, now - sent.last_ns, 0)
        sent.last_ns = now
        if not response.final:
            running.ahead += 1
            requests.send(flight, response)
            return
        running.is_over = True
        del self._running[flight.key]
        if not sent.has_failed:
            # The sums of all calls: steps that run in parallel may take longer together than the request.
            spent = running.computed
            requests.stats.record_execution(flight.rows, spent.input_ns, spent.infer_ns, spent.output_ns)
            requests.finish(flight, response, spent, running.waited_ns)
            return
        is_cancelled = flight.cancelled and response.error is not None and response.error.code is ErrorCode.CANCELLED
        reason = FailureReason.CANCELED if is_cancelled else FailureReason.OTHER
        requests.finish(flight, response, None, reason=reason)


def _acknowledge_steps(running: Running, models: Models) -> None:
    """Let steps continue. Their latest responses stay held, as many as the client has not acknowledged."""
    count = len(running.held) - running.ahead
    if count <= 0:
        return
    for number in running.held[:count]:
        if ticket := running.calls.get(number):
            models.acknowledge(ticket)
    del running.held[:count]


def _refused(call: CallStep, error: InferenceError) -> InferenceResponse:
    """The response to a call that was not made."""
    request = call.request
    error = InferenceError(error.code, of_request(request.id, error.message))
    return InferenceResponse(request.model_name, "", request.id, error=error)
