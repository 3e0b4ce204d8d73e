"""Values as JSON, written and read by their types: what the core and a front-end process send each other.

| type | JSON |
|---|---|
| bool, int, float, str, None | the same |
| a dataclass | a list of its fields |
| a tuple, a sequence | a list |
| a mapping | a list of pairs |
| an enum | the name of its member |
| bytes | base64 |
| a path, a network | its text |
| a pattern | its text and its flags |
| a union | None, or the name of the value's type and the value |
| an error | its code and its message |

What a reader returns has the type that it reads.
"""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import EnumType
from functools import cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from halimede.core.types import ErrorCode, InferenceError, Restrictions


# Any, in all of this module: a type hint, a value of that type, or JSON.
@dataclass(frozen=True, slots=True)
class _Codec:
    """`write` makes JSON of a value. `read` makes the value; ValueError, TypeError or LookupError."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def encode(hint: Any, value: Any) -> bytes:
    """A value of this type."""
    return json.dumps(_codec(hint).write(value)).encode()


def decode(hint: Any, document: bytes) -> Any:
    """The value, which has this type. ValueError."""
    try:
        return _codec(hint).read(json.loads(document))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"JSON of another type: {error!s:.200}") from error


def _plain(*kinds: type) -> _Codec:
    def read(plain: Any) -> Any:
        # Not `isinstance`: True is no number here.
        if type(plain) not in kinds:
            raise TypeError(f"{plain!r:.100} is not of type {kinds[0].__name__}")
        return plain

    return _Codec(lambda value: value, read)


_LIST = _plain(list)
_KNOWN: Mapping[Any, _Codec] = {
    bool: _plain(bool),
    int: _plain(int),
    float: _plain(float, int),
    str: _plain(str),
    NoneType: _plain(NoneType),
    bytes: _Codec(lambda value: b64encode(value).decode(), b64decode),
    Path: _Codec(str, Path),
    re.Pattern[str]: _Codec(attrgetter("pattern", "flags"), lambda plain: re.compile(*plain)),
    IPv4Network: _Codec(str, ip_network),
    IPv6Network: _Codec(str, ip_network),
    InferenceError: _Codec(
        lambda error: (error.code.name, error.message), lambda plain: InferenceError(ErrorCode[plain[0]], plain[1])
    ),
}
_LATE_NAMES = {"IPv4Network": IPv4Network, "IPv6Network": IPv6Network, "Restrictions": Restrictions}
"""What `settings` imports for type checkers alone."""


@cache
def _codec(hint: Any) -> _Codec:
    if hint in _KNOWN:
        return _KNOWN[hint]
    if isinstance(hint, EnumType):
        return _Codec(attrgetter("name"), hint.__getitem__)
    if is_dataclass(hint):
        return _of_dataclass(hint)
    origin, arms = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _of_union(arms)
    if origin is Mapping:
        pairs = _of_elements(_of_row(arms), dict)
        return _Codec(lambda value: pairs.write(value.items()), pairs.read)
    if origin is tuple and ... not in arms:
        return _of_row(arms)
    if origin in (tuple, list, Sequence):
        return _of_elements(_codec(arms[0]), tuple if origin is tuple else list)
    raise TypeError(f"{hint} has no form in JSON")


def _of_dataclass(kind: Any) -> _Codec:
    hints, names = get_type_hints(kind, localns=_LATE_NAMES), [field.name for field in fields(kind)]
    row, members = _of_row([hints[name] for name in names]), [attrgetter(name) for name in names]
    return _Codec(lambda value: row.write([member(value) for member in members]), lambda plain: kind(*row.read(plain)))


def _of_union(arms: tuple[Any, ...]) -> _Codec:
    kinds = {arm.__name__: (get_origin(arm) or arm, _codec(arm)) for arm in arms}

    def write(value: Any) -> Any:
        if value is None:
            return None
        name, codec = next((name, codec) for name, (kind, codec) in kinds.items() if isinstance(value, kind))
        return name, codec.write(value)

    def read(plain: Any) -> Any:
        if plain is None and NoneType in arms:
            return None
        name, value = plain
        return kinds[name][1].read(value)

    return _Codec(write, read)


def _of_row(hints: Sequence[Any]) -> _Codec:
    """A tuple with a value of each type."""
    codecs = [_codec(hint) for hint in hints]
    return _Codec(
        lambda values: [codec.write(value) for codec, value in zip(codecs, values, strict=True)],
        lambda plain: tuple([codec.read(value) for codec, value in zip(codecs, _LIST.read(plain), strict=True)]),
    )


def _of_elements(element: _Codec, make: Callable[[Any], Any]) -> _Codec:
    """Any number of values of one type."""
    return _Codec(
        lambda values: [element.write(value) for value in values],
        lambda plain: make([element.read(value) for value in _LIST.read(plain)]),
    )
