"""Read requests of ModelInfer and ModelStreamInfer.

Inputs come either all in `raw_input_contents`, one entry per input in order, or each in its own typed `contents`. This
module does not check whether the tensors fit the model. Client data in error texts is clipped.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from halimede.core.config.check_request import RequestChecker, too_many_elements
from halimede.core.types import DataType, InferenceError, InferenceRequest, RegionSlice, Tensor
from halimede.core.types.datatype import FROM_WIRE
from halimede.core.types.error import clip, invalid
from halimede.core.types.tensor import Buffer
from halimede.core.wire.destinations import ALL_BINARY, BINARY, Destination, Destinations, Inline
from halimede.core.wire.grpc_large import CONTENTS_DATATYPES, LARGE_BYTES, read_contents, read_large
from halimede.core.wire.protocol import ModelInferRequest, ProtoMessage, parse
from halimede.core.wire.raw_tensor import shape_text
from halimede.core.wire.shared_memory import REGION_PARAMETERS, read_region, resolve
from halimede.core.wire.steps import Steps, run

MAX_ENTRIES = 4096
"""Maximum number of inputs, outputs or parameters of one request."""

# The field of `contents` for the elements of each datatype; FP16 and BF16 have none.
_CONTENTS_FIELD = {
    DataType.BOOL: "bool_contents",
    DataType.INT8: "int_contents",
    DataType.INT16: "int_contents",
    DataType.INT32: "int_contents",
    DataType.INT64: "int64_contents",
    DataType.UINT8: "uint_contents",
    DataType.UINT16: "uint_contents",
    DataType.UINT32: "uint_contents",
    DataType.UINT64: "uint64_contents",
    DataType.FP32: "fp32_contents",
    DataType.FP64: "fp64_contents",
    DataType.BYTES: "bytes_contents",
}


@dataclass(slots=True)
class InferCall:
    """A decoded request, and where its outputs go.

    `wants_empty_final` requests a last message without content if a decoupled model sends no further responses.
    """

    request: InferenceRequest
    destinations: Destinations
    wants_empty_final: bool = False


class InferMessage:
    """A ModelInferRequest whose model is known, and which is not decoded yet.

    `in_steps` means that `decode` may take more than some milliseconds: then use `decode_steps`. Either may be called
    once.
    """

    __slots__ = ("_call", "_contents", "_message", "_raws", "id", "in_steps", "model_name", "model_version")

    model_name: str
    model_version: str
    id: str

    def __init__(
        self, message: ProtoMessage, raws: Sequence[Buffer], contents: Mapping[int, list[memoryview]] | None = None
    ) -> None:
        self.model_name = message.model_name
        self.model_version = message.model_version
        self.id = message.id
        self.in_steps = bool(contents)
        self._message = message
        self._raws = raws
        self._contents = contents or {}
        self._call: InferCall | None = None

    @classmethod
    def of_call(cls, call: InferCall) -> Self:
        """A message that is decoded already."""
        self = cls.__new__(cls)
        form = call.request.form
        self.model_name, self.model_version, self.id = form.model_name, form.model_version, call.request.id
        self.in_steps = False
        self._call = call
        return self

    def decode(self) -> InferCall:
        """The request and the destinations of its outputs.

        INVALID_ARG if no model could accept it, UNSUPPORTED for shared memory, INTERNAL for invalid contents.
        """
        if self._call is not None:
            return self._call
        return run(self.decode_steps()) if self.in_steps else _decode(self._message, self._raws, ())

    def decode_steps(self, checker: RequestChecker | None = None) -> Steps[InferCall]:
        """As `decode`, in steps of some milliseconds.

        An input whose datatype or shape `checker` does not accept is refused before its data is decoded.
        """
        call = _decode(self._message, self._raws, self._contents)
        if self._raws:
            return call
        request = call.request
        if checker is not None:
            for at in self._contents:
                checker.check_declared(request.id, request.inputs[at])
        for at, parts in self._contents.items():
            tensor = request.inputs[at]
            announced = _Announced(tensor, request.model_name, request.id, prod(tensor.shape))
            tensor.data = yield from read_contents(parts, announced)
        return call


def read_infer(raw: Buffer) -> InferMessage:
    """Read a ModelInferRequest, however large, in some milliseconds: as much as the look-up of its model needs.

    The result and the tensors refer to `raw`, which must not change. INTERNAL if it is no valid message.
    """
    if len(raw) <= LARGE_BYTES:
        message = parse(ModelInferRequest, raw if isinstance(raw, bytes) else bytes(raw))
        return InferMessage(message, message.raw_input_contents)
    large = read_large(raw)
    return InferMessage(large.message, large.raws, large.contents)


def _decode(message: ProtoMessage, raws: Sequence[Buffer], large: Container[int]) -> InferCall:
    """The contents of inputs at the positions in `large` are not read."""
    # Each access to a field of a message is a call: none is made twice here.
    tensors, wanted, parameters = message.inputs, message.outputs, message.parameters
    if len(tensors) > MAX_ENTRIES or len(wanted) > MAX_ENTRIES or len(parameters) > MAX_ENTRIES:
        raise _too_many(inputs=tensors, outputs=wanted, parameters=parameters)
    model_name, request_id = message.model_name, message.id
    fields: dict[str, Any] = {}
    wants_empty_final = _read_parameters(fields, parameters) if parameters else False
    if len(raws) > len(tensors):
        raise invalid(
            f"expected {len(tensors)} entries in raw_input_contents, one per input, but got {len(raws)} for model"
            f" '{clip(model_name)}'"
        )
    inputs: list[Tensor] = []
    for at, tensor in enumerate(tensors):
        name = tensor.name
        datatype = FROM_WIRE.get(tensor.datatype)
        if datatype is None:
            raise invalid(
                f"invalid datatype for input {clip(name)}: '{clip(tensor.datatype)}' is none of {', '.join(FROM_WIRE)}"
            )
        shape = tuple(tensor.shape)
        if shape and min(shape) < 0:
            raise invalid(
                f"[request id: {clip(request_id) or '<id_unknown>'}] All input dimensions should be specified for input"
                f" '{clip(name)}' for model '{clip(model_name)}', got {shape_text(shape)}"
            )
        if tensor.parameters and (region := _region_parameters(tensor)):
            resolve("input", name, read_region("input", name, region))
        if not raws:
            is_large = at in large and tensor.HasField("contents")
            data = b"" if is_large else _typed_data(tensor, datatype, model_name, request_id)
        elif tensor.HasField("contents"):
            raise invalid(
                "contents field must not be specified when using raw_input_contents for"
                f" '{clip(name)}' for model '{clip(model_name)}'"
            )
        elif at < len(raws):
            data = raws[at]
        else:
            raise _no_data(name, model_name)
        inputs.append(Tensor(name, datatype, shape, data))
    destinations = ALL_BINARY
    if wanted:
        fields["outputs"] = tuple([output.name for output in wanted])
        classified: dict[str, Inline] = {}
        for output in wanted:
            if output.parameters:
                destination = _read_destination(output)
                if isinstance(destination, RegionSlice):
                    resolve("output", output.name, destination)
                if destination.classes:
                    classified[output.name] = destination
        if classified:
            destinations = Destinations(BINARY, classified)
    request = InferenceRequest(model_name, message.model_version, request_id, inputs, **fields)
    return InferCall(request, destinations, wants_empty_final)


def _read_parameters(fields: dict[str, Any], parameters: Mapping[str, ProtoMessage]) -> bool:
    """Put the parameters into the fields, and return whether an empty final response is wanted."""
    wants_empty_final = False
    others = fields["parameters"] = {}
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        match key:
            case "sequence_id":
                if kind == "int64_param":
                    # Ids are unsigned, but this field is signed: ids from 2^63 on arrive as negative numbers.
                    fields[key] = parameter.int64_param % 2**64
                elif kind == "string_param":
                    fields[key] = parameter.string_param
                else:
                    raise _wrong_type(key, "int64_param or string_param.")
            case "sequence_start" | "sequence_end":
                fields[key] = _flag(key, parameter, kind)
            case "priority":
                if kind not in ("int64_param", "uint64_param"):
                    raise _wrong_type(key, "int64_param or uint64_param.")
                fields[key] = _not_negative(key, getattr(parameter, kind))
            case "timeout":
                if kind != "int64_param":
                    raise _wrong_type(key, "int64_param.")
                fields["timeout_us"] = _not_negative(key, parameter.int64_param)
            case "triton_enable_empty_final_response":
                wants_empty_final = _flag(key, parameter, kind)
            case "binary_data_output":
                pass  # asks for the form that every response here has
            case _ if key.startswith("triton_"):
                raise invalid(
                    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys"
                    " starting with 'triton_' are allowed: triton_enable_empty_final_response"
                )
            case _:
                if kind is None or kind == "uint64_param":
                    raise _wrong_type(key, "int64_param, bool_param, or string_param.")
                others[key] = getattr(parameter, kind)
    return wants_empty_final


def _read_destination(output: ProtoMessage) -> Destination:
    if region := _region_parameters(output):
        return read_region("output", output.name, region)
    if "classification" not in output.parameters:
        return BINARY
    classes = output.parameters["classification"]
    if classes.WhichOneof("parameter_choice") != "int64_param":
        raise _wrong_type("classification", "int64_param")
    if classes.int64_param <= 0:
        raise invalid("invalid value for 'classification' parameter, expected >= 0")
    return Inline(binary=True, classes=classes.int64_param)


def _region_parameters(tensor: ProtoMessage) -> dict[str, object]:
    """The parameters of a tensor that describe shared memory, each with the value of whichever field it has."""
    return {key: _value(tensor.parameters[key]) for key in REGION_PARAMETERS if key in tensor.parameters}


def _value(parameter: ProtoMessage) -> object:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


def _typed_data(message: ProtoMessage, datatype: DataType, model_name: str, request_id: str) -> Buffer:
    """The data of an input in typed `contents`."""
    if not message.HasField("contents"):
        raise _no_data(message.name, model_name)
    encoded = memoryview(message.contents.SerializeToString())
    tensor = Tensor(message.name, datatype, (), b"")
    # No element takes less than a byte. Few are counted when the request is checked.
    return run(read_contents((encoded,), _Announced(tensor, model_name, request_id, len(encoded))))


@dataclass(frozen=True, slots=True)
class _Announced:
    """What a request says of an input: see `grpc_large.Announced`."""

    tensor: Tensor
    model_name: str
    request_id: str
    most: int

    @property
    def field(self) -> str:
        return _CONTENTS_FIELD.get(self.tensor.datatype, "")

    def convert(self, elements: NDArray[Any]) -> NDArray[Any]:
        datatype = self.tensor.datatype
        if datatype is CONTENTS_DATATYPES[self.field]:
            return elements
        limits = np.iinfo(datatype.name.lower())
        outside = (elements < limits.min) | (elements > limits.max)
        if outside.any():
            text = f"value {elements[outside][0]} of input tensor '{clip(self.tensor.name)}' for model"
            raise invalid(
                f"{text} '{clip(self.model_name)}' is outside the range of its datatype '{datatype.name}',"
                f" {limits.min} to {limits.max}"
            )
        return elements.astype(datatype.dtype)

    def wrong_field(self, field: str) -> InferenceError:
        return invalid(
            f"unexpected explicit tensor data for input tensor '{clip(self.tensor.name)}' for model"
            f" '{clip(self.model_name)}' of type '{CONTENTS_DATATYPES[field].name}', expected datatype"
            f" '{self.tensor.datatype.name}'"
        )

    def too_many(self) -> InferenceError:
        return too_many_elements(self.model_name, self.request_id, self.tensor)


def _flag(key: str, parameter: ProtoMessage, kind: str | None) -> bool:
    if kind != "bool_param":
        raise _wrong_type(key, "bool_param.")
    return bool(parameter.bool_param)


def _not_negative(key: str, value: int) -> int:
    if value < 0:
        raise invalid(f"invalid value for '{key}', expected value >= 0.")
    return value


def _too_many(**entries: Sequence[object]) -> InferenceError:
    name = next(name for name, values in entries.items() if len(values) > MAX_ENTRIES)
    return invalid(f"request has {len(entries[name])} {name}, at most {MAX_ENTRIES} are taken")


def _wrong_type(key: str, expected: str) -> InferenceError:
    return invalid(f"invalid value type for '{clip(key)}' parameter, expected {expected}")


def _no_data(name: str, model: str) -> InferenceError:
    return invalid(f"unable to find data for input tensor '{clip(name)}' for model '{clip(model)}' in request.")
