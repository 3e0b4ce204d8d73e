"""Reads a JSON object of unknown shape. Every mistake becomes a Problem with its path; nothing raises."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, TypeVar

from halimede_operator.core.spec.durations import microseconds
from halimede_operator.core.spec.quantities import quantity
from halimede_operator.core.spec.types import Problem

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

MAX_DEPTH = 32
"""Levels of nested objects and lists in a free-form part. The API server accepts thousands, but Python does not."""

MAX_ENTRIES = 1024
"""Of a list, or of an object with keys of the user's choice. Bounds the time that reading one object delays others."""

MAX_VALUES = 8192
"""Of a free-form part in all."""

_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for a text: a pattern for all of it, the message of a violation, the most characters."""

    pattern: re.Pattern[str]
    message: str
    max_length: int


DNS_NAME = Rule(
    re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", re.ASCII),
    "must be a name of lower case letters, digits, '-' and '.'",
    253,
)
LABEL_NAME = Rule(
    re.compile(r"([-a-z0-9.]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII),
    "must be the name of a label, for instance nvidia.com/gpu.product",
    317,
)
LABEL_VALUE = Rule(
    re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", re.ASCII),
    "must be the value of a label: at most 63 letters, digits, '-', '_' and '.'",
    63,
)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an object.

    Its methods return the default if the field is absent, and also when they add a problem: an object with any problem
    has no spec.
    """

    path: str
    value: Any
    """None if the field is absent. null means the same, as it does to Kubernetes."""
    problems: dict[Problem, None]
    """In the order in which they were found, each once, however often a field is read."""

    @property
    def given(self) -> bool:
        return self.value is not None

    def refuse(self, message: str) -> None:
        self.problems[Problem(self.path, message)] = None

    def get(self, name: str) -> "Field":
        value = self.value.get(name) if isinstance(self.value, Mapping) else None
        return Field(f"{self.path}.{name}" if self.path else name, value, self.problems)

    def section(self, name: str) -> "Field":
        """The field `name`, which must be an object."""
        inner = self.get(name)
        inner.json()
        return inner

    def required(self, what: str) -> "Field":
        """The field itself; adds a problem if it is absent. what: describes it for the message."""
        if not self.given:
            self.refuse(f"is required: {what}")
        return self

    def json(self) -> Mapping[str, Any]:
        if self.given and not isinstance(self.value, Mapping):
            self.refuse(f"must be an object, got {shown(self.value)}")
        return self.value if isinstance(self.value, Mapping) else {}

    def free_section(self, name: str) -> "Field":
        """The field `name`, which must be an object of any shape. Treated as absent if it is too deep or too large."""
        inner = self.section(name)
        if problem := _excess(inner.value):
            inner.refuse(problem)
            return Field(inner.path, None, self.problems)
        return inner

    def items(self, *, least: int = 0, most: int = MAX_ENTRIES) -> list["Field"]:
        """The entries of a list; if it is too long, the first `most` ones."""
        if self.given and not isinstance(self.value, list | tuple):
            self.refuse(f"must be a list, got {shown(self.value)}")
            return []
        values = self.value or ()
        if self.given and len(values) < least:
            self.refuse("must not be empty")
        if len(values) > most:
            self.refuse(f"must have at most {most} entries, got {len(values)}")
        return [Field(f"{self.path}[{i}]", value, self.problems) for i, value in enumerate(values[:most])]

    def objects(self, key: str | None = None, *, least: int = 0, most: int = MAX_ENTRIES) -> list["Field"]:
        """The entries of a list of objects. If `key` is given, its value must differ between entries."""
        seen: dict[str, str] = {}
        found = []
        for entry in self.items(least=least, most=most):
            if not isinstance(entry.value, Mapping):
                entry.refuse(f"must be an object, got {shown(entry.value)}")
                continue
            name = entry.value.get(key) if key is not None else None
            if isinstance(name, str) and seen.setdefault(name, entry.path) != entry.path:
                entry.get(str(key)).refuse(f"is already that of {seen[name]}: {shown(name)}")
            found.append(entry)
        return found

    def entries(self) -> dict[str, "Field"]:
        """The members of an object with keys of the user's choice; if there are too many, the first MAX_ENTRIES."""
        members = self.json()
        if len(members) > MAX_ENTRIES:
            self.refuse(f"must have at most {MAX_ENTRIES} entries, got {len(members)}")
        return {
            str(key): Field(f"{self.path}[{key}]", value, self.problems)
            for key, value in itertools.islice(members.items(), MAX_ENTRIES)
            if value is not None
        }

    def named_entries(self) -> dict[str, "Field"]:
        """Like `entries`, for keys that are names: the empty key is a problem."""
        entries = self.entries()
        if "" in entries:
            self.refuse("must not have an empty name")
        return entries

    def text(self, default: T, rule: Rule | None = None, max_length: int = 1024, *, empty: bool = False) -> str | T:
        if not self.given:
            return default
        if not isinstance(self.value, str):
            self.refuse(f"must be a text, got {shown(self.value)}")
            return default
        if not self.value and not empty:
            self.refuse("must not be empty")
        elif len(self.value) > (rule.max_length if rule else max_length):
            self.refuse(
                f"must have at most {rule.max_length if rule else max_length} characters, got {len(self.value)}"
            )
        elif rule and not rule.pattern.fullmatch(self.value):
            self.refuse(f"{rule.message}, got {shown(self.value)}")
        else:
            return self.value
        return default

    def choice(self, default: T, *names: str) -> str | T:
        if not self.given:
            return default
        if not isinstance(self.value, str) or self.value not in names:
            self.refuse(f"must be one of {', '.join(names)}, got {shown(self.value)}")
            return default
        return self.value

    def member(self, default: E) -> E:
        """A member of the default's enum."""
        kind = type(default)
        return kind(self.choice(default.value, *(member.value for member in kind)))

    def boolean(self, default: bool) -> bool:
        if self.given and not isinstance(self.value, bool):
            self.refuse(f"must be true or false, got {shown(self.value)}")
        return self.value if isinstance(self.value, bool) else default

    def integer(self, default: T, minimum: int, maximum: int = INT32_MAX) -> int | T:
        if not self.given:
            return default
        if not isinstance(self.value, int) or isinstance(self.value, bool) or not minimum <= self.value <= maximum:
            bounds = f"of at least {minimum}" if maximum in (INT32_MAX, INT64_MAX) else f"from {minimum} to {maximum}"
            self.refuse(f"must be a whole number {bounds}, got {shown(self.value)}")
            return default
        return self.value

    def quantity(self, what: str) -> Fraction | None:
        """The exact value of a quantity; None if absent. what: describes a valid value for the message."""
        if not self.given:
            return None
        amount = quantity(self.value)
        if amount is None:
            self.refuse(f"must be {what}, got {shown(self.value)}")
        return amount

    def microseconds(self, maximum: str) -> Fraction | None:
        """A duration in microseconds; None if absent. maximum: the longest one, as a duration text."""
        text = self.text(None)
        if text is None:
            return None
        value, most = microseconds(text), microseconds(maximum)
        if value is None or most is None or value > most:
            self.refuse(f"must be a duration of at most {maximum}, for instance 500us, 5ms or 2s, got {shown(text)}")
            return None
        return value


def _excess(value: object) -> str | None:
    level = [value]
    count = 0
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, Mapping | list | tuple)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        count += len(level)
    if any(isinstance(inner, Mapping | list | tuple) for inner in level):
        return f"must not have more than {MAX_DEPTH} objects and lists within one another"
    return f"must not have more than {MAX_VALUES} values in all, got {count}" if count > MAX_VALUES else None


def shown(value: object) -> str:
    """A value for a message: short and on one line."""
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value) if abs(value) <= INT64_MAX else "a number that is too large"
        case str():
            return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case _:
            return str(value)


def without_none(**values: Any) -> dict[str, Any]:
    """The fields whose value is not None."""
    return {name: value for name, value in values.items() if value is not None}
