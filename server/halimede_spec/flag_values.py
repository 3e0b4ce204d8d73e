"""A flag of the server, and readers of values that need nothing of the server: text in, value out, or a ValueError that
states the expected form. Numbers and words have Triton's syntax, but must be complete: `8x`, `1_000` and ` 8` are not
numbers.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

TRUE_WORDS = ("true", "on", "1")
FALSE_WORDS = ("false", "off", "0")

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_DIGITS = 32

_INTEGER = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class ServerFlag:
    """`read` raises a ValueError for a wrong value. `metavar` is "" for a switch. `bare` is the value of the flag
    without `=`; "" if a value is required."""

    read: Callable[[str], object]
    metavar: str
    bare: str = ""


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers from `low` to `high`, both included."""

    low: int
    high: int

    def __call__(self, text: str) -> int:
        if not _INTEGER.fullmatch(text):
            raise ValueError(f"Invalid option value. Got {text}; expected an integer")
        # Python refuses to parse thousands of digits, with an error text of its own.
        is_short = len(text) <= MAX_DIGITS
        if not (is_short and self.low <= int(text) <= self.high):
            raise ValueError(f"Provided option value is out of bound. Got {text}; expected {self.low} to {self.high}")
        return int(text)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Decimal numbers from `low` on."""

    low: int

    def __call__(self, text: str) -> float:
        if not _DECIMAL.fullmatch(text):
            raise ValueError(f"Invalid option value. Got {text}; expected a number of seconds")
        seconds = float(text)
        # A timer overflows for longer times.
        if not self.low <= seconds <= INT32_MAX:
            raise ValueError(f"Provided option value is out of bound. Got {text}; expected {self.low} to {INT32_MAX}")
        return seconds


@dataclass(frozen=True, slots=True)
class Words:
    """One of the words, in upper or lower case; read as it is spelled here."""

    words: tuple[str, ...]

    def __call__(self, text: str) -> str:
        for word in self.words:
            if text.lower() == word.lower():
                return word
        raise ValueError(f"Invalid option value. Got {text}; expected {', '.join(self.words)}")


@dataclass(frozen=True, slots=True)
class Form:
    """Texts that match a pattern. `form` describes them."""

    form: str
    pattern: str

    def __call__(self, text: str) -> str:
        if re.fullmatch(self.pattern, text) is None:
            raise ValueError(f"Invalid option value. Got {text}; expected {self.form}")
        return text


def read_text(text: str) -> str:
    return text


def read_boolean(text: str) -> bool:
    word = text.lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError(f"Invalid option value. Got {text}; expected true, on, 1, false, off, 0")


def read_milliseconds(text: str) -> int:
    """Whole milliseconds from a decimal number, as in Triton."""
    if not _DECIMAL.fullmatch(text):
        raise ValueError(f"Invalid option value. Got {text}; expected a number of milliseconds")
    milliseconds = float(text)
    if not 1 <= milliseconds <= INT32_MAX:
        raise ValueError(f"Provided option value is out of bound. Got {text}; expected 1 to {INT32_MAX}")
    return int(milliseconds)


def read_age(text: str) -> int | None:
    """Milliseconds; 0 means no limit."""
    return Integers(0, INT32_MAX)(text) or None


def read_verbosity(text: str) -> int:
    """A level, or a boolean as in older command lines of Triton."""
    word = text.lower()
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return int(read_boolean(text))
    return Integers(0, INT32_MAX)(text)
