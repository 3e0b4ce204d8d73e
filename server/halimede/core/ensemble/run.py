"""One request's way through an ensemble: values in, actions out.

A step is *decided* as soon as all tensors that it waits for are known, present or absent. It is then called, or
skipped: its condition is false, or an input that it must have is missing because another step was skipped. The outputs
of a skipped step are absent, and so is an output that a called step did not give. An input that is absent is left out
of the call; where the model must have it and no condition is the cause, the model's own check says so, as in Triton.

What the tensors are held in is dropped when its last user has started: the run never keeps one longer than it needs it,
and never copies one, since a call has a new `Tensor` over the same bytes.

Each answer of a decoupled step opens a scope (`graph` has the rules), and each scope in which the outputs are known
gives one answer. A scope is over when all its users are decided, its calls and the scopes within it are over. The
answer that is given as the run ends is the final one; where the run ends after the last answer was given, an empty
answer says so. An answer is never held back to learn whether it is the last.

After an error, or `cancel`, nothing more is started. The run ends when all calls are over, with the first error; calls
of decoupled steps, which might answer for ever, are cancelled.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from halimede.core.ensemble.graph import Graph, Plan, Step
from halimede.core.ensemble.when import is_met
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse, ParameterValue, Tensor
from halimede.core.types.error import clip


@dataclass(slots=True)
class Call:
    """Ask the step's model; its answers come back through `on_response` under this number."""

    call: int
    step: int
    request: InferenceRequest


@dataclass(slots=True)
class CancelCall:
    call: int


@dataclass(slots=True)
class Acknowledge:
    """One more answer of a decoupled step is used up, and its call is still under way: more may come."""

    call: int


@dataclass(slots=True)
class Answer:
    response: InferenceResponse


RunAction = Call | CancelCall | Acknowledge | Answer


class Absent(Enum):
    """Why a tensor is not there: nobody gave it, or a condition was false."""

    MISSING = auto()
    SKIPPED = auto()


_Sequence = tuple[int | str, bool, bool]
"""Correlation id, start, end."""

_SEQUENCE_PARAMETERS = frozenset({"sequence_id", "sequence_start", "sequence_end"})

_CANCELLED = InferenceError(ErrorCode.CANCELLED, "request was cancelled")


class _Scope:
    """The tensors of one scope and what waits for them. `waits` and `uses` count down, as `Plan` says.

    `call` is the one whose answer opened it, and `is_owed` whether that answer is to be acknowledged. `children` are
    the scopes that its own decoupled step opened; there will be no more of them when `has_all_children`.
    """

    __slots__ = (
        "call",
        "calls",
        "children",
        "has_all_children",
        "is_over",
        "is_owed",
        "number",
        "parent",
        "sequences",
        "undecided",
        "uses",
        "values",
        "waits",
    )

    def __init__(
        self, plan: Plan, number: int, parent: "_Scope | None" = None, call: int = 0, is_owed: bool = False
    ) -> None:
        self.number = number
        self.parent = parent
        self.call = call
        self.is_owed = is_owed
        self.values: dict[str, Tensor | Absent] = {}
        # Of tensors that came with other sequence parameters than the request's.
        self.sequences: dict[str, _Sequence] = {}
        self.uses = dict(plan.uses.get(number, {}))
        self.waits = list(plan.waits)
        self.undecided = plan.undecided.get(number, 0)
        self.calls = 0
        self.children = 0
        self.has_all_children = False
        self.is_over = False


@dataclass(slots=True)
class _Pending:
    """A call under way."""

    step: Step
    scope: _Scope
    sequence: _Sequence | None
    is_cancelled: bool = False


class EnsembleRun:
    """One request's way through the graph.

    Every call must be answered through `on_response`, the last time with a final response. The actions come in the
    order in which they are to be done. There is one `Answer` that is final, and nothing after it.
    """

    __slots__ = (
        "_actions",
        "_answer",
        "_calls",
        "_failure",
        "_graph",
        "_is_over",
        "_last_call",
        "_open",
        "_plan",
        "_ready",
        "_request",
        "_root",
        "_template",
    )

    def __init__(self, graph: Graph, request: InferenceRequest) -> None:
        """`request` fits the ensemble's configuration."""
        self._graph = graph
        self._plan = graph.plan(request.outputs)
        self._request: InferenceRequest | None = request
        # What every step is told, without the tensors: they are held by the scopes alone.
        self._template = InferenceRequest(
            "",
            "",
            request.id,
            [],
            (),
            request.parameters,
            request.priority,
            request.timeout_us,
            request.sequence_id,
            request.sequence_start,
            request.sequence_end,
        )
        self._root = _Scope(self._plan, 0)
        # The scopes that decoupled steps' answers opened, by number.
        self._open: dict[int, dict[_Scope, None]] = {}
        self._ready: deque[tuple[int, _Scope]] = deque()
        self._calls: dict[int, _Pending] = {}
        self._last_call = 0
        self._failure: InferenceError | None = None
        self._answer: InferenceResponse | None = None
        self._is_over = False
        self._actions: list[RunAction] = []

    def __repr__(self) -> str:
        return f"<EnsembleRun {self._graph.name} calls={len(self._calls)} held={len(self.held)}>"

    @property
    def held(self) -> tuple[str, ...]:
        """The names of the tensors that the run holds, once per scope."""
        scopes = [self._root, *(scope for scopes in self._open.values() for scope in scopes)]
        held = [tensor.name for tensor in self._request.inputs] if self._request is not None else []
        for scope in scopes:
            held += [name for name, value in scope.values.items() if isinstance(value, Tensor)]
        return tuple(held)

    def begin(self) -> list[RunAction]:
        """What to do first. Nothing after a `cancel`."""
        request, self._request = self._request, None
        if request is None:
            return []
        given = {tensor.name: tensor for tensor in request.inputs}
        for name in self._graph.inputs:
            self._know(self._root, name, given.get(name, Absent.MISSING))
        self._go_on(self._root)
        return self._taken()

    def on_response(self, call: int, response: InferenceResponse) -> list[RunAction]:
        """What to do now that a call was answered."""
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
            self._go_on(pending.scope)
        else:
            # Its model was loaded anew as a decoupled one, and this graph is of before.
            self._actions.append(Acknowledge(call))
            pending.is_cancelled = True
            self._actions.append(CancelCall(call))
            self._fail(
                ErrorCode.INTERNAL,
                f"model '{clip(pending.step.model)}' gave an answer that is not its last, and is not decoupled",
            )
        return self._taken()

    def cancel(self) -> list[RunAction]:
        """End early: no new calls, those under way are cancelled, the answer is an error of code CANCELLED.

        After an error the answer is that error. Nothing when the run is over.
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

    # What is known.

    def _know(self, scope: _Scope, tensor: str, value: Tensor | Absent, sequence: _Sequence | None = None) -> None:
        """A tensor is there, or is known not to come: whoever waited for nothing else is ready."""
        plan = self._plan
        users = plan.users.get(tensor)
        if users is None or scope.uses[tensor] == 0:
            return
        scope.values[tensor] = value
        if sequence is not None:
            scope.sequences[tensor] = sequence
        waits, own = scope.waits, scope.number
        for user in users:
            number = plan.scopes[user]
            if number == own:
                waits[user] -= 1
                if not waits[user]:
                    self._ready.append((user, scope))
            else:
                for inner in self._open.get(number, ()):
                    self._count_down(inner, user)

    def _know_outputs(self, pending: _Pending, scope: _Scope, response: InferenceResponse) -> None:
        given = {}
        for tensor in response.outputs:
            given[tensor.name] = tensor
        sequence = pending.sequence
        if response.parameters:
            sequence = self._sequence_after(sequence, response.parameters)
        step = pending.step
        for key in self._plan.needed[step.index]:
            self._know(scope, step.outputs[key], given.get(key, Absent.MISSING), sequence)

    def _on_one_of_many(self, pending: _Pending, call: int, response: InferenceResponse) -> None:
        """An answer of a decoupled step opens a scope, but for one that says only that there are no more."""
        scope = pending.scope
        if response.final:
            scope.calls -= 1
            scope.has_all_children = True
        if response.final and response.is_empty:
            self._release_shared(scope)
            self._close(scope)
            return
        inner = self._opened(scope, pending.step, call, is_owed=not response.final)
        self._know_outputs(pending, inner, response)
        self._go_on(inner)

    def _opened(self, scope: _Scope, step: Step, call: int = 0, *, is_owed: bool = False) -> _Scope:
        inner = _Scope(self._plan, step.opens, scope, call, is_owed)
        scope.children += 1
        self._open.setdefault(inner.number, {})[inner] = None
        for tensor, users in self._plan.shared.get(inner.number, {}).items():
            if tensor in self._root.values:
                for user in users:
                    self._count_down(inner, user)
        return inner

    def _count_down(self, scope: _Scope, user: int) -> None:
        scope.waits[user] -= 1
        if scope.waits[user] == 0:
            self._ready.append((user, scope))

    # What is decided.

    def _go_on(self, scope: _Scope) -> None:
        """Decide all that is ready, then close what is over by it."""
        touched = {scope: None}
        while self._ready:
            user, at = self._ready.popleft()
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

    def _decide(self, step: Step, scope: _Scope, touched: dict[_Scope, None]) -> None:
        """Call the step, or skip it. InferenceError where its condition can not be decided."""
        if self._plan.is_flat:
            self._run(step, scope)
            return
        inputs = {key: self._home(scope, tensor).values[tensor] for key, tensor in step.inputs.items()}
        runs = self._runs(step, scope, inputs)
        sequence = None
        for tensor in step.tensors:
            sequence = self._home(scope, tensor).sequences.get(tensor, sequence)
            self._used(scope, tensor)
        if runs:
            self._call(step, scope, inputs, sequence)
            return
        outputs = scope
        if step.decoupled:
            # As if it had given one answer with nothing in it, so that what depends on it is decided once.
            outputs = self._opened(scope, step)
            scope.has_all_children = True
            touched[outputs] = None
        for key in self._plan.needed[step.index]:
            self._know(outputs, step.outputs[key], Absent.SKIPPED)

    def _run(self, step: Step, root: _Scope) -> None:
        """`_decide` of a graph that is flat, without what only others need."""
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

    def _runs(self, step: Step, scope: _Scope, inputs: dict[str, Tensor | Absent]) -> bool:
        for key, value in inputs.items():
            if value is Absent.SKIPPED and key not in step.optional:
                return False
        if step.when is None:
            return True
        named: dict[str, Tensor | None] = {}
        for tensor in step.when.tensors:
            value = self._home(scope, tensor).values[tensor]
            named[tensor] = value if isinstance(value, Tensor) else None
        return is_met(step.when, named, self._template.parameters)

    def _call(self, step: Step, scope: _Scope, inputs: dict[str, Tensor | Absent], sequence: _Sequence | None) -> None:
        template = self._template
        number, start, end = sequence or (template.sequence_id, template.sequence_start, template.sequence_end)
        shown = []
        for key, value in inputs.items():
            if isinstance(value, Tensor):
                shown.append(_shown_as(value, key, step.ranks[key], step.batches))
        request = InferenceRequest(
            step.model,
            "" if step.version < 0 else str(step.version),
            template.id,
            shown,
            self._plan.needed[step.index],
            dict(template.parameters),
            template.priority,
            template.timeout_us,
            number,
            start,
            end,
        )
        self._last_call += 1
        scope.calls += 1
        self._calls[self._last_call] = _Pending(step, scope, sequence)
        self._actions.append(Call(self._last_call, step.index, request))

    def _give(self, scope: _Scope) -> None:
        """The outputs are known: that is the answer, or one of a decoupled ensemble's."""
        graph = self._graph
        outputs = []
        sequence = None
        for name in self._plan.outputs:
            home = self._home(scope, name)
            value = home.values[name]
            sequence = home.sequences.get(name, sequence)
            self._used(scope, name)
            if isinstance(value, Tensor):
                outputs.append(_shown_as(value, name, graph.ranks[name], graph.batches))
        response = InferenceResponse(graph.name, "", self._template.id, outputs, final=not graph.decoupled)
        if outputs:
            number, start, end = sequence or self._own_sequence()
            response.parameters = {"sequence_id": number, "sequence_start": start, "sequence_end": end}
        if graph.decoupled:
            self._actions.append(Answer(response))
        else:
            self._answer = response

    def _own_sequence(self) -> _Sequence:
        template = self._template
        return template.sequence_id, template.sequence_start, template.sequence_end

    def _sequence_after(self, before: _Sequence | None, parameters: Mapping[str, ParameterValue]) -> _Sequence | None:
        """The sequence parameters of a step's outputs: those that it ran with, but for what its answer says."""
        if parameters.keys().isdisjoint(_SEQUENCE_PARAMETERS):
            return before
        number, start, end = before or self._own_sequence()
        said = parameters.get("sequence_id", number)
        return (
            said if isinstance(said, int | str) else number,
            bool(parameters.get("sequence_start", start)),
            bool(parameters.get("sequence_end", end)),
        )

    # What is let go.

    def _home(self, scope: _Scope, tensor: str) -> _Scope:
        """Where a tensor is that is used in this scope."""
        return scope if self._plan.scope_of[tensor] == scope.number else self._root

    def _used(self, scope: _Scope, tensor: str) -> None:
        """One user less. Those in scopes within the tensor's own are counted together, when these are over."""
        if self._plan.scope_of[tensor] == scope.number:
            self._let_go(scope, tensor)

    def _let_go(self, scope: _Scope, tensor: str) -> None:
        scope.uses[tensor] -= 1
        if scope.uses[tensor] == 0:
            scope.values.pop(tensor, None)

    def _release_shared(self, scope: _Scope) -> None:
        """Let go what only scopes within this one used, if there are none and will be none."""
        if scope is self._root and scope.has_all_children and scope.children == 0:
            for tensor in self._plan.lent:
                self._let_go(scope, tensor)

    def _close(self, scope: _Scope) -> None:
        """End the scope if it is over, and those around it that are over by this."""
        while not (scope.is_over or scope.undecided or scope.calls or scope.children):
            scope.is_over = True
            parent = scope.parent
            if parent is None:
                self._finish()
                return
            del self._open[scope.number][scope]
            self._acknowledge(scope)
            parent.children -= 1
            self._release_shared(parent)
            scope = parent

    def _acknowledge(self, scope: _Scope) -> None:
        """Its answer is used up; who has given the last one needs no word of it."""
        if scope.is_owed and scope.call in self._calls:
            self._actions.append(Acknowledge(scope.call))

    def _finish(self) -> None:
        self._is_over = True
        response, self._answer = self._answer, None
        if response is None and self._says_end():
            return
        self._actions.append(Answer(response or InferenceResponse(self._graph.name, "", self._template.id)))

    def _says_end(self) -> bool:
        """Mark the last answer of a decoupled ensemble as final, if it has not been sent yet. Whether it was marked."""
        for action in reversed(self._actions):
            if isinstance(action, Answer):
                # A final answer without outputs is read as the end alone.
                action.response.final = not action.response.is_empty
                return action.response.final
        return False

    # How it ends early.

    def _fail(self, code: ErrorCode, message: str) -> None:
        self._stop(InferenceError(code, f"in ensemble '{clip(self._graph.name)}', {message}"))
        # Nobody was told yet of what was decided in the same breath.
        decided = self._taken()
        for action in decided:
            if isinstance(action, Call):
                del self._calls[action.call]
            else:
                self._actions.append(action)
        for call, pending in self._calls.items():
            if pending.step.decoupled:
                pending.is_cancelled = True
                self._actions.append(CancelCall(call))
        self._end_if_idle()

    def _stop(self, error: InferenceError) -> None:
        """Let go of everything; only the ends of the calls under way still count."""
        self._failure = error
        self._request = self._answer = None
        self._ready.clear()
        self._root.values.clear()
        for scopes in self._open.values():
            for scope in scopes:
                scope.values.clear()
                self._acknowledge(scope)
        self._open.clear()

    def _end_if_idle(self) -> None:
        if not self._calls and not self._is_over:
            self._is_over = True
            name, request_id = self._graph.name, self._template.id
            self._actions.append(Answer(InferenceResponse(name, "", request_id, error=self._failure)))


def _shown_as(tensor: Tensor, name: str, rank: int, batches: bool) -> Tensor:
    """The tensor under another name, over the same bytes, with a batch dimension of 1 more or less if that fits."""
    shape = tensor.shape
    if len(shape) != rank:
        if batches and len(shape) == rank - 1:
            shape = (1, *shape)
        elif not batches and len(shape) == rank + 1 and shape[0] == 1:
            shape = shape[1:]
    return Tensor(name, tensor.datatype, shape, tensor.data)
