"""Inference requests and responses as HTTP bodies: JSON, JSON with binary tensors behind it, or one raw tensor.

Texts are Triton's; a client's fault is INVALID_ARG whatever number Triton gives it. Whether the tensors fit the model
is not asked here, except where the answer would come too late: outputs that JSON cannot carry are refused before the
model runs. A document of at most `SMALL_JSON_BYTES` is parsed at once, a larger one in the slices of `json_tensor`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import orjson

from halimede.core.config.model_view import ModelView
from halimede.core.types import (
    DataType,
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    ParameterValue,
    Tensor,
)
from halimede.core.types.datatype import FROM_WIRE
from halimede.core.types.error import clip
from halimede.core.types.tensor import Buffer
from halimede.core.wire.classification import check_classifiable, classify_steps
from halimede.core.wire.forwarding import RESERVED_PREFIX
from halimede.core.wire.json_tensor import (
    BLOCK_BYTES,
    MAX_SKELETON_BYTES,
    Layout,
    Steps,
    array_steps,
    check_depth,
    load_json,
    pack,
    pack_steps,
    print_steps,
    run,
    scan_steps,
)
from halimede.core.wire.raw_tensor import LENGTH_BYTES, byte_size, element_count, take

SMALL_JSON_BYTES = 64 << 10
"""JSON up to this size is decoded in one step."""

JOIN_BYTES = 64 << 10
"""A response up to this size is one chunk; of a larger one, chunks below a quarter of this are joined."""

HALF = (DataType.FP16, DataType.BF16)
"""Datatypes that JSON cannot carry, as in Triton."""

_TEMPLATES = 64
_TEMPLATE_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How one output travels. `classes` is the number of classes wanted, 0 for the tensor itself."""

    binary: bool
    classes: int = 0


JSON = OutputFormat(binary=False)
BINARY = OutputFormat(binary=True)


@dataclass(slots=True)
class ResponseFormat:
    """How the outputs of a response travel: `outputs` for those that the request named, `default` for the others."""

    default: OutputFormat = JSON
    outputs: Mapping[str, OutputFormat] = field(default_factory=dict)

    def of(self, name: str) -> OutputFormat:
        """The format of this output."""
        return self.outputs.get(name, self.default)


ALL_JSON = ResponseFormat()
"""Every output as JSON."""

_ALL_BINARY = ResponseFormat(BINARY)


@dataclass(slots=True)
class DecodedInfer:
    """A request, and how its answer is to be written."""

    request: InferenceRequest
    format: ResponseFormat


@dataclass(slots=True)
class EncodedInfer:
    """A response body as chunks to write in order. `json_length` is set iff binary tensors follow the JSON part."""

    chunks: list[Buffer]
    json_length: int | None


def parse_header_length(text: str, body_length: int) -> int:
    """The value of `Inference-Header-Content-Length`, 0 for a raw request; INVALID_ARG unless the body has as much."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise _invalid(f"Unable to parse 'Inference-Header-Content-Length', got: {clip(text)}")
    # Twenty digits are more than any body has; int() would refuse some thousands.
    length = int(digits) if len(digits) < 20 else body_length + 1
    if length > body_length or (length and text[0] == "-"):
        raise _invalid(f"inference header size should be in range (0, {body_length}), got: {clip(text)}")
    return length


# ---- Requests


def decode_infer(view: ModelView, body: Buffer, header_length: int | None, version: str = "") -> DecodedInfer:
    """Decode a request body; tensors are views of it where they can be.

    `header_length` None means that all of the body is JSON, 0 that all of it is the one input's bytes, n that n bytes
    of JSON come before binary tensors. INVALID_ARG for what is wrong, UNSUPPORTED for shared memory.
    """
    if header_length == 0 or not len(body):
        return _raw_request(view, body, version)
    text, tail = _split(body, header_length)
    if len(text) <= SMALL_JSON_BYTES:
        return decode_small(view, text, tail, version)
    return run(decode_large_steps(view, text, tail, version))


@dataclass(frozen=True, slots=True)
class _Template:
    """All that a JSON part without id and parameters says: everything of a binary request but its tensors' bytes."""

    outputs: tuple[str, ...]
    format: ResponseFormat
    inputs: tuple[tuple[str, DataType, tuple[int, ...], int], ...]
    tail_bytes: int


class InferDecoder:
    """Decodes the requests of one version of a model, with the same results as `decode_infer`.

    Clients that send tensors as binary data send the same JSON part again and again. The parts of at most
    _TEMPLATE_BYTES are remembered, _TEMPLATES of them, as what they came out as.
    """

    def __init__(self, view: ModelView, version: str) -> None:
        self.view = view
        self._version = version
        self.known: dict[bytes, _Template] = {}

    def decode(self, body: Buffer, header_length: int | None) -> DecodedInfer:
        """As `decode_infer`."""
        if not header_length or header_length > _TEMPLATE_BYTES:
            return decode_infer(self.view, body, header_length, self._version)
        text = bytes(body[:header_length])
        template = self.known.get(text)
        if template is None:
            decoded = decode_infer(self.view, body, header_length, self._version)
            self._remember(text, len(body) - header_length, decoded)
            return decoded
        if len(body) - header_length != template.tail_bytes:
            return decode_infer(self.view, body, header_length, self._version)  # It knows what is wrong.
        whole = memoryview(body)
        at = header_length
        inputs = []
        for name, datatype, shape, size in template.inputs:
            inputs.append(Tensor(name, datatype, shape, whole[at : at + size]))
            at += size
        request = InferenceRequest(self.view.name, self._version, "", inputs, template.outputs)
        return DecodedInfer(request, template.format)

    def _remember(self, text: bytes, tail_bytes: int, decoded: DecodedInfer) -> None:
        request = decoded.request
        inputs = tuple((each.name, each.datatype, each.shape, len(each.data)) for each in request.inputs)
        plain = InferenceRequest(self.view.name, self._version, "", request.inputs, request.outputs)
        # Whatever else it says, or data that it has itself, is decoded each time.
        if request != plain or sum(size for *_, size in inputs) != tail_bytes:
            return
        if len(self.known) >= _TEMPLATES:
            self.known.clear()
        self.known[text] = _Template(request.outputs, decoded.format, inputs, tail_bytes)


def decode_infer_steps(
    view: ModelView, body: Buffer, header_length: int | None, version: str = ""
) -> Steps[DecodedInfer]:
    """As `decode_infer`, in steps of at most about 10 ms each."""
    if header_length != 0 and len(body):
        text, tail = _split(body, header_length)
        if len(text) > SMALL_JSON_BYTES:
            return (yield from decode_large_steps(view, text, tail, version))
    return decode_infer(view, body, header_length, version)


def _split(body: Buffer, header_length: int | None) -> tuple[Buffer, memoryview | None]:
    if header_length is None:
        return body, None
    whole = memoryview(body)
    return whole[:header_length], whole[header_length:]


def decode_small(view: ModelView, text: Buffer, tail: memoryview | None, version: str) -> DecodedInfer:
    """Decode a JSON part at once. `tail` is the binary part, None when the request did not say that it has one."""
    raw = bytes(text)
    check_depth(raw)
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError:
        # JSON has no such tokens, but Triton takes them in data: there each array is parsed on its own.
        if b"NaN" in raw or b"Infinity" in raw:
            return run(decode_large_steps(view, raw, tail, version))
        document = load_json(raw)
    decoded = _read_head(document, view, version)
    tensors = decoded.request.inputs
    at = 0
    for item in _member(document, "inputs"):
        name, datatype, shape, source = _read_input(item, tail is not None)
        data: Buffer
        if isinstance(source, list):
            data = pack(name, datatype, element_count(name, datatype, shape, view.name), source)
        else:
            data = take(tail or _NOTHING, at, source, name, view.name)
            at += source
        tensors.append(Tensor(name, datatype, shape, data))
    if tail is not None and at != len(tail):
        raise _extra_data(view)
    check_outputs(view, decoded.request, decoded.format)
    return decoded


def decode_large_steps(
    view: ModelView,
    text: Buffer,
    tail: memoryview | None,
    version: str,
    block_bytes: int = BLOCK_BYTES,
    skeleton_limit: int = MAX_SKELETON_BYTES,
) -> Steps[DecodedInfer]:
    """Decode a JSON part in steps, with the verdict of `decode_small`.

    Beside the data of its inputs and white space the document may have `skeleton_limit` bytes, and one number 64 KiB.
    """
    layout = yield from scan_steps(text, block_bytes, skeleton_limit)
    document = load_json(layout.skeleton)
    data_spans = _data_spans(document)
    yield 0
    yield from _settle_steps(document, layout, memoryview(text), data_spans, skeleton_limit, block_bytes)
    decoded = _read_head(document, view, version)
    tensors = decoded.request.inputs
    at = 0
    for item in _member(document, "inputs"):
        name, datatype, shape, source = _read_input(item, tail is not None)
        data: Buffer
        if isinstance(source, list):
            count = element_count(name, datatype, shape, view.name)
            data = yield from pack_steps(name, datatype, count, text, layout, layout.spans[source[0]], block_bytes)
        else:
            data = take(tail or _NOTHING, at, source, name, view.name)
            at += source
        tensors.append(Tensor(name, datatype, shape, data))
        if len(tensors) % 256 == 0:
            yield 0
    if tail is not None and at != len(tail):
        raise _extra_data(view)
    check_outputs(view, decoded.request, decoded.format)
    return decoded


def _data_spans(document: Any) -> set[int]:
    """Which of the arrays taken out are the data of an input, and so are parsed later and in pieces."""
    placed = [item.get("data") for item in _inputs(document) if isinstance(item, dict)]
    return {place[0] for place in placed if isinstance(place, list)}


def _inputs(document: Any) -> list[Any]:
    """The inputs of a document that may yet turn out to be none."""
    inputs = document.get("inputs") if isinstance(document, dict) else None
    return inputs if isinstance(inputs, list) else []


def _settle_steps(
    document: Any, layout: Layout, view: memoryview, data_spans: set[int], skeleton_limit: int, block_bytes: int
) -> Steps[None]:
    """Parse all arrays that are not data, and put back the shapes: no other array there has a meaning."""
    parsed: dict[int, Any] = {}
    parsed_bytes = len(layout.skeleton)
    for i, (opened, closed) in enumerate(layout.spans):
        if i in data_spans:
            continue
        text = yield from array_steps(view, opened, closed, skeleton_limit - parsed_bytes, block_bytes)
        parsed_bytes += len(text)
        parsed[i] = load_json(text, opened)
        if i % 1024 == 0:
            yield 0
    for item in _inputs(document):
        if isinstance(item, dict) and isinstance(item.get("shape"), list):
            item["shape"] = parsed[item["shape"][0]]


_NOTHING = memoryview(b"")


def _read_head(document: Any, view: ModelView, version: str) -> DecodedInfer:
    """All of a request but its inputs."""
    if type(document) is not dict:
        raise _missing("inputs")
    request = InferenceRequest(view.name, version)
    if "id" in document:
        request.id = _text(document, "id")
    binary = False
    if "parameters" in document:
        binary = _read_parameters(request, _object(document, "parameters"))
    form = _ALL_BINARY if binary else ALL_JSON
    if document.get("outputs", _EMPTY) != _EMPTY:
        form = _read_outputs(request, _member(document, "outputs"), form.default)
    return DecodedInfer(request, form)


_EMPTY: list[Any] = []


def _read_parameters(request: InferenceRequest, parameters: dict[str, Any]) -> bool:
    """Put the reserved parameters where they belong, and return `binary_data_output`."""
    binary = False
    for key, value in parameters.items():
        if key not in _RESERVED_PARAMETERS:
            if key.startswith(RESERVED_PREFIX):
                raise reserved_parameter()
            request.parameters[key] = parameter_value(key, value)
            continue
        match key:
            case "sequence_id":
                request.sequence_id = value if type(value) is str else _unsigned(parameters, key)
            case "sequence_start":
                request.sequence_start = _flag(parameters, key)
            case "sequence_end":
                request.sequence_end = _flag(parameters, key)
            case "priority":
                request.priority = _unsigned(parameters, key)
            case "timeout":
                request.timeout_us = _unsigned(parameters, key)
            case "binary_data_output":
                binary = _flag(parameters, key)
            case _:  # EMPTY_FINAL
                request.parameters[key] = _flag(parameters, key)
    return binary


EMPTY_FINAL = "triton_enable_empty_final_response"
"""The one parameter of its kind that is taken; whoever cannot do as it says refuses it by `reserved_parameter`."""


def reserved_parameter() -> InferenceError:
    """The error for a parameter with a name that is not the model's to read."""
    return _invalid("parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.")


_RESERVED_PARAMETERS = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output", EMPTY_FINAL)
)


def parameter_value(key: str, value: Any) -> ParameterValue:
    """The value of a parameter that is the model's to read; INVALID_ARG where it is none."""
    if isinstance(value, str | float) or (isinstance(value, int) and value < 2**63):
        return value
    if isinstance(value, int):
        raise _invalid(f"parameter '{clip(key)}' is out of range. It should be at most {2**63 - 1}.")
    raise _invalid(f"parameter '{clip(key)}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _read_outputs(request: InferenceRequest, outputs: list[Any], default: OutputFormat) -> ResponseFormat:
    formats: dict[str, OutputFormat] = {}
    names: list[str] = []
    for item in outputs:
        name = _text(item, "name")
        names.append(name)
        # An output that is named takes nothing from `binary_data_output`.
        formats[name] = _output_format(name, _object(item, "parameters")) if "parameters" in item else JSON
    request.outputs = tuple(names)
    return ResponseFormat(default, formats)


def _output_format(name: str, parameters: dict[str, Any]) -> OutputFormat:
    classes = _unsigned(parameters, "classification") if "classification" in parameters else 0
    binary = _flag(parameters, "binary_data") if "binary_data" in parameters else False
    if "shared_memory_region" in parameters:
        for other in ("classification", "binary_data"):
            if other in parameters:
                raise _invalid(f"Output can't set both 'shared_memory_region' and '{other}'")
        raise _no_shared_memory("output", name)
    if classes:
        return OutputFormat(binary, classes)
    return BINARY if binary else JSON


def check_outputs(view: ModelView, request: InferenceRequest, form: ResponseFormat) -> None:
    """Refuse before the model runs what could not be sent after it."""
    if form is _ALL_BINARY or (view.config.backend == "python" and not request.outputs):
        return  # A python model may leave out any output that nobody asks for by name.
    for output in view.config.output:
        if request.outputs and output.name not in form.outputs:
            continue
        wish = form.of(output.name)
        if wish.classes:
            check_classifiable(output.name, output.data_type)
        elif not wish.binary and output.data_type in HALF:
            raise half_output(output.name, output.data_type)


def _read_input(item: Any, has_header: bool) -> tuple[str, DataType, tuple[int, ...], list[Any] | int]:
    """Name, datatype, shape, and either the data as parsed or its size in the binary part."""
    name = _text(item, "name")
    datatype = FROM_WIRE.get(_text(item, "datatype"))
    if datatype is None:
        raise _invalid(f"invalid datatype for input {clip(name)}")
    shape = tuple(_member(item, "shape"))
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise _wrong_type("shape", "unsigned-integer")
    parameters = _object(item, "parameters") if "parameters" in item else {}
    if "binary_data_size" in parameters and "data" not in item and "shared_memory_region" not in parameters:
        if not has_header:
            raise _invalid(
                "must specify valid 'Infer-Header-Content-Length' in request header and 'binary_data_size' when passing"
                " inputs in binary data format"
            )
        return name, datatype, shape, _unsigned(parameters, "binary_data_size")
    fields = [
        field_text
        for present, field_text in (
            ("data" in item, " 'data'"),
            ("binary_data_size" in parameters, " 'binary_data_size' in 'parameters'"),
            ("shared_memory_region" in parameters, " 'shared_memory_region' in 'parameters'"),
        )
        if present
    ]
    if len(fields) != 1:
        raise _invalid(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
            f" 'shared_memory_region' in 'parameters'. But{' set' + ''.join(fields) if fields else ' no field is set'}"
        )
    if "data" not in item:
        raise _no_shared_memory("input", name)
    if datatype in HALF:
        raise half_input(name, datatype)
    return name, datatype, shape, _member(item, "data")


def _raw_request(view: ModelView, body: Buffer, version: str) -> DecodedInfer:
    """The request whose body is all that there is of a model's only input: batch 1, one dimension may be open."""
    config = view.config
    if len(config.input) != 1:
        raise _unidentified(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(config.input)} inputs in"
            f" '{view.name}' model configuration"
        )
    only = config.input[0]
    datatype = only.data_type
    open_dims = [at for at, dim in enumerate(only.dims) if dim < 0]
    if len(open_dims) > 1:
        raise _unidentified(
            f"The shape of the raw input '{only.name}' can not be deduced because there are more than one"
            " variable-sized dimension"
        )
    dims = list(only.dims)
    if datatype is DataType.BYTES:
        if open_dims or prod(dims) != 1:
            raise _unidentified(f"For BYTE datatype raw input '{only.name}', the model must have input shape [1]")
        body = b"".join((len(body).to_bytes(LENGTH_BYTES, "little"), body))
    elif open_dims:
        row_bytes = prod(dim for dim in dims if dim >= 0) * datatype.itemsize
        dims[open_dims[0]] = len(body) // row_bytes
    shape = (1, *dims) if config.max_batch_size > 0 else tuple(dims)
    if datatype is not DataType.BYTES and byte_size(datatype, shape) != len(body):
        raise _unidentified(
            f"input byte size mismatch for input 'raw_input' for model '{view.name}'. Expected"
            f" {byte_size(datatype, shape)}, got {len(body)}"
        )
    request = InferenceRequest(view.name, version, inputs=[Tensor(only.name, datatype, shape, memoryview(body))])
    return DecodedInfer(request, _ALL_BINARY)


# ---- Access to members, with Triton's texts


def _invalid(message: str) -> InferenceError:
    return InferenceError(ErrorCode.INVALID_ARG, message)


def _unidentified(message: str) -> InferenceError:
    return _invalid(f"[request id: <id_unknown>] {message}")


def _missing(key: str) -> InferenceError:
    return _invalid(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")


def _wrong_type(key: str, kind: str) -> InferenceError:
    return _invalid(f"Unable to parse '{key}': attempt to access JSON non-{kind} as {kind}")


def _text(item: Any, key: str) -> str:
    if type(item) is not dict or key not in item:
        raise _missing(key)
    value = item[key]
    if type(value) is not str:
        raise _wrong_type(key, "string")
    return value


def _member(item: dict[str, Any], key: str) -> list[Any]:
    if key not in item:
        raise _missing(key)
    value = item[key]
    if type(value) is not list:
        raise _wrong_type(key, "array")
    return value


def _object(item: dict[str, Any], key: str) -> dict[str, Any]:
    value = item[key]
    if type(value) is not dict:
        raise _wrong_type(key, "object")
    return value


def _unsigned(item: dict[str, Any], key: str) -> int:
    value = item[key]
    if type(value) is not int or value < 0:
        raise _wrong_type(key, "unsigned-integer")
    return value


def _flag(item: dict[str, Any], key: str) -> bool:
    value = item[key]
    if type(value) is not bool:
        raise _wrong_type(key, "boolean")
    return value


def _no_shared_memory(kind: str, name: str) -> InferenceError:
    return InferenceError(
        ErrorCode.UNSUPPORTED,
        f"parameter 'shared_memory_region' of {kind} '{clip(name)}': shared memory is not available yet,"
        " tensors must be sent in the message",
    )


def _extra_data(view: ModelView) -> InferenceError:
    return _invalid(f"unexpected additional input data for model '{view.name}'")


def half_input(name: str, datatype: DataType) -> InferenceError:
    """The error for an input that JSON cannot carry."""
    return _invalid(
        f"receiving {datatype.name} data via JSON is not supported. Please use the binary data format for input"
        f" {clip(name)}"
    )


def half_output(name: str, datatype: DataType) -> InferenceError:
    """The error for an output that JSON cannot carry."""
    return _invalid(
        f"sending {datatype.name} data via JSON is not supported. Please use the binary data format for output"
        f" {clip(name)}"
    )


# ---- Responses


def encode_infer(response: InferenceResponse, format: ResponseFormat, view: ModelView) -> EncodedInfer:  # noqa: A002
    """Write a response that has no error. INVALID_ARG for outputs that cannot be sent in the format asked for."""
    if len(response.outputs) == 1 and not response.id and not response.parameters:
        sole = response.outputs[0]
        if format.of(sole.name) is BINARY:
            data = sole.data
            head = _sole_binary_json(
                response.model_name, response.model_version, sole.name, sole.datatype, sole.shape, len(data)
            )
            return EncodedInfer([head, data], len(head))
    return run(encode_infer_steps(response, format, view))


def encode_infer_steps(
    response: InferenceResponse,
    format: ResponseFormat,  # noqa: A002
    view: ModelView,
) -> Steps[EncodedInfer]:
    """As `encode_infer`, in steps of at most about 10 ms each."""
    head = _model_json(response.model_name, response.model_version)
    head = b'{"id":%b,%b' % (orjson.dumps(response.id), head) if response.id else b"{" + head
    if response.parameters:
        head = b'%b,"parameters":%b' % (head, parameters_json(response, response.parameters))
    chunks: list[Buffer] = [head, b',"outputs":[']
    tails: list[Buffer] = []
    has_binary = False
    for number, answer in enumerate(response.outputs):
        wish = format.of(answer.name)
        output = answer
        if wish.classes:
            labels = view.labels.get(answer.name, ())
            output = yield from classify_steps(answer, wish.classes, labels, view.config.max_batch_size > 0)
        if number:
            chunks.append(b",")
        chunks.append(_output_json(output.name, output.datatype, output.shape))
        if wish.binary:
            has_binary = True
            chunks.append(b',"parameters":{"binary_data_size":%d}}' % len(output.data))
            tails.append(output.data)
            continue
        if output.datatype in HALF:
            raise half_output(output.name, output.datatype)
        chunks.append(b',"data":')
        chunks += yield from print_steps(output)
        chunks.append(b"}")
    chunks.append(b"]}")
    json_length = sum(map(len, chunks)) if has_binary else None
    return EncodedInfer(join_chunks(chunks + tails), json_length)


@lru_cache(maxsize=1024)
def _model_json(name: str, version: str) -> bytes:
    return b'"model_name":%b,"model_version":%b' % (orjson.dumps(name), orjson.dumps(version))


@lru_cache(maxsize=1024)
def _output_json(name: str, datatype: DataType, shape: tuple[int, ...]) -> bytes:
    return b'{"name":%b,"datatype":"%b","shape":%b' % (
        orjson.dumps(name),
        datatype.name.encode(),
        orjson.dumps(shape),
    )


@lru_cache(maxsize=1024)
def _sole_binary_json(
    model: str, version: str, name: str, datatype: DataType, shape: tuple[int, ...], size_bytes: int
) -> bytes:
    """The JSON part of a response that is one binary tensor: answers to like requests differ in its bytes alone."""
    return b'{%b,"outputs":[%b,"parameters":{"binary_data_size":%d}}]}' % (
        _model_json(model, version),
        _output_json(name, datatype, shape),
        size_bytes,
    )


def parameters_json(response: InferenceResponse, value: object) -> bytes:
    """The parameters of a response, or one of their values; INTERNAL where the model gave what JSON cannot say."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise InferenceError(
            ErrorCode.INTERNAL, f"parameters of a response of model '{response.model_name}' are not JSON: {error}"
        ) from None


def join_chunks(chunks: list[Buffer]) -> list[Buffer]:
    """The chunks with runs of small ones joined; large ones stay as they are."""
    if sum(map(len, chunks)) <= JOIN_BYTES:
        return [b"".join(chunks)]
    joined: list[Buffer] = []
    small: list[Buffer] = []
    for chunk in chunks:
        if len(chunk) < JOIN_BYTES // 4:
            small.append(chunk)
            continue
        if small:
            joined.append(b"".join(small))
            small = []
        joined.append(chunk)
    if small:
        joined.append(b"".join(small))
    return joined
