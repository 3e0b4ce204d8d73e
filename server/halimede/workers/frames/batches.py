"""EXECUTE: the requests of a batch."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from halimede.core.types import Buffer, InferenceRequest
from halimede.workers.frames.kinds import EXECUTE, HEADER, KEY
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
from halimede.workers.frames.texts import NO_TEXTS, NUMERIC, Texts, encode_text, texts_of
from halimede.workers.worker import BatchItem

# Each begins with the length of the description.
# Batch, number of requests or replies. The keys of an EXECUTE's requests stand between this and its description.
_BATCH = struct.Struct("<IIH")
# correlation, timeout, rows, seat, length of parameters, of id, of a text correlation (NUMERIC for a number), START and
# END, number of inputs, of outputs.
_REQUEST = struct.Struct("<QQIIIIIBHH")
_POSITION = struct.Struct("<H")


def encode_execute(
    batch: int,
    items: Sequence[BatchItem],
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    place: Place,
    kind: int = EXECUTE,
) -> Buffer:
    """A frame of this kind, EXECUTE or one of EXECUTE_NEXT. `inputs` and `outputs` are the positions of the names."""
    keys: list[int] = []
    described: list[bytes] = []
    data: list[Buffer] = []
    at = 0
    for item in items:
        keys.append(item.key)
        request = item.request
        tensors, wanted = request.inputs, request.outputs
        if len(wanted) == len(outputs):
            wanted = ()  # no names mean all outputs
        flags = request.sequence_start | request.sequence_end << 1
        numbers = request.timeout_us, item.rows, item.seat, flags, len(tensors), len(wanted)
        if request.id or request.sequence_id or request.parameters:
            parameters = json.dumps(request.parameters).encode() if request.parameters else b""
            texts = texts_of(request, parameters, encode_text)
            described.append(_request_text(*numbers, texts))
        else:
            described.append(_known_request_text(*numbers))
        if wanted:
            described.extend([_POSITION.pack(outputs[name]) for name in wanted])
        for tensor in tensors:
            at = add_tensor(tensor, inputs[tensor.name], described, at, place, data)
    count = len(keys)
    head = _execute_head(count)
    whole = b"".join(described)
    pad = PADDING[-(head.size + len(whole)) & 15]
    length = head.size - HEADER.size + len(whole) + len(pad) + at
    return b"".join((head.pack(length, kind, len(whole), batch, count, *keys), whole, pad, *data))


@lru_cache(REMEMBERED)
def _execute_head(count: int) -> struct.Struct:
    """The part before an EXECUTE's description: header, _BATCH and keys."""
    return struct.Struct(f"<IIIIH{count}Q")


def _request_text(
    timeout_us: int, rows: int, seat: int, flags: int, n_inputs: int, n_outputs: int, texts: Texts = NO_TEXTS
) -> bytes:
    number, parameters, request_id, correlation, text = texts
    lengths = parameters, request_id, correlation
    return _REQUEST.pack(number, timeout_us, rows, seat, *lengths, flags, n_inputs, n_outputs) + text


_known_request_text = lru_cache(REMEMBERED)(_request_text)


@dataclass(slots=True)
class ExecuteFrame:
    """A batch for a worker to execute."""

    batch: int
    items: list[BatchItem]


def batch_number(body: memoryview) -> int:
    """The number of the batch of an EXECUTE or EXECUTE_NEXT frame."""
    number: int = _BATCH.unpack_from(body)[1]
    return number


def decode_execute(
    body: memoryview, inputs: tuple[str, ...], outputs: tuple[str, ...], model: str, locate: Locate
) -> ExecuteFrame:
    """Decode the body of an EXECUTE frame in the worker, without checks. Tensors are views of `body`."""
    length, batch, count = _BATCH.unpack_from(body)
    start = _BATCH.size + count * KEY.size
    end = start + length
    if length <= REMEMBERED_BYTES:
        forms = _known_requests(bytes(body[start:end]), count, inputs, outputs)
    else:
        forms = _requests(body[start:end], count, inputs, outputs)
    base = data_start(end)
    items = []
    for (key,), (rows, seat, request_id, tensors, wanted, parameters, timeout_us, correlation, starts, ends) in zip(
        KEY.iter_unpack(body[_BATCH.size : start]), forms, strict=True
    ):
        request = InferenceRequest(
            model,
            "",
            request_id,
            make_tensors(tensors, body, base, locate, False),
            wanted,
            json.loads(parameters) if parameters else {},
            0,
            timeout_us,
            correlation,
            starts,
            ends,
        )
        items.append(BatchItem(key, request, rows, False, seat=seat))
    return ExecuteFrame(batch, items)


_RequestForm = tuple[int, int, str, Sequence[TensorForm], tuple[str, ...], bytes, int, int | str, bool, bool]
"""Rows, seat, id, inputs, outputs, parameters as JSON, timeout, correlation, START, END."""


def _requests(
    described: Buffer, count: int, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> Sequence[_RequestForm]:
    forms: list[_RequestForm] = []
    at = 0
    for _ in range(count):
        correlation, timeout_us, rows, seat, *lengths, flags, n_inputs, n_outputs = _REQUEST.unpack_from(described, at)
        parameters_length, id_length, text_length = lengths
        at += _REQUEST.size
        request_id = str(described[at : at + id_length], "utf-8")
        at += id_length
        if text_length != NUMERIC:
            correlation = str(described[at : at + text_length], "utf-8")
            at += text_length
        parameters = bytes(described[at : at + parameters_length])
        at += parameters_length
        end = at + n_outputs * _POSITION.size
        wanted = tuple([outputs[position] for (position,) in _POSITION.iter_unpack(described[at:end])])
        tensors, at = read_tensors(described, end, n_inputs, inputs)
        starts, ends = bool(flags & 1), bool(flags & 2)
        forms.append((rows, seat, request_id, tensors, wanted, parameters, timeout_us, correlation, starts, ends))
    return forms


_known_requests = lru_cache(REMEMBERED)(_requests)
