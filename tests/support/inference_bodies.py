"""Small models, and the bodies of inference requests and responses for them."""

import json
from typing import Any

import numpy as np

from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceResponse, Tensor
from halimede.core.types.tensor import tensor_from_array
from halimede.core.wire.http_request import DecodedInfer, decode_infer
from support.refusals import error_of


def view(
    *,
    inputs: tuple[ModelInput, ...] = (ModelInput("x", DataType.FP32, dims=(4,)),),
    outputs: tuple[ModelOutput, ...] = (ModelOutput("y", DataType.FP32, dims=(4,)),),
    max_batch_size: int = 0,
    labels: dict[str, tuple[str, ...]] | None = None,
) -> ModelView:
    config = ModelConfig(name="m", max_batch_size=max_batch_size, input=inputs, output=outputs)
    return ModelView("m", "1", ("1",), config, labels or {})


VIEW = view()


def tensor(**changes: Any) -> dict[str, Any]:
    """An input in JSON; a member with the value ... is omitted."""
    members = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2.5], **changes}
    return {key: value for key, value in members.items() if value is not ...}


def asking(*inputs: Any, **members: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **members}).encode()


def with_tail(document: bytes, tail: bytes, view: ModelView = VIEW) -> DecodedInfer:
    return decode_infer(view, document + tail, len(document))


def refusal(body: bytes, header_length: int | None = None, view: ModelView = VIEW) -> InferenceError:
    return error_of(decode_infer, view, body, header_length)


def invalid(text: str) -> InferenceError:
    return InferenceError(ErrorCode.INVALID_ARG, text)


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def response(*outputs: Tensor, **members: Any) -> InferenceResponse:
    return InferenceResponse("m", "3", outputs=list(outputs), **members)


def output(values: Any, datatype: DataType = DataType.FP32, name: str = "y") -> Tensor:
    return tensor_from_array(name, datatype, np.array(values, datatype.dtype))
