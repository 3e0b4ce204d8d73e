"""The server accepts the ensembles that the operator accepts."""

import json

from hypothesis import given, settings

from halimede.core.config.condition import parse_condition
from halimede.core.config.read import read_json
from halimede.core.config.validate import validate
from halimede.core.types import InferenceError
from halimede_operator.core.children.ensemble_config import ensemble_config
from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import EnsembleSpec, Kind
from halimede_operator.core.spec.when import read_when, renamed
from support.custom_resources import Json, ensemble
from support.examples import Draws, drawn

PLATFORM = Platform(server_image="server", gpu_server_image="gpu-server")

NAMES = {"request.A": "A", "tok.x": "tok.x", "my-step.y": "Y", "request.odd name": "odd name"}
WORDS = (
    *("request.A", "tok.x", "my-step.y", "`tok.x`", "`request.odd name`"),
    *(".present", ".shape[0]", ".shape[-1]", ".size", "and", "or", "not", "(", ")", "==", "<", ">="),
    *(
        "1",
        "-2.5",
        "1e999",
        "9" * 400,
        "'tok.x'",
        '"it\\"s"',
        "true",
        "False",
        "parameters.p",
        "parameters.`p q`",
        "parameters",
        "=",
    ),
)


def for_the_server(word: str) -> str:
    name = NAMES.get(word.strip("`"))
    return word if name is None else f"`{name}`"


OPERANDS = ("request.A", "tok.x .present", "my-step.y .shape[0]", "1", "'tok.x'", "true", "parameters.p")


def comparison_of(draws: Draws) -> str:
    operand = draws.pick(OPERANDS)
    return f"{operand} {draws.pick(('==', '<', '>='))} {draws.pick(OPERANDS)}" if draws.below(2) else operand


def readable(draws: Draws, depth: int = 0) -> str:
    match draws.below(5) if depth < 4 else 0:
        case 0 | 1:
            return comparison_of(draws)
        case 2:
            return f"not {readable(draws, depth + 1)}"
        case 3:
            return f"( {readable(draws, depth + 1)} )"
        case _:
            return f"{readable(draws, depth + 1)} {draws.pick(('and', 'or'))} {readable(draws, depth + 1)}"


def condition_of(draws: Draws) -> list[str]:
    """Conditions as words: valid ones, ones with an additional word, and random ones."""
    words = readable(draws).split() if draws.below(5) else draws.some(WORDS, 9)
    if draws.below(2):
        words.insert(draws.below(len(words) + 1), draws.pick(WORDS))
    return words


@settings(deadline=None, max_examples=500)
@given(drawn(condition_of, 60))
def test_a_condition_is_read_as_the_server_reads_it(words: list[str]) -> None:
    for_operator, for_server = " ".join(words), " ".join(for_the_server(word) for word in words)
    references = read_when(for_operator)
    try:
        condition = parse_condition(for_server)
    except InferenceError:
        assert isinstance(references, str)
        return
    assert not isinstance(references, str), references
    assert tuple(dict.fromkeys(NAMES[reference.tensor] for reference in references)) == condition.tensors
    assert parse_condition(renamed(for_operator, NAMES)).expression == condition.expression


STEPS = ("a", "b", "c", "d")
OUTPUTS = ("x", "y")
SOURCES = ("request.A", "request.B", *(f"{step}.{output}" for step in STEPS for output in OUTPUTS))


def ensemble_of(draws: Draws) -> Json:
    """Steps that mostly use earlier steps, and sometimes anything."""
    steps: list[Json] = []
    known = ["request.A", "request.B"]
    for name in STEPS[: 1 + draws.below(len(STEPS))]:
        sources = known if draws.below(20) else SOURCES
        when = None if draws.below(10) else f"{draws.pick(SOURCES)}.present or {draws.pick(SOURCES)} > 1"
        inputs = {each: draws.pick(sources) for each in (draws.pick("pqr"), *draws.some("pqr", 2))}
        outputs = {output.upper(): output for output in OUTPUTS[: 1 + draws.below(len(OUTPUTS))]}
        step = {"name": name, "modelRef": {"name": f"m-{name}"}, "inputs": inputs, "outputs": outputs}
        steps.append({**step, "when": when})
        known += [f"{name}.{output}" for output in outputs.values()]
    used = {source for step in steps for source in step["inputs"].values()}
    ends = [source for source in known[2:] if source not in used] or [known[-1]]
    first = "OUT" if draws.below(10) else draws.pick(("OUT", "A", "a.x", "b.y"))
    return ensemble(
        maxBatchSize=draws.below(3),
        inputs=[{"name": name, "dataType": "FP32", "shape": [-1]} for name in ("A", "B") if f"request.{name}" in used],
        outputs=[
            {"name": f"{first}{i or ''}", "dataType": "FP32", "shape": [-1], "from": end} for i, end in enumerate(ends)
        ],
        steps=draws.shuffled(steps),
    )


def server_problems(spec: EnsembleSpec) -> list[str]:
    config = ensemble_config(spec, {step.model: step.model for step in spec.steps}, {})
    read = read_json(json.dumps(config))
    return [problem.message for problem in (*read.problems, *validate(read.config))]


@settings(deadline=None, max_examples=300)
@given(drawn(ensemble_of, 60))
def test_an_ensemble_without_problems_is_valid_for_the_server(example: Json) -> None:
    spec, problems = parse(Kind.MODEL_ENSEMBLE, example, PLATFORM)
    if isinstance(spec, EnsembleSpec):
        assert server_problems(spec) == []
    else:
        assert problems


def test_the_example_is_valid_for_the_server() -> None:
    spec, _ = parse(Kind.MODEL_ENSEMBLE, ensemble(), PLATFORM)
    assert isinstance(spec, EnsembleSpec)
    assert server_problems(spec) == []
