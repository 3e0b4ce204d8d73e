"""The description of a flag: its names, the form of its value, its help, and how this server treats it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class FlagTreatment(Enum):
    HONOURED = "honoured"
    NO_EFFECT = "no effect"


@dataclass(frozen=True, slots=True)
class FlagKind:
    """The form of a flag's value. `bare` is the value of a flag without one; empty if a value is required."""

    metavar: str
    read: Callable[[str], object]
    bare: str = ""


# Any: each flag's reader has its own result type, and the table contains all of them.
Combine = Callable[[Sequence[Any]], object]


def last(values: Sequence[Any]) -> object:
    """The last value counts, as with getopt, if a flag is repeated."""
    return values[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Flag:
    """One flag. `why` explains why it, or one of its values, has no effect."""

    names: tuple[str, ...]
    """With leading dashes, the current name first."""
    kind: FlagKind
    help: str
    default: str = ""
    """As written on the command line; empty for none. For a flag without effect: the value that needs no warning."""
    treatment: FlagTreatment = FlagTreatment.HONOURED
    why: str = ""
    field: str = ""
    """The field of Settings that it sets."""
    combine: Combine = last
    """Combines the values, in order, into the setting; ValueError if they conflict."""
    treat: Callable[[Any], FlagTreatment] | None = None
    """The treatment of a value, if it depends on the value."""
    repeatable: bool = False
    is_secret: bool = False
    """Whether the part after a value's first equals sign is secret."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def metavar(self) -> str:
        """Empty for a flag without a value."""
        return self.kind.metavar

    def treatment_of(self, value: object) -> FlagTreatment:
        return self.treatment if self.treat is None else self.treat(value)
