"""Read configuration text into a ModelConfig, with every problem in the text and the position of every field.

The rules are those of the protocol's own readers, text format for config.pbtxt and proto-JSON for JSON, except that
enum numbers without a name are problems. Two rules of the text format are surprising: a scalar may be given again after
its default value (`max_batch_size: 0 max_batch_size: 4`), and of two equal map keys the last one wins.

config.yaml has the tree of the JSON form and is stricter: only the protocol's own field names, enums by name, no
duplicates. The field alone decides what a plain YAML scalar means, not its spelling: for a string field it is the text
as written (`no` is "no", `1.0` is "1.0"), and numbers are decimal (`010` and `1_000` are problems). A key without a
value is an empty string or a problem, so that it never has to be guessed whether it means "absent" or "empty".

A value that cannot be read is left at its default, so that a validator can continue with the rest.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from typing import Any

from halimede.core.config.message_types import FieldKind, FieldType, MessageType, ValueType, message_type
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.text import (
    JSON_NUMBER,
    FieldNode,
    ListNode,
    MessageNode,
    Node,
    Scalar,
    ScalarKind,
    parse_json,
    parse_pbtxt,
    printable,
)
from halimede.core.types import Problem

PROBLEM_LIMIT = 100
"""Maximum number of problems reported; the rest is counted, because a client may send a JSON configuration."""


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """`config` has every value that could be read. `problems` are in the order of the text.

    `locations` maps the path of each field and list element in the text to its line and column, from 1. Paths are those
    of Problem.path: `input`, `input[0].dims[1]`, `parameters["x"].string_value`.
    """

    config: ModelConfig
    problems: tuple[Problem, ...]
    locations: Mapping[str, tuple[int, int]]


def read_pbtxt(text: str | bytes) -> ParsedConfig:
    """Read a config.pbtxt."""
    return _read(*parse_pbtxt(text), _PBTXT)


def read_json(text: str | bytes) -> ParsedConfig:
    """Read a configuration in proto-JSON, as in a load request."""
    return _read(*parse_json(text), _JSON)


def read_yaml(text: str | bytes) -> ParsedConfig:
    """Read a config.yaml."""
    # Imported here, so that a server whose configurations are all in text format does not load the library.
    from halimede.core.config.yaml_text import parse_yaml

    return _read(*parse_yaml(text), _YAML)


def read_config(filename: str, text: str | bytes) -> ParsedConfig:
    """Read a configuration file; its suffix gives the format."""
    return read_yaml(text) if filename.endswith(".yaml") else read_pbtxt(text)


def locate(problems: tuple[Problem, ...], locations: Mapping[str, tuple[int, int]]) -> tuple[Problem, ...]:
    """The problems with positions: one that has only a path gets the position of its longest prefix in the text."""
    return tuple(problem if problem.line else _located(problem, locations) for problem in problems)


# A step of a path: a field, a map key in quotes, or an index. A key that contains a quote ends the walk one step early.
_PATH_STEP = re.compile(r'\.?[^].["]+|\["[^"]*"\]|\[[^]"]*\]')


def _located(problem: Problem, locations: Mapping[str, tuple[int, int]]) -> Problem:
    position = locations.get(problem.path)
    if position is None:
        end = 0
        while step := _PATH_STEP.match(problem.path, end):
            end = step.end()
            position = locations.get(problem.path[:end], position)
    return replace(problem, line=position[0], column=position[1]) if position else problem


@dataclass(frozen=True, slots=True)
class _Dialect:
    """Functions that interpret a scalar in one language; they return None for a scalar of another type.

    `has_objects` is true for JSON and YAML: maps are objects, lists are written as lists, and nothing may be repeated.
    The keys of those maps are scalars of `key_kind`. `has_camel_names` is true if a field also has a camelCase name, as
    in JSON.
    """

    has_objects: bool
    has_camel_names: bool
    key_kind: ScalarKind
    message_word: str
    string: Callable[[Scalar], str | None]
    integer: Callable[[Scalar], int | None]
    number: Callable[[Scalar], float | None]
    boolean: Callable[[Scalar], bool | None]
    enum_name: Callable[[Scalar], str | None]


def _read(root: MessageNode, syntax_error: Problem | None, dialect: _Dialect) -> ParsedConfig:
    reader = _Reader(dialect)
    config = ModelConfig(**reader.message(message_type(ModelConfig), root, ""))
    problems = [*reader.problems, syntax_error] if syntax_error else reader.problems
    problems.sort(key=lambda problem: (problem.line, problem.column))
    if reader.unlisted:
        problems.append(Problem(f"{reader.unlisted} more problems are not listed"))
    return ParsedConfig(config, tuple(problems), reader.locations)


class _Reader:
    """The reader of one text: it collects the problems and the positions of the fields."""

    def __init__(self, dialect: _Dialect) -> None:
        self.dialect = dialect
        self.problems: list[Problem] = []
        self.unlisted = 0
        self.locations: dict[str, tuple[int, int]] = {}

    # Any: a message has values of many types.
    def message(self, message: MessageType, node: MessageNode, path: str) -> dict[str, Any]:
        """The arguments for the message's dataclass: the fields that the text sets."""
        known = message.by_json if self.dialect.has_camel_names else message.by_name
        values: dict[str, Any] = {}
        given: dict[str, FieldNode] = {}
        for field_node in node.fields:
            target = known.get(field_node.name)
            if target is None:
                self._report_unknown(message, field_node, path)
                continue
            at = path + target.step if path else target.name
            self._check_repetition(target, values, given, field_node, at)
            given[target.attribute] = field_node
            self.locations.setdefault(at, (field_node.line, field_node.column))
            if self.dialect.has_objects and _is_null(field_node.value):
                continue
            self._check_oneof(target, values, given, field_node, at)
            if target.entry:
                self._add_entries(target.entry, values.setdefault(target.attribute, {}), field_node, at)
            elif target.repeated:
                self._add_items(target.value, values.setdefault(target.attribute, []), field_node, at)
            else:
                value = self._value(target.value, field_node.value, at)
                if value is not None:
                    values[target.attribute] = value
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    def _check_repetition(
        self,
        target: FieldType,
        values: Mapping[str, object],
        given: Mapping[str, FieldNode],
        field_node: FieldNode,
        at: str,
    ) -> None:
        """Report a repeated field: in JSON and YAML always, in text format only if its first value would be lost."""
        first = given.get(target.attribute)
        if first is None:
            return
        if not self.dialect.has_objects:
            if target.repeated or target.entry or target.attribute not in values:
                return
            # Compared by repr, because -0.0 equals the default but is a value of its own.
            if not target.explicit and repr(values[target.attribute]) == repr(target.value.zero):
                return
        self._report(f"given twice, first in line {first.line}", at, field_node)

    def _check_oneof(
        self,
        target: FieldType,
        values: dict[str, object],
        given: Mapping[str, FieldNode],
        field_node: FieldNode,
        at: str,
    ) -> None:
        """Report a second member of a oneof; it replaces the first, as in the protocol."""
        for other in target.oneof:
            if other != target.name and values.pop(other, None) is not None:
                choice = ", ".join(target.oneof)
                line = given[other].line
                self._report(f"given beside {other} of line {line}; only one of {choice} is allowed", at, field_node)

    def _add_items(self, target: ValueType, items: list[object], field_node: FieldNode, at: str) -> None:
        if self.dialect.has_objects and not isinstance(field_node.value, ListNode):
            self._report_mismatch("a list", field_node.value, at)
            return
        if not field_node.colon and target.kind is not FieldKind.MESSAGE and isinstance(field_node.value, ListNode):
            self._report("expected ':' before '['", at, field_node)
        for element, line, column in _elements(field_node):
            path = f"{at}[{len(items)}]"
            self.locations[path] = (line, column)
            value = self._value(target, element, path)
            items.append(target.zero if value is None else value)

    def _add_entries(self, entry: MessageType, entries: dict[object, object], field_node: FieldNode, at: str) -> None:
        key_type, value_type = entry.by_name["key"].value, entry.by_name["value"].value
        if self.dialect.has_objects:
            self._add_members(key_type, value_type, entries, field_node.value, at)
            return
        for element, line, column in _elements(field_node):
            if not isinstance(element, MessageNode):
                self._report_mismatch("a message with key and value", element, at)
                continue
            path = f"{at}[{self._entry_key(key_type, element)}]"
            self.locations[path] = (line, column)
            values = self.message(entry, element, path)
            entries[values.get("key", key_type.zero)] = values.get("value", value_type.zero)

    def _add_members(
        self, key_type: ValueType, value_type: ValueType, entries: dict[object, object], node: Node, at: str
    ) -> None:
        """Read an object as a map."""
        if not isinstance(node, MessageNode):
            self._report_mismatch("an object", node, at)
            return
        for member in node.fields:
            name = Scalar(self.dialect.key_kind, member.name, member.line, member.column)
            path = f"{at}[{self._path_key(key_type, name)}]"
            self.locations[path] = (member.line, member.column)
            key = self._value(key_type, name, path)
            value = self._value(value_type, member.value, path)
            if key in entries:
                self._report("given twice", path, member)
            if key is not None:
                entries[key] = value_type.zero if value is None else value

    def _entry_key(self, key_type: ValueType, entry: MessageNode) -> str:
        """The key of an entry as paths show it; it is read before the other fields, whose paths contain it."""
        for field_node in reversed(entry.fields):
            if field_node.name == "key" and isinstance(field_node.value, Scalar):
                return self._path_key(key_type, field_node.value)
        return '""' if key_type.kind is FieldKind.STRING else "0"

    def _path_key(self, key_type: ValueType, key: Scalar) -> str:
        if key_type.kind is FieldKind.INTEGER:
            number = self.dialect.integer(key)
            return printable(key.text) if number is None else str(number)
        return f'"{key.text if _is_utf8(key.text) else printable(key.text)}"'

    def _value(self, target: ValueType, node: Node, path: str) -> object | None:
        """One value; None, and a problem, if the node does not have this type."""
        if isinstance(node, MessageNode) and target.kind is FieldKind.MESSAGE:
            message: object = target.message(**self.message(message_type(target.message), node, path))
            return message
        value = self._scalar(target, node) if isinstance(node, Scalar) else None
        if value is None:
            self._report_mismatch(self._expected(target, node), node, path)
        return value

    def _scalar(self, target: ValueType, scalar: Scalar) -> object | None:
        match target.kind:
            case FieldKind.STRING:
                return self.dialect.string(scalar)
            case FieldKind.INTEGER:
                integer = self.dialect.integer(scalar)
                return integer if integer is not None and target.low <= integer <= target.high else None
            case FieldKind.FLOAT:
                return self.dialect.number(scalar)
            case FieldKind.BOOL:
                return self.dialect.boolean(scalar)
            case FieldKind.ENUM:
                return self._member(target, scalar)
        return None

    def _expected(self, target: ValueType, node: Node) -> str:
        match target.kind:
            case FieldKind.STRING:
                return "a string of UTF-8"
            case FieldKind.INTEGER:
                return f"an integer from {target.low} to {target.high}"
            case FieldKind.FLOAT:
                return "a number"
            case FieldKind.BOOL:
                return "true or false"
            case FieldKind.ENUM:
                return _meant(target, node) or f"one of {', '.join(target.members)}"
        return self.dialect.message_word

    def _member(self, target: ValueType, scalar: Scalar) -> Enum | None:
        name = self.dialect.enum_name(scalar)
        if name is not None:
            return target.members.get(name)
        number = self.dialect.integer(scalar)
        return None if number is None else target.numbers.get(number)

    def _report(self, message: str, path: str, node: Node | FieldNode) -> None:
        if len(self.problems) == PROBLEM_LIMIT:
            self.unlisted += 1
            return
        self.problems.append(Problem(f"{printable(path)}: {message}", path, node.line, node.column))

    def _report_mismatch(self, expected: str, node: Node, path: str) -> None:
        match node:
            case ListNode():
                found = "a list"
            case MessageNode():
                found = self.dialect.message_word
            case Scalar(kind=ScalarKind.STRING):
                found = f'the string "{printable(node.text)}"'
            case Scalar(text=""):
                found = "nothing"
            case _:
                found = printable(node.text)
        self._report(f"expected {expected}, found {found}", path, node)

    def _report_unknown(self, message: MessageType, field_node: FieldNode, path: str) -> None:
        name = printable(field_node.name)
        # The comparison takes quadratic time in the length of the name, and all field names are much shorter.
        is_worth_it = len(name) < 100 and len(self.problems) < PROBLEM_LIMIT
        near = get_close_matches(name, message.by_name, n=3) if is_worth_it else []
        every = ", ".join(message.by_name) or "none"
        hint = f"did you mean {' or '.join(near)}?" if near else f"its fields are {every}"
        at = f"{path}.{name}" if path else name
        self._report(f"unknown field of {message.name}; {hint}", at, field_node)


def _meant(target: ValueType, node: Node) -> str:
    """The member of an enum that the word most likely means: TYPE_FP32 for FP32. "" if there is none."""
    word = node.text.upper() if isinstance(node, Scalar) else ""
    return " or ".join(name for name in target.members if word and f"_{name}".endswith(f"_{word}"))


def _elements(field_node: FieldNode) -> Iterator[tuple[Node, int, int]]:
    """The elements that one occurrence of a repeated field adds, with positions: `a: 1` adds one, `a: [1, 2]` two."""
    if not isinstance(field_node.value, ListNode):
        yield field_node.value, field_node.line, field_node.column
        return
    for item in field_node.value.items:
        yield item, item.line, item.column


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.kind is ScalarKind.WORD and node.text == "null"


def _is_utf8(text: str) -> bool:
    """False if the text has a lone surrogate: from an invalid byte, or written as an escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_PBTXT_INTEGER = re.compile(r"(-?)(?:0[xX]([0-9a-fA-F]++)|0([0-7]*+)|([1-9][0-9]*+))")
_PBTXT_FLOAT = re.compile(r"(-?(?:(?:0|[1-9][0-9]*+)(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?)[fF]?")
_PBTXT_FLOAT_WORDS = {
    "inf": math.inf,
    "-inf": -math.inf,
    "infinity": math.inf,
    "-infinity": -math.inf,
    "nan": math.nan,
    "-nan": math.nan,
}


def _pbtxt_integer(scalar: Scalar) -> int | None:
    match = _PBTXT_INTEGER.fullmatch(scalar.text) if scalar.kind is ScalarKind.NUMBER else None
    if match is None:
        return None
    sign, hexadecimal, octal, decimal = match.groups()
    size = int(hexadecimal, 16) if hexadecimal else _decimal(decimal) if decimal else int(octal or "0", 8)
    return -size if sign else size


def _pbtxt_number(scalar: Scalar) -> float | None:
    if scalar.kind is ScalarKind.WORD:
        return _PBTXT_FLOAT_WORDS.get(scalar.text.lower())
    match = _PBTXT_FLOAT.fullmatch(scalar.text) if scalar.kind is ScalarKind.NUMBER else None
    return float(match[1]) if match else None


def _pbtxt_boolean(scalar: Scalar) -> bool | None:
    if scalar.kind is ScalarKind.WORD:
        return {"true": True, "True": True, "t": True, "false": False, "False": False, "f": False}.get(scalar.text)
    if scalar.text.startswith("-"):
        return None
    number = _pbtxt_integer(scalar)
    return bool(number) if number in (0, 1) else None


def _pbtxt_enum_name(scalar: Scalar) -> str | None:
    return scalar.text if scalar.kind is ScalarKind.WORD else None


def _json_integer(scalar: Scalar) -> int | None:
    """64-bit integers may be strings, and `1e3` is an integer."""
    if scalar.kind is ScalarKind.WORD or not JSON_NUMBER.fullmatch(scalar.text):
        return None
    digits = scalar.text.removeprefix("-")
    if digits.isdecimal():
        return -_decimal(digits) if digits != scalar.text else _decimal(digits)
    number = float(scalar.text)
    return int(number) if number.is_integer() else None


def _json_number(scalar: Scalar) -> float | None:
    if scalar.kind is ScalarKind.STRING and scalar.text in ("NaN", "Infinity", "-Infinity"):
        return float(scalar.text)
    if scalar.kind is ScalarKind.WORD or not JSON_NUMBER.fullmatch(scalar.text):
        return None
    number = float(scalar.text)
    return number if math.isfinite(number) else None


def _json_boolean(scalar: Scalar) -> bool | None:
    return {"true": True, "false": False}.get(scalar.text) if scalar.kind is ScalarKind.WORD else None


def _json_enum_name(scalar: Scalar) -> str | None:
    return scalar.text.upper() if scalar.kind is ScalarKind.STRING else None


def _decimal(digits: str) -> int:
    """The number. Digits that no integer field can hold give a value that is too large, as int() refuses some."""
    return int(digits) if len(digits) <= 20 else 10**20


def _plain_string(scalar: Scalar) -> str | None:
    return scalar.text if scalar.kind is ScalarKind.STRING and _is_utf8(scalar.text) else None


_YAML_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*+)")
_YAML_FLOAT_WORDS = {".inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}


def _yaml_integer(scalar: Scalar) -> int | None:
    if scalar.kind is not ScalarKind.PLAIN or not _YAML_INTEGER.fullmatch(scalar.text):
        return None
    size = _decimal(scalar.text.removeprefix("-"))
    return -size if scalar.text.startswith("-") else size


def _yaml_number(scalar: Scalar) -> float | None:
    if scalar.kind is not ScalarKind.PLAIN:
        return None
    if not JSON_NUMBER.fullmatch(scalar.text):
        return _YAML_FLOAT_WORDS.get(scalar.text)
    number = float(scalar.text)
    return number if math.isfinite(number) else None


def _yaml_boolean(scalar: Scalar) -> bool | None:
    return {"true": True, "false": False}.get(scalar.text) if scalar.kind is ScalarKind.PLAIN else None


def _yaml_text(scalar: Scalar) -> str:
    return scalar.text


_PBTXT = _Dialect(
    has_objects=False,
    has_camel_names=False,
    key_kind=ScalarKind.STRING,
    message_word="a message",
    string=_plain_string,
    integer=_pbtxt_integer,
    number=_pbtxt_number,
    boolean=_pbtxt_boolean,
    enum_name=_pbtxt_enum_name,
)
_JSON = _Dialect(
    has_objects=True,
    has_camel_names=True,
    key_kind=ScalarKind.STRING,
    message_word="an object",
    string=_plain_string,
    integer=_json_integer,
    number=_json_number,
    boolean=_json_boolean,
    enum_name=_json_enum_name,
)
_YAML = _Dialect(
    has_objects=True,
    has_camel_names=False,
    key_kind=ScalarKind.PLAIN,
    message_word="an object",
    string=_yaml_text,
    integer=_yaml_integer,
    number=_yaml_number,
    boolean=_yaml_boolean,
    enum_name=_yaml_text,
)
