"""Decodes JSON of the API server safely: users may put anything into their objects.

The API server stores objects that are nested thousands of levels deep. Python reads 1,000 levels, and orjson writes
254. So parts that are too deep are cut out of the text before it is decoded. Whether a spec with such a cut is valid is
decided by parsing, which allows fewer levels. The items of a list are decoded one by one, because a large item may take
30 times as much memory as its text.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import orjson

MAX_LEVELS = 64
"""Levels of nested objects and lists that are decoded. A spec begins at the second or third level, and may have 32 more
from the fourth level below that on."""

# Everything up to the next bracket outside a string.
_TO_BRACKET = re.compile(rb'[^"{}\[\]]*+(?:"(?:[^"\\]++|\\.)*+"[^"{}\[\]]*+)*+[{}\[\]]', re.DOTALL)
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_ITEMS = re.compile(r'"items"\s*:\s*\[\s*')
_COMMA = re.compile(r"[\s,]*")
_BRACKETS = b"{}[]"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))


def decode(data: bytes) -> Any:  # Any: JSON
    """Decode a document, with null in place of parts that are too deep. Raises orjson.JSONDecodeError."""
    return orjson.loads(shallow(data))


def decode_list(data: bytes, kept: Callable[[Any], Any]) -> dict[str, Any]:
    """Decode the document of a list. Raises ValueError if it is not JSON.

    kept: returns what to keep of an item; called before the next item is decoded.
    """
    text = shallow(data).decode()
    items = []
    begin = at = found.end() if (found := _ITEMS.search(text)) else len(text)
    while text[at : at + 1] not in ("]", ""):
        item, end = json.JSONDecoder().raw_decode(text, at)
        items.append(kept(item))
        at = _COMMA.match(text, end).end()  # type: ignore[union-attr]  # it matches the empty text
    return {**json.loads(text[:begin] + text[at:]), "items": items}


def shallow(data: bytes) -> bytes:
    """The JSON text with null in place of each object and list below MAX_LEVELS levels."""
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
    """Whether JSON has at most MAX_LEVELS levels. Nearly all documents have, and this check is fast."""
    plain = _ESCAPE.sub(b"", data) if b"\\" in data else data
    brackets = b"".join(plain.split(b'"')[::2]).translate(None, _OTHERS)
    for _ in range(MAX_LEVELS):
        if not brackets:
            break
        # Each round removes at least the innermost level.
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return not brackets


def _brackets(data: bytes) -> Iterator[int]:
    """Positions of brackets outside strings, up to a string that does not end."""
    end = 0
    while match := _TO_BRACKET.match(data, end):
        end = match.end()
        yield end - 1
