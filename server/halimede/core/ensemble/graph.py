"""An ensemble as a checked graph: its steps, what flows between them, and the part of it that a request needs.

Tensors have a *scope*. Most are made once per request, in scope 0. Each answer of a decoupled step opens a scope of its
own, in which each step that depends on this answer runs once. The number of this scope is that of the step plus 1. A
step may use tensors of scope 0 and of one scope that a decoupled step opened, but not of two such scopes, because the
answers of two decoupled steps cannot be matched. So the decoupled steps that lead to the outputs are a chain, with at
most one in each scope.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from halimede.core.config.condition import Condition, parse_condition
from halimede.core.config.dataflow import check_dataflow
from halimede.core.config.model_config import EnsembleStep, ModelConfig, ModelInput, ModelOutput, inner_dims
from halimede.core.ensemble.rows import Fit, make_fit, match
from halimede.core.ensemble.when import kind_problems
from halimede.core.types import DataType
from halimede.core.types.error import clip, invalid
from halimede.core.types.tensor import shape_text
from halimede_spec.dataflow import make_flow, makers

MAX_PLANS = 64
"""Maximum number of plans that a graph keeps, one per selection of outputs."""

_SHOWN_PROBLEMS = 16


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a model. `inputs` and `outputs` map the model's tensors to the ensemble's.

    `version` -1 is the highest at the time of the call. `tensors` are those that the step waits for, each once. `fits`
    has the shapes that the model's inputs expect. `scope` is the scope in which the step runs, and `opens` that of its
    outputs, which differs only for a decoupled step.
    """

    index: int
    model: str
    version: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    when: Condition | None
    tensors: tuple[str, ...]
    decoupled: bool
    fits: Mapping[str, Fit]
    optional: frozenset[str]
    scope: int
    opens: int


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What a request for certain outputs needs.

    The users of tensors are the steps, by their index, and the answer, whose index follows that of the last step.
    `needed` has the outputs that are requested from each step; () for a step that is not run. `users` and `scope_of`
    are by tensor. `waits` counts the tensors that each user waits for, and `scopes` has the scope of each user. `uses`
    counts, by scope, the uses of its tensors in it, plus one for each tensor that inner scopes use. Those tensors are
    `inherited`, and `shared` has their users in each inner scope. `undecided` counts the users in each scope. `is_flat`
    means that every user is in scope 0 and that no step has a condition: every step then runs once.
    """

    outputs: tuple[str, ...]
    answer: int
    needed: tuple[tuple[str, ...], ...]
    users: Mapping[str, tuple[int, ...]]
    scope_of: Mapping[str, int]
    waits: tuple[int, ...]
    scopes: tuple[int, ...]
    uses: Mapping[int, Mapping[str, int]]
    shared: Mapping[int, Mapping[str, tuple[int, ...]]]
    inherited: tuple[str, ...]
    undecided: Mapping[int, int]
    is_flat: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """A valid ensemble. `fits` has the shape that each output should have before the ensemble's own `reshape`."""

    name: str
    steps: tuple[Step, ...]
    decoupled: bool
    max_inflight_requests: int
    batches: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fits: Mapping[str, Fit]
    _plans: dict[tuple[str, ...], RequestPlan] = field(default_factory=dict, repr=False, compare=False)

    def plan(self, outputs: tuple[str, ...]) -> RequestPlan:
        """The plan of a request for these outputs of the ensemble; () means all of them."""
        plan = self._plans.get(outputs)
        if plan is None:
            plan = _make_plan(self, outputs or self.outputs)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[outputs] = plan
        return plan


def members_of(config: ModelConfig) -> tuple[tuple[str, int], ...]:
    """Model and version (-1: the highest) of each step, in order; () for a model that is not an ensemble."""
    if config.ensemble_scheduling is None:
        return ()
    return tuple((step.model_name, step.model_version) for step in config.ensemble_scheduling.step)


def make_graph(config: ModelConfig, members: Sequence[ModelConfig]) -> Graph:
    """The graph of an ensemble; `members` are the complete configurations of its steps' models, in the steps' order.

    Raises INVALID_ARG with every mismatch. The ensemble is decoupled if a member is, independent of its own
    configuration.
    """
    ensemble = config.ensemble_scheduling
    steps = ensemble.step if ensemble is not None else ()
    found = [problem.message for problem in check_dataflow(config)]
    if not found:
        found = list(_member_problems(config, steps, members))
    if found:
        raise invalid(_joined(found))
    conditions = [None if step.when is None else parse_condition(step.when) for step in steps]
    found = [
        f"the condition of step {i} of ensemble '{clip(config.name)}' can not be decided: {problem}"
        for i, condition in enumerate(conditions)
        if condition is not None
        for problem in kind_problems(condition, _datatypes(config, steps, members))
    ]
    batching = _batching(config, steps, members)
    scopes = _Scopes()
    graph_steps = []
    for i in _order(config, steps, conditions):
        condition = conditions[i]
        named = condition.tensors if condition is not None else ()
        scope = scopes.of([*steps[i].input_map.values(), *named])
        if scope is None:
            found.append(_merges(config, members[i].name))
            scope = 0
        step = _make_step(i, steps[i], members[i], batching, condition, scope)
        scopes.by_tensor.update(dict.fromkeys(step.outputs.values(), step.opens))
        graph_steps.append(step)
    if scopes.of([output.name for output in config.output]) is None:
        found.append(_merges(config, config.name))
    if found:
        raise invalid(_joined(found))
    return Graph(
        name=config.name,
        steps=tuple(sorted(graph_steps, key=lambda step: step.index)),
        decoupled=any(step.decoupled for step in graph_steps),
        max_inflight_requests=ensemble.max_inflight_requests if ensemble is not None else 0,
        batches=config.max_batch_size > 0,
        inputs=tuple(tensor.name for tensor in config.input),
        outputs=tuple(tensor.name for tensor in config.output),
        fits={
            tensor.name: make_fit(
                inner_dims(tensor), batches=config.max_batch_size > 0, made_in_batches=batching[tensor.name]
            )
            for tensor in config.output
        },
    )


def _joined(problems: list[str]) -> str:
    shown = problems[:_SHOWN_PROBLEMS]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    return "; ".join(shown)


def _merges(config: ModelConfig, model: str) -> str:
    return (
        f"in ensemble {clip(config.name)}, step of model '{clip(model)}' receives inputs originated from different "
        "decoupled models"
    )


@dataclass(slots=True)
class _Scopes:
    """The scopes of tensors. Tensors that no step makes are in scope 0."""

    by_tensor: dict[str, int] = field(default_factory=dict)

    def of(self, tensors: Sequence[str]) -> int | None:
        """The scope of a user of these tensors; None if they are in the scopes of two decoupled steps."""
        scopes = {self.by_tensor.get(tensor, 0) for tensor in tensors} - {0}
        if len(scopes) > 1:
            return None
        return scopes.pop() if scopes else 0


def _order(config: ModelConfig, steps: Sequence[EnsembleStep], conditions: Sequence[Condition | None]) -> Sequence[int]:
    """The steps in an order in which each follows those that make its tensors. The steps must not form a circle."""
    inputs = [tensor.name for tensor in config.input]
    needs = [
        {*step.input_map.values(), *(condition.tensors if condition is not None else ())}
        for step, condition in zip(steps, conditions, strict=True)
    ]
    return make_flow(inputs, makers(inputs, [tuple(step.output_map.values()) for step in steps]), needs).order


def _batching(config: ModelConfig, steps: Sequence[EnsembleStep], members: Sequence[ModelConfig]) -> Mapping[str, bool]:
    """Whether what makes each tensor batches: the ensemble for its inputs, else the model of a step."""
    batching = {tensor.name: config.max_batch_size > 0 for tensor in config.input}
    for step, member in zip(steps, members, strict=True):
        batching.update(dict.fromkeys(step.output_map.values(), member.max_batch_size > 0))
    return batching


def _make_step(
    index: int,
    step: EnsembleStep,
    member: ModelConfig,
    batching: Mapping[str, bool],
    condition: Condition | None,
    scope: int,
) -> Step:
    inputs = {tensor.name: tensor for tensor in member.input}
    named = condition.tensors if condition is not None else ()
    return Step(
        index=index,
        model=step.model_name,
        version=step.model_version,
        # In the order of the model's configuration: such requests are the cheapest to check.
        inputs={tensor.name: step.input_map[tensor.name] for tensor in member.input if tensor.name in step.input_map},
        outputs={o.name: step.output_map[o.name] for o in member.output if o.name in step.output_map},
        when=condition,
        tensors=tuple(dict.fromkeys([*step.input_map.values(), *named])),
        decoupled=member.is_decoupled,
        fits={
            name: make_fit(inputs[name].dims, batches=member.max_batch_size > 0, made_in_batches=batching[tensor])
            for name, tensor in step.input_map.items()
        },
        optional=frozenset(name for name in step.input_map if inputs[name].optional),
        scope=scope,
        opens=index + 1 if member.is_decoupled else scope,
    )


def _member_problems(
    config: ModelConfig, steps: Sequence[EnsembleStep], members: Sequence[ModelConfig]
) -> Iterator[str]:
    """Mismatches between the steps' maps and the models' tensors, and between the models."""
    name = clip(config.name)
    for step, member in zip(steps, members, strict=True):
        model = clip(member.name)
        called = f"in ensemble {name}, ensemble tensor"
        # A model that does not batch gets one row at a time; its own check at run time accepts or refuses it.
        if 0 < member.max_batch_size < config.max_batch_size:
            yield (
                f"ensemble {name} allows maximum batch size {config.max_batch_size}, but it contains model {model} "
                f"which only allows maximum batch size to be {member.max_batch_size}"
            )
        known = {tensor.name for tensor in member.input}
        for key, tensor in step.input_map.items():
            if key not in known:
                yield f"{called} {clip(tensor)} is mapping to non-existing input {clip(key)} in model {model}"
        known = {tensor.name for tensor in member.output}
        for key, tensor in step.output_map.items():
            if key not in known:
                yield f"{called} {clip(tensor)} is mapped from non-existing output {clip(key)} in model {model}"
        for model_input in member.input:
            if not model_input.optional and model_input.name not in step.input_map:
                yield (
                    f"in ensemble {name}, input {clip(model_input.name)} in model {model} is not mapped to any "
                    "ensemble tensors"
                )
    for tensor, declared in _declarations(config, steps, members).items():
        yield from _disagreement(name, tensor, declared)


@dataclass(frozen=True, slots=True)
class _Declared:
    """A model's configuration of a tensor of the ensemble."""

    model: str
    batches: bool
    datatype: DataType
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batches else self.dims


def _declarations(
    config: ModelConfig, steps: Sequence[EnsembleStep], members: Sequence[ModelConfig]
) -> dict[str, list[_Declared]]:
    """The configurations of each of the ensemble's tensors: the ensemble's own, then its maker's, then its users'."""
    declared: dict[str, list[_Declared]] = {}

    def add(model: ModelConfig, about: Sequence[ModelInput | ModelOutput], mapped: Mapping[str, str] | None) -> None:
        for tensor in about:
            name = tensor.name if mapped is None else mapped.get(tensor.name)
            if name is not None:
                # Only the model itself sees its own reshape; the steps see the dimensions before it.
                dims = inner_dims(tensor) if mapped is None else tensor.dims
                declaration = _Declared(clip(model.name), model.max_batch_size > 0, tensor.data_type, dims)
                declared.setdefault(name, []).append(declaration)

    add(config, config.input, None)
    add(config, config.output, None)
    for step, member in zip(steps, members, strict=True):
        add(member, member.output, step.output_map)
    for step, member in zip(steps, members, strict=True):
        add(member, member.input, step.input_map)
    return declared


def _disagreement(name: str, tensor: str, declared: Sequence[_Declared]) -> Iterator[str]:
    """The first two configurations of a tensor that disagree."""
    called = f"in ensemble {name}, ensemble tensor {clip(tensor)}"
    first = declared[0]
    for other in declared[1:]:
        if other.datatype is not first.datatype:
            yield (
                f"{called}: inconsistent data type: {first.datatype.config_name} is inferred from model {first.model} "
                f"while {other.datatype.config_name} is inferred from model {other.model}"
            )
            return
    for i, other in enumerate(declared):
        for earlier in declared[:i]:
            if not _shapes_fit(earlier, other):
                yield (
                    f"{called}: inconsistent shape: {shape_text(earlier.shape)} is inferred from model {earlier.model} "
                    f"while {shape_text(other.shape)} is inferred from model {other.model}"
                )
                return


def _shapes_fit(one: _Declared, other: _Declared) -> bool:
    """Whether a tensor can have both shapes, with a batch dimension of 1 added or removed if needed."""
    return match(one.shape, other.shape) or (one.batches != other.batches and match(one.dims, other.dims))


def _datatypes(
    config: ModelConfig, steps: Sequence[EnsembleStep], members: Sequence[ModelConfig]
) -> dict[str, DataType]:
    return {tensor: declared[0].datatype for tensor, declared in _declarations(config, steps, members).items()}


def _make_plan(graph: Graph, outputs: tuple[str, ...]) -> RequestPlan:
    steps = graph.steps
    maker = {tensor: step for step in steps for tensor in step.outputs.values()}
    wanted = dict.fromkeys(outputs)
    queue = list(wanted)
    active: set[int] = set()
    while queue:
        step = maker.get(queue.pop())
        if step is not None and step.index not in active:
            active.add(step.index)
            queue += step.tensors
    answer = len(steps)
    waited: list[tuple[str, ...]] = [step.tensors if step.index in active else () for step in steps]
    waited.append(tuple(wanted))
    scope_of = {tensor: maker[tensor].opens if tensor in maker else 0 for tensors in waited for tensor in tensors}
    scopes = [step.scope for step in steps]
    scopes.append(max((scope_of[tensor] for tensor in wanted), default=0))
    users: dict[str, tuple[int, ...]] = {}
    for user, tensors in enumerate(waited):
        for tensor in tensors:
            users[tensor] = (*users.get(tensor, ()), user)
    uses: dict[int, dict[str, int]] = {}
    shared: dict[int, dict[str, tuple[int, ...]]] = {}
    undecided: dict[int, int] = {}
    for tensor, its_users in users.items():
        scope = scope_of[tensor]
        here = sum(scopes[user] == scope for user in its_users)
        uses.setdefault(scope, {})[tensor] = here + (here < len(its_users))
        for user in its_users:
            if scopes[user] != scope:
                there = shared.setdefault(scopes[user], {})
                there[tensor] = (*there.get(tensor, ()), user)
    for user, tensors in enumerate(waited):
        if tensors:
            undecided[scopes[user]] = undecided.get(scopes[user], 0) + 1
    return RequestPlan(
        outputs=tuple(wanted),
        answer=answer,
        needed=tuple(
            tuple(key for key, tensor in step.outputs.items() if step.index in active and tensor in users)
            for step in steps
        ),
        users=users,
        scope_of=scope_of,
        waits=tuple(map(len, waited)),
        scopes=tuple(scopes),
        uses=uses,
        shared=shared,
        inherited=tuple(dict.fromkeys(tensor for there in shared.values() for tensor in there)),
        undecided=undecided,
        is_flat=not any(scope_of.values()) and not any(steps[i].when or steps[i].decoupled for i in active),
    )
