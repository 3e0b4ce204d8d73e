"""Write the model configuration as text: in the form of `GET /v2/models/<m>/config`, or as a configuration file.

As config.pbtxt or config.yaml it has only the fields that are set, and each line knows the path of its field. Strings
are always quoted, so that YAML does not read one as another type.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

import orjson

from halimede.core.config.message_types import FieldType, message_type
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import DataType


def to_json(config: ModelConfig) -> bytes:
    """JSON in the order and with the defaults that Triton prints.

    Every scalar, list and map of a message that is set is printed; messages and oneof members that are not set are
    omitted; 64-bit integers are numbers; maps are sorted by key.
    """
    return orjson.dumps(_plain(config))


@dataclass(frozen=True, slots=True)
class Line:
    """`path` is the path of the field whose value or message starts on the line; "" for a line of brackets only."""

    text: str
    path: str = ""


def to_pbtxt(config: ModelConfig, given: Collection[str] = ()) -> tuple[Line, ...]:
    """The configuration as config.pbtxt: all fields that are set, and those at their default whose path is `given`."""
    return tuple(_pbtxt_message(config, "", given))


def to_yaml(config: ModelConfig, given: Collection[str] = ()) -> tuple[Line, ...]:
    """The configuration as config.yaml, with the same fields."""
    return tuple(_yaml_message(config, "", given))


# Any, here and below: a message's dataclass, or what one of its fields holds.
def _set_fields(message: Any, path: str, given: Collection[str] = ()) -> Iterator[tuple[FieldType, Any, str]]:
    """Each field of the message that is set, with value and path; fields at their default only if `given`."""
    kind: type = type(message)
    for target in message_type(kind).by_name.values():
        value = getattr(message, target.attribute)
        at = path + target.step if path else target.name
        if target.repeated or target.entry is not None:
            is_set = len(value) > 0
        elif target.explicit:
            is_set = value is not None
        else:
            # Compared by repr, because -0.0 equals the default but is a value of its own.
            is_set = at in given or repr(value) != repr(target.value.zero)
        if is_set:
            yield target, value, at


def entry_path(path: str, key: object) -> str:
    """The path of an entry of a map."""
    return f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key}]"


def _pbtxt_message(message: Any, path: str, given: Collection[str]) -> Iterator[Line]:
    for target, value, at in _set_fields(message, path, given):
        name = target.name
        if target.entry is not None:
            for key, entry in value.items():
                where = entry_path(at, key)
                yield Line(f"{name} {{")
                yield Line(f"  key: {_pbtxt_scalar(key)}")
                if target.value.message is None:
                    yield Line(f"  value: {_pbtxt_scalar(entry)}", where)
                else:
                    yield from _indented(_pbtxt_block("value", entry, where, given))
                yield Line("}")
        elif target.value.message is None:
            if target.repeated:
                yield Line(f"{name}: [ {', '.join(map(_pbtxt_scalar, value))} ]", at)
            else:
                yield Line(f"{name}: {_pbtxt_scalar(value)}", at)
        elif target.repeated:
            for i, element in enumerate(value):
                yield from _pbtxt_block(name, element, f"{at}[{i}]", given)
        else:
            yield from _pbtxt_block(name, value, at, given)


def _pbtxt_block(name: str, message: Any, path: str, given: Collection[str]) -> Iterator[Line]:
    inner = list(_pbtxt_message(message, path, given))
    if not inner:
        yield Line(f"{name} {{ }}", path)
        return
    # The contents of an element or entry show its origin. A singular message may have another origin than its contents.
    yield Line(f"{name} {{", "" if path.endswith("]") else path)
    yield from _indented(inner)
    yield Line("}")


def _yaml_message(message: Any, path: str, given: Collection[str]) -> Iterator[Line]:
    for target, value, at in _set_fields(message, path, given):
        name = target.name
        if target.entry is not None:
            yield Line(f"{name}:")
            for key, entry in value.items():
                where = entry_path(at, key)
                if target.value.message is None:
                    yield Line(f"  {_yaml_scalar(key)}: {_yaml_scalar(entry)}", where)
                else:
                    yield from _indented(_yaml_block(_yaml_scalar(key), entry, where, given))
        elif target.value.message is None:
            if target.repeated:
                yield Line(f"{name}: [{', '.join(map(_yaml_scalar, value))}]", at)
            else:
                yield Line(f"{name}: {_yaml_scalar(value)}", at)
        elif target.repeated:
            yield Line(f"{name}:")
            for i, element in enumerate(value):
                yield from _yaml_element(element, f"{at}[{i}]", given)
        else:
            yield from _yaml_block(name, value, at, given)


def _yaml_block(name: str, message: Any, path: str, given: Collection[str]) -> Iterator[Line]:
    inner = list(_yaml_message(message, path, given))
    if not inner:
        yield Line(f"{name}: {{}}", path)
        return
    yield Line(f"{name}:", "" if path.endswith("]") else path)
    yield from _indented(inner)


def _yaml_element(message: Any, path: str, given: Collection[str]) -> Iterator[Line]:
    inner = list(_indented(_yaml_message(message, path, given), "    "))
    if not inner:
        yield Line("  - {}", path)
        return
    yield replace(inner[0], text="  - " + inner[0].text[4:])
    yield from inner[1:]


def _indented(lines: Iterable[Line], by: str = "  ") -> Iterator[Line]:
    return (replace(line, text=by + line.text) for line in lines)


def _pbtxt_scalar(value: object) -> str:
    match value:
        case str():
            return f'"{_PBTXT_ESCAPED.sub(_octal, value)}"'
        case float() if not math.isfinite(value):
            return str(value)
    return _scalar(value)


def _yaml_scalar(value: object) -> str:
    match value:
        case str():
            return f'"{_YAML_ESCAPED.sub(_code, value)}"'
        case float() if not math.isfinite(value):
            return "-.inf" if value < 0 else f".{value}"
    return _scalar(value)


def _scalar(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case DataType():
            return value.config_name
        case Enum():
            return value.name
    return repr(value)


# Besides what the languages require: control characters for terminals, and bidirectional text marks.
_PBTXT_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]')
_YAML_ESCAPED = re.compile('["\\\\\x00-\x1f\x7f-\xa0\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff]')


def _octal(match: re.Match[str]) -> str:
    return {'"': '\\"', "\\": "\\\\", "\n": "\\n"}.get(match[0]) or "".join(
        f"\\{byte:03o}" for byte in match[0].encode()
    )


def _code(match: re.Match[str]) -> str:
    return {'"': '\\"', "\\": "\\\\", "\n": "\\n"}.get(match[0]) or f"\\u{ord(match[0]):04x}"


def _plain(value: object) -> object:
    match value:
        case str() | int():
            return value
        case float():
            return value if math.isfinite(value) else _non_finite(value)
        case DataType():
            return value.config_name
        case Enum():
            return value.name
        case tuple():
            return [_plain(item) for item in value]
        case Mapping():
            return {str(key): _plain(value[key]) for key in sorted(value)}
    message: type = type(value)
    pairs = ((name, getattr(value, attribute)) for attribute, name in _names(message))
    return {name: _plain(inner) for name, inner in pairs if inner is not None}


def _non_finite(value: float) -> str:
    """JSON has no such numbers: proto-JSON writes them as strings."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


@cache
def _names(message: type) -> tuple[tuple[str, str], ...]:
    """Attribute and protocol name of each field."""
    attributes = [f.name for f in dataclasses.fields(message)]
    return tuple((attribute, attribute.removesuffix("_")) for attribute in attributes)
