"""Tensors as JSON numbers and strings, read and written in steps of at most a few milliseconds each.

A large document is never parsed whole. `scan_steps` finds every array that is a member of an object in an array of the
root object (`inputs[i].data` is one, `inputs[i].shape` another) and replaces it by `[n]`, where n counts them. Because
*all* arrays in such places are taken out, every list there in the parsed skeleton is a placeholder and never the
client's.

An array is then cut at commas outside of strings. A piece that begins inside d arrays and ends inside e arrays is
parsed as a document of its own, with d opening brackets before it and e closing ones after it. This accepts exactly the
valid arrays if two more conditions are checked: a piece after a comma begins with a value, and a piece before a comma
ends with one. The same parser reads small and large documents, so that both get the same result.
"""

import codecs
import re
from bisect import bisect_left
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import isnan
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from halimede.core.types import DataType, ErrorCode, InferenceError, Tensor
from halimede.core.types.error import clip
from halimede.core.types.tensor import Buffer, join_bytes
from halimede.core.wire.raw_tensor import LENGTH_BYTES, elements

MAX_DEPTH = 100
BLOCK_BYTES = 32 << 10
"""Block size of the scan. A piece of an array is at most two blocks long, unless a single element is longer."""

MAX_SKELETON_BYTES = 256 << 10
"""Maximum size of a large document without its input data and white space: this part is parsed in one step."""

MAX_NUMBER_BYTES = 64 << 10
"""Maximum length of an element that is not a string."""

PRINT_ELEMENTS = 32 << 10
"""Maximum count of numbers printed in one step."""

T = TypeVar("T")
Steps = Generator[int, None, T]
"""Work in steps: iterate, and let other tasks run between steps; the result is the generator's return value.

A step yields the number of bytes that the work additionally holds, or is about to hold; 0 if it adds little.
"""


def run(steps: Steps[T]) -> T:
    """Execute all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


def malformed(message: str, at: int) -> InferenceError:
    """The error for a document that is not JSON."""
    return InferenceError(ErrorCode.INVALID_ARG, f"failed to parse the request JSON buffer: {message}. at {at}")


def load_json(text: Buffer, offset: int = 0) -> Any:
    """Parse one step's part of the JSON; `offset` is its position in the document, for the error."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        message = error.msg
        if message.startswith("number is infinity"):
            message = "Number too big to be stored in double"
        raise malformed(message, offset + error.pos) from None


def check_depth(text: bytes) -> None:
    """Raise INVALID_ARG if the small document is nested deeper than the limit, before it is parsed."""
    # Every opening bracket needs a closing one, so most documents are too short to be nested that deep.
    if len(text) > 2 * MAX_DEPTH and text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        run(scan_steps(text))


# ---- Reading: finding the arrays


@dataclass(slots=True)
class Layout:
    """The result of a scan. `spans` are the removed arrays, from `[` to `]`; `[n]` in the skeleton stands for spans[n].

    `cut_at` are commas at which arrays may be cut, ascending; `cut_depth` is the number of brackets open there,
    including the span's own. Braces count too: a piece that ends inside an object does not parse, and valid data has no
    objects anyway.
    """

    skeleton: bytes = b""
    spans: list[tuple[int, int]] = field(default_factory=list)
    cut_at: list[int] = field(default_factory=list)
    cut_depth: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Skeleton:
    """The rest of a document: `parts` are the texts added so far, `size` is their length, `begin` is where to continue.

    The text at `begin` may be inside a string, and there after a backslash.
    """

    view: memoryview
    limit: int
    parts: list[Buffer] = field(default_factory=list)
    size: int = 0
    begin: int = 0
    in_string: bool = False
    escaped: bool = False

    def add(self, end: int, in_string: bool = False, escaped: bool = False) -> None:
        """Add the text up to `end`, which may be inside a string. INVALID_ARG if the skeleton becomes too large."""
        text = _squeezed(bytes(self.view[self.begin : end]), self.in_string, self.escaped)
        self._append(text, end)
        self.in_string, self.escaped = in_string, escaped

    def replace(self, begin: int, end: int, placeholder: bytes) -> None:
        """Add the text up to `begin`, and then the placeholder for the text between `begin` and `end`."""
        self.add(begin)
        self._append(placeholder, end)

    def _append(self, text: bytes, end: int) -> None:
        self.parts.append(text)
        self.size += len(text)
        self.begin = end
        if self.size > self.limit:
            raise skeleton_error(self.limit)


def _squeezed(text: bytes, in_string: bool, escaped: bool) -> bytes:
    """The text with one character for each run of white space outside of its strings; it may begin inside a string."""
    if _SPACE_RUN.search(text) is None:
        return text
    at = 0
    if in_string and (rest := _STRING_REST.match(text, int(escaped))):
        at = rest.end()
    return text[:at] + _STRING_OR_SPACE_RUN.sub(lambda match: match[1] or match[0], text[at:])


_SPACE_RUN = re.compile(rb"[ \t\n\r]{2}")
_STRING_REST = re.compile(rb'(?:[^"\\]|\\.)*+"?', re.DOTALL)
_STRING_OR_SPACE_RUN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|([ \t\n\r])[ \t\n\r]+', re.DOTALL)

QUOTE, BACKSLASH, COMMA, OPEN, CLOSE = 1, 2, 3, 4, 5
_KIND = np.zeros(256, np.uint8)
_KIND[list(b'"')] = QUOTE
_KIND[list(b"\\")] = BACKSLASH
_KIND[list(b",")] = COMMA
_KIND[list(b"[{")] = OPEN
_KIND[list(b"]}")] = CLOSE

# Root object, array, object: an array opened inside these is on the fourth level.
_SPAN_DEPTH = 4


def scan_steps(text: Buffer, block_bytes: int = BLOCK_BYTES, skeleton_limit: int = MAX_SKELETON_BYTES) -> Steps[Layout]:
    """Find the arrays of a document. INVALID_ARG if it is nested too deep, brackets do not match, or the skeleton is
    too large."""
    view = memoryview(text)
    layout = Layout()
    skeleton = Skeleton(view, skeleton_limit)
    opened: int | None = None
    depth = 0
    in_string = escaped = False
    last_block_was_cut = True
    for start in range(0, len(view), block_bytes):
        block = bytes(view[start : start + block_bytes])
        has_quote = b'"' in block
        if in_string and not has_quote:
            escaped = ends_escaped(block, escaped)
            last_block_was_cut = False
        elif depth >= _SPAN_DEPTH and not has_quote and not has_brackets(block):
            last_block_was_cut = cut(layout, block, start, depth - _SPAN_DEPTH + 1, last_block_was_cut)
            escaped = False
        else:
            tokens = tokenize(block, depth, in_string, escaped)
            in_string, escaped = tokens.in_string, tokens.escaped
            depth = checked_depth(tokens, start, depth)
            last_block_was_cut = _cut_tokens(layout, tokens, start, last_block_was_cut)
            edges = np.flatnonzero(
                ((tokens.kind == OPEN) & (tokens.depth == _SPAN_DEPTH))
                | ((tokens.kind == CLOSE) & (tokens.depth == _SPAN_DEPTH - 1))
            )
            for at in (tokens.at[edges] + start).tolist():
                if view[at] == 0x5B:
                    opened = at
                elif opened is not None:
                    if view[at] != 0x5D:
                        raise malformed("an array closed by '}'", at)
                    skeleton.replace(opened, at + 1, b"[%d]" % len(layout.spans))
                    layout.spans.append((opened, at))
                    opened = None
        if opened is None:
            skeleton.add(start + len(block), in_string, escaped)
        yield 0
    if depth or in_string:
        raise malformed("unexpected end of data", len(view))
    layout.skeleton = b"".join(skeleton.parts)
    return layout


def skeleton_error(limit: int) -> InferenceError:
    """The error for a large document with too much content beside the data of its inputs."""
    return InferenceError(
        ErrorCode.INVALID_ARG,
        f"the request JSON has more than {limit} bytes beside the 'data' of its inputs and white space;"
        " send large values as tensors",
    )


def array_steps(view: memoryview, opened: int, closed: int, limit: int, block_bytes: int) -> Steps[bytes]:
    """An array that is not data, with its white space shortened up to its first string. INVALID_ARG if too long."""
    text = bytearray()
    has_strings = False
    for start in range(opened, closed + 1, block_bytes):
        if start != opened:
            yield 0
        block = bytes(view[start : min(start + block_bytes, closed + 1)])
        has_strings = has_strings or b'"' in block
        text += block if has_strings else _SPACES.sub(b" ", block)
        if len(text) > limit:
            raise skeleton_error(MAX_SKELETON_BYTES)
    return bytes(text)


def has_brackets(block: bytes) -> bool:
    """Whether a block without strings contains brackets, or a backslash, which is an error there."""
    return b"]" in block or b"[" in block or b"}" in block or b"{" in block or b"\\" in block


def ends_escaped(block: bytes, escaped: bool) -> bool:
    """Whether the byte after this block is escaped, because an odd number of backslashes precedes it."""
    run_bytes = len(block) - len(block.rstrip(b"\\"))
    if escaped and run_bytes == len(block):
        run_bytes -= 1
    return run_bytes % 2 == 1


@dataclass(slots=True)
class Tokens:
    """Brackets and commas outside of strings, the depth after each, and the state at the end of the block.

    `quotes` are the first and the last quotation mark that begins or ends a string.
    """

    at: NDArray[np.intp]
    kind: NDArray[np.uint8]
    depth: NDArray[np.int64]
    quotes: tuple[int, int] | None
    in_string: bool
    escaped: bool


def tokenize(block: bytes, depth: int, in_string: bool, escaped: bool) -> Tokens:
    """The tokens of a block that begins at this depth, possibly in a string or after a backslash."""
    kind = _KIND[np.frombuffer(block, np.uint8)]
    at = np.flatnonzero(kind)
    kind = kind[at]
    is_quote = kind == QUOTE
    if escaped or b"\\" in block:
        is_escaped = np.zeros(len(block) + 1, bool)
        slashes = at[kind == BACKSLASH]
        if slashes.size:
            firsts = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
            lengths = np.diff(firsts, append=slashes.size)
            lasts = slashes[firsts + lengths - 1]
            if escaped and slashes[0] == 0:
                lengths[0] -= 1
            is_escaped[lasts[lengths % 2 == 1] + 1] = True
        if escaped and block[0] != 0x5C:
            is_escaped[0] = True
        is_quote &= ~is_escaped[at]
        escaped = bool(is_escaped[-1])
    ends = at[is_quote]
    quotes = (int(ends[0]), int(ends[-1])) if ends.size else None
    in_strings = np.logical_xor.accumulate(is_quote) ^ in_string
    if in_strings.size:
        in_string = bool(in_strings[-1])
    keep = np.flatnonzero((kind >= COMMA) & ~in_strings)
    at, kind = at[keep], kind[keep]
    rise = (kind == OPEN).astype(np.int64) - (kind == CLOSE)
    return Tokens(at, kind, depth + np.cumsum(rise), quotes, in_string, escaped)


def checked_depth(tokens: Tokens, start: int, depth: int) -> int:
    """The depth after a block at `start` that begins at `depth`. INVALID_ARG if it is nested too deep or wrongly."""
    if not tokens.at.size:
        return depth
    if int(tokens.depth.max()) > MAX_DEPTH:
        raise InferenceError(ErrorCode.INVALID_ARG, f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")
    if int(tokens.depth.min()) < 0:
        raise malformed("a closing bracket too many", start)
    return int(tokens.depth[-1])


def cut(layout: Layout, block: bytes, start: int, depth: int, last_block_was_cut: bool) -> bool:
    """Add the commas at which a block without strings and brackets may be cut; return whether there are any."""
    last = block.rfind(b",")
    if last < 0:
        return False
    # Also cut at the first comma if the blocks before it had none: it ends a long element, which so becomes a piece of
    # its own.
    first = last if last_block_was_cut else block.find(b",")
    for at in (first, last) if first != last else (last,):
        layout.cut_at.append(start + at)
        layout.cut_depth.append(depth)
    return True


def _cut_tokens(layout: Layout, tokens: Tokens, start: int, last_block_was_cut: bool) -> bool:
    commas = np.flatnonzero((tokens.kind == COMMA) & (tokens.depth >= _SPAN_DEPTH))
    if not commas.size:
        return False
    first, last = int(commas[-1 if last_block_was_cut else 0]), int(commas[-1])
    for i in (first, last) if first != last else (last,):
        layout.cut_at.append(start + int(tokens.at[i]))
        layout.cut_depth.append(int(tokens.depth[i]) - _SPAN_DEPTH + 1)
    return True


# ---- Reading: the contents of an array

_FLOATS = (DataType.FP32, DataType.FP64)
_UNSIGNED = (DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64)
JSON_SPACE = b" \t\n\r"


def pack(name: str, datatype: DataType, count: int, values: list[Any]) -> Buffer:
    """Pack the parsed array of input `name` in wire layout; INVALID_ARG unless it has `count` such elements."""
    values = _flatten(values)
    if len(values) != count:
        raise _wrong_count()
    _check_kinds(datatype, values)
    if datatype is DataType.BYTES:
        return join_bytes(values)
    return _to_array(name, datatype, values).tobytes()


def pack_steps(
    name: str,
    datatype: DataType,
    count: int,
    text: Buffer,
    layout: Layout,
    span: tuple[int, int],
    block_bytes: int = BLOCK_BYTES,
) -> Steps[Buffer]:
    """As `pack`, for the array at `span` in the text, which was scanned with blocks of this size."""
    opened, closed = span
    # An element takes a character and a comma, so memory is never allocated for more elements than could be sent.
    if count > (closed - opened) // 2:
        raise _wrong_count()
    view = memoryview(text)
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
        if filled + len(values) > count:
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
        return _flatten(load_json(text, offset))
    # null, true and false are errors in float data, so these words can stand for the tokens during parsing.
    if b"null" in text or b"true" in text or b"false" in text:
        raise _wrong_kind(datatype)
    text = text.replace(b"-Infinity", b"false").replace(b"Infinity", b"true").replace(b"NaN", b"null")
    return [
        np.nan if value is None else np.inf if value is True else -np.inf if value is False else value
        for value in _flatten(load_json(text, offset))
    ]


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


def _check_kinds(datatype: DataType, values: list[Any]) -> None:
    if not set(map(type, values)) <= _KINDS[datatype]:
        raise _wrong_kind(datatype)


_KINDS: dict[DataType, set[type]] = {
    datatype: {bool}
    if datatype is DataType.BOOL
    else {str}
    if datatype is DataType.BYTES
    else {int, float}
    if datatype in _FLOATS
    else {int}
    for datatype in DataType
}


def _to_array(name: str, datatype: DataType, values: list[Any]) -> NDArray[Any]:
    try:
        # A double outside the range of FP32 becomes infinite, as in Triton.
        with np.errstate(over="ignore"):
            return np.array(values, datatype.dtype)
    except OverflowError:
        integers: np.dtype[Any] = datatype.dtype
        limits = np.iinfo(integers)
        value = next(value for value in values if not limits.min <= value <= limits.max)
        raise InferenceError(
            ErrorCode.INVALID_ARG,
            f"Unable to parse 'data': {value} of input '{clip(name)}' is out of range for datatype {datatype.name},"
            f" {limits.min} to {limits.max}",
        ) from None


def _wrong_count() -> InferenceError:
    return InferenceError(
        ErrorCode.INVALID_ARG, "Unable to parse 'data': Shape does not match true shape of 'data' field"
    )


def _wrong_kind(datatype: DataType) -> InferenceError:
    if datatype is DataType.BYTES:
        text = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
    elif datatype in _FLOATS:
        text = "Unable to parse 'data': attempt to access JSON non-number as double"
    elif datatype is DataType.BOOL:
        text = "Unable to parse 'data': attempt to access JSON non-boolean as boolean"
    elif datatype in _UNSIGNED:
        text = "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"
    else:
        text = "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"
    return InferenceError(ErrorCode.INVALID_ARG, text)


# ---- Reading: one element that is longer than a piece


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
        squeezed += _SPACES.sub(b" ", view[at : min(at + block_bytes, stop)])
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


_SPACES = re.compile(rb"[ \t\n\r]+")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


# ---- Writing


def print_steps(tensor: Tensor) -> Steps[list[Buffer]]:
    """The elements of an output as one flat JSON array, in chunks.

    Floats are printed as doubles, with the tokens NaN, Infinity and -Infinity as in Triton. INVALID_ARG if a BYTES
    element is not UTF-8, which JSON cannot represent.
    """
    if tensor.datatype is DataType.BYTES:
        return (yield from _print_strings_steps(tensor))
    flat = np.frombuffer(tensor.data, tensor.datatype.dtype)
    if flat.size <= PRINT_ELEMENTS:
        return [_print_numbers(flat)]
    chunks: list[Buffer] = []
    for at in range(0, flat.size, PRINT_ELEMENTS):
        chunks += (b",", memoryview(_print_numbers(flat[at : at + PRINT_ELEMENTS]))[1:-1])
        yield 0
    chunks[0] = b"["
    chunks.append(b"]")
    return chunks


def _print_numbers(numbers: NDArray[Any]) -> bytes:
    # Tensors may begin at any offset of a request body, but the printer reads only aligned memory.
    if numbers.dtype.kind != "f":
        return orjson.dumps(np.require(numbers, requirements="A"), option=orjson.OPT_SERIALIZE_NUMPY)
    # Casting a signaling NaN gives a warning.
    with np.errstate(invalid="ignore"):
        doubles = numbers.astype(np.float64)
    text = orjson.dumps(doubles, option=orjson.OPT_SERIALIZE_NUMPY)
    strange = numbers[~np.isfinite(numbers)]
    if not strange.size:
        return text
    # The printer writes null for each of these.
    pieces = text.split(b"null")
    tokens = [b"NaN" if isnan(value) else b"Infinity" if value > 0 else b"-Infinity" for value in strange.tolist()]
    return b"".join(chain.from_iterable(zip(pieces, tokens, strict=False))) + pieces[-1]


def _print_strings_steps(tensor: Tensor) -> Steps[list[Buffer]]:
    chunks: list[Buffer] = []
    batch: list[str] = []
    batch_bytes = 0
    try:
        for element in elements(tensor.data):
            if len(element) <= BLOCK_BYTES:
                batch.append(str(element, "utf-8"))
                batch_bytes += len(element) + 8
            if batch and (batch_bytes > BLOCK_BYTES or len(element) > BLOCK_BYTES):
                chunks += (b",", memoryview(orjson.dumps(batch))[1:-1])
                batch, batch_bytes = [], 0
                yield 0
            if len(element) > BLOCK_BYTES:
                chunks.append(b',"')
                decoder = codecs.getincrementaldecoder("utf-8")()
                for at in range(0, len(element), BLOCK_BYTES):
                    part = decoder.decode(element[at : at + BLOCK_BYTES], at + BLOCK_BYTES >= len(element))
                    chunks.append(memoryview(orjson.dumps(part))[1:-1])
                    yield 0
                chunks.append(b'"')
    except UnicodeDecodeError:
        raise InferenceError(
            ErrorCode.INVALID_ARG,
            f"output '{clip(tensor.name)}' has an element that is not UTF-8 and cannot be sent via JSON,"
            " ask for it as binary data",
        ) from None
    except ValueError as error:
        raise InferenceError(ErrorCode.INTERNAL, f"output '{clip(tensor.name)}' is broken: {error}") from None
    if batch:
        chunks += (b",", memoryview(orjson.dumps(batch))[1:-1])
    if not chunks:
        return [b"[]"]
    chunks[0] = b"[" if chunks[0] == b"," else b'["'
    chunks.append(b"]")
    return chunks
