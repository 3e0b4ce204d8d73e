"""Descriptions of tensors that the codec has cached from earlier frames."""

import tracemalloc

import pytest

from halimede.backends.hosting import Answer
from halimede.channel.frames import INLINE_BYTES, FrameError
from halimede.core.types import (
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
)
from halimede.inference_frames.calls import decode_call_answer, decode_infer, encode_call_answer, encode_infer
from halimede.inference_frames.kinds import InferenceFrame
from halimede.workers.frames.kinds import WorkerFrame
from support.frames import Shelf, body_of, decoded, done_frame, done_of, out

CALL_SAID_BEFORE = InferenceRequest("m", inputs=[out(40)], outputs=("out",), parameters={"k": 1})


def calls_read(call: InferenceRequest) -> list[InferenceRequest]:
    """The same answer, decoded from two frames."""
    sent = [encode_infer(number, 0, call, Shelf(False).store, lambda: 0) for number in (1, 2)]
    return [decode_infer(body_of(frame, InferenceFrame.INFER), Shelf(False).locate).request for frame in sent]


def test_frames_with_equal_descriptions_share_no_objects():
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


def test_a_cached_description_is_checked_against_each_frame():
    frame = bytes(encode_infer(1, 0, CALL_SAID_BEFORE, Shelf(False).store, lambda: 0))
    whole = body_of(frame, InferenceFrame.INFER)
    decode_infer(whole, Shelf(False).locate)
    done = body_of(done_frame([Answer([out(40)])]), WorkerFrame.DONE)
    done_of(bytes(done), Shelf(False))

    with pytest.raises(FrameError, match="a tensor that ends at byte"):
        decode_infer(whole[:-20], Shelf(False).locate)
    with pytest.raises(FrameError, match="a tensor that ends at byte"):
        done_of(bytes(done[:-20]), Shelf(False))


def test_places_in_shared_memory_are_located_for_each_frame():
    shelf = Shelf(True)
    frame = encode_infer(1, 0, InferenceRequest("m", inputs=[out(INLINE_BYTES + 1)]), shelf.store, lambda: 0)
    decode_infer(body_of(frame, InferenceFrame.INFER), shelf.locate)
    shelf.blocks.clear()

    with pytest.raises(FrameError, match="bytes at 0 of 1"):
        decode_infer(body_of(frame, InferenceFrame.INFER), shelf.locate)


def test_long_descriptions_and_texts_are_not_cached():
    def cross(number: int) -> None:
        text = f"{number:060000}"
        calls_read(InferenceRequest("m", id=text, parameters={"k": text[:50_000]}))
        decoded(done_frame([InferenceError(ErrorCode.INTERNAL, text)]))
        answer = encode_call_answer(
            1, InferenceResponse("m", "1", text, error=InferenceError(ErrorCode.INTERNAL, text)), Shelf(False).store
        )
        decode_call_answer(body_of(answer, InferenceFrame.CALL_ANSWER), Shelf(False).locate)

    cross(0)
    tracemalloc.start()
    try:
        for number in range(1, 200):
            cross(number)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < 1 << 20
