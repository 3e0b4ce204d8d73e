"""Large requests are cut around protobuf: the same requests come out as protobuf alone gives, in bounded steps."""

import struct
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.core.config.check_request import RequestChecker
from halimede.core.config.model_config import ModelConfig, ModelInput
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest
from halimede.core.wire.grpc_large import LARGE_BYTES, MAX_FIELDS, MAX_OTHER_BYTES, read_large, varint
from halimede.core.wire.grpc_request import read_infer
from halimede.core.wire.protocol import ModelInferRequest
from halimede.core.wire.steps import run
from support.examples import examples
from support.refusals import error_of

COUNT = 70_000
"""Elements of a large input: more than one step decodes."""

FIELDS = {
    "BOOL": ("bool_contents", [True, False, True]),
    "INT8": ("int_contents", [-128, 127, 0]),
    "INT16": ("int_contents", [-32768, 32767, 5]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1, 0]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1, 1]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 65535, 300]),
    "UINT32": ("uint_contents", [2**32 - 1, 0]),
    "UINT64": ("uint64_contents", [2**64 - 1, 0, 7]),
    "FP32": ("fp32_contents", [1.5, -0.25]),
    "FP64": ("fp64_contents", [1e300, -2.0, 0.1]),
}
NUMPY = {"BOOL": "bool", "FP32": "float32", "FP64": "float64"}


def tag(number: int, kind: int) -> bytes:
    return varint(number << 3 | kind)


def sized(number: int, value: bytes) -> bytes:
    return tag(number, 2) + varint(len(value)) + value


def repeated(values: Sequence[object], count: int = COUNT) -> list[object]:
    return [values[at % len(values)] for at in range(count)]


def typed(datatype: str, field: str, values: Sequence[object]) -> bytes:
    message = ModelInferRequest(model_name="m", id="7")
    small = message.inputs.add(name="FIRST", datatype="INT32", shape=[2])
    small.contents.int_contents.extend([1, 2])
    tensor = message.inputs.add(name="IN", datatype=datatype, shape=[len(values)])
    getattr(tensor.contents, field).extend(values)
    return bytes(message.SerializeToString())


def of_contents(contents: bytes, datatype: str, count: int = 10 * COUNT) -> bytes:
    """A request whose one input has these encoded InferTensorContents, and `count` elements by its shape."""
    head = sized(1, b"IN") + sized(2, datatype.encode()) + sized(3, varint(count))
    return sized(1, b"m") + sized(5, head + sized(5, contents))


def decoded(raw: bytes) -> InferenceRequest:
    message = read_infer(raw)
    assert message.in_steps
    return run(message.decode_steps()).request


@pytest.mark.parametrize("datatype", FIELDS)
def test_typed_contents_of_every_datatype_are_the_tensors_bytes(datatype: str) -> None:
    field, values = FIELDS[datatype]
    elements = repeated(values)
    request = decoded(typed(datatype, field, elements))
    first, second = request.inputs
    assert (first.name, bytes(first.data)) == ("FIRST", struct.pack("<2i", 1, 2))
    expected = np.array(elements, NUMPY.get(datatype, datatype.lower())).tobytes()
    assert (second.name, second.shape, bytes(second.data)) == ("IN", (COUNT,), expected)
    assert (request.model_name, request.id) == ("m", "7")


def test_strings_in_typed_contents_get_their_lengths() -> None:
    elements = repeated([b"", b"a", b"long " * 20])
    request = decoded(typed("BYTES", "bytes_contents", elements))
    joined = b"".join(struct.pack("<I", len(each)) + each for each in elements if isinstance(each, bytes))
    assert bytes(request.inputs[1].data) == joined


def test_elements_without_packing_and_in_several_pieces_keep_their_order() -> None:
    values = repeated([0, 1, 127, 128, 2**31 - 1])
    numbers = [int(str(value)) for value in values]
    loose = b"".join(tag(2, 0) + varint(each) for each in numbers)
    packed = sized(2, b"".join(map(varint, numbers)))
    raw = sized(1, b"m") + sized(
        5,
        sized(5, packed)
        + sized(1, b"IN")
        + sized(5, loose)
        + sized(2, b"INT32")
        + sized(3, varint(4 * COUNT))
        + sized(5, packed + loose),
    )
    assert bytes(decoded(raw).inputs[0].data) == np.array(numbers * 4, np.int32).tobytes()
    # As protobuf reads it.
    assert list(ModelInferRequest.FromString(raw).inputs[0].contents.int_contents) == numbers * 4


def test_no_step_decodes_more_than_some_elements() -> None:
    raw = typed("INT64", "int64_contents", repeated([5], 20 * COUNT))
    steps = read_infer(raw).decode_steps()
    sizes = list(steps)
    whole = 20 * COUNT * 8
    assert len(sizes) >= 20
    assert (sum(sizes), max(sizes)) == (whole, 8 * (32 << 10))


def test_a_value_outside_its_datatype_is_refused_wherever_it_is() -> None:
    values = repeated([1])
    values[COUNT - 1] = 128
    with pytest.raises(InferenceError, match="value 128 of input tensor 'IN' for model 'm' is outside") as caught:
        decoded(typed("INT8", "int_contents", values))
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_contents_of_another_field_are_refused() -> None:
    with pytest.raises(InferenceError, match="of type 'FP64', expected datatype 'INT64'"):
        decoded(typed("INT64", "fp64_contents", repeated([1.0])))


def test_raw_contents_are_views_of_the_message() -> None:
    message = ModelInferRequest(model_name="m", raw_input_contents=[b"x" * LARGE_BYTES, b"yz", b""])
    for name in ("A", "B", "C"):
        message.inputs.add(name=name, datatype="UINT8", shape=[1])
    raw = message.SerializeToString()
    request = read_infer(raw).decode().request
    assert [bytes(each.data) for each in request.inputs] == [b"x" * LARGE_BYTES, b"yz", b""]
    for tensor in request.inputs:
        assert isinstance(tensor.data, memoryview)
        assert tensor.data.obj is raw


@given(
    model=st.text(max_size=5),
    raws=st.lists(st.binary(max_size=20), max_size=4),
    inputs=st.lists(st.text(max_size=3), max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_a_message_in_any_order_is_read_as_protobuf_reads_it(model, raws, inputs, order) -> None:  # type: ignore[no-untyped-def]
    fields = [
        sized(1, model.encode()),
        sized(3, b"id"),
        tag(90, 0) + b"\x05",
        tag(91, 5) + b"1234",
        tag(92, 1) + b"8" * 8,
    ]
    fields += [sized(5, sized(1, name.encode())) for name in inputs]
    fields += [sized(7, raw) for raw in raws]
    order.shuffle(fields)
    whole = b"".join(fields)
    large = read_large(whole)
    assert large.contents == {}
    message = ModelInferRequest()
    message.CopyFrom(large.message)
    message.raw_input_contents.extend(bytes(raw) for raw in large.raws)
    assert message == ModelInferRequest.FromString(whole)


@given(st.binary(max_size=60), st.integers(0, 60))
def test_what_is_read_is_valid_for_protobuf_too(noise: bytes, at: int) -> None:
    good = ModelInferRequest(model_name="m", raw_input_contents=[b"ab"]).SerializeToString()
    raw = good[:at] + noise + good[at:]
    with suppress(InferenceError):
        read_large(raw)
        ModelInferRequest.FromString(raw)


@pytest.mark.parametrize(
    "broken",
    [
        b"\x3a",
        b"\x3a\x05abc",
        b"\x3a" + b"\xff" * 10,
        b"\x02a",
        b"\xf8\xff\xff\xff\xff\x0f\x01",
        b"\x0b\x0c",
        b"\x0d123",
        b"\x09" + b"1" * 7,
        b"\x08\x80",
    ],
)
def test_broken_large_messages_are_errors(broken: bytes) -> None:
    raw = sized(7, bytes(LARGE_BYTES)) + broken
    with pytest.raises(
        InferenceError, match=f"its {len(raw)} bytes are no valid inference.ModelInferRequest"
    ) as caught:
        read_infer(raw)
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("contents", "datatype"),
    [
        (sized(6, bytes(LARGE_BYTES + 1)), "FP32"),
        (sized(2, b"\xff" * (LARGE_BYTES + 9)), "INT32"),
        (sized(2, bytes(LARGE_BYTES)) + (tag(2, 0) + b"\xff" * 10), "INT32"),
        (sized(6, bytes(LARGE_BYTES)) + b"\x12", "FP32"),
        (sized(8, bytes(LARGE_BYTES)) + b"\x42\x02a", "BYTES"),
    ],
)
def test_broken_typed_contents_are_errors(contents: bytes, datatype: str) -> None:
    raw = of_contents(contents, datatype)
    with pytest.raises(InferenceError, match=r"no valid inference\.InferTensorContents message") as caught:
        decoded(raw)
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\x10\x01" * (MAX_FIELDS + 1), f"more than {MAX_FIELDS} fields"),
        (sized(5, b"\x30\x01" * (MAX_FIELDS + 1)), f"more than {MAX_FIELDS} fields"),
        (sized(3, b"i" * MAX_OTHER_BYTES), f"at most {MAX_OTHER_BYTES} are taken"),
    ],
)
def test_what_is_beside_the_tensors_data_is_bounded(raw: bytes, reason: str) -> None:
    with pytest.raises(InferenceError, match=reason) as caught:
        read_infer(raw)
    assert caught.value.code is ErrorCode.INVALID_ARG


STRINGS = [b"", b"a", b"b" * 127, b"c" * 128, b"d" * 40_000, b""]


@given(
    strings=st.lists(st.sampled_from(STRINGS), max_size=40),
    others=st.lists(st.sampled_from([tag(90, 0) + b"\5", sized(91, b"x"), sized(5, b"")]), max_size=3),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(30))
def test_strings_of_any_size_are_read_as_protobuf_reads_them(strings, others, order) -> None:  # type: ignore[no-untyped-def]
    fields = [*(sized(8, each) for each in strings), *others]
    order.shuffle(fields)
    raw = of_contents(sized(8, bytes(LARGE_BYTES)) + b"".join(fields), "BYTES", len(strings) + 1)
    found = ModelInferRequest.FromString(raw).inputs[0].contents.bytes_contents
    assert bytes(decoded(raw).inputs[0].data) == b"".join(struct.pack("<I", len(each)) + each for each in found)


@given(
    numbers=st.lists(st.sampled_from([0, 1, 127, 128, 2**31 - 1, -1]), max_size=60),
    sizes=st.lists(st.integers(0, 3), max_size=60),
    field=st.sampled_from(["int_contents", "fp32_contents"]),
)
@settings(max_examples=examples(30))
def test_numbers_in_any_packing_are_read_as_protobuf_reads_them(numbers, sizes, field) -> None:  # type: ignore[no-untyped-def]
    number, kind, datatype = {"int_contents": (2, 0, "INT32"), "fp32_contents": (6, 5, "FP32")}[field]

    def encoded(value: int) -> bytes:
        return struct.pack("<f", value) if kind else varint(value % 2**64)

    fields, at = [sized(number, b"".join(map(encoded, [1] * LARGE_BYTES)))], 0
    for size in sizes:
        # Of size 1 and 0: one element that is not packed, and an empty run or an unknown field.
        part = list(map(encoded, numbers[at : at + size]))
        fields.append(tag(number, kind) + part[0] if size == len(part) == 1 else sized(number, b"".join(part)))
        fields += [tag(90, 0) + b"\5"] * (size == 0)
        at += size
    raw = of_contents(b"".join(fields), datatype, LARGE_BYTES + min(at, len(numbers)))
    found = list(getattr(ModelInferRequest.FromString(raw).inputs[0].contents, field))
    assert np.frombuffer(decoded(raw).inputs[0].data, datatype.lower().replace("fp", "float")).tolist() == found


ONE_TOO_MANY = {
    "BYTES": (
        b"\x42\0",
        "unexpected number of string elements 1001 for inference input 'IN' for model 'm', expecting 1000",
    ),
    "INT64": (tag(3, 0) + b"\1", "input byte size mismatch for input 'IN' for model 'm'. Expected 8000, got more"),
    "FP64": (tag(7, 1) + bytes(8), "input byte size mismatch for input 'IN' for model 'm'. Expected 8000, got more"),
}


@pytest.mark.parametrize("datatype", ONE_TOO_MANY)
def test_more_elements_than_announced_are_refused_at_once(datatype: str) -> None:
    element, text = ONE_TOO_MANY[datatype]
    raw = of_contents(element * 2_000_000, datatype, 1000)
    held = 0
    with pytest.raises(InferenceError) as caught:  # noqa: PT012  # it counts until then
        for size in read_infer(raw).decode_steps():
            held += size
    assert caught.value == InferenceError(ErrorCode.INVALID_ARG, f"[request id: <id_unknown>] {text}")
    # Before the second piece of 2 to 16 MB.
    assert held < 1 << 20


@pytest.mark.parametrize(
    ("name", "shape", "datatype", "text"),
    [
        ("OTHER", [COUNT], "BYTES", "unexpected inference input 'OTHER' for model 'm'"),
        ("IN", [COUNT], "INT32", "inference input 'IN' data-type is 'INT32', but model 'm' expects 'BYTES'"),
        ("IN", [1, COUNT], "BYTES", "unexpected shape for input 'IN' for model 'm'. Expected [4,-1], got [1,70000]."),
    ],
)
def test_inputs_that_do_not_fit_the_model_are_not_decoded(
    name: str, shape: list[int], datatype: str, text: str
) -> None:
    checker = RequestChecker(ModelConfig(name="m", input=(ModelInput("IN", DataType.BYTES, dims=(4, -1)),)))
    message = ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
    tensor.contents.bytes_contents.extend([b""] * COUNT)
    assert error_of(next, read_infer(message.SerializeToString()).decode_steps(checker)).message.endswith(text)


def test_more_rows_than_the_model_takes_are_not_decoded() -> None:
    checker = RequestChecker(
        ModelConfig(name="m", max_batch_size=8, input=(ModelInput("IN", DataType.INT8, dims=(-1,)),))
    )
    raw = of_contents(sized(2, bytes(COUNT)), "INT8", COUNT)
    message = ModelInferRequest.FromString(raw)
    message.inputs[0].shape.append(1)
    with pytest.raises(InferenceError, match="batch-size must be <= 8 for 'm'"):
        next(read_infer(message.SerializeToString()).decode_steps(checker))


@pytest.mark.parametrize("field", [tag(90, 0) + b"\1", sized(2, b""), sized(2, b"\1"), sized(5, b"")])
def test_fields_that_are_no_elements_are_few(field: bytes) -> None:
    steps = 0
    with pytest.raises(InferenceError, match=f"more than {MAX_FIELDS} fields"):  # noqa: PT012  # it counts until then
        for _ in read_infer(of_contents(field * 1_000_000, "INT32", 2_000_000)).decode_steps():
            steps += 1
    # Others have their turn meanwhile.
    assert steps >= MAX_FIELDS // 1024


def test_elements_in_another_field_are_refused_at_once() -> None:
    raw = of_contents(b"\x42\0" * 1_000_000, "INT8")
    with pytest.raises(InferenceError, match="of type 'BYTES', expected datatype 'INT8'"):
        next(read_infer(raw).decode_steps())
