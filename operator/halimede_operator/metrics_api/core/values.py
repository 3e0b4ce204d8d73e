"""Samples of Prometheus as Kubernetes' quantities."""

import decimal
from decimal import Decimal

MAX_VALUE = Decimal(10) ** 12
"""A larger value is no sample: the controller of HorizontalPodAutoscalers adds thousandths as 64-bit integers."""


def sample(text: object) -> Decimal | None:
    """The value of a sample; None if it is no number, infinite, negative or above MAX_VALUE."""
    if not isinstance(text, str):
        return None
    try:
        value = Decimal(text)
    except decimal.InvalidOperation:
        return None
    return value if value.is_finite() and 0 <= value <= MAX_VALUE else None


def quantity(value: Decimal) -> str:
    """`3`, `250m`: thousandths, rounded up as Kubernetes does, so that what is not zero does not become zero."""
    thousandths = int((value * 1000).to_integral_value(decimal.ROUND_CEILING))
    whole, rest = divmod(thousandths, 1000)
    return f"{thousandths}m" if rest else str(whole)
