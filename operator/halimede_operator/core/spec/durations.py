"""Durations as Go writes them: `5ms`, `2s`, `1m30s`, `0.5h`."""

import re
from fractions import Fraction

_DURATION = re.compile(r"(?:[0-9]{1,6}(?:\.[0-9]{1,6})?(?:us|ms|s|m|h))+", re.ASCII)
_PART = re.compile(r"([0-9.]+)(us|ms|s|m|h)", re.ASCII)
_MICROSECONDS = {"us": 1, "ms": 1000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000}
_MAX_LENGTH = 32


def microseconds(text: str) -> Fraction | None:
    """The exact number of microseconds of a duration; None if the text is no duration."""
    if len(text) > _MAX_LENGTH or not _DURATION.fullmatch(text):
        return None
    return sum((Fraction(number) * _MICROSECONDS[unit] for number, unit in _PART.findall(text)), Fraction(0))
