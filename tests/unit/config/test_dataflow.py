"""The connections between an ensemble's steps, checked from its configuration alone."""

import pytest

from halimede.core.config.dataflow import check_dataflow
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.validate import validate
from support.graphs import ensemble, model

A = model("a")
TWO = model("two", inputs=("IN", "IN2"))
PAIR = model("pair", outputs=("OUT", "OUT2"))
STEP = "ensemble_scheduling.step"


def problems(config: ModelConfig) -> list[tuple[str, str]]:
    return [(problem.path, problem.message) for problem in check_dataflow(config)]


@pytest.mark.parametrize(
    "config",
    [
        ensemble([(A, {"IN": "x"}, {"OUT": "y"})]),
        # In any order; a tensor for two steps, and one that is an output as well.
        ensemble([(TWO, {"IN": "m", "IN2": "x"}, {"OUT": "y"}), (A, {"IN": "x"}, {"OUT": "m"})], outputs=("y", "m")),
        # An input that is passed on.
        ensemble([(A, {"IN": "x"}, {"OUT": "y"})], outputs=("y", "x")),
        # A tensor that only a condition uses, an input likewise.
        ensemble(
            [(A, {"IN": "x"}, {"OUT": "m"}), (A, {"IN": "x"}, {"OUT": "y"}, "m > 0 and z > 0")], inputs=("x", "z")
        ),
        ModelConfig(name="m", backend="python"),
    ],
)
def test_connected_ensemble_has_no_problems(config):
    assert problems(config) == []


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (
            ensemble([(A, {"IN": "x"}, {"OUT": "y"}), (A, {"IN": "x"}, {"OUT": "y"})]),
            {
                f'{STEP}[1].output_map["OUT"]': "ensemble tensor 'y' can appear in an output map only once for ensemble 'e' step 1"
            },
        ),
        (
            ensemble([(PAIR, {"IN": "x"}, {"OUT": "y", "OUT2": "y"})]),
            {
                f'{STEP}[0].output_map["OUT2"]': "ensemble tensor 'y' can appear in an output map only once for ensemble 'e' step 0"
            },
        ),
        (
            ensemble([(PAIR, {"IN": "x"}, {"OUT": "y", "OUT2": "x"})]),
            {
                f'{STEP}[0].output_map["OUT2"]': "ensemble input 'x' can not appear in an output map for ensemble 'e' step 0"
            },
        ),
        (
            ensemble([(PAIR, {"IN": "x"}, {"OUT": "y", "OUT2": "m"})]),
            {f"{STEP}[0].output_map": "ensemble tensor 'm' is unused in ensemble 'e'"},
        ),
        (
            ensemble([(A, {"IN": "x"}, {"OUT": "y"})], inputs=("x", "z")),
            {"input[1].name": "ensemble input 'z' for ensemble e' is not used"},
        ),
        (
            ensemble([(A, {"IN": "x"}, {"OUT": "y"})], outputs=("y", "z")),
            {"output[1].name": "ensemble output 'z' for ensemble e' is not used"},
        ),
        (
            ensemble([(TWO, {"IN": "x", "IN2": "n"}, {"OUT": "y"})]),
            {
                "output[0].name": (
                    "output 'y' for ensemble 'e' is not written: at least one of its depending tensors, 'n', is not "
                    "connected"
                )
            },
        ),
        (
            ensemble([(TWO, {"IN": "x", "IN2": "y"}, {"OUT": "y"})]),
            {
                "output[0].name": "output 'y' for ensemble 'e' is not written",
                f"{STEP}[0].input_map": "circular dependency between tensors of ensemble 'e': 'y' -> 'y'",
            },
        ),
        # A circle that leads to an output, and one that does not.
        (
            ensemble(
                [
                    (TWO, {"IN": "x", "IN2": "b"}, {"OUT": "a"}),
                    (A, {"IN": "a"}, {"OUT": "b"}),
                    (A, {"IN": "a"}, {"OUT": "y"}),
                ]
            ),
            {
                "output[0].name": (
                    "output 'y' for ensemble 'e' is not written: at least one of its depending tensors, 'a', is not "
                    "connected"
                ),
                f"{STEP}[1].input_map": "circular dependency between tensors of ensemble 'e': 'b' -> 'a' -> 'b'",
            },
        ),
        (
            ensemble(
                [
                    (A, {"IN": "x"}, {"OUT": "y"}),
                    (A, {"IN": "a"}, {"OUT": "b"}),
                    (A, {"IN": "b"}, {"OUT": "a"}),
                ]
            ),
            {f"{STEP}[1].input_map": "circular dependency between tensors of ensemble 'e': 'b' -> 'a' -> 'b'"},
        ),
        # A tensor that no step makes and that leads to no output.
        (
            ensemble([(A, {"IN": "x"}, {"OUT": "y"}), (A, {"IN": "n"}, {"OUT": "m"})]),
            {
                f"{STEP}[1].input_map": "ensemble tensor 'n' is not written: it is not an input of ensemble 'e' and occurs in no output map",
                f"{STEP}[1].output_map": "ensemble tensor 'm' is unused in ensemble 'e'",
            },
        ),
        # Conditions.
        (
            ensemble([(A, {"IN": "x"}, {"OUT": "y"}, "OUT > 0")]),
            {
                f"{STEP}[0].when": (
                    "the condition of step 0 of ensemble 'e' names 'OUT', which is not one of its tensors: it must be "
                    "an input or occur in an output map"
                )
            },
        ),
        (
            ensemble([(A, {"IN": "x"}, {"OUT": "y"}, "x >")]),
            {
                f"{STEP}[0].when": (
                    "the condition of step 0 of ensemble 'e' cannot be read: at character 4: the condition ends; allowed "
                    "here: a tensor's name (in backticks if it is not a word), <tensor>.present, "
                    "<tensor>.shape[<number>], parameters.<name>, a number, a text in quotes, true or false"
                )
            },
        ),
        (
            ensemble([(A, {"IN": "x"}, {"OUT": "y"}, "y > 0")]),
            {
                "output[0].name": "output 'y' for ensemble 'e' is not written",
                f"{STEP}[0].input_map": "circular dependency between tensors of ensemble 'e': 'y' -> 'y'",
            },
        ),
        (
            ensemble([(A, {"IN": "x", "": "x"}, {"OUT": "y"})]),
            {
                f'{STEP}[0].input_map[""]': "'input_map' in step 0 of ensemble 'e' must name a tensor on both sides, got '' and 'x'"
            },
        ),
    ],
)
def test_unconnected_tensors_are_reported(config, found):
    assert problems(config) == [*found.items()]
    # It is a part of what a load checks.
    assert [(p.path, p.message) for p in validate(config)] == [*found.items()]


def test_long_unconnected_chain_is_reported_quickly():
    count = 20_000
    steps = [(A, {"IN": f"t{i}"}, {"OUT": f"t{i + 1}"}) for i in range(count)]
    config = ensemble([(A, {"IN": "x"}, {"OUT": "y"}), *steps], outputs=("y", f"t{count}"))
    assert len(problems(config)) == 1
    circle = ensemble([(A, {"IN": "x"}, {"OUT": "y"}), *steps, (A, {"IN": f"t{count}"}, {"OUT": "t0"})])
    (found,) = problems(circle)
    assert found[1].endswith(" -> ...")
