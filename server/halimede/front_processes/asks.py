"""ASK and TOLD: what a front-end process asks the core besides inferences, and the answers.

| frame | body |
|---|---|
| ASK | the number of this ask, the number of the question in QUESTIONS, the arguments |
| TOLD | the number of the ask, the answer or an error |

Arguments and answers are JSON, written and read by the types in QUESTIONS (`values`).
"""

import logging
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, TypeVarTuple, cast

from halimede.channel.frames import MAX_CONTROL_BYTES, FrameError, encode_frame
from halimede.core.config.model_view import ModelView
from halimede.core.types import Buffer, DeviceReport, InferenceError, ModelIndexEntry, internal, invalid, shortage_of
from halimede.core.types.kv_cache import KvCache
from halimede.core.types.statistics import ModelStatistics
from halimede.facade.server import LoadParameter, Server
from halimede.front_processes.frames import FrontFrame
from halimede.front_processes.values import decode, encode
from halimede.frontends.http.protocol import INTERNAL_ERROR

log = logging.getLogger(__name__)

MAX_ARGUMENTS_BYTES = 1 << 20
"""Maximum bytes of most arguments. They come from control requests, which have at most 64 KiB, and JSON takes up to six
bytes for one."""

Ts = TypeVarTuple("Ts")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class Question(Generic[*Ts, AnswerT]):
    """A method of the façade that a front end may call, and the types of its arguments and its answer."""

    number: int
    method: Callable[[Server], Callable[[*Ts], Awaitable[AnswerT]]]
    arguments: Any
    answer: Any
    max_bytes: int = MAX_ARGUMENTS_BYTES
    """Of the arguments. An answer has no limit: the core makes it."""


def _model(server: Server) -> Callable[[str, str], Awaitable[ModelView]]:
    async def find(name: str, version: str) -> ModelView:
        return cast("ModelView", server.model(name, version))  # the core knows every model

    return find


# The name of a model may be as long as a client's inference.
MODEL = Question(1, _model, tuple[str, str], ModelView, MAX_CONTROL_BYTES)
IS_MODEL_READY = Question(2, lambda server: server.is_model_ready, tuple[str, str], bool)
KV_CACHE = Question(3, lambda server: server.kv_cache, tuple[str], KvCache | None)
STATISTICS = Question(4, lambda server: server.statistics, tuple[str, str], Sequence[ModelStatistics])
REPOSITORY_INDEX = Question(5, lambda server: server.repository_index, tuple[bool], Sequence[ModelIndexEntry])
DEVICES = Question(6, lambda server: server.devices, tuple[()], DeviceReport)
LOAD_MODEL = Question(7, lambda server: server.load_model, tuple[str, Mapping[str, LoadParameter]], type(None))
UNLOAD_MODEL = Question(8, lambda server: server.unload_model, tuple[str, bool], type(None))

AnyQuestion = Question[*tuple[Any, ...], Any]

QUESTIONS: Mapping[int, AnyQuestion] = {
    each.number: each
    for each in (MODEL, IS_MODEL_READY, KV_CACHE, STATISTICS, REPOSITORY_INDEX, DEVICES, LOAD_MODEL, UNLOAD_MODEL)
}

_ASK = struct.Struct("<IB")
_TOLD = struct.Struct("<I")


def encode_ask(number: int, question: Question[*Ts, AnswerT], arguments: tuple[*Ts]) -> bytes:
    """An ASK frame. InferenceError if the arguments are too large."""
    document = encode(question.arguments, arguments)
    if len(document) > question.max_bytes:
        text = f"the arguments of the request take {len(document)} bytes, at most {question.max_bytes} are taken"
        raise invalid(text)
    return encode_frame(FrontFrame.ASK, _ASK.pack(number, question.number) + document)


def decode_ask(body: Buffer) -> tuple[int, AnyQuestion, tuple[Any, ...]]:
    """The number of the ask, the question and its arguments. FrameError."""
    try:
        number, which = _ASK.unpack_from(body)
        question = QUESTIONS[which]
        document = bytes(body[_ASK.size :])
        if len(document) > question.max_bytes:
            raise ValueError(f"arguments of {len(document)} bytes")
        return number, question, decode(question.arguments, document)
    except (struct.error, ValueError, KeyError) as error:
        raise FrameError(f"ASK: {error}") from error


async def answer(server: Server, number: int, question: AnyQuestion, arguments: tuple[Any, ...]) -> bytes:
    """Call the method: its TOLD frame."""
    try:
        return encode_told(number, question, await question.method(server)(*arguments))
    except InferenceError as error:
        return encode_told(number, question, error)
    except Exception as error:
        # Whatever it was, the front end waits for an answer. It gets no details.
        log.error("unexpected error in an answer to a front-end process", exc_info=error)
        failed = shortage_of(error) or internal(INTERNAL_ERROR)
        return encode_told(number, question, failed)


def encode_told(number: int, question: Question[*Ts, AnswerT], told: AnswerT | InferenceError) -> bytes:
    """A TOLD frame."""
    return encode_frame(FrontFrame.TOLD, _TOLD.pack(number) + encode(question.answer | InferenceError, told))


def decode_told(body: Buffer) -> tuple[int, bytes]:
    """The number of the ask, and what was told, for `told_of`."""
    return _TOLD.unpack_from(body)[0], bytes(body[_TOLD.size :])


def told_of(question: Question[*Ts, AnswerT], document: bytes) -> AnswerT | InferenceError:
    """The answer or the error of a TOLD frame. Only the core sends it."""
    told: AnswerT | InferenceError = decode(question.answer | InferenceError, document)
    return told
