"""Requests and responses are read and written as protobuf does, byte for byte."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceResponse, Tensor
from halimede.core.wire.destinations import ALL_BINARY
from halimede.core.wire.grpc_large import LARGE_BYTES
from halimede.core.wire.grpc_request import read_infer
from halimede.core.wire.grpc_response import (
    encode_empty_final,
    encode_infer,
    encode_infer_steps,
    encode_stream_error,
    encode_stream_infer,
)
from halimede.core.wire.protocol import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from halimede.core.wire.steps import run
from support.examples import examples

VARINT, FIXED64, BYTES, GROUP, END_GROUP, FIXED32 = range(6)


def varint(value: int, *, extra: int = 0) -> bytes:
    """A number of 64 bits, with so many bytes more than needed."""
    value %= 2**64
    groups = [value & 127]
    while value := value >> 7:
        groups.append(value & 127)
    groups += [0] * min(extra, 10 - len(groups))
    return bytes([*[group | 128 for group in groups[:-1]], groups[-1]])


def tag(number: int, kind: int) -> bytes:
    return varint(number << 3 | kind)


def sized(number: int, content: bytes) -> bytes:
    return tag(number, BYTES) + varint(len(content)) + content


NUMBERS = st.sampled_from([0, 1, 2, -1, 300, 2**31, 2**63, 2**64 - 1])
VARINTS = st.builds(lambda value, extra: varint(value, extra=extra), NUMBERS, st.sampled_from([0, 0, 0, 1, 9]))
TEXTS = st.sampled_from([b"", b"a", b"b", "é".encode()] * 5 + [b"\xff"])


UNKNOWN = st.one_of(
    st.builds(lambda number, value: tag(number, VARINT) + value, st.sampled_from([1, 4, 15, 1000]), VARINTS),
    st.builds(sized, st.sampled_from([9, 2000]), TEXTS),
    st.builds(lambda number: tag(number, FIXED32) + b"1234", st.sampled_from([2, 30])),
    st.builds(lambda number: tag(number, FIXED64) + b"12345678", st.sampled_from([3, 30])),
)
GROUPS = st.builds(
    lambda number, inner, end: tag(number, GROUP) + inner + tag(end, END_GROUP),
    st.sampled_from([20, 21]),
    st.sampled_from([b"", tag(1, VARINT) + b"\1", tag(7, GROUP) + tag(7, END_GROUP), sized(3, b"x")]),
    st.sampled_from([20, 20, 21]),
)


def fields(*known: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """A message of known fields in any order and number, sometimes with unknown ones or fields of another kind."""
    return st.lists(st.one_of(*known, *known, UNKNOWN.map(bytes)), max_size=5).map(b"".join)


def text(number: int, texts: st.SearchStrategy[bytes] = TEXTS) -> st.SearchStrategy[bytes]:
    return texts.map(lambda content: sized(number, content))


def numbers(number: int, element: st.SearchStrategy[bytes], kind: int) -> st.SearchStrategy[bytes]:
    """A repeated number: packed, or one by one."""
    return st.one_of(
        st.lists(element, max_size=3).map(lambda values: sized(number, b"".join(values))),
        st.lists(element, max_size=2).map(lambda values: b"".join(tag(number, kind) + value for value in values)),
    )


def nested(number: int, message: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return message.map(lambda content: sized(number, content))


PARAMETER = fields(
    st.builds(lambda number, value: tag(number, VARINT) + value, st.sampled_from([1, 2, 5]), VARINTS),
    text(3),
    st.just(tag(4, FIXED64) + b"\0\0\0\0\0\0\xf0\x3f"),
)
KEYS = st.sampled_from([b"timeout", b"sequence_id", b"sequence_start", b"priority", b"mine", b"classification"])
ENTRY = st.one_of(
    # Mostly a whole number or a text of a free name, which is accepted.
    st.sampled_from([b"mine", b"other"]).map(lambda key: sized(1, key) + sized(2, tag(2, VARINT) + b"\5")),
    st.sampled_from([b"mine", b"other"]).map(lambda key: sized(2, sized(3, b"x")) + sized(1, key)),
    fields(text(1, KEYS), nested(2, PARAMETER)).map(bytes),
)
CONTENTS = st.one_of(
    fields(numbers(2, VARINTS, VARINT)),
    fields(
        *(numbers(number, VARINTS, VARINT) for number in range(1, 6)),
        numbers(6, st.just(b"\0\0\x80\x3f"), FIXED32),
        numbers(7, st.just(b"\0\0\0\0\0\0\xf0\x3f"), FIXED64),
        text(8),
    ),
)
DATATYPES = st.sampled_from([b"BOOL", b"INT8", b"INT64", b"UINT8", b"UINT64", b"FP32", b"FP64", b"BYTES", b"FP16"])
DIMENSIONS = st.sampled_from([b"\0", b"\1", b"\x81\0", varint(300), varint(2**40)])
INPUT = st.builds(
    lambda datatype, rest, contents: datatype + rest + contents,
    text(2, st.one_of(st.just(b"INT32"), DATATYPES)),
    fields(text(1), text(2, DATATYPES), numbers(3, DIMENSIONS, VARINT), numbers(3, VARINTS, VARINT), nested(4, ENTRY)),
    st.lists(nested(5, CONTENTS), max_size=2).map(b"".join),
)
OUTPUT = fields(text(1), nested(2, ENTRY))
PARTS = (text(1), text(2), text(3), nested(4, ENTRY), nested(6, OUTPUT))
REQUEST = st.one_of(fields(*PARTS, nested(5, INPUT)), fields(*PARTS, nested(5, INPUT), text(7)))


def read(raw: bytes) -> Any:
    """All of a request, or the code of its error: of several faulty parameters, any may be reported."""
    try:
        message = read_infer(raw)
        about = (message.model_name, message.model_version, message.id)
        call = message.decode()
    except InferenceError as error:
        return error.code
    request = call.request
    tensors = [(each.name, each.datatype, each.shape, bytes(each.data)) for each in request.inputs]
    rest = (request.outputs, request.sequence_id, request.sequence_start, request.sequence_end, request.priority)
    # NaN is not equal to itself.
    return (
        about,
        tensors,
        rest,
        request.timeout_us,
        repr(sorted(request.parameters.items())),
        call.destinations,
        call.wants_empty_final,
    )


def check(raw: bytes) -> None:
    """The reader gives what protobuf gives, and refuses what protobuf refuses."""
    try:
        message = ModelInferRequest.FromString(raw)
    except DecodeError:
        assert read(raw) is ErrorCode.INTERNAL
        return
    assert read(raw) == read(message.SerializeToString())


@settings(max_examples=examples(300))
@given(REQUEST, st.lists(GROUPS, max_size=1))
def test_a_request_means_what_protobuf_reads(raw: bytes, groups: list[bytes]) -> None:
    check(b"".join([raw, *groups]))


LARGE = {
    "raw": sized(7, bytes(LARGE_BYTES)),
    "typed": sized(5, sized(1, b"a") + sized(2, b"INT64") + sized(5, sized(3, b"\1" * LARGE_BYTES))),
    "in parts": sized(
        5, sized(5, sized(2, b"\7" * LARGE_BYTES)) + sized(2, b"INT32") + sized(5, tag(2, VARINT) + b"\5")
    ),
}


@settings(max_examples=examples(200))
@given(REQUEST, REQUEST, st.sampled_from(list(LARGE)))
def test_a_large_request_means_what_protobuf_reads(before: bytes, after: bytes, large: str) -> None:
    check(before + LARGE[large] + after)


@settings(max_examples=examples(200))
@given(REQUEST, st.integers(0, 2**16), st.sampled_from([b"", b"\xff", b"\x80" * 10, b"\0", b"\x0b", b"\x0c", b"\x2a"]))
def test_a_damaged_request_means_what_protobuf_reads(raw: bytes, place: int, inserted: bytes) -> None:
    at = place % (len(raw) + 1)
    check(raw[:at])
    check(raw[:at] + inserted + raw[at:])
    check(raw[:at] + inserted + raw[at + 1 :])


INPUT_A = sized(1, b"a") + sized(2, b"INT32")


def one_input(*parts: bytes) -> Any:
    return read(sized(1, b"m") + sized(5, INPUT_A + b"".join(parts)))


def test_the_last_of_repeated_fields_counts_and_messages_merge() -> None:
    raw = sized(1, b"x") + sized(5, INPUT_A + sized(3, b"\1") + sized(2, b"UINT8")) + sized(7, b"\7") + sized(1, b"m")
    (name, _, _), tensors, *_ = read(raw)
    assert (name, tensors) == ("m", [("a", DataType.UINT8, (1,), b"\7")])
    contents = sized(5, sized(2, b"\1")) + sized(5, sized(2, b"\2"))
    assert one_input(sized(3, b"\2"), contents)[1] == [("a", DataType.INT32, (2,), b"\1\0\0\0\2\0\0\0")]


def test_repeated_numbers_may_be_packed_or_not_and_mixed() -> None:
    shape = tag(3, VARINT) + b"\1" + sized(3, b"\2\1") + tag(3, VARINT) + b"\1" + sized(3, b"")
    contents = sized(5, tag(2, VARINT) + b"\5" + sized(2, b"\6"))
    assert one_input(shape, contents)[1] == [("a", DataType.INT32, (1, 2, 1, 1), b"\5\0\0\0\6\0\0\0")]


def test_unknown_fields_and_groups_are_skipped() -> None:
    unknown = tag(99, GROUP) + sized(1, b"z") + tag(5, GROUP) + tag(5, END_GROUP) + tag(99, END_GROUP) + sized(88, b"y")
    (name, _, _), tensors, *_ = read(unknown + sized(1, b"m") + unknown + sized(5, unknown + INPUT_A) + sized(7, b""))
    assert (name, tensors) == ("m", [("a", DataType.INT32, (), b"")])


def test_malformed_messages_are_refused() -> None:
    for raw in (
        b"\x0a",  # no length
        b"\x0a\x05abc",  # a length beyond the end
        b"\x80" * 11,  # a number that does not end
        tag(99, GROUP),  # a group that does not end
        tag(99, GROUP) + tag(98, END_GROUP),
        tag(99, END_GROUP),
        tag(0, VARINT) + b"\0",  # field 0
        tag(1, 6),  # wire types that do not exist
        tag(1, 7),
        sized(1, b"\xff"),  # text that is not UTF-8
        sized(5, sized(3, b"\x80")),  # a packed number that is cut
        tag(30, FIXED32) + b"123",
        tag(30, FIXED64) + b"1234567",
    ):
        assert read(raw) is ErrorCode.INTERNAL, raw


# Responses.

VIEW = ModelView("m", "1", ("1",), ModelConfig(name="m"), {})
NAMES = st.text(max_size=3)
TENSORS = st.builds(
    Tensor,
    NAMES,
    st.sampled_from(list(DataType)),
    st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    st.one_of(st.binary(max_size=40), st.sampled_from([130, 20_000, 300_000]).map(bytes)),
)
# One parameter: protobuf writes several in an order of its own.
PARAMETERS = st.dictionaries(
    st.text(max_size=2),
    st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(max_size=3)),
    max_size=1,
)
RESPONSES = st.builds(
    lambda name, version, number, outputs, parameters, final: InferenceResponse(
        name, version, number, outputs=outputs, parameters=parameters, final=final
    ),
    NAMES,
    NAMES,
    NAMES,
    st.lists(TENSORS, max_size=3),
    PARAMETERS,
    st.booleans(),
)


def field_of(value: object) -> str:
    match value:
        case bool():
            return "bool_param"
        case int():
            return "int64_param" if value < 2**63 else "uint64_param"
        case float():
            return "double_param"
    return "string_param"


def plainly(response: InferenceResponse) -> Any:
    """The message, made by protobuf."""
    return ModelInferResponse(
        model_name=response.model_name,
        model_version=response.model_version,
        id=response.id,
        parameters={key: {field_of(value): value} for key, value in response.parameters.items()},
        outputs=[{"name": t.name, "datatype": t.datatype.name, "shape": t.shape} for t in response.outputs],
        raw_output_contents=[bytes(t.data) for t in response.outputs],
    )


def joined(parts: Sequence[Any]) -> bytes:
    return b"".join(parts)


@given(RESPONSES)
def test_a_response_has_the_bytes_that_protobuf_writes(response: InferenceResponse) -> None:
    expected = plainly(response).SerializeToString()
    assert joined(encode_infer(response, VIEW, ALL_BINARY)) == expected
    assert joined(run(encode_infer_steps(response, VIEW, ALL_BINARY))) == expected


@given(RESPONSES)
def test_a_streamed_response_has_the_bytes_that_protobuf_writes(response: InferenceResponse) -> None:
    response.parameters = {}
    inner = plainly(response)
    inner.parameters["triton_final_response"].bool_param = response.final
    expected = ModelStreamInferResponse(infer_response=inner).SerializeToString()
    assert joined(encode_stream_infer(response, VIEW, ALL_BINARY)) == expected


@given(NAMES, NAMES, st.text(min_size=1, max_size=5), st.booleans())
def test_the_last_messages_of_a_stream_have_the_bytes_of_protobuf(
    name: str, number: str, fault: str, final: bool
) -> None:
    inner = {"model_name": name, "id": number, "parameters": {"triton_final_response": {"bool_param": True}}}
    expected = ModelStreamInferResponse(infer_response=inner).SerializeToString()
    assert joined(encode_empty_final(InferenceResponse(name, "1", number))) == expected
    error = InferenceError(ErrorCode.INVALID_ARG, fault)
    if name:
        inner["parameters"] = {"triton_final_response": {"bool_param": final}}
        expected = ModelStreamInferResponse(error_message=fault, infer_response=inner).SerializeToString()
        assert joined(encode_stream_error(number, error, name, final=final)) == expected
    expected = ModelStreamInferResponse(error_message=fault, infer_response={"id": number}).SerializeToString()
    assert joined(encode_stream_error(number, error)) == expected
