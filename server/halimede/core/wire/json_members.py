"""Find the arrays and long strings in JSON documents whose members are the data (`generate`).

It works as `json_scan.scan_steps`, but takes other parts out of the document: every array that is not inside another
array, and every string longer than a block that is the value of a member. `[n]` in the skeleton stands for spans[n];
because all arrays are taken out, every list in the skeleton is such a placeholder. A string's span covers the same
range that an array with only this string would have: everything between the two ends.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from halimede.core.types.tensor import Buffer
from halimede.core.wire.json_scan import (
    BLOCK_BYTES,
    COMMA,
    JSON_SPACE,
    MAX_SKELETON_BYTES,
    ScannedJson,
    Skeleton,
    Tokens,
    checked_depth,
    cut,
    ends_escaped,
    has_brackets,
    malformed,
    tokenize,
)
from halimede.core.wire.steps import Steps

_OPENING, _CLOSING = b"["[0], b"]"[0]
_LONGEST_GAP = 64
"""Maximum white space between a member's name and a string that may be taken out."""


@dataclass(slots=True)
class MemberLayout(ScannedJson):
    """`commas[n]` is the number of commas directly in spans[n], None if that is a string."""

    commas: list[int | None] = field(default_factory=list)


@dataclass(slots=True)
class _Scan:
    """The state between two blocks.

    `opened` is the position of the outermost open array, -1 for none; `depth` counts all open brackets, `arrays` only
    square ones; `base` is the depth just inside of `opened`, and `commas` counts its own commas so far. `string_at` is
    where an unfinished string that is a member's value began, -1 for none.
    """

    view: memoryview
    skeleton: Skeleton
    layout: MemberLayout = field(default_factory=MemberLayout)
    depth: int = 0
    arrays: int = 0
    opened: int = -1
    base: int = 0
    commas: int = 0
    string_at: int = -1
    in_string: bool = False
    escaped: bool = False
    was_cut: bool = True

    def read(self, block: bytes, start: int) -> None:
        has_quote = b'"' in block
        if self.in_string and not has_quote:
            self.escaped = ends_escaped(block, self.escaped)
            self.was_cut = False
        elif self.opened >= 0 and not has_quote and not has_brackets(block):
            self.was_cut = cut(self.layout, block, start, self.depth - self.base + 1, self.was_cut)
            if self.arrays == 1:
                self.commas += block.count(b",")
            self.escaped = False
        else:
            tokens = tokenize(block, self.depth, self.in_string, self.escaped)
            self.in_string, self.escaped = tokens.in_string, tokens.escaped
            self.depth = checked_depth(tokens, start, self.depth)
            self._end_string(tokens, start, len(block))
            self._read_arrays(tokens, np.frombuffer(block, np.uint8), start)
            self._begin_string(tokens, start)
        if self.opened < 0 and self.string_at < 0:
            self.skeleton.add(start + len(block), self.in_string, self.escaped)

    def _end_string(self, tokens: Tokens, start: int, block_bytes: int) -> None:
        if self.string_at < 0 or tokens.quotes is None:
            return
        end = start + tokens.quotes[0] + 1
        # A shorter string is parsed with the rest.
        if end - self.string_at > block_bytes:
            self._take_out(self.string_at, end, (self.string_at - 1, end), None)
        self.string_at = -1

    def _begin_string(self, tokens: Tokens, start: int) -> None:
        if not tokens.in_string or tokens.quotes is None or self.opened >= 0:
            return
        at = start + tokens.quotes[1]
        # A string not after a colon is a member's name, which may be as long but is not taken out.
        if bytes(self.view[max(0, at - _LONGEST_GAP) : at]).rstrip(JSON_SPACE).endswith(b":"):
            self.string_at = at

    def _read_arrays(self, tokens: Tokens, block: "np.ndarray[tuple[int], np.dtype[np.uint8]]", start: int) -> None:
        if not tokens.at.size:
            self.was_cut = False
            return
        raw = block[tokens.at]
        opens, closes = raw == _OPENING, raw == _CLOSING
        arrays = self.arrays + np.cumsum(opens.astype(np.int64) - closes)
        if int(arrays.min()) < 0:
            raise malformed("a closing bracket too many", start)
        self.arrays = int(arrays[-1])
        is_comma = tokens.kind == COMMA
        direct = np.cumsum(is_comma & (arrays == 1))
        # The positions at which outermost arrays open in this block, and the depth in each; an array that was already
        # open comes first.
        begun, bases = [-1], [self.base]
        for edge in np.flatnonzero((opens & (arrays == 1)) | (closes & (arrays == 0))).tolist():
            at = start + int(tokens.at[edge])
            if opens[edge]:
                self.opened, self.base, self.commas = at, int(tokens.depth[edge]), -int(direct[edge])
                begun.append(edge)
                bases.append(self.base)
            else:
                self._take_out(self.opened, at + 1, (self.opened, at), self.commas + int(direct[edge]))
                self.opened = -1
        if self.opened >= 0:
            self.commas += int(direct[-1])
        places = np.flatnonzero(is_comma & (arrays >= 1))
        # As in `cut`: also take the first comma if it ends an element longer than a block.
        chosen = [] if not places.size else [int(places[-1])] if self.was_cut else [int(places[0]), int(places[-1])]
        for i in dict.fromkeys(chosen):
            self.layout.cut_at.append(start + int(tokens.at[i]))
            self.layout.cut_depth.append(int(tokens.depth[i]) - bases[bisect_right(begun, i) - 1] + 1)
        self.was_cut = bool(chosen)

    def _take_out(self, begin: int, end: int, span: tuple[int, int], commas: int | None) -> None:
        self.skeleton.replace(begin, end, b"[%d]" % len(self.layout.spans))
        self.layout.spans.append(span)
        self.layout.commas.append(commas)


def scan_members_steps(
    text: Buffer, block_bytes: int = BLOCK_BYTES, skeleton_limit: int = MAX_SKELETON_BYTES
) -> Steps[MemberLayout]:
    """Find the arrays and long strings of a document. Raises the errors of `scan_steps`."""
    view = memoryview(text)
    scan = _Scan(view, Skeleton(view, skeleton_limit))
    for start in range(0, len(view), block_bytes):
        block = bytes(view[start : start + block_bytes])
        scan.read(block, start)
        yield 0
    if scan.depth or scan.in_string:
        raise malformed("unexpected end of data", len(view))
    scan.layout.skeleton = b"".join(scan.skeleton.parts)
    return scan.layout
