"""JSON, errors as JSON, and lists of blocks."""

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from halimede.channel.frames import BLOCK, MAX_BLOCKS, MAX_TEXT_BYTES, FrameError, encode_frame
from halimede.core.types import Buffer, ErrorCode, InferenceError

MAX_JSON_VALUES = 100_000
"""Maximum values in one frame, counted by separators, because parsing blocks the loop."""


def json_frame(kind: IntEnum, value: Any) -> bytes:
    return encode_frame(kind, json.dumps(value).encode())


def decode_json(body: Buffer, max_values: int = MAX_JSON_VALUES) -> Any:
    """FrameError."""
    text = bytes(body)
    if len(text) > max_values and sum(map(text.count, (b",", b"[", b"{"))) > max_values:
        raise FrameError(f"JSON of more than {max_values} values")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"invalid JSON: {error}") from error


def error_json(error: InferenceError) -> dict[str, str]:
    return {"code": error.code.name, "message": error.message}


def error_from_json(value: Any) -> InferenceError:
    """FrameError."""
    try:
        # JSON may contain lone surrogates, which a response of the server cannot carry.
        text = str(value["message"])[:MAX_TEXT_BYTES].encode("utf-8", "replace").decode()
        return InferenceError(ErrorCode[value["code"]], text)
    except (KeyError, TypeError) as error:
        raise FrameError(f"an invalid error: {value!r:.100}") from error


def encode_blocks(kind: IntEnum, blocks: Sequence[tuple[int, int]]) -> bytes:
    return encode_frame(kind, b"".join([BLOCK.pack(*block) for block in blocks]))


def decode_blocks(body: Buffer) -> list[tuple[int, int]]:
    """FrameError."""
    if len(body) % BLOCK.size or len(body) > MAX_BLOCKS * BLOCK.size:
        raise FrameError(f"a list of blocks of {len(body)} bytes")
    return [(segment, offset) for segment, offset in BLOCK.iter_unpack(body)]
