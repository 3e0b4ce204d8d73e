"""ASK and TOLD: what a front end asks the core besides inferences."""

import asyncio
import json
import struct
from contextlib import suppress
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.channel.frames import FrameError
from halimede.core.types import ErrorCode, InferenceError
from halimede.facade.server import Server
from halimede.front_processes.asks import (
    answer_later,
    answer_now,
    decode_ask,
    decode_told,
    encode_ask,
    encode_told,
    encode_told_error,
    result_of,
)
from halimede.front_processes.frames import FrontFrame
from support.frames import U32, body_of

TEXTS = st.text(st.characters(codec="utf-8"), max_size=9)
VALUES = st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False) | TEXTS | st.binary(max_size=20)
PARAMETERS = st.dictionaries(TEXTS | st.just("base64"), VALUES, max_size=3)
ARGUMENTS = st.lists(TEXTS | st.booleans() | PARAMETERS, max_size=3).map(tuple)
METHODS = st.sampled_from(["model", "load_model", "kv_cache"])


def asked(number: int, method: str, arguments: tuple[Any, ...]) -> tuple[int, str, tuple[Any, ...]]:
    return decode_ask(body_of(encode_ask(number, method, arguments), FrontFrame.ASK))


def told(frame: bytes) -> tuple[int, Any]:
    number, is_result, pickled = decode_told(body_of(frame, FrontFrame.TOLD))
    return number, result_of(is_result, pickled)


@given(U32, METHODS, ARGUMENTS)
def test_a_question_arrives_as_it_was_asked(number: int, method: str, arguments: tuple[Any, ...]):
    assert asked(number, method, arguments) == (number, method, arguments)


def test_bytes_arrive_as_bytes():
    parameters = {"config": "{}", "file:1/model.onnx": bytes(range(256)), "base64": b"x", "n": 2, "no": False}

    assert asked(1, "load_model", ("m", parameters)) == (1, "load_model", ("m", parameters))


@given(U32, st.none() | st.lists(st.integers() | TEXTS))
def test_a_result_arrives_as_it_was_told(number: int, value: object):
    assert told(encode_told(number, value)) == (number, value)


@given(U32, st.sampled_from(list(ErrorCode)), TEXTS)
def test_an_error_arrives_as_it_was_told(number: int, code: ErrorCode, text: str):
    with pytest.raises(InferenceError) as caught:
        told(encode_told_error(number, InferenceError(code, text)))

    assert caught.value == InferenceError(code, text)


def question(document: Any) -> memoryview:
    return memoryview(struct.pack("<I", 1) + json.dumps(document).encode())


@pytest.mark.parametrize(
    "body",
    [
        memoryview(b""),
        memoryview(b"\1\0\0"),
        memoryview(b"\1\0\0\0"),
        memoryview(b"\1\0\0\0\xff"),
        memoryview(b"\1\0\0\0" + b"[" * 100_000),
        question(1),
        question([]),
        question({}),
        question(["infer"]),
        question(["is_ready"]),
        question(["__class__"]),
        question([["model"], "m"]),
        question([{"a": 1}]),
        question([None]),
        question(["load_model", "m", {"file": []}]),
        question(["load_model", "m", {"file": [5]}]),
        question(["load_model", "m", {"file": ["x"]}]),
    ],
    ids=lambda body: bytes(body[4:30]).decode(errors="replace"),
)
def test_what_is_not_a_question_is_refused_with_a_frame_error(body: memoryview):
    with pytest.raises(FrameError):
        decode_ask(body)


@given(
    st.binary(max_size=60)
    | st.recursive(
        VALUES.filter(lambda v: not isinstance(v, bytes)) | st.none(), lambda v: st.lists(v) | st.dictionaries(TEXTS, v)
    ).map(lambda v: bytes(question(v)))
)
def test_other_bytes_are_refused_with_a_frame_error(body: bytes):
    with suppress(FrameError):
        decode_ask(memoryview(body))


class Core:
    """Answers, or fails in the ways that a core may."""

    def model(self, name: str, version: str = "") -> str:
        if name == "large":
            raise MemoryError
        if name != "m":
            raise InferenceError(ErrorCode.NOT_FOUND, f"no {name}")
        return f"{name} {version}"

    async def statistics(self, name: str = "", version: str = "") -> list[str]:
        if name == "broken":
            raise RuntimeError("a fault of the core")
        if name:
            raise InferenceError(ErrorCode.INVALID_ARG, f"no {name}")
        return ["all"]


CORE = cast("Server", Core())


def test_the_core_answers_at_once_or_later():
    assert told(answer_now(CORE, 2, "model", ("m", "1"))) == (2, "m 1")
    assert told(asyncio.run(answer_later(CORE, 3, "statistics", ()))) == (3, ["all"])


def test_errors_of_the_core_reach_the_client():
    with pytest.raises(InferenceError, match="no other"):
        told(answer_now(CORE, 1, "model", ("other",)))
    with pytest.raises(InferenceError, match="no x"):
        told(asyncio.run(answer_later(CORE, 2, "statistics", ("x",))))


def test_a_fault_of_the_core_is_an_answer():
    """Without one the client would wait for ever."""
    with pytest.raises(InferenceError) as caught:
        told(asyncio.run(answer_later(CORE, 1, "statistics", ("broken",))))

    assert caught.value.code is ErrorCode.INTERNAL


def test_what_the_core_lacks_is_unavailable_for_the_client():
    with pytest.raises(InferenceError) as caught:
        told(answer_now(CORE, 1, "model", ("large",)))

    assert caught.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("arguments", [(), ("m", "1", "2"), ({"a": 1}, [])])
def test_arguments_that_a_method_does_not_take_are_an_error(arguments: tuple[Any, ...]):
    """A front end that is broken into may send them: the core must go on."""
    with pytest.raises(InferenceError):
        told(answer_now(CORE, 1, "model", arguments))
