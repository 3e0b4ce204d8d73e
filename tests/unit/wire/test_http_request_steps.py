"""Large inference bodies are decoded in steps, with the result of small ones."""

import json

import numpy as np
import pytest

from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, Tensor
from halimede.core.types.tensor import join_bytes
from halimede.core.wire.destinations import BINARY, JSON, Destinations
from halimede.core.wire.http_request import (
    SMALL_JSON_BYTES,
    DecodedInfer,
    decode_infer,
    decode_infer_steps,
    decode_large_steps,
    decode_small,
)
from halimede.core.wire.steps import run
from support.inference_bodies import VIEW, asking, floats, invalid, refusal, tensor, with_tail
from support.refusals import error_of


def test_a_large_document_is_decoded_in_steps() -> None:
    count = 100_000
    document = asking(
        tensor(name="a", shape=[count], data=list(range(count))),
        tensor(name="b", data=..., parameters={"binary_data_size": 8}),
        tensor(name="c", datatype="BYTES", shape=[1, 1], data=[["x" * 200_000]]),
        id="7",
        outputs=[{"name": "y", "parameters": {"binary_data": True}}],
    )
    assert len(document) > SMALL_JSON_BYTES
    body = document + floats(1, 2)
    expected = DecodedInfer(
        InferenceRequest(
            "m",
            id="7",
            outputs=("y",),
            inputs=[
                Tensor("a", DataType.FP32, (count,), np.arange(count, dtype="<f4").tobytes()),
                Tensor("b", DataType.FP32, (2,), floats(1, 2)),
                Tensor("c", DataType.BYTES, (1, 1), join_bytes(["x" * 200_000])),
            ],
        ),
        Destinations(JSON, {"y": BINARY}),
    )
    assert decode_infer(VIEW, body, len(document)) == expected
    assert run(decode_infer_steps(VIEW, memoryview(body), len(document))) == expected
    assert sum(1 for _ in decode_infer_steps(VIEW, body, len(document))) >= len(document) // (64 << 10)


def test_small_documents_take_one_step() -> None:
    assert list(decode_infer_steps(VIEW, asking(tensor()), None)) == []
    assert list(decode_infer_steps(VIEW, bytes(16), 0)) == []


def large(text: bytes) -> DecodedInfer:
    return run(decode_large_steps(VIEW, text, None, ""))


def test_lists_of_the_client_are_not_taken_for_placeholders() -> None:
    array = rb'{"name":"x","datatype":"FP32","shape":[1],"data":[8]}'
    body = b'{"inputs":[' + array + b"," + array.replace(b"data", rb"d\u0061ta").replace(b"8", b"0") + b"]}"
    assert [bytes(t.data) for t in large(body).request.inputs] == [floats(8), floats(0)]


def test_the_last_of_two_members_counts_and_the_first_must_be_json() -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[9],"shape":[1],"data":["a"],"data":[8]}]}'
    assert large(body) == decode_small(VIEW, body, None, "")
    assert large(body).request.inputs == [Tensor("x", DataType.FP32, (1,), floats(8))]
    with pytest.raises(InferenceError, match="failed to parse"):
        large(body.replace(b'["a"]', b"[a]"))


def test_a_document_that_is_no_json_is_refused_as_such_whatever_is_missing() -> None:
    with pytest.raises(InferenceError, match="failed to parse"):
        large(b'{"outputs":[{"unknown":[1 2]}]}')


MALFORMED = [
    *("[1,]", "[,1]", "[1,,2]", "[1 2]", "[1][2]", "[[1],]", "[[,1]]", "[1,[,2]]", "[[1],[2,]]", "[1,2", "[1,2]]"),
    *("[1,]]", "[01]", "[1.]", "[.5]", "[+1]", "[0x1]", "[1_0]", "[nan]", "[- 1]", "[1,\x0b2]", "[1;2]", "[\\1]"),
    *("[[1}]", "{1}", '["1]', "[1]]", "[[1]", '[1,"]'),
]


@pytest.mark.parametrize("array", MALFORMED)
@pytest.mark.parametrize("padding", [0, 40])
def test_invalid_json_is_refused_for_any_block_size(array: str, padding: int) -> None:
    data = array.replace(",", "," + " " * padding)
    body = f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[2],"data":{data}}}]}}'.encode()
    assert refusal(body).code is ErrorCode.INVALID_ARG
    for block_bytes in (16, 20, 1000):
        assert error_of(run, decode_large_steps(VIEW, body, None, "", block_bytes)).code is ErrorCode.INVALID_ARG


def test_nesting_has_a_limit_in_small_and_large_documents() -> None:
    error = invalid("JSON nesting depth exceeds maximum allowed limit (100)")
    for depth in (101, 100_000):
        assert refusal(b'{"inputs":' + b"[" * depth + b"]" * depth + b"}") == error
    deep = tensor(data=json.loads("[" * 97 + "1,2" + "]" * 97))
    assert decode_infer(VIEW, asking(deep), None).request.inputs[0].data == floats(1, 2.0)


def test_nan_is_read_from_small_documents() -> None:
    body = asking(tensor(data=[float("nan"), float("-inf")]))
    assert b"NaN" in body
    assert decode_infer(VIEW, body, None).request.inputs == [
        Tensor("x", DataType.FP32, (2,), floats(float("nan"), float("-inf")))
    ]


def test_a_large_json_part_without_data_keeps_the_shapes_of_its_binary_tensors() -> None:
    document = asking(tensor(data=..., parameters={"binary_data_size": 8}), parameters={"note": "long " * 20_000})
    decoded = with_tail(document, bytes(8))
    assert [(each.name, each.shape) for each in decoded.request.inputs] == [("x", (2,))]
