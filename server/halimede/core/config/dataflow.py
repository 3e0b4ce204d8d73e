"""Check how an ensemble's steps are connected: which step makes each tensor, which use it, and in what order.

Error texts are Triton's if it has one, with its missing quotation marks. A step depends on the tensors of its
`input_map` and on those that its condition names.
"""

from collections.abc import Generator, Iterator, Sequence

from halimede.core.config.condition import Condition, parse_condition
from halimede.core.config.model_config import EnsembleStep, ModelConfig
from halimede.core.types import InferenceError, Problem
from halimede.core.types.error import clip
from halimede_spec.dataflow import Flow, make_flow, makers, walk


def check_dataflow(config: ModelConfig) -> list[Problem]:
    """Every problem of how the steps are connected; none for a model that is not an ensemble or has no steps."""
    if config.ensemble_scheduling is None or not config.ensemble_scheduling.step:
        return []
    return list(_problems(config, config.ensemble_scheduling.step))


def _problems(config: ModelConfig, steps: tuple[EnsembleStep, ...]) -> Iterator[Problem]:
    name = clip(config.name)
    given = {tensor.name for tensor in config.input}
    wanted = {tensor.name for tensor in config.output}
    maker = makers(given, [step.output_map.values() for step in steps])
    conditions: list[Condition | None] = []
    made: set[str] = set()
    for i, step in enumerate(steps):
        conditions.append((yield from _condition(step, i, name)))
        yield from _maps(step, i, name, given, made)
    needs: list[tuple[str, ...]] = []
    for i, (step, condition) in enumerate(zip(steps, conditions, strict=True)):
        known = []
        for tensor in condition.tensors if condition is not None else ():
            if tensor in given or tensor in maker:
                known.append(tensor)
            else:
                yield Problem(
                    f"the condition of step {i} of ensemble '{name}' names '{clip(tensor)}', which is not one "
                    "of its tensors: it must be an input or occur in an output map",
                    f"ensemble_scheduling.step[{i}].when",
                )
        needs.append(tuple(dict.fromkeys([*step.input_map.values(), *known])))
    flow = make_flow(given, maker, needs)
    for i, model_input in enumerate(config.input):
        if model_input.name and model_input.name not in flow.users:
            text = f"ensemble input '{clip(model_input.name)}' for ensemble {name}' is not used"
            yield Problem(text, f"input[{i}].name")
    for i, output in enumerate(config.output):
        if output.name and output.name not in flow.maker and output.name not in flow.users:
            text = f"ensemble output '{clip(output.name)}' for ensemble {name}' is not used"
            yield Problem(text, f"output[{i}].name")
    yield from _unwritten(config, flow)
    for tensor, i in flow.maker.items():
        if tensor not in flow.users and tensor not in wanted:
            text = f"ensemble tensor '{clip(tensor)}' is unused in ensemble '{name}'"
            yield Problem(text, f"ensemble_scheduling.step[{i}].output_map")


def _condition(step: EnsembleStep, i: int, name: str) -> Generator[Problem, None, Condition | None]:
    """Yield the problem of the condition of step `i`, if it has one. Returns the condition if it is valid."""
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


def _maps(step: EnsembleStep, i: int, name: str, given: set[str], made: set[str]) -> Iterator[Problem]:
    """Yield the problems of the maps of step `i`. Its tensors are added to `made`, which has those of earlier steps."""
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
        elif tensor in made:
            yield Problem(
                f"ensemble tensor '{clip(tensor)}' can appear in an output map only once for ensemble '{name}' step "
                f"{i}",
                where,
            )
        else:
            made.add(tensor)


def _unwritten(config: ModelConfig, flow: Flow) -> Iterator[Problem]:
    """The tensors that are never written: what needs them, and the circles of steps that wait for each other."""
    name = clip(config.name)
    causes: dict[str, str] = {}
    reported: set[str] = set()
    for i, output in enumerate(config.output):
        if output.name in flow.written or (output.name not in flow.maker and output.name not in flow.users):
            continue
        circle = _explain(output.name, flow, causes)
        cause = causes[output.name]
        text = f"output '{clip(output.name)}' for ensemble '{name}' is not written"
        if cause != output.name:
            text += f": at least one of its depending tensors, '{clip(cause)}', is not connected"
        yield Problem(text, f"output[{i}].name")
        reported.add(cause)
        if circle:
            yield _circular(circle, flow, name)
    for tensor, users in flow.users.items():
        if tensor in flow.written:
            continue
        circle = _explain(tensor, flow, causes)
        if circle:
            yield _circular(circle, flow, name)
        elif tensor not in flow.maker and tensor not in reported:
            yield Problem(
                f"ensemble tensor '{clip(tensor)}' is not written: it is not an input of ensemble '{name}' and "
                "occurs in no output map",
                f"ensemble_scheduling.step[{users[0]}].input_map",
            )


def _circular(circle: Sequence[str], flow: Flow, name: str) -> Problem:
    around = [*circle, circle[0]]
    shown = [f"'{clip(tensor)}'" for tensor in around[:_SHOWN]] + (["..."] if len(around) > _SHOWN else [])
    return Problem(
        f"circular dependency between tensors of ensemble '{name}': {' -> '.join(shown)}",
        f"ensemble_scheduling.step[{flow.maker[circle[0]]}].input_map",
    )


_SHOWN = 10


def _explain(tensor: str, flow: Flow, causes: dict[str, str]) -> Sequence[str]:
    """Add to `causes` why the tensor is not written: a tensor that no step makes, or one that waits for itself.

    Returns a circle that was not known before, in the order of the flow; () if there is no such circle.
    """

    def following(at: str) -> str | None:
        return None if at in causes or at not in flow.maker else next(iter(flow.missing(flow.maker[at])))

    way = walk(tensor, following)
    end = way.circle[0] if way.circle else way.path[-1]
    cause = causes.get(end, end)
    for passed in way.path:
        causes[passed] = cause
    return way.circle[::-1]
