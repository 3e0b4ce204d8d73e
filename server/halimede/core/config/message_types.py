"""The types of all fields, compiled from the type hints of the dataclasses in `model_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from halimede.core.types import DataType


class FieldKind(Enum):
    BOOL = auto()
    INTEGER = auto()
    FLOAT = auto()
    STRING = auto()
    ENUM = auto()
    MESSAGE = auto()


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of one value. `zero` is its default; `low` and `high` bound an integer, both included."""

    kind: FieldKind
    zero: object
    low: int = 0
    high: int = 0
    members: Mapping[str, Enum] = field(default_factory=dict)
    numbers: Mapping[int, Enum] = field(default_factory=dict)
    # Any: a dataclass of model_config, called with its own fields.
    message: Any = None


@dataclass(frozen=True, slots=True)
class FieldType:
    """A field of a message. `step` is what it adds to a path: the value of a map entry adds nothing.

    An `explicit` field records whether it was set. At most one of the fields in `oneof` may be set. Only a map has an
    `entry`.
    """

    name: str
    attribute: str
    step: str
    value: ValueType
    repeated: bool = False
    explicit: bool = False
    oneof: tuple[str, ...] = ()
    entry: "MessageType | None" = None


@dataclass(frozen=True, slots=True)
class MessageType:
    """The schema of a message. `by_json` has each field under both of its JSON names."""

    name: str
    by_name: Mapping[str, FieldType]
    by_json: Mapping[str, FieldType]


@cache
def message_type(message: type) -> MessageType:
    """Compile the schema of a message from its dataclass."""
    hints = get_type_hints(message, include_extras=True)
    oneofs: tuple[tuple[str, ...], ...] = getattr(message, "ONEOFS", ())
    group = {name: names for names in oneofs for name in names}
    types = [_field_type(f.name, hints[f.name], group.get(f.name, ())) for f in fields(message)]
    by_name = {t.name: t for t in types}
    return MessageType(message.__name__, by_name, by_name | {_camel(t.name): t for t in types})


# Any, here and below: a type hint.
def _field_type(attribute: str, hint: Any, oneof: tuple[str, ...]) -> FieldType:
    name = attribute.removesuffix("_")
    explicit = get_origin(hint) in (Union, UnionType)
    if explicit:
        hint = next(arm for arm in get_args(hint) if arm is not NoneType)
    if get_origin(hint) is tuple:
        return FieldType(name, attribute, f".{name}", _value_type(get_args(hint)[0]), repeated=True)
    if get_origin(hint) is Mapping:
        key, value = (_value_type(arm) for arm in get_args(hint))
        by_name = {
            "key": FieldType("key", "key", ".key", key),
            "value": FieldType("value", "value", "", value, explicit=value.kind is FieldKind.MESSAGE),
        }
        entry = MessageType("the map entry", by_name, by_name)
        return FieldType(name, attribute, f".{name}", value, entry=entry)
    return FieldType(name, attribute, f".{name}", _value_type(hint), explicit=explicit, oneof=oneof)


def _value_type(hint: Any) -> ValueType:
    if get_origin(hint) is Annotated:
        _, low, high = get_args(hint)
        return ValueType(FieldKind.INTEGER, 0, low, high)
    if hint is DataType:
        return ValueType(
            FieldKind.ENUM,
            DataType.INVALID,
            members={t.config_name: t for t in DataType},
            numbers={t.number: t for t in DataType},
        )
    if issubclass(hint, Enum):
        members = {member.name: member for member in hint}
        return ValueType(FieldKind.ENUM, next(iter(hint)), members=members, numbers={m.value: m for m in hint})
    if hint in _PLAIN:
        return ValueType(_PLAIN[hint], hint())
    return ValueType(FieldKind.MESSAGE, hint(), message=hint)


_PLAIN = {bool: FieldKind.BOOL, float: FieldKind.FLOAT, str: FieldKind.STRING}


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)
