"""Requests that repeat are read by templates, with the results of protobuf."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.wire.grpc_reader import InferReader
from halimede.core.wire.grpc_request import InferCall, read_infer
from halimede.core.wire.protocol import ModelInferRequest, ProtoMessage

TEXT = st.text(max_size=4)


def message(model, version, id_, inputs, outputs, raws) -> ProtoMessage:  # type: ignore[no-untyped-def]
    made = ModelInferRequest(model_name=model, model_version=version, id=id_, raw_input_contents=raws)
    for name, datatype, shape in inputs:
        made.inputs.add(name=name, datatype=datatype, shape=shape)
    for name in outputs:
        made.outputs.add(name=name)
    return made


MESSAGES = st.builds(
    message,
    st.sampled_from(["m", "other", ""]),
    st.sampled_from(["", "1"]),
    st.one_of(TEXT, st.sampled_from(["x" * 127, "x" * 128])),
    st.lists(st.tuples(TEXT, st.sampled_from(["FP32", "BYTES", "odd"]), st.lists(st.integers(-1, 300))), max_size=3),
    st.lists(TEXT, max_size=2),
    st.lists(st.binary(max_size=3), max_size=3),
)


def usual(id_: str = "", data: bytes = bytes(8)) -> bytes:
    made = message("m", "", id_, [("IN", "FP32", [2])], ["OUT"], [data])
    return bytes(made.SerializeToString())


def known(reader: InferReader) -> int:
    return sum(map(len, reader.templates.values()))


def outcome(read, raw: bytes) -> InferCall | tuple[ErrorCode, str]:  # type: ignore[no-untyped-def]
    try:
        return read(raw).decode()
    except InferenceError as error:
        return error.code, error.message


def test_a_request_that_repeats_is_read_by_a_template_whatever_its_id_and_data() -> None:
    reader = InferReader()
    reader.read(usual("a"))
    assert known(reader) == 0
    reader.read(usual("b"))
    assert known(reader) == 1
    for request_id, data in (("", b"12345678"), ("a longer id", bytes(8)), ("é", bytes(8)), ("x" * 200, bytes(8))):
        raw = usual(request_id, data)
        found = reader.read(raw)
        assert (found.model_name, found.model_version, found.id, found.in_steps) == ("m", "", request_id, False)
        assert found.decode() == read_infer(raw).decode()
    assert known(reader) == 1


def test_requests_with_a_priority_become_templates_with_it() -> None:
    reader = InferReader()
    for data in (b"1234", b"5678", b"abcd"):
        made = message("m", "", "", [("IN", "FP32", [1])], [], [data])
        made.parameters["priority"].int64_param = 2
        raw = made.SerializeToString()
        call = reader.read(raw).decode()
        assert call == read_infer(raw).decode()
        assert call.request.form.priority == 2
    assert known(reader) == 1


def test_requests_of_perf_analyzer_become_templates() -> None:
    reader = InferReader()
    for data in (b"1234", b"5678", b"abcd"):
        made = message("m", "", "", [("IN", "FP32", [1])], [], [data])
        made.parameters["triton_enable_empty_final_response"].bool_param = True
        raw = made.SerializeToString()
        call = reader.read(raw).decode()
        assert call == read_infer(raw).decode()
        assert call.wants_empty_final
    assert known(reader) == 1


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.data())
def test_all_messages_are_read_as_protobuf_reads_them(messages: list[ProtoMessage], data: st.DataObject) -> None:
    reader = InferReader()
    for made in messages * 3:
        raw = made.SerializeToString()
        assert outcome(reader.read, raw) == outcome(read_infer, raw)
    raw = bytearray(data.draw(st.sampled_from(messages)).SerializeToString())
    if raw:
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for broken in (bytes(raw), cut, bytes(raw) + b"\x1a\x01i", bytes(raw) + b"\x3a\x00"):
        assert outcome(reader.read, broken) == outcome(read_infer, broken)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.parameters["sequence_id"].MergeFrom(type(made.parameters["sequence_id"])(int64_param=1)),
        lambda made: made.parameters["own"].MergeFrom(type(made.parameters["own"])(int64_param=1)),
        lambda made: made.inputs[0].contents.fp32_contents.append(1.0),
        lambda made: made.raw_input_contents.append(b""),
        lambda made: setattr(made.inputs[0], "datatype", "FP33"),
        lambda made: made.ClearField("raw_input_contents"),
    ],
)
def test_other_messages_become_no_templates(change) -> None:  # type: ignore[no-untyped-def]
    made = ModelInferRequest.FromString(usual())
    change(made)
    raw = made.SerializeToString()
    reader = InferReader()
    for _ in range(3):
        assert outcome(reader.read, raw) == outcome(read_infer, raw)
    assert known(reader) == 0


def test_fields_in_another_order_or_repeated_become_no_templates() -> None:
    reader = InferReader()
    raw = usual()
    for other in (raw + b"\x1a\x01i", raw + b"\x0a\x01n", raw[3:] + raw[:3], b"\x0a\x01m" + raw):
        for _ in range(3):
            assert outcome(reader.read, other) == outcome(read_infer, other)
    assert known(reader) == 0


def test_templates_are_bounded() -> None:
    reader = InferReader()
    for number in range(3000):
        raw = message(f"m{number}", "", "", [("IN", "FP32", [number])], [], [b"1234"]).SerializeToString()
        reader.read(raw)
        reader.read(raw)
    assert known(reader) <= 1024
    for number in range(100):
        raw = message("m", "", "", [("IN", "FP32", [number])], [], [bytes(number)]).SerializeToString()
        reader.read(raw)
        reader.read(raw)
    assert max(map(len, reader.templates.values())) <= 8
    long = message("long", "", "", [("I" * 5000, "FP32", [1])], [], [b"1234"]).SerializeToString()
    reader.read(long)
    reader.read(long)
    assert known(reader) <= 1024
    assert not any(b"long" in key for key in reader.templates)
