"""Requests in a frame: the form, which repeats, and what each request has of its own.

Most tensors are sent in the frame, one after the other, with the sizes of their shapes. If those of a request are
elsewhere or of other sizes, their places follow its form: the same places come again and again too. Most requests have
nothing of their own; others have an id, a sequence or parameters.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from halimede.channel.frames import HEADER, INLINE_BYTES, FrameError
from halimede.channel.json_frames import MAX_JSON_VALUES
from halimede.core.types import Buffer, InferenceRequest, RequestForm, Tensor
from halimede.core.types.request import form_of
from halimede.inference_frames.kinds import MAX_CALL_TENSORS
from halimede.inference_frames.tensors import (
    PADDING,
    REMEMBERED,
    REMEMBERED_BYTES,
    Locate,
    Store,
    TensorForm,
    data_start,
    describe_tensor,
    make_tensors,
    read_tensors,
)
from halimede.inference_frames.texts import NUMERIC, checked_text, decode_parameters, encode_name, encode_parameters

# Flags, timeout, priority, number of outputs, of inputs. The names of the model, its version and the outputs and the
# descriptions of the inputs follow, then the places.
_FORM = struct.Struct("<BQQHH")
_WANTS_ONE, _HAS_LOCATIONS = 1, 2
_NAME = struct.Struct("<H")
# START and END; the number of the sequence, length of a text in its place (NUMERIC if it has none), of id, of
# parameters. Then these texts.
_OWN = struct.Struct("<BQIII")
_START, _END = 1, 2
_FLAGS = tuple([bytes((flags,)) for flags in range(4)])
# Of an input: segment (0 for the frame itself), offset, length.
_LOCATION = struct.Struct("<HQQ")

# Three numbers, lengths of the form (0: that of the request before) and of what the request has of its own, and of its
# data in the frame.
_ENTRY_LAYOUT = "QIIIIQ"
_ENTRY = struct.Struct("<" + _ENTRY_LAYOUT)
# The frame's number, the number of requests; lengths of all forms, and of all that requests have of their own.
_LIST = struct.Struct("<QIII")

Described = tuple[bytes, bytes, list[Buffer], int]
"""The form, what the request has of its own, the bytes that are sent in the frame, and how many these are."""


@dataclass(slots=True)
class _Described:
    """A form in a frame, and the same with places; the usual sizes of its inputs, each with its padding, and of all. A
    size is -1 if these bytes are too many for the frame."""

    text: bytes
    located_text: bytes
    sizes: list[tuple[int, bytes]]
    size: int


def describe_request(request: InferenceRequest, store: Store, most: int) -> Described:
    """`most`: the maximum bytes of each text. ValueError, struct.error."""
    known = request.form.described
    if not isinstance(known, _Described):
        request.form.described = known = _describe_form(request.form)
    # Before tensors are placed: nothing is placed for a request that cannot be described.
    own = b""
    if request.id or request.sequence_id or request.parameters or request.sequence_start or request.sequence_end:
        own = _describe_own(request, most)
    data: list[Buffer] = []
    for tensor, (size, padding) in zip(request.inputs, known.sizes):  # noqa: B905  the argument costs as much as a turn
        payload = tensor.data
        if len(payload) != size:
            return _store_tensors(request, known, own, store)
        data.append(payload)
        if padding:
            data.append(padding)
    return known.text, own, data, known.size


def _describe_form(form: RequestForm) -> _Described:
    names = map(encode_name, (form.model_name, form.model_version, *form.outputs))
    text = b"".join(
        (
            _FORM.pack(
                form.wants_one * _WANTS_ONE, form.timeout_us, form.priority, len(form.outputs), len(form.inputs)
            ),
            *[_NAME.pack(len(name)) + name for name in names],
            *[describe_tensor(*each, 0, 0, 0) for each in form.inputs],
        )
    )
    locations = _usual_locations(form)
    sizes = [(size if size <= INLINE_BYTES else -1, PADDING[-size & 15]) for _, _, size in locations]
    return _Described(
        text, _FLAGS[text[0] | _HAS_LOCATIONS] + text[1:], sizes, sum([size + (-size & 15) for _, _, size in locations])
    )


def _usual_locations(form: RequestForm) -> list[tuple[int, int, int]]:
    """The places of inputs in the frame, if they have the sizes of their shapes."""
    locations = []
    at = 0
    for _, datatype, shape in form.inputs:
        size = max(0, prod(shape) * datatype.itemsize)
        locations.append((0, at, size))
        at += size + (-size & 15)
    return locations


def _describe_own(request: InferenceRequest, most: int) -> bytes:
    identity = request.sequence_id
    number, text = (0, checked_text(identity, most)) if isinstance(identity, str) else (identity, b"")
    request_id = checked_text(request.id, most)
    parameters = encode_parameters(request.parameters, "request", most) if request.parameters else b""
    flags = request.sequence_start * _START | request.sequence_end * _END
    own = _OWN.pack(flags, number, len(text) or NUMERIC, len(request_id), len(parameters))
    return b"".join((own, text, request_id, parameters))


def _store_tensors(request: InferenceRequest, known: _Described, own: bytes, store: Store) -> Described:
    """As `describe_request`, for tensors that are not at their usual places."""
    data: list[Buffer] = []
    locations: list[bytes] = []
    at = 0
    for tensor in request.inputs:
        payload = tensor.data
        size = len(payload)
        put = None if size <= INLINE_BYTES else store(payload)
        locations.append(_LOCATION.pack(*(put or (0, at)), size))
        if put is None:
            data += (payload, PADDING[-size & 15])
            at += size + (-size & 15)
    return known.located_text + b"".join(locations), own, data, at


def encode_requests(kind: int, number: int, described: Sequence[tuple[int, int, int, Described]]) -> Buffer:
    """A frame of this kind with a number of 64 bits, and requests, each with three numbers.

    A form is sent once for all requests that follow each other. Equal forms are mostly the same object.
    """
    count = len(described)
    entries: list[int] = []
    forms: list[bytes] = []
    owns: list[bytes] = []
    data: list[Buffer] = []
    last: bytes | None = None
    total = forms_length = owns_length = 0
    for key, rows, sequence_slot, (form, own, parts, size) in described:
        form_length = 0
        if form is not last and form != last:
            form_length = len(form)
            forms.append(form)
            forms_length += form_length
            last = form
        entries += key, rows, sequence_slot, form_length, len(own), size
        if own:
            owns.append(own)
            owns_length += len(own)
        data += parts
        total += size
    head = _head(count)
    end = head.size - HEADER.size + forms_length + owns_length
    base = data_start(end)
    packed = head.pack(base + total, kind, number, count, forms_length, owns_length, *entries)
    return b"".join((packed, *forms, *owns, PADDING[base - end], *data))


@lru_cache(256)
def _head(count: int) -> struct.Struct:
    """All before the forms."""
    return struct.Struct("<IIQIII" + _ENTRY_LAYOUT * count)


KnownForm = tuple[RequestForm, Sequence[TensorForm]]
"""A form, and its inputs with their places."""


def read_requests(
    body: memoryview, locate: Locate, most: int, all_outputs: int | None = None
) -> Iterator[tuple[int, int, int, InferenceRequest]]:
    """The requests of a frame that `encode_requests` has made, each with its numbers. FrameError, struct.error,
    ValueError, KeyError, IndexError.

    Their tensors are in the body, or where `locate` finds them. `most` is the maximum bytes of each text. `all_outputs`
    is how many outputs the model has: a request that names as many then names none. It is None if the sender is not
    trusted, and no request is checked yet.
    """
    _, count, forms_length, owns_length = _LIST.unpack_from(body)
    form_at = _LIST.size + count * _ENTRY.size
    own_at = form_at + forms_length
    end = own_at + owns_length
    if end > len(body):
        raise FrameError(f"{count} requests that end too early")
    base = data_start(end)
    may_change = all_outputs is None
    known: KnownForm | None = None
    for key, rows, sequence_slot, form_length, own_length, size in _ENTRY.iter_unpack(body[_LIST.size : form_at]):
        if form_length or known is None:
            known = read_form(bytes(body[form_at : form_at + form_length]), all_outputs)
            form_at += form_length
        form, tensors = known
        inputs = make_tensors(tensors, body, base, locate, may_change)
        if own_length:
            request = read_request(form, inputs, body[own_at : own_at + own_length], most)
            own_at += own_length
        else:
            request = InferenceRequest.of(form, "", inputs, {})
        yield key, rows, sequence_slot, request
        base += size


def read_request(form: RequestForm, inputs: list[Tensor], own: memoryview, most: int) -> InferenceRequest:
    """The request of this form, and what it has of its own. `most` and errors as in `read_requests`."""
    if not own:
        return InferenceRequest.of(form, "", inputs, {})
    flags, number, text_length, id_length, parameters_length = _OWN.unpack_from(own)
    has_text = text_length != NUMERIC
    if (texts := has_text * text_length + id_length + parameters_length) > 3 * most:
        raise FrameError(f"{texts} bytes of text")
    at = _OWN.size
    if has_text:
        number = str(own[at : at + text_length], "utf-8")
        at += text_length
    request_id = str(own[at : at + id_length], "utf-8")
    at += id_length
    encoded = own[at : at + parameters_length]
    at += parameters_length
    if at > len(own):
        raise FrameError("a description that ends too early")
    # As many values as bytes have room for: a front end has parsed them already.
    parameters = decode_parameters(encoded, max(MAX_JSON_VALUES, most)) if parameters_length else {}
    return InferenceRequest.of(form, request_id, inputs, parameters, number, flags & _START != 0, flags & _END != 0)


def read_form(described: bytes, all_outputs: int | None) -> KnownForm:
    """A form. `all_outputs` and errors as in `read_requests`."""
    return (_known_form if len(described) <= REMEMBERED_BYTES else _read_form)(described, all_outputs)


def _read_form(described: bytes, all_outputs: int | None) -> KnownForm:
    flags, timeout_us, priority, n_outputs, n_inputs = _FORM.unpack_from(described)
    if flags & _HAS_LOCATIONS:
        locations_at = len(described) - n_inputs * _LOCATION.size
        form, _ = read_form(_FLAGS[flags & _WANTS_ONE] + described[1:locations_at], all_outputs)
        locations = _LOCATION.iter_unpack(described[locations_at:])
        return form, [(*each, *location) for each, location in zip(form.inputs, locations, strict=True)]
    if all_outputs is None and max(n_inputs, n_outputs) > MAX_CALL_TENSORS:
        raise FrameError(f"{n_inputs} inputs and {n_outputs} outputs")
    at = _FORM.size
    names = []
    for _ in range(2 + n_outputs):
        (length,) = _NAME.unpack_from(described, at)
        at += _NAME.size
        names.append(str(described[at : at + length], "utf-8"))
        at += length
    model_name, model_version, *outputs = names
    tensors, at = read_tensors(described, at, n_inputs, None)
    # A field was read beyond the end of the description.
    if at > len(described):
        raise FrameError("a description that ends too early")
    inputs = tuple([(name, datatype, shape) for name, datatype, shape, *_ in tensors])
    wanted = () if n_outputs == all_outputs else tuple(outputs)
    form = form_of(model_name, model_version, inputs, wanted, priority, timeout_us, flags & _WANTS_ONE != 0)
    return form, [(*each, *location) for each, location in zip(inputs, _usual_locations(form), strict=True)]


_known_form = lru_cache(REMEMBERED)(_read_form)
