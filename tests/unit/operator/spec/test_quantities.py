"""Parsing of quantities and durations."""

from fractions import Fraction

import pytest

from halimede_operator.core.spec.durations import microseconds
from halimede_operator.core.spec.quantities import quantity


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0),
        ("1", 1),
        (7, 7),
        (0.5, Fraction(1, 2)),
        ("500m", Fraction(1, 2)),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("1.", 1),
        ("+2", 2),
        ("-3k", -3000),
        ("8Gi", 8 * 1024**3),
        ("1.5Ki", 1536),
        ("1M", 10**6),
        ("2E", 2 * 10**18),
        ("2Ei", 2 * 1024**6),
        ("1e3", 1000),
        ("12E-1", Fraction(6, 5)),
        ("3u", Fraction(3, 10**6)),
        ("3n", Fraction(3, 10**9)),
    ],
)
def test_quantities_are_parsed_exactly(text: object, amount: Fraction) -> None:
    assert quantity(text) == amount


@pytest.mark.parametrize(
    "text",
    [
        *("", " 1", "1 ", "1\n", "Gi", "1GB", "1gi", "1ki", "1K", "1e", "1e100", "0x10", "1_000", "٣", "1" * 65),
        *(True, None, [], {}, float("nan"), float("inf"), -(2**63), 2**63),
    ],
)
def test_invalid_quantities_are_none(text: object) -> None:
    assert quantity(text) is None


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0s", 0),
        ("500us", 500),
        ("5ms", 5000),
        ("2s", 2_000_000),
        ("1m30s", 90_000_000),
        ("1m500ms", 60_500_000),
        ("0.5h", 1_800_000_000),
        ("0.0001ms", Fraction(1, 10)),
    ],
)
def test_durations_are_parsed_exactly(text: str, amount: Fraction) -> None:
    assert microseconds(text) == amount


@pytest.mark.parametrize(
    "text", ["", "5", "5 ms", "-5ms", "5ns", "5d", "1e3s", "5ms ", ".5s", "5.s", "1234567s", "1s" * 17]
)
def test_invalid_durations_are_none(text: str) -> None:
    assert microseconds(text) is None
