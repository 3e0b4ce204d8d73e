"""Read the members of parsed JSON objects, with Triton's error texts."""

from typing import Any

from halimede.core.types import Buffer, InferenceError, ParameterValue
from halimede.core.types.error import clip, invalid
from halimede.core.wire.raw_tensor import shape_text

_MAX_ELEMENTS = 2**63 - 1
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def without_mark(text: Buffer) -> Buffer:
    """The JSON text without the byte order mark of UTF-8, which C# and PowerShell may write in front of it."""
    return memoryview(text)[3:] if text[:3] == _BYTE_ORDER_MARK else text


def missing(key: str) -> InferenceError:
    """The error for a missing member."""
    return invalid(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")


def wrong_type(key: str, kind: str) -> InferenceError:
    """The error for a member of another kind than `kind`, which is JSON's name for it."""
    return invalid(f"Unable to parse '{key}': attempt to access JSON non-{kind} as {kind}")


def text_member(item: Any, key: str) -> str:
    """The string at `key`; INVALID_ARG if the item is not an object or has no string there."""
    if type(item) is not dict or key not in item:
        raise missing(key)
    value = item[key]
    if type(value) is not str:
        raise wrong_type(key, "string")
    return value


def array_member(item: dict[str, Any], key: str) -> list[Any]:
    """The array at `key`; INVALID_ARG if the member is not an array."""
    if key not in item:
        raise missing(key)
    value = item[key]
    if type(value) is not list:
        raise wrong_type(key, "array")
    return value


def shape_member(item: dict[str, Any], input_name: str) -> tuple[int, ...]:
    """The array of dimensions at `shape`; INVALID_ARG for a negative one, or if the tensor has too many elements."""
    shape = tuple(array_member(item, "shape"))
    count = 1
    for dim in shape:
        if type(dim) is not int:
            raise wrong_type("shape", "unsigned-integer")
        if dim < 0:
            raise _invalid_shape(input_name, shape, "contains one or more invalid dimensions")
        # A dimension of zero counts as one: numpy refuses other huge dimensions beside it, too.
        count *= dim or 1
        # The product of a hostile shape may be a huge number, so multiplication stops at the limit.
        if count > _MAX_ELEMENTS:
            fault = f"causes total element count to exceed maximum size of {_MAX_ELEMENTS}"
            raise _invalid_shape(input_name, shape, fault)
    return shape


def _invalid_shape(input_name: str, shape: tuple[int, ...], fault: str) -> InferenceError:
    return invalid(f"invalid shape for input '{clip(input_name)}': shape {shape_text(shape)} {fault}")


def object_member(item: dict[str, Any], key: str) -> dict[str, Any]:
    """The object at `key`, which must exist; INVALID_ARG if it is something else."""
    value = item[key]
    if type(value) is not dict:
        raise wrong_type(key, "object")
    return value


def unsigned_member(item: dict[str, Any], key: str) -> int:
    """The unsigned integer at `key`, which must exist; INVALID_ARG if it is something else."""
    value = item[key]
    if type(value) is not int or value < 0:
        raise wrong_type(key, "unsigned-integer")
    return value


def flag_member(item: dict[str, Any], key: str) -> bool:
    """The boolean at `key`, which must exist; INVALID_ARG if it is something else."""
    value = item[key]
    if type(value) is not bool:
        raise wrong_type(key, "boolean")
    return value


def parameter_value(key: str, value: Any) -> ParameterValue:
    """The value of a parameter that the model reads; INVALID_ARG unless it is a string, a boolean or a number."""
    if isinstance(value, str | float) or (isinstance(value, int) and value < 2**63):
        return value
    if isinstance(value, int):
        raise invalid(f"parameter '{clip(key)}' is out of range. It should be at most {2**63 - 1}.")
    raise invalid(f"parameter '{clip(key)}' has invalid type. It should be either 'int', 'bool', or 'string'.")
