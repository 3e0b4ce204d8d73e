"""INFERS and ANSWERS: the requests of a front-end process in groups, and their answers."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.channel.frames import INLINE_BYTES, FrameError
from halimede.core.types import DataType, InferenceRequest, InferenceResponse, Tensor
from halimede.front_processes.frames import FrontFrame
from halimede.front_processes.groups import (
    decode_answers,
    decode_infers,
    encode_answers,
    encode_infers,
    wanted_bytes,
)
from halimede.inference_frames.kinds import MAX_CLIENT_TEXT_BYTES
from support.frames import CALL_ANSWERS, CALLS, PLACED, U32, U64, Shelf, body_of, plain

Numbered = list[tuple[int, InferenceRequest]]


@st.composite
def batches(draw: Any, one: Any) -> list[tuple[int, Any]]:
    """Numbered requests or answers, many of which are equal to others."""
    kinds = draw(st.lists(one, min_size=1, max_size=4))
    order = draw(st.lists(st.integers(0, len(kinds) - 1), max_size=12))
    return [(draw(U32), kinds[kind]) for kind in order]


def refuse(number: int, error: Exception) -> None:
    raise AssertionError(f"request {number}: {error}")


def infers(requests: Numbered, shelf: Shelf | None = None, wanted: int = 0) -> memoryview:
    """The body of the frame."""
    frame = encode_infers(requests, (shelf or Shelf(False)).store, lambda: wanted, refuse)
    return body_of(frame, FrontFrame.INFERS)


def read(body: memoryview, shelf: Shelf | None = None) -> Numbered:
    return list(decode_infers(body, (shelf or Shelf(False)).locate))


def small(value: int, **fields: Any) -> InferenceRequest:
    return InferenceRequest("a-model", inputs=[Tensor("in", DataType.INT8, (3,), bytes([value] * 3))], **fields)


def check_equal(got: list[tuple[int, Any]], sent: list[tuple[int, Any]], tensors: str) -> None:
    assert [number for number, _ in got] == [number for number, _ in sent]
    for (_, one), (_, other) in zip(got, sent, strict=True):
        assert plain(getattr(one, tensors)) == plain(getattr(other, tensors))
        for field in one.__slots__:
            if field != tensors:
                assert getattr(one, field) == getattr(other, field), field


@given(batches(CALLS), U64, PLACED)
@settings(max_examples=60, deadline=None)
def test_requests_arrive_as_they_were_sent(requests: Numbered, wanted: int, placed: bool):
    shelf = Shelf(placed)
    body = infers(requests, shelf, wanted)

    assert wanted_bytes(body) == wanted
    check_equal(read(body, shelf), requests, "inputs")


@given(batches(CALL_ANSWERS), PLACED)
@settings(max_examples=60, deadline=None)
def test_answers_arrive_as_they_were_sent(answers: list[tuple[int, InferenceResponse]], placed: bool):
    shelf = Shelf(placed)
    body = body_of(encode_answers(answers, shelf.store), FrontFrame.ANSWERS)

    check_equal(list(decode_answers(body, shelf.locate)), answers, "outputs")


def test_equal_requests_are_described_once():
    requests = [(number, small(number)) for number in range(100)]
    body = infers(requests)

    assert bytes(body).count(b"a-model") == 1
    check_equal(read(body), requests, "inputs")


def test_a_form_is_described_once_for_requests_that_follow_each_other():
    differing: list[dict[str, Any]] = [
        {},
        {"id": "1"},
        {"parameters": {"k": 1}},
        {"sequence_id": 1},
        {"priority": 2},
        {},
    ]
    requests = [(number, small(number, **fields)) for number, fields in enumerate(differing)]
    body = infers(requests)

    assert bytes(body).count(b"a-model") == 3, "the fifth has another form"
    check_equal(read(body), requests, "inputs")


def test_equal_requests_that_are_apart_keep_their_order():
    requests = [(number, small(number, id=str(number % 2))) for number in range(9)]

    check_equal(read(infers(requests)), requests, "inputs")


def test_decoded_requests_share_no_parameters():
    [(_, one), (_, other)] = read(infers([(1, small(1, parameters={"k": 1})), (2, small(2, parameters={"k": 1}))]))
    one.parameters["k"] = 2

    assert other.parameters == {"k": 1}


@given(batches(CALLS), st.lists(st.integers(0, 12), max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_request_that_cannot_be_sent_is_reported_alone(requests: Numbered, places: list[int]):
    bad = InferenceRequest("m", inputs=[Tensor("x", DataType.INVALID, (1,), b"a")])
    sent = [(number, request) for number, (_, request) in enumerate(requests)]
    for at in places:
        sent.insert(at, (1000 + len(sent), bad))
    failed: list[tuple[int, str]] = []
    shelf = Shelf(False)

    frame = encode_infers(sent, shelf.store, lambda: 0, lambda number, error: failed.append((number, str(error))))

    assert failed == [(number, "input 'x' has no datatype") for number, request in sent if request is bad]
    check_equal(read(body_of(frame, FrontFrame.INFERS)), [one for one in sent if one[1] is not bad], "inputs")


@pytest.mark.parametrize(
    "fields",
    [
        {"model_name": "m" * 70_000},
        {"id": "i" * (MAX_CLIENT_TEXT_BYTES + 1)},
        {"sequence_id": -1},
        {"sequence_id": 2**64},
        {"timeout_us": 2**64},
        {"parameters": {"k": "x" * MAX_CLIENT_TEXT_BYTES}},
        {"inputs": [Tensor("x", DataType.INT8, (2**63,), b"a")]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_each_field_beyond_its_limit_is_reported(fields: dict[str, Any]):
    failed: list[int] = []
    requests = [(1, small(1)), (2, InferenceRequest(**{"model_name": "m", **fields})), (3, small(3))]

    frame = encode_infers(requests, Shelf(False).store, lambda: 0, lambda number, _: failed.append(number))

    assert failed == [2]
    check_equal(read(body_of(frame, FrontFrame.INFERS)), [requests[0], requests[2]], "inputs")


def test_long_texts_of_clients_arrive():
    long = ",[{" * 100_000
    requests = [(1, small(1)), (2, small(2, id=long, sequence_id=long, parameters={long: long, "k": 1}))]
    answers = [(2, InferenceResponse("m", "1", long, parameters={"k": long}))]

    check_equal(read(infers(requests)), requests, "inputs")
    body = body_of(encode_answers(answers, Shelf(False).store), FrontFrame.ANSWERS)
    check_equal(list(decode_answers(body, Shelf(False).locate)), answers, "outputs")


def test_only_requests_that_were_not_sent_leave_an_empty_frame():
    frame = encode_infers([(1, small(1, sequence_id=-1))], Shelf(False).store, lambda: 5, lambda *_: None)
    body = body_of(frame, FrontFrame.INFERS)

    assert (wanted_bytes(body), read(body)) == (5, [])


def read_or_refuse(body: bytes, shelf: Shelf) -> None:
    """Any other exception than FrameError would end the core."""
    try:
        wanted_bytes(memoryview(body))
        for _, request in decode_infers(memoryview(body), shelf.locate):
            plain(request.inputs)
    except FrameError:
        pass


@given(batches(CALLS), PLACED, st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_requests_are_refused_with_a_frame_error(requests: Numbered, placed: bool, data: Any):
    shelf = Shelf(placed)
    body = bytearray(infers(requests, shelf))
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=8)):
        body[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, ord('"'), ord("[")]))
    read_or_refuse(bytes(body[: data.draw(st.integers(0, len(body)))]), shelf)


@given(st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_random_bytes_are_refused_with_a_frame_error(body: bytes):
    read_or_refuse(body, Shelf(False))
    read_or_refuse(bytes(8) + body, Shelf(False))


@pytest.mark.parametrize("cut", [14, 16, 20, 60])
def test_a_frame_that_ends_too_early_is_refused(cut: int):
    body = infers([(number, small(number)) for number in range(3)])

    with pytest.raises(FrameError):
        read(body[:-cut])


def test_deeply_nested_parameters_are_refused_with_a_frame_error():
    nested = "[" * 300_000
    request = small(1, parameters={"k": nested})
    body = bytearray(infers([(1, request)]))
    # The text of the parameters becomes the lists that it names.
    at = bytes(body).index(b'{"k": "')
    body[at : at + 7] = b"[" * 7

    with pytest.raises(FrameError):
        read(memoryview(bytes(body)))


def test_memory_that_is_not_there_is_refused_with_a_frame_error():
    large = InferenceRequest("m", inputs=[Tensor("in", DataType.INT8, (INLINE_BYTES + 1,), bytes(INLINE_BYTES + 1))])
    body = infers([(1, large)], Shelf(True))

    with pytest.raises(FrameError, match="bytes at 0 of 1"):
        read(body, Shelf(True))
