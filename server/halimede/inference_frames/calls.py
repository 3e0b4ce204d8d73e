"""INFER and CALL_ANSWER: inferences that the model's code requests, and their answers."""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from halimede.channel.frames import HEADER, MAX_TEXT_BYTES, FrameError
from halimede.core.types import Buffer, DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.inference_frames.kinds import (
    CALL_ANSWER,
    ERROR_CODES,
    ERROR_NUMBERS,
    INFER,
    MAX_ANSWER_BYTES,
    MAX_CALL_TENSORS,
    describe_decode_error,
)
from halimede.inference_frames.requests import Described, describe_request, read_form, read_request
from halimede.inference_frames.tensors import (
    PADDING,
    REMEMBERED,
    REMEMBERED_BYTES,
    Locate,
    Store,
    TensorForm,
    add_tensor,
    data_start,
    make_tensors,
    read_tensors,
)
from halimede.inference_frames.texts import encode_name, encode_text

# Length of the form's description, of what the request has of its own, number, batch, bytes that did not fit.
_INFER_OWN = struct.Struct("<IIIIQ")
# Length of the description, number; then, cached with the description: whether it is final, whether it is an error and
# its code, number of outputs, length of the model's name, of the version, of id, of the error's text or the parameters.
_CALL_ANSWER_OWN = struct.Struct("<II")
_CALL_ANSWER = struct.Struct("<BBBHHHII")
# Each with the header before it.
_WHOLE_INFER, _WHOLE_CALL_ANSWER = struct.Struct("<IIIIIIQ"), struct.Struct("<IIII")
_REFUSAL = 2
"""In place of the 1 that marks an error: the request was not accepted."""

_REMEMBERED_TENSORS = 16
"""Descriptions of more tensors are not cached."""
_INVALID = DataType.INVALID


def encode_infer(number: int, batch: int, request: InferenceRequest, store: Store, wanted: Callable[[], int]) -> Buffer:
    """An INFER frame. `wanted` is called after the inputs are placed: the bytes that did not fit. ValueError,
    struct.error."""
    described, own, data, size = describe_call(request, store, MAX_TEXT_BYTES)
    lengths = len(described), len(own)
    end = _WHOLE_INFER.size + sum(lengths)
    pad = PADDING[-end & 15]
    head = _WHOLE_INFER.pack(end + len(pad) + size - HEADER.size, INFER, *lengths, number, batch, wanted())
    return b"".join((head, described, own, pad, *data))


def describe_call(request: InferenceRequest, store: Store, most: int) -> Described:
    """As `describe_request`, for a request that is not checked yet."""
    size = 0
    for tensor in request.inputs:
        size += len(tensor.data)
        if tensor.datatype is _INVALID:
            raise ValueError(f"input '{tensor.name}' has no datatype")
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"the inputs take {size} bytes, at most {MAX_ANSWER_BYTES} are allowed")
    if len(request.inputs) > MAX_CALL_TENSORS or len(request.outputs) > MAX_CALL_TENSORS:
        raise ValueError(f"at most {MAX_CALL_TENSORS} inputs and as many outputs are allowed")
    return describe_request(request, store, most)


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
        length, own_length, number, batch, wanted_bytes = _INFER_OWN.unpack_from(body)
        own_at = _INFER_OWN.size + length
        end = own_at + own_length
        if end > len(body):
            raise FrameError("INFER: a description that ends too early")
        form, tensors = read_form(bytes(body[_INFER_OWN.size : own_at]), None)
        inputs = make_tensors(tensors, body, data_start(end), locate, may_change=True)
        request = read_request(form, inputs, body[own_at:end], MAX_TEXT_BYTES)
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"INFER: {describe_decode_error(error)}") from error
    return Infer(number, batch, request, wanted_bytes)


def encode_call_answer(number: int, response: InferenceResponse, store: Store) -> Buffer:
    """A CALL_ANSWER frame."""
    whole, data, at = describe_answer(response, store)
    head = _WHOLE_CALL_ANSWER.pack(
        _CALL_ANSWER_OWN.size + len(whole) + at, CALL_ANSWER, len(whole) - _CALL_ANSWER.size, number
    )
    return b"".join((head, whole, *data))


def describe_answer(response: InferenceResponse, store: Store) -> tuple[bytes, list[Buffer], int]:
    """The description of an answer, the bytes that are sent in the frame, and their number."""
    described: list[bytes] = []
    data: list[Buffer] = []
    at = 0
    error = response.error
    if error is None:
        text = json.dumps(response.parameters).encode() if response.parameters else b""
        for tensor in response.outputs:
            at = add_tensor(tensor, tensor.name, described, at, store, data)
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
