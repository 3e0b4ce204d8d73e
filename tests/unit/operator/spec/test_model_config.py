"""`spec.model.config`: the fields of config.pbtxt, checked before a pod is replaced."""

from typing import Any

import pytest

from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import Kind, ModelSpec
from support.custom_resources import Json, changed, model

PLATFORM = Platform(server_image="server", gpu_server_image="gpu-server")
CONFIGS: dict[str, Json] = {
    "warm-up": {
        "modelWarmup": [
            {"name": "zeros", "batchSize": 8, "inputs": {"x": {"dataType": "TYPE_FP32", "dims": [4], "zeroData": True}}}
        ]
    },
    "sequences": {
        "sequenceBatching": {
            "oldest": {"maxCandidateSequences": 64},
            "maxSequenceIdleMicroseconds": "60000000",
            "controlInput": [
                {"name": "START", "control": [{"kind": "CONTROL_SEQUENCE_START", "fp32FalseTrue": [0, 1.0]}]}
            ],
        }
    },
    "instances with names": {"instanceGroup": [{"name": "fast", "kind": "KIND_CPU", "count": 2.0, "passive": False}]},
    "priorities": {"dynamicBatching": {"priorityLevels": 2, "priorityQueuePolicy": {"1": {"maxQueueSize": 3}}}},
    "nothing": {"dynamicBatching": None, "input": None, "parameters": {}},
}


def problems_of(config: Json) -> list[tuple[str, str]]:
    _, problems = parse(Kind.INFERENCE_MODEL, changed(model(), {"spec.model.config": config}), PLATFORM)
    return [(problem.path.removeprefix("spec.model.config."), problem.message) for problem in problems]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_field_of_a_config_file_can_be_set(config: Json) -> None:
    spec, problems = parse(Kind.INFERENCE_MODEL, changed(model(), {"spec.model.config": config}), PLATFORM)
    assert problems == ()
    assert isinstance(spec, ModelSpec)
    assert spec.model.config == config


@pytest.mark.parametrize(
    ("config", "path", "message"),
    [
        ({"max_batch_size": 8}, "max_batch_size", "is not a field of ModelConfig; did you mean maxBatchSize?"),
        ({"instanceGroup": [{"cuont": 1}]}, "instanceGroup[0].cuont", "is not a field of ModelInstanceGroup; did you"),
        ({"responseCache": {"x": 1}}, "responseCache.x", "is not a field of ModelResponseCache; use one of enable"),
        ({"maxBatchSize": "many"}, "maxBatchSize", "must be a whole number from -2147483648 to 2147483647, got 'many'"),
        ({"maxBatchSize": 2**31}, "maxBatchSize", "must be a whole number from -2147483648 to 2147483647"),
        ({"maxBatchSize": True}, "maxBatchSize", "must be a whole number from -2147483648 to 2147483647, got true"),
        ({"maxBatchSize": 1.5}, "maxBatchSize", "must be a whole number from -2147483648 to 2147483647, got 1.5"),
        (
            {"dynamicBatching": {"priorityLevels": -1}},
            "dynamicBatching.priorityLevels",
            "must be a whole number from 0 to 18446744073709551615, got -1",
        ),
        ({"dynamicBatching": []}, "dynamicBatching", "must be an object, got a list"),
        ({"instanceGroup": {}}, "instanceGroup", "must be a list, got an object"),
        (
            {"instanceGroup": [{"kind": "CPU"}]},
            "instanceGroup[0].kind",
            "must be one of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL, got 'CPU'",
        ),
        (
            {"instanceGroup": [{"kind": "KIND_CPU"}, {"kind": "KIND_GPU"}]},
            "instanceGroup[1].kind",
            "needs spec.accelerator of type GPU, MIG, Shared or DRA, got KIND_GPU without one",
        ),
        ({"parameters": {"threads": "4"}}, "parameters[threads]", "must be an object, got '4'"),
        ({"parameters": {"threads": {"stringValue": 4}}}, "parameters[threads].stringValue", "must be a text, got 4"),
        (
            {"output": [{"name": True}]},
            "output[0].name",
            "must be a text, got true; quote it, because YAML reads y, n, yes, no, on and off as true and false",
        ),
        ({"modelTransactionPolicy": {"decoupled": "yes"}}, "modelTransactionPolicy.decoupled", "must be true or false"),
        (
            {"sequenceBatching": {"direct": {"minimumSlotUtilization": "0.5"}}},
            "sequenceBatching.direct.minimumSlotUtilization",
            "must be a number, got '0.5'",
        ),
        (
            {"dynamicBatching": {}, "sequenceBatching": {}},
            "sequenceBatching",
            "must not be set beside dynamicBatching: only one of dynamicBatching, sequenceBatching, ensembleScheduling",
        ),
        (
            {"dynamicBatching": {"priorityQueuePolicy": {"first": {}}}},
            "dynamicBatching.priorityQueuePolicy[first]",
            "must have a whole number as its name, got 'first'",
        ),
        ({"name": "bert"}, "name", "must not be set here: use spec.model.name"),
        ({"versionPolicy": {"all": {}}}, "versionPolicy", "must not be set here: use spec.model.versionPolicy"),
    ],
)
def test_a_wrong_field_is_refused_with_what_would_be_right(config: Json, path: str, message: str) -> None:
    ((where, what),) = problems_of(config)
    assert where == path
    assert what.startswith(message)


def test_instances_on_gpus_need_an_accelerator_of_any_type() -> None:
    changes: dict[str, Any] = {
        "spec.model.config": {"instanceGroup": [{"kind": "KIND_GPU"}]},
        "spec.accelerator": {"type": "GPU"},
    }
    assert parse(Kind.INFERENCE_MODEL, changed(model(), changes), PLATFORM)[1] == ()


def test_a_config_that_is_too_deep_or_too_large_is_not_read() -> None:
    deep: Json = {}
    for _ in range(50_000):
        deep = {"optimization": deep}
    for config, message in ((deep, "more than 32 objects"), ({"input": [{}] * 9_000}, "more than 8192 values")):
        given = model()
        given["spec"]["model"]["config"] = config
        ((path, text),) = ((each.path, each.message) for each in parse(Kind.INFERENCE_MODEL, given, PLATFORM)[1])
        assert path == "spec.model.config"
        assert message in text


def test_of_many_unknown_fields_a_few_are_reported() -> None:
    assert 0 < len(problems_of({f"maxBatchSizes{number}": 1 for number in range(8_000)})) < 50
