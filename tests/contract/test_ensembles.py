"""The server accepts the ensembles that the operator accepts."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.core.config.condition import parse_condition
from halimede.core.config.read import read_json
from halimede.core.config.validate import validate
from halimede.core.types import InferenceError
from halimede_operator.core.api.parse import parse
from halimede_operator.core.api.spec import EnsembleSpec, Kind
from halimede_operator.core.api.when import read_when, renamed
from halimede_operator.core.children.ensemble_config import ensemble_config
from halimede_operator.core.platform import Platform
from support.custom_resources import Json, ensemble

PLATFORM = Platform(server_image="server", gpu_server_image="gpu-server")

NAMES = {"request.A": "A", "tok.x": "tok.x", "my-step.y": "Y", "request.odd name": "odd name"}
WORDS = [
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
]


def for_the_server(word: str) -> str:
    name = NAMES.get(word.strip("`"))
    return word if name is None else f"`{name}`"


OPERANDS = st.sampled_from(
    ["request.A", "tok.x .present", "my-step.y .shape[0]", "1", "'tok.x'", "true", "parameters.p"]
)
COMPARISONS = OPERANDS | st.builds("{} {} {}".format, OPERANDS, st.sampled_from(["==", "<", ">="]), OPERANDS)
READABLE = st.recursive(
    COMPARISONS,
    lambda inner: (
        st.builds("not {}".format, inner)
        | st.builds("( {} )".format, inner)
        | st.builds("{} {} {}".format, inner, st.sampled_from(["and", "or"]), inner)
    ),
    max_leaves=6,
).map(str.split)


@st.composite
def conditions(draw: st.DrawFn) -> list[str]:
    """Conditions as words: valid ones, ones with an additional word, and random ones."""
    words = draw(READABLE) if draw(st.integers(0, 4)) else draw(st.lists(st.sampled_from(WORDS), max_size=9))
    if draw(st.booleans()):
        words.insert(draw(st.integers(0, len(words))), draw(st.sampled_from(WORDS)))
    return words


@settings(deadline=None, max_examples=500)
@given(conditions())
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
SOURCES = ["request.A", "request.B", *(f"{step}.{output}" for step in STEPS for output in OUTPUTS)]
CONDITIONS = st.none() | st.builds("{}.present or {} > 1".format, st.sampled_from(SOURCES), st.sampled_from(SOURCES))


@st.composite
def ensembles(draw: st.DrawFn) -> Json:
    """Steps that mostly use earlier steps, and sometimes anything."""
    steps: list[Json] = []
    known = ["request.A", "request.B"]
    for name in STEPS[: draw(st.integers(1, len(STEPS)))]:
        sources = st.sampled_from(known if draw(st.integers(0, 19)) else SOURCES)
        when = draw(CONDITIONS) if not draw(st.integers(0, 9)) else None
        inputs = draw(st.dictionaries(st.sampled_from(["p", "q", "r"]), sources, min_size=1))
        outputs = {output.upper(): output for output in OUTPUTS[: draw(st.integers(1, len(OUTPUTS)))]}
        step = {"name": name, "modelRef": {"name": f"m-{name}"}, "inputs": inputs, "outputs": outputs}
        steps.append({**step, "when": when})
        known += [f"{name}.{output}" for output in outputs.values()]
    used = {source for step in steps for source in step["inputs"].values()}
    ends = [source for source in known[2:] if source not in used] or [known[-1]]
    names = st.sampled_from(["OUT", "A", "a.x", "b.y"]) if not draw(st.integers(0, 9)) else st.just("OUT")
    first = draw(names)
    return ensemble(
        maxBatchSize=draw(st.integers(0, 2)),
        inputs=[{"name": name, "dataType": "FP32", "shape": [-1]} for name in ("A", "B") if f"request.{name}" in used],
        outputs=[
            {"name": f"{first}{i or ''}", "dataType": "FP32", "shape": [-1], "from": end} for i, end in enumerate(ends)
        ],
        steps=draw(st.permutations(steps)),
    )


def server_problems(spec: EnsembleSpec) -> list[str]:
    config = ensemble_config(spec, {step.model: step.model for step in spec.steps}, {})
    read = read_json(json.dumps(config))
    return [problem.message for problem in (*read.problems, *validate(read.config))]


@settings(deadline=None, max_examples=300)
@given(ensembles())
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
