"""Inference responses become HTTP bodies."""

import json

import numpy as np
import orjson

from halimede.core.types import DataType, ErrorCode, InferenceResponse, Tensor
from halimede.core.types.tensor import join_bytes
from halimede.core.wire.destinations import BINARY, JSON, Destinations, Inline
from halimede.core.wire.http_response import JOIN_BYTES, EncodedInfer, encode_infer, encode_infer_steps
from support.inference_bodies import VIEW, floats, invalid, output, response, view
from support.refusals import error_of


def test_a_response_in_json() -> None:
    answer = response(output([[1, 0.1]]), output([True, False], DataType.BOOL, 'a"b'), id="7")
    assert encode_infer(answer, Destinations(), VIEW) == EncodedInfer(
        [
            b'{"id":"7","model_name":"m","model_version":"3","outputs":['
            b'{"name":"y","datatype":"FP32","shape":[1,2],"data":[1.0,0.10000000149011612]},'
            b'{"name":"a\\"b","datatype":"BOOL","shape":[2],"data":[true,false]}]}'
        ],
        None,
    )


def test_a_response_with_parameters_and_no_output() -> None:
    answer = response(parameters={"sequence_id": 0, "sequence_start": False, "s": "é"})
    assert encode_infer(answer, Destinations(), VIEW) == EncodedInfer(
        [
            '{"model_name":"m","model_version":"3","parameters":{"sequence_id":0,"sequence_start":false,"s":"é"},'
            '"outputs":[]}'.encode()
        ],
        None,
    )


def test_binary_outputs_follow_the_json_in_order() -> None:
    answer = response(output([1], name="a"), output([2], name="b"), output([3], DataType.UINT8, "c"))
    json_part = (
        b'{"model_name":"m","model_version":"3","outputs":['
        b'{"name":"a","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}},'
        b'{"name":"b","datatype":"FP32","shape":[1],"data":[2.0]},'
        b'{"name":"c","datatype":"UINT8","shape":[1],"parameters":{"binary_data_size":1}}]}'
    )
    assert encode_infer(answer, Destinations(BINARY, {"b": JSON}), VIEW) == EncodedInfer(
        [json_part + floats(1) + b"\3"], len(json_part)
    )


def test_a_large_binary_output_is_passed_through() -> None:
    data = memoryview(bytes(JOIN_BYTES))
    answer = response(output([1], name="a"), Tensor("b", DataType.UINT8, (JOIN_BYTES,), data), output([2], name="c"))
    encoded = encode_infer(answer, Destinations(BINARY), VIEW)
    assert encoded.chunks[1] is data
    assert encoded.json_length is not None
    assert [len(chunk) for chunk in encoded.chunks] == [encoded.json_length + 4, JOIN_BYTES, 4]


def test_classes_take_the_place_of_the_tensor() -> None:
    model = view(max_batch_size=4, labels={"y": ("cat", "dog")})
    answer = response(output([[0.25, 0.5]]))
    assert encode_infer(answer, Destinations(JSON, {"y": Inline(False, 1)}), model).chunks == [
        b'{"model_name":"m","model_version":"3","outputs":['
        b'{"name":"y","datatype":"BYTES","shape":[1,1],"data":["0.500000:1:dog"]}]}'
    ]
    assert b"".join(encode_infer(answer, Destinations(JSON, {"y": Inline(True, 1)}), model).chunks).endswith(
        b'"shape":[1,1],"parameters":{"binary_data_size":18}}]}' + join_bytes(["0.500000:1:dog"])
    )


def test_unconfigured_half_float_output_is_refused_as_json() -> None:
    assert error_of(encode_infer, response(Tensor("h", DataType.BF16, (1,), b"\0\0")), Destinations(), VIEW) == invalid(
        "sending BF16 data via JSON is not supported. Please use the binary data format for output h"
    )


def test_response_parameters_not_valid_in_json_are_internal_errors() -> None:
    assert error_of(encode_infer, response(parameters={"a": 2**70}), Destinations(), VIEW).code is ErrorCode.INTERNAL


def test_a_large_response_is_encoded_in_steps() -> None:
    values = np.arange(200_000, dtype="<i4")
    answer = response(output(values, DataType.INT32), output([1.5], name="z"))
    assert sum(1 for _ in encode_infer_steps(answer, Destinations(), VIEW)) >= 4
    body = b"".join(encode_infer(answer, Destinations(), VIEW).chunks)
    assert [item["data"] for item in json.loads(body)["outputs"]] == [values.tolist(), [1.5]]


def test_single_binary_output_is_encoded_like_others() -> None:
    for size in (0, 2, 100_000):
        output = Tensor("OUT", DataType.UINT8, (1, size), b"\7" * size)
        response = InferenceResponse("m", "1", outputs=[output])
        binary = Destinations(Inline(binary=True))
        short, long = (encode_infer(response, each, VIEW) for each in (Destinations(BINARY), binary))
        assert b"".join(short.chunks) == b"".join(long.chunks)
        assert short.json_length == long.json_length
        document = orjson.loads(b"".join(short.chunks)[: short.json_length])
        assert document["outputs"][0]["parameters"] == {"binary_data_size": size}
