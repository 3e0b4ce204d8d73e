"""`generate`: flat JSON objects to requests, and responses to JSON. Texts and shapes are Triton's."""

import json
from typing import Any

import numpy as np
import pytest

from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from halimede.core.types.datatype import FROM_WIRE
from halimede.core.types.kv_cache import KvCache
from halimede.core.types.tensor import tensor_from_array
from halimede.core.wire.generate import (
    decode_generate,
    decode_generate_steps,
    encode_generate_steps,
    load_metrics,
    tensor_shape,
)
from halimede.core.wire.steps import run
from support.refusals import error_of


def view(inputs: dict[str, tuple[DataType, tuple[int, ...]]], max_batch_size: int = 0) -> ModelView:
    config = ModelConfig(
        name="m",
        max_batch_size=max_batch_size,
        input=tuple(ModelInput(name, datatype, dims=dims) for name, (datatype, dims) in inputs.items()),
        output=(ModelOutput("y", DataType.FP32, dims=(-1,)),),
    )
    return ModelView("m", "1", ("1",), config, {})


ALL = view({datatype.name: (datatype, (-1,)) for datatype in FROM_WIRE.values()})


def decode(body: Any, of: ModelView = ALL) -> InferenceRequest:
    return decode_generate(of, (body if isinstance(body, str) else json.dumps(body)).encode())


def refusal(body: Any, of: ModelView = ALL) -> str:
    error = error_of(decode, body, of)
    assert error.code is ErrorCode.INVALID_ARG
    return error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BOOL", True),
        ("UINT8", 255),
        ("INT8", -128),
        ("UINT16", 65535),
        ("INT16", -32768),
        ("UINT32", 2**32 - 1),
        ("INT32", -(2**31)),
        ("UINT64", 2**64 - 1),
        ("INT64", -(2**63)),
        ("FP32", 1.5),
        ("FP64", 0.1),
        ("FP32", 3),
        ("BYTES", "é\u0000"),
    ],
)
def test_a_value_and_a_list_of_values_are_tensors_of_the_inputs_datatype(name: str, value: Any) -> None:
    def read(body: Any) -> tuple[Any, ...]:
        (tensor,) = decode({name: body}).inputs
        return tensor.name, tensor.datatype, tensor.shape, tensor.array().tolist()

    element = value.encode() if isinstance(value, str) else value
    assert read(value) == (name, FROM_WIRE[name], (1,), [element])
    assert read([value, value]) == (name, FROM_WIRE[name], (2,), [element, element])
    assert read([]) == (name, FROM_WIRE[name], (0,), [])


@pytest.mark.parametrize(
    ("dims", "batches", "count", "shape"),
    [
        ((2, 3), False, 6, (2, 3)),
        ((-1, 2), False, 4, (2, 2)),
        ((2, -1), False, 4, (2, 2)),
        ((-1, -1), False, 3, (1, 3)),
        ((-1, 2, -1), False, 6, (1, 2, 3)),
        ((-1, 2), False, 0, (0, 2)),
        ((-1,), True, 2, (1, 2)),
        ((4,), True, 8, (2, 4)),
        ((1,), True, 2, (2, 1)),
        ((2, 3), False, 3, None),
        ((2, 3), False, 12, None),
        ((2, -1), False, 3, None),
        ((1,), False, 2, None),
        ((1,), False, 0, None),
        ((4,), True, 1, None),
    ],
)
def test_the_number_of_values_and_the_configuration_give_the_shape(
    dims: tuple[int, ...], batches: bool, count: int, shape: tuple[int, ...] | None
) -> None:
    declared = ModelInput("x", DataType.INT32, dims=dims)
    if shape is not None:
        assert tensor_shape(declared, batches, count) == shape
        return
    assert (
        error_of(tensor_shape, declared, batches, count).message
        == "The schema can not convert input 'x' to tensor with proper shape"
    )


def test_every_other_member_is_a_parameter_as_are_the_nested_ones() -> None:
    request = decode({"a": 1, "id": "i", "parameters": {"b": "x", "id": "other", "FP32": 2}, "timeout": "soon"})
    assert request.id == "i"
    assert request.parameters == {"a": 1, "b": "x", "id": "other", "timeout": "soon"}
    assert [(tensor.name, tensor.array().tolist()) for tensor in request.inputs] == [("FP32", [2.0])]
    # As in Triton these names have no meaning of their own: they are the model's to read.
    request = decode({"sequence_id": 7, "priority": -1, "timeout": 1, "tritonx": True, "binary_data_output": True})
    assert (request.sequence_id, request.form.priority, request.timeout_us) == (0, 0, 0)
    assert len(request.parameters) == 5


def test_an_input_called_id_is_an_input() -> None:
    request = decode({"id": 5}, view({"id": (DataType.INT32, (1,))}))
    assert (request.id, request.inputs[0].array().tolist()) == ("", [5])


def test_nan_and_infinity_tokens_are_float_values() -> None:
    (tensor,) = decode('{"FP32":[NaN,Infinity,-Infinity,1]}').inputs
    np.testing.assert_array_equal(tensor.array(), np.array([np.nan, np.inf, -np.inf, 1], np.float32))
    for token, value in (("NaN", np.nan), ("Infinity", np.inf), ("-Infinity", -np.inf)):
        request = decode(f'{{"BYTES":"NaN","FP64": {token} ,"k":"a\\"NaN","parameters":{{"FP32":{token}}}}}')
        text, double, single = (each.array() for each in request.inputs)
        assert (text.tolist(), request.parameters) == ([b"NaN"], {"k": 'a"NaN'})
        np.testing.assert_array_equal(double, [value])
        np.testing.assert_array_equal(single, [value])
    assert "non-signed-integer" in refusal('{"INT32":NaN}')
    assert "invalid type" in refusal('{"k":Infinity}')
    assert "non-number" in refusal('{"FP32":NaN,"FP64":null}')
    assert "failed to parse" in refusal('{"FP32":-NaN}')


NO_KIND = "Unable to parse 'data': attempt to access JSON non-{0} as {0}"


RESERVED = "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "failed to parse the request JSON buffer: The document is empty. at 0"),
        (" \n", "failed to parse the request JSON buffer: The document is empty. at 0"),
        ("[1]", "attempt to get members for non-object"),
        ("null", "attempt to get members for non-object"),
        ({"id": 5}, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"INT32": "a"}, NO_KIND.format("signed-integer")),
        ({"INT32": 1.0}, NO_KIND.format("signed-integer")),
        ({"INT32": None}, NO_KIND.format("signed-integer")),
        ({"INT32": {}}, NO_KIND.format("signed-integer")),
        ({"UINT8": True}, NO_KIND.format("unsigned-integer")),
        ({"FP32": "1"}, NO_KIND.format("number").replace("as number", "as double")),
        ({"BOOL": 1}, NO_KIND.format("boolean")),
        ({"BYTES": [1]}, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        ({"INT32": [[1, 2], [3, 4]]}, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        (
            {"INT8": 300},
            "Unable to parse 'data': 300 of input 'INT8' is out of range for datatype INT8, -128 to 127",
        ),
        (
            {"FP16": 1},
            "receiving FP16 data via JSON is not supported. Please use the binary data format for input FP16",
        ),
        (
            {"a": [1]},
            "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'. The inputs of model 'm' are"
            f" {', '.join(repr(each.name) for each in ALL.config.input)}.",
        ),
        ({"triton_a": None}, RESERVED),
        ({"parameters": {"triton_a": True}}, f"Converting keyword: 'parameters': {RESERVED}"),
        ({"a": None}, "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'."),
        (
            {"parameters": {"a": {}}},
            "Converting keyword: 'parameters': parameter 'a' has invalid type. It should be either 'int', 'bool', or"
            " 'string'.",
        ),
        (
            {"parameters": 5},
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object",
        ),
        ('{"a":' + "[" * 200 + "]" * 200 + "}", "JSON nesting depth exceeds maximum allowed limit (100)"),
    ],
)
def test_errors_have_tritons_texts(body: Any, message: str) -> None:
    assert refusal(body) == message


def test_an_input_called_parameters_leaves_no_room_for_nested_ones() -> None:
    named = view({"parameters": (DataType.INT32, (-1,))})
    assert refusal({"parameters": [1]}, named) == (
        "Keyword 'parameters' for nested schema also given as input tensor name"
    )


def test_outputs_that_json_cannot_carry_are_refused_before_the_model_runs() -> None:
    config = ModelConfig(name="m", backend="onnxruntime", output=(ModelOutput("h", DataType.FP16, dims=(1,)),))
    assert refusal({}, ModelView("m", "1", ("1",), config, {})).startswith("sending FP16 data via JSON")


@pytest.mark.parametrize(
    "document",
    [
        {"FP32": [0.5] * 60_000, "INT8": 1, "k": "v"},
        {"BYTES": "é" * 300_000, "k": 1, "id": "i"},
        {"BYTES": ["a", "b" * 200_000, 'c\\"[]{},:' * 10_000], "parameters": {"INT32": list(range(50_000))}},
        {"parameters": {"BYTES": "x" * 300_000, "FP32": []}, "k": "y" * 100_000},
        {"INT64": [], "pad": " " * 90_000, "BOOL": [True] * 30_000},
        {"x" * 70_000: 1, "INT32": 7},
    ],
)
def test_a_large_document_is_read_in_steps_to_the_same_request(document: dict[str, Any]) -> None:
    text = json.dumps(document, ensure_ascii=False).encode()
    assert len(text) > 64 << 10
    steps = decode_generate_steps(ALL, text)
    request = decode_generate(ALL, text)
    assert sum(1 for _ in steps) >= 2
    plain = {**document, **document.get("parameters", {})}
    for tensor in request.inputs:
        value = plain[tensor.name]
        value = value if isinstance(value, list) else [value]
        expected = [each.encode() for each in value] if tensor.datatype is DataType.BYTES else value
        assert tensor.array().tolist() == expected
    names = set(FROM_WIRE) | {"id", "parameters"}
    assert request.parameters == {key: value for key, value in plain.items() if key not in names}


TWICE = view({"x": (DataType.INT32, (-1,)), "y": (DataType.INT32, (-1,))})
LARGE = f'"y":[{",".join(["7"] * 60_000)}],'
"""What makes a document one that is read in steps."""


@pytest.mark.parametrize("large", ["", LARGE])
@pytest.mark.parametrize(
    ("members", "parameters", "name"),
    [
        ('"a":1,"a":2', {"a": 1}, ""),
        ('"a":1,"b":true,"a":"x"', {"a": 1, "b": True}, ""),
        ('"id":"i","id":"j"', {}, "i"),
        ('"parameters":{"a":1,"b":2,"a":3}', {"a": 1, "b": 2}, ""),
        ('"parameters":{"a":1},"parameters":{"b":2}', {"a": 1}, ""),
        # In another object it is another member, and the later one counts.
        ('"a":1,"parameters":{"a":2}', {"a": 2}, ""),
        ('"parameters":{"a":2},"a":1', {"a": 1}, ""),
        ('"a":"p: q","b":":{","a":":"', {"a": "p: q", "b": ":{"}, ""),
        ('"a":9223372036854775807,"a":0,"b":1.5', {"a": 2**63 - 1, "b": 1.5}, ""),
        ('"a":%s9,"a":0' % ("1" * 5_000), {"a": float("inf")}, ""),
    ],
)
def test_first_of_repeated_members_counts(large: str, members: str, parameters: dict[str, Any], name: str) -> None:
    text = f'{{{large}"x":[1,2],{members}}}'
    if parameters == {"a": float("inf")}:
        assert "Number too big" in refusal(text, TWICE)
        return
    request = decode(text, TWICE)
    assert (request.parameters, request.id) == (parameters, name)
    assert request.inputs[-1].name == "x"


@pytest.mark.parametrize("large", ["", LARGE])
def test_repeated_input_is_an_error(large: str) -> None:
    """The check of the request refuses it, as it does in the other protocols."""
    for text in ('"x":[1],"x":[2]', '"x":[1],"a":2,"parameters":{"x":[2]}', '"parameters":{"x":[1],"x":[2]}'):
        request = decode(f"{{{large}{text}}}", TWICE)
        assert [np.frombuffer(each.data, np.int32)[0] for each in request.inputs if each.name == "x"] == [1, 2]


def test_content_beside_inputs_is_limited_in_a_large_document() -> None:
    assert "more than 262144 bytes" in refusal({"k": "x" * 300_000})
    assert "more than 262144 bytes" in refusal({f"k{number}": number for number in range(40_000)})
    assert "invalid type" in refusal({"k": [1] * 300_000})


def written(*outputs: Tensor, **about: Any) -> str:
    response = InferenceResponse("m", "3", outputs=list(outputs), **about)
    return b"".join(bytes(chunk) for chunk in run(encode_generate_steps(response))).decode()


def output(name: str, datatype: DataType, values: Any) -> Tensor:
    dtype = object if datatype is DataType.BYTES else datatype.dtype
    return tensor_from_array(name, datatype, np.array(values, dtype))


def test_response_members_are_sorted_and_single_values_unwrapped() -> None:
    assert (
        written(
            output("z", DataType.INT32, [[7]]),
            output("Zoo", DataType.FP32, [[1], [2]]),
            output("text", DataType.BYTES, ['a"\n']),
            output("none", DataType.INT8, []),
            output("flag", DataType.BOOL, True),
            parameters={"p": 1, "q": "x", "r": False},
            id="i",
        )
        == '{"Zoo":[1.0,2.0],"flag":true,"id":"i","model_name":"m","model_version":"3","none":[],"p":1,"q":"x",'
        '"r":false,"text":"a\\"\\n","z":7}'
    )
    assert written() == '{"model_name":"m","model_version":"3"}'
    assert written(output("x", DataType.FP32, [np.nan]), output("y", DataType.FP64, [np.inf, 1])) == (
        '{"model_name":"m","model_version":"3","x":NaN,"y":[Infinity,1.0]}'
    )


def test_reserved_members_override_outputs_of_that_name() -> None:
    assert written(output("id", DataType.INT32, [7]), id="i") == '{"id":"i","model_name":"m","model_version":"3"}'
    assert written(output("id", DataType.INT32, [7])) == '{"id":7,"model_name":"m","model_version":"3"}'


def test_large_outputs_are_whole() -> None:
    numbers, text = list(range(100_000)), "é\n" * 100_000
    answer = json.loads(written(output("n", DataType.INT32, numbers), output("t", DataType.BYTES, [text])))
    assert (answer["n"], answer["t"]) == (numbers, text)


def test_an_output_that_json_cannot_carry_is_an_error() -> None:
    with pytest.raises(InferenceError, match="sending BF16 data via JSON is not supported"):
        written(output("h", DataType.BF16, [1]))


def test_load_metrics_are_text_or_json() -> None:
    cache = KvCache(used_blocks=3, max_blocks=12, tokens_per_block=64)
    assert load_metrics(b"text", cache) == (
        b"TEXT named_metrics.kv_cache_utilization=0.250000, named_metrics.max_token_capacity=768"
    )
    assert load_metrics(b"json", cache) == (
        b'JSON {"named_metrics":{"kv_cache_utilization":0.25,"max_token_capacity":768}}'
    )
    assert KvCache(used_blocks=0, max_blocks=0, tokens_per_block=64).utilization == 0.0
