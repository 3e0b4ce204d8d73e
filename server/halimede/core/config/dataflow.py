"""What an ensemble's steps say of its tensors, held against itself: who makes each, who uses it, and in what order.

Texts are Triton's where it has one, with its missing quotation marks. A step depends on the tensors of its `input_map`
and on those that its condition names.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from halimede.core.config.condition import Condition, parse_condition
from halimede.core.config.model_config import EnsembleStep, ModelConfig
from halimede.core.types import InferenceError, Problem
from halimede.core.types.error import clip


def check_dataflow(config: ModelConfig) -> list[Problem]:
    """Every problem of how the steps are connected; none for what is no ensemble or has no steps."""
    if config.ensemble_scheduling is None or not config.ensemble_scheduling.step:
        return []
    return list(_problems(config, config.ensemble_scheduling.step))


@dataclass(slots=True)
class _Flow:
    """`maker` is the step that makes a tensor; `users` are the steps that need it; `inputs` those of each step."""

    maker: dict[str, int] = field(default_factory=dict)
    users: dict[str, list[int]] = field(default_factory=dict)
    inputs: list[tuple[str, ...]] = field(default_factory=list)


def _problems(config: ModelConfig, steps: tuple[EnsembleStep, ...]) -> Iterator[Problem]:
    name = clip(config.name)
    given = {tensor.name for tensor in config.input}
    wanted = {tensor.name for tensor in config.output}
    flow = _Flow()
    conditions: list[Condition | None] = []
    for i, step in enumerate(steps):
        conditions.append((yield from _condition(step, i, name)))
        yield from _made(step, i, name, given, flow)
    for i, (step, condition) in enumerate(zip(steps, conditions, strict=True)):
        known = []
        for tensor in condition.tensors if condition is not None else ():
            if tensor in given or tensor in flow.maker:
                known.append(tensor)
            else:
                yield Problem(
                    f"the condition of step {i} of ensemble '{name}' names '{clip(tensor)}', which is none of its "
                    "tensors: it must be an input or stand in an output map",
                    f"ensemble_scheduling.step[{i}].when",
                )
        flow.inputs.append(tuple(dict.fromkeys([*step.input_map.values(), *known])))
        for tensor in flow.inputs[i]:
            flow.users.setdefault(tensor, []).append(i)
    for i, model_input in enumerate(config.input):
        if model_input.name and model_input.name not in flow.users:
            text = f"ensemble input '{clip(model_input.name)}' for ensemble {name}' is not used"
            yield Problem(text, f"input[{i}].name")
    for i, output in enumerate(config.output):
        if output.name and output.name not in flow.maker and output.name not in flow.users:
            text = f"ensemble output '{clip(output.name)}' for ensemble {name}' is not used"
            yield Problem(text, f"output[{i}].name")
    yield from _unwritten(config, flow, given)
    for tensor, i in flow.maker.items():
        if tensor not in flow.users and tensor not in wanted:
            text = f"ensemble tensor '{clip(tensor)}' is unused in ensemble '{name}'"
            yield Problem(text, f"ensemble_scheduling.step[{i}].output_map")


def _condition(step: EnsembleStep, i: int, name: str) -> Generator[Problem, None, Condition | None]:
    """Yields what is wrong with the condition of step `i`, and returns it where nothing is."""
    if step.when is None:
        return None
    try:
        return parse_condition(step.when)
    except InferenceError as error:
        yield Problem(
            f"the condition of step {i} of ensemble '{name}' cannot be read: {error.message}",
            f"ensemble_scheduling.step[{i}].when",
        )
    return None


def _made(step: EnsembleStep, i: int, name: str, given: set[str], flow: _Flow) -> Iterator[Problem]:
    for field_name, mapped in (("input_map", step.input_map), ("output_map", step.output_map)):
        for key, tensor in mapped.items():
            if not key or not tensor:
                yield Problem(
                    f"'{field_name}' in step {i} of ensemble '{name}' must name a tensor on both sides, got "
                    f"'{clip(key)}' and '{clip(tensor)}'",
                    f'ensemble_scheduling.step[{i}].{field_name}["{key}"]',
                )
    for key, tensor in step.output_map.items():
        where = f'ensemble_scheduling.step[{i}].output_map["{key}"]'
        if tensor in given:
            yield Problem(
                f"ensemble input '{clip(tensor)}' can not appear in an output map for ensemble '{name}' step {i}", where
            )
        elif tensor in flow.maker:
            yield Problem(
                f"ensemble tensor '{clip(tensor)}' can appear in an output map only once for ensemble '{name}' step "
                f"{i}",
                where,
            )
        else:
            flow.maker[tensor] = i


def _unwritten(config: ModelConfig, flow: _Flow, given: set[str]) -> Iterator[Problem]:
    """The tensors that never come: what needs them, and the circles of steps that wait for one another."""
    name = clip(config.name)
    ready = _ready(flow, given)
    causes: dict[str, str] = {}
    told: set[str] = set()
    for i, output in enumerate(config.output):
        if output.name in ready or (output.name not in flow.maker and output.name not in flow.users):
            continue
        circle = _explain(output.name, flow, ready, causes)
        cause = causes[output.name]
        text = f"output '{clip(output.name)}' for ensemble '{name}' is not written"
        if cause != output.name:
            text += f": at least one of its depending tensors, '{clip(cause)}', is not connected"
        yield Problem(text, f"output[{i}].name")
        told.add(cause)
        if circle:
            yield _circular(circle, flow, name)
    for tensor, users in flow.users.items():
        if tensor in ready:
            continue
        circle = _explain(tensor, flow, ready, causes)
        if circle:
            yield _circular(circle, flow, name)
        elif tensor not in flow.maker and tensor not in told:
            yield Problem(
                f"ensemble tensor '{clip(tensor)}' is not written: it is no input of ensemble '{name}' and stands in "
                "no output map",
                f"ensemble_scheduling.step[{users[0]}].input_map",
            )


def _circular(circle: list[str], flow: _Flow, name: str) -> Problem:
    around = [*circle, circle[0]]
    shown = [f"'{clip(tensor)}'" for tensor in around[:_SHOWN]] + (["..."] if len(around) > _SHOWN else [])
    return Problem(
        f"circular dependency between tensors of ensemble '{name}': {' -> '.join(shown)}",
        f"ensemble_scheduling.step[{flow.maker[circle[0]]}].input_map",
    )


_SHOWN = 10


def _ready(flow: _Flow, given: set[str]) -> set[str]:
    """All tensors that there will be when every step runs that can."""
    ready = set(given)
    waits = [len(inputs) for inputs in flow.inputs]
    made: list[list[str]] = [[] for _ in flow.inputs]
    for tensor, maker in flow.maker.items():
        made[maker].append(tensor)
    # A step without inputs is a problem of its own; here it does not make others wait.
    news = [*given, *(tensor for i, count in enumerate(waits) if count == 0 for tensor in made[i])]
    ready.update(news)
    while news:
        for user in flow.users.get(news.pop(), ()):
            waits[user] -= 1
            if waits[user] == 0:
                news += made[user]
                ready.update(made[user])
    return ready


def _explain(tensor: str, flow: _Flow, ready: set[str], causes: dict[str, str]) -> list[str]:
    """Add to `causes` why the tensor is not written: one that nobody makes, or one that waits for itself.

    Returns a circle that was not known before, in the order of the flow; [] where there is none.
    """
    path: dict[str, None] = {}
    while tensor in flow.maker and tensor not in causes and tensor not in path:
        path[tensor] = None
        tensor = next(needed for needed in flow.inputs[flow.maker[tensor]] if needed not in ready)
    cause = causes.setdefault(tensor, tensor)
    for passed in path:
        causes[passed] = cause
    passed_all = list(path)
    return passed_all[passed_all.index(tensor) :][::-1] if tensor in path else []
