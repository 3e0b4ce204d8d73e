"""Requests, and the errors of their checks."""

from math import prod

from halimede.core.config.check_request import RequestChecker
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.types import DataType, ErrorCode, InferenceRequest, Tensor
from support.refusals import error_of

FP32, BYTES = DataType.FP32, DataType.BYTES

BAD_PREFIX = "[request id: <id_unknown>] "


def model(*inputs: ModelInput, max_batch_size: int = 8, outputs: tuple[str, ...] = ("OUT",)) -> RequestChecker:
    return RequestChecker(
        ModelConfig(
            name="m",
            max_batch_size=max_batch_size,
            input=inputs,
            output=tuple(ModelOutput(name, FP32, dims=(4,)) for name in outputs),
        )
    )


def fp32(name: str, *shape: int) -> Tensor:
    return Tensor(name, FP32, shape, bytes(4 * prod(shape)))


def strings(name: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    return Tensor(name, BYTES, shape, data)


def request(*inputs: Tensor, request_id: str = "", outputs: tuple[str, ...] = ()) -> InferenceRequest:
    return InferenceRequest("m", id=request_id, inputs=list(inputs), outputs=outputs)


def refusal(checker: RequestChecker, asked: InferenceRequest) -> str:
    before = [(tensor.name, tensor.shape) for tensor in asked.inputs]
    error = error_of(checker.check, asked)
    assert error.code is ErrorCode.INVALID_ARG
    assert [(tensor.name, tensor.shape) for tensor in asked.inputs] == before
    assert len(error.message.encode("utf-8", "replace")) <= 4096
    return error.message
