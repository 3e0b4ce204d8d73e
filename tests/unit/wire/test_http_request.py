"""Inference bodies become requests; errors have Triton's texts."""

import pytest

from halimede.core.config.model_config import ModelInput
from halimede.core.types import DataType, ErrorCode, InferenceRequest, Tensor
from halimede.core.types.tensor import join_bytes
from halimede.core.wire.destinations import BINARY, Destinations
from halimede.core.wire.http_request import DecodedInfer, decode_infer, parse_header_length
from support.inference_bodies import VIEW, asking, floats, invalid, refusal, tensor, view, with_tail
from support.refusals import error_of


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
        Destinations(),
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
    assert decoded == DecodedInfer(
        InferenceRequest(
            "m",
            inputs=decoded.request.inputs,
            priority=3,
            timeout_us=5000,
            sequence_id=2**64 - 1,
            sequence_start=True,
            parameters={"s": "text", "i": -1, "b": False, "f": 0.5},
        ),
        Destinations(BINARY),
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
        (
            asking(tensor(shape=[2, -1])),
            "invalid shape for input 'x': shape [2,-1] contains one or more invalid dimensions",
        ),
        (asking(tensor(shape=[2.0])), wrong("shape", "unsigned-integer")),
        (asking(tensor(shape=[True])), wrong("shape", "unsigned-integer")),
        (asking(tensor(shape=[[2]])), wrong("shape", "unsigned-integer")),
        (asking(tensor(shape=[2**64])), wrong("shape", "unsigned-integer")),
        (
            asking(tensor(shape=[2**32, 2**31])),
            "invalid shape for input 'x': shape [4294967296,2147483648] causes total element count to exceed maximum"
            " size of 9223372036854775807",
        ),
        (
            asking(tensor(shape=[2**62])),
            "input 'x' has too many elements for model 'm', got shape [4611686018427387904], a tensor has at most"
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
            asking(parameters={"triton_x": None}),
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
        (
            asking(parameters={"triton_enable_empty_final_response": "yes"}),
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
            asking(outputs=[{"name": "y", "parameters": {"shared_memory_region": "r", "binary_data": True}}]),
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
    assert error_of(parse_header_length, text, 156) == invalid(
        f"inference header size should be in range (0, 156), got: {text}"
    )


@pytest.mark.parametrize("text", ["abc", "", "-", "--1", "1.5", "0x10", "1_0", "+1", " 1", "٣", "²", "9" * 5000 + "x"])
def test_header_length_that_is_not_a_number(text: str) -> None:
    error = error_of(parse_header_length, text, 156)
    assert error.message.startswith("Unable to parse 'Inference-Header-Content-Length', got: ")
    assert len(error.message) < 400


# ---- Raw requests


def raw(body: bytes, *dims: int, datatype: DataType = DataType.FP32, max_batch_size: int = 0) -> Tensor:
    model = view(inputs=(ModelInput("x", datatype, dims=dims),), max_batch_size=max_batch_size)
    decoded = decode_infer(model, body, 0, "5")
    assert decoded == DecodedInfer(InferenceRequest("m", "5", inputs=decoded.request.inputs), Destinations(BINARY))
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
