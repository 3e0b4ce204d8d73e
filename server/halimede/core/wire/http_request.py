"""Inference requests as HTTP bodies: JSON, JSON with binary tensors behind it, or one raw tensor.

Texts are Triton's; a client's mistake is INVALID_ARG, also if Triton uses another code. This module does not check
whether the tensors fit the model, with one exception: outputs that JSON cannot represent are refused before the model
runs. A document of at most `SMALL_JSON_BYTES` is parsed at once, a larger one in the slices of `json_scan`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import orjson

from halimede.core.config.check_request import RequestChecker
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, InferenceError, InferenceRequest, RegionSlice, RequestForm, Tensor, invalid
from halimede.core.types.datatype import FROM_WIRE
from halimede.core.types.error import clip
from halimede.core.types.request import InputForm
from halimede.core.types.tensor import Buffer
from halimede.core.wire.destinations import ALL_BINARY, ALL_JSON, BINARY, JSON, Destination, Destinations, Inline
from halimede.core.wire.forwarding import RESERVED_PREFIX
from halimede.core.wire.json_access import (
    array_member,
    flag_member,
    missing,
    object_member,
    parameter_value,
    shape_member,
    text_member,
    unsigned_member,
    without_mark,
)
from halimede.core.wire.json_array import pack, pack_steps
from halimede.core.wire.json_limits import HALF, check_outputs, half_input
from halimede.core.wire.json_scan import BLOCK_BYTES, MAX_SKELETON_BYTES, check_depth, load_json, scan_steps
from halimede.core.wire.raw_tensor import LENGTH_BYTES, byte_size, element_count, take
from halimede.core.wire.shared_memory import REGION, read_region, resolve
from halimede.core.wire.steps import Steps, run

SMALL_JSON_BYTES = 64 << 10
"""JSON up to this size is decoded in one step."""

_TEMPLATES = 64
_TEMPLATE_BYTES = 1 << 10


@dataclass(slots=True)
class DecodedInfer:
    """A request, and where its outputs go."""

    request: InferenceRequest
    destinations: Destinations


def parse_header_length(text: str, body_length: int) -> int:
    """The value of `Inference-Header-Content-Length`, 0 for a raw request; INVALID_ARG if the body is shorter."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise invalid(f"Unable to parse 'Inference-Header-Content-Length', got: {clip(text)}")
    # No body has a length of twenty digits. int() would raise an error for thousands of digits.
    length = int(digits) if len(digits) < 20 else body_length + 1
    if length > body_length or (length and text[0] == "-"):
        raise invalid(f"inference header size should be in range (0, {body_length}), got: {clip(text)}")
    return length


def decode_infer(view: ModelView, body: Buffer, header_length: int | None, version: str = "") -> DecodedInfer:
    """Decode a request body; tensors are views of it if possible.

    `header_length` None means that all of the body is JSON, 0 that all of it is the one input's bytes, n that n bytes
    of JSON come before binary tensors. INVALID_ARG for an invalid body, UNSUPPORTED for shared memory.
    """
    if header_length == 0 or not len(body):
        return _raw_request(view, body, version)
    text, tail = _split(body, header_length)
    if len(text) <= SMALL_JSON_BYTES:
        return decode_small(view, text, tail, version)
    return run(decode_large_steps(view, text, tail, version))


_VARYING = re.compile(rb'\{(?:"id":"([ !#-\[\]-~]*)",)?(?:"parameters":\{"sequence_id":([1-9][0-9]{0,18})(?=[,}]))?')
"""The beginning of a JSON part as Triton's clients write it: only the id and the sequence's number vary."""


@dataclass(frozen=True, slots=True)
class _Template:
    """What a JSON part contains besides what varies: a binary request without the bytes of its tensors."""

    form: RequestForm
    destinations: Destinations
    has_sequence: bool
    sequence_start: bool
    sequence_end: bool
    inputs: tuple[tuple[InputForm, int], ...]
    tail_bytes: int


class InferDecoder:
    """Decodes the requests of one version of a model, with the same results as `decode_infer`.

    Clients that send tensors as binary data send the same JSON part again and again, perhaps with another id and
    another sequence. The decoder remembers parts of at most _TEMPLATE_BYTES, at most _TEMPLATES of them.
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
        request_id, sequence = "", 0
        template = self.known.get(text)
        if template is None:
            text, request_id, sequence = _without_varying(text)
            template = self.known.get(text)
        # Without the number of its sequence a part is no JSON, but a client may send it.
        if template is None or template.has_sequence != bool(sequence):
            decoded = decode_infer(self.view, body, header_length, self._version)
            self._remember(text, request_id, sequence, len(body) - header_length, decoded)
            return decoded
        if len(body) - header_length != template.tail_bytes:
            return decode_infer(self.view, body, header_length, self._version)  # This finds the error.
        whole = memoryview(body)
        at = header_length
        inputs = []
        for (name, datatype, shape), size in template.inputs:
            inputs.append(Tensor(name, datatype, shape, whole[at : at + size]))
            at += size
        request = InferenceRequest.of(
            template.form, request_id, inputs, {}, sequence, template.sequence_start, template.sequence_end
        )
        return DecodedInfer(request, template.destinations)

    def _remember(self, text: bytes, request_id: str, sequence: int, tail_bytes: int, decoded: DecodedInfer) -> None:
        """Remember a part without what varies. `request_id` and `sequence` are what it had."""
        request = decoded.request
        sizes = tuple([len(each.data) for each in request.inputs])
        # A part with other parameters or with data is decoded each time, and one that has a varying key twice. So is a
        # part with a timeout, which may be what is left of the client's own and differ each time.
        if request.parameters or request.form.timeout_us or (request.id, request.sequence_id) != (request_id, sequence):
            return
        if sum(sizes) != tail_bytes:
            return
        if text.count(b'"id"') > 1 or text.count(b"sequence_id") > 1 or b"\\" in text:
            return
        if len(self.known) >= _TEMPLATES:
            self.known.clear()
        self.known[text] = _Template(
            *(request.form, decoded.destinations, sequence > 0, request.sequence_start, request.sequence_end),
            *(tuple(zip(request.form.inputs, sizes, strict=True)), tail_bytes),
        )


def _without_varying(text: bytes) -> tuple[bytes, str, int]:
    """A JSON part without its id and the number of its sequence, and these; "" and 0 if it has none."""
    found = _VARYING.match(text)
    if found is None or found.lastindex is None:
        return text, "", 0
    request_id, sequence = found.groups()
    rest = text if sequence is None else text[: found.start(2)] + text[found.end(2) :]
    if request_id is None:
        return rest, "", int(sequence)
    return rest[: found.start(1)] + rest[found.end(1) :], request_id.decode(), int(sequence or 0)


def decode_infer_steps(
    view: ModelView, body: Buffer, header_length: int | None, version: str = "", checker: RequestChecker | None = None
) -> Steps[DecodedInfer]:
    """As `decode_infer`, in steps of at most about 10 ms each. For `checker` see `decode_large_steps`."""
    if header_length != 0 and len(body):
        text, tail = _split(body, header_length)
        if len(text) > SMALL_JSON_BYTES:
            return (yield from decode_large_steps(view, text, tail, version, checker=checker))
    return decode_infer(view, body, header_length, version)


def _split(body: Buffer, header_length: int | None) -> tuple[Buffer, memoryview | None]:
    if header_length is None:
        return without_mark(body), None
    whole = memoryview(body)
    return without_mark(whole[:header_length]), whole[header_length:]


def decode_small(view: ModelView, text: Buffer, tail: memoryview | None, version: str) -> DecodedInfer:
    """Decode a JSON part at once. `tail` is the binary part, None if the request has no header length."""
    raw = bytes(text)
    check_depth(raw)
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError:
        # JSON has no such tokens, but Triton accepts them in data. `decode_large_steps` parses data separately.
        if b"NaN" in raw or b"Infinity" in raw:
            return run(decode_large_steps(view, raw, tail, version))
        document = load_json(raw)
    fields, destinations = _read_head(document)
    tensors: list[Tensor] = []
    at = 0
    for item in array_member(document, "inputs"):
        name, datatype, shape, source = _read_input(item, tail is not None)
        data: Buffer
        if isinstance(source, int):
            data = take(tail or _NOTHING, at, source, name, view.name)
            at += source
        elif isinstance(source, list):
            data = pack(name, datatype, element_count(name, datatype, shape, view.name), source)
        else:
            resolve("input", name, source)
        tensors.append(Tensor(name, datatype, shape, data))
    if tail is not None and at != len(tail):
        raise _extra_data(view)
    return _decoded(InferenceRequest(view.name, version, inputs=tensors, **fields), destinations, view)


def decode_large_steps(
    view: ModelView,
    text: Buffer,
    tail: memoryview | None,
    version: str,
    block_bytes: int = BLOCK_BYTES,
    skeleton_limit: int = MAX_SKELETON_BYTES,
    checker: RequestChecker | None = None,
) -> Steps[DecodedInfer]:
    """Decode a JSON part in steps, with the same result as `decode_small`.

    An input whose datatype or shape `checker` does not accept is refused before its data is decoded. Apart from the
    data of its inputs and white space the document may have `skeleton_limit` bytes. A number may have at most 64 KiB.
    """
    layout = yield from scan_steps(text, block_bytes, skeleton_limit)
    document = load_json(layout.skeleton)
    yield 0
    for item in _inputs(document):
        if isinstance(item, dict):
            if isinstance(shape := item.get("shape"), list):
                item["shape"] = yield from layout.parse_steps(shape[0])
            if isinstance(reference := item.get("data"), list):
                layout.unread.discard(reference[0])
    yield from layout.rest_steps()
    fields, destinations = _read_head(document)
    tensors: list[Tensor] = []
    at = 0
    for item in array_member(document, "inputs"):
        name, datatype, shape, source = _read_input(item, tail is not None)
        data: Buffer
        if isinstance(source, int):
            data = take(tail or _NOTHING, at, source, name, view.name)
            at += source
        elif isinstance(source, list):
            count = element_count(name, datatype, shape, view.name)
            if checker is not None:
                checker.check_declared(fields.get("id", ""), Tensor(name, datatype, shape, b""))
            data = yield from pack_steps(name, datatype, count, layout, source[0])
        else:
            resolve("input", name, source)
        tensors.append(Tensor(name, datatype, shape, data))
        if len(tensors) % 256 == 0:
            yield 0
    if tail is not None and at != len(tail):
        raise _extra_data(view)
    return _decoded(InferenceRequest(view.name, version, inputs=tensors, **fields), destinations, view)


def _decoded(request: InferenceRequest, destinations: Destinations, view: ModelView) -> DecodedInfer:
    check_outputs(view, request, destinations)
    return DecodedInfer(request, destinations)


def _inputs(document: Any) -> list[Any]:
    """The inputs of a document that is not checked yet, empty if it has no array of them."""
    inputs = document.get("inputs") if isinstance(document, dict) else None
    return inputs if isinstance(inputs, list) else []


_NOTHING = memoryview(b"")


def _read_head(document: Any) -> tuple[dict[str, Any], Destinations]:
    """Read everything of a request except its inputs: arguments of `InferenceRequest`, and where its outputs go."""
    if type(document) is not dict:
        raise missing("inputs")
    fields: dict[str, Any] = {}
    if "id" in document:
        fields["id"] = text_member(document, "id")
    binary = False
    if "parameters" in document:
        binary = _read_parameters(fields, object_member(document, "parameters"))
    destinations = ALL_BINARY if binary else ALL_JSON
    if document.get("outputs", _EMPTY) != _EMPTY:
        destinations = _read_outputs(fields, array_member(document, "outputs"), destinations.default)
    return fields, destinations


_EMPTY: list[Any] = []


def _read_parameters(fields: dict[str, Any], parameters: dict[str, Any]) -> bool:
    """Put the parameters into the fields, and return `binary_data_output`."""
    binary = False
    others = fields["parameters"] = {}
    for key, value in parameters.items():
        if (reserved := _FIELDS.get(key)) is not None:
            field, read = reserved
            fields[field] = read(parameters, key)
        elif key == "binary_data_output":
            binary = flag_member(parameters, key)
        elif key == EMPTY_FINAL and type(value) is bool:
            others[key] = value
        elif key.startswith(RESERVED_PREFIX):
            raise reserved_parameter()
        else:
            others[key] = parameter_value(key, value)
    return binary


def _sequence_member(parameters: dict[str, Any], key: str) -> int | str:
    value = parameters[key]
    return value if type(value) is str else unsigned_member(parameters, key)


_FIELDS: dict[str, tuple[str, Callable[[dict[str, Any], str], bool | int | str]]] = {
    "sequence_id": ("sequence_id", _sequence_member),
    "sequence_start": ("sequence_start", flag_member),
    "sequence_end": ("sequence_end", flag_member),
    "priority": ("priority", unsigned_member),
    "timeout": ("timeout_us", unsigned_member),
}
"""Parameters that are fields of a request: the field, and what reads it."""


EMPTY_FINAL = "triton_enable_empty_final_response"
"""The only accepted parameter with the reserved prefix. Only responses as events honour it."""


def reserved_parameter() -> InferenceError:
    """The error for a parameter whose name has the reserved prefix."""
    return invalid("parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.")


def _read_outputs(fields: dict[str, Any], outputs: list[Any], default: Inline) -> Destinations:
    inline: dict[str, Inline] = {}
    names: list[str] = []
    for item in outputs:
        name = text_member(item, "name")
        names.append(name)
        # `binary_data_output` is for outputs that are not named.
        if "parameters" not in item:
            inline[name] = JSON
            continue
        destination = _read_destination(name, object_member(item, "parameters"))
        if isinstance(destination, RegionSlice):
            resolve("output", name, destination)
        inline[name] = destination
    fields["outputs"] = tuple(names)
    return Destinations(default, inline)


def _read_destination(name: str, parameters: dict[str, Any]) -> Destination:
    classes = unsigned_member(parameters, "classification") if "classification" in parameters else 0
    binary = flag_member(parameters, "binary_data") if "binary_data" in parameters else False
    if REGION in parameters:
        # Clients also send the values that mean neither.
        for other, is_set in (("classification", classes), ("binary_data", binary)):
            if is_set:
                raise invalid(f"Output can't set both '{REGION}' and '{other}'")
        return read_region("output", name, parameters)
    if classes:
        return Inline(binary, classes)
    return BINARY if binary else JSON


_Source = int | list[Any] | RegionSlice
"""The data of an input: its size in the binary part, the array as parsed, or a slice of shared memory."""


def _read_input(item: Any, has_header: bool) -> tuple[str, DataType, tuple[int, ...], _Source]:
    """Name, datatype, shape and data."""
    name = text_member(item, "name")
    datatype = FROM_WIRE.get(text_member(item, "datatype"))
    if datatype is None:
        raise invalid(f"invalid datatype for input {clip(name)}")
    shape = shape_member(item, name)
    parameters = object_member(item, "parameters") if "parameters" in item else {}
    if "binary_data_size" in parameters and "data" not in item and REGION not in parameters:
        if not has_header:
            raise invalid(
                "must specify valid 'Infer-Header-Content-Length' in request header and 'binary_data_size' when passing"
                " inputs in binary data format"
            )
        return name, datatype, shape, unsigned_member(parameters, "binary_data_size")
    fields = [
        field_text
        for present, field_text in (
            ("data" in item, " 'data'"),
            ("binary_data_size" in parameters, " 'binary_data_size' in 'parameters'"),
            (REGION in parameters, f" '{REGION}' in 'parameters'"),
        )
        if present
    ]
    if len(fields) != 1:
        raise invalid(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
            f" 'shared_memory_region' in 'parameters'. But{' set' + ''.join(fields) if fields else ' no field is set'}"
        )
    if "data" not in item:
        return name, datatype, shape, read_region("input", name, parameters)
    if datatype in HALF:
        raise half_input(name, datatype)
    return name, datatype, shape, array_member(item, "data")


def _raw_request(view: ModelView, body: Buffer, version: str) -> DecodedInfer:
    """A request whose whole body is the data of the model's only input: batch size 1, one dimension may be variable."""
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
    return DecodedInfer(request, ALL_BINARY)


def _unidentified(message: str) -> InferenceError:
    return invalid(f"[request id: <id_unknown>] {message}")


def _extra_data(view: ModelView) -> InferenceError:
    return invalid(f"unexpected additional input data for model '{view.name}'")
