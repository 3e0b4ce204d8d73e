"""The dataclasses of model_config compared with the protocol's own descriptor."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from halimede.core.config import model_config
from halimede.core.config.model_config import Int32, Int64, ModelConfig, UInt32, UInt64
from halimede.core.types import DataType
from support.configs import new

PLAIN = {
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_DOUBLE: float,
    FieldDescriptor.TYPE_FLOAT: float,
    FieldDescriptor.TYPE_INT32: Int32,
    FieldDescriptor.TYPE_INT64: Int64,
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_UINT32: UInt32,
    FieldDescriptor.TYPE_UINT64: UInt64,
}
INTEGERS = {
    (-(2**31), 2**31 - 1): "int32",
    (-(2**63), 2**63 - 1): "int64",
    (0, 2**32 - 1): "uint32",
    (0, 2**64 - 1): "uint64",
}


def test_every_message_has_the_protocol_s_fields_in_its_order():
    pairs = message_pairs(ModelConfig, new().DESCRIPTOR, {})
    declared_fields = {name: dataclass_fields(message) for name, (message, _) in pairs.items()}
    protocol_fields = {name: descriptor_fields(descriptor) for name, (_, descriptor) in pairs.items()}
    assert declared_fields == protocol_fields


def test_every_dataclass_is_a_message_of_the_protocol():
    pairs = message_pairs(ModelConfig, new().DESCRIPTOR, {})
    declared = {value for value in vars(model_config).values() if dataclasses.is_dataclass(value)}
    assert {message for message, _ in pairs.values()} == declared


def test_every_message_has_the_protocol_s_oneofs():
    for message, descriptor in message_pairs(ModelConfig, new().DESCRIPTOR, {}).values():
        groups = getattr(message, "ONEOFS", ())
        # An optional field has a oneof of its own, of which the name begins with an underscore.
        oneofs = [oneof for oneof in descriptor.oneofs if not oneof.name.startswith("_")]
        assert groups == tuple(tuple(f.name for f in oneof.fields) for oneof in oneofs), message


def test_every_message_has_defaults_for_all_fields():
    for message, _ in message_pairs(ModelConfig, new().DESCRIPTOR, {}).values():
        assert message() == message()


def test_integer_ranges_are_those_of_their_widths():
    assert [INTEGERS[get_args(hint)[1:]] for hint in (Int32, Int64, UInt32, UInt64)] == list(INTEGERS.values())


def message_pairs(message: Any, descriptor: Descriptor, seen: dict[str, tuple[Any, Descriptor]]) -> dict[str, Any]:
    """The dataclass and the protocol's descriptor of every message, by its full name, from the root down."""
    if descriptor.full_name in seen:
        assert seen[descriptor.full_name][0] is message
        return seen
    seen[descriptor.full_name] = (message, descriptor)
    hints = get_type_hints(message, include_extras=True)
    for field in descriptor.fields:
        value = value_of_map(field) if is_map(field) else field
        if value.message_type is not None:
            name = field.name + "_" if field.name + "_" in hints else field.name
            message_pairs(bare(hints[name]), value.message_type, seen)
    return seen


def bare(hint: Any) -> Any:
    """The type of the values of a tuple, a map or an optional field."""
    arms = [arm for arm in get_args(hint) if arm not in (NoneType, Ellipsis)]
    return arms[-1] if arms else hint


def dataclass_fields(message: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(message, include_extras=True)
    return [(f.name.removesuffix("_"), dataclass_kind(hints[f.name])) for f in dataclasses.fields(message)]


def dataclass_kind(hint: Any) -> Any:
    origin = get_origin(hint)
    if origin is tuple:
        assert get_args(hint)[1] is Ellipsis
        return ("repeated", dataclass_kind(get_args(hint)[0]))
    if origin is Mapping:
        key, value = get_args(hint)
        return ("map", dataclass_kind(key), dataclass_kind(value))
    if NoneType in get_args(hint):
        return ("explicit", dataclass_kind(bare(hint)))
    if origin is Annotated:
        return INTEGERS[get_args(hint)[1:]]
    if hint is DataType:
        return [(t.config_name, t.number) for t in sorted(DataType, key=lambda t: t.number)]
    if issubclass(hint, Enum):
        return [(member.name, member.value) for member in hint]
    return "message" if dataclasses.is_dataclass(hint) else hint


def descriptor_fields(descriptor: Descriptor) -> list[tuple[str, Any]]:
    return [(f.name, descriptor_kind(f)) for f in descriptor.fields]


def descriptor_kind(field: FieldDescriptor) -> Any:
    if is_map(field):
        key, value = field.message_type.fields_by_name["key"], value_of_map(field)
        return ("map", value_kind(key), value_kind(value))
    if field.is_repeated:
        return ("repeated", value_kind(field))
    return ("explicit", value_kind(field)) if field.has_presence else value_kind(field)


def value_kind(field: FieldDescriptor) -> Any:
    if field.enum_type is not None:
        return [(value.name, value.number) for value in field.enum_type.values]
    return "message" if field.message_type is not None else dataclass_kind(PLAIN[field.type])


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def value_of_map(field: FieldDescriptor) -> FieldDescriptor:
    return field.message_type.fields_by_name["value"]
