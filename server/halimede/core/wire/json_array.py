"""Read JSON arrays of numbers and strings as tensors, in steps of at most a few milliseconds each.

A large array is cut at commas outside of strings. A piece that begins inside d arrays and ends inside e arrays is
parsed as a document of its own, with d opening brackets before it and e closing ones after it. This accepts exactly the
valid arrays if two more conditions are checked: a piece after a comma begins with a value, and a piece before a comma
ends with one. The same parser reads small and large documents, so that both get the same result.

A piece with many arrays is parsed without them: their objects, and the searches of the garbage collector for more of
them, cost three times as much as an array without nesting of the same size.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from halimede.core.types import DataType, InferenceError
from halimede.core.types.error import clip, invalid
from halimede.core.types.tensor import Buffer, join_bytes
from halimede.core.wire.json_scan import JSON_SPACE, SPACES, ScannedJson, load_json, malformed
from halimede.core.wire.raw_tensor import LENGTH_BYTES
from halimede.core.wire.steps import Steps

MAX_NUMBER_BYTES = 64 << 10
"""Maximum length of an element that is not a string."""

_FLOATS = (DataType.FP32, DataType.FP64)
_UNSIGNED = (DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64)


def pack(name: str, datatype: DataType, count: int, values: list[Any]) -> Buffer:
    """Pack the parsed array of input `name` in wire layout; INVALID_ARG unless it has `count` such elements."""
    values = _flatten(values)
    if len(values) != count:
        raise _wrong_count()
    _check_kinds(datatype, values)
    if datatype is DataType.BYTES:
        return join_bytes(values)
    return _to_array(name, datatype, values).tobytes()


def pack_steps(name: str, datatype: DataType, count: int, layout: ScannedJson, span: int) -> Steps[Buffer]:
    """As `pack`, for a span of a scanned document."""
    view, block_bytes = layout.view, layout.block_bytes
    opened, closed = layout.spans[span]
    # An element takes a character and a comma, so memory is never allocated for more elements than could be sent.
    if count > (closed - opened) // 2:
        raise _wrong_count()
    is_bytes = datatype is DataType.BYTES
    # Room for all strings, which are never longer than their JSON: a growing buffer would be copied whole in one step.
    size = LENGTH_BYTES * (count + 1) + closed - opened if is_bytes else count * datatype.itemsize
    yield size
    numbers = np.empty(0 if is_bytes else count, datatype.dtype)
    strings = np.empty(size if is_bytes else 0, np.uint8).data
    strings_end = filled = 0
    start, depth = opened, 1
    cuts = range(bisect_left(layout.cut_at, opened), bisect_left(layout.cut_at, closed))
    for i in (*cuts, None):
        stop, stop_depth = (closed, 1) if i is None else (layout.cut_at[i], layout.cut_depth[i])
        long_string = None
        if stop - start > 2 * block_bytes:
            piece, long_string = yield from _lone_element_steps(view, start + 1, stop, block_bytes)
        else:
            piece = bytes(view[start + 1 : stop])
        if (start != opened and piece.lstrip(JSON_SPACE)[:1] in (b"", b"]")) or (
            stop != closed and piece.rstrip(JSON_SPACE)[-1:] in (b"", b"[")
        ):
            raise malformed("a value is missing beside a comma", start + 1)
        values = _load_piece(b"[" * depth + piece + b"]" * stop_depth, datatype, start + 1 - depth)
        # Each element of the rest takes a character and a comma.
        if not count - (closed - stop + 1) // 2 <= filled + len(values) <= count:
            raise _wrong_count()
        _check_kinds(datatype, values)
        if long_string is not None:
            if values != [""]:
                raise malformed("more than one value between commas", start + 1)
            length_at, strings_end = strings_end, strings_end + LENGTH_BYTES
            for chunk in _string_chunks(view, *long_string, block_bytes):
                strings[strings_end : strings_end + len(chunk)] = chunk
                strings_end += len(chunk)
                yield 0
            size = strings_end - length_at - LENGTH_BYTES
            strings[length_at : length_at + LENGTH_BYTES] = size.to_bytes(LENGTH_BYTES, "little")
        elif is_bytes:
            chunk = join_bytes(values)
            strings[strings_end : strings_end + len(chunk)] = chunk
            strings_end += len(chunk)
        else:
            numbers[filled : filled + len(values)] = _to_array(name, datatype, values)
        filled += len(values)
        start, depth = stop, stop_depth
        yield 0
    if filled != count:
        raise _wrong_count()
    if is_bytes:
        return strings[:strings_end]
    return numbers.view(np.uint8).data if count else b""


def _load_piece(text: bytes, datatype: DataType, offset: int) -> list[Any]:
    """The elements of a piece, flat. Triton accepts the tokens NaN, Infinity and -Infinity as floats; JSON not."""
    if datatype not in _FLOATS or (b"NaN" not in text and b"Infinity" not in text):
        return _elements(text, offset)
    # null, true and false are errors in float data, so these words can stand for the tokens during parsing.
    if b"null" in text or b"true" in text or b"false" in text:
        raise _wrong_kind(datatype)
    text = text.replace(b"-Infinity", b"false").replace(b"Infinity", b"true").replace(b"NaN", b"null")
    return [
        np.nan if value is None else np.inf if value is True else -np.inf if value is False else value
        for value in _elements(text, offset)
    ]


def _elements(text: bytes, offset: int) -> list[Any]:
    """The elements of a piece that is JSON, flat."""
    if text.count(b"[") > _MANY_ARRAYS and (flat := _without_arrays(text)) is not None:
        try:
            found: list[Any] = orjson.loads(flat)
        except orjson.JSONDecodeError:
            pass  # The error is that of the text itself.
        else:
            return found
    return _flatten(load_json(text, offset))


_MANY_ARRAYS = 256
"""Arrays in a piece. From there on their objects cost more than their elements."""
_OPEN, _CLOSE, _COMMA = b"[],"
_BLANK_BRACKETS = bytes.maketrans(b"[]", b"  ")
_LEFT_COMMAS = re.compile(rb",[ \t\n\r,]*,")


def _without_arrays(text: bytes) -> bytes | None:
    """A nested array of numbers as the text of a flat one, where brackets match; None if that may not be right.

    The text of the numbers is not checked.
    """
    if b'"' in text or b"{" in text:
        return None
    dense = text.translate(None, JSON_SPACE)
    left, right = (np.frombuffer(dense, np.uint8)[part] for part in (slice(-1), slice(1, None)))
    wrong = (
        (left == _COMMA) & ((right == _COMMA) | (right == _CLOSE)),
        (left == _OPEN) & (right == _COMMA),
        (left == _CLOSE) & (right != _COMMA) & (right != _CLOSE),
        (right == _OPEN) & (left != _COMMA) & (left != _OPEN),
    )
    if any(each.any() for each in wrong):
        return None
    flat = text.translate(_BLANK_BRACKETS)
    if b"[]" in dense:
        # Of an empty array, one of the commas beside it is left, or both.
        flat = _LEFT_COMMAS.sub(b",", flat).strip(JSON_SPACE + b",")
    return b"[" + flat + b"]"


def _flatten(values: list[Any]) -> list[Any]:
    """All elements of nested lists, in order: the nesting need not match the shape. The depth was already checked."""
    if list not in set(map(type, values)):
        return values
    flat: list[Any] = []
    _extend(flat, values)
    return flat


def _extend(flat: list[Any], values: list[Any]) -> None:
    kinds = set(map(type, values))
    if list not in kinds:
        flat += values
    elif len(kinds) == 1:
        _extend(flat, list(chain.from_iterable(values)))
    else:
        for value in values:
            if type(value) is list:
                _extend(flat, value)
            else:
                flat.append(value)


def _kind(datatype: DataType) -> tuple[set[type], str]:
    """The types of a datatype's elements, and the error text for others."""
    if datatype is DataType.BYTES:
        return {str}, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
    cause = "Unable to parse 'data': attempt to access JSON"
    if datatype in _FLOATS:
        return {int, float}, f"{cause} non-number as double"
    if datatype is DataType.BOOL:
        return {bool}, f"{cause} non-boolean as boolean"
    name = "unsigned-integer" if datatype in _UNSIGNED else "signed-integer"
    return {int}, f"{cause} non-{name} as {name}"


_KINDS = {datatype: _kind(datatype) for datatype in DataType}


def _check_kinds(datatype: DataType, values: list[Any]) -> None:
    if not set(map(type, values)) <= _KINDS[datatype][0]:
        raise _wrong_kind(datatype)


def _to_array(name: str, datatype: DataType, values: list[Any]) -> NDArray[Any]:
    try:
        # A double outside the range of FP32 becomes infinite, as in Triton.
        with np.errstate(over="ignore"):
            return np.array(values, datatype.dtype)
    except OverflowError:
        integers: np.dtype[Any] = datatype.dtype
        limits = np.iinfo(integers)
        value = next(value for value in values if not limits.min <= value <= limits.max)
        raise invalid(
            f"Unable to parse 'data': {value} of input '{clip(name)}' is out of range for datatype {datatype.name},"
            f" {limits.min} to {limits.max}"
        ) from None


def _wrong_count() -> InferenceError:
    return invalid("Unable to parse 'data': Shape does not match true shape of 'data' field")


def _wrong_kind(datatype: DataType) -> InferenceError:
    return invalid(_KINDS[datatype][1])


# ---- One element that is longer than a piece


def _lone_element_steps(
    view: memoryview, start: int, stop: int, block_bytes: int
) -> Steps[tuple[bytes, tuple[int, int] | None]]:
    """The text between two commas that is longer than a block: brackets, white space and one element.

    Returns it with white space shortened and its string emptied, and the range of that string's contents.
    """
    first = last = None
    for at in range(start, stop, block_bytes):
        block = bytes(view[at : min(at + block_bytes, stop)])
        if b'"' in block:
            first = at + block.find(b'"') if first is None else first
            last = at + block.rfind(b'"')
        yield 0
    if first is None or last is None:
        return (yield from _squeeze_steps(view, start, stop, block_bytes)), None
    before = yield from _squeeze_steps(view, start, first, block_bytes)
    after = yield from _squeeze_steps(view, last + 1, stop, block_bytes)
    return before + b'""' + after, (first + 1, last)


def _string_chunks(view: memoryview, start: int, stop: int, block_bytes: int) -> Iterator[bytes]:
    """The decoded bytes of a JSON string's contents, one block at a time."""
    while start < stop:
        end = start + block_bytes
        end = _string_cut(view, start, end) if end < stop else stop
        text: str = load_json(b"".join((b'"', view[start:end], b'"')), start - 1)
        yield text.encode()
        start = end


def _squeeze_steps(view: memoryview, start: int, stop: int, block_bytes: int) -> Steps[bytes]:
    """The text with each run of white space as one or two blanks; INVALID_ARG if it is then too long for a number."""
    squeezed = bytearray()
    for at in range(start, stop, block_bytes):
        squeezed += SPACES.sub(b" ", view[at : min(at + block_bytes, stop)])
        if len(squeezed) > MAX_NUMBER_BYTES:
            raise malformed(f"a value of more than {MAX_NUMBER_BYTES} bytes that is not a string", start)
        yield 0
    return bytes(squeezed)


def _string_cut(view: memoryview, start: int, end: int) -> int:
    """The last position up to `end` at which a string may be cut: not in a character, escape or surrogate pair."""
    for _ in range(3):
        if view[end] & 0xC0 != 0x80:
            break
        end -= 1
    text = bytes(view[start:end])
    backslash = text.rfind(b"\\", max(0, len(text) - 5))
    if backslash >= 0 and _starts_escape(text, backslash):
        whole = 6 if text[backslash + 1 : backslash + 2] == b"u" else 2
        if backslash + whole > len(text):
            text = text[:backslash]
    if _HIGH_SURROGATE.match(text, max(0, len(text) - 6)) and _starts_escape(text, len(text) - 6):
        text = text[:-6]
    return start + len(text)


def _starts_escape(text: bytes, backslash: int) -> bool:
    """Whether this backslash begins an escape and is not the second character of one."""
    before = text[:backslash]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0


_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
