"""Find the arrays of a large JSON document, in steps of at most a few milliseconds each.

A large document is never parsed whole. `scan_steps` takes out every array that is inside of exactly one other array
(`inputs[i].data` is one, `inputs[i].shape` another) and replaces it by `[n]`, where n counts them. In a document whose
members are the data (`generate`) these are the arrays that are not inside of another one, and the strings that are
longer than a block and the value of a member. Because *all* arrays in such places are taken out, every list there in
the parsed skeleton is a placeholder and never the client's. `json_array` reads the arrays themselves.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from halimede.core.types import InferenceError, invalid
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
    return invalid(f"failed to parse the request JSON buffer: {message}. at {at}")


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


_SPACE_RUN = re.compile(rb"[ \t\n\r]{2}")
_STRING_OR_SPACE_RUN = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")|([ \t\n\r])[ \t\n\r]+', re.DOTALL)
_LONGEST_GAP = 64
"""Maximum white space between a member's name and a string that may be taken out."""


@dataclass(slots=True)
class ScannedJson:
    """The result of a scan: the skeleton, and the spans that were taken out of `view`. `[n]` stands for spans[n].

    An array's span is from `[` to `]`. A string's span is that of an array with only this string: from the byte before
    it to the byte after it. `commas[n]` is the number of commas directly in spans[n], None for a string; only a scan of
    members counts them. `cut_at` are commas at which arrays may be cut, ascending; `cut_depth` is the number of
    brackets open there, including the span's own. `unread` are the spans that nobody has read.

    `limit` is the maximum size of everything that is no tensor, `room` is what is left of it.
    """

    view: memoryview
    block_bytes: int
    limit: int
    room: int
    skeleton: bytes = b""
    spans: list[tuple[int, int]] = field(default_factory=list)
    commas: list[int | None] = field(default_factory=list)
    cut_at: list[int] = field(default_factory=list)
    cut_depth: list[int] = field(default_factory=list)
    unread: set[int] = field(default_factory=set)

    def take_room(self, size: int) -> None:
        """Count a part that is parsed in one step. INVALID_ARG if there are too many."""
        self.room -= size
        if self.room < 0:
            raise invalid(
                f"the request JSON has more than {self.limit} bytes beside the 'data' of its inputs and white space;"
                " send large values as tensors"
            )

    def parse_steps(self, span: int) -> Steps[Any]:
        """The array or string of a span that is not data. INVALID_ARG if it is too long or not JSON."""
        self.unread.discard(span)
        opened, closed = self.spans[span]
        text = bytearray(b"[")
        has_strings = False
        for start in range(opened + 1, closed, self.block_bytes):
            block = bytes(self.view[start : min(start + self.block_bytes, closed)])
            # A string may be longer than a block.
            has_strings = has_strings or b'"' in block
            part = block if has_strings else SPACES.sub(b" ", block)
            self.take_room(len(part))
            text += part
            if start + self.block_bytes < closed:
                yield 0
        if span % 256 == 0:
            yield 0
        values = load_json(text + b"]", opened)
        return values[0] if self.commas[span] is None else values

    def rest_steps(self) -> Steps[None]:
        """Parse the spans that nobody has read: they have no meaning, but must be JSON."""
        for span in sorted(self.unread):
            yield from self.parse_steps(span)


def scan_steps(
    text: Buffer, block_bytes: int = BLOCK_BYTES, skeleton_limit: int = MAX_SKELETON_BYTES, *, members: bool = False
) -> Steps[ScannedJson]:
    """Take the arrays of inputs out of a document; with `members` the arrays and long strings of its members.

    INVALID_ARG if it is nested too deep, brackets do not match, or the skeleton is too large.
    """
    layout = ScannedJson(memoryview(text), block_bytes, skeleton_limit, skeleton_limit)
    scan = _Scan(layout, members)
    for start in range(0, len(text), block_bytes):
        scan.read(bytes(layout.view[start : start + block_bytes]), start)
        yield 0
    if scan.arrays or scan.objects or scan.string_at is not None:
        raise malformed("unexpected end of data", len(text))
    layout.skeleton = b"".join(scan.parts)
    layout.unread.update(range(len(layout.spans)))
    return layout


@dataclass(slots=True)
class _Scan:
    """The state between two blocks.

    `parts` are the texts of the skeleton, which continues at `copied`. `arrays` and `objects` are the open brackets of
    each kind, `opened` is where the open span began, and `commas` counts its own commas so far. `string_at` is where
    the string began in which the last block ended. `was_cut`: the last block had a comma at which arrays may be cut.
    """

    layout: ScannedJson
    members: bool
    parts: list[bytes] = field(default_factory=list)
    copied: int = 0
    arrays: int = 0
    objects: int = 0
    opened: int | None = None
    commas: int = 0
    string_at: int | None = None
    is_escaped: bool = False
    was_cut: bool = True

    @property
    def span_depth(self) -> int:
        """The number of open arrays just inside of a span."""
        return 1 if self.members else 2

    def read(self, block: bytes, start: int) -> None:
        block = _without_escapes(block, self.is_escaped)
        self.is_escaped = block.endswith(b"\\")
        if self.string_at is not None and b'"' not in block:
            self.was_cut = False
        elif self.opened is not None and not _has_structure(block):
            self._read_elements(block, start)
        else:
            self._read_tokens(_tokenize(block, self.string_at is not None), start)
        if self.opened is None:
            self._copy(start + len(block) if self.string_at is None else self.string_at)

    def _read_elements(self, block: bytes, start: int) -> None:
        """Read a block of an array that has only commas, numbers and words."""
        first, last = block.find(b","), block.rfind(b",")
        depth = self.arrays - self.span_depth + 1
        self._cut([] if first < 0 else [(start + first, depth), (start + last, depth)])
        if self.members and depth == 1:
            self.commas += block.count(b",")

    def _read_tokens(self, tokens: "_Tokens", start: int) -> None:
        if self.string_at is not None and tokens.quotes:
            self._end_string(self.string_at, start + tokens.quotes[0] + 1)
        if tokens.at.size:
            self._read_brackets(tokens, start)
        else:
            self.was_cut = False
        if tokens.quotes:
            self.string_at = start + tokens.quotes[1] if tokens.in_string else None

    def _end_string(self, begin: int, end: int) -> None:
        if self.members and self.opened is None and end - begin > self.layout.block_bytes:
            # A string not after a colon is a member's name, which may be as long but is not taken out.
            before = bytes(self.layout.view[max(0, begin - _LONGEST_GAP) : begin])
            if before.rstrip(JSON_SPACE).endswith(b":"):
                self._take_out(begin, end, (begin - 1, end), None)

    def _read_brackets(self, tokens: "_Tokens", start: int) -> None:
        steps = _ARRAY_STEPS[tokens.kind]
        arrays = self.arrays + np.cumsum(steps)
        objects = self.objects + np.cumsum(_OBJECT_STEPS[tokens.kind])
        if int(np.max(arrays + objects)) > MAX_DEPTH:
            raise invalid(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")
        if int(np.min(arrays)) < 0 or int(np.min(objects)) < 0:
            raise malformed("a closing bracket too many", start)
        self.arrays, self.objects = int(arrays[-1]), int(objects[-1])
        inside = self.span_depth
        is_comma = tokens.kind == _COMMA
        is_own = is_comma & (arrays == inside)
        counted = 0
        for i in np.flatnonzero(((steps > 0) & (arrays == inside)) | ((steps < 0) & (arrays == inside - 1))).tolist():
            at = start + int(tokens.at[i])
            if self.opened is None:
                self.opened, self.commas, counted = at, 0, i
            else:
                commas = self.commas + int(np.count_nonzero(is_own[counted:i]))
                self._take_out(self.opened, at + 1, (self.opened, at), commas)
                self.opened = None
        if self.opened is not None:
            self.commas += int(np.count_nonzero(is_own[counted:]))
        commas_at = np.flatnonzero(is_comma & (arrays >= inside))
        ends = (*commas_at[:1].tolist(), *commas_at[-1:].tolist())
        self._cut([(start + int(tokens.at[i]), int(arrays[i]) - inside + 1) for i in ends])

    def _cut(self, commas: list[tuple[int, int]]) -> None:
        """Add the last comma of a block, and its depth; `commas` has the first and the last one, or none."""
        # The first one ends an element that is longer than a block, which so becomes a piece of its own.
        for at, depth in commas[1:] if self.was_cut else dict.fromkeys(commas):
            self.layout.cut_at.append(at)
            self.layout.cut_depth.append(depth)
        self.was_cut = bool(commas)

    def _take_out(self, begin: int, end: int, span: tuple[int, int], commas: int | None) -> None:
        self._copy(begin)
        self._append(b"[%d]" % len(self.layout.spans), end)
        self.layout.spans.append(span)
        self.layout.commas.append(commas)

    def _copy(self, end: int) -> None:
        """Add the text up to `end`, which is outside of strings, to the skeleton, with less white space."""
        # All but a block of it is one string, which is too long to be copied.
        if (size := end - self.copied) > self.layout.room + self.layout.block_bytes:
            self.layout.take_room(size)
        text = bytes(self.layout.view[self.copied : end])
        if _SPACE_RUN.search(text):
            text = _STRING_OR_SPACE_RUN.sub(rb"\1\2", text)
        self._append(text, end)

    def _append(self, text: bytes, end: int) -> None:
        self.layout.take_room(len(text))
        self.parts.append(text)
        self.copied = end


def _without_escapes(block: bytes, is_escaped: bool) -> bytes:
    """The block with other characters for its escaped quotes and backslashes.

    `is_escaped`: a backslash before it belongs to its first byte. The result ends with a backslash if that belongs to
    the byte after it.
    """
    if is_escaped and block[0] in b'"\\':
        block = b"_" + block[1:]
    if b"\\" not in block:
        return block
    # Without quotes only the end matters.
    start = 0 if b'"' in block else len(block.rstrip(b"\\"))
    return block[:start] + block[start:].replace(rb"\\", b"__").replace(rb"\"", b"__")


def _has_structure(block: bytes) -> bool:
    """Whether a block contains quotes or brackets."""
    return b'"' in block or b"]" in block or b"[" in block or b"}" in block or b"{" in block


_QUOTE, _COMMA = 1, 2
_KINDS = bytes(b'",[]{}'.find(byte) + 1 for byte in range(256))
_ARRAY_STEPS = np.array([0, 0, 0, 1, -1, 0, 0])
_OBJECT_STEPS = np.array([0, 0, 0, 0, 0, 1, -1])
"""The change of the number of open brackets by a token of each kind."""


@dataclass(slots=True)
class _Tokens:
    """Brackets and commas outside of strings, and whether the block ends in a string.

    `quotes` are the first and the last quotation mark.
    """

    at: NDArray[np.intp]
    kind: NDArray[np.uint8]
    quotes: tuple[int, int] | None
    in_string: bool


def _tokenize(block: bytes, in_string: bool) -> _Tokens:
    """The tokens of a block without escapes; `in_string`: it begins in a string."""
    kind = np.frombuffer(block.translate(_KINDS), np.uint8)
    # Several times as fast as with integers.
    at = np.flatnonzero(kind != 0)
    kind = kind[at]
    is_quote = kind == _QUOTE
    ends = at[is_quote]
    quotes = (int(ends[0]), int(ends[-1])) if ends.size else None
    in_strings = np.logical_xor.accumulate(is_quote) ^ in_string
    if in_strings.size:
        in_string = bool(in_strings[-1])
    keep = np.flatnonzero((kind >= _COMMA) & ~in_strings)
    return _Tokens(at[keep], kind[keep], quotes, in_string)
