"""The graph of an ensemble: mismatches with the models of its steps, scopes and plans."""

from dataclasses import replace

import pytest

from halimede.core.config.model_config import ModelConfig, ModelTensorReshape
from halimede.core.ensemble.graph import MAX_PLANS, make_graph, members_of
from halimede.core.ensemble.rows import make_fit
from halimede.core.types import DataType, ErrorCode, InferenceError
from support.graphs import ensemble, graph, model
from support.refusals import error_of

A = model("a")
B = model("b")
TWO = model("two", inputs=("IN", "IN2"))
OPTIONAL = model("optional", inputs=("IN", "IN2?"))
PAIR = model("pair", outputs=("OUT", "OUT2"))
MANY = model("many", decoupled=True)
MORE = model("more", decoupled=True)
X_TO_Y = ({"IN": "x"}, {"OUT": "y"})


def refused(steps, *args, **kwargs) -> str:
    error = error_of(graph, steps, *args, **kwargs)
    assert error.code is ErrorCode.INVALID_ARG
    return error.message


def test_the_members_are_the_steps_models_in_their_order():
    config = ensemble([(A, {"IN": "x"}, {"OUT": "m"}), (B, {"IN": "m"}, {"OUT": "y"})])
    assert members_of(config) == (("a", -1), ("b", -1))
    assert members_of(ModelConfig(name="m")) == ()


def test_graph_has_its_steps():
    made = graph([(A, {"IN": "x"}, {"OUT": "m"}), (B, {"IN": "m"}, {"OUT": "y"}, "m > 0")])
    assert (made.name, made.inputs, made.outputs, made.decoupled) == ("e", ("x",), ("y",), False)
    first, second = made.steps
    assert (first.index, first.model, first.version, first.when) == (0, "a", -1, None)
    assert (first.inputs, first.outputs) == ({"IN": "x"}, {"OUT": "m"})
    assert second.when is not None
    assert second.when.text == "m > 0"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [(model("a", batch=4), *X_TO_Y)],
            "ensemble e allows maximum batch size 8, but it contains model a which only allows maximum batch size to be "
            "4",
        ),
        (
            [(A, {"IN": "x", "NOPE": "x"}, {"OUT": "y"})],
            "in ensemble e, ensemble tensor x is mapping to non-existing input NOPE in model a",
        ),
        (
            [(A, {"IN": "x"}, {"NOPE": "y"})],
            "in ensemble e, ensemble tensor y is mapped from non-existing output NOPE in model a",
        ),
        ([(TWO, *X_TO_Y)], "in ensemble e, input IN2 in model two is not mapped to any ensemble tensors"),
        (
            [(model("a", datatype=DataType.INT32), *X_TO_Y)],
            "in ensemble e, ensemble tensor x: inconsistent data type: TYPE_FP32 is inferred from model e while "
            "TYPE_INT32 is inferred from model a; in ensemble e, ensemble tensor y: inconsistent data type: TYPE_FP32 is "
            "inferred from model e while TYPE_INT32 is inferred from model a",
        ),
        (
            [
                (A, {"IN": "x"}, {"OUT": "m"}),
                (replace(model("b", dims=(2,)), output=A.output), {"IN": "m"}, {"OUT": "y"}),
            ],
            "in ensemble e, ensemble tensor m: inconsistent shape: [-1,1] is inferred from model a while [-1,2] is "
            "inferred from model b",
        ),
        (
            [
                (A, {"IN": "x"}, {"OUT": "m"}),
                (model("b", dims=(1, 1)), {"IN": "m"}, {"OUT": "n"}),
                (A, {"IN": "x"}, {"OUT": "y"}, "n > 0"),
            ],
            "in ensemble e, ensemble tensor m: inconsistent shape: [-1,1] is inferred from model a while [-1,1,1] is "
            "inferred from model b",
        ),
        (
            [(A, *X_TO_Y, "x == 'a'")],
            "the condition of step 0 of ensemble 'e' can not be decided: the first element of tensor 'x' is a number and "
            "'a' is a text, which '==' does not compare",
        ),
        # Problems of the configuration alone are also found here.
        (
            [(A, {"IN": "n"}, {"OUT": "y"})],
            "ensemble input 'x' for ensemble e' is not used; output 'y' for ensemble 'e' is not written: at least one of "
            "its depending tensors, 'n', is not connected",
        ),
    ],
)
def test_mismatches_are_reported(steps, message):
    assert refused(steps) == message


def test_only_the_first_of_many_problems_are_listed():
    steps = [(A, {"IN": "x", **{f"I{i}": "x" for i in range(100)}}, {"OUT": "y"})]
    message = refused(steps)
    assert message.count("; ") == 16
    assert message.endswith("; and 84 more")


@pytest.mark.parametrize(
    "steps",
    [
        # One batches, the other does not.
        [(model("a", batch=0), {"IN": "x"}, {"OUT": "m"}), (A, {"IN": "m"}, {"OUT": "y"})],
        # A variable dimension fits any.
        [(model("a", dims=(-1,)), {"IN": "x"}, {"OUT": "m"}), (B, {"IN": "m"}, {"OUT": "y"})],
        # An optional input may be left out.
        [(OPTIONAL, *X_TO_Y)],
        # An output may be left aside.
        [(PAIR, *X_TO_Y)],
        [(model("a", batch=16), *X_TO_Y)],
    ],
)
def test_valid_ensemble_becomes_a_graph(steps):
    assert not graph(steps).decoupled


def test_tensor_must_fit_every_user_and_not_only_its_maker():
    any_size, one, two = model("any", dims=(-1,)), model("one", dims=(1,)), model("two", dims=(2,))
    steps = [
        (any_size, {"IN": "x"}, {"OUT": "m"}),
        (one, {"IN": "m"}, {"OUT": "y"}),
        (two, {"IN": "m"}, {"OUT": "z"}),
    ]
    config = ensemble(steps, outputs=("y", "z"), dims=(-1,))
    with pytest.raises(InferenceError, match=r"tensor m: inconsistent shape: .*model one while .*model two"):
        make_graph(config, [step[0] for step in steps])


@pytest.mark.parametrize(
    ("steps", "outputs", "culprit"),
    [
        (
            [
                (MANY, {"IN": "x"}, {"OUT": "a"}),
                (MORE, {"IN": "x"}, {"OUT": "b"}),
                (TWO, {"IN": "a", "IN2": "b"}, {"OUT": "y"}),
            ],
            ("y",),
            "two",
        ),
        # Also if one of them caused the other's answers: the value would belong to no single answer.
        (
            [
                (MANY, {"IN": "x"}, {"OUT": "a"}),
                (MORE, {"IN": "a"}, {"OUT": "b"}),
                (TWO, {"IN": "a", "IN2": "b"}, {"OUT": "y"}),
            ],
            ("y",),
            "two",
        ),
        ([(MANY, {"IN": "x"}, {"OUT": "y"}), (MORE, {"IN": "x"}, {"OUT": "z"})], ("y", "z"), "e"),
        (
            [
                (MANY, {"IN": "x"}, {"OUT": "a"}),
                (MORE, {"IN": "x"}, {"OUT": "b"}),
                (A, {"IN": "a"}, {"OUT": "y"}, "b > 0"),
            ],
            ("y",),
            "a",
        ),
    ],
)
def test_tensors_of_two_decoupled_steps_must_not_meet(steps, outputs, culprit):
    assert refused(steps, outputs=outputs) == (
        f"in ensemble e, step of model '{culprit}' receives inputs originated from different decoupled models"
    )


def test_ensemble_with_a_decoupled_step_is_decoupled():
    made = graph(
        [
            (MANY, {"IN": "x"}, {"OUT": "a"}),
            (A, {"IN": "x"}, {"OUT": "b"}),
            (TWO, {"IN": "a", "IN2": "b"}, {"OUT": "y"}),
        ]
    )
    assert made.decoupled


def test_graph_keeps_a_bounded_number_of_plans():
    steps = [(A, {"IN": "x"}, {"OUT": f"y{i}"}) for i in range(2 * MAX_PLANS)]
    made = graph(steps, outputs=tuple(f"y{i}" for i in range(2 * MAX_PLANS)))
    assert made.plan(("y0",)) is made.plan(("y0",))
    first = made.plan(("y0",))
    for i in range(2 * MAX_PLANS):
        assert made.plan((f"y{i}",)).outputs == (f"y{i}",)
    assert made.plan(("y0",)) is not first


def reshaped(batch: int, inner: tuple[int, ...] = (4, 1, 2)) -> ModelConfig:
    """Of clients' dims [8]."""
    config = ensemble([(A, *X_TO_Y)], dims=(8,), batch=batch)
    reshape = ModelTensorReshape(inner)
    return replace(
        config,
        input=tuple(replace(tensor, reshape=reshape) for tensor in config.input),
        output=tuple(replace(tensor, reshape=reshape) for tensor in config.output),
    )


@pytest.mark.parametrize("batch", [0, 8])
@pytest.mark.parametrize("members", [0, 8])
def test_steps_are_compared_with_the_inner_shape_of_the_ensemble(batch, members):
    made = make_graph(reshaped(batch), [model("a", dims=(4, 1, 2), batch=members)])
    assert made.fits == {"y": make_fit((4, 1, 2), batches=batch > 0, made_in_batches=members > 0)}


def test_reshape_mismatch_shows_the_shape_for_the_step():
    assert error_of(make_graph, reshaped(0), [model("a", dims=(8,), batch=0)]).message.startswith(
        "in ensemble e, ensemble tensor x: inconsistent shape: [4,1,2] is inferred from model e while [8] is inferred "
        "from model a"
    )
