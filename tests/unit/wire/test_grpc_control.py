"""Control messages, and the configuration's dataclasses compared with the protocol field by field."""

import dataclasses
import types
import typing
from enum import Enum

import pytest
from google.protobuf.json_format import MessageToDict

from halimede.core.config import model_config
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, ErrorCode, InferenceError, ModelIndexEntry, ModelReadyState, ServerMetadata
from halimede.core.types.statistics import (
    BatchStatistics,
    Duration,
    InferStatistics,
    ModelStatistics,
    ResponseStatistics,
)
from halimede.core.wire.grpc_control import (
    check_repository_name,
    decode_load_parameters,
    decode_unload_dependents,
    encode_index,
    encode_model_config,
    encode_model_metadata,
    encode_server_metadata,
    encode_statistics,
)
from halimede.core.wire.protocol import POOL, message_class
from support.refusals import error_of

Load = message_class("inference.RepositoryModelLoadRequest")
Unload = message_class("inference.RepositoryModelUnloadRequest")


def as_dict(message) -> dict:
    return MessageToDict(message, preserving_proto_field_name=True, descriptor_pool=POOL)


def element_type(hint):
    """The type inside `X | None`, `tuple[X, ...]`, `Mapping[_, X]` and `Annotated[X, …]`."""
    origin = typing.get_origin(hint)
    if origin is None:
        return hint
    if origin is typing.Annotated:
        return element_type(typing.get_args(hint)[0])
    if origin is types.UnionType:
        return element_type(next(each for each in typing.get_args(hint) if each is not types.NoneType))
    return element_type(typing.get_args(hint)[0 if origin is tuple else 1])


def shape_of(hint) -> str:
    origin = typing.get_origin(hint)
    if origin in {None, types.UnionType, typing.Annotated}:
        return "one"
    return "repeated" if origin is tuple else "map"


def differences(data, descriptor, path: str = "ModelConfig") -> list[str]:
    """Where a dataclass and a message do not have the same fields, kinds, enums and oneofs."""
    hints = typing.get_type_hints(data, include_extras=True)
    fields = {field.name.removesuffix("_"): hints[field.name] for field in dataclasses.fields(data)}
    found = [f"{path}.{name}" for name in fields.keys() ^ descriptor.fields_by_name.keys()]
    # An optional field has a oneof of its own, of which the name begins with an underscore.
    groups = [oneof.fields for oneof in descriptor.oneofs if not oneof.name.startswith("_")]
    oneofs = {tuple(sorted(field.name for field in fields)) for fields in groups}
    if oneofs != {tuple(sorted(names)) for names in getattr(data, "ONEOFS", ())}:
        found.append(f"{path} oneofs")
    for field in descriptor.fields:
        hint = fields.get(field.name)
        message = field.message_type
        if hint is None:
            continue
        is_map = message is not None and message.GetOptions().map_entry
        shape = "map" if is_map else "repeated" if field.is_repeated else "one"
        origin = typing.get_origin(hint)
        if shape != (
            "repeated" if origin is tuple else "one" if origin in {None, types.UnionType, typing.Annotated} else "map"
        ):
            found.append(f"{path}.{field.name} is {shape}")
        value = message.fields_by_name["value"] if is_map else field
        inner = element_type(hint)
        if dataclasses.is_dataclass(inner):
            if value.message_type is None:
                found.append(f"{path}.{field.name} is no message")
            else:
                found += differences(inner, value.message_type, f"{path}.{field.name}")
        elif isinstance(inner, type) and issubclass(inner, Enum):
            names = {each.name: each.number for each in value.enum_type.values}
            if names != (
                {t.config_name: t.number for t in DataType} if inner is DataType else {e.name: e.value for e in inner}
            ):
                found.append(f"{path}.{field.name} enum")
    return found


def test_the_configuration_has_the_protocols_fields() -> None:
    assert differences(ModelConfig, POOL.FindMessageTypeByName("inference.ModelConfig")) == []
    assert differences(ModelOutput, POOL.FindMessageTypeByName("inference.ModelTensorReshape")) != []


def filled(kind):
    """An instance with every field set; of each oneof the first."""
    hints = typing.get_type_hints(kind, include_extras=True)
    others = {name for group in getattr(kind, "ONEOFS", ()) for name in group[1:]}
    return kind(**{f.name: value(hints[f.name]) for f in dataclasses.fields(kind) if f.name not in others})


def value(hint):
    origin = typing.get_origin(hint)
    if origin is tuple:
        return (value(typing.get_args(hint)[0]),)
    if shape_of(hint) == "map":
        key, inner = typing.get_args(hint)
        return {value(key): value(inner)}
    inner = element_type(hint)
    if dataclasses.is_dataclass(inner):
        return filled(inner)
    if isinstance(inner, type) and issubclass(inner, Enum):
        return list(inner)[-1]
    return {str: "text", bool: True, int: 7, float: 0.5}[inner]


def leaves(data, path: str = "") -> set[str]:
    """The paths of a nested dict, lists and maps by their one element."""
    if isinstance(data, list):
        return leaves(data[0], path)
    if isinstance(data, dict) and data:
        return set().union(*(leaves(inner, f"{path}.{key}") for key, inner in data.items()))
    return {path}


def test_every_field_of_the_configuration_reaches_the_message() -> None:
    config = filled(ModelConfig)
    message = encode_model_config(config).config

    def as_data(each):
        if dataclasses.is_dataclass(each):
            pairs = ((f.name.removesuffix("_"), getattr(each, f.name)) for f in dataclasses.fields(each))
            return {name: as_data(inner) for name, inner in pairs if inner is not None}
        if isinstance(each, tuple):
            return [as_data(inner) for inner in each]
        return {key: as_data(inner) for key, inner in each.items()} if isinstance(each, dict) else each

    # Enum fields whose last member is number 0 are not on the wire; there are few and they have one member.
    single = {f".{path}" for path in ("instance_group.secondary_devices.kind", "batch_output.kind")}
    assert leaves(as_data(config)) - leaves(as_dict(message)) == single
    assert message.instance_group[0].rate_limiter.resources[0].DESCRIPTOR.full_name.endswith("Resource")
    assert getattr(message.instance_group[0].rate_limiter.resources[0], "global") is True
    assert dict(message.cc_model_filenames) == {"text": "text"}
    assert message.dynamic_batching.priority_queue_policy[7].max_queue_size == 7


def test_every_scheduler_choice_reaches_the_message() -> None:
    for arm in ("dynamic_batching", "sequence_batching", "ensemble_scheduling"):
        kind = element_type(typing.get_type_hints(ModelConfig, include_extras=True)[arm])
        message = encode_model_config(ModelConfig(**{arm: filled(kind)})).config
        assert message.WhichOneof("scheduling_choice") == arm


def test_unset_fields_are_absent_and_empty_ones_present() -> None:
    config = ModelConfig(
        name="m",
        input=(ModelInput(name="x", data_type=DataType.BYTES, dims=(-1, 2)),),
        dynamic_batching=model_config.ModelDynamicBatching(),
        version_policy=model_config.ModelVersionPolicy(all=model_config.AllVersions()),
        model_warmup=(
            model_config.ModelWarmup(
                inputs={"x": model_config.WarmupInput(zero_data=False), "y": model_config.WarmupInput()}
            ),
        ),
    )
    assert as_dict(encode_model_config(config)) == {
        "config": {
            "name": "m",
            "input": [{"name": "x", "data_type": "TYPE_STRING", "dims": ["-1", "2"]}],
            "dynamic_batching": {},
            "version_policy": {"all": {}},
            "model_warmup": [{"inputs": {"x": {"zero_data": False}, "y": {}}}],
        }
    }


def test_metadata_of_the_server_and_of_a_model() -> None:
    assert as_dict(encode_server_metadata(ServerMetadata("triton", "2.60.0", ("parameters", "statistics")))) == {
        "name": "triton",
        "version": "2.60.0",
        "extensions": ["parameters", "statistics"],
    }
    config = ModelConfig(
        name="m",
        backend="onnxruntime",
        platform="onnxruntime_onnx",
        max_batch_size=4,
        input=(ModelInput(name="x", data_type=DataType.BYTES, dims=(3,)),),
        output=(ModelOutput(name="y", data_type=DataType.FP32, dims=(-1, 2)),),
    )
    assert as_dict(encode_model_metadata(ModelView("m", "2", ("1", "2"), config, {}))) == {
        "name": "m",
        "versions": ["1", "2"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "BYTES", "shape": ["-1", "3"]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": ["-1", "-1", "2"]}],
    }
    unbatched = dataclasses.replace(config, max_batch_size=0, platform="")
    message = encode_model_metadata(ModelView("m", "1", ("1",), unbatched, {}))
    assert (message.platform, list(message.inputs[0].shape)) == ("onnxruntime", [3])


def test_statistics() -> None:
    statistics = ModelStatistics(
        name="m",
        version="1",
        last_inference_ms=1_700_000_000_000,
        inference_count=8,
        execution_count=2,
        inference=InferStatistics(success=Duration(4, 100), cache_miss=Duration(1, 2)),
        batches=[BatchStatistics(4, compute_infer=Duration(2, 50))],
    )
    assert as_dict(encode_statistics([statistics])) == {
        "model_stats": [
            {
                "name": "m",
                "version": "1",
                "last_inference": "1700000000000",
                "inference_count": "8",
                "execution_count": "2",
                "inference_stats": {
                    "success": {"count": "4", "ns": "100"},
                    "fail": {},
                    "queue": {},
                    "compute_input": {},
                    "compute_infer": {},
                    "compute_output": {},
                    "cache_hit": {},
                    "cache_miss": {"count": "1", "ns": "2"},
                },
                "batch_stats": [
                    {
                        "batch_size": "4",
                        "compute_input": {},
                        "compute_infer": {"count": "2", "ns": "50"},
                        "compute_output": {},
                    }
                ],
            }
        ]
    }


def test_answers_of_a_decoupled_model_are_listed_by_their_index() -> None:
    responses = [ResponseStatistics(success=Duration(2, 7)), ResponseStatistics(empty_response=Duration(1, 3))]
    (model,) = as_dict(encode_statistics([ModelStatistics("m", "1", responses=responses)]))["model_stats"]
    nothing = {k: {} for k in ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")}
    assert model["response_stats"] == {
        "0": {**nothing, "success": {"count": "2", "ns": "7"}},
        "1": {**nothing, "empty_response": {"count": "1", "ns": "3"}},
    }


def test_the_index_of_loaded_and_never_loaded_models() -> None:
    entries = [
        ModelIndexEntry("a", "1", ModelReadyState.READY),
        ModelIndexEntry("b", "2", ModelReadyState.UNAVAILABLE, "unloaded"),
        ModelIndexEntry("c"),
    ]
    assert as_dict(encode_index(entries)) == {
        "models": [
            {"name": "a", "version": "1", "state": "READY"},
            {"name": "b", "version": "2", "state": "UNAVAILABLE", "reason": "unloaded"},
            {"name": "c"},
        ]
    }


def test_load_parameters() -> None:
    message = Load(
        model_name="m",
        parameters={"config": {"string_param": "{}"}, "file:1/model.onnx": {"bytes_param": b"\0\1"}},
    )
    assert decode_load_parameters(message) == {"config": "{}", "file:1/model.onnx": b"\0\1"}
    assert decode_load_parameters(Load(model_name="m")) == {}


@pytest.mark.parametrize(
    ("key", "parameter", "text"),
    [
        ("other", {"string_param": ""}, "unrecognized load parameter 'other'."),
        ("config", {"bool_param": True}, "invalid value type for load parameter 'config', expected string_param."),
        ("file:1/a", {"string_param": ""}, "invalid value type for load parameter 'file:1/a', expected bytes_param."),
    ],
)
def test_invalid_load_parameters(key: str, parameter: dict, text: str) -> None:
    assert error_of(decode_load_parameters, Load(parameters={key: parameter})) == InferenceError(
        ErrorCode.INVALID_ARG, text
    )


def test_unload_parameters() -> None:
    assert decode_unload_dependents(Unload()) is False
    assert decode_unload_dependents(Unload(parameters={"unload_dependents": {"bool_param": True}})) is True
    assert error_of(
        decode_unload_dependents, Unload(parameters={"unload_dependents": {"int64_param": 1}})
    ) == InferenceError(
        ErrorCode.INVALID_ARG, "invalid value type for 'unload_dependents' parameter, expected bool_param."
    )


def test_a_repository_cannot_be_named() -> None:
    check_repository_name(Load(model_name="m"))
    assert error_of(check_repository_name, Load(repository_name="r")) == InferenceError(
        ErrorCode.UNSUPPORTED, "'repository_name' specification is not supported"
    )
