"""Requests in a frame: the form, which repeats, and what each request has of its own.

Most requests have nothing of their own: their tensors are sent in the frame, one after the other, with the sizes that
the form gives. Others have an id, a sequence, parameters, or tensors elsewhere or of other sizes.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from halimede.channel.frames import INLINE_BYTES, FrameError
from halimede.channel.json_frames import MAX_JSON_VALUES
from halimede.core.types import Buffer, InferenceRequest, RequestForm
from halimede.core.types.request import form_of
from halimede.workers.frames.kinds import MAX_CALL_TENSORS
from halimede.workers.frames.tensors import (
    PADDING,
    REMEMBERED,
    REMEMBERED_BYTES,
    Locate,
    Place,
    TensorForm,
    data_start,
    describe_tensor,
    make_tensors,
    read_tensors,
)
from halimede.workers.frames.texts import NUMERIC, checked_text, decode_parameters, encode_name, encode_parameters

# timeout, priority, whether one answer is wanted, number of outputs, of inputs.
_FORM = struct.Struct("<QQBHH")
_NAME = struct.Struct("<H")
# START, END and whether places follow; the number of the sequence, length of a text in its place (NUMERIC if it has
# none), of id, of parameters. Then these texts, and the places.
_OWN = struct.Struct("<BQIII")
_START, _END, _PLACES = 1, 2, 4
_NOTHING_OWN = _OWN.pack(0, 0, NUMERIC, 0, 0)
# Of an input: segment (0 for the frame itself), offset, length.
_PLACE = struct.Struct("<HQQ")

# Three numbers, lengths of the form (0: that of the request before) and of what the request has of its own, and of its
# data in the frame.
_ENTRY_LAYOUT = "QIIIIQ"
_ENTRY_FIELDS = len(_ENTRY_LAYOUT)
_ENTRY = struct.Struct("<" + _ENTRY_LAYOUT)
# The number of requests; lengths of all forms, and of all that requests have of their own.
_LIST = struct.Struct("<III")

Described = tuple[bytes, bytes, list[Buffer], int]
"""The form, what the request has of its own, the bytes that are sent in the frame, and how many these are."""


@dataclass(slots=True)
class _Described:
    """A form in a frame; the usual sizes of its inputs, each with its padding, and of all. A size is -1 if these bytes
    are too many for the frame."""

    text: bytes
    sizes: list[tuple[int, bytes]]
    size: int


def describe_request(request: InferenceRequest, place: Place, most: int) -> Described:
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
            return known.text, *_place_tensors(request, own or _NOTHING_OWN, place)
        data.append(payload)
        if padding:
            data.append(padding)
    return known.text, own, data, known.size


def _describe_form(form: RequestForm) -> _Described:
    names = map(encode_name, (form.model_name, form.model_version, *form.outputs))
    text = b"".join(
        (
            _FORM.pack(form.timeout_us, form.priority, form.wants_one, len(form.outputs), len(form.inputs)),
            *[_NAME.pack(len(name)) + name for name in names],
            *[describe_tensor(*each, 0, 0, 0) for each in form.inputs],
        )
    )
    places = _usual_places(form)
    sizes = [(size if size <= INLINE_BYTES else -1, PADDING[-size & 15]) for _, _, size in places]
    return _Described(text, sizes, sum([size + (-size & 15) for _, _, size in places]))


def _usual_places(form: RequestForm) -> list[tuple[int, int, int]]:
    """The places of inputs in the frame, if they have the sizes of their shapes."""
    places = []
    at = 0
    for _, datatype, shape in form.inputs:
        size = max(0, prod(shape) * datatype.itemsize)
        places.append((0, at, size))
        at += size + (-size & 15)
    return places


def _describe_own(request: InferenceRequest, most: int) -> bytes:
    identity = request.sequence_id
    number, text = (0, checked_text(identity, most)) if isinstance(identity, str) else (identity, b"")
    request_id = checked_text(request.id, most)
    parameters = encode_parameters(request.parameters, "request", most) if request.parameters else b""
    flags = request.sequence_start * _START | request.sequence_end * _END
    own = _OWN.pack(flags, number, len(text) or NUMERIC, len(request_id), len(parameters))
    return b"".join((own, text, request_id, parameters))


def _place_tensors(request: InferenceRequest, own: bytes, place: Place) -> tuple[bytes, list[Buffer], int]:
    """As `describe_request`, without the form, for tensors that are not at their usual places."""
    data: list[Buffer] = []
    places: list[bytes] = []
    at = 0
    for tensor in request.inputs:
        payload = tensor.data
        size = len(payload)
        put = None if size <= INLINE_BYTES else place(payload)
        places.append(_PLACE.pack(*(put or (0, at)), size))
        if put is None:
            data += (payload, PADDING[-size & 15])
            at += size + (-size & 15)
    return b"".join((bytes((own[0] | _PLACES,)), own[1:], *places)), data, at


def join_requests(described: Iterable[tuple[int, int, int, Described]], start: int) -> tuple[list[Buffer], int]:
    """The requests of a frame, each with three numbers, and where they end. `start`: where they begin in the body.

    A form is sent once for all requests that follow each other. Equal descriptions are mostly the same object.
    """
    entries: list[int] = []
    forms: list[bytes] = []
    owns: list[bytes] = []
    data: list[Buffer] = []
    last: bytes | None = None
    total = forms_length = owns_length = 0
    for key, rows, seat, (form, own, parts, size) in described:
        if form is last or form == last:
            entries += (key, rows, seat, 0, len(own), size)
        else:
            entries += (key, rows, seat, len(form), len(own), size)
            forms.append(form)
            forms_length += len(form)
            last = form
        if own:
            owns.append(own)
            owns_length += len(own)
        data += parts
        total += size
    count = len(entries) // _ENTRY_FIELDS
    head = _entries(count)
    end = start + head.size + forms_length + owns_length
    base = data_start(end)
    packed = head.pack(count, forms_length, owns_length, *entries)
    return [packed, *forms, *owns, PADDING[base - end], *data], base + total


@lru_cache(256)
def _entries(count: int) -> struct.Struct:
    return struct.Struct("<III" + _ENTRY_LAYOUT * count)


KnownForm = tuple[RequestForm, Sequence[TensorForm]]
"""A form, and its inputs at their usual places."""


@dataclass(slots=True)
class RequestReader:
    """Reads the requests of a frame, whose tensors are in its body, or where `locate` finds them.

    `most` is the maximum bytes of each text. `all_outputs` is how many outputs the model has: a request that names as
    many then names none. It is None if the sender is not trusted, and no request is checked yet. All methods raise
    FrameError, struct.error, ValueError, KeyError and IndexError.
    """

    body: memoryview
    locate: Locate
    most: int
    all_outputs: int | None = None

    def requests(self, at: int) -> Iterator[tuple[int, int, int, InferenceRequest]]:
        """The requests of a frame, which begin at `at`, each with its numbers."""
        body = self.body
        count, forms_length, owns_length = _LIST.unpack_from(body, at)
        at += _LIST.size
        form_at = at + count * _ENTRY.size
        own_at = form_at + forms_length
        end = own_at + owns_length
        if end > len(body):
            raise FrameError(f"{count} requests that end too early")
        base = data_start(end)
        known: KnownForm | None = None
        for key, rows, seat, form_length, own_length, size in _ENTRY.iter_unpack(body[at:form_at]):
            if form_length or known is None:
                known = self.form(body[form_at : form_at + form_length])
                form_at += form_length
            yield key, rows, seat, self.request(known, base, body[own_at : own_at + own_length] if own_length else b"")
            own_at += own_length
            base += size

    def form(self, described: Buffer) -> KnownForm:
        text = bytes(described)
        return (_known_form if len(text) <= REMEMBERED_BYTES else _read_form)(text, self.all_outputs)

    def request(self, known: KnownForm, base: int, own: Buffer) -> InferenceRequest:
        """The request whose tensors are from `base` on. `own` is empty if it has nothing of its own."""
        form, tensors = known
        if not own:
            made = make_tensors(tensors, self.body, base, self.locate, self.all_outputs is None)
            return InferenceRequest.of(form, "", made, {})
        flags, number, text_length, id_length, parameters_length = _OWN.unpack_from(own)
        has_text = text_length != NUMERIC
        if (texts := has_text * text_length + id_length + parameters_length) > 3 * self.most:
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
        if flags & _PLACES:
            places = _PLACE.iter_unpack(own[at:])
            tensors = [(*each, *placed) for each, placed in zip(form.inputs, places, strict=True)]
        # As many values as bytes have room for: a front end has parsed them already.
        parameters = decode_parameters(encoded, max(MAX_JSON_VALUES, self.most)) if parameters_length else {}
        made = make_tensors(tensors, self.body, base, self.locate, self.all_outputs is None)
        starts, ends = flags & _START != 0, flags & _END != 0
        return InferenceRequest.of(form, request_id, made, parameters, number, starts, ends)


def _read_form(described: bytes, all_outputs: int | None) -> KnownForm:
    timeout_us, priority, wants_one, n_outputs, n_inputs = _FORM.unpack_from(described)
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
    form = form_of(model_name, model_version, inputs, wanted, priority, timeout_us, bool(wants_one))
    return form, [(*each, *placed) for each, placed in zip(inputs, _usual_places(form), strict=True)]


_known_form = lru_cache(REMEMBERED)(_read_form)
