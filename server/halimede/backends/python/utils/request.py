"""`InferenceRequest`: a request that the model received, or one that it makes to call another model."""

import asyncio
from typing import Any

from halimede.backends.hosting import HostedRequest
from halimede.backends.python.utils import calls
from halimede.backends.python.utils.arguments import (
    ProtocolNumber,
    check_mapping,
    instance_of,
    integer_of,
    sequence_of,
    text_of,
    truth_of,
)
from halimede.backends.python.utils.errors import TritonModelException
from halimede.backends.python.utils.response import checked_parameters, has_missing, parameters_json
from halimede.backends.python.utils.sender import InferenceResponseSender
from halimede.backends.python.utils.session import Session
from halimede.backends.python.utils.tensor import Tensor, tensor_of
from halimede.core.sequences.rows import Row
from halimede.core.types import InferenceRequest as CoreRequest
from halimede.core.types import ParameterValue
from halimede.core.types.request import form_of, forms_of

SEQUENCE_START, SEQUENCE_END = 1, 2
RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2


class MemoryType(ProtocolNumber):
    """The preferred memory for the outputs of a request that a model makes."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """A preference without effect: outputs are always in the host's memory."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("_device_id", "_memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self._memory_type = instance_of(preferred_memory_type, MemoryType, "PreferredMemory", "preferred_memory_type")
        self._device_id = integer_of(
            preferred_device_id, "PreferredMemory", "preferred_device_id", -(1 << 63), (1 << 63) - 1
        )


class InferenceTrace:
    """The trace of a request, which requests made on its behalf inherit."""

    __module__ = "c_python_backend_utils"
    __slots__ = ()

    def get_context(self) -> str | None:
        """Returns None: there is no OpenTelemetry context."""
        return None


_NO_TRACE = InferenceTrace()


class InferenceRequest:
    """A request to the model, or from it to another model."""

    __module__ = "c_python_backend_utils"
    __slots__ = (
        "__weakref__",
        "_correlation_id",
        "_flags",
        "_inputs",
        "_model_name",
        "_model_version",
        "_outputs",
        "_parameters",
        "_preferred_memory",
        "_request_id",
        "_timeout",
        "_trace",
    )

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: list[Tensor] | None = None,
        requested_output_names: list[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: dict[str, ParameterValue] | None = None,
    ) -> None:
        # Check the type before calling a function: arguments usually have the right type.
        where = "InferenceRequest"
        self._request_id = request_id if type(request_id) is str else text_of(request_id, where, "request_id")
        self._model_name = model_name if type(model_name) is str else text_of(model_name, where, "model_name")
        self._outputs: list[str] = sequence_of(requested_output_names, str, where, "requested_output_names")
        if type(model_version) is not int or model_version != -1:
            model_version = integer_of(model_version, where, "model_version", -(1 << 63), (1 << 63) - 1)
        self._model_version = model_version
        if type(flags) is not int or flags != 0:
            flags = integer_of(flags, where, "flags", 0, (1 << 32) - 1)
        self._flags: int | None = flags
        if type(timeout) is not int or timeout != 0:
            timeout = integer_of(timeout, where, "timeout", 0, (1 << 63) - 1)
        self._timeout = timeout
        if preferred_memory is not None:
            instance_of(preferred_memory, PreferredMemory, where, "preferred_memory")
        self._preferred_memory = preferred_memory
        self._trace = _NO_TRACE if trace is None else instance_of(trace, InferenceTrace, where, "trace")
        if parameters is not None:
            check_mapping(parameters, where, "parameters")
        # Values are checked after the types of all arguments, as in Triton: a correlation id may have any type there.
        self._inputs: list[Tensor] | None
        if type(inputs) is list and len(inputs) == 1 and type(inputs[0]) is Tensor:
            self._inputs = [inputs[0]]
        else:
            self._inputs = self._tensors(inputs)
        if "" in self._outputs:
            raise TritonModelException(self._empty("Requested output name"))
        self._parameters = checked_parameters(parameters) if parameters is not None else {}
        if isinstance(correlation_id, str) or (type(correlation_id) is int and correlation_id == 0):
            self._correlation_id: int | str = correlation_id
        elif isinstance(correlation_id, int) or correlation_id is None:
            self._correlation_id = integer_of(correlation_id, where, "correlation_id", 0, (1 << 64) - 1)
        else:
            raise TritonModelException("Correlation ID must be integer or string")

    def _tensors(self, inputs: Any) -> list[Tensor]:
        try:
            return sequence_of(inputs, Tensor, "InferenceRequest", "inputs")
        except TypeError:
            if not has_missing(inputs):
                raise
            raise TritonModelException(self._empty("Input tensor")) from None

    def _empty(self, what: str) -> str:
        return (
            f"{what} for request with id '{self._request_id}' and model name '{self._model_name}' should not be empty."
        )

    def inputs(self) -> list[Tensor]:
        return self._inputs or []

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags or 0

    def set_flags(self, flags: int) -> None:
        self._flags = integer_of(flags, "set_flags", "flags", 0, (1 << 32) - 1)

    def timeout(self) -> int:
        """Timeout in microseconds, 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """The parameters as JSON."""
        return parameters_json(self._parameters)

    def trace(self) -> InferenceTrace:
        return self._trace

    def requested_output_names(self) -> set[str]:
        return set(self._outputs)

    def preferred_memory(self) -> PreferredMemory:
        return self._preferred_memory or PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)

    def is_cancelled(self) -> bool:
        return False

    def get_response_sender(self) -> InferenceResponseSender:
        raise TritonModelException("a request that a model makes has no response sender")

    def set_release_flags(self, flags: int) -> None:
        raise TritonModelException(f"a request that a model makes has no release flags, such as {flags}")

    def exec(self, decoupled: bool = False) -> Any:
        """Call the model and wait for its response; for a decoupled model return the `ResponseIterator` at once."""
        if decoupled is not False:
            decoupled = truth_of(decoupled, "exec", "decoupled")
        return calls.infer(self._asked(decoupled), decoupled)

    def async_exec(self, decoupled: bool = False) -> "asyncio.Future[Any]":
        """Call the model without blocking the running event loop: a future of the result of `exec`."""
        decoupled = truth_of(decoupled, "async_exec", "decoupled")
        return calls.infer_async(self._asked(decoupled), decoupled)

    def _asked(self, decoupled: bool) -> CoreRequest:
        flags = self._flags or 0
        outputs = self._outputs
        return CoreRequest(
            self._model_name,
            "" if self._model_version == -1 else str(self._model_version),
            self._request_id,
            [tensor._core for tensor in self._inputs or ()],
            tuple(outputs) if len(outputs) < 2 else tuple(dict.fromkeys(outputs)),
            self._parameters,
            0,
            self._timeout,
            self._correlation_id,
            flags & SEQUENCE_START != 0,
            flags & SEQUENCE_END != 0,
            not decoupled,
        )


class ReceivedRequest(InferenceRequest):
    """A request from a client. Its parts are made on access, because most models read only one input."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("hosted", "is_rescheduled", "sender", "session")

    def __init__(self, hosted: HostedRequest, session: Session) -> None:
        self.hosted = hosted
        self.session = session
        self.sender: InferenceResponseSender | None = None
        self.is_rescheduled = False
        self._inputs = None
        self._flags = None

    def inputs(self) -> list[Tensor]:
        inputs = self._inputs
        if inputs is None:
            inputs = self._inputs = [tensor_of(tensor) for tensor in self.hosted.request.inputs]
        return inputs

    def request_id(self) -> str:
        return self.hosted.request.id

    def correlation_id(self) -> int | str:
        return self.hosted.request.sequence_id

    def flags(self) -> int:
        if self._flags is not None:
            return self._flags
        request = self.hosted.request
        return SEQUENCE_START * request.sequence_start | SEQUENCE_END * request.sequence_end

    def timeout(self) -> int:
        return self.hosted.request.timeout_us

    def parameters(self) -> str:
        return parameters_json(self.hosted.request.parameters)

    def trace(self) -> InferenceTrace:
        return _NO_TRACE

    def requested_output_names(self) -> set[str]:
        """The outputs that the client requested; all outputs of the configuration if it named none."""
        return set(wanted_outputs(self))

    def preferred_memory(self) -> PreferredMemory:
        return PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)

    def is_cancelled(self) -> bool:
        return self.session.host.is_cancelled(self.hosted)

    def get_response_sender(self) -> InferenceResponseSender:
        """The request's only sender; each call returns the same one."""
        with self.session.sender_lock:
            if self.sender is None:
                self.sender = InferenceResponseSender(self.session, self.hosted, wanted_outputs(self))
            return self.sender

    def continue_from(self, before: "ReceivedRequest") -> None:
        """Take over the sender of the last execution of this request, which the model may still hold."""
        self.sender = before.sender
        if self.sender is not None:
            self.sender.continue_with(self.hosted)

    def set_release_flags(self, flags: int) -> None:
        self.is_rescheduled = integer_of(flags, "set_release_flags", "flags", 0, (1 << 32) - 1) == RELEASE_RESCHEDULE

    def _asked(self, decoupled: bool) -> CoreRequest:
        """The same request again, as a call of this model itself."""
        flags = self.flags()
        hosted = self.hosted
        # Controls and states are not inputs that a caller sends.
        request = hosted.request
        if isinstance(hosted, Row) and hosted.item is not None:
            request = hosted.item.request
        form = form_of(
            request.model_name, "", forms_of(request.inputs), request.outputs, 0, self.timeout(), not decoupled
        )
        starts, ends = bool(flags & SEQUENCE_START), bool(flags & SEQUENCE_END)
        return CoreRequest.of(form, request.id, request.inputs, request.parameters, request.sequence_id, starts, ends)


# Models that print a request, or its type, see the usual name.
ReceivedRequest.__name__ = ReceivedRequest.__qualname__ = "InferenceRequest"


def wanted_outputs(request: ReceivedRequest) -> tuple[str, ...]:
    return request.hosted.request.outputs or request.session.output_names


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The request's input of this name; None if it has no such input."""
    for tensor in inference_request.inputs():
        if tensor._core.name == name:
            return tensor
    return None
