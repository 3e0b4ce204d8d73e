"""Find the arrays of a large JSON document, in steps of at most a few milliseconds each.

A large document is never parsed whole. `scan_steps` finds every array that is a member of an object in an array of the
root object (`inputs[i].data` is one, `inputs[i].shape` another) and replaces it by `[n]`, where n counts them. Because
*all* arrays in such places are taken out, every list there in the parsed skeleton is a placeholder and never the
client's. `json_array` reads the arrays themselves.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.tensor import Buffer
from halimede.core.wire.steps import Steps, run

MAX_DEPTH = 100
BLOCK_BYTES = 32 << 10
"""Block size of the scan. A piece of an array is at most two blocks long, unless a single element is longer."""

MAX_SKELETON_BYTES = 256 << 10
"""Maximum size of a large document without its input data and white space: this part is parsed in one step."""

JSON_SPACE = b" \t\n\r"
SPACES = re.compile(rb"[ \t\n\r]+")


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


@dataclass(slots=True)
class ScannedJson:
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


def scan_steps(
    text: Buffer, block_bytes: int = BLOCK_BYTES, skeleton_limit: int = MAX_SKELETON_BYTES
) -> Steps[ScannedJson]:
    """Find the arrays of a document. INVALID_ARG if it is nested too deep, brackets do not match, or the skeleton is
    too large."""
    view = memoryview(text)
    layout = ScannedJson()
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
    """The error for a large document with too much content besides the data of its inputs."""
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
        text += block if has_strings else SPACES.sub(b" ", block)
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
    if int(np.max(tokens.depth)) > MAX_DEPTH:
        raise InferenceError(ErrorCode.INVALID_ARG, f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")
    if int(np.min(tokens.depth)) < 0:
        raise malformed("a closing bracket too many", start)
    return int(tokens.depth[-1])


def cut(layout: ScannedJson, block: bytes, start: int, depth: int, last_block_was_cut: bool) -> bool:
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


def _cut_tokens(layout: ScannedJson, tokens: Tokens, start: int, last_block_was_cut: bool) -> bool:
    commas = np.flatnonzero((tokens.kind == COMMA) & (tokens.depth >= _SPAN_DEPTH))
    if not commas.size:
        return False
    first, last = int(commas[-1 if last_block_was_cut else 0]), int(commas[-1])
    for i in (first, last) if first != last else (last,):
        layout.cut_at.append(start + int(tokens.at[i]))
        layout.cut_depth.append(int(tokens.depth[i]) - _SPAN_DEPTH + 1)
    return True
