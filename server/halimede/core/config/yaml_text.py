"""Parse YAML into the nodes of `core.config.text`: only the part of YAML that is plain data.

The library's parser gives events, and no objects are constructed from them: a scalar keeps its text, and
`core.config.read` interprets it by its field. Anchors, aliases, tags, several documents and keys that are not scalars
are refused: they can hide what a text means, or make it grow without bound.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from halimede.core.config.text import (
    MAX_DEPTH,
    MAX_TOKENS,
    FieldNode,
    ListNode,
    MessageNode,
    Node,
    Scalar,
    ScalarKind,
    TextError,
    printable,
)
from halimede.core.types import Problem

# Characters that YAML forbids, quoted or not. A byte order mark is allowed only at the start.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def parse_yaml(text: str | bytes) -> tuple[MessageNode, Problem | None]:
    """Parse a YAML mapping: its fields, and the error at which parsing stopped, if any. An empty text has no fields."""
    tree = _Tree()
    try:
        for event in _events(_decoded(text)):
            tree.add(event)
    except TextError as error:
        return tree.root, error.problem
    return tree.root, None


def _decoded(text: str | bytes) -> str:
    # A lone surrogate is invalid, whether the text is given as str or as bytes.
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        decoded = raw.decode()
    except UnicodeDecodeError as error:
        raise _error_at(error.object[: error.start].decode(), f"not UTF-8: {error.reason}") from None
    decoded = decoded.removeprefix("\ufeff")
    if unprintable := _UNPRINTABLE.search(decoded):
        what = f"a character that YAML does not allow, '{printable(unprintable[0])}'"
        raise _error_at(decoded[: unprintable.start()], what)
    return decoded


def _error_at(before: str, message: str) -> TextError:
    return TextError(message, before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)


def _events(text: str) -> Iterator[yaml.Event]:
    try:
        # Only libyaml's parser: the one in Python takes minutes for 4 MiB, and interprets some texts differently.
        yield from yaml.parse(text, Loader=yaml.CSafeLoader)
    except yaml.MarkedYAMLError as error:
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise TextError(f"not YAML: {printable(reason)}", *_position(error.problem_mark)) from None
    except yaml.YAMLError as error:
        raise TextError(f"not YAML: {printable(str(error))}", 1, 1) from None


def _position(mark: Any) -> tuple[int, int]:  # Any: the library has one class in Python and another in C
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)


class _Tree:
    """The tree as read so far. `_open` are the lists and objects that are still open, `_keys` the pending key of
    each."""

    def __init__(self) -> None:
        self.root = MessageNode([], 1, 1)
        self._open: list[ListNode | MessageNode] = []
        self._keys: list[Scalar | None] = []
        self._documents = 0
        self._left = MAX_TOKENS

    def add(self, event: yaml.Event) -> None:
        line, column = _position(event.start_mark)
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise TextError("a second document; a configuration is one", line, column)
            case yaml.CollectionEndEvent():
                self._open.pop()
                self._keys.pop()
            case yaml.AliasEvent():
                raise TextError("an alias (*); write the value out, or quote the text", line, column)
            case yaml.ScalarEvent() | yaml.CollectionStartEvent():
                self._add_node(event, line, column)

    def _add_node(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, line: int, column: int) -> None:
        if event.anchor is not None:
            raise TextError("an anchor (&); write the value out, or quote the text", line, column)
        if event.tag is not None:
            raise TextError("a tag (!); leave it out, since the field gives the type, or quote the text", line, column)
        self._left -= 1
        if self._left < 0:
            raise TextError(f"more than {MAX_TOKENS} names and values", line, column)
        node: Node
        match event:
            case yaml.MappingStartEvent():
                node = MessageNode([], line, column) if self._open else self.root
            case yaml.CollectionStartEvent():
                node = ListNode([], line, column)
            case _:
                node = Scalar(ScalarKind.STRING if event.style else ScalarKind.PLAIN, event.value, line, column)
        self._put(node)
        if not isinstance(node, Scalar):
            if len(self._open) == MAX_DEPTH:
                raise TextError(f"nested more than {MAX_DEPTH} deep", line, column)
            self._open.append(node)
            self._keys.append(None)

    def _put(self, node: Node) -> None:
        """Add the node to the innermost open list or object."""
        if not self._open:
            is_nothing = isinstance(node, Scalar) and node.kind is ScalarKind.PLAIN and not node.text
            if node is not self.root and not is_nothing:
                raise TextError("expected fields, such as 'max_batch_size: 8'", node.line, node.column)
            return
        parent, key = self._open[-1], self._keys[-1]
        if isinstance(parent, ListNode):
            parent.items.append(node)
        elif key is None:
            if not isinstance(node, Scalar):
                raise TextError("a list or an object as a key; a key is text", node.line, node.column)
            self._keys[-1] = node
        else:
            parent.fields.append(FieldNode(key.text, node, key.line, key.column, colon=True))
            self._keys[-1] = None
