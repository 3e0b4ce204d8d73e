"""Values as JSON, by their types."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any

import pytest

from halimede.core.types import ErrorCode, InferenceError
from halimede.front_processes.values import decode, encode


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Inner:
    colour: Colour
    at: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    names: Mapping[Colour, Inner]
    many: Sequence[Inner]
    one: Inner | None
    place: "tuple[str, float]"


FORMS: list[tuple[Any, Any, str]] = [
    (bool, True, "true"),
    (int, 2**70, str(2**70)),
    (float, 0.5, "0.5"),
    (float, float("-inf"), "-Infinity"),
    (str, "\ud800ß\0", r'"\ud800\u00df\u0000"'),
    (type(None), None, "null"),
    (bytes, b"\0\xff", '"AP8="'),
    (Path, Path("/a/\udcff"), r'"/a/\udcff"'),
    (re.Pattern[str], re.compile("x-.*", re.IGNORECASE), '["x-.*", 34]'),
    (IPv4Network, ip_network("10.0.0.0/8"), '"10.0.0.0/8"'),
    (IPv4Network | IPv6Network, ip_network("fd00::1"), '["IPv6Network", "fd00::1/128"]'),
    (re.Pattern[str] | None, re.compile("x"), '["Pattern", ["x", 32]]'),
    (InferenceError, InferenceError(ErrorCode.NOT_FOUND, "no m"), '["NOT_FOUND", "no m"]'),
    (tuple[Path | str, ...], (Path("/m"), "s3://m"), '[["Path", "/m"], ["str", "s3://m"]]'),
    (bool | int | None, None, "null"),
    (bool | int | None, True, '["bool", true]'),
    (int | None, 1, '["int", 1]'),
    (tuple[()], (), "[]"),
    (list[int], [1, 2], "[1, 2]"),
    (Mapping[int, str], {2: "b", 1: "a"}, '[[2, "b"], [1, "a"]]'),
    (Colour, Colour.BLUE, '"BLUE"'),
    (
        Outer,
        Outer({Colour.RED: Inner(Colour.BLUE)}, [Inner(Colour.RED, (1, 2))], None, ("x", 1.5)),
        '[[["RED", ["BLUE", []]]], [["RED", [1, 2]]], null, ["x", 1.5]]',
    ),
]


@pytest.mark.parametrize(("hint", "value", "form"), FORMS, ids=[form for *_, form in FORMS])
def test_a_value_is_read_as_it_was_written(hint: Any, value: Any, form: str):
    document = encode(hint, value)

    assert document.decode() == form
    assert decode(hint, document) == value


@pytest.mark.parametrize(
    ("hint", "document"),
    [
        (bool, b"1"),
        (int, b"true"),
        (int, b"1.0"),
        (float, b'"1"'),
        (str, b"null"),
        (tuple[str, ...], b'"ab"'),
        (tuple[str, str], b'{"a": 1, "b": 2}'),
        (Mapping[str, str], b'[["a", "b", "c"]]'),
        (Mapping[str, str], b"[1]"),
        (Colour, b'"GREEN"'),
        (Colour, b"[]"),
        (Inner, b'["RED"]'),
        (Inner, b'["RED", [], 1]'),
        (bool | int, b'["str", "a"]'),
        (bool | int, b'["int"]'),
        (bool | int, b"null"),
        (str, b"\xff"),
        (str, b'"a'),
        (tuple[int, ...], b"[" * 100_000),
    ],
)
def test_another_value_is_refused(hint: Any, document: bytes):
    with pytest.raises(ValueError, match="JSON of another type: "):
        decode(hint, document)


def test_a_type_without_a_form_is_refused():
    with pytest.raises(TypeError, match="has no form in JSON"):
        encode(object, 1)
