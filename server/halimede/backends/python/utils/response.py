"""`InferenceResponse`, and its conversion to the reply that is sent."""

import json
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import Any

from halimede.backends.hosting import Answer
from halimede.backends.python.utils.arguments import check_mapping, instance_of, sequence_of
from halimede.backends.python.utils.errors import TritonError, TritonModelException, inference_error, triton_error
from halimede.backends.python.utils.session import Session
from halimede.backends.python.utils.tensor import Tensor, tensor_of
from halimede.core.types import InferenceError, ParameterValue
from halimede.core.types import InferenceResponse as CoreResponse

failed_answer_read: ContextVar[str] = ContextVar("failed_answer_read", default="")
"""The error of the last error response whose outputs this task or thread has read.

A model that does not check for errors fails with an exception that does not mention the error itself."""


class InferenceResponse:
    """Outputs and parameters, or an error."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__", "_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: list[Tensor] | tuple[Tensor, ...] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        if error is not None:
            instance_of(error, TritonError, "InferenceResponse", "error")
        if parameters is not None:
            check_mapping(parameters, "InferenceResponse", "parameters")
        # Recognize the common case before calling a function; the checks handle all others.
        if type(output_tensors) is list and len(output_tensors) == 1 and type(output_tensors[0]) is Tensor:
            self._outputs = [output_tensors[0]]
        else:
            self._outputs = _tensors(output_tensors)
        self._error = error
        self._parameters = checked_parameters(parameters) if parameters is not None else {}

    def output_tensors(self) -> list[Tensor]:
        if self._error is not None:
            failed_answer_read.set(self._error.message())
        return list(self._outputs)

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The parameters as JSON."""
        return parameters_json(self._parameters)


def reply_of(response: InferenceResponse, wanted: Collection[str], session: Session) -> Answer | InferenceError:
    """The reply to send: only the requested outputs, in the model's order, or only the error."""
    if response._error is not None:
        return inference_error(response._error)
    outputs = []
    for tensor in response._outputs:
        core = tensor._core
        if core.name in wanted:
            outputs.append(core)
            continue
        try:
            session.check_unwanted(core.name)
        except InferenceError as error:
            return error.with_traceback(None)
    return Answer(outputs, response._parameters)


def response_of(received: CoreResponse) -> InferenceResponse:
    """A response from another model; with an error it has no outputs."""
    error = received.error
    response: InferenceResponse = InferenceResponse.__new__(InferenceResponse)
    response._outputs = [tensor_of(core) for core in received.outputs] if error is None else []
    response._error = None if error is None else triton_error(error)
    response._parameters = received.parameters
    return response


def checked_parameters(parameters: Mapping[Any, Any]) -> dict[str, ParameterValue]:
    """A copy of a mapping; keys are `str`, values `bool`, `int` or `str`. TritonModelException."""
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)


def parameters_json(parameters: Mapping[str, ParameterValue]) -> str:
    return json.dumps(parameters, separators=(",", ":"), ensure_ascii=False)


def _tensors(output_tensors: Any) -> list[Tensor]:
    if has_missing(output_tensors):
        raise TritonModelException("Output tensor for inference response should not be empty.")
    return sequence_of(output_tensors, Tensor, "InferenceResponse", "output_tensors")


def has_missing(tensors: Any) -> bool:
    """Whether it is a list or tuple of tensors in which None takes the place of some."""
    if not isinstance(tensors, (list, tuple)) or all(tensor is not None for tensor in tensors):
        return False
    return all(tensor is None or isinstance(tensor, Tensor) for tensor in tensors)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output of this name; None if it has no such output."""
    for tensor in inference_response._outputs:
        if tensor._core.name == name:
            return tensor
    if inference_response._error is not None:
        failed_answer_read.set(inference_response._error.message())
    return None
