"""The codec of the channel: what goes in comes out, and what no worker of ours says is refused in one way."""

import ast
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halimede.workers
from halimede.backends.hosting import Answer, Reply
from halimede.core.types import (
    Buffer,
    DataType,
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    Tensor,
)
from halimede.workers.frames.answers import (
    Done,
    Response,
    batch_of,
    decode_done,
    decode_response,
    encode_done,
    encode_response,
)
from halimede.workers.frames.batches import decode_execute, encode_execute
from halimede.workers.frames.calls import decode_call_answer, decode_infer, encode_call_answer, encode_infer
from halimede.workers.frames.control import decode_json, error_from_json, error_json
from halimede.workers.frames.kinds import HEADER, MAX_ANSWER_BYTES, MAX_TEXT_BYTES, FrameError, Kind
from halimede.workers.frames.tensors import INLINE_BYTES
from halimede.workers.worker import BatchItem

SERVER = Path(halimede.workers.__file__).parents[2]
INPUTS = ("in", "zweiter ✓", *(f"x{at}" for at in range(300)))
OUTPUTS = ("out", "größe", "n")
IN = {name: at for at, name in enumerate(INPUTS)}
OUT = {name: at for at, name in enumerate(OUTPUTS)}
TYPES = [each for each in DataType if each is not DataType.INVALID]


class Shelf:
    """Shared memory, played: blocks by segment and offset."""

    def __init__(self, placed: bool) -> None:
        self._placed = placed
        self.blocks: dict[tuple[int, int], bytes] = {}

    def place(self, data: Buffer) -> tuple[int, int] | None:
        if not self._placed:
            return None
        block = 1 + len(self.blocks) % 3, 64 * len(self.blocks)
        self.blocks[block] = bytes(data)
        return block

    def locate(self, segment: int, offset: int, size: int) -> memoryview:
        data = self.blocks.get((segment, offset))
        if data is None or len(data) != size:
            raise ValueError(f"{size} bytes at {offset} of {segment}")
        return memoryview(data)


def body_of(frame: Buffer, kind: Kind) -> memoryview:
    length, number = HEADER.unpack_from(frame)
    assert (length, number) == (len(frame) - HEADER.size, kind)
    return memoryview(bytes(frame))[HEADER.size :]


def plain(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(t.name, t.datatype, t.shape, bytes(t.data)) for t in tensors]


def text(**how: Any) -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8"), **how)


SIZES = st.sampled_from([0, 1, 4, 7, 16, 100, INLINE_BYTES, INLINE_BYTES + 1, 3 * INLINE_BYTES])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**63 - 1, -(2**63)]), max_size=5) | st.just([1] * 64)
PARAMETERS = st.dictionaries(
    text(max_size=5),
    st.booleans() | st.integers() | st.floats(allow_nan=False) | text(max_size=9),
    max_size=3,
)


def tensors(names: Sequence[str], most: int = 4) -> st.SearchStrategy[list[Tensor]]:
    def made(name: str, datatype: DataType, shape: list[int], size: int, filling: int) -> Tensor:
        return Tensor(name, datatype, tuple(shape), bytes([filling]) * size)

    one = st.builds(made, st.sampled_from(names), st.sampled_from(TYPES), SHAPES, SIZES, st.integers(0, 255))
    return st.lists(one, max_size=most, unique_by=lambda tensor: tensor.name)


REQUESTS = st.builds(
    InferenceRequest,
    st.just("m"),
    id=text(max_size=20),
    inputs=tensors(INPUTS),
    outputs=st.lists(st.sampled_from(OUTPUTS), max_size=3, unique=True).map(tuple),
    parameters=PARAMETERS,
    timeout_us=st.integers(0, 2**64 - 1),
    sequence_id=st.integers(0, 2**64 - 1) | text(max_size=9).map(lambda name: name or 0),
    sequence_start=st.booleans(),
    sequence_end=st.booleans(),
)
ITEMS = st.builds(BatchItem, st.integers(0, 2**64 - 1), REQUESTS, st.integers(0, 2**32 - 1), st.just(False))
ERRORS = st.builds(InferenceError, st.sampled_from(list(ErrorCode)), text(max_size=50))
REPLIES = st.one_of(st.builds(Answer, tensors(OUTPUTS), PARAMETERS), ERRORS, st.none())
U64 = st.integers(0, 2**64 - 1)
PLACED = st.booleans()


@given(st.lists(ITEMS, max_size=4), st.integers(0, 2**32 - 1), PLACED)
@settings(max_examples=150, deadline=None)
def test_a_batch_arrives_as_it_was_sent(items: list[BatchItem], batch: int, placed: bool):
    shelf = Shelf(placed)
    frame = encode_execute(batch, items, IN, OUT, shelf.place)

    got = decode_execute(body_of(frame, Kind.EXECUTE), INPUTS, OUTPUTS, "m", shelf.locate)

    assert got.batch == batch
    assert len(got.items) == len(items)
    for item, sent in zip(got.items, items, strict=True):
        assert (item.key, item.rows, item.cancelled) == (sent.key, sent.rows, False)
        assert plain(item.request.inputs) == plain(sent.request.inputs)
        item.request.inputs, sent.request.inputs = [], []
        if len(sent.request.outputs) == len(OUTPUTS):
            sent.request.outputs = ()  # all of them, which is what naming none means
        assert item.request == sent.request


def check_same(reply: Reply, sent: Reply) -> None:
    if isinstance(sent, Answer):
        assert isinstance(reply, Answer)
        assert plain(reply.outputs) == plain(sent.outputs)
        assert reply.parameters == sent.parameters
        assert [type(value) for value in reply.parameters.values()] == [type(v) for v in sent.parameters.values()]
    else:
        assert reply == sent


@given(st.lists(REPLIES, max_size=4), st.booleans(), st.tuples(U64, U64, U64), U64, PLACED)
@settings(max_examples=150, deadline=None)
def test_answers_arrive_as_they_were_sent(
    replies: list[Reply], failed: bool, times: tuple[int, int, int], wanted: int, placed: bool
):
    shelf = Shelf(placed)
    retained = [(at + 1, 64 * at) for at in range(len(replies))]
    sent = list(replies)
    frame = encode_done(7, replies, failed, times, OUT, shelf.place, lambda: (wanted, retained))
    assert replies == [], "what lies in shared memory is not held any more"

    done = decode_done(body_of(frame, Kind.DONE), OUTPUTS, shelf.locate)

    assert batch_of(body_of(frame, Kind.DONE)) == (7, len(sent))
    assert (done.batch, done.failed, done.times, done.wanted_bytes) == (7, failed, times, wanted)
    assert done.retained == retained
    for reply, original in zip(done.replies, sent, strict=True):
        check_same(reply, original)


@given(U64, REPLIES, st.booleans(), st.tuples(U64, U64), PLACED)
@settings(max_examples=100, deadline=None)
def test_a_response_arrives_as_it_was_sent(key: int, reply: Reply, final: bool, times: tuple[int, int], placed: bool):
    shelf = Shelf(placed)
    frame = encode_response(key, reply, final, times, OUT, shelf.place)

    response = decode_response(body_of(frame, Kind.RESPONSE), OUTPUTS, shelf.locate)

    assert (response.key, response.final, response.times) == (key, final, times)
    check_same(response.reply, reply)


NAMES = text(max_size=9)
CALLS = st.builds(
    InferenceRequest,
    NAMES,
    text(max_size=9),
    id=text(max_size=20),
    inputs=tensors(["in", "größe ✓", "", "x" * 300]),
    outputs=st.lists(NAMES, max_size=3).map(tuple),
    parameters=PARAMETERS,
    priority=U64,
    timeout_us=U64,
    sequence_id=U64 | text(max_size=9).map(lambda name: name or 0),
    sequence_start=st.booleans(),
    sequence_end=st.booleans(),
    wants_one=st.booleans(),
)
CALL_ANSWERS = st.builds(
    InferenceResponse,
    NAMES,
    text(max_size=9),
    text(max_size=20),
    tensors(["out", "größe ✓", "", "x" * 300]),
    PARAMETERS,
    st.none(),
    st.booleans(),
) | st.builds(InferenceResponse, NAMES, NAMES, NAMES, error=ERRORS, final=st.booleans())
U32 = st.integers(1, 2**32 - 1)


@given(U32, U32, CALLS, U64, PLACED)
@settings(max_examples=150, deadline=None)
def test_a_call_arrives_as_it_was_made(number: int, batch: int, call: InferenceRequest, wanted: int, placed: bool):
    shelf = Shelf(placed)
    frame = encode_infer(number, batch, call, shelf.place, lambda: wanted)

    got = decode_infer(body_of(frame, Kind.INFER), shelf.locate)

    assert (got.number, got.batch, got.wanted_bytes) == (number, batch, wanted)
    assert plain(got.request.inputs) == plain(call.inputs)
    assert {k: type(v) for k, v in got.request.parameters.items()} == {k: type(v) for k, v in call.parameters.items()}
    got.request.inputs, call.inputs = [], []
    assert got.request == call


@given(U32, CALL_ANSWERS, PLACED)
@settings(max_examples=150, deadline=None)
def test_an_answer_to_a_call_arrives_as_it_was_given(number: int, answer: InferenceResponse, placed: bool):
    shelf = Shelf(placed)
    frame = encode_call_answer(number, answer, shelf.place)
    body = body_of(frame, Kind.CALL_ANSWER)

    call, got = decode_call_answer(body, shelf.locate)

    assert call == number
    assert plain(got.outputs) == plain(answer.outputs)
    got.outputs, answer.outputs = [], []
    assert got == answer


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model_name": "m" * 70_000}, "a name of 70000 bytes"),
        ({"id": "i" * 70_000}, "a text of 70000 bytes, at most 65536 are allowed"),
        ({"sequence_id": "i" * 70_000}, "a text of 70000 bytes"),
        ({"sequence_id": -1}, "argument out of range|int too large|format requires"),
        ({"priority": 2**64}, "argument out of range|int too large|format requires"),
        ({"timeout_us": -1}, "argument out of range|int too large|format requires"),
        ({"outputs": ("y",) * 5_000}, "at most 4096 inputs and as many outputs are allowed"),
        ({"parameters": {"k": "x" * 70_000}}, "the request's parameters take 70009 bytes, at most 65536 are allowed"),
        ({"inputs": [Tensor("x", DataType.INT8, (1,) * 256, b"a")]}, "ubyte format requires"),
        (
            {"inputs": [Tensor("x", DataType.INT8, (2**63,), b"a")]},
            "argument out of range|int too large|format requires",
        ),
        ({"inputs": [Tensor("x", DataType.INVALID, (1,), b"a")]}, "input 'x' has no datatype"),
    ],
)
def test_a_call_that_no_frame_can_carry_is_refused(fields: dict[str, Any], error: str):
    call = InferenceRequest(**{"model_name": "m", **fields})

    with pytest.raises((ValueError, struct.error), match=error):
        encode_infer(1, 0, call, Shelf(False).place, lambda: 0)


def test_half_a_character_in_a_call_is_replaced():
    call = InferenceRequest("m\ud800", id="\udfff", outputs=("y\ud800",), parameters={"k\ud800": "v"})
    frame = encode_infer(1, 0, call, Shelf(False).place, lambda: 0)

    got = decode_infer(body_of(frame, Kind.INFER), Shelf(False).locate).request

    assert (got.model_name, got.id, got.outputs, got.parameters) == ("m?", "?", ("y?",), {"k?": "v"})


def request(**fields: Any) -> BatchItem:
    return BatchItem(1, InferenceRequest("m", **fields), 1, False)


@pytest.mark.parametrize(
    "item",
    [
        request(id="i" * 100_000),
        request(sequence_id="s" * 65_535),
        request(sequence_id="s" * 100_000),
        request(inputs=[Tensor(name, DataType.INT8, (1,), b"a") for name in INPUTS]),
        request(inputs=[Tensor("in", DataType.INT8, (1,) * 200, b"a")]),
        request(outputs=tuple(OUTPUTS) * 10_000),
        request(parameters={str(at): "x" * 100 for at in range(1_000)}),
    ],
    ids=["id", "sequence", "longer sequence", "inputs", "dimensions", "outputs", "parameters"],
)
def test_what_a_client_may_make_long_does_not_break_the_channel(item: BatchItem):
    frame = encode_execute(1, [item], IN, OUT, Shelf(False).place)

    got = decode_execute(body_of(frame, Kind.EXECUTE), INPUTS, OUTPUTS, "m", Shelf(False).locate)

    assert [each.request for each in got.items] == [item.request]


def test_half_a_character_of_a_client_is_replaced():
    item = request(id="a\ud800b", sequence_id="\udfff", parameters={"k\ud800": "v"})
    frame = encode_execute(1, [item], IN, OUT, Shelf(False).place)

    got = decode_execute(body_of(frame, Kind.EXECUTE), INPUTS, OUTPUTS, "m", Shelf(False).locate)

    assert got.items[0].request.id == "a?b"
    assert got.items[0].request.sequence_id == "?"


def done_frame(replies: list[Reply], shelf: Shelf | None = None) -> Buffer:
    shelf = shelf or Shelf(False)
    return encode_done(1, replies, False, (1, 2, 3), OUT, shelf.place, lambda: (0, ()))


def decoded(frame: Buffer, shelf: Shelf | None = None) -> Done:
    return decode_done(body_of(frame, Kind.DONE), OUTPUTS, (shelf or Shelf(False)).locate)


def out(size: int = 4, name: str = "out") -> Tensor:
    return Tensor(name, DataType.INT8, (size,), bytes(size))


def test_tensors_in_a_frame_are_aligned():
    tensors = [out(size, name) for size, name in zip((1, 17, 33), OUTPUTS, strict=True)]
    frame = done_frame([Answer(tensors), Answer(tensors, {"a": 1})])
    body = body_of(frame, Kind.DONE)
    whole = body.obj
    assert isinstance(whole, bytes)
    marked = bytearray(len(frame))

    for reply in decoded(frame).replies:
        assert isinstance(reply, Answer)
        for tensor in reply.outputs:
            at = _address(tensor.data) - _address(decoded_base(tensor.data))
            assert at % 16 == 0
            assert marked[at : at + len(tensor.data)] == bytes(len(tensor.data)), "tensors overlap"
            marked[at : at + len(tensor.data)] = b"\1" * len(tensor.data)


def _address(data: Any) -> int:
    import numpy as np

    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def decoded_base(data: Any) -> bytes:
    whole = memoryview(data).obj
    assert isinstance(whole, bytes)
    return whole


def test_an_output_that_the_configuration_lacks_is_left_out():
    [reply] = decoded(done_frame([Answer([out(), out(4, "unknown")])])).replies
    assert isinstance(reply, Answer)
    assert [each.name for each in reply.outputs] == ["out"]


def test_an_output_that_was_sent_twice_stays_the_answers_fault():
    [reply] = decoded(done_frame([Answer([out()] * 1_000)])).replies
    assert isinstance(reply, Answer)
    assert [each.name for each in reply.outputs] == ["out"] * (len(OUTPUTS) + 1)


def test_long_errors_are_cut_and_too_large_answers_are_errors():
    class Endless(bytes):
        def __len__(self) -> int:
            return MAX_ANSWER_BYTES + 1

    replies: list[Reply] = [
        InferenceError(ErrorCode.INTERNAL, "x" * 1_000_000),
        Answer([], {"k": "x" * 1_000_000}),
        Answer([Tensor("out", DataType.INT8, (1,), Endless())]),
    ]

    got = decoded(done_frame(replies)).replies

    assert got == [
        InferenceError(ErrorCode.INTERNAL, "x" * MAX_TEXT_BYTES),
        InferenceError(ErrorCode.INTERNAL, "the response's parameters take 1000009 bytes, at most 65536 are allowed"),
        InferenceError(
            ErrorCode.INTERNAL, f"the batch's outputs take {(1 << 30) + 1} bytes, at most {1 << 30} are allowed"
        ),
    ]


# ---- what is remembered of descriptions

CALL_SAID_BEFORE = InferenceRequest("m", inputs=[out(40)], outputs=("out",), parameters={"k": 1})


def calls_read(call: InferenceRequest) -> list[InferenceRequest]:
    """The same one, from two frames."""
    sent = [encode_infer(number, 0, call, Shelf(False).place, lambda: 0) for number in (1, 2)]
    return [decode_infer(body_of(frame, Kind.INFER), Shelf(False).locate).request for frame in sent]


def test_what_is_made_of_one_description_belongs_to_one_frame():
    first, second = calls_read(CALL_SAID_BEFORE)
    first.parameters["k"] = 2
    first.inputs[0].shape = (1,)
    assert (second.parameters, second.inputs[0].shape) == ({"k": 1}, (40,))

    [[answer], [other]] = [decoded(done_frame([Answer([out()], {"k": 1})])).replies for _ in range(2)]
    assert isinstance(answer, Answer)
    assert isinstance(other, Answer)
    assert answer.parameters is not other.parameters
    [[error], [later]] = [decoded(done_frame([InferenceError(ErrorCode.INTERNAL, "no")])).replies for _ in range(2)]
    assert error is not later


def test_a_description_that_was_read_before_is_held_against_each_frame():
    frame = bytes(encode_infer(1, 0, CALL_SAID_BEFORE, Shelf(False).place, lambda: 0))
    whole = body_of(frame, Kind.INFER)
    decode_infer(whole, Shelf(False).locate)
    done = body_of(done_frame([Answer([out(40)])]), Kind.DONE)
    done_of(bytes(done), Shelf(False))

    with pytest.raises(FrameError, match="a tensor that ends at byte"):
        decode_infer(whole[:-20], Shelf(False).locate)
    with pytest.raises(FrameError, match="a tensor that ends at byte"):
        done_of(bytes(done[:-20]), Shelf(False))


def test_a_description_in_shared_memory_is_looked_up_each_time():
    shelf = Shelf(True)
    frame = encode_infer(1, 0, InferenceRequest("m", inputs=[out(INLINE_BYTES + 1)]), shelf.place, lambda: 0)
    decode_infer(body_of(frame, Kind.INFER), shelf.locate)
    shelf.blocks.clear()

    with pytest.raises(FrameError, match="bytes at 0 of 1"):
        decode_infer(body_of(frame, Kind.INFER), shelf.locate)


def test_long_descriptions_and_texts_are_not_remembered():
    def cross(number: int) -> None:
        text = f"{number:060000}"
        calls_read(InferenceRequest("m", id=text, parameters={"k": text[:50_000]}))
        decoded(done_frame([InferenceError(ErrorCode.INTERNAL, text)]))
        answer = encode_call_answer(
            1, InferenceResponse("m", "1", text, error=InferenceError(ErrorCode.INTERNAL, text)), Shelf(False).place
        )
        decode_call_answer(body_of(answer, Kind.CALL_ANSWER), Shelf(False).locate)

    cross(0)
    tracemalloc.start()
    try:
        for number in range(1, 200):
            cross(number)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < 1 << 20


# ---- what no worker of ours sends

REPLIES_TO_BREAK: list[Reply] = [
    Answer([out(5), out(20_000, "n")], {"k": "v", "n": 1.5}),
    InferenceError(ErrorCode.UNAVAILABLE, "größer"),
    None,
    Answer([Tensor("größe", DataType.BYTES, (1, 2), b"\1\0\0\0a\0\0\0\0")]),
]


CALL_TO_BREAK = InferenceRequest(
    "other", "3", "id", [out(5), out(20_000, "n"), Tensor("größe", DataType.BYTES, (1,), b"\1\0\0\0a")], ("a", "größe"),
    {"k": "v", "n": 1.5}, 1, 2, "seq", True, False,
)  # fmt: skip


def done_of(body: bytes, shelf: Shelf) -> Done:
    return decode_done(memoryview(body), OUTPUTS, shelf.locate)


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
        done = encode_done(1, list(REPLIES_TO_BREAK), True, (1, 2, 3), OUT, shelf.place, lambda: (9, [(1, 64), (2, 0)]))
        found.append(("done", bytes(body_of(done, Kind.DONE)), shelf))
        for reply in REPLIES_TO_BREAK:
            response = encode_response(3, reply, False, (8, 9), OUT, shelf.place)
            found.append(("response", bytes(body_of(response, Kind.RESPONSE)), shelf))
        infer = encode_infer(7, 1, CALL_TO_BREAK, shelf.place, lambda: 5)
        found.append(("infer", bytes(body_of(infer, Kind.INFER)), shelf))
    return found


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
def test_wilder_changes_are_a_value_or_a_frame_error(case: tuple[str, bytes, Shelf], changes: list[tuple[int, bytes]]):
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


def infer_body(described: bytes = b"", length: int | None = None, **fields: int) -> bytes:
    """An INFER frame's body with these numbers in it."""
    order = ("number", "batch", "wanted", "correlation", "timeout", "priority", "flags", "inputs", "outputs", "model",
             "version", "id", "parameters", "text")  # fmt: skip
    values = [fields.pop(name, HUGE if name == "text" else 0) for name in order]
    assert not fields
    return struct.pack("<IIIQQQQBHHHHIII", len(described) if length is None else length, *values) + described


@pytest.mark.parametrize(
    "body",
    [
        infer_body(length=HUGE),
        infer_body(inputs=0xFFFF),
        infer_body(outputs=0xFFFF),
        infer_body(inputs=4096),
        infer_body(outputs=4096),
        infer_body(model=0xFFFF),
        infer_body(id=HUGE),
        infer_body(parameters=HUGE),
        infer_body(text=HUGE - 1),
        infer_body(b"\xff", model=1),
        infer_body(b"[]", parameters=2),
        infer_body(struct.pack("<HBBHQQ", 0, 2, 255, 0, 0, 1), inputs=1),
        infer_body(struct.pack("<HBBHQQ", 0xFFFF, 2, 0, 0, 0, 1), inputs=1),
        infer_body(struct.pack("<HBBHQQ", 0, 0, 0, 0, 0, 0), inputs=1),
        infer_body(struct.pack("<HBBHQQ", 0, 2, 0, 0, 2**64 - 1, 2**64 - 1), inputs=1),
        infer_body(struct.pack("<HBBHQQ", 0, 2, 0, 9, 0, 1 << 62), inputs=1),
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
def test_json_that_is_none_or_a_bomb_is_a_frame_error(text: bytes):
    with pytest.raises(FrameError):
        decode_json(text)


def test_json_of_one_long_text_is_read():
    assert decode_json(json.dumps({"file": "A" * 8_000_000}).encode())["file"][-1] == "A"


@pytest.mark.parametrize("value", [None, 1, [], {}, {"code": "NO_SUCH", "message": "m"}, {"code": [], "message": 1}])
def test_json_that_is_no_error_is_a_frame_error(value: Any):
    with pytest.raises(FrameError):
        error_from_json(value)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_crosses(code: ErrorCode):
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
def test_parameters_that_no_protocol_can_say_are_a_frame_error(text: bytes):
    reply = struct.pack("<BBHI", 0, 0, 0, len(text)) + text
    tail = struct.pack("<B3QQ", 0, 0, 0, 0, 0)
    body = struct.pack("<IIH", len(reply) + len(tail), 1, 1) + reply + tail

    with pytest.raises(FrameError):
        decode_done(memoryview(body + bytes(16)), OUTPUTS, Shelf(False).locate)


def test_parameters_that_nobody_can_read_are_replaced_or_an_error():
    replies: list[Reply] = [Answer([], {"a\ud800": "\udfff", "✓": "ü"}), Answer([], {"a": 10**5_000})]

    [replaced, error] = decoded(done_frame(replies)).replies

    assert replaced == Answer([], {"a?": "?", "✓": "ü"})
    assert isinstance(error, InferenceError)
    assert "digits" in error.message


def test_numbers_that_are_none_cross_in_parameters():
    [reply] = decoded(done_frame([Answer([], {"a": math.inf, "b": math.nan})])).replies
    assert isinstance(reply, Answer)
    assert reply.parameters["a"] == math.inf
    assert math.isnan(float(reply.parameters["b"]))


# ---- the other interpreter

MODULES = [
    "halimede.workers.child.main",
    "halimede.workers.child.channel",
    "halimede.workers.child.calls",
    "halimede.workers.frames.batches",
    "halimede.workers.frames.answers",
    "halimede.workers.frames.calls",
    "halimede.workers.segments",
    "halimede.backends.python.runner",
]

IMPORTED = """
import sys

class Door:
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first not in sys.stdlib_module_names and first not in ("numpy", "halimede"):
            raise ImportError(f"{name}: only the standard library and numpy are there")

sys.meta_path.insert(0, Door())
for name in sys.argv[1:]:
    __import__(name)
print("\\n".join(sorted(name for name in sys.modules if name.partition(".")[0] == "halimede")))
"""


def imported() -> list[str]:
    """All of this package that a worker of a python model imports, nothing else but numpy being there."""
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTED, *MODULES], capture_output=True, text=True, timeout=60, cwd=SERVER, check=False,
        env={"PYTHONPATH": str(SERVER), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_a_python_models_worker_needs_numpy_alone_and_python_3_10():
    names = imported()

    assert set(MODULES) <= set(names)
    for name in names:
        path = SERVER.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        ast.parse(path.read_text(), str(path), feature_version=(3, 10))


OTHER_SIDE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from halimede.backends.hosting import Answer
from halimede.core.types import ErrorCode, InferenceError, Tensor
import halimede.workers.child.main, halimede.backends.python.runner
from halimede.workers.frames.answers import encode_done
from halimede.workers.frames.batches import decode_execute
from halimede.workers.frames.kinds import HEADER

data = sys.stdin.buffer.read()
body = memoryview(data)[HEADER.size:]
execute = decode_execute(body, ("in", "b"), ("out",), "m", None)
replies = []
for item in execute.items:
    request = item.request
    said = {"said": repr((item.key, item.rows, request.id, request.sequence_id, request.parameters, request.timeout_us))}
    replies.append(Answer([Tensor("out", t.datatype, t.shape, t.data) for t in request.inputs[:1]], said))
replies.append(InferenceError(ErrorCode.NOT_FOUND, "größer"))
replies.append(None)
done = encode_done(execute.batch, replies, True, (1, 2, 3), {"out": 0}, lambda data: None, lambda: (5, [(1, 64)]))
sys.stdout.buffer.write(done)
"""


def interpreter(version: str) -> str:
    """The program of another version that has numpy."""
    program = shutil.which(f"python{version}")
    code = f"import numpy, sys; assert '%s.%s' % sys.version_info[:2] == {version!r}"
    if (
        program is None
        or subprocess.run([program, "-c", code], capture_output=True, timeout=60, check=False).returncode
    ):
        pytest.skip(f"THE CODEC WAS NOT TRIED IN PYTHON {version}: there is no python{version} with numpy in PATH")
    return program


@pytest.mark.parametrize("version", [None, "3.10", "3.12", "3.13"])
def test_another_interpreter_reads_and_writes_the_same_frames(version: str | None):
    program = sys.executable if version is None else interpreter(version)
    items = [
        BatchItem(
            key,
            InferenceRequest(
                "m", id=f"ü{key}", inputs=[Tensor("in", datatype, (1, 2), bytes(range(2 * (datatype.itemsize or 4))))],
                parameters={"p": 1.5, "s": "✓"}, sequence_id="s" if key % 2 else key, timeout_us=key,
            ),
            key,
            False,
        )
        for key, datatype in enumerate(TYPES)
    ]  # fmt: skip
    frame = encode_execute(3, items, {"in": 0, "b": 1}, {"out": 0}, lambda _: None)

    ran = subprocess.run(
        [program, "-c", OTHER_SIDE, str(SERVER)], input=bytes(frame), capture_output=True, timeout=60, check=False
    )

    assert ran.returncode == 0, ran.stderr.decode()
    done = decode_done(body_of(ran.stdout, Kind.DONE), ("out",), Shelf(False).locate)
    assert (done.batch, done.failed, done.times, done.wanted_bytes) == (3, True, (1, 2, 3), 5)
    assert done.retained == [(1, 64)]
    for item, reply in zip(items, done.replies[:-2], strict=True):
        assert isinstance(reply, Answer)
        sent = item.request
        assert [t[1:] for t in plain(reply.outputs)] == [t[1:] for t in plain(sent.inputs)]
        said = repr((item.key, item.rows, sent.id, sent.sequence_id, sent.parameters, sent.timeout_us))
        assert reply.parameters == {"said": said}
    assert done.replies[-2:] == [InferenceError(ErrorCode.NOT_FOUND, "größer"), None]


OTHER_CALLER = """
import sys
sys.path.insert(0, sys.argv[1])
from halimede.core.types import InferenceRequest
from halimede.workers.frames.calls import decode_call_answer, encode_infer
from halimede.workers.frames.kinds import HEADER

data = sys.stdin.buffer.read()
_, response = decode_call_answer(memoryview(data)[HEADER.size:], None)
request = InferenceRequest(response.model_name, response.model_version, response.id, response.outputs, ("größe",),
    response.parameters, 2, 3, "seq", True, False)
sys.stdout.buffer.write(encode_infer(9, 4, request, lambda data: None, lambda: 5))
"""


@pytest.mark.parametrize("version", [None, "3.10", "3.12", "3.13"])
def test_another_interpreter_calls_in_the_same_frames(version: str | None):
    program = sys.executable if version is None else interpreter(version)
    outputs = [Tensor(f"ü{each.name}", each, (1, 2), bytes(range(2 * (each.itemsize or 4)))) for each in TYPES]
    answer = InferenceResponse("größe", "1", "id", outputs, {"p": 1.5, "s": "✓", "b": True, "n": 3})
    frame = encode_call_answer(1, answer, lambda _: None)

    ran = subprocess.run(
        [program, "-c", OTHER_CALLER, str(SERVER)], input=bytes(frame), capture_output=True, timeout=60, check=False
    )

    assert ran.returncode == 0, ran.stderr.decode()
    got = decode_infer(body_of(ran.stdout, Kind.INFER), Shelf(False).locate)
    assert (got.number, got.batch, got.wanted_bytes) == (9, 4, 5)
    assert plain(got.request.inputs) == plain(outputs)
    got.request.inputs = []
    assert got.request == InferenceRequest(
        "größe", "1", "id", [], ("größe",), answer.parameters, 2, 3, "seq", True, False
    )
