"""Kubernetes' quantities: `8Gi`, `500m`, `1e3`, and plain numbers."""

import math
import re
from fractions import Fraction

_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?[0-9]{1,2}))?", re.ASCII
)
_UNITS = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{unit: Fraction(1000**power) for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTPE", 1)},
}
_MAX_LENGTH = 64


def quantity(value: object) -> Fraction | None:
    """The exact value of a quantity; None if `value` is no quantity."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value) if abs(value) < 2**63 else None
    if isinstance(value, float):
        return Fraction(value) if math.isfinite(value) else None
    if not isinstance(value, str) or len(value) > _MAX_LENGTH:
        return None
    match = _QUANTITY.fullmatch(value)
    if match is None:
        return None
    number, unit, exponent = match.groups()
    if exponent is not None:
        return Fraction(number) * Fraction(10) ** int(exponent)
    return Fraction(number) * _UNITS.get(unit, Fraction(1))
