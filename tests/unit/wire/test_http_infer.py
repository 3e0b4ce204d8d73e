"""Inference bodies: requests in, responses out, with Triton's texts."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from halimede.core.types.tensor import join_bytes, tensor_from_array
from halimede.core.wire.http_infer import (
    BINARY,
    JOIN_BYTES,
    JSON,
    SMALL_JSON_BYTES,
    DecodedInfer,
    EncodedInfer,
    InferDecoder,
    OutputFormat,
    ResponseFormat,
    decode_infer,
    decode_infer_steps,
    decode_large_steps,
    decode_small,
    encode_infer,
    encode_infer_steps,
    parse_header_length,
)
from halimede.core.wire.json_tensor import run


def view(
    *,
    inputs: tuple[ModelInput, ...] = (ModelInput("x", DataType.FP32, dims=(4,)),),
    outputs: tuple[ModelOutput, ...] = (ModelOutput("y", DataType.FP32, dims=(4,)),),
    max_batch_size: int = 0,
    labels: dict[str, tuple[str, ...]] | None = None,
) -> ModelView:
    config = ModelConfig(name="m", max_batch_size=max_batch_size, input=inputs, output=outputs)
    return ModelView("m", "1", ("1",), config, labels or {})


VIEW = view()


def tensor(**changes: Any) -> dict[str, Any]:
    """An input in JSON; a member that is given as ... is left out."""
    members = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2.5], **changes}
    return {key: value for key, value in members.items() if value is not ...}


def asking(*inputs: Any, **members: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **members}).encode()


def with_tail(document: bytes, tail: bytes, view: ModelView = VIEW) -> DecodedInfer:
    return decode_infer(view, document + tail, len(document))


def refusal(body: bytes, header_length: int | None = None, view: ModelView = VIEW) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        decode_infer(view, body, header_length)
    return caught.value


def invalid(text: str) -> InferenceError:
    return InferenceError(ErrorCode.INVALID_ARG, text)


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def response(*outputs: Tensor, **members: Any) -> InferenceResponse:
    return InferenceResponse("m", "3", outputs=list(outputs), **members)


def output(values: Any, datatype: DataType = DataType.FP32, name: str = "y") -> Tensor:
    return tensor_from_array(name, datatype, np.array(values, datatype.dtype))


# ---- Requests


def test_a_request_in_json() -> None:
    body = asking(tensor(), tensor(name="s", datatype="BYTES", shape=[1, 2], data=[["a", "é"]]), id="seven")
    assert decode_infer(VIEW, body, None, "2") == DecodedInfer(
        InferenceRequest(
            "m",
            "2",
            "seven",
            [
                Tensor("x", DataType.FP32, (2,), floats(1, 2.5)),
                Tensor("s", DataType.BYTES, (1, 2), join_bytes(["a", "é"])),
            ],
        ),
        ResponseFormat(),
    )


def test_a_request_with_binary_tensors_has_views_of_its_body() -> None:
    document = asking(
        tensor(name="a", data=..., parameters={"binary_data_size": 8}),
        tensor(name="b"),
        tensor(name="c", datatype="UINT8", shape=[0], data=..., parameters={"binary_data_size": 0}),
        tensor(name="d", datatype="INT16", shape=[1], data=..., parameters={"binary_data_size": 2}),
    )
    body = bytearray(document + bytes(8) + b"\1\2")
    inputs = decode_infer(VIEW, body, len(document)).request.inputs
    body[-10:-2] = floats(7, 8)
    assert inputs == [
        Tensor("a", DataType.FP32, (2,), floats(7, 8)),
        Tensor("b", DataType.FP32, (2,), floats(1, 2.5)),
        Tensor("c", DataType.UINT8, (0,), b""),
        Tensor("d", DataType.INT16, (1,), b"\1\2"),
    ]


def test_reserved_parameters_have_fields_of_their_own() -> None:
    decoded = decode_infer(
        VIEW,
        asking(
            tensor(),
            parameters={
                "sequence_id": 2**64 - 1,
                "sequence_start": True,
                "sequence_end": False,
                "priority": 3,
                "timeout": 5000,
                "binary_data_output": True,
                "s": "text",
                "i": -1,
                "b": False,
                "f": 0.5,
            },
        ),
        None,
    )
    decoded.request.inputs.clear()
    assert decoded == DecodedInfer(
        InferenceRequest(
            "m",
            priority=3,
            timeout_us=5000,
            sequence_id=2**64 - 1,
            sequence_start=True,
            parameters={"s": "text", "i": -1, "b": False, "f": 0.5},
        ),
        ResponseFormat(BINARY),
    )
    assert decode_infer(VIEW, asking(parameters={"sequence_id": "abc"}), None).request.sequence_id == "abc"


def wrong(key: str, kind: str) -> str:
    return f"Unable to parse '{key}': attempt to access JSON non-{kind} as {kind}"


def missing(key: str) -> str:
    return f"Unable to parse '{key}': attempt to access non-existing object member '{key}'"


SOURCES = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
    " 'shared_memory_region' in 'parameters'. But"
)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{nope", "failed to parse the request JSON buffer: unexpected character, expected a string key. at 1"),
        (b"{} x", "failed to parse the request JSON buffer: unexpected content after document. at 3"),
        (b'{"id":"\xff"}', "failed to parse the request JSON buffer: "),
        (b"[]", missing("inputs")),
        (b"null", missing("inputs")),
        (b"{}", missing("inputs")),
        (b'{"inputs":{}}', wrong("inputs", "array")),
        (b'{"inputs":[1]}', missing("name")),
        (asking(id=5), wrong("id", "string")),
        (asking(parameters=[]), wrong("parameters", "object")),
        (asking(tensor(name=...)), missing("name")),
        (asking(tensor(name=1)), wrong("name", "string")),
        (asking(tensor(datatype=...)), missing("datatype")),
        (asking(tensor(datatype=["FP32"])), wrong("datatype", "string")),
        (asking(tensor(datatype="FLOAT")), "invalid datatype for input x"),
        (asking(tensor(datatype="INVALID")), "invalid datatype for input x"),
        (asking(tensor(shape=...)), missing("shape")),
        (asking(tensor(shape="2")), wrong("shape", "array")),
        (asking(tensor(shape=[-1])), wrong("shape", "unsigned-integer")),
        (asking(tensor(shape=[2.0])), wrong("shape", "unsigned-integer")),
        (asking(tensor(shape=[True])), wrong("shape", "unsigned-integer")),
        (asking(tensor(shape=[[2]])), wrong("shape", "unsigned-integer")),
        (asking(tensor(shape=[2**64])), wrong("shape", "unsigned-integer")),
        (
            asking(tensor(shape=[2**63])),
            "input 'x' has too many elements for model 'm', got shape [9223372036854775808], a tensor has at most"
            " 9223372036854775807 bytes",
        ),
        (asking(tensor(shape=[2**40])), "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        (asking(tensor(data=[1, 2, 3])), "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        (asking(tensor(data=1)), wrong("data", "array")),
        (asking(tensor(data=None)), wrong("data", "array")),
        (asking(tensor(data=["1", 2])), "Unable to parse 'data': attempt to access JSON non-number as double"),
        (asking(tensor(parameters=1)), wrong("parameters", "object")),
        (asking(tensor(data=...)), SOURCES + " no field is set"),
        (
            asking(tensor(parameters={"binary_data_size": 8})),
            SOURCES + " set 'data' 'binary_data_size' in 'parameters'",
        ),
        (
            asking(tensor(data=..., parameters={"binary_data_size": 8, "shared_memory_region": "r"})),
            SOURCES + " set 'binary_data_size' in 'parameters' 'shared_memory_region' in 'parameters'",
        ),
        (
            asking(tensor(datatype="FP16")),
            "receiving FP16 data via JSON is not supported. Please use the binary data format for input x",
        ),
        (
            asking(tensor(datatype="BF16")),
            "receiving BF16 data via JSON is not supported. Please use the binary data format for input x",
        ),
        (
            asking(tensor(data=..., parameters={"binary_data_size": 8})),
            "must specify valid 'Infer-Header-Content-Length' in request header and 'binary_data_size' when passing"
            " inputs in binary data format",
        ),
        (asking(parameters={"sequence_id": 1.5}), wrong("sequence_id", "unsigned-integer")),
        (asking(parameters={"sequence_start": 1}), wrong("sequence_start", "boolean")),
        (asking(parameters={"sequence_end": "x"}), wrong("sequence_end", "boolean")),
        (asking(parameters={"priority": -1}), wrong("priority", "unsigned-integer")),
        (asking(parameters={"timeout": True}), wrong("timeout", "unsigned-integer")),
        (asking(parameters={"binary_data_output": 1}), wrong("binary_data_output", "boolean")),
        (
            asking(parameters={"triton_x": 1}),
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
        (asking(parameters={"a": 2**63}), "parameter 'a' is out of range. It should be at most 9223372036854775807."),
        (asking(outputs={}), wrong("outputs", "array")),
        (asking(outputs=None), wrong("outputs", "array")),
        (asking(outputs=[{}]), missing("name")),
        (asking(outputs=[{"name": "y", "parameters": []}]), wrong("parameters", "object")),
        (asking(outputs=[{"name": "y", "parameters": {"binary_data": 1}}]), wrong("binary_data", "boolean")),
        (
            asking(outputs=[{"name": "y", "parameters": {"classification": -1}}]),
            wrong("classification", "unsigned-integer"),
        ),
        (
            asking(outputs=[{"name": "y", "parameters": {"shared_memory_region": "r", "binary_data": False}}]),
            "Output can't set both 'shared_memory_region' and 'binary_data'",
        ),
        (
            asking(outputs=[{"name": "y", "parameters": {"shared_memory_region": "r", "classification": 1}}]),
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
    ],
)
def test_invalid_requests_in_json(body: bytes, text: str) -> None:
    error = refusal(body)
    assert (error.code, error.message[: len(text)]) == (ErrorCode.INVALID_ARG, text)
    assert text.endswith(" ") or error.message == text


@pytest.mark.parametrize("value", [None, [], {}])
def test_parameters_are_scalars(value: object) -> None:
    assert refusal(asking(parameters={"a": value})) == invalid(
        "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'."
    )


@pytest.mark.parametrize(
    "body",
    [
        asking(tensor(data=..., parameters={"shared_memory_region": "r"})),
        asking(outputs=[{"name": "x", "parameters": {"shared_memory_region": "r"}}]),
    ],
)
def test_shared_memory_is_not_supported_yet(body: bytes) -> None:
    error = refusal(body)
    assert error.code is ErrorCode.UNSUPPORTED
    assert "shared memory is not available yet" in error.message


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1059, "unexpected size for input 'x', expecting 995 additional bytes for model 'm'"),
        (2**63, f"unexpected size for input 'x', expecting {2**63 - 64} additional bytes for model 'm'"),
        (63, "unexpected additional input data for model 'm'"),
        (-1, wrong("binary_data_size", "unsigned-integer")),
        (2**64, wrong("binary_data_size", "unsigned-integer")),
        ("64", wrong("binary_data_size", "unsigned-integer")),
        (True, wrong("binary_data_size", "unsigned-integer")),
    ],
)
def test_a_binary_data_size_that_is_wrong(size: object, text: str) -> None:
    document = asking(tensor(shape=[16], data=..., parameters={"binary_data_size": size}))
    assert refusal(document + bytes(64), len(document)) == invalid(text)


def test_bytes_behind_a_request_without_binary_tensors_are_refused() -> None:
    document = asking(tensor())
    assert refusal(document + b"x", len(document)) == invalid("unexpected additional input data for model 'm'")
    assert with_tail(document, b"").request.inputs[0].shape == (2,)


def test_client_data_in_errors_is_cut() -> None:
    for body in (
        asking(tensor(name="n" * 100_000, datatype="x")),
        asking(tensor(name="n" * 100_000, shape=[2**60] * 1000)),
        asking(tensor(name="n" * 1000, datatype="UINT8", data=[1, 300])),
        asking(parameters={"k" * 1000: None}),
        asking(tensor(data=..., name="n" * 1000, parameters={"shared_memory_region": "r"})),
    ):
        assert len(refusal(body).message) < 1024


def test_names_with_nul_are_names() -> None:
    assert decode_infer(VIEW, asking(tensor(name="x\0y")), None).request.inputs[0].name == "x\0y"


@pytest.mark.parametrize(("text", "length"), [("0", 0), ("-0", 0), ("17", 17), ("00156", 156), ("156", 156)])
def test_a_header_length(text: str, length: int) -> None:
    assert parse_header_length(text, 156) == length


@pytest.mark.parametrize("text", ["157", "99999", "-1", "1" + "0" * 30])
def test_a_header_length_out_of_range(text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        parse_header_length(text, 156)
    assert caught.value == invalid(f"inference header size should be in range (0, 156), got: {text}")


@pytest.mark.parametrize("text", ["abc", "", "-", "--1", "1.5", "0x10", "1_0", "+1", " 1", "٣", "²", "9" * 5000 + "x"])
def test_header_length_that_is_not_a_number(text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        parse_header_length(text, 156)
    assert caught.value.message.startswith("Unable to parse 'Inference-Header-Content-Length', got: ")
    assert len(caught.value.message) < 400


# ---- Raw requests


def raw(body: bytes, *dims: int, datatype: DataType = DataType.FP32, max_batch_size: int = 0) -> Tensor:
    model = view(inputs=(ModelInput("x", datatype, dims=dims),), max_batch_size=max_batch_size)
    decoded = decode_infer(model, body, 0, "5")
    assert decoded == DecodedInfer(InferenceRequest("m", "5", inputs=decoded.request.inputs), ResponseFormat(BINARY))
    return decoded.request.inputs[0]


def test_a_raw_body_is_the_only_input() -> None:
    data = floats(1, 2, 3, 4)
    assert raw(data, 4) == Tensor("x", DataType.FP32, (4,), data)
    assert raw(data, 4, max_batch_size=8) == Tensor("x", DataType.FP32, (1, 4), data)
    assert raw(data, 2, -1, max_batch_size=8) == Tensor("x", DataType.FP32, (1, 2, 2), data)
    assert raw(b"", -1) == Tensor("x", DataType.FP32, (0,), b"")
    assert raw(b"text", 1, datatype=DataType.BYTES) == Tensor("x", DataType.BYTES, (1,), b"\4\0\0\0text")


def test_an_empty_body_is_a_raw_request() -> None:
    assert refusal(b"") == invalid(
        "[request id: <id_unknown>] input byte size mismatch for input 'raw_input' for model 'm'. Expected 16, got 0"
    )


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (
            (ModelInput("a", DataType.FP32, dims=(1,)), ModelInput("b", DataType.FP32, dims=(1,))),
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' model configuration",
        ),
        (
            (ModelInput("a", DataType.FP32, dims=(-1, 2, -1)),),
            "The shape of the raw input 'a' can not be deduced because there are more than one"
            " variable-sized dimension",
        ),
        (
            (ModelInput("a", DataType.BYTES, dims=(2,)),),
            "For BYTE datatype raw input 'a', the model must have input shape [1]",
        ),
        (
            (ModelInput("a", DataType.BYTES, dims=(-1,)),),
            "For BYTE datatype raw input 'a', the model must have input shape [1]",
        ),
        (
            (ModelInput("a", DataType.INT32, dims=(-1, 2)),),
            "input byte size mismatch for input 'raw_input' for model 'm'. Expected 8, got 9",
        ),
    ],
)
def test_a_raw_body_that_does_not_fit(inputs: tuple[ModelInput, ...], text: str) -> None:
    assert refusal(bytes(9), 0, view(inputs=inputs)) == invalid(f"[request id: <id_unknown>] {text}")


# ---- Large documents


def test_a_large_document_is_decoded_in_steps() -> None:
    count = 100_000
    document = asking(
        tensor(name="a", shape=[count], data=list(range(count))),
        tensor(name="b", data=..., parameters={"binary_data_size": 8}),
        tensor(name="c", datatype="BYTES", shape=[1, 1], data=[["x" * 200_000]]),
        id="7",
        outputs=[{"name": "y", "parameters": {"binary_data": True}}],
    )
    assert len(document) > SMALL_JSON_BYTES
    body = document + floats(1, 2)
    expected = DecodedInfer(
        InferenceRequest(
            "m",
            id="7",
            outputs=("y",),
            inputs=[
                Tensor("a", DataType.FP32, (count,), np.arange(count, dtype="<f4").tobytes()),
                Tensor("b", DataType.FP32, (2,), floats(1, 2)),
                Tensor("c", DataType.BYTES, (1, 1), join_bytes(["x" * 200_000])),
            ],
        ),
        ResponseFormat(JSON, {"y": BINARY}),
    )
    assert decode_infer(VIEW, body, len(document)) == expected
    assert run(decode_infer_steps(VIEW, memoryview(body), len(document))) == expected
    assert sum(1 for _ in decode_infer_steps(VIEW, body, len(document))) >= len(document) // (64 << 10)


def test_small_documents_take_one_step() -> None:
    assert list(decode_infer_steps(VIEW, asking(tensor()), None)) == []
    assert list(decode_infer_steps(VIEW, bytes(16), 0)) == []


def large(text: bytes) -> DecodedInfer:
    return run(decode_large_steps(VIEW, text, None, ""))


def test_lists_of_the_client_are_not_taken_for_placeholders() -> None:
    array = rb'{"name":"x","datatype":"FP32","shape":[1],"data":[8]}'
    body = b'{"inputs":[' + array + b"," + array.replace(b"data", rb"d\u0061ta").replace(b"8", b"0") + b"]}"
    assert [bytes(t.data) for t in large(body).request.inputs] == [floats(8), floats(0)]


def test_the_last_of_two_members_counts_and_the_first_must_be_json() -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[9],"shape":[1],"data":["a"],"data":[8]}]}'
    assert large(body) == decode_small(VIEW, body, None, "")
    assert large(body).request.inputs == [Tensor("x", DataType.FP32, (1,), floats(8))]
    with pytest.raises(InferenceError, match="failed to parse"):
        large(body.replace(b'["a"]', b"[a]"))


MALFORMED = [
    *("[1,]", "[,1]", "[1,,2]", "[1 2]", "[1][2]", "[[1],]", "[[,1]]", "[1,[,2]]", "[[1],[2,]]", "[1,2", "[1,2]]"),
    *("[1,]]", "[01]", "[1.]", "[.5]", "[+1]", "[0x1]", "[1_0]", "[nan]", "[- 1]", "[1,\x0b2]", "[1;2]", "[\\1]"),
    *("[[1}]", "{1}", '["1]', "[1]]", "[[1]", '[1,"]'),
]


@pytest.mark.parametrize("array", MALFORMED)
@pytest.mark.parametrize("padding", [0, 40])
def test_invalid_json_is_refused_for_any_block_size(array: str, padding: int) -> None:
    data = array.replace(",", "," + " " * padding)
    body = f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[2],"data":{data}}}]}}'.encode()
    assert refusal(body).code is ErrorCode.INVALID_ARG
    for block_bytes in (16, 20, 1000):
        with pytest.raises(InferenceError) as caught:
            run(decode_large_steps(VIEW, body, None, "", block_bytes))
        assert caught.value.code is ErrorCode.INVALID_ARG


def test_nesting_has_a_limit_in_small_and_large_documents() -> None:
    error = invalid("JSON nesting depth exceeds maximum allowed limit (100)")
    for depth in (101, 100_000):
        assert refusal(b'{"inputs":' + b"[" * depth + b"]" * depth + b"}") == error
    deep = tensor(data=json.loads("[" * 97 + "1,2" + "]" * 97))
    assert decode_infer(VIEW, asking(deep), None).request.inputs[0].data == floats(1, 2.0)


def test_nan_is_read_from_small_documents() -> None:
    body = asking(tensor(data=[float("nan"), float("-inf")]))
    assert b"NaN" in body
    assert decode_infer(VIEW, body, None).request.inputs == [
        Tensor("x", DataType.FP32, (2,), floats(float("nan"), float("-inf")))
    ]


# ---- Which outputs, and how


def formats(*outputs: Any, **parameters: Any) -> tuple[tuple[str, ...], ResponseFormat]:
    decoded = decode_infer(VIEW, asking(outputs=list(outputs), parameters=parameters), None)
    return decoded.request.outputs, decoded.format


def test_all_outputs_are_json_unless_binary_is_asked_for() -> None:
    assert formats() == ((), ResponseFormat(JSON))
    assert formats(binary_data_output=True) == ((), ResponseFormat(BINARY))


def test_named_output_defaults_to_json_independently_of_others() -> None:
    assert formats({"name": "a"}, binary_data_output=True) == (("a",), ResponseFormat(BINARY, {"a": JSON}))


def test_every_named_output_has_its_format() -> None:
    assert formats(
        {"name": "b", "parameters": {"binary_data": True}},
        {"name": "a", "parameters": {"binary_data": False, "other": {}}},
        {"name": "c", "parameters": {"classification": 3}},
        {"name": "d", "parameters": {"classification": 2, "binary_data": True}},
        {"name": "e", "parameters": {"classification": 0}},
    ) == (
        ("b", "a", "c", "d", "e"),
        ResponseFormat(
            JSON,
            {"b": BINARY, "a": JSON, "c": OutputFormat(False, 3), "d": OutputFormat(True, 2), "e": JSON},
        ),
    )


HALF = view(outputs=(ModelOutput("h", DataType.FP16, dims=(4,)), ModelOutput("y", DataType.FP32, dims=(4,))))


def test_half_floats_are_refused_as_json_before_the_model_runs() -> None:
    error = invalid("sending FP16 data via JSON is not supported. Please use the binary data format for output h")
    assert refusal(asking(), view=HALF) == error
    assert refusal(asking(outputs=[{"name": "h"}]), view=HALF) == error
    python = replace(HALF, config=replace(HALF.config, backend="python"))
    assert decode_infer(python, asking(), None).request.outputs == ()  # it may leave out what is not asked for
    assert refusal(asking(outputs=[{"name": "h"}]), view=python) == error
    for body in (
        asking(parameters={"binary_data_output": True}),
        asking(outputs=[{"name": "y"}]),
        asking(outputs=[{"name": "h", "parameters": {"binary_data": True}}]),
    ):
        assert decode_infer(HALF, body, None).request.inputs == []


def test_an_input_at_fault_is_named_before_an_output() -> None:
    body = asking(tensor(datatype="FP16"), outputs=[{"name": "h"}])
    error = invalid("receiving FP16 data via JSON is not supported. Please use the binary data format for input x")
    assert refusal(body, view=HALF) == error
    with pytest.raises(InferenceError) as caught:
        run(decode_large_steps(HALF, body, None, ""))
    assert caught.value == error


def test_an_output_without_classes_is_refused_before_the_model_runs() -> None:
    body = asking(outputs=[{"name": "h", "parameters": {"classification": 1}}])
    assert refusal(body, view=HALF) == invalid(
        "class result not available for output due to unsupported type 'FP16', output 'h'"
    )


# ---- Responses


def test_a_response_in_json() -> None:
    answer = response(output([[1, 0.1]]), output([True, False], DataType.BOOL, 'a"b'), id="7")
    assert encode_infer(answer, ResponseFormat(), VIEW) == EncodedInfer(
        [
            b'{"id":"7","model_name":"m","model_version":"3","outputs":['
            b'{"name":"y","datatype":"FP32","shape":[1,2],"data":[1.0,0.10000000149011612]},'
            b'{"name":"a\\"b","datatype":"BOOL","shape":[2],"data":[true,false]}]}'
        ],
        None,
    )


def test_a_response_with_parameters_and_no_output() -> None:
    answer = response(parameters={"sequence_id": 0, "sequence_start": False, "s": "é"})
    assert encode_infer(answer, ResponseFormat(), VIEW) == EncodedInfer(
        [
            '{"model_name":"m","model_version":"3","parameters":{"sequence_id":0,"sequence_start":false,"s":"é"},'
            '"outputs":[]}'.encode()
        ],
        None,
    )


def test_binary_outputs_follow_the_json_in_order() -> None:
    answer = response(output([1], name="a"), output([2], name="b"), output([3], DataType.UINT8, "c"))
    json_part = (
        b'{"model_name":"m","model_version":"3","outputs":['
        b'{"name":"a","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}},'
        b'{"name":"b","datatype":"FP32","shape":[1],"data":[2.0]},'
        b'{"name":"c","datatype":"UINT8","shape":[1],"parameters":{"binary_data_size":1}}]}'
    )
    assert encode_infer(answer, ResponseFormat(BINARY, {"b": JSON}), VIEW) == EncodedInfer(
        [json_part + floats(1) + b"\3"], len(json_part)
    )


def test_a_large_binary_output_is_passed_through() -> None:
    data = memoryview(bytes(JOIN_BYTES))
    answer = response(output([1], name="a"), Tensor("b", DataType.UINT8, (JOIN_BYTES,), data), output([2], name="c"))
    encoded = encode_infer(answer, ResponseFormat(BINARY), VIEW)
    assert encoded.chunks[1] is data
    assert encoded.json_length is not None
    assert [len(chunk) for chunk in encoded.chunks] == [encoded.json_length + 4, JOIN_BYTES, 4]


def test_classes_take_the_place_of_the_tensor() -> None:
    model = view(max_batch_size=4, labels={"y": ("cat", "dog")})
    answer = response(output([[0.25, 0.5]]))
    assert encode_infer(answer, ResponseFormat(JSON, {"y": OutputFormat(False, 1)}), model).chunks == [
        b'{"model_name":"m","model_version":"3","outputs":['
        b'{"name":"y","datatype":"BYTES","shape":[1,1],"data":["0.500000:1:dog"]}]}'
    ]
    assert b"".join(encode_infer(answer, ResponseFormat(JSON, {"y": OutputFormat(True, 1)}), model).chunks).endswith(
        b'"shape":[1,1],"parameters":{"binary_data_size":18}}]}' + join_bytes(["0.500000:1:dog"])
    )


def test_unconfigured_half_float_output_is_refused_as_json() -> None:
    with pytest.raises(InferenceError) as caught:
        encode_infer(response(Tensor("h", DataType.BF16, (1,), b"\0\0")), ResponseFormat(), VIEW)
    assert caught.value == invalid(
        "sending BF16 data via JSON is not supported. Please use the binary data format for output h"
    )


def test_response_parameters_not_valid_in_json_are_internal_errors() -> None:
    with pytest.raises(InferenceError) as caught:
        encode_infer(response(parameters={"a": 2**70}), ResponseFormat(), VIEW)
    assert caught.value.code is ErrorCode.INTERNAL


def test_a_large_response_is_encoded_in_steps() -> None:
    values = np.arange(200_000, dtype="<i4")
    answer = response(output(values, DataType.INT32), output([1.5], name="z"))
    assert sum(1 for _ in encode_infer_steps(answer, ResponseFormat(), VIEW)) >= 4
    body = b"".join(encode_infer(answer, ResponseFormat(), VIEW).chunks)
    assert [item["data"] for item in json.loads(body)["outputs"]] == [values.tolist(), [1.5]]


def test_cached_json_part_decodes_as_the_first_time() -> None:
    tensor = {"name": "IN", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    plain = orjson.dumps({"inputs": [tensor], "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}]})
    named = orjson.dumps({"id": "7", "inputs": [tensor]})
    listed = orjson.dumps({"parameters": {"binary_data_output": True, "x": 1}, "inputs": [tensor]})
    view = decoder_view()
    decoder = InferDecoder(view, "1")
    for text in (plain, named, listed):
        for payload in (b"\0" * 8, b"\1" * 8):
            for _ in range(2):
                assert decoder.decode(text + payload, len(text)) == decode_infer(view, text + payload, len(text), "1")


def test_cached_json_part_with_wrong_binary_part_is_refused() -> None:
    tensor = {"name": "IN", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    text = orjson.dumps({"inputs": [tensor]})
    view = decoder_view()
    decoder = InferDecoder(view, "")
    assert decoder.decode(text + b"\0" * 8, len(text)).request.inputs[0].data == b"\0" * 8
    for payload in (b"", b"\0" * 7, b"\0" * 9):
        with pytest.raises(InferenceError) as known:
            decoder.decode(text + payload, len(text))
        with pytest.raises(InferenceError) as fresh:
            decode_infer(view, text + payload, len(text))
        assert known.value == fresh.value


def test_json_part_with_data_is_decoded_each_time() -> None:
    view = decoder_view()
    decoder = InferDecoder(view, "")
    for value in (1.0, 2.0):
        text = b'{"inputs":[{"name":"IN","shape":[1,2],"datatype":"FP32","data":[%.1f,0.0]}]}' % value
        for _ in range(2):
            assert decoder.decode(text, len(text)).request.inputs[0].array().tolist() == [[value, 0.0]]


def test_cache_of_json_parts_is_bounded() -> None:
    view = decoder_view()
    decoder = InferDecoder(view, "")
    tensor = {"name": "IN", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    sizes = []
    for number in range(300):
        text = orjson.dumps({"inputs": [tensor]}) + b" " * number
        decoder.decode(text + b"\0" * 8, len(text))
        sizes.append(len(decoder.known))
    assert max(sizes) <= 64


def decoder_view() -> ModelView:
    config = ModelConfig(
        name="m",
        max_batch_size=8,
        input=(ModelInput(name="IN", data_type=DataType.FP32, dims=(2,)),),
        output=(ModelOutput(name="OUT", data_type=DataType.FP32, dims=(2,)),),
    )
    return ModelView("m", "1", ("1",), config, {})


def test_single_binary_output_is_encoded_like_others() -> None:
    view = decoder_view()
    for size in (0, 2, 100_000):
        output = Tensor("OUT", DataType.UINT8, (1, size), b"\7" * size)
        response = InferenceResponse("m", "1", outputs=[output])
        binary = ResponseFormat(OutputFormat(binary=True))
        short, long = (encode_infer(response, each, view) for each in (ResponseFormat(BINARY), binary))
        assert b"".join(short.chunks) == b"".join(long.chunks)
        assert short.json_length == long.json_length
        document = orjson.loads(b"".join(short.chunks)[: short.json_length])
        assert document["outputs"][0]["parameters"] == {"binary_data_size": size}


def test_a_large_json_part_without_data_keeps_the_shapes_of_its_binary_tensors() -> None:
    document = asking(tensor(data=..., parameters={"binary_data_size": 8}), parameters={"note": "long " * 20_000})
    decoded = with_tail(document, bytes(8))
    assert [(each.name, each.shape) for each in decoded.request.inputs] == [("x", (2,))]
