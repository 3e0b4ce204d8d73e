"""Samples become quantities that Kubernetes reads as the same number, rounded up to thousandths."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede_operator.core.spec.quantities import quantity as read_quantity
from halimede_operator.metrics_api.core.values import quantity, sample


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", "0"),
        ("3", "3"),
        ("0.7", "700m"),
        ("0.07", "70m"),
        ("1.5", "1500m"),
        ("0.0000001", "1m"),
        ("1e+06", "1000000"),
        ("1e-999999", "1m"),
    ],
)
def test_quantities_of_samples(text: str, expected: str) -> None:
    value = sample(text)
    assert value is not None
    assert quantity(value) == expected


@pytest.mark.parametrize("text", ["NaN", "+Inf", "-Inf", "-1", "-0.001", "1e300", "1e999999999", "", "x", None, 3])
def test_other_samples_are_none(text: object) -> None:
    assert sample(text) is None


@given(st.floats(min_value=0, max_value=1e12))
def test_a_quantity_is_at_most_a_thousandth_above_its_value(value: float) -> None:
    read = read_quantity(quantity(Decimal(repr(value))))
    assert read is not None
    assert 0 <= read - Fraction(repr(value)) < Fraction(1, 1000)
