"""Texts in a description: names, ids, correlations, parameters."""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from halimede.core.types import Buffer, InferenceRequest, ParameterValue
from halimede.workers.frames.json_frames import MAX_JSON_VALUES, decode_json
from halimede.workers.frames.kinds import MAX_CLIENT_TEXT_BYTES, MAX_TEXT_BYTES, FrameError

NUMERIC = 0xFFFFFFFF
Texts = tuple[int, int, int, int, bytes]
"""The correlation, if it is a number; the lengths of parameters, id and a text correlation; the bytes of id, text
correlation and parameters."""

NO_TEXTS: Texts = 0, 0, 0, NUMERIC, b""


def texts_of(request: InferenceRequest, parameters: bytes, encode: Callable[[str], bytes]) -> Texts:
    request_id = encode(request.id)
    if isinstance(request.sequence_id, str):
        text = encode(request.sequence_id)
        return 0, len(parameters), len(request_id), len(text) if text else NUMERIC, request_id + text + parameters
    return request.sequence_id, len(parameters), len(request_id), NUMERIC, request_id + parameters


def encode_text(value: str) -> bytes:
    """UTF-8; a lone surrogate is replaced."""
    return value.encode("utf-8", "replace")


def checked_text(value: str, most: int = MAX_TEXT_BYTES) -> bytes:
    """As `encode_text`. ValueError when it is too long for one field."""
    text = encode_text(value)
    if len(text) > most:
        raise ValueError(f"a text of {len(text)} bytes, at most {most} are allowed")
    return text


checked_client_text = partial(checked_text, most=MAX_CLIENT_TEXT_BYTES)


@lru_cache(maxsize=128)
def encode_name(value: str) -> bytes:
    """As `encode_text`, for names of models and tensors, whose length has 16 bits. Cached. ValueError if too long."""
    text = encode_text(value)
    if len(text) > 0xFFFF:
        raise ValueError(f"a name of {len(text)} bytes")
    return text


def encode_parameters(
    parameters: Mapping[str, ParameterValue], of: str = "response", most: int = MAX_TEXT_BYTES
) -> bytes:
    """JSON; lone surrogates are replaced. ValueError if it is too long, or a number has too many digits for Python."""
    text = json.dumps(dict(parameters), ensure_ascii=False).encode("utf-8", "replace")
    if len(text) > most:
        raise ValueError(f"the {of}'s parameters take {len(text)} bytes, at most {most} are allowed")
    return text


def decode_parameters(text: Buffer, max_values: int = MAX_JSON_VALUES) -> Mapping[str, ParameterValue]:
    value = decode_json(text, max_values)
    if not isinstance(value, dict) or not all(isinstance(each, bool | int | float | str) for each in value.values()):
        raise FrameError("invalid parameters")
    for name, each in value.items():
        f"{name}{each}".encode()  # ValueError for a lone surrogate
    return value
