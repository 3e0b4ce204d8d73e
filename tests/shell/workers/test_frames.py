"""The codec of the channel: decoding restores what was encoded, and invalid values are refused with one error."""

import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.backends.hosting import RESCHEDULED, Answer, BatchReply, Reply
from halimede.channel.frames import MAX_TEXT_BYTES
from halimede.core.types import (
    DataType,
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    Tensor,
)
from halimede.inference_frames.calls import decode_call_answer, decode_infer, encode_call_answer, encode_infer
from halimede.inference_frames.kinds import MAX_ANSWER_BYTES, InferenceFrame
from halimede.workers.frames.answers import (
    batch_of,
    decode_done,
    decode_response,
    encode_done,
    encode_response,
)
from halimede.workers.frames.batches import decode_execute, encode_execute
from halimede.workers.frames.kinds import WorkerFrame
from halimede.workers.worker import BatchItem
from support.frames import (
    BATCH_REPLIES,
    CALL_ANSWERS,
    CALLS,
    INPUTS,
    ITEMS,
    OUT,
    OUTPUTS,
    PLACED,
    REPLIES,
    U64,
    Shelf,
    body_of,
    check_same,
    decoded,
    done_frame,
    out,
    plain,
    request,
)


@given(st.lists(ITEMS, max_size=4), st.integers(0, 2**32 - 1), PLACED)
@settings(max_examples=150, deadline=None)
def test_a_batch_arrives_as_it_was_sent(items: list[BatchItem], batch: int, placed: bool):
    shelf = Shelf(placed)
    frame = encode_execute(batch, items, shelf.store)

    got = decode_execute(body_of(frame, WorkerFrame.EXECUTE), len(OUTPUTS), shelf.locate)

    assert got.batch == batch
    assert len(got.items) == len(items)
    for item, sent in zip(got.items, items, strict=True):
        assert (item.key, item.rows, item.sequence_slot, item.cancelled) == (
            sent.key,
            sent.rows,
            sent.sequence_slot,
            False,
        )
        assert plain(item.request.inputs) == plain(sent.request.inputs)
        item.request.inputs, sent.request.inputs = [], []
        if len(sent.request.outputs) == len(OUTPUTS):
            sent.request.form = replace(sent.request.form, outputs=())  # no names mean all outputs
        assert item.request == sent.request


@given(st.lists(BATCH_REPLIES, max_size=4), st.booleans(), st.tuples(U64, U64, U64), U64, PLACED)
@settings(max_examples=150, deadline=None)
def test_answers_arrive_as_they_were_sent(
    replies: list[BatchReply], failed: bool, times: tuple[int, int, int], wanted: int, placed: bool
):
    shelf = Shelf(placed)
    retained = [(at + 1, 64 * at) for at in range(len(replies))]
    sent = list(replies)
    frame = encode_done(7, replies, failed, times, OUT, shelf.store, lambda: (wanted, retained))
    assert replies == [], "what lies in shared memory is not held any more"

    done = decode_done(body_of(frame, WorkerFrame.DONE), OUTPUTS, shelf.locate)

    assert batch_of(body_of(frame, WorkerFrame.DONE)) == (7, len(sent))
    assert (done.batch, done.failed, done.times, done.wanted_bytes) == (7, failed, times, wanted)
    assert done.retained == retained
    assert list(done.again) == [at for at, reply in enumerate(sent) if reply is RESCHEDULED]
    for reply, original in zip(done.replies, sent, strict=True):
        check_same(reply, original)


@given(U64, REPLIES, st.booleans(), st.tuples(U64, U64), PLACED)
@settings(max_examples=100, deadline=None)
def test_a_response_arrives_as_it_was_sent(key: int, reply: Reply, final: bool, times: tuple[int, int], placed: bool):
    shelf = Shelf(placed)
    frame = encode_response(key, reply, final, times, OUT, shelf.store)

    response = decode_response(body_of(frame, WorkerFrame.RESPONSE), OUTPUTS, shelf.locate)

    assert (response.key, response.final, response.times) == (key, final, times)
    check_same(response.reply, reply)


U32 = st.integers(1, 2**32 - 1)


@given(U32, U32, CALLS, U64, PLACED)
@settings(max_examples=150, deadline=None)
def test_a_call_arrives_as_it_was_sent(number: int, batch: int, call: InferenceRequest, wanted: int, placed: bool):
    shelf = Shelf(placed)
    frame = encode_infer(number, batch, call, shelf.store, lambda: wanted)

    got = decode_infer(body_of(frame, InferenceFrame.INFER), shelf.locate)

    assert (got.number, got.batch, got.wanted_bytes) == (number, batch, wanted)
    assert plain(got.request.inputs) == plain(call.inputs)
    assert {k: type(v) for k, v in got.request.parameters.items()} == {k: type(v) for k, v in call.parameters.items()}
    got.request.inputs, call.inputs = [], []
    assert got.request == call


@given(U32, CALL_ANSWERS, PLACED)
@settings(max_examples=150, deadline=None)
def test_an_answer_to_a_call_arrives_as_it_was_sent(number: int, answer: InferenceResponse, placed: bool):
    shelf = Shelf(placed)
    frame = encode_call_answer(number, answer, shelf.store)
    body = body_of(frame, InferenceFrame.CALL_ANSWER)

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
def test_a_call_that_does_not_fit_into_a_frame_is_refused(fields: dict[str, Any], error: str):
    call = InferenceRequest(**{"model_name": "m", **fields})

    with pytest.raises((ValueError, struct.error), match=error):
        encode_infer(1, 0, call, Shelf(False).store, lambda: 0)


def test_lone_surrogates_in_a_call_are_replaced():
    call = InferenceRequest("m\ud800", id="\udfff", outputs=("y\ud800",), parameters={"k\ud800": "v"})
    frame = encode_infer(1, 0, call, Shelf(False).store, lambda: 0)

    got = decode_infer(body_of(frame, InferenceFrame.INFER), Shelf(False).locate).request

    assert (got.model_name, got.id, got.outputs, got.parameters) == ("m?", "?", ("y?",), {"k?": "v"})


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
def test_long_fields_of_clients_do_not_break_the_channel(item: BatchItem):
    frame = encode_execute(1, [item], Shelf(False).store)

    got = decode_execute(body_of(frame, WorkerFrame.EXECUTE), len(OUTPUTS), Shelf(False).locate)

    assert [each.request for each in got.items] == [item.request]


def test_lone_surrogates_of_a_client_are_replaced():
    item = request(id="a\ud800b", sequence_id="\udfff", parameters={"k\ud800": "v"})
    frame = encode_execute(1, [item], Shelf(False).store)

    got = decode_execute(body_of(frame, WorkerFrame.EXECUTE), len(OUTPUTS), Shelf(False).locate)

    assert got.items[0].request.id == "a?b"
    assert got.items[0].request.sequence_id == "?"


def test_tensors_in_a_frame_are_aligned():
    tensors = [out(size, name) for size, name in zip((1, 17, 33), OUTPUTS, strict=True)]
    frame = done_frame([Answer(tensors), Answer(tensors, {"a": 1})])
    body = body_of(frame, WorkerFrame.DONE)
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


def test_outputs_that_are_not_configured_are_left_out():
    [reply] = decoded(done_frame([Answer([out(), out(4, "unknown")])])).replies
    assert isinstance(reply, Answer)
    assert [each.name for each in reply.outputs] == ["out"]


def test_an_output_that_was_sent_twice_is_sent_twice_again():
    [reply] = decoded(done_frame([Answer([out()] * 1_000)])).replies
    assert isinstance(reply, Answer)
    assert [each.name for each in reply.outputs] == ["out"] * (len(OUTPUTS) + 1)


def test_long_errors_are_cut_and_too_large_answers_become_errors():
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
