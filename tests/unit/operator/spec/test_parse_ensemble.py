"""Parsing of ModelEnsembles into specs, and the checks that their steps fit together."""

import pytest

from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import EnsembleSpec, EnsembleTensor, Kind, Step, Workload
from support.custom_resources import ABSENT, Json, changed, ensemble

PLATFORM = Platform(server_image="server", gpu_server_image="gpu-server")


def problems_of(example: Json) -> list[tuple[str, str]]:
    spec, problems = parse(Kind.MODEL_ENSEMBLE, example, PLATFORM)
    assert (spec is None) is bool(problems)
    return [(problem.path, problem.message) for problem in problems]


def test_an_ensemble_of_three_steps_is_parsed() -> None:
    resource = changed(
        ensemble(),
        {"spec.maxBatchSize": 8, "spec.steps[1].modelRef.version": 2, "spec.steps[2].when": "tok.ids.present"},
    )
    spec, problems = parse(Kind.MODEL_ENSEMBLE, resource, PLATFORM)
    assert problems == ()
    assert spec == EnsembleSpec(
        name="search",
        max_batch_size=8,
        inputs=(EnsembleTensor("TEXT", "BYTES", (1,)),),
        outputs=(EnsembleTensor("VECTOR", "FP32", (768,), "pool.vector"),),
        steps=(
            Step("tok", "tokenizer", None, {"text": "request.TEXT"}, {"ids": "ids"}),
            Step("bert", "bert", 2, {"ids": "tok.ids"}, {"state": "hidden"}),
            Step("pool", "pooler", None, {"hidden": "bert.hidden"}, {"v": "vector"}, "tok.ids.present"),
        ),
        workload=Workload(),
    )


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        (
            {"spec.steps[1].inputs[ids]": "request.WORDS"},
            "spec.steps[1].inputs[ids]",
            "must be an input of the ensemble, got 'request.WORDS'; there are request.TEXT",
        ),
        (
            {"spec.steps[1].inputs[ids]": "tok.idz"},
            "spec.steps[1].inputs[ids]",
            "must be an output of step tok, got 'tok.idz'; it has tok.ids",
        ),
        (
            {"spec.steps[1].inputs[ids]": "tik.ids"},
            "spec.steps[1].inputs[ids]",
            "must be request.TENSOR or STEP.OUTPUT with one of the steps tok, bert, pool, got 'tik.ids'",
        ),
        ({"spec.steps[1].inputs[ids]": "ids"}, "spec.steps[1].inputs[ids]", None),
        (
            {"spec.steps[2].when": "bert.score > 1"},
            "spec.steps[2].when",
            "must be an output of step bert, got 'bert.score'; it has bert.hidden",
        ),
        ({"spec.steps[2].when": "score >"}, "spec.steps[2].when", None),
        (
            {"spec.outputs[0].from": "pool.vec"},
            "spec.outputs[0].from",
            "must be the output of a step, got 'pool.vec'; there are bert.hidden, pool.vector, tok.ids",
        ),
        ({"spec.outputs[0].from": "request.TEXT"}, "spec.outputs[0].from", None),
        ({"spec.outputs[0].name": "TEXT"}, "spec.outputs[0].name", "must not be the name of an input"),
        (
            {"spec.inputs[1]": None},
            "spec.inputs[1]",
            None,
        ),
        (
            {"spec.steps[1].outputs": {"state": "hidden", "other": "hidden"}},
            "spec.steps[1].outputs[other]",
            "must differ from that of state, got 'hidden'",
        ),
        ({"spec.steps[1].modelRef": ABSENT}, "spec.steps[1].modelRef.name", None),
        ({"spec.steps[1].name": "tok"}, "spec.steps[1].name", "is already that of spec.steps[0]: 'tok'"),
        ({"spec.placement": {"mode": "Distributed"}}, "spec.placement.mode", None),
    ],
)
def test_steps_that_do_not_fit_together_are_refused(changes: Json, path: str, message: str | None) -> None:
    example = ensemble()
    if "spec.inputs[1]" in changes:
        example["spec"]["inputs"].append(None)
    found = dict(problems_of(changed(example, changes)))
    assert path in found
    if message is not None:
        assert found[path] == message


def test_an_unused_input_is_refused() -> None:
    resource = ensemble()
    resource["spec"]["inputs"].append({"name": "LANG", "dataType": "BYTES", "shape": [1]})
    assert problems_of(resource) == [("spec.inputs[1]", "is not used: no step has request.LANG as an input")]
    resource["spec"]["steps"][0]["when"] = "request.LANG == 'de'"
    assert problems_of(resource) == []


def test_an_unused_step_is_refused() -> None:
    resource = ensemble()
    resource["spec"]["steps"].append(
        {"name": "extra", "modelRef": {"name": "x"}, "inputs": {"a": "tok.ids"}, "outputs": {"b": "b", "c": "c"}}
    )
    assert problems_of(resource) == [
        ("spec.steps[3].outputs", "are not used: neither a step nor an output of the ensemble has one of extra's")
    ]
    resource["spec"]["steps"][2]["when"] = "extra.c.present"
    assert problems_of(resource) == []


def test_one_tensor_as_two_outputs_is_refused() -> None:
    resource = ensemble()
    resource["spec"]["outputs"].append({**resource["spec"]["outputs"][0], "name": "AGAIN"})
    assert problems_of(resource) == [
        ("spec.outputs[1].from", "must not be that of output VECTOR too: pool.vector can have one name")
    ]


@pytest.mark.parametrize(
    ("changes", "circle"),
    [
        ({"spec.steps[0].inputs[more]": "pool.vector"}, "bert needs tok needs pool needs bert"),
        ({"spec.steps[1].inputs[more]": "bert.hidden"}, "bert needs bert"),
        ({"spec.steps[0].when": "bert.hidden.present"}, "bert needs tok needs bert"),
    ],
)
def test_steps_that_depend_on_themselves_are_refused(changes: Json, circle: str) -> None:
    assert problems_of(changed(ensemble(), changes)) == [
        ("spec.steps[1].inputs", f"must not wait for itself: {circle}")
    ]


def test_steps_are_checked_even_if_pod_settings_have_problems() -> None:
    resource = changed(ensemble(), {"spec.replicas": -1, "spec.steps[1].inputs[ids]": "tok.idz"})
    assert [path for path, _ in problems_of(resource)] == [
        "spec.replicas",
        "spec.steps[1].inputs[ids]",
        "spec.steps[0].outputs",
    ]


def test_the_order_of_steps_has_no_meaning() -> None:
    resource = ensemble()
    resource["spec"]["steps"].reverse()
    assert problems_of(resource) == []


def test_too_many_steps_are_refused() -> None:
    resource = ensemble()
    resource["spec"]["steps"] *= 11
    assert ("spec.steps", "must have at most 32 entries, got 33") in problems_of(resource)


def test_messages_list_a_limited_number_of_names() -> None:
    resource = changed(ensemble(), {"spec.steps[0].outputs": {f"o{i}": f"o{i}" for i in range(64)}})
    ((_, message), *_) = problems_of(resource)
    assert message.endswith(
        "it has tok.o0, tok.o1, tok.o2, tok.o3, tok.o4, tok.o5, tok.o6, tok.o7, tok.o8, tok.o9 and 54 more"
    )
