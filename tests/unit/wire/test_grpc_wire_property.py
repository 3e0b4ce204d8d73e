"""Requests and responses are read and written as protobuf does, byte for byte."""

from collections.abc import Callable, Sequence
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
from support.examples import Draws, drawn, examples

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


Make = Callable[[Draws], bytes]
NUMBERS = (0, 1, 2, -1, 300, 2**31, 2**63, 2**64 - 1)
TEXTS = (*(b"", b"a", b"b", "é".encode()) * 5, b"\xff")


def varints(draws: Draws) -> bytes:
    return varint(draws.pick(NUMBERS), extra=draws.pick((0, 0, 0, 1, 9)))


def some_of(*values: bytes) -> Make:
    return lambda draws: draws.pick(values)


def unknown(draws: Draws) -> bytes:
    match draws.below(4):
        case 0:
            return tag(draws.pick((1, 4, 15, 1000)), VARINT) + varints(draws)
        case 1:
            return sized(draws.pick((9, 2000)), draws.pick(TEXTS))
        case 2:
            return tag(draws.pick((2, 30)), FIXED32) + b"1234"
        case _:
            return tag(draws.pick((3, 30)), FIXED64) + b"12345678"


IN_GROUPS = (b"", tag(1, VARINT) + b"\1", tag(7, GROUP) + tag(7, END_GROUP), sized(3, b"x"))


def group(draws: Draws) -> bytes:
    return tag(draws.pick((20, 21)), GROUP) + draws.pick(IN_GROUPS) + tag(draws.pick((20, 20, 21)), END_GROUP)


def several(make: Make, most: int) -> Make:
    return lambda draws: b"".join(make(draws) for _ in range(draws.below(most + 1)))


def one_of(*makes: Make) -> Make:
    return lambda draws: draws.pick(makes)(draws)


def fields(*known: Make) -> Make:
    """A message of known fields in any order and number, sometimes with unknown ones or fields of another kind."""
    return several(one_of(*known, *known, unknown), 5)


def nested(number: int, message: Make) -> Make:
    return lambda draws: sized(number, message(draws))


def text(number: int, texts: Sequence[bytes] = TEXTS) -> Make:
    return nested(number, some_of(*texts))


def numbers(number: int, element: Make, kind: int) -> Make:
    """A repeated number: packed, or one by one."""
    return one_of(
        nested(number, several(element, 3)),
        several(lambda draws: tag(number, kind) + element(draws), 2),
    )


PARAMETER = fields(
    lambda draws: tag(draws.pick((1, 2, 5)), VARINT) + varints(draws),
    text(3),
    some_of(tag(4, FIXED64) + b"\0\0\0\0\0\0\xf0\x3f"),
)
KEYS = (b"timeout", b"sequence_id", b"sequence_start", b"priority", b"mine", b"classification")
ENTRY = one_of(
    # Mostly a whole number or a text of a free name, which is accepted.
    lambda draws: text(1, (b"mine", b"other"))(draws) + sized(2, tag(2, VARINT) + b"\5"),
    lambda draws: sized(2, sized(3, b"x")) + text(1, (b"mine", b"other"))(draws),
    fields(text(1, KEYS), nested(2, PARAMETER)),
)
CONTENTS = one_of(
    fields(numbers(2, varints, VARINT)),
    fields(
        *(numbers(number, varints, VARINT) for number in range(1, 6)),
        numbers(6, some_of(b"\0\0\x80\x3f"), FIXED32),
        numbers(7, some_of(b"\0\0\0\0\0\0\xf0\x3f"), FIXED64),
        text(8),
    ),
)
DATATYPES = (b"BOOL", b"INT8", b"INT64", b"UINT8", b"UINT64", b"FP32", b"FP64", b"BYTES", b"FP16")
DIMENSIONS = some_of(b"\0", b"\1", b"\x81\0", varint(300), varint(2**40))
INPUT_REST = fields(
    text(1), text(2, DATATYPES), numbers(3, DIMENSIONS, VARINT), numbers(3, varints, VARINT), nested(4, ENTRY)
)


def input_of(draws: Draws) -> bytes:
    datatype = b"INT32" if draws.below(2) else draws.pick(DATATYPES)
    return sized(2, datatype) + INPUT_REST(draws) + several(nested(5, CONTENTS), 2)(draws)


OUTPUT = fields(text(1), nested(2, ENTRY))
PARTS = (text(1), text(2), text(3), nested(4, ENTRY), nested(6, OUTPUT))
REQUEST = one_of(fields(*PARTS, nested(5, input_of)), fields(*PARTS, nested(5, input_of), text(7)))


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
    rest = (request.outputs, request.sequence_id, request.sequence_start, request.sequence_end, request.form.priority)
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


@settings(max_examples=examples(600))
@given(drawn(lambda draws: REQUEST(draws) + several(group, 1)(draws), 200))
def test_a_request_means_what_protobuf_reads(raw: bytes) -> None:
    check(raw)


LARGE = {
    "raw": sized(7, bytes(LARGE_BYTES)),
    "typed": sized(5, sized(1, b"a") + sized(2, b"INT64") + sized(5, sized(3, b"\1" * LARGE_BYTES))),
    "in parts": sized(
        5, sized(5, sized(2, b"\7" * LARGE_BYTES)) + sized(2, b"INT32") + sized(5, tag(2, VARINT) + b"\5")
    ),
}


@settings(max_examples=examples(200))
@given(drawn(lambda draws: (REQUEST(draws), draws.pick(tuple(LARGE)), REQUEST(draws)), 300))
def test_a_large_request_means_what_protobuf_reads(case: tuple[bytes, str, bytes]) -> None:
    before, large, after = case
    check(before + LARGE[large] + after)


INSERTED = (b"", b"\xff", b"\x80" * 10, b"\0", b"\x0b", b"\x0c", b"\x2a")


@settings(max_examples=examples(200))
@given(drawn(lambda draws: (draws.pick(INSERTED), draws.below(1 << 16), REQUEST(draws)), 200))
def test_a_damaged_request_means_what_protobuf_reads(case: tuple[bytes, int, bytes]) -> None:
    inserted, place, raw = case
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
