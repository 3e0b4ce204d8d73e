"""Texts in a description: names, ids, correlations, parameters."""

import json
from collections.abc import Mapping
from functools import lru_cache

from halimede.channel.frames import MAX_TEXT_BYTES, FrameError
from halimede.channel.json_frames import MAX_JSON_VALUES, decode_json
from halimede.core.types import Buffer, ParameterValue

NUMERIC = 0xFFFFFFFF
"""The length of a correlation that is a number."""


def encode_text(value: str) -> bytes:
    """UTF-8; a lone surrogate is replaced."""
    return value.encode("utf-8", "replace")


def checked_text(value: str, most: int = MAX_TEXT_BYTES) -> bytes:
    """As `encode_text`. ValueError when it is too long for one field."""
    text = encode_text(value)
    if len(text) > most:
        raise ValueError(f"a text of {len(text)} bytes, at most {most} are allowed")
    return text


@lru_cache(maxsize=128)
def encode_name(value: str) -> bytes:
    """As `encode_text`, for names of models and tensors, whose length has 16 bits. Cached. ValueError if too long."""
    text = encode_text(value)
    if len(text) > 0xFFFF:
        raise ValueError(f"a name of {len(text)} bytes")
    return text


_ENCODER = json.JSONEncoder(ensure_ascii=False)


def encode_parameters(
    parameters: Mapping[str, ParameterValue], of: str = "response", most: int = MAX_TEXT_BYTES
) -> bytes:
    """JSON; lone surrogates are replaced. ValueError if it is too long, or a number has too many digits for Python."""
    text = _ENCODER.encode(dict(parameters)).encode("utf-8", "replace")
    if len(text) > most:
        raise ValueError(f"the {of}'s parameters take {len(text)} bytes, at most {most} are allowed")
    return text


def decode_parameters(text: Buffer, max_values: int = MAX_JSON_VALUES) -> dict[str, ParameterValue]:
    value = decode_json(text, max_values)
    if not isinstance(value, dict) or not all(isinstance(each, bool | int | float | str) for each in value.values()):
        raise FrameError("invalid parameters")
    for name, each in value.items():
        f"{name}{each}".encode()  # ValueError for a lone surrogate
    return value
