"""Read a large ModelInferRequest without one long call: protobuf gets all but the tensors' data.

Entries of `raw_input_contents` are views of the message. The typed `contents` of large inputs are decoded in steps.
What is neither is bounded, because protobuf parses it at once.

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
from halimede.core.types.tensor import Buffer
from halimede.core.wire.protocol import ModelInferRequest, ProtoMessage, message_class, not_parsed, parse
from halimede.core.wire.steps import Steps

LARGE_BYTES = 32 << 10
"""Messages of more bytes are read here; below, one call of protobuf costs less."""

MAX_OTHER_BYTES = 4 << 20
"""What a large message has beside its tensors' data."""

MAX_FIELDS = 20_000
"""Fields of one message, and of one input, without the elements of `contents`."""

_PIECE_BYTES = 32 << 10
"""Of packed numbers, decoded in one step."""
_STEP_ELEMENTS = 2048
"""Elements that are not packed, in one step."""
_COPIED_BYTES = 1 << 20

# Kinds of values.
_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES = 10

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
_KINDS = {1: _VARINT, 2: _VARINT, 3: _VARINT, 4: _VARINT, 5: _VARINT, 6: _FIXED32, 7: _FIXED64, 8: _SIZED}
"""The kind of one element of each field, outside of packed ones."""

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
    for number, kind, start, value, stop in fields(view, MAX_FIELDS):
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
    found: dict[str, _Elements] = {}
    count = 0
    try:
        for part in parts:
            for number, kind, _, value, stop in fields(part):
                name = _NAMES.get(number)
                if name is None or kind not in (_SIZED, _KINDS[number]):
                    continue  # Fields that later versions may have.
                elements = found.get(name)
                if elements is None:
                    elements = found[name] = _Elements(name, convert)
                if name == _BYTES_CONTENTS:
                    elements.add_bytes(part[value:stop])
                elif kind == _SIZED:
                    yield from elements.add_packed(part[value:stop])
                else:
                    elements.add_single(part[value:stop])
                count += 1
                if count == _STEP_ELEMENTS or elements.collected_bytes >= _COPIED_BYTES:
                    count = 0
                    for each in found.values():
                        yield from each.flush()
        for each in found.values():
            yield from each.flush()
    except _Malformed as error:
        raise not_parsed(_InferTensorContents, error.size) from None
    return {name: each.data for name, each in found.items() if len(each.data)}


class _Elements:
    """The elements of one field, in the order in which they come: packed, or each as a field of its own."""

    def __init__(self, name: str, convert: Convert) -> None:
        self._name = name
        self._dtype = CONTENTS_DATATYPES[name].dtype
        self._convert = convert
        self._parts: list[Buffer] = []
        self.collected_bytes = 0
        """What `flush` is to add."""
        self._copied = bytearray()
        self.data: Buffer = self._copied
        """The tensor's data, complete after `flush`."""

    def add_bytes(self, element: memoryview) -> None:
        self._parts += (len(element).to_bytes(4, "little"), element)
        self.collected_bytes += 4 + len(element)

    def add_single(self, encoded: memoryview) -> None:
        """An element that is not packed."""
        self._parts.append(encoded)
        self.collected_bytes += len(encoded)

    def add_packed(self, run: memoryview) -> Steps[None]:
        yield from self.flush()
        yield from self._add_run(run)

    def flush(self) -> Steps[None]:
        """Add what is collected."""
        if not self._parts:
            return
        parts, self._parts = self._parts, []
        size, self.collected_bytes = self.collected_bytes, 0
        if self._name != _BYTES_CONTENTS:
            yield from self._add_run(memoryview(b"".join(parts)))
        elif size <= 2 * _COPIED_BYTES:
            self._copied += b"".join(parts)
            yield size
        else:
            for part in parts:
                yield from self._copy(memoryview(part))

    def _add_run(self, run: memoryview) -> Steps[None]:
        if self._dtype.kind != "f":
            yield from self._add_varints(run)
            return
        if len(run) % self._dtype.itemsize:
            raise _Malformed(len(run))
        if not len(self.data):
            # The usual case: one run, which needs no copy.
            self.data = run
            return
        if self.data is not self._copied:
            first, self.data = memoryview(self.data), self._copied
            yield from self._copy(first)
        yield from self._copy(run)

    def _copy(self, data: memoryview) -> Steps[None]:
        for at in range(0, len(data), _COPIED_BYTES):
            piece = data[at : at + _COPIED_BYTES]
            self._copied += piece
            yield len(piece)

    def _add_varints(self, run: memoryview) -> Steps[None]:
        at = 0
        while at < len(run):
            piece = np.frombuffer(run[at : at + _PIECE_BYTES], np.uint8)
            ends = np.flatnonzero(piece < 128)
            if not len(ends):
                raise _Malformed(len(run))
            numbers = _numbers(piece, ends)
            if self._dtype.kind == "b":
                values: NDArray[Any] = numbers != 0
            else:
                # As protobuf does, numbers of 32 bits are cut.
                values = (numbers.astype(np.uint32) if self._dtype.itemsize == 4 else numbers).view(self._dtype)
            values = self._convert(self._name, values)
            self._copied += values.view(np.uint8).data
            at += int(ends[-1]) + 1
            yield values.nbytes


def _numbers(piece: NDArray[np.uint8], ends: NDArray[np.intp]) -> NDArray[np.uint64]:
    """The varints whose last bytes are at `ends`."""
    starts = np.zeros_like(ends)
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts
    longest = int(np.max(lengths))
    if longest >= _VARINT_BYTES:
        raise _Malformed(len(piece))
    numbers = (piece[starts] & 127).astype(np.uint64)
    for at in range(1, longest + 1):
        longer = np.flatnonzero(lengths >= at)
        numbers[longer] |= (piece[starts[longer] + at] & 127).astype(np.uint64) << np.uint64(7 * at)
    return numbers


def _without_contents(tensor: memoryview) -> tuple[bytes, list[memoryview]]:
    """An encoded InferInputTensor whose `contents` are empty, and the contents."""
    others: list[Buffer] = []
    parts: list[memoryview] = []
    for number, kind, start, value, stop in fields(tensor, MAX_FIELDS):
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


def fields(view: memoryview, most: int | None = None) -> Iterator[_Field]:
    """The fields of an encoded message. _Malformed for invalid bytes; INVALID_ARG for more than `most`."""
    at, end = 0, len(view)
    count = 0
    while at < end:
        count += 1
        if most is not None and count > most:
            raise InferenceError(
                ErrorCode.INVALID_ARG, f"the message has more than {most} fields beside its tensors' elements"
            )
        start = at
        tag = view[at]
        if tag < 128:
            at += 1
        else:
            tag, at = _varint(view, at, end)
        number, kind = tag >> 3, tag & 7
        if not number or tag >= 1 << 32:
            raise _Malformed(end)
        value = at
        if kind == _SIZED:
            if at < end and (size := view[at]) < 128:
                value = at + 1
            else:
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
    while at < end and shift < 7 * _VARINT_BYTES:
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
