"""Texts of PromQL: what comes from a request cannot leave the string that it stands in."""

import re
from collections.abc import Sequence

from halimede_operator.metrics_api.core.selectors import Operator, Requirement

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")


def string(value: str) -> str:
    """A string literal."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def equals(label: str, values: Sequence[str]) -> str:
    """A matcher: the label has one of the values. There is at least one."""
    return f"{label}={string(values[0])}" if len(values) == 1 else f"{label}=~{string(_any_of(values))}"


def differs(label: str, values: Sequence[str]) -> str:
    return f"{label}!={string(values[0])}" if len(values) == 1 else f"{label}!~{string(_any_of(values))}"


def matcher(requirement: Requirement) -> str:
    match requirement.operator:
        case Operator.IN:
            return equals(requirement.label, requirement.values)
        case Operator.NOT_IN:
            return differs(requirement.label, requirement.values)
        case Operator.EXISTS:
            return differs(requirement.label, ("",))
        case Operator.DOES_NOT_EXIST:
            return equals(requirement.label, ("",))


def _any_of(values: Sequence[str]) -> str:
    """A regular expression of RE2, which Prometheus anchors."""
    return "|".join(_SPECIAL.sub(r"\\\g<0>", value) for value in values)
