"""One request in a frame: its form, which repeats from frame to frame, and what only this request has.

A description is that of the form, preceded by its length. What a request has of its own follows: an id, a sequence,
parameters, or the places of its tensors. Most requests have nothing of their own, because their tensors are sent in the
frame, one after the other, with the sizes that the form gives.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from halimede.core.types import Buffer, InferenceRequest, ParameterValue, RequestForm
from halimede.workers.frames.kinds import MAX_CALL_TENSORS, FrameError
from halimede.workers.frames.tensors import (
    REMEMBERED,
    REMEMBERED_BYTES,
    Locate,
    Place,
    TensorForm,
    describe_tensor,
    make_tensors,
    place_tensor,
    read_tensors,
)
from halimede.workers.frames.texts import NUMERIC, checked_text, encode_name, encode_parameters

_LENGTH = struct.Struct("<I")
# timeout, priority, whether one answer is wanted, number of outputs, of inputs.
_FORM = struct.Struct("<QQBHH")
_NAME = struct.Struct("<H")
# The number of the sequence, length of a text in its place (NUMERIC if it has none), of id, of parameters.
_OWN = struct.Struct("<QIII")
_NOTHING_OWN = _OWN.pack(0, NUMERIC, 0, 0)
# START, END and whether places follow.
_START, _END, _PLACES = 1, 2, 4
_FLAGS = [bytes([flags]) for flags in range(8)]
_PLACE = struct.Struct("<HQQ")

Places = list[tuple[int, int, int]]
"""Of each input: segment (0 for the frame itself), offset, length."""

ReadParameters = Callable[[bytes], Mapping[str, ParameterValue]]

_known_forms: dict[RequestForm, tuple[bytes, Places]] = {}
"""The descriptions of forms that were sent, and the usual places of their inputs."""


def describe_request(request: InferenceRequest, place: Place, most: int) -> tuple[bytes, list[Buffer], int]:
    """The description of a request, the bytes that are sent in the frame, and how many these are.

    `most`: the maximum bytes of each text. ValueError, struct.error.
    """
    known = _known_forms.get(request.form)
    if known is None:
        known = _describe_form(request.form)
    described, usual = known
    # Nothing is placed for a request that cannot be described.
    own = b""
    if request.id or request.sequence_id or request.parameters:
        own = _describe_own(request, most)
    data: list[Buffer] = []
    places: Places = []
    at = 0
    for tensor in request.inputs:
        placed, at = place_tensor(tensor.data, at, place, data)
        places.append(placed)
    flags = request.sequence_start | request.sequence_end << 1 | (places != usual) << 2
    if own or flags:
        explicit = [_PLACE.pack(*each) for each in places] if flags & _PLACES else ()
        described = b"".join((described, own or _NOTHING_OWN, _FLAGS[flags], *explicit))
    return described, data, at


def _describe_form(form: RequestForm) -> tuple[bytes, Places]:
    names = map(encode_name, (form.model_name, form.model_version, *form.outputs))
    described = b"".join(
        (
            _FORM.pack(form.timeout_us, form.priority, form.wants_one, len(form.outputs), len(form.inputs)),
            *[_NAME.pack(len(name)) + name for name in names],
            *[describe_tensor(*each, 0, 0, 0) for each in form.inputs],
        )
    )
    known = _LENGTH.pack(len(described)) + described, _usual_places(form)
    if len(described) <= REMEMBERED_BYTES:
        if len(_known_forms) >= REMEMBERED:
            _known_forms.clear()
        _known_forms[form] = known
    return known


def _usual_places(form: RequestForm) -> Places:
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
    own = _OWN.pack(number, len(text) or NUMERIC, len(request_id), len(parameters))
    return b"".join((own, text, request_id, parameters))


@dataclass(slots=True)
class Description:
    """What a frame says of one request, or of several equal ones; their data is apart."""

    form: RequestForm
    tensors: Sequence[TensorForm]
    id: str = ""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False

    def request(self, body: memoryview, base: int, locate: Locate, may_change: bool) -> InferenceRequest:
        """A request whose tensors are in `body` from `base` on, or where `locate` finds them; for `may_change` see
        `make_tensors`. FrameError, ValueError."""
        return InferenceRequest.of(
            self.form,
            self.id,
            make_tensors(self.tensors, body, base, locate, may_change),
            dict(self.parameters) if self.parameters else {},
            self.sequence_id,
            self.sequence_start,
            self.sequence_end,
        )


def read_description(
    described: Buffer, read_parameters: ReadParameters, most: int, all_outputs: int | None = None
) -> Description:
    """`most`: the maximum bytes of each text. FrameError, struct.error, ValueError, KeyError, IndexError.

    `all_outputs` is how many outputs the model has: a request that names as many then names none. It is None for the
    call of a model that the reader does not know, and that has at most MAX_CALL_TENSORS inputs and outputs.
    """
    (length,) = _LENGTH.unpack_from(described)
    at = _LENGTH.size + length
    text = bytes(described[_LENGTH.size : at])
    known = (_known_form if length <= REMEMBERED_BYTES else _read_form)(text, all_outputs)
    if at == len(described):
        return known
    number, text_length, id_length, parameters_length = _OWN.unpack_from(described, at)
    has_text = text_length != NUMERIC
    if (texts := has_text * text_length + id_length + parameters_length) > 3 * most:
        raise FrameError(f"{texts} bytes of text")
    at += _OWN.size
    if has_text:
        number = str(described[at : at + text_length], "utf-8")
        at += text_length
    request_id = str(described[at : at + id_length], "utf-8")
    at += id_length
    encoded = bytes(described[at : at + parameters_length])
    at += parameters_length
    flags = described[at]
    parameters = read_parameters(encoded) if encoded else {}
    tensors = known.tensors
    if flags & _PLACES:
        places = _PLACE.iter_unpack(described[at + 1 :])
        tensors = [(*each, *placed) for each, placed in zip(known.form.inputs, places, strict=True)]
    return Description(known.form, tensors, request_id, parameters, number, flags & _START != 0, flags & _END != 0)


def _read_form(described: bytes, all_outputs: int | None) -> Description:
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
    form = RequestForm(model_name, model_version, inputs, wanted, priority, timeout_us, bool(wants_one))
    return Description(form, [(*each, *placed) for each, placed in zip(inputs, _usual_places(form), strict=True)])


_known_form = lru_cache(REMEMBERED)(_read_form)
