"""The model configuration as `GET /v2/models/<m>/config` prints it."""

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from functools import cache

import orjson

from halimede.core.config.model_config import ModelConfig
from halimede.core.types import DataType


def to_json(config: ModelConfig) -> bytes:
    """JSON in the order and with the defaults that Triton prints.

    Every scalar, list and map of a message that is there is printed; messages and oneof members that are not set are
    left out; 64-bit integers are numbers; maps are sorted by key.
    """
    return orjson.dumps(_plain(config))


def _plain(value: object) -> object:
    match value:
        case str() | int():
            return value
        case float():
            return value if math.isfinite(value) else _non_finite(value)
        case DataType():
            return value.config_name
        case Enum():
            return value.name
        case tuple():
            return [_plain(item) for item in value]
        case Mapping():
            return {str(key): _plain(value[key]) for key in sorted(value)}
    message: type = type(value)
    pairs = ((name, getattr(value, attribute)) for attribute, name in _names(message))
    return {name: _plain(inner) for name, inner in pairs if inner is not None}


def _non_finite(value: float) -> str:
    """JSON has no such numbers: the protocol's JSON writes them as strings."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


@cache
def _names(message: type) -> tuple[tuple[str, str], ...]:
    """Attribute and protocol name of each field."""
    attributes = [f.name for f in dataclasses.fields(message)]
    return tuple((attribute, attribute.removesuffix("_")) for attribute in attributes)
