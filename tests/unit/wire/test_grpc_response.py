"""Responses to ModelInfer messages."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceResponse, Tensor
from halimede.core.types.tensor import join_bytes, tensor_from_array
from halimede.core.wire.destinations import ALL_BINARY, BINARY, Destinations, Inline
from halimede.core.wire.grpc_response import (
    encode_empty_final,
    encode_infer,
    encode_stream_error,
    encode_stream_infer,
    status_message,
)
from halimede.core.wire.protocol import ModelInferResponse, ModelStreamInferResponse
from support.refusals import error_of

VIEW = ModelView("m", "1", ("1",), ModelConfig(name="m", max_batch_size=8), {"scores": ("cat", "dog")})


def message(parts):
    return ModelInferResponse.FromString(b"".join(parts))


def stream_message(parts):
    return ModelStreamInferResponse.FromString(b"".join(parts))


def test_a_status_message_fits_a_trailer_and_a_client_sees_that_it_was_cut() -> None:
    assert status_message("short: é \0 %") == "short: é \0 %"
    assert status_message("x" * 5000) == "x" * 4092 + "..."
    assert status_message("é" * 5000) == "é" * 680 + "..."
    assert status_message("\ud800") == "?"


@given(st.text())
def test_a_status_message_takes_at_most_4_kib_in_percent_encoding(text: str) -> None:
    for long in (text, text * 500):
        encoded = status_message(long).encode()
        assert sum(1 if 0x20 <= byte < 0x7F and byte != 0x25 else 3 for byte in encoded) <= 4096


def test_a_response_has_raw_outputs_and_its_parameters() -> None:
    array = np.arange(4, dtype=np.float32)
    response = InferenceResponse(
        "m",
        "2",
        "seven",
        outputs=[
            tensor_from_array("y", DataType.FP32, array.reshape(2, 2)),
            Tensor("s", DataType.BYTES, (1,), b"\0" * 4),
        ],
        parameters={"b": True, "i": -1, "u": 2**64 - 1, "f": 0.5, "s": "text"},
    )
    expected = ModelInferResponse(
        model_name="m",
        model_version="2",
        id="seven",
        parameters={
            "b": {"bool_param": True},
            "i": {"int64_param": -1},
            "u": {"uint64_param": 2**64 - 1},
            "f": {"double_param": 0.5},
            "s": {"string_param": "text"},
        },
        outputs=[
            {"name": "y", "datatype": "FP32", "shape": [2, 2]},
            {"name": "s", "datatype": "BYTES", "shape": [1]},
        ],
        raw_output_contents=[array.tobytes(), b"\0" * 4],
    )
    assert message(encode_infer(response, VIEW, ALL_BINARY)) == expected


def test_response_parameter_without_a_field_type_is_an_error() -> None:
    assert error_of(
        encode_infer, InferenceResponse("m", "1", parameters={"big": 10**30}), VIEW, ALL_BINARY
    ) == InferenceError(
        ErrorCode.INTERNAL, "response parameter 'big' of model 'm' is outside the range of int64 and uint64"
    )


def test_a_classified_output_is_strings_with_labels() -> None:
    scores = tensor_from_array("scores", DataType.FP32, np.array([[0.25, 0.75], [3, 1]], np.float32))
    response = InferenceResponse("m", "1", outputs=[scores])
    classified = Destinations(BINARY, {"scores": Inline(binary=True, classes=1)})
    sent = message(encode_infer(response, VIEW, classified))
    assert [(out.name, out.datatype, list(out.shape)) for out in sent.outputs] == [("scores", "BYTES", [2, 1])]
    assert list(sent.raw_output_contents) == [join_bytes(["0.750000:1:dog", "3.000000:0:cat"])]


def test_streamed_responses_state_whether_they_are_final() -> None:
    inner = {"model_name": "m", "model_version": "1", "id": "7"}
    for final in (True, False):
        parameters = {"triton_final_response": {"bool_param": final}}
        response = InferenceResponse("m", "1", "7", final=final, parameters={"triton_final_response": "mine"})
        assert stream_message(encode_stream_infer(response, VIEW, ALL_BINARY)) == ModelStreamInferResponse(
            infer_response={**inner, "parameters": parameters}
        )
    assert stream_message(encode_empty_final(InferenceResponse("m", "1", "7"))) == ModelStreamInferResponse(
        infer_response={"model_name": "m", "id": "7", "parameters": {"triton_final_response": {"bool_param": True}}}
    )


def test_errors_on_a_stream_name_the_model_only_if_it_ran() -> None:
    error = InferenceError(ErrorCode.INVALID_ARG, "no")
    assert stream_message(encode_stream_error("7", error)) == ModelStreamInferResponse(
        error_message="no", infer_response={"id": "7"}
    )
    assert stream_message(encode_stream_error("7", error, "m")) == ModelStreamInferResponse(
        error_message="no",
        infer_response={"id": "7", "model_name": "m", "parameters": {"triton_final_response": {"bool_param": True}}},
    )
    assert stream_message(encode_stream_error("", InferenceError(ErrorCode.CANCELLED, ""))).error_message == "Cancelled"
