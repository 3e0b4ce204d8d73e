"""Walks a protobuf message in memory without its schema. What is not needed is skipped, not read."""

import mmap
from collections.abc import Iterator

Data = bytes | mmap.mmap
Range = tuple[int, int]
"""First and last byte (exclusive) of a field in the data."""


def walk(data: Data, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The fields of the message in this range, in the file's order: number, and the range of a length-delimited field,
    or the value of a varint and 0. Fields of fixed size are left out. ValueError if it is not a message."""
    at = start
    while at < stop:
        key, at = _varint(data, at, stop)
        match key & 7:
            case 0:
                value, at = _varint(data, at, stop)
                yield key >> 3, value, 0
            case 1:
                at += 8
            case 2:
                size, at = _varint(data, at, stop)
                if size > stop - at:
                    raise ValueError(f"a field of {size} bytes at byte {at} ends after its message")
                yield key >> 3, at, at + size
                at += size
            case 5:
                at += 4
            case wire_type:
                raise ValueError(f"wire type {wire_type} at byte {at}")
    if at > stop:
        raise ValueError(f"a field at byte {stop} ends after its message")


def nested(data: Data, within: Range, number: int) -> Iterator[Range]:
    """The ranges of the length-delimited fields with that number."""
    return ((start, stop) for field, start, stop in walk(data, *within) if field == number and stop)


def text(data: Data, at: Range) -> str:
    """A string field. ValueError if it is not UTF-8."""
    return data[at[0] : at[1]].decode()


def signed(value: int) -> int:
    """The number of an int32 or int64 field, whose negative values are large varints."""
    return value - (1 << 64) if value >> 63 else value


def _varint(data: Data, at: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64 and at < stop:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError(f"a number at byte {at} {'is cut off' if at >= stop else 'has more than 64 bits'}")
