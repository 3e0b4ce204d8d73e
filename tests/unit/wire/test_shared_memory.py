"""Both codecs read a region's parameters in the same way, and refuse them with the same errors."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.types import ErrorCode, InferenceError, RegionSlice
from halimede.core.wire import http_request
from halimede.core.wire.grpc_request import read_infer
from halimede.core.wire.protocol import ModelInferRequest, ProtoMessage
from halimede.core.wire.shared_memory import BYTE_SIZE, OFFSET, REGION, REGION_PARAMETERS, read_region
from support.inference_bodies import VIEW, asking, invalid, tensor
from support.refusals import error_of

FIELD = {str: "string_param", int: "int64_param", bool: "bool_param", float: "double_param"}


def over_http(kind: str, parameters: Mapping[str, object]) -> InferenceError:
    if kind == "input":
        body = asking(tensor(data=..., parameters=parameters))
    else:
        body = asking(outputs=[{"name": "x", "parameters": parameters}])
    return error_of(lambda: http_request.decode_infer(VIEW, body, None))


def over_grpc(kind: str, parameters: Mapping[str, object]) -> InferenceError:
    message: ProtoMessage = ModelInferRequest(model_name="m")
    owner = message.inputs.add(name="x", datatype="FP32") if kind == "input" else message.outputs.add(name="x")
    for key, value in parameters.items():
        setattr(owner.parameters[key], FIELD[type(value)], value)
    return error_of(lambda: read_infer(message.SerializeToString()).decode())


def test_a_slice_of_a_region_is_read_from_parameters() -> None:
    whole = {REGION: "r", BYTE_SIZE: 64, OFFSET: 8, "other": 1}
    assert read_region("input", "x", whole) == RegionSlice("r", byte_size=64, offset=8)
    assert read_region("output", "x", {REGION: "r"}) == RegionSlice("r", byte_size=0, offset=0)


@given(
    st.dictionaries(st.sampled_from(REGION_PARAMETERS), st.text() | st.integers() | st.floats() | st.none(), min_size=1)
)
def test_any_region_parameters_are_a_slice_or_a_clients_fault(parameters: dict[str, object]) -> None:
    try:
        place = read_region("input", "x", parameters)
        is_fine = place.region == parameters[REGION] and place.byte_size >= 0 and place.offset >= 0
    except InferenceError as error:
        is_fine = error.code in (ErrorCode.INVALID_ARG, ErrorCode.UNSUPPORTED)
    assert is_fine


@pytest.mark.parametrize("kind", ["input", "output"])
def test_both_codecs_refuse_a_slice_in_the_same_words(kind: str) -> None:
    expected = InferenceError(
        ErrorCode.UNSUPPORTED,
        f"parameter 'shared_memory_region' of {kind} 'x': shared memory is not available yet, tensors must be sent in"
        " the message",
    )
    for parameters in ({REGION: "r"}, {REGION: "r", BYTE_SIZE: 8}, {REGION: "r", BYTE_SIZE: 8, OFFSET: 4}):
        assert over_http(kind, parameters) == expected
        assert over_grpc(kind, parameters) == expected


def test_an_output_in_a_region_may_say_that_it_is_neither_binary_nor_classes() -> None:
    plain = over_http("output", {REGION: "r"})
    assert over_http("output", {REGION: "r", "binary_data": False, "classification": 0}) == plain


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (REGION, 5, "a string"),
        (REGION, True, "a string"),
        (BYTE_SIZE, "8", "an unsigned integer"),
        (BYTE_SIZE, -1, "an unsigned integer"),
        (OFFSET, True, "an unsigned integer"),
        (OFFSET, 0.5, "an unsigned integer"),
    ],
)
def test_both_codecs_name_a_region_parameter_of_a_wrong_kind(kind: str, key: str, value: object, expected: str) -> None:
    error = invalid(f"parameter '{key}' of {kind} 'x' must be {expected}")
    parameters = {REGION: "r", key: value}
    assert over_http(kind, parameters) == error
    assert over_grpc(kind, parameters) == error


def test_a_region_parameter_without_a_value_is_of_a_wrong_kind() -> None:
    message: ProtoMessage = ModelInferRequest(model_name="m")
    message.outputs.add(name="x").parameters[REGION].SetInParent()
    error = error_of(lambda: read_infer(message.SerializeToString()).decode())
    assert error == invalid("parameter 'shared_memory_region' of output 'x' must be a string")


def test_a_size_without_a_region_is_ignored_over_http_alone() -> None:
    outputs = [{"name": "x", "parameters": {BYTE_SIZE: 8}}]
    body = json.dumps({"inputs": [], "outputs": outputs}).encode()
    assert http_request.decode_infer(VIEW, body, None).request.outputs == ("x",)
    for key in (BYTE_SIZE, OFFSET):
        assert over_grpc("input", {key: 8}) == InferenceError(
            ErrorCode.UNSUPPORTED,
            f"parameter '{key}' of input 'x': shared memory is not available yet, tensors must be sent in the message",
        )
