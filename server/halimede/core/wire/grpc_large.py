"""Read a large ModelInferRequest without one long call: protobuf gets all but the tensors' data.

Entries of `raw_input_contents` are views of the message. The typed `contents` of large inputs are decoded in steps.
What is neither is bounded, because protobuf parses it at once.

The wire format is protobuf's own: a message is a sequence of fields, each a tag (the field's number, and three bits for
the kind of what follows), and a value. Fields of a message may come in any order, and a sub-message that comes several
times is the concatenation of them all. Groups, which no client of these messages writes, are refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from halimede.core.types import DataType, InferenceError, invalid
from halimede.core.types.tensor import Buffer
from halimede.core.wire.growing_bytes import GrowingBytes
from halimede.core.wire.protocol import ModelInferRequest, ProtoMessage, message_class, not_parsed, parse
from halimede.core.wire.steps import Steps

LARGE_BYTES = 32 << 10
"""Messages of more bytes are read here; below, one call of protobuf costs less."""

MAX_OTHER_BYTES = 4 << 20
"""What a large message has beside its tensors' data."""

MAX_FIELDS = 20_000
"""Fields of one message, of one input, and of its `contents`, without the elements of these. Short runs of packed
elements count."""

_PIECE_BYTES = 32 << 10
"""Of packed numbers, decoded in one step."""
_FIELDS_AT_ONCE = 1024
"""Fields that are no elements, in one step."""
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
_TAGS = {_NAMES[number]: number << 3 | kind for number, kind in _KINDS.items()}
_STRING_TAG = _TAGS[_BYTES_CONTENTS]
LONG_BYTES = 128
"""From this size on the size of a field takes more than a byte."""
_SHORT_LENGTHS = tuple(size.to_bytes(4, "little") for size in range(LONG_BYTES))


class Announced(Protocol):
    """What a request says of an input before its elements."""

    @property
    def field(self) -> str:
        """The field for elements of its datatype; "" for a datatype without one."""

    @property
    def most(self) -> int:
        """The number of elements that its shape gives."""

    def convert(self, elements: NDArray[Any]) -> NDArray[Any]:
        """Elements of the field as the tensor has them. INVALID_ARG for a value outside the datatype."""

    def wrong_field(self, field: str) -> InferenceError:
        """The error for elements in another field."""

    def too_many(self) -> InferenceError:
        """The error for more elements than `most`."""


@dataclass(slots=True)
class LargeRequest:
    """`message` is the request without what the others hold. `raws` are all entries of `raw_input_contents`;
    `contents` are the InferTensorContents of large inputs, encoded, by the input's position."""

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
        raise invalid(f"the message has {size} bytes beside its tensors' data, at most {MAX_OTHER_BYTES} are taken")
    return LargeRequest(parse(ModelInferRequest, b"".join(others)), raws, contents)


def read_contents(parts: Sequence[memoryview], announced: Announced) -> Steps[Buffer]:
    """Decode encoded InferTensorContents, which together are one, in steps of some milliseconds.

    Returns the elements of the announced field as tensor data: little-endian, BYTES in wire layout. INVALID_ARG for
    elements of another field, and as soon as there are more of them than announced.
    """
    elements = (_Strings if announced.field == _BYTES_CONTENTS else _Numbers)(announced)
    others = 0
    try:
        for part in parts:
            at = 0
            while at < len(part):
                before = elements.copied.size_bytes
                if used := elements.add_singles(part[at : at + _PIECE_BYTES]):
                    at += used
                    yield elements.copied.size_bytes - before
                    continue
                rest = part[at:]
                number, kind, _, value, stop = next(fields(rest))
                at += stop
                name = _NAMES.get(number)
                if name == announced.field and kind == _SIZED and stop - value > LONG_BYTES:
                    yield from elements.add_sized(rest[value:stop])
                    continue
                # Each costs a microsecond, whatever its size.
                others += 1
                if others > MAX_FIELDS:
                    raise _too_many_fields(MAX_FIELDS)
                if others % _FIELDS_AT_ONCE == 0:
                    yield 0
                if name is None or kind not in (_SIZED, _KINDS[number]):
                    continue  # Fields that later versions may have.
                is_element = kind == _KINDS[number]
                if name == announced.field and kind == _SIZED:
                    yield from elements.add_sized(rest[value:stop])
                elif is_element or stop > value:
                    raise announced.wrong_field(name)
    except _Malformed as error:
        raise not_parsed(_InferTensorContents, error.size) from None
    return elements.data


class _Elements:
    def __init__(self, announced: Announced) -> None:
        self._announced = announced
        self._count = 0
        self.copied = GrowingBytes()

    def _count_more(self, count: int) -> None:
        self._count += count
        if self._count > self._announced.most:
            raise self._announced.too_many()


class _Strings(_Elements):
    """The elements of `bytes_contents`, in wire layout."""

    @property
    def data(self) -> Buffer:
        return self.copied.content()

    def add_singles(self, piece: memoryview) -> int:
        """Add the strings of less than 128 bytes at the start of a piece. Returns the number of bytes read."""
        if piece[0] != _STRING_TAG or len(piece) < 2 or piece[1] >= LONG_BYTES:
            return 0
        raw = bytes(piece)
        parts: list[bytes] = []
        at, end = 0, len(raw)
        while at + 1 < end and raw[at] == _STRING_TAG:
            size = raw[at + 1]
            stop = at + 2 + size
            if size >= LONG_BYTES or stop > end:
                break
            parts.append(_SHORT_LENGTHS[size])
            parts.append(raw[at + 2 : stop])
            at = stop
        self._count_more(len(parts) // 2)
        self.copied.add(b"".join(parts))
        return at

    def add_sized(self, element: memoryview) -> Steps[None]:
        """Add one string."""
        self._count_more(1)
        self.copied.add(len(element).to_bytes(4, "little"))
        yield 4
        yield from _copy_steps(element, self.copied)


class _Numbers(_Elements):
    """The elements of another field, in the order in which they come: packed, or each as a field of its own."""

    def __init__(self, announced: Announced) -> None:
        super().__init__(announced)
        self._view: memoryview | None = None
        """The only run of floats, of which nothing is copied."""
        # Without a field for the datatype all elements are in a wrong one.
        self._dtype = CONTENTS_DATATYPES.get(announced.field, DataType.BOOL).dtype
        self._tag = _TAGS.get(announced.field, 0)

    def add_singles(self, piece: memoryview) -> int:
        """Add the elements at the start of a piece that are not packed. Returns the number of bytes read."""
        if piece[0] != self._tag:
            return 0
        raw = np.frombuffer(piece, np.uint8)
        if self._dtype.kind == "f":
            width = 1 + self._dtype.itemsize
            rows = raw[: len(raw) // width * width].reshape(-1, width)
            count = _leading(rows[:, 0] == self._tag)
            self._count_more(count)
            self._end_view()
            self.copied.add(rows[:count, 1:].tobytes())
            return count * width
        # Tags and the last bytes of numbers are below 128, and take turns.
        low = np.flatnonzero(raw < 128)
        ends = low[1::2]
        tags = low[: 2 * len(ends) : 2]
        starts = np.zeros_like(ends)
        starts[1:] = ends[:-1] + 1
        count = _leading((tags == starts) & (raw[tags] == self._tag))
        if not count:
            return 0
        used = int(ends[count - 1]) + 1
        self._add_varints(np.delete(raw[:used], tags[:count]))
        return used

    def add_sized(self, run: memoryview) -> Steps[None]:
        """Add packed elements."""
        if self._dtype.kind != "f":
            yield from self._add_run(run)
            return
        if len(run) % self._dtype.itemsize:
            raise _Malformed(len(run))
        self._count_more(len(run) // self._dtype.itemsize)
        if not self._view and not self.copied.size_bytes:
            # The usual case: one run, which needs no copy.
            self._view = run
            return
        yield self._end_view()
        yield from _copy_steps(run, self.copied)

    @property
    def data(self) -> Buffer:
        return self.copied.content() if self._view is None else self._view

    def _end_view(self) -> int:
        """More elements come: copy those that are a view. Returns their size."""
        view, self._view = self._view, None
        if view is None:
            return 0
        self.copied.add(view)
        return len(view)

    def _add_run(self, run: memoryview) -> Steps[None]:
        at = 0
        while at < len(run):
            piece = np.frombuffer(run[at : at + _PIECE_BYTES], np.uint8)
            before = self.copied.size_bytes
            used = self._add_varints(piece)
            if not used:
                raise _Malformed(len(run))
            at += used
            yield self.copied.size_bytes - before

    def _add_varints(self, piece: NDArray[np.uint8]) -> int:
        """Add the whole numbers in a piece. Returns the number of their bytes."""
        ends = np.flatnonzero(piece < 128)
        if not len(ends):
            return 0
        self._count_more(len(ends))
        numbers = _numbers(piece, ends)
        if self._dtype.kind == "b":
            values: NDArray[Any] = numbers != 0
        else:
            # As protobuf does, numbers of 32 bits are cut.
            values = (numbers.astype(np.uint32) if self._dtype.itemsize == 4 else numbers).view(self._dtype)
        self.copied.add(self._announced.convert(values).view(np.uint8).data)
        return int(ends[-1]) + 1


def _copy_steps(data: memoryview, into: GrowingBytes) -> Steps[None]:
    for at in range(0, len(data), _COPIED_BYTES):
        piece = data[at : at + _COPIED_BYTES]
        into.add(piece)
        yield len(piece)


def _leading(flags: NDArray[np.bool_]) -> int:
    """How many flags are set before the first that is not."""
    return len(flags) if flags.all() else int(np.argmin(flags))


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


def _too_many_fields(most: int) -> InferenceError:
    return invalid(f"the message has more than {most} fields beside its tensors' elements")


_Field = tuple[int, int, int, int, int]
"""Number, kind of value, and where the field, its value and its end are."""


def fields(view: memoryview, most: int | None = None) -> Iterator[_Field]:
    """The fields of an encoded message. _Malformed for invalid bytes; INVALID_ARG for more than `most`."""
    at, end = 0, len(view)
    count = 0
    while at < end:
        count += 1
        if most is not None and count > most:
            raise _too_many_fields(most)
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
    """The number at a position, and where it ends."""
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
