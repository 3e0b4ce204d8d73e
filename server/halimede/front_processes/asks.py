"""ASK and TOLD: the methods of `facade.server.Server` besides inferences, called over the channel.

A front end parses what strangers send, so its question is JSON and names a method of a list. The core's answer is
pickled.
"""

import base64
import json
import logging
import pickle
import struct
from typing import Any

from halimede.channel.frames import FrameError, encode_frame
from halimede.core.types import Buffer, ErrorCode, InferenceError, shortage_of
from halimede.facade.server import Server
from halimede.front_processes.frames import FrontFrame
from halimede.frontends.http.protocol import INTERNAL_ERROR

log = logging.getLogger(__name__)

AT_ONCE = "model"
"""The method that returns at once."""

AWAITED = frozenset(
    {"is_model_ready", "kv_cache", "statistics", "repository_index", "devices", "load_model", "unload_model"}
)
_NUMBER = struct.Struct("<I")
_TOLD = struct.Struct("<I?")


def encode_ask(number: int, method: str, arguments: tuple[Any, ...]) -> bytes:
    """An ASK frame. Arguments are what JSON has, without lists, and mappings to bytes."""
    return encode_frame(
        FrontFrame.ASK, _NUMBER.pack(number) + json.dumps([method, *arguments], default=_bytes).encode()
    )


def decode_ask(body: Buffer) -> tuple[int, str, tuple[Any, ...]]:
    """Number, method and arguments. FrameError."""
    try:
        (number,) = _NUMBER.unpack_from(body)
        method, *arguments = json.loads(bytes(body[_NUMBER.size :]), object_hook=_unbytes)
    except (struct.error, ValueError, TypeError, LookupError, RecursionError) as error:
        raise FrameError(f"ASK: {error}") from error
    if not isinstance(method, str) or (method != AT_ONCE and method not in AWAITED):
        raise FrameError(f"ASK: a method {method!r:.100}")
    return number, method, tuple(arguments)


def _bytes(value: object) -> object:
    if isinstance(value, bytes | bytearray | memoryview):
        return [base64.b64encode(value).decode()]
    raise TypeError(f"{type(value).__name__} in a question to the core")


def _unbytes(value: dict[str, Any]) -> object:
    # A list, because a client may choose every name and every text.
    return {name: base64.b64decode(each[0]) if isinstance(each, list) else each for name, each in value.items()}


def answer_now(server: Server, number: int, method: str, arguments: tuple[Any, ...]) -> bytes:
    """Call the method AT_ONCE: its TOLD frame."""
    try:
        return encode_told(number, getattr(server, method)(*arguments))
    except Exception as error:  # noqa: BLE001 -- whatever it was, the front end waits for an answer
        return encode_told_error(number, _told(method, error))


async def answer_later(server: Server, number: int, method: str, arguments: tuple[Any, ...]) -> bytes:
    """Call a method of AWAITED: its TOLD frame."""
    try:
        return encode_told(number, await getattr(server, method)(*arguments))
    except Exception as error:  # noqa: BLE001 -- whatever it was, the front end waits for an answer
        return encode_told_error(number, _told(method, error))


def _told(method: str, error: Exception) -> InferenceError:
    """The error that the front end gets. An internal fault is logged, without details for the client."""
    if isinstance(error, InferenceError):
        return error
    log.error("unexpected error in %s for a front-end process", method, exc_info=error)
    return shortage_of(error) or InferenceError(ErrorCode.INTERNAL, INTERNAL_ERROR)


def encode_told(number: int, value: object) -> bytes:
    """A TOLD frame with a result."""
    return encode_frame(FrontFrame.TOLD, _TOLD.pack(number, True) + pickle.dumps(value))


def encode_told_error(number: int, error: InferenceError) -> bytes:
    """A TOLD frame with an error."""
    return encode_frame(FrontFrame.TOLD, _TOLD.pack(number, False) + pickle.dumps((error.code.name, error.message)))


def decode_told(body: Buffer) -> tuple[int, bool, bytes]:
    """Number, whether it is a result, and the pickled result or error. Only the core sends this frame."""
    number, is_result = _TOLD.unpack_from(body)
    return number, is_result, bytes(body[_TOLD.size :])


def result_of(is_result: bool, pickled: bytes) -> Any:
    """The result; raises the error."""
    if not is_result:
        raise error_of(pickled)
    return pickle.loads(pickled)  # noqa: S301 -- the core made it


def error_of(pickled: bytes) -> InferenceError:
    """The error of an answer."""
    code, message = pickle.loads(pickled)  # noqa: S301 -- the core made it
    return InferenceError(ErrorCode[code], message)
