"""JSON of the API server, whatever somebody put into an object of theirs.

The API server keeps objects whose parts are nested thousands of levels deep. orjson reads 1,024 of them and writes 254,
and would refuse a list as a whole because of one item. So what is too deep is cut out of the text before it is read,
and the items of a list are read one by one, so that what a hostile one takes of memory is soon free again. Whether a
spec of which something was cut may be served is for parsing to say: it allows fewer levels.
"""

import re
from collections.abc import Iterator
from typing import Any

import orjson

MAX_LEVELS = 64
"""Objects and lists within one another that are read. A spec begins at the second or third, and may have 32 more at the
fourth from there."""

# Everything up to the next bracket that is in no string.
_TO_BRACKET = re.compile(rb'[^"{}\[\]]*+(?:"(?:[^"\\]++|\\.)*+"[^"{}\[\]]*+)*+[{}\[\]]', re.DOTALL)
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_BRACKETS = b"{}[]"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))
_ITEMS = re.compile(rb'"items"\s*:\s*\Z')
_BEFORE = 32
"""Bytes before a list in which its name is looked for."""


def decode(data: bytes) -> Any:  # Any: JSON
    """A document, with null in the place of what is too deep; raises orjson.JSONDecodeError."""
    return orjson.loads(_shallow(data))


def decode_list(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """A list's document without its items, and the texts of these.

    Raises orjson.JSONDecodeError for what is no JSON outside of the items.
    """
    spans: list[tuple[int, int]] = []
    depth = begin = begun = ended = 0
    for at in _brackets(data):
        if data[at] in b"{[":
            depth += 1
            if depth == 2 and data[at] == ord("[") and _ITEMS.search(data, max(0, at - _BEFORE), at):
                begun = at
            elif depth == 3 and begun and not ended:
                begin = at
        else:
            if begun and not ended and depth == 3:
                spans.append((begin, at + 1))
            elif begun and not ended and depth == 2:
                ended = at + 1
            depth -= 1
    head = data[:begun] + b"null" + data[ended:] if ended else data
    found: dict[str, Any] = decode(head)
    return found, [data[begin:end] for begin, end in spans]


def _shallow(data: bytes) -> bytes:
    """The text with null in the place of each object and list of the level after the last."""
    if _is_shallow(data):
        return data
    pieces: list[bytes] = []
    depth = kept = 0
    for at in _brackets(data):
        if data[at] in b"{[":
            depth += 1
            if depth == MAX_LEVELS + 1:
                pieces += [data[kept:at], b"null"]
        else:
            if depth == MAX_LEVELS + 1:
                kept = at + 1
            depth -= 1
    return b"".join([*pieces, data[kept:]]) if pieces else data


def _is_shallow(data: bytes) -> bool:
    """Whether JSON has no more levels than are read. Of nearly all that comes it is true, and soon known."""
    plain = _ESCAPE.sub(b"", data) if b"\\" in data else data
    brackets = b"".join(plain.split(b'"')[::2]).translate(None, _OTHERS)
    for _ in range(MAX_LEVELS):
        if not brackets:
            break
        # The innermost level, at least.
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return not brackets


def _brackets(data: bytes) -> Iterator[int]:
    """The places of brackets outside of strings, up to a string that does not end."""
    end = 0
    while match := _TO_BRACKET.match(data, end):
        end = match.end()
        yield end - 1
