"""Check the arguments that models pass: what Triton's extension module converts is accepted, else TypeError."""

import enum
import operator
from collections.abc import Mapping
from typing import Any


class ProtocolNumber(enum.IntEnum):
    """An enum of the protocol: a number whose text is its name, in every version of Python."""

    __str__ = enum.Enum.__str__


def text_of(value: Any, where: str, what: str) -> str:
    """`str`, or `bytes` of UTF-8."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    raise _wrong(value, where, what, "str")


def integer_of(value: Any, where: str, what: str, least: int, most: int) -> int:
    """An integer, or a type that converts to one (numpy's), but no float. TypeError also if it is out of range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise _wrong(value, where, what, "int") from None
    if not least <= number <= most:
        raise TypeError(f"{where}(): '{what}' must be from {least} to {most}, not {number}")
    return number


def truth_of(value: Any, where: str, what: str) -> bool:
    """`bool`, or a type with a truth value of its own, such as a number or None; no containers, true if not empty."""
    if not hasattr(type(value), "__bool__"):
        raise _wrong(value, where, what, "bool")
    return bool(value)


def number_of(value: Any, where: str, what: str) -> float:
    """A float, or a type that converts to one, but no text."""
    if isinstance(value, (str, bytes, bytearray)):
        raise _wrong(value, where, what, "float")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _wrong(value, where, what, "float") from None


def sequence_of(value: Any, kind: type, where: str, what: str) -> list[Any]:
    """A list of a sequence whose elements are all of `kind`; `str` may be `bytes` of UTF-8."""
    if type(value) is list:
        # The common case, checked first.
        for element in value:
            if type(element) is not kind:
                break
        else:
            return value.copy()
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise _wrong(value, where, what, f"a list of {kind.__name__}")
    if kind is str:
        return [text_of(element, where, f"{what}[{at}]") for at, element in enumerate(value)]
    elements = list(value)
    for at, element in enumerate(elements):
        if not isinstance(element, kind):
            raise _wrong(element, where, f"{what}[{at}]", kind.__name__)
    return elements


def instance_of(value: Any, kind: type, where: str, what: str) -> Any:
    if not isinstance(value, kind):
        raise _wrong(value, where, what, kind.__name__)
    return value


def check_mapping(value: Any, where: str, what: str) -> None:
    """TypeError if it is no `dict` or other mapping."""
    if not isinstance(value, Mapping):
        raise _wrong(value, where, what, "dict")


def _wrong(value: Any, where: str, what: str, wanted: str) -> TypeError:
    return TypeError(f"{where}(): '{what}' must be {wanted}, not {type(value).__name__}")
