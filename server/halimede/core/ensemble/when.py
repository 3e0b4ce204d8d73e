"""Whether a step's condition is met, and whether it can be decided: compared values must be of one kind.

The first element of a tensor, a dimension and a parameter are a number, a text, or true or false; nothing is converted.
An absent value behaves like NaN: `!=` with it is true, and every other comparison is false. A condition decides for a
whole request, with all rows of its batch.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np

from halimede.core.config.condition import Condition
from halimede.core.types import DataType, ParameterValue, Tensor
from halimede.core.types.error import clip, invalid
from halimede_spec.condition import (
    AllOf,
    AnyOf,
    Comparison,
    Dimension,
    Element,
    Expression,
    Literal,
    Not,
    Operand,
    Parameter,
    Present,
    Truth,
)

MAX_TEXT_BYTES = 64 << 10
"""Maximum size of an element of a BYTES tensor that is compared."""


class ValueKind(Enum):
    NUMBER = "a number"
    TEXT = "a text"
    TRUTH = "true or false"


def is_met(
    condition: Condition, tensors: Mapping[str, Tensor | None], parameters: Mapping[str, ParameterValue]
) -> bool:
    """Whether the step runs. `tensors` has each tensor that the condition names; None for an absent one.

    Raises INVALID_ARG if kinds differ, or if a tensor lacks a first element or the dimension.
    """
    return _holds(condition.expression, tensors, parameters)


def kind_problems(condition: Condition, datatypes: Mapping[str, DataType]) -> list[str]:
    """The mismatches of kinds that are known before any request. `datatypes` has each tensor of the condition."""
    return list(_kind_problems(condition.expression, datatypes))


_SIGNS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _holds(
    expression: Expression, tensors: Mapping[str, Tensor | None], parameters: Mapping[str, ParameterValue]
) -> bool:
    match expression:
        case AllOf(parts):
            return all(_holds(part, tensors, parameters) for part in parts)
        case AnyOf(parts):
            return any(_holds(part, tensors, parameters) for part in parts)
        case Not(inner):
            return not _holds(inner, tensors, parameters)
        case Truth(operand):
            value = _value(operand, tensors, parameters)
            if value is None:
                return False
            if not isinstance(value, bool):
                raise invalid(_not_truth(operand, _kind_of_value(value)))
            return value
        case Comparison(sign, left, right):
            first, second = _value(left, tensors, parameters), _value(right, tensors, parameters)
            if first is None or second is None:
                return sign == "!="
            if problem := _mismatch(sign, left, _kind_of_value(first), right, _kind_of_value(second)):
                raise invalid(problem)
            return _SIGNS[sign](first, second)


def _value(
    operand: Operand, tensors: Mapping[str, Tensor | None], parameters: Mapping[str, ParameterValue]
) -> ParameterValue | None:
    match operand:
        case Literal(value):
            return value
        case Parameter(key):
            return parameters.get(key)
        case Present(name):
            return tensors[name] is not None
        case Element(name):
            tensor = tensors[name]
            return None if tensor is None else _first_element(name, tensor)
        case Dimension(name, index):
            tensor = tensors[name]
            if tensor is None:
                return None
            if index >= len(tensor.shape):
                raise invalid(f"tensor '{clip(name)}' has {len(tensor.shape)} dimensions, none with number {index}")
            return tensor.shape[index]


def _first_element(name: str, tensor: Tensor) -> ParameterValue:
    data, datatype = tensor.data, tensor.datatype
    if datatype is DataType.BYTES:
        if len(data) < 4:
            raise invalid(f"tensor '{clip(name)}' is empty and has no first element")
        size = int.from_bytes(data[:4], "little")
        if size > MAX_TEXT_BYTES:
            raise invalid(
                f"the first element of tensor '{clip(name)}' has {size} bytes, at most {MAX_TEXT_BYTES} are compared"
            )
        return bytes(data[4 : 4 + size]).decode("utf-8", "replace")
    if len(data) < datatype.itemsize:
        raise invalid(f"tensor '{clip(name)}' is empty and has no first element")
    first = np.frombuffer(data, datatype.dtype, count=1)
    if datatype is DataType.BF16:  # the upper half of an FP32
        first = (first.astype("<u4") << 16).view("<f4")
    value: ParameterValue = first[0].item()
    return value


def _kind_of_value(value: ParameterValue) -> ValueKind:
    if isinstance(value, bool):
        return ValueKind.TRUTH
    return ValueKind.TEXT if isinstance(value, str) else ValueKind.NUMBER


def _kind_problems(expression: Expression, datatypes: Mapping[str, DataType]) -> Iterator[str]:
    match expression:
        case AllOf(parts) | AnyOf(parts):
            for part in parts:
                yield from _kind_problems(part, datatypes)
        case Not(inner):
            yield from _kind_problems(inner, datatypes)
        case Truth(operand):
            kind = _kind(operand, datatypes)
            if kind not in (None, ValueKind.TRUTH):
                yield _not_truth(operand, kind)
        case Comparison(sign, left, right):
            first, second = _kind(left, datatypes), _kind(right, datatypes)
            if first is not None and second is not None and (problem := _mismatch(sign, left, first, right, second)):
                yield problem


def _kind(operand: Operand, datatypes: Mapping[str, DataType]) -> ValueKind | None:
    """The kind of the operand; None for a parameter, whose kind is known only with a request."""
    match operand:
        case Literal(value):
            return _kind_of_value(value)
        case Parameter():
            return None
        case Present():
            return ValueKind.TRUTH
        case Dimension():
            return ValueKind.NUMBER
        case Element(name):
            datatype = datatypes[name]
            if datatype is DataType.BYTES:
                return ValueKind.TEXT
            return ValueKind.TRUTH if datatype is DataType.BOOL else ValueKind.NUMBER


def _mismatch(sign: str, left: Operand, first: ValueKind, right: Operand, second: ValueKind) -> str | None:
    if first is not second:
        return f"{_words(left)} is {first.value} and {_words(right)} is {second.value}, which '{sign}' does not compare"
    if first is ValueKind.TRUTH and sign not in ("==", "!="):
        return f"{_words(left)} and {_words(right)} are true or false, which '{sign}' does not compare"
    return None


def _not_truth(operand: Operand, kind: ValueKind | None) -> str:
    return (
        f"{_words(operand)} is {kind.value if kind else 'unknown'}, neither true nor false; compare it with something"
    )


def _words(operand: Operand) -> str:
    match operand:
        case Literal(value):
            return clip(repr(value).lower() if isinstance(value, bool) else repr(value))
        case Parameter(key):
            return f"parameter '{clip(key)}'"
        case Present(name):
            return f"'{clip(name)}.present'"
        case Element(name):
            return f"the first element of tensor '{clip(name)}'"
        case Dimension(name, index):
            return f"dimension {index} of tensor '{clip(name)}'"
