"""ModelInfer messages to requests."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, Tensor
from halimede.core.types.datatype import FROM_WIRE
from halimede.core.wire.destinations import BINARY, Destinations, Inline
from halimede.core.wire.grpc_request import InferCall, read_infer
from halimede.core.wire.protocol import ModelInferRequest
from support.refusals import error_of


def asking(*inputs: tuple[str, str, list[int]], raw: list[bytes] | None = None, **top):
    """A ModelInferRequest of model m with inputs of (name, datatype, shape)."""
    message = ModelInferRequest(model_name="m", raw_input_contents=raw or [], **top)
    for name, datatype, shape in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
    return message


def with_parameters(**parameters):
    """A request whose parameters are given as (field, value)."""
    message = asking()
    for key, (kind, value) in parameters.items():
        setattr(message.parameters[key], kind, value)
    return message


def decode(message) -> InferCall:
    return read_infer(message.SerializeToString()).decode()


def refusal(message) -> InferenceError:
    return error_of(decode, message)


def invalid(text: str) -> InferenceError:
    return InferenceError(ErrorCode.INVALID_ARG, text)


def test_a_request_with_raw_contents() -> None:
    message = asking(
        ("a", "FP32", [1, 2]), ("b", "BYTES", [1]), raw=[b"\0" * 8, b"\1\0\0\0x"], model_version="3", id="seven"
    )
    message.outputs.add(name="y")
    message.outputs.add(name="x")
    assert decode(message) == InferCall(
        InferenceRequest(
            model_name="m",
            model_version="3",
            id="seven",
            inputs=[Tensor("a", DataType.FP32, (1, 2), b"\0" * 8), Tensor("b", DataType.BYTES, (1,), b"\1\0\0\0x")],
            outputs=("y", "x"),
        ),
        destinations=Destinations(BINARY),
    )


def test_raw_contents_may_be_empty_when_the_shape_has_a_zero() -> None:
    assert decode(asking(("a", "FP32", [0]), raw=[b""])).request.inputs == [Tensor("a", DataType.FP32, (0,), b"")]


TYPED = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-(2**15), 2**15 - 1]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 2**16 - 1]),
    "UINT32": ("uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1]),
    "FP32": ("fp32_contents", [0.5, float("inf")]),
    "FP64": ("fp64_contents", [1e300, -0.1]),
    "BYTES": ("bytes_contents", [b"a\0b", b""]),
}


def test_typed_contents_of_every_datatype_that_has_a_field() -> None:
    assert set(TYPED) == set(FROM_WIRE) - {"FP16", "BF16"}
    for name, (field, values) in TYPED.items():
        message = asking(("a", name, [2]))
        getattr(message.inputs[0].contents, field).extend(values)
        (tensor,) = decode(message).request.inputs
        assert (tensor.name, tensor.datatype, tensor.shape) == ("a", DataType[name], (2,))
        assert tensor.array().tolist() == values


def test_typed_contents_without_elements_are_an_empty_tensor() -> None:
    message = asking(("a", "INT8", [0]))
    message.inputs[0].contents.SetInParent()
    assert decode(message).request.inputs == [Tensor("a", DataType.INT8, (0,), b"")]


@pytest.mark.parametrize(
    ("datatype", "value", "limits"),
    [
        ("INT8", 300, "-128 to 127"),
        ("INT16", -40000, "-32768 to 32767"),
        ("UINT8", 300, "0 to 255"),
        ("UINT16", 65536, "0 to 65535"),
    ],
)
def test_typed_integers_outside_their_datatype_are_not_wrapped(datatype: str, value: int, limits: str) -> None:
    message = asking(("a", datatype, [2]))
    getattr(message.inputs[0].contents, TYPED[datatype][0]).extend([1, value])
    assert refusal(message) == invalid(
        f"value {value} of input tensor 'a' for model 'm' is outside the range of its datatype '{datatype}', {limits}"
    )


def test_contents_in_a_field_of_another_datatype() -> None:
    for datatype in FROM_WIRE:
        for other, (field, values) in TYPED.items():
            if datatype in TYPED and TYPED[datatype][0] == field:
                continue
            message = asking(("a", datatype, [2]))
            getattr(message.inputs[0].contents, field).extend(values)
            of = {"INT8": "INT32", "INT16": "INT32", "UINT8": "UINT32", "UINT16": "UINT32"}.get(other, other)
            assert refusal(message) == invalid(
                f"unexpected explicit tensor data for input tensor 'a' for model 'm' of type '{of}',"
                f" expected datatype '{datatype}'"
            )


def test_raw_and_typed_contents_do_not_mix() -> None:
    message = asking(("a", "FP32", [1]), raw=[b"\0" * 4])
    message.inputs[0].contents.fp32_contents.append(1)
    assert refusal(message) == invalid(
        "contents field must not be specified when using raw_input_contents for 'a' for model 'm'"
    )


def test_each_input_has_its_data() -> None:
    none = asking(("a", "FP32", [1]))
    assert refusal(none) == invalid("unable to find data for input tensor 'a' for model 'm' in request.")
    too_few = asking(("a", "FP32", [1]), ("b", "FP32", [1]), raw=[b"\0" * 4])
    assert refusal(too_few) == invalid("unable to find data for input tensor 'b' for model 'm' in request.")
    too_many = asking(("a", "FP32", [1]), raw=[b"\0" * 4] * 3)
    assert refusal(too_many) == invalid(
        "expected 1 entries in raw_input_contents, one per input, but got 3 for model 'm'"
    )


def test_negative_dimensions_name_the_request() -> None:
    text = "All input dimensions should be specified for input 'a' for model 'm', got [1,-1]"
    assert refusal(asking(("a", "FP32", [1, -1]), raw=[b""])) == invalid(f"[request id: <id_unknown>] {text}")
    assert refusal(asking(("a", "FP32", [1, -1]), raw=[b""], id="7")) == invalid(f"[request id: 7] {text}")


def test_unknown_datatype_is_refused() -> None:
    assert refusal(asking(("a", "FLOAT", [1]), raw=[b""])) == invalid(
        "invalid datatype for input a: 'FLOAT' is none of BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32,"
        " INT64, FP16, FP32, FP64, BYTES, BF16"
    )
    assert refusal(asking(("a", "INVALID", [1]), raw=[b""])).code is ErrorCode.INVALID_ARG


def test_reserved_parameters_go_to_fields_and_the_rest_stays() -> None:
    message = with_parameters(
        sequence_id=("int64_param", 42),
        sequence_start=("bool_param", True),
        sequence_end=("bool_param", True),
        priority=("uint64_param", 2**64 - 1),
        timeout=("int64_param", 1000),
        triton_enable_empty_final_response=("bool_param", True),
        binary_data_output=("bool_param", True),
        flag=("bool_param", False),
        count=("int64_param", -5),
        name=("string_param", "a\0b"),
        factor=("double_param", 0.5),
    )
    assert decode(message) == InferCall(
        InferenceRequest(
            model_name="m",
            sequence_id=42,
            sequence_start=True,
            sequence_end=True,
            priority=2**64 - 1,
            timeout_us=1000,
            parameters={"flag": False, "count": -5, "name": "a\0b", "factor": 0.5},
        ),
        destinations=Destinations(BINARY),
        wants_empty_final=True,
    )


def test_sequence_ids_are_texts_or_unsigned_numbers() -> None:
    assert decode(with_parameters(sequence_id=("string_param", "s"))).request.sequence_id == "s"
    assert decode(with_parameters(sequence_id=("int64_param", -1))).request.sequence_id == 2**64 - 1


@pytest.mark.parametrize(
    ("key", "kind", "value", "text"),
    [
        (
            "sequence_id",
            "bool_param",
            True,
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
        ),
        ("sequence_start", "int64_param", 1, "invalid value type for 'sequence_start' parameter, expected bool_param."),
        ("sequence_end", "string_param", "", "invalid value type for 'sequence_end' parameter, expected bool_param."),
        ("priority", "int64_param", -1, "invalid value for 'priority', expected value >= 0."),
        (
            "priority",
            "string_param",
            "1",
            "invalid value type for 'priority' parameter, expected int64_param or uint64_param.",
        ),
        ("timeout", "int64_param", -1, "invalid value for 'timeout', expected value >= 0."),
        ("timeout", "double_param", 1, "invalid value type for 'timeout' parameter, expected int64_param."),
        (
            "mine",
            "uint64_param",
            1,
            "invalid value type for 'mine' parameter, expected int64_param, bool_param, or string_param.",
        ),
        (
            "triton_x",
            "bool_param",
            True,
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting"
            " with 'triton_' are allowed: triton_enable_empty_final_response",
        ),
        (
            "triton_enable_empty_final_response",
            "int64_param",
            1,
            "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
        ),
    ],
)
def test_parameters_of_a_wrong_kind(key: str, kind: str, value, text: str) -> None:
    assert refusal(with_parameters(**{key: (kind, value)})) == invalid(text)


def test_a_parameter_without_a_value() -> None:
    message = asking()
    message.parameters["mine"].SetInParent()
    assert refusal(message) == invalid(
        "invalid value type for 'mine' parameter, expected int64_param, bool_param, or string_param."
    )


def test_classification_parameters_are_read() -> None:
    message = asking()
    message.outputs.add(name="scores").parameters["classification"].int64_param = 3
    message.outputs.add(name="plain").parameters["binary_data"].bool_param = True
    call = decode(message)
    assert (call.request.outputs, call.destinations) == (
        ("scores", "plain"),
        Destinations(BINARY, {"scores": Inline(binary=True, classes=3)}),
    )

    message.outputs[0].parameters["classification"].int64_param = 0
    assert refusal(message) == invalid("invalid value for 'classification' parameter, expected >= 0")
    message.outputs[0].parameters["classification"].string_param = "3"
    assert refusal(message) == invalid("invalid value type for 'classification' parameter, expected int64_param")


def test_shared_memory_is_refused_by_name() -> None:
    message = asking(("a", "FP32", [1]))
    message.inputs[0].parameters["shared_memory_region"].string_param = "region"
    assert refusal(message) == InferenceError(
        ErrorCode.UNSUPPORTED,
        "parameter 'shared_memory_region' of input 'a': shared memory is not available yet, tensors must be sent in the"
        " message",
    )
    message = asking()
    message.outputs.add(name="y").parameters["shared_memory_byte_size"].int64_param = 4
    assert refusal(message) == InferenceError(
        ErrorCode.UNSUPPORTED,
        "parameter 'shared_memory_byte_size' of output 'y': shared memory is not available yet, tensors must be sent in"
        " the message",
    )


def test_client_texts_in_errors_are_cut() -> None:
    long = "n" * 1_000_000
    messages = [
        asking((long, "FP32", [1])),
        asking((long, "FP32", [1, -1]), raw=[b""], id=long),
        asking(("a", "FP32", [-1] * 100_000), raw=[b""]),
        asking(("a", long, [1]), raw=[b""]),
        with_parameters(**{long: ("uint64_param", 1)}),
    ]
    assert [len(refusal(message).message) < 2048 for message in messages] == [True] * len(messages)


@given(st.binary(max_size=300))
def test_any_bytes_are_decoded_or_refused(raw: bytes) -> None:
    _decodes_or_refuses(raw)


_MESSAGES = st.builds(
    lambda **fields: ModelInferRequest(**fields).SerializeToString(),
    model_name=st.text(max_size=3),
    id=st.text(max_size=3),
    raw_input_contents=st.lists(st.binary(max_size=4), max_size=3),
    parameters=st.dictionaries(
        st.sampled_from(["sequence_id", "sequence_start", "priority", "timeout", "triton_x", "mine"]),
        st.sampled_from([{}, {"int64_param": -1}, {"bool_param": True}, {"string_param": ""}, {"uint64_param": 9}]),
        max_size=2,
    ),
    outputs=st.lists(
        st.builds(
            lambda name, wish: {"name": name, "parameters": {"classification": wish}},
            st.text(max_size=1),
            st.sampled_from([{}, {"int64_param": 0}, {"int64_param": 2}, {"double_param": 1}]),
        ),
        max_size=2,
    ),
    inputs=st.lists(
        st.fixed_dictionaries(
            {"name": st.text(max_size=1)},
            optional={
                "datatype": st.sampled_from([*FROM_WIRE, "", "INVALID", "fp32"]),
                "shape": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
                "contents": st.sampled_from(
                    [{}, {"int_contents": [300]}, {"bytes_contents": [b"x"]}, {"fp32_contents": [1]}]
                ),
            },
        ),
        max_size=3,
    ),
)


@given(_MESSAGES, st.data())
def test_any_damage_to_a_message_gives_a_request_or_a_refusal(raw: bytes, data: st.DataObject) -> None:
    _decodes_or_refuses(raw)
    if raw:
        at = data.draw(st.integers(0, len(raw) - 1))
        _decodes_or_refuses(raw[:at] + bytes([data.draw(st.integers(0, 255))]) + raw[at + 1 :])
        _decodes_or_refuses(raw[:at])


def _decodes_or_refuses(raw: bytes) -> None:
    refused: ErrorCode | None = None
    try:
        request = read_infer(raw).decode().request
    except InferenceError as error:
        refused = error.code
    if refused is None:
        assert len(request.inputs) == len(ModelInferRequest.FromString(raw).inputs)
        assert all(dim >= 0 for tensor in request.inputs for dim in tensor.shape)
    else:
        assert refused in {ErrorCode.INTERNAL, ErrorCode.INVALID_ARG, ErrorCode.UNSUPPORTED}
        assert refused is not ErrorCode.INTERNAL or not _is_a_message(raw)


def _is_a_message(raw: bytes) -> bool:
    try:
        ModelInferRequest.FromString(raw)
    except DecodeError:
        return False
    return True
