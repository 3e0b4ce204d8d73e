"""Frames that no correct worker sends: each becomes a value or a FrameError."""

import json
import math
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.backends.hosting import RESCHEDULED, Answer, BatchReply, Reply, Rescheduled
from halimede.channel.frames import FrameError
from halimede.channel.json_frames import decode_json, error_from_json, error_json
from halimede.core.types import (
    DataType,
    ErrorCode,
    InferenceError,
    InferenceRequest,
    Tensor,
)
from halimede.inference_frames.calls import decode_infer, encode_infer
from halimede.inference_frames.kinds import InferenceFrame
from halimede.workers.frames.answers import (
    Response,
    decode_done,
    decode_response,
    encode_done,
    encode_response,
)
from halimede.workers.frames.kinds import WorkerFrame
from support.frames import OUT, OUTPUTS, Shelf, body_of, decoded, done_frame, done_of, out

REPLIES_TO_BREAK: list[BatchReply] = [
    Answer([out(5), out(20_000, "n")], {"k": "v", "n": 1.5}),
    InferenceError(ErrorCode.UNAVAILABLE, "größer"),
    None,
    RESCHEDULED,
    Answer([Tensor("größe", DataType.BYTES, (1, 2), b"\1\0\0\0a\0\0\0\0")]),
]


CALL_TO_BREAK = InferenceRequest(
    "other", "3", "id", [out(5), out(20_000, "n"), Tensor("größe", DataType.BYTES, (1,), b"\1\0\0\0a")], ("a", "größe"),
    {"k": "v", "n": 1.5}, 1, 2, "seq", True, False,
)  # fmt: skip


def response_of(body: bytes, shelf: Shelf) -> Response:
    return decode_response(memoryview(body), OUTPUTS, shelf.locate)


def check_inside(reply: Reply, body: bytes, shelf: Shelf) -> None:
    assert reply is None or isinstance(reply, (Answer, InferenceError))
    if isinstance(reply, Answer):
        for tensor in reply.outputs:
            data = tensor.data
            assert tensor.name in OUTPUTS
            assert isinstance(tensor.datatype, DataType)
            whole = data.obj if isinstance(data, memoryview) else data
            assert whole is body or whole in shelf.blocks.values() or data in body or data in shelf.blocks.values()


def bodies() -> list[tuple[str, bytes, Shelf]]:
    found = []
    for placed in (False, True):
        shelf = Shelf(placed)
        done = encode_done(1, list(REPLIES_TO_BREAK), True, (1, 2, 3), OUT, shelf.store, lambda: (9, [(1, 64), (2, 0)]))
        found.append(("done", bytes(body_of(done, WorkerFrame.DONE)), shelf))
        for reply in REPLIES_TO_BREAK:
            if isinstance(reply, Rescheduled):
                continue
            response = encode_response(3, reply, False, (8, 9), OUT, shelf.store)
            found.append(("response", bytes(body_of(response, WorkerFrame.RESPONSE)), shelf))
        infer = encode_infer(7, 1, CALL_TO_BREAK, shelf.store, lambda: 5)
        found.append(("infer", bytes(body_of(infer, InferenceFrame.INFER)), shelf))
    return found


def test_a_response_cannot_ask_for_another_execution() -> None:
    done = bytes(body_of(done_frame([RESCHEDULED]), WorkerFrame.DONE))
    assert list(done_of(done, Shelf(False)).again) == [0]
    # A reply is described by 8 bytes, at the same place in its frame's description.
    opened = bytes(body_of(encode_response(3, None, False, (8, 9), OUT, Shelf(False).store), WorkerFrame.RESPONSE))
    kind = struct.pack("<BBHI", 2, 0, 0, 0)
    assert opened.count(kind) == 1
    with pytest.raises(FrameError, match="RESPONSE: another execution"):
        response_of(opened.replace(kind, struct.pack("<BBHI", 3, 0, 0, 0)), Shelf(False))


@pytest.mark.parametrize("kind", [1, 2, 3], ids=["error", "open", "again"])
def test_only_an_answer_has_outputs(kind: int) -> None:
    """The description of the output, which has the size of three blocks, must not be taken for blocks."""
    answer = Answer([out(4)])
    done = bytes(body_of(done_frame([answer]), WorkerFrame.DONE))
    at = struct.calcsize("<IIH")
    assert list(done_of(done, Shelf(False)).replies) == [answer]
    with pytest.raises(FrameError, match=f"a reply of kind {kind} with 1 outputs"):
        done_of(done[:at] + bytes([kind]) + done[at + 1 :], Shelf(False))


def check_broken(what: str, body: bytes, shelf: Shelf) -> None:
    try:
        if what == "infer":
            check_call(decode_infer(memoryview(body), shelf.locate).request, body, shelf)
            return
        replies = done_of(body, shelf).replies if what == "done" else [response_of(body, shelf).reply]
    except FrameError:
        return
    for reply in replies:
        check_inside(reply, body, shelf)


def check_call(call: InferenceRequest, body: bytes, shelf: Shelf) -> None:
    f"{call.model_name}{call.model_version}{call.id}{call.sequence_id}{call.outputs}{call.parameters}".encode()
    for tensor in call.inputs:
        data = tensor.data
        tensor.name.encode()
        whole = data.obj if isinstance(data, memoryview) else data
        assert whole is body or whole in shelf.blocks.values() or data in body or data in shelf.blocks.values()


@pytest.mark.parametrize(("what", "body", "shelf"), bodies())
def test_a_truncated_frame_is_a_value_or_a_frame_error(what: str, body: bytes, shelf: Shelf):
    ends = {*range(min(len(body), 600)), *range(600, len(body), 997)}
    for end in sorted(ends):
        check_broken(what, body[:end], shelf)


@pytest.mark.parametrize(("what", "body", "shelf"), bodies())
def test_a_frame_with_one_wrong_byte_is_a_value_or_a_frame_error(what: str, body: bytes, shelf: Shelf):
    for at in range(min(len(body), 420)):
        for value in {0, 1, 2, 0x7F, 0x80, 0xFF, body[at] ^ 1, body[at] ^ 0x80, (body[at] + 1) & 0xFF} - {body[at]}:
            check_broken(what, body[:at] + bytes([value]) + body[at + 1 :], shelf)


@given(st.sampled_from(bodies()), st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=9)), max_size=4))
@settings(max_examples=500, deadline=None)
def test_a_frame_with_many_changes_is_a_value_or_a_frame_error(
    case: tuple[str, bytes, Shelf], changes: list[tuple[int, bytes]]
):
    what, body, shelf = case
    for at, patch in changes:
        body = body[:at] + patch + body[at + len(patch) :]
    check_broken(what, body, shelf)


HUGE = 0xFFFFFFFF


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<IIH", HUGE, 1, 0xFFFF),
        struct.pack("<IIH", 10, 1, 0xFFFF) + struct.pack("<BBHI", 0, 0, 0xFFFF, 0) * 3,
        struct.pack("<IIH", 10, 1, 1) + struct.pack("<BBHI", 1, 0, 0, HUGE),
        struct.pack("<IIH", 10, 1, 1) + struct.pack("<BBHI", 0, 0, 0, HUGE),
        struct.pack("<IIH", 30, 1, 1) + struct.pack("<BBHI", 0, 0, 1, 0) + struct.pack("<HBBHQQ", 0, 2, 255, 0, 0, 1),
        struct.pack("<IIH", 30, 1, 1)
        + struct.pack("<BBHI", 0, 0, 1, 0)
        # Past all memory, and past 2^64 together.
        + struct.pack("<HBBHQQ", 0, 2, 0, 0, 2**64 - 1, 2**64 - 1),
        struct.pack("<IIH", 30, 1, 1)
        + struct.pack("<BBHI", 0, 0, 1, 0)
        + struct.pack("<HBBHQQ", 0, 2, 0, 9, 0, 1 << 62),
        struct.pack("<IIH", 1 << 24, 1, 0) + struct.pack("<B3QQ", 0, 0, 0, 0, 0) + bytes(1 << 24),
    ],
    ids=["length", "outputs", "error", "parameters", "dimensions", "in the frame", "in a segment", "blocks"],
)
def test_huge_numbers_are_refused_without_taking_memory(body: bytes):
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode_done(memoryview(body), OUTPUTS, Shelf(False).locate)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 1 << 20


TENSOR = struct.Struct("<HBBHQQ")


def infer_body(form: bytes = b"", own: bytes = b"", **fields: int) -> bytes:
    """An INFER frame's body with these numbers in the description of its form, before `form`, and `own` after it."""
    order = ("timeout", "priority", "wants_one", "outputs", "inputs")
    described = struct.pack("<QQBHH", *(fields.pop(name, 0) for name in order)) + (form or bytes(4))
    lengths = fields.pop("length", len(described)), fields.pop("own_length", len(own))
    return struct.pack("<IIIIQ", *lengths, 1, 1, 0) + described + own


def own(rest: bytes, **fields: int) -> bytes:
    """What only one request has."""
    order = ("flags", "sequence", "text", "id", "parameters")
    return struct.pack("<BQIII", *(fields.pop(name, HUGE if name == "text" else 0) for name in order)) + rest


def test_a_call_without_inputs_is_read():
    call = decode_infer(memoryview(infer_body(own=own(b"{}", flags=1, parameters=2))), Shelf(False).locate).request

    assert call == InferenceRequest("", sequence_start=True)


@pytest.mark.parametrize(
    "body",
    [
        infer_body(length=HUGE),
        infer_body(own_length=HUGE),
        infer_body(inputs=0xFFFF),
        infer_body(outputs=0xFFFF),
        infer_body(bytes(4 + 2 * 4097), outputs=4097),
        infer_body(bytes(4) + TENSOR.pack(0, 2, 0, 0, 0, 0) * 4097, inputs=4097),
        infer_body(b"\xff\xff" + bytes(2)),
        infer_body(b"\1\0\xff" + bytes(2)),
        infer_body(bytes(4) + TENSOR.pack(0, 2, 255, 0, 0, 1), inputs=1),
        infer_body(bytes(4) + TENSOR.pack(0xFFFF, 2, 0, 0, 0, 1), inputs=1),
        infer_body(bytes(4) + TENSOR.pack(0, 0, 0, 0, 0, 0), inputs=1),
        infer_body(bytes(4) + TENSOR.pack(0, 2, 1, 0, 0, 0) + struct.pack("<q", 1 << 62), inputs=1),
        infer_body(own=own(b"", id=HUGE)),
        infer_body(own=own(b"", id=1)),
        infer_body(own=own(b"", parameters=HUGE)),
        infer_body(own=own(b"", text=HUGE - 1)),
        infer_body(own=own(b"\xff", id=1)),
        infer_body(own=own(b"[]", parameters=2)),
        infer_body(bytes(4) + TENSOR.pack(0, 2, 0, 0, 0, 0), own(bytes(17), flags=4), inputs=1),
        *(
            infer_body(bytes(4) + TENSOR.pack(0, 2, 0, 0, 0, 0), own(struct.pack("<HQQ", *location), flags=4), inputs=1)
            for location in [(0, 2**64 - 1, 2**64 - 1), (9, 0, 1 << 62)]
        ),
    ],
)
def test_calls_with_wrong_or_huge_numbers_are_refused_without_taking_memory(body: bytes):
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode_infer(memoryview(body), Shelf(False).locate)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 1 << 20


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"nul", b"1" * 5_000, b'"\\u12"',
        b"[" + b"{}," * 5_000_000 + b"{}]", b"[" + b"0," * 5_000_000 + b"0]",
    ],
    ids=["nothing", "half", "no text", "deep", "deep objects", "no word", "digits", "no escape", "objects", "numbers"],
)  # fmt: skip
def test_invalid_or_huge_json_is_a_frame_error(text: bytes):
    with pytest.raises(FrameError):
        decode_json(text)


def test_json_of_one_long_text_is_read():
    assert decode_json(json.dumps({"file": "A" * 8_000_000}).encode())["file"][-1] == "A"


@pytest.mark.parametrize("value", [None, 1, [], {}, {"code": "NO_SUCH", "message": "m"}, {"code": [], "message": 1}])
def test_json_that_is_not_an_error_object_is_a_frame_error(value: Any):
    with pytest.raises(FrameError):
        error_from_json(value)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_code_is_sent_and_received(code: ErrorCode):
    error = InferenceError(code, "größer")
    assert error_from_json(json.loads(json.dumps(error_json(error)))) == error
    assert decoded(done_frame([error])).replies == [error]


PARAMETER_TEXTS = [
    b"[]",
    b"1",
    b'{"a":null}',
    b'{"a":[1]}',
    b'{"a":{}}',
    b'{"a":"\\ud800"}',
    b'{"\\ud800":1}',
    b'{"a":',
]


@pytest.mark.parametrize("text", PARAMETER_TEXTS)
def test_parameters_of_unsupported_types_are_a_frame_error(text: bytes):
    reply = struct.pack("<BBHI", 0, 0, 0, len(text)) + text
    tail = struct.pack("<B3QQ", 0, 0, 0, 0, 0)
    body = struct.pack("<IIH", len(reply) + len(tail), 1, 1) + reply + tail

    with pytest.raises(FrameError):
        decode_done(memoryview(body + bytes(16)), OUTPUTS, Shelf(False).locate)


def test_unencodable_parameters_are_replaced_or_an_error():
    replies: list[Reply] = [Answer([], {"a\ud800": "\udfff", "✓": "ü"}), Answer([], {"a": 10**5_000})]

    [replaced, error] = decoded(done_frame(replies)).replies

    assert replaced == Answer([], {"a?": "?", "✓": "ü"})
    assert isinstance(error, InferenceError)
    assert "digits" in error.message


def test_nan_and_infinity_are_sent_in_parameters():
    [reply] = decoded(done_frame([Answer([], {"a": math.inf, "b": math.nan})])).replies
    assert isinstance(reply, Answer)
    assert reply.parameters["a"] == math.inf
    assert math.isnan(float(reply.parameters["b"]))
