"""INFER and CALL_ANSWER: inferences that the model's code requests, and their answers."""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from halimede.core.types import (
    Buffer,
    DataType,
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    ParameterValue,
)
from halimede.workers.frames.json_frames import MAX_JSON_VALUES
from halimede.workers.frames.kinds import (
    CALL_ANSWER,
    ERROR_CODES,
    ERROR_NUMBERS,
    INFER,
    MAX_ANSWER_BYTES,
    MAX_CALL_TENSORS,
    MAX_CLIENT_TEXT_BYTES,
    MAX_TEXT_BYTES,
    FrameError,
    describe_decode_error,
)
from halimede.workers.frames.tensors import (
    PADDING,
    REMEMBERED,
    REMEMBERED_BYTES,
    Locate,
    Place,
    TensorForm,
    add_tensor,
    data_start,
    make_tensors,
    read_tensors,
)
from halimede.workers.frames.texts import (
    NO_TEXTS,
    NUMERIC,
    Texts,
    checked_client_text,
    checked_text,
    decode_parameters,
    encode_name,
    encode_parameters,
    encode_text,
    texts_of,
)
from halimede.workers.worker import NO_PARAMETERS

# Each begins with the length of the description.
# number, batch, bytes that did not fit; then, cached with the description: correlation, timeout, priority, START,
# END and whether one answer is wanted, number of inputs, of outputs, length of the model's name, of the version, of id,
# of parameters, of a text correlation.
_INFER_OWN = struct.Struct("<IIIQ")
_INFER = struct.Struct("<QQQBHHHHIII")
# number; then, cached with the description: whether it is final, whether it is an error and its code, number of
# outputs, length of the model's name, of the version, of id, of the error's text or the parameters.
_CALL_ANSWER_OWN = struct.Struct("<II")
_CALL_ANSWER = struct.Struct("<BBBHHHII")
# Each with the header before it.
_WHOLE_INFER, _WHOLE_CALL_ANSWER = struct.Struct("<IIIIIQ"), struct.Struct("<IIII")
_LENGTH = struct.Struct("<H")
_REFUSAL = 2
"""In place of the 1 that marks an error: the request was not accepted."""

_REMEMBERED_TENSORS = 16
"""Descriptions of more tensors are not cached."""
_INVALID = DataType.INVALID


def encode_infer(number: int, batch: int, request: InferenceRequest, place: Place, wanted: Callable[[], int]) -> Buffer:
    """An INFER frame. `wanted` is called after the inputs are placed: the bytes that did not fit. ValueError,
    struct.error."""
    whole, data, at = describe_infer(request, place)
    length = len(whole) - _INFER.size
    head = _WHOLE_INFER.pack(_INFER_OWN.size + len(whole) + at, INFER, length, number, batch, wanted())
    return b"".join((head, whole, *data))


def describe_infer(
    request: InferenceRequest, place: Place, is_of_client: bool = False
) -> tuple[bytes, list[Buffer], int]:
    """The description of a request, the bytes that are sent in the frame, and how many these are. The texts of a
    client may be longer than those of a model. ValueError, struct.error."""
    size = 0
    for tensor in request.inputs:
        size += len(tensor.data)
        if tensor.datatype is _INVALID:
            raise ValueError(f"input '{tensor.name}' has no datatype")
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"the inputs take {size} bytes, at most {MAX_ANSWER_BYTES} are allowed")
    if len(request.inputs) > MAX_CALL_TENSORS or len(request.outputs) > MAX_CALL_TENSORS:
        raise ValueError(f"at most {MAX_CALL_TENSORS} inputs and as many outputs are allowed")
    is_plain = not (request.id or request.sequence_id or request.parameters)
    texts = NO_TEXTS
    if not is_plain:
        most = MAX_CLIENT_TEXT_BYTES if is_of_client else MAX_TEXT_BYTES
        parameters = encode_parameters(request.parameters, "request", most) if request.parameters else b""
        texts = texts_of(request, parameters, checked_client_text if is_of_client else checked_text)
    described: list[bytes] = []
    data: list[Buffer] = []
    at = 0
    for tensor in request.inputs:
        at = add_tensor(tensor, tensor.name, described, at, place, data)
    is_short = is_plain and len(described) + len(request.outputs) <= _REMEMBERED_TENSORS
    whole = (_known_call_text if is_short else _call_text)(
        request.model_name,
        request.model_version,
        request.outputs,
        request.timeout_us,
        request.priority,
        request.sequence_start | request.sequence_end << 1 | request.wants_one << 2,
        texts,
        *described,
    )
    return whole, data, at


def _call_text(
    model_name: str,
    model_version: str,
    outputs: tuple[str, ...],
    timeout_us: int,
    priority: int,
    flags: int,
    texts: Texts,
    *tensors: bytes,
) -> bytes:
    """An INFER's description, padded to the start of its tensors' bytes."""
    model, version = encode_name(model_name), encode_name(model_version)
    numeric, parameters, request_id, correlation, text = texts
    lengths = len(tensors), len(outputs), len(model), len(version), request_id, parameters, correlation
    numbers = _INFER.pack(numeric, timeout_us, priority, flags, *lengths)
    names = [_LENGTH.pack(len(name)) + name for name in map(encode_name, outputs)]
    described = b"".join((numbers, model, version, text, *names, *tensors))
    return described + PADDING[-(_WHOLE_INFER.size + len(described)) & 15]


_known_call_text = lru_cache(REMEMBERED)(_call_text)


@dataclass(slots=True)
class Infer:
    """An inference that a worker requests. `batch` is the batch whose code requests it, 0 if that is not known.

    `wanted_bytes` did not fit into the worker's arena.
    """

    number: int
    batch: int
    request: InferenceRequest
    wanted_bytes: int


def decode_infer(body: memoryview, locate: Locate) -> Infer:
    """Decode the body of an INFER frame in the server. FrameError. Tensors in the frame are views of `body`."""
    try:
        length, number, batch, wanted_bytes = _INFER_OWN.unpack_from(body)
        end = _INFER_OWN.size + _INFER.size + length
        if end > len(body):
            raise FrameError("INFER: a description that ends too early")
        described = body[_INFER_OWN.size : end]
        form = known_call_form(bytes(described)) if length <= REMEMBERED_BYTES else call_form(described)
        request = make_request(form, body, data_start(end), locate)
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"INFER: {describe_decode_error(error)}") from error
    return Infer(number, batch, request, wanted_bytes)


def make_request(form: "CallForm", body: memoryview, base: int, locate: Locate) -> InferenceRequest:
    """A request whose tensors are in `body` from `base` on, or where `locate` finds them. FrameError, ValueError."""
    model, version, request_id, inputs, outputs, parameters, priority, timeout_us, correlation, flags = form
    return InferenceRequest(
        model,
        version,
        request_id,
        make_tensors(inputs, body, base, locate, True),
        outputs,
        dict(parameters) if parameters else {},
        priority,
        timeout_us,
        correlation,
        *flags,
    )


_Flags = tuple[bool, ...]
CallForm = tuple[
    str, str, str, Sequence[TensorForm], tuple[str, ...], Mapping[str, ParameterValue], int, int, int | str, _Flags
]
"""Model, version, id, inputs, outputs, parameters, priority, timeout, correlation; START, END, whether one answer is
wanted."""


def call_form(described: Buffer, most: int = MAX_TEXT_BYTES) -> CallForm:
    """`most`: the maximum bytes of each text. FrameError, struct.error, ValueError, KeyError."""
    (
        correlation, timeout_us, priority, flags, n_inputs, n_outputs,
        model_length, version_length, id_length, parameters_length, correlation_length,
    ) = _INFER.unpack_from(described)  # fmt: skip
    texts = id_length + parameters_length + (correlation_length if correlation_length != NUMERIC else 0)
    if n_inputs > MAX_CALL_TENSORS or n_outputs > MAX_CALL_TENSORS or texts > 3 * most:
        raise FrameError(f"INFER: {n_inputs} inputs, {n_outputs} outputs and {texts} bytes of text")
    at = _INFER.size
    model = str(described[at : at + model_length], "utf-8")
    at += model_length
    version = str(described[at : at + version_length], "utf-8")
    at += version_length
    request_id = str(described[at : at + id_length], "utf-8")
    at += id_length
    if correlation_length != NUMERIC:
        correlation = str(described[at : at + correlation_length], "utf-8")
        at += correlation_length
    encoded = described[at : at + parameters_length]
    # As many values as bytes have room for: the front end has parsed them already.
    parameters = decode_parameters(encoded, max(MAX_JSON_VALUES, most)) if parameters_length else NO_PARAMETERS
    at += parameters_length
    outputs, at = _read_names(described, at, n_outputs)
    tensors, at = read_tensors(described, at, n_inputs, None)
    # A field was read beyond the end of the description.
    if at > len(described):
        raise FrameError("INFER: a description that ends too early")
    truths = bool(flags & 1), bool(flags & 2), bool(flags & 4)
    return model, version, request_id, tensors, outputs, parameters, priority, timeout_us, correlation, truths


known_call_form = lru_cache(REMEMBERED)(call_form)


def _read_names(described: Buffer, at: int, count: int) -> tuple[tuple[str, ...], int]:
    names = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(described, at)
        at += _LENGTH.size
        names.append(str(described[at : at + length], "utf-8"))
        at += length
    return tuple(names), at


def encode_call_answer(number: int, response: InferenceResponse, place: Place) -> Buffer:
    """A CALL_ANSWER frame."""
    whole, data, at = describe_answer(response, place)
    head = _WHOLE_CALL_ANSWER.pack(
        _CALL_ANSWER_OWN.size + len(whole) + at, CALL_ANSWER, len(whole) - _CALL_ANSWER.size, number
    )
    return b"".join((head, whole, *data))


def describe_answer(response: InferenceResponse, place: Place) -> tuple[bytes, list[Buffer], int]:
    """The description of an answer, the bytes that are sent in the frame, and their number."""
    described: list[bytes] = []
    data: list[Buffer] = []
    at = 0
    error = response.error
    if error is None:
        text = json.dumps(response.parameters).encode() if response.parameters else b""
        for tensor in response.outputs:
            at = add_tensor(tensor, tensor.name, described, at, place, data)
    else:
        text = error.message.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
    is_short = not text and len(described) <= _REMEMBERED_TENSORS
    whole = (_known_answer_text if is_short and not response.id else _answer_text)(
        response.model_name,
        response.model_version,
        response.id,
        text,
        response.final,
        None if error is None else error.code,
        error is not None and error.is_refusal,
        *described,
    )
    return whole, data, at


def _answer_text(
    model_name: str,
    model_version: str,
    name: str,
    text: bytes,
    final: bool,
    code: ErrorCode | None,
    is_refusal: bool,
    *tensors: bytes,
) -> bytes:
    """A CALL_ANSWER's description, padded to the start of its tensors' bytes."""
    model, version, request_id = encode_name(model_name), encode_name(model_version), encode_text(name)
    number = 0 if code is None else ERROR_NUMBERS[code]
    lengths = len(tensors), len(model), len(version), len(request_id), len(text)
    numbers = _CALL_ANSWER.pack(final, _REFUSAL if is_refusal else code is not None, number, *lengths)
    described = b"".join((numbers, model, version, request_id, text, *tensors))
    return described + PADDING[-(_WHOLE_CALL_ANSWER.size + len(described)) & 15]


_known_answer_text = lru_cache(REMEMBERED)(_answer_text)


def decode_call_answer(body: memoryview, locate: Locate) -> tuple[int, InferenceResponse]:
    """Decode the body of a CALL_ANSWER frame in the worker: the number of its INFER, and the answer.

    Not checked: the server made it. Tensors are views of `body`.
    """
    length, call = _CALL_ANSWER_OWN.unpack_from(body)
    end = _CALL_ANSWER_OWN.size + _CALL_ANSWER.size + length
    described = body[_CALL_ANSWER_OWN.size : end]
    form = known_answer_form(bytes(described)) if length <= REMEMBERED_BYTES else answer_form(described)
    return call, make_answer(form, body, data_start(end), locate)


def make_answer(form: "AnswerForm", body: memoryview, base: int, locate: Locate) -> InferenceResponse:
    """An answer whose tensors are in `body` from `base` on, or where `locate` finds them."""
    model, version, request_id, tensors, parameters, code, text, final, is_refusal = form
    return InferenceResponse(
        model,
        version,
        request_id,
        make_tensors(tensors, body, base, locate, False),
        json.loads(parameters) if parameters else {},
        None if code is None else InferenceError(code, text, is_refusal=is_refusal),
        final,
    )


AnswerForm = tuple[str, str, str, Sequence[TensorForm], bytes, ErrorCode | None, str, bool, bool]
"""Model, version, id, outputs, parameters as JSON, the error's code, its text, whether it is final, and a refusal."""


def answer_form(described: Buffer) -> AnswerForm:
    final, is_error, code, count, model_length, version_length, id_length, text_length = _CALL_ANSWER.unpack_from(
        described
    )
    at = _CALL_ANSWER.size
    model = str(described[at : at + model_length], "utf-8")
    at += model_length
    version = str(described[at : at + version_length], "utf-8")
    at += version_length
    request_id = str(described[at : at + id_length], "utf-8")
    at += id_length
    text = bytes(described[at : at + text_length])
    tensors, _ = read_tensors(described, at + text_length, count, None)
    if is_error:
        error = ERROR_CODES[code], str(text, "utf-8", "replace")
        return model, version, request_id, tensors, b"", *error, bool(final), is_error == _REFUSAL
    return model, version, request_id, tensors, text, None, "", bool(final), False


known_answer_form = lru_cache(REMEMBERED)(answer_form)
