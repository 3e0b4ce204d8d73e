"""DONE and RESPONSE: all answers of a batch at its end, or one answer outside of it."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from halimede.backends.hosting import Answer, BatchReply, Reply, Rescheduled
from halimede.channel.frames import BLOCK, MAX_CONTROL_BYTES, MAX_TEXT_BYTES, FrameError
from halimede.channel.json_frames import decode_blocks
from halimede.core.types import Buffer, ErrorCode, InferenceError, ParameterValue
from halimede.core.types.error import EndedSequenceError, internal
from halimede.inference_frames.kinds import ERROR_CODES, ERROR_NUMBERS, MAX_ANSWER_BYTES, describe_decode_error
from halimede.inference_frames.tensors import (
    PADDING,
    REMEMBERED,
    REMEMBERED_BYTES,
    Locate,
    Store,
    TensorForm,
    add_tensor,
    data_start,
    make_tensors,
    read_tensors,
)
from halimede.inference_frames.texts import decode_parameters, encode_parameters
from halimede.workers.frames.kinds import DONE, RESPONSE
from halimede.workers.worker import NO_PARAMETERS

# Each begins with the length of the description.
# Batch, number of replies.
_BATCH = struct.Struct("<IIH")
# The end of a DONE's description: whether it failed, times, bytes that did not fit.
_DONE = struct.Struct("<B3QQ")
# kind of reply, error code, number of outputs, length of the error's text or the parameters.
_REPLY = struct.Struct("<BBHI")
# key, whether it is final, when the execution began, when it was sent.
_RESPONSE = struct.Struct("<IQBQQ")
# Each with the header before it.
_WHOLE_BATCH, _WHOLE_RESPONSE = struct.Struct("<IIIIH"), struct.Struct("<IIIQBQQ")
_BATCH_PEEK = struct.Struct("<4xIH")

_ANSWERED, _ERROR, _OPEN, _AGAIN, _ENDED = 0, 1, 2, 3, 4
_ERRORS: Mapping[int, type[InferenceError]] = {_ERROR: InferenceError, _ENDED: EndedSequenceError}


@dataclass(slots=True)
class Done:
    """The end of a batch, as the worker reports it. Times are monotonic nanoseconds: received, execution begun, ended.

    `wanted_bytes` did not fit into the worker's arena; `retained` are blocks of the server that the model keeps.
    `again` are the positions of requests that the model wants to execute again; their replies are None.
    """

    batch: int
    replies: list[Reply]
    failed: bool
    times: tuple[int, int, int]
    wanted_bytes: int
    retained: list[tuple[int, int]]
    again: Sequence[int] = ()


Remains = Callable[[], "tuple[int, Sequence[tuple[int, int]]]"]
"""Computed after the answers are encoded: bytes that did not fit into the arena, blocks that are retained."""


def encode_done(
    batch: int,
    replies: list[BatchReply],
    failed: bool,
    times: tuple[int, int, int],
    outputs: Mapping[str, int],
    store: Store,
    remains: Remains,
) -> Buffer:
    """A DONE frame. `replies` is cleared before `remains` is called, so that they do not keep blocks retained."""
    described: list[bytes] = []
    data: list[Buffer] = []
    at = 0
    for reply in replies:
        at = _add_reply(reply, described, at, outputs, store, data)
    count = len(replies)
    reply = None
    replies.clear()
    wanted_bytes, retained = remains()
    if retained:
        described.extend([BLOCK.pack(*block) for block in retained])
    described.append(_DONE.pack(failed, *times, wanted_bytes))
    whole = b"".join(described)
    pad = PADDING[-(_WHOLE_BATCH.size + len(whole)) & 15]
    length = _BATCH.size + len(whole) + len(pad) + at
    return b"".join((_WHOLE_BATCH.pack(length, DONE, len(whole), batch, count), whole, pad, *data))


def batch_of(body: Buffer) -> tuple[int, int]:
    """The number of the batch that a DONE frame ends, and its count of replies, read ahead. FrameError."""
    if len(body) < _BATCH.size:
        raise FrameError(f"DONE: {len(body)} bytes")
    number, count = _BATCH_PEEK.unpack_from(body)
    return number, count


def check_length(kind: int, length: int, part: memoryview, outputs: tuple[str, ...]) -> bool:
    """Whether the part of a DONE's or RESPONSE's body has the whole description; then it must describe all of the
    frame's bytes. FrameError."""
    head = _BATCH if kind == DONE else _RESPONSE
    if len(part) < head.size:
        return False
    fields = head.unpack_from(part)
    end = head.size + fields[0]
    if end > min(length, MAX_CONTROL_BYTES):
        raise FrameError(f"a description of {fields[0]} bytes")
    if end > len(part):
        return False
    count, stop = (fields[2], end - _DONE.size) if kind == DONE else (1, end)
    try:
        forms, _, _ = _replies(part[head.size : stop], count, outputs)
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"a large answer: {describe_decode_error(error)}") from error
    described = data_start(end)
    for form in forms:
        for _, _, _, segment, _, size in form[0] if form is not None else ():
            described += 0 if segment else size + (-size & 15)
    if described != length:
        raise FrameError(f"a frame of {length} bytes, of which {described} are described")
    return True


def decode_done(body: memoryview, outputs: tuple[str, ...], locate: Locate) -> Done:
    """Decode the body of a DONE frame in the server. FrameError. Tensors in the frame are views of `body`."""
    try:
        length, batch, count = _BATCH.unpack_from(body)
        end = _BATCH.size + length
        stop = end - _DONE.size
        if end > len(body) or stop < _BATCH.size:
            raise FrameError("DONE: a description that ends too early")
        failed, received, begun, ended, wanted_bytes = _DONE.unpack_from(body, stop)
        if length <= REMEMBERED_BYTES:
            forms, retained, again = _known_replies(bytes(body[_BATCH.size : stop]), count, outputs)
        else:
            forms, retained, again = _replies(body[_BATCH.size : stop], count, outputs)
        replies = _made(forms, body, data_start(end), locate)
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"DONE: {describe_decode_error(error)}") from error
    return Done(batch, replies, bool(failed), (received, begun, ended), wanted_bytes, [*retained], again)


@dataclass(slots=True)
class Response:
    """An answer before or after the end of its batch. Times are monotonic nanoseconds: when the execution of its
    request began, and when the model sent it."""

    key: int
    reply: Reply
    final: bool
    times: tuple[int, int]


def encode_response(
    key: int, reply: Reply, final: bool, times: tuple[int, int], outputs: Mapping[str, int], store: Store
) -> Buffer:
    """A RESPONSE frame."""
    described: list[bytes] = []
    data: list[Buffer] = []
    size = _add_reply(reply, described, 0, outputs, store, data)
    whole = b"".join(described)
    pad = PADDING[-(_WHOLE_RESPONSE.size + len(whole)) & 15]
    length = _RESPONSE.size + len(whole) + len(pad) + size
    return b"".join((_WHOLE_RESPONSE.pack(length, RESPONSE, len(whole), key, final, *times), whole, pad, *data))


def decode_response(body: memoryview, outputs: tuple[str, ...], locate: Locate) -> Response:
    """Decode the body of a RESPONSE frame in the server. FrameError."""
    try:
        length, key, final, begun_ns, sent_ns = _RESPONSE.unpack_from(body)
        end = _RESPONSE.size + length
        if end > len(body):
            raise FrameError("RESPONSE: a description that ends too early")
        forms, retained, again = _replies(body[_RESPONSE.size : end], 1, outputs)
        if retained:
            raise FrameError("RESPONSE: blocks")
        if again:
            raise FrameError("RESPONSE: another execution")
        (reply,) = _made(forms, body, data_start(end), locate)
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"RESPONSE: {describe_decode_error(error)}") from error
    return Response(key, reply, bool(final), (begun_ns, sent_ns))


def _add_reply(
    reply: BatchReply, described: list[bytes], at: int, outputs: Mapping[str, int], store: Store, data: list[Buffer]
) -> int:
    """Describe a reply. Outputs that the configuration does not have are left out, as if not requested."""
    if isinstance(reply, Answer):
        size = at
        for tensor in reply.outputs:
            size += len(tensor.data)
        try:
            if size > MAX_ANSWER_BYTES:
                raise ValueError(f"the batch's outputs take {size} bytes, at most {MAX_ANSWER_BYTES} are allowed")
            parameters = encode_parameters(reply.parameters) if reply.parameters else b""
        except ValueError as error:
            return _add_reply(internal(str(error)), described, at, outputs, store, data)
        head = len(described)
        described.append(b"")
        count = 0
        for tensor in reply.outputs:
            position = outputs.get(tensor.name)
            if position is not None:
                at = add_tensor(tensor, position, described, at, store, data)
                count += 1
                if count > len(outputs):
                    break  # an output appears twice: the server refuses the answer in any case
        described[head] = _REPLY.pack(_ANSWERED, 0, count, len(parameters)) + parameters
    elif reply is None:
        described.append(_REPLY.pack(_OPEN, 0, 0, 0))
    elif isinstance(reply, Rescheduled):
        described.append(_REPLY.pack(_AGAIN, 0, 0, 0))
    else:
        text = reply.message.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
        kind = _ENDED if isinstance(reply, EndedSequenceError) else _ERROR
        described.append(_REPLY.pack(kind, ERROR_NUMBERS[reply.code], 0, len(text)) + text)
    return at


_ErrorForm = tuple[type[InferenceError], ErrorCode, str]
_ReplyForm = tuple[Sequence[TensorForm], Mapping[str, ParameterValue], _ErrorForm | None] | None
"""Outputs, parameters, and the error if there is one; None for a request that stays open."""


def _replies(
    described: Buffer, count: int, outputs: tuple[str, ...]
) -> tuple[Sequence[_ReplyForm], Sequence[tuple[int, int]], Sequence[int]]:
    """Replies, the blocks after them, and the positions of requests that are to be executed again.

    FrameError, struct.error, IndexError, KeyError, ValueError.
    """
    forms: list[_ReplyForm] = []
    again: list[int] = []
    at = 0
    for _ in range(count):
        kind, code, n_outputs, length = _REPLY.unpack_from(described, at)
        at += _REPLY.size
        if length > MAX_TEXT_BYTES or n_outputs > len(outputs) + 1:
            raise FrameError(f"a reply with {n_outputs} outputs and {length} bytes of text")
        if kind != _ANSWERED and (n_outputs or (length and kind not in _ERRORS)):
            raise FrameError(f"a reply of kind {kind} with {n_outputs} outputs and {length} bytes of text")
        text = described[at : at + length]
        if kind == _ANSWERED:
            tensors, at = read_tensors(described, at + length, n_outputs, outputs)
            forms.append((tensors, decode_parameters(text) if length else NO_PARAMETERS, None))
        elif kind in _ERRORS:
            forms.append(((), NO_PARAMETERS, (_ERRORS[kind], ERROR_CODES[code], str(text, "utf-8", "replace"))))
            at += length
        elif kind in (_OPEN, _AGAIN):
            if kind == _AGAIN:
                again.append(len(forms))
            forms.append(None)
        else:
            raise FrameError(f"a reply of kind {kind}")
    # A field was read beyond the end of the description.
    if at > len(described):
        raise FrameError("a description that ends too early")
    return forms, decode_blocks(described[at:]) if at < len(described) else (), tuple(again)


_known_replies = lru_cache(REMEMBERED)(_replies)


def _made(forms: Sequence[_ReplyForm], body: memoryview, base: int, locate: Locate) -> list[Reply]:
    replies: list[Reply] = []
    for form in forms:
        if form is None:
            replies.append(None)
            continue
        tensors, parameters, error = form
        if error is not None:
            made, code, text = error
            replies.append(made(code, text))
            continue
        outputs = make_tensors(tensors, body, base, locate, True)
        replies.append(Answer(outputs, dict(parameters) if parameters else NO_PARAMETERS))
    return replies
