"""The execution of one request by an ensemble: values in, actions out.

A step is *decided* as soon as all tensors that it waits for are known, present or absent. It is then called or
skipped. It is skipped if its condition is false, or if a required input is absent because another step was skipped. The
outputs of a skipped step are absent, and so is an output that a called step did not return. A call leaves out an absent
input. If the model requires it and no condition is the cause, the model's own check refuses the call, as in Triton.

A tensor is dropped when its last user has started (`scopes`). It is never copied: a call has a new `Tensor` over the
same bytes.

Each answer of a decoupled step opens a scope (`graph` has the rules), and each scope in which the outputs are known
gives one answer. A scope is over when all its users are decided and its calls and inner scopes are over. The answer
that is given as the run ends is the final one. If the run ends after the last answer was given, an empty answer marks
the end: an answer is never delayed to learn whether it is the last.

After an error or a `cancel`, no call is started. The run ends when all calls are over, with the first error. Calls of
decoupled steps are cancelled, because their models may answer forever.
"""

from dataclasses import dataclass

from halimede.core.ensemble.graph import Graph, Step
from halimede.core.ensemble.rows import passed_shape, with_one_row
from halimede.core.ensemble.scopes import Absent, Scope, Scopes
from halimede.core.ensemble.sequence import SequenceParameters, sequence_after, sequence_of
from halimede.core.ensemble.when import is_met
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from halimede.core.types.error import clip
from halimede.core.types.request import forms_of


@dataclass(slots=True)
class CallStep:
    """Call the step's model; its answers come to `on_response` with this number."""

    call: int
    step: int
    request: InferenceRequest


@dataclass(slots=True)
class CancelCall:
    call: int


@dataclass(slots=True)
class Acknowledge:
    """Acknowledge an answer of a decoupled step whose call is under way, so that further answers may follow."""

    call: int


@dataclass(slots=True)
class GiveAnswer:
    """`missing` are the requested outputs that no step made."""

    response: InferenceResponse
    missing: tuple[str, ...] = ()


RunAction = CallStep | CancelCall | Acknowledge | GiveAnswer


_CANCELLED = InferenceError(ErrorCode.CANCELLED, "request was cancelled")


@dataclass(slots=True)
class _Pending:
    """A call under way."""

    step: Step
    scope: Scope
    sequence: SequenceParameters | None
    is_cancelled: bool = False


class EnsembleRun:
    """The run of one request through the graph.

    Every call must be answered through `on_response`; its last response is final. Perform the actions in their order.
    Exactly one `GiveAnswer` is final, and no action follows it.
    """

    __slots__ = (
        "_actions",
        "_answer",
        "_calls",
        "_failure",
        "_graph",
        "_is_over",
        "_last_call",
        "_plan",
        "_request",
        "_scopes",
        "_shape",
        "_template",
    )

    def __init__(self, graph: Graph, request: InferenceRequest) -> None:
        """`request` must fit the ensemble's configuration."""
        self._graph = graph
        self._plan = graph.plan(request.outputs)
        self._request: InferenceRequest | None = request
        # The parts of the request that every call gets. Only the scopes hold tensors.
        self._template = InferenceRequest.of(
            request.form,
            request.id,
            [],
            request.parameters,
            request.sequence_id,
            request.sequence_start,
            request.sequence_end,
        )
        self._scopes = Scopes(self._plan)
        self._shape = request.inputs[0].shape if request.inputs else ()
        self._calls: dict[int, _Pending] = {}
        self._last_call = 0
        self._failure: InferenceError | None = None
        self._answer: GiveAnswer | None = None
        self._is_over = False
        self._actions: list[RunAction] = []

    def __repr__(self) -> str:
        return f"<EnsembleRun {self._graph.name} calls={len(self._calls)} held={len(self.held)}>"

    @property
    def has_failed(self) -> bool:
        """Whether the run ends with an error, or was cancelled."""
        return self._failure is not None

    @property
    def held(self) -> tuple[str, ...]:
        """The names of the tensors that the run holds, once per scope."""
        held = [tensor.name for tensor in self._request.inputs] if self._request is not None else []
        return (*held, *self._scopes.held)

    def begin(self) -> list[RunAction]:
        """The first actions; none after a `cancel`."""
        request, self._request = self._request, None
        if request is None:
            return []
        given = {tensor.name: tensor for tensor in request.inputs}
        for name in self._graph.inputs:
            self._scopes.put(self._scopes.root, name, given.get(name, Absent.MISSING))
        self._decide_ready(self._scopes.root)
        return self._taken()

    def on_response(self, call: int, response: InferenceResponse) -> list[RunAction]:
        """The actions that follow from an answer to a call."""
        pending = self._calls[call]
        if response.final:
            del self._calls[call]
        if self._failure is not None:
            if not response.final:
                self._actions.append(Acknowledge(call))
            self._end_if_idle()
        elif response.error is not None:
            if not response.final:
                self._actions.append(Acknowledge(call))
            self._fail(response.error.code, response.error.message)
        elif pending.step.decoupled:
            self._on_one_of_many(pending, call, response)
        elif response.final:
            pending.scope.calls -= 1
            self._know_outputs(pending, pending.scope, response)
            self._decide_ready(pending.scope)
        else:
            # The model was loaded again, as a decoupled one, after this graph was made.
            self._actions.append(Acknowledge(call))
            pending.is_cancelled = True
            self._actions.append(CancelCall(call))
            self._fail(
                ErrorCode.INTERNAL,
                f"model '{clip(pending.step.model)}' gave an answer that is not its last, and is not decoupled",
            )
        return self._taken()

    def cancel(self) -> list[RunAction]:
        """End early: start no call and cancel those under way; the answer is an error of code CANCELLED.

        After an error the answer is that error. A run that is over has no actions.
        """
        if self._is_over:
            return []
        if self._failure is None:
            self._stop(_CANCELLED)
        for call, pending in self._calls.items():
            if not pending.is_cancelled:
                pending.is_cancelled = True
                self._actions.append(CancelCall(call))
        self._end_if_idle()
        return self._taken()

    def _taken(self) -> list[RunAction]:
        actions, self._actions = self._actions, []
        return actions

    # Results.

    def _know_outputs(self, pending: _Pending, scope: Scope, response: InferenceResponse) -> None:
        given = {}
        for tensor in response.outputs:
            given[tensor.name] = tensor
        sequence = pending.sequence
        if response.parameters:
            sequence = sequence_after(sequence, self._template, response.parameters)
        step = pending.step
        for key in self._plan.needed[step.index]:
            self._scopes.put(scope, step.outputs[key], given.get(key, Absent.MISSING), sequence)

    def _on_one_of_many(self, pending: _Pending, call: int, response: InferenceResponse) -> None:
        """Open a scope for an answer of a decoupled step, unless the answer only marks the end."""
        scope = pending.scope
        if response.final:
            scope.calls -= 1
            scope.has_all_children = True
        if response.final and response.is_empty:
            self._scopes.release_shared(scope)
            self._close(scope)
            return
        inner = self._scopes.open(scope, pending.step.opens, call, is_owed=not response.final)
        self._know_outputs(pending, inner, response)
        self._decide_ready(inner)

    # Decisions.

    def _decide_ready(self, scope: Scope) -> None:
        """Decide every user that is ready, then close the scopes that are over."""
        touched = {scope: None}
        ready = self._scopes.ready
        while ready:
            user, at = ready.popleft()
            at.undecided -= 1
            touched[at] = None
            if user == self._plan.answer:
                self._give(at)
                continue
            step = self._graph.steps[user]
            try:
                self._decide(step, at, touched)
            except InferenceError as error:
                condition = clip(step.when.text) if step.when is not None else ""
                text = f"step {step.index} of model '{clip(step.model)}', condition \"{condition}\": {error.message}"
                self._fail(error.code, text)
                return
        for at in touched:
            if not (at.undecided or at.calls):
                self._close(at)

    def _decide(self, step: Step, scope: Scope, touched: dict[Scope, None]) -> None:
        """Call the step or skip it. InferenceError if its condition cannot be decided."""
        if self._plan.is_flat:
            self._run(step, scope)
            return
        inputs = {key: self._scopes.home(scope, tensor).values[tensor] for key, tensor in step.inputs.items()}
        runs = self._runs(step, scope, inputs)
        sequence = None
        for tensor in step.tensors:
            sequence = self._scopes.home(scope, tensor).sequences.get(tensor, sequence)
            self._scopes.use(scope, tensor)
        if runs:
            self._call(step, scope, inputs, sequence)
            return
        outputs = scope
        if step.decoupled:
            # As if it had sent one empty answer, so that each step that depends on it is decided once.
            outputs = self._scopes.open(scope, step.opens)
            scope.has_all_children = True
            touched[outputs] = None
        for key in self._plan.needed[step.index]:
            self._scopes.put(outputs, step.outputs[key], Absent.SKIPPED)

    def _run(self, step: Step, root: Scope) -> None:
        """`_decide` for a flat graph, without the work that only other graphs need."""
        values, uses, sequences = root.values, root.uses, root.sequences
        inputs = {}
        for key, tensor in step.inputs.items():
            inputs[key] = values[tensor]
        sequence = None
        for tensor in step.tensors:
            if sequences:
                sequence = sequences.get(tensor, sequence)
            uses[tensor] -= 1
            if not uses[tensor]:
                del values[tensor]
        self._call(step, root, inputs, sequence)

    def _runs(self, step: Step, scope: Scope, inputs: dict[str, Tensor | Absent]) -> bool:
        for key, value in inputs.items():
            if value is Absent.SKIPPED and key not in step.optional:
                return False
        if step.when is None:
            return True
        named: dict[str, Tensor | None] = {}
        for tensor in step.when.tensors:
            value = self._scopes.home(scope, tensor).values[tensor]
            named[tensor] = value if isinstance(value, Tensor) else None
        return is_met(step.when, named, self._template.parameters)

    def _call(
        self, step: Step, scope: Scope, inputs: dict[str, Tensor | Absent], sequence: SequenceParameters | None
    ) -> None:
        template = self._template
        number, start, end = sequence or (template.sequence_id, template.sequence_start, template.sequence_end)
        shown = []
        for key, value in inputs.items():
            if isinstance(value, Tensor):
                shape, fit = value.shape, step.fits[key]
                if fit.differs:
                    shape = passed_shape(fit, shape)
                elif len(shape) != fit.rank and self._has_one_row():
                    shape = with_one_row(fit, shape)
                shown.append(Tensor(key, value.datatype, shape, value.data))
        version = "" if step.version < 0 else str(step.version)
        form = template.form.of_step(step.model, version, forms_of(shown), self._plan.needed[step.index])
        request = InferenceRequest.of(form, template.id, shown, dict(template.parameters), number, start, end)
        self._last_call += 1
        scope.calls += 1
        self._calls[self._last_call] = _Pending(step, scope, sequence)
        self._actions.append(CallStep(self._last_call, step.index, request))

    def _has_one_row(self) -> bool:
        return not self._graph.batches or self._shape[:1] == (1,)

    def _give(self, scope: Scope) -> None:
        """Make the answer of the scope from the outputs, which are known."""
        graph = self._graph
        outputs = []
        missing: tuple[str, ...] = ()
        sequence = None
        for name in self._plan.outputs:
            home = self._scopes.home(scope, name)
            value = home.values[name]
            sequence = home.sequences.get(name, sequence)
            self._scopes.use(scope, name)
            if isinstance(value, Tensor):
                fit = graph.fits[name]
                shape = passed_shape(fit, value.shape) if fit.differs else value.shape
                outputs.append(Tensor(name, value.datatype, shape, value.data))
            else:
                missing = (*missing, name)
        response = InferenceResponse(graph.name, "", self._template.id, outputs, final=not graph.decoupled)
        if outputs:
            number, start, end = sequence or sequence_of(self._template)
            response.parameters = {"sequence_id": number, "sequence_start": start, "sequence_end": end}
        answer = GiveAnswer(response, missing)
        if graph.decoupled:
            self._actions.append(answer)
        else:
            self._answer = answer

    # Ends of scopes.

    def _close(self, scope: Scope) -> None:
        """Close the scope if it is over, and the outer scopes that are over because of this."""
        while not (scope.is_over or scope.undecided or scope.calls or scope.children):
            scope.is_over = True
            parent = scope.parent
            if parent is None:
                self._finish()
                return
            self._scopes.close(scope)
            self._acknowledge(scope)
            parent.children -= 1
            self._scopes.release_shared(parent)
            scope = parent

    def _acknowledge(self, scope: Scope) -> None:
        """Acknowledge the answer that opened the scope, unless its call has ended."""
        if scope.is_owed and scope.call in self._calls:
            self._actions.append(Acknowledge(scope.call))

    def _finish(self) -> None:
        self._is_over = True
        answer, self._answer = self._answer, None
        if answer is None and self._marks_end():
            return
        self._actions.append(answer or GiveAnswer(InferenceResponse(self._graph.name, "", self._template.id)))

    def _marks_end(self) -> bool:
        """Mark the last answer of a decoupled ensemble as final if it was not sent yet; return whether it was."""
        for action in reversed(self._actions):
            if isinstance(action, GiveAnswer):
                # Clients interpret a final answer without outputs as the end only.
                action.response.final = not action.response.is_empty
                return action.response.final
        return False

    # Early end.

    def _fail(self, code: ErrorCode, message: str) -> None:
        self._stop(InferenceError(code, f"in ensemble '{clip(self._graph.name)}', {message}"))
        # Calls that were decided in the same step were not started yet.
        decided = self._taken()
        for action in decided:
            if isinstance(action, CallStep):
                del self._calls[action.call]
            else:
                self._actions.append(action)
        for call, pending in self._calls.items():
            if pending.step.decoupled:
                pending.is_cancelled = True
                self._actions.append(CancelCall(call))
        self._end_if_idle()

    def _stop(self, error: InferenceError) -> None:
        """Release every tensor. From now on only the ends of the calls under way count."""
        self._failure = error
        self._request = self._answer = None
        for scope in self._scopes.clear():
            self._acknowledge(scope)

    def _end_if_idle(self) -> None:
        if not self._calls and not self._is_over:
            self._is_over = True
            name, request_id = self._graph.name, self._template.id
            self._actions.append(GiveAnswer(InferenceResponse(name, "", request_id, error=self._failure)))
