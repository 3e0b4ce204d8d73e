"""Read the requests of inference calls; those that repeat, without protobuf.

Clients send one request again and again, with another id and other data. Written in the order of its fields, as all
clients write it, such a message is

    model_name, model_version | id | parameters, inputs, outputs | raw_input_contents of the same sizes

and only the id and the contents differ. A template has the rest, as bytes and as what protobuf has read from them. What
fits no template goes through protobuf. So do requests with parameters of their own, such as those of sequences.
"""

from dataclasses import dataclass

from halimede.core.types import InferenceError, InferenceRequest, RequestForm, Tensor
from halimede.core.types.tensor import Buffer
from halimede.core.wire.destinations import Destinations
from halimede.core.wire.grpc_large import LARGE_BYTES, fields
from halimede.core.wire.grpc_request import InferCall, InferMessage, read_infer

_TEMPLATES = 1024
_TEMPLATES_OF_MODEL = 8
_TEMPLATE_BYTES = 4 << 10
_MISSES = 1024

# Tags of ModelInferRequest: the number of the field, and the kind of its value, which is sized.
_MODEL_NAME, _MODEL_VERSION, _ID, _RAW = 1, 2, 3, 7
_NAME_TAG, _ID_TAG = 0x0A, 0x1A


@dataclass(frozen=True, slots=True)
class _Template:
    """`start` is before the id; `parts` have what precedes each entry of the contents, and the entry's size."""

    form: RequestForm
    start: bytes
    parts: tuple[tuple[bytes, int], ...]
    destinations: Destinations
    wants_empty_final: bool

    def read(self, raw: bytes) -> InferMessage | None:
        """The request in a message; None if it does not fit."""
        if not raw.startswith(self.start):
            return None
        at = len(self.start)
        request_id = ""
        if len(raw) > at + 1 and raw[at] == _ID_TAG:
            size = raw[at + 1]
            at += 2 + size
            if size > 127:
                return None  # The size has a second byte.
            try:
                request_id = raw[at - size : at].decode()
            except UnicodeDecodeError:
                return None
        tensors = []
        for (before, size), (name, datatype, shape) in zip(self.parts, self.form.inputs, strict=True):
            if not raw.startswith(before, at):
                return None
            begin = at + len(before)
            at = begin + size
            tensors.append(Tensor(name, datatype, shape, raw[begin:at]))
        if at != len(raw):
            return None
        request = InferenceRequest.of(self.form, request_id, tensors, {})
        return InferMessage.of_call(InferCall(request, self.destinations, self.wants_empty_final))


class InferReader:
    """Reads messages of up to all clients. Templates are found by the model's name, at the start of a message."""

    def __init__(self) -> None:
        self.templates: dict[bytes, list[_Template]] = {}
        # Messages that fitted no template, by model and size, and whether a template was made of one, or tried: once,
        # when one comes again.
        self._missed: dict[tuple[bytes, int], bool] = {}

    def read(self, raw: Buffer) -> InferMessage:
        """As `read_infer`."""
        if len(raw) > LARGE_BYTES or not isinstance(raw, bytes) or len(raw) < 2 or raw[0] != _NAME_TAG:
            return read_infer(raw)
        key = raw[: 2 + raw[1]]
        templates = self.templates.get(key)
        if templates is not None:
            for template in templates:
                found = template.read(raw)
                if found is not None:
                    return found
        missed = key, len(raw)
        is_tried = self._missed.get(missed)
        if is_tried is None:
            if len(self._missed) >= _MISSES:
                self._missed.clear()
            self._missed[missed] = False
        elif not is_tried:
            self._missed[missed] = True
            self._learn(key, raw)
        return read_infer(raw)

    def _learn(self, key: bytes, raw: bytes) -> None:
        template = _make_template(raw)
        if template is None:
            return
        if key not in self.templates and len(self.templates) >= _TEMPLATES:
            self.templates.clear()
            self._missed.clear()
        templates = self.templates.setdefault(key, [])
        if len(templates) >= _TEMPLATES_OF_MODEL:
            templates.clear()
            self._missed.clear()
        templates.append(template)


def _make_template(raw: bytes) -> _Template | None:
    """The template of a valid message; None if it can have none."""
    try:
        call = read_infer(raw).decode()
        found = list(fields(memoryview(raw)))
    except InferenceError:
        return None
    request = call.request
    numbers = [number for number, *_ in found]
    is_usual = (
        not (request.parameters or request.sequence_id or request.sequence_start or request.sequence_end)
        and numbers == sorted(numbers)
        and numbers[-1] == _RAW
        and all(numbers.count(number) <= 1 for number in (_MODEL_NAME, _MODEL_VERSION, _ID))
        and numbers.count(_RAW) == len(request.inputs) > 0
    )
    if not is_usual:
        return None
    start = end_of_id = 0
    parts = []
    for number, _, _, value, stop in found:
        if number <= _MODEL_VERSION:
            start = end_of_id = stop
        elif number == _ID:
            end_of_id = stop
        elif number == _RAW:
            before = raw[end_of_id:value]
            end_of_id = stop
            parts.append((before, stop - value))
    if sum([len(before) for before, _ in parts]) > _TEMPLATE_BYTES:
        return None
    return _Template(
        form=request.form,
        start=raw[:start],
        parts=tuple(parts),
        destinations=call.destinations,
        wants_empty_final=call.wants_empty_final,
    )
