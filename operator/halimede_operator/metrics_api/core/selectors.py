"""Kubernetes' label selectors, as clients write them into `metricLabelSelector`, for labels of Prometheus' series."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from halimede_operator.metrics_api.core.errors import MetricsError, Reason

MAX_REQUIREMENTS = 32
MAX_VALUES = 256
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,127}", re.ASCII)
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_SET = re.compile(r"(\S+)\s+(in|notin)\s*\(([^()]*)\)")
_EQUALITY = re.compile(r"([^\s=!]+)\s*(==|=|!=)\s*(\S*)")
_EXISTS = re.compile(r"(!?)\s*([^\s=!]+)")


class Operator(Enum):
    """The value is Kubernetes' name in `matchExpressions`."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class Requirement:
    label: str
    operator: Operator
    values: tuple[str, ...] = ()
    """None for EXISTS and DOES_NOT_EXIST; at least one otherwise."""


def parse_selector(text: str) -> tuple[Requirement, ...]:
    """Raises MetricsError if `text` is no selector, or names a label that no series can have."""
    return tuple(_requirement(part) for part in _parts(text))


def as_label_selector(requirements: tuple[Requirement, ...]) -> dict[str, Any] | None:
    """A LabelSelector object; None if nothing is required."""
    expressions = [
        {"key": each.label, "operator": each.operator.value, **({"values": list(each.values)} if each.values else {})}
        for each in requirements
    ]
    return {"matchExpressions": expressions} if expressions else None


def _parts(text: str) -> Iterator[str]:
    """The requirements: split at commas outside of parentheses."""
    if not text.strip():
        return
    parts = re.split(r",(?![^(]*\))", text)
    if len(parts) > MAX_REQUIREMENTS:
        raise _bad(text, f"it has more than {MAX_REQUIREMENTS} requirements")
    yield from (part.strip() for part in parts)


def _requirement(text: str) -> Requirement:
    if match := _SET.fullmatch(text):
        label, operator, values = match.groups()
        listed = tuple(value.strip() for value in values.split(","))
        if len(listed) > MAX_VALUES:
            raise _bad(text[:128], f"it has more than {MAX_VALUES} values")
        return _checked(text, label, Operator.IN if operator == "in" else Operator.NOT_IN, listed)
    if match := _EQUALITY.fullmatch(text):
        label, operator, value = match.groups()
        return _checked(text, label, Operator.NOT_IN if operator == "!=" else Operator.IN, (value,))
    if match := _EXISTS.fullmatch(text):
        return _checked(text, match[2], Operator.DOES_NOT_EXIST if match[1] else Operator.EXISTS)
    raise _bad(text, "write label=value, label!=value, label in (a, b), label notin (a, b), label or !label")


def _checked(text: str, label: str, operator: Operator, values: tuple[str, ...] = ()) -> Requirement:
    if _LABEL.fullmatch(label) is None:
        raise _bad(text, f"{label[:128]!r} is no label of Prometheus: letters, digits and _")
    for value in values:
        if _VALUE.fullmatch(value) is None:
            raise _bad(text, f"{value[:128]!r} is no label value: at most 63 letters, digits, '-', '_' and '.'")
    return Requirement(label, operator, values)


def _bad(text: str, what: str) -> MetricsError:
    return MetricsError(Reason.BadRequest, f"metricLabelSelector {text[:256]!r}: {what}")
