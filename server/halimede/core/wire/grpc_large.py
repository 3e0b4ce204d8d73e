"""Read a large ModelInferRequest without one long call: protobuf gets all but the tensors' data.

Entries of `raw_input_contents` are views of the message. The typed `contents` of large inputs are decoded in steps:
protobuf parses pieces of them, cut between elements. What is neither is bounded, because protobuf parses it at once.

The wire format is protobuf's own: a message is a sequence of fields, each a tag (the field's number, and three bits for
the kind of what follows), and a value. Fields of a message may come in any order, and a sub-message that comes several
times is the concatenation of them all. Groups, which no client of these messages writes, are refused.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.core.types import DataType, ErrorCode, InferenceError
from halimede.core.types.tensor import Buffer, join_bytes
from halimede.core.wire.protocol import ModelInferRequest, ProtoMessage, message_class, not_parsed, parse
from halimede.core.wire.steps import Steps

LARGE_BYTES = 32 << 10
"""Messages of more bytes are read here; below, one call of protobuf costs less."""

MAX_OTHER_BYTES = 4 << 20
"""What a large message has beside its tensors' data."""

MAX_FIELDS = 20_000
"""Fields of one message, and of one input, without the elements of `contents`."""

_PIECE_BYTES = 256 << 10
_PIECE_ELEMENTS = 64 << 10
_COPIED_BYTES = 4 << 20

# Kinds of values.
_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5

# Numbers of fields: ModelInferRequest.inputs, .raw_input_contents, InferInputTensor.contents.
_INPUTS, _RAW_INPUT_CONTENTS, _CONTENTS = 5, 7, 5
_InferTensorContents = message_class("inference.InferTensorContents")
_NAMES = {number: field.name for number, field in _InferTensorContents.DESCRIPTOR.fields_by_number.items()}
_BYTES_CONTENTS = "bytes_contents"
CONTENTS_DATATYPES = {
    "bool_contents": DataType.BOOL,
    "int_contents": DataType.INT32,
    "int64_contents": DataType.INT64,
    "uint_contents": DataType.UINT32,
    "uint64_contents": DataType.UINT64,
    "fp32_contents": DataType.FP32,
    "fp64_contents": DataType.FP64,
    _BYTES_CONTENTS: DataType.BYTES,
}
"""The fields of InferTensorContents, and the datatype of each one's elements."""

Convert = Callable[[str, NDArray[Any]], NDArray[Any]]
Contents = dict[str, Buffer]
"""The fields of one InferTensorContents that have elements, as tensor data: little-endian, BYTES in wire layout."""


@dataclass(slots=True)
class LargeRequest:
    """`message` is the request without what the others hold. `raws` are all entries of `raw_input_contents`;
    `contents` are the InferTensorContents of large inputs, encoded, by the input's place."""

    message: ProtoMessage
    raws: list[Buffer]
    contents: dict[int, list[memoryview]]


def read_large(raw: Buffer) -> LargeRequest:
    """Cut a ModelInferRequest. Nothing is copied but what is beside the tensors' data.

    INTERNAL if it is no valid message, INVALID_ARG if it has too much beside the tensors' data.
    """
    try:
        return _cut(memoryview(raw))
    except _Malformed:
        raise not_parsed(ModelInferRequest, len(raw)) from None


def _cut(view: memoryview) -> LargeRequest:
    raws: list[Buffer] = []
    contents: dict[int, list[memoryview]] = {}
    others: list[Buffer] = []
    inputs = 0
    for number, kind, start, value, stop in _fields(view, MAX_FIELDS):
        if number == _RAW_INPUT_CONTENTS and kind == _SIZED:
            raws.append(view[value:stop])
            continue
        if number == _INPUTS and kind == _SIZED:
            if stop - value > LARGE_BYTES:
                tensor, parts = _without_contents(view[value:stop])
                others += (_tag(_INPUTS, len(tensor)), tensor)
                contents[inputs] = parts
            else:
                others.append(view[start:stop])
            inputs += 1
            continue
        others.append(view[start:stop])
    size = sum(map(len, others))
    if size > MAX_OTHER_BYTES:
        raise InferenceError(
            ErrorCode.INVALID_ARG,
            f"the message has {size} bytes beside its tensors' data, at most {MAX_OTHER_BYTES} are taken",
        )
    return LargeRequest(parse(ModelInferRequest, b"".join(others)), raws, contents)


def read_contents(parts: Sequence[memoryview], convert: Convert) -> Steps[Contents]:
    """Decode encoded InferTensorContents, which together are one, in steps of some milliseconds.

    `convert` gets the name of a field and some of its elements, and returns them as the tensor has them.
    """
    found: dict[str, list[NDArray[Any]]] = {}
    pieces = _pieces(parts)
    while (piece := _next(pieces)) is not None:
        if not isinstance(piece, memoryview):
            name, array = piece
            if array.size:
                found.setdefault(name, []).append(array)
            continue
        held = 0
        for field, values in parse(_InferTensorContents, bytes(piece)).ListFields():
            if field.name == _BYTES_CONTENTS:
                array = np.frombuffer(join_bytes(values), np.uint8)
            else:
                array = convert(field.name, np.array(values[:], CONTENTS_DATATYPES[field.name].dtype))
            found.setdefault(field.name, []).append(array)
            held += array.nbytes
        yield held
    contents: Contents = {}
    for name, arrays in found.items():
        contents[name] = yield from _join(arrays)
    return contents


def _next(pieces: "Iterator[_Piece]") -> "_Piece | None":
    try:
        return next(pieces, None)
    except _Malformed as error:
        raise not_parsed(_InferTensorContents, error.size) from None


def _join(arrays: Sequence[NDArray[Any]]) -> Steps[Buffer]:
    """The bytes of all arrays."""
    if len(arrays) == 1:
        return arrays[0].view(np.uint8).data
    size = sum([array.nbytes for array in arrays])
    yield size
    joined = np.empty(size, np.uint8)
    at = begin = 0
    for array in arrays:
        joined[at : at + array.nbytes] = array.view(np.uint8)
        at += array.nbytes
        if at - begin >= _COPIED_BYTES:
            begin = at
            yield 0
    return joined.data


_Piece = memoryview | tuple[str, NDArray[Any]]


def _pieces(parts: Sequence[memoryview]) -> Iterator[_Piece]:
    """Encoded InferTensorContents, each with few elements; or a field and its elements, for packed floats."""
    for part in parts:
        begin = end = count = 0
        for number, kind, start, value, stop in _fields(part):
            if kind == _SIZED and number in _NAMES and _NAMES[number] != _BYTES_CONTENTS:
                # Packed: the field has many elements in one value.
                if end > begin:
                    yield part[begin:end]
                yield from _packed(_NAMES[number], number, part[value:stop])
                begin = end = stop
                count = 0
                continue
            if count == _PIECE_ELEMENTS or stop - begin > _PIECE_BYTES:
                if end > begin:
                    yield part[begin:end]
                begin, count = start, 0
            end = stop
            count += 1
        if end > begin:
            yield part[begin:end]


def _packed(name: str, number: int, elements: memoryview) -> Iterator[_Piece]:
    dtype = CONTENTS_DATATYPES[name].dtype
    if dtype.kind == "f":
        if len(elements) % dtype.itemsize:
            raise _Malformed(len(elements))
        yield name, np.frombuffer(elements, dtype)
        return
    at, end = 0, len(elements)
    while at < end:
        stop = min(at + _PIECE_ELEMENTS, end)
        # Between elements: the last byte of a varint is below 128.
        while stop < end and elements[stop - 1] & 128:
            stop += 1
        yield memoryview(_tag(number, stop - at) + bytes(elements[at:stop]))
        at = stop


def _without_contents(tensor: memoryview) -> tuple[bytes, list[memoryview]]:
    """An encoded InferInputTensor whose `contents` are empty, and the contents."""
    others: list[Buffer] = []
    parts: list[memoryview] = []
    for number, kind, start, value, stop in _fields(tensor, MAX_FIELDS):
        if number == _CONTENTS and kind == _SIZED:
            parts.append(tensor[value:stop])
        else:
            others.append(tensor[start:stop])
    if parts:
        others.append(_tag(_CONTENTS, 0))
    return b"".join(others), parts


def _tag(number: int, size: int) -> bytes:
    """What precedes a value of `size` bytes."""
    return bytes((number << 3 | _SIZED,)) + varint(size)


def varint(value: int) -> bytes:
    """A number of seven bits a byte, the lowest first."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_Field = tuple[int, int, int, int, int]
"""Number, kind of value, and where the field, its value and its end are."""


def _fields(view: memoryview, most: int | None = None) -> Iterator[_Field]:
    """The fields of an encoded message. _Malformed if it is none; INVALID_ARG for more than `most`."""
    at, end = 0, len(view)
    count = 0
    while at < end:
        count += 1
        if most is not None and count > most:
            raise InferenceError(
                ErrorCode.INVALID_ARG, f"the message has more than {most} fields beside its tensors' elements"
            )
        start = at
        tag, at = _varint(view, at, end)
        number, kind = tag >> 3, tag & 7
        if not number or tag >= 1 << 32:
            raise _Malformed(end)
        value = at
        if kind == _SIZED:
            size, value = _varint(view, at, end)
            at = value + size
        elif kind == _VARINT:
            _, at = _varint(view, at, end)
        elif kind == _FIXED32:
            at += 4
        elif kind == _FIXED64:
            at += 8
        else:
            raise _Malformed(end)
        if at > end:
            raise _Malformed(end)
        yield number, kind, start, value, at


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    """The number at a place, and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _Malformed(end)


class _Malformed(Exception):
    """`size` bytes are no message."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
