"""The messages between the server and a worker process: an explicit codec, little-endian, the same on both sides.

A frame is its length and kind, four bytes each, and a body. Bodies that carry tensors have a part with their shapes and
places, and then the bytes of those that travel in the frame itself, at multiples of 16 from the frame's start; the
others lie in segments (`workers.segments`). Names of inputs and outputs travel as positions in the configuration, but
those of calls, which are another model's, as text. Control messages are JSON.

What comes from a worker is not trusted: everything is held against the length of the frame, and FrameError says what is
wrong. Standard library and numpy only, for any CPython from 3.10 on.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

from halimede.backends.hosting import Answer, Reply
from halimede.core.types import (
    Buffer,
    DataType,
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    ParameterValue,
    Tensor,
)
from halimede.workers.worker import NO_PARAMETERS, BatchItem

INLINE_BYTES = 16 << 10
"""Tensors up to this size travel in the frame: cheaper than a block of shared memory and its bookkeeping."""

MAX_DIMENSIONS = 255
MAX_ANSWER_BYTES = 1 << 30
"""Of one batch's answers: a frame with more, and what describes them, is none of ours."""

MAX_CONTROL_BYTES = 16 << 20
"""Of a frame of JSON."""

MAX_TEXT_BYTES = 64 << 10
"""Of an error's message, which is cut, and of a reply's parameters."""

MAX_LINE_BYTES = 16 << 10
"""Of a line of log."""

MAX_UPDATES = 4096
"""Changes of metrics in one frame."""

MAX_BLOCKS = 16 << 10
"""Blocks in one frame: an arena has no more of tensors that do not travel in frames."""

MAX_CALLS = 256
"""Calls of one worker that the server answers at a time: so many for JSON, and so many inferences."""

MAX_CALL_TENSORS = 4096
"""Inputs of an inference that a worker asks for, and outputs that it names."""

MAX_JSON_VALUES = 100_000
"""In one frame, counted by what stands between them: what is parsed holds up everything else."""


class FrameError(Exception):
    """A frame that no worker of ours makes."""


class Kind(IntEnum):
    """From the server to the worker below 32, from the worker to the server above."""

    START = 1
    """JSON: the worker's spec and what it is to do."""
    EXECUTE = 2
    CANCEL = 3
    """A request's key."""
    CREDIT = 4
    """A request's key, and how many of its answers its client took."""
    RELEASE = 5
    """Blocks of the worker's arena that the server has done with."""
    SEGMENT = 6
    """Number and arena of a segment, with its descriptor."""
    RESULT = 7
    """The answer to a CALL: its number, whether it went well, JSON."""
    ASK_READY = 8
    STOP = 9
    CALL_ANSWER = 10
    """An answer to an INFER."""
    FORGET = 11
    """The number of a borrowed segment that is there no more."""

    STARTED = 32
    """JSON: what the runner says of itself, or the result of the work that START asked for."""
    FAILED = 33
    """JSON: code and message of what went wrong in the start."""
    DONE = 34
    RESPONSE = 35
    LOG = 36
    """Level and text."""
    METRICS = 37
    """Metric, operation and value, any number of times."""
    CALL = 38
    """Its number, then JSON: method and arguments."""
    UNUSED = 39
    """Blocks of the server's arena that the model held on to beyond its batch, and has let go now."""
    READY = 40
    """Whether the model says that it is ready."""
    STOPPED = 41
    INFER = 42
    """An inference that the model's code asks for."""
    CANCEL_CALL = 43
    """The number of an INFER that nobody waits for any more."""
    TAKEN = 44
    """The number of an INFER, and how many of its answers, none of them final, were taken."""
    MAPPED = 45
    """The number of a borrowed segment, and whether tensors may lie in it from now on; False ends all borrowing."""


HEADER = struct.Struct("<II")
KEY = struct.Struct("<Q")
CREDIT = struct.Struct("<QI")
CALL = struct.Struct("<I")
RESULT = struct.Struct("<IB")
TAKEN = struct.Struct("<II")
BLOCK = struct.Struct("<HQ")
SEGMENT = struct.Struct("<HB")
FORGET = struct.Struct("<H")
MAPPED = struct.Struct("<HB")
METRIC = struct.Struct("<IBd")

INBOUND, OUTBOUND, BORROWED = 0, 1, 2
"""What a segment is for, as the server names it: requests, answers, or reading what another worker answered."""

FIRST_BORROWED = 1 << 15
"""Numbers of borrowed segments begin here, those of a worker's own at 1."""

METRIC_OPERATIONS = ("increment", "set", "observe")
PLACE_END = "\x1f"
"""Between a line of log's place, where it has one, and its text."""

LOG_LEVELS = ("ERROR", "WARNING", "INFO", "VERBOSE")

# Length of the part before the tensors' bytes, batch, number of requests or replies.
_BATCH = struct.Struct("<IIH")
# key, correlation, timeout, rows, length of parameters, of id, of a text correlation (NUMERIC for a number), START and
# END, number of inputs, of outputs.
_REQUEST = struct.Struct("<QQQIIIIBHH")
_NUMERIC = 0xFFFFFFFF
# position of the name, datatype, number of dimensions, segment (0 for the frame itself), offset, length.
_TENSOR = struct.Struct("<HBBHQQ")
_DONE = struct.Struct("<B3QQ")
# what it is, error code, number of outputs, length of the error's text or the parameters.
_REPLY = struct.Struct("<BBHI")
_RESPONSE = struct.Struct("<IQBQ")
# Length of the part before the tensors' bytes, number, batch, bytes that found no room, correlation, timeout, priority,
# START and END, number of inputs, of outputs, length of the model's name, of the version, of id, of parameters, of a
# text correlation.
_INFER = struct.Struct("<IIIQQQQBHHHHIII")
# Length of the part before the tensors' bytes, number, whether it is final, whether it is an error and its code, number
# of outputs, length of the model's name, of the version, of id, of the error's text or the parameters.
_CALL_ANSWER = struct.Struct("<IIBBBHHHII")
_LENGTH = struct.Struct("<H")
_POSITION = struct.Struct("<H")
_BATCH_PEEK = struct.Struct("<4xIH")
_DIMENSIONS = tuple(struct.Struct(f"<{count}q") for count in range(MAX_DIMENSIONS + 1))

_ANSWERED, _ERROR, _OPEN = 0, 1, 2
_CODES = tuple(ErrorCode)
_CODE_NUMBERS = {code: number for number, code in enumerate(_CODES)}
LIMITS = {
    Kind.STARTED: MAX_CONTROL_BYTES,
    Kind.FAILED: MAX_CONTROL_BYTES,
    Kind.CALL: MAX_CONTROL_BYTES,
    Kind.DONE: MAX_ANSWER_BYTES + MAX_CONTROL_BYTES,
    Kind.RESPONSE: MAX_ANSWER_BYTES + MAX_CONTROL_BYTES,
    Kind.LOG: MAX_LINE_BYTES + 1,
    Kind.METRICS: MAX_UPDATES * METRIC.size,
    Kind.UNUSED: MAX_BLOCKS * BLOCK.size,
    Kind.READY: 1,
    Kind.STOPPED: 0,
    Kind.INFER: MAX_ANSWER_BYTES + MAX_CONTROL_BYTES,
    Kind.CANCEL_CALL: CALL.size,
    Kind.TAKEN: TAKEN.size,
    Kind.MAPPED: MAPPED.size,
}
"""The largest body of each kind that a worker sends."""

_DATATYPES = {each.number: each for each in DataType if each is not DataType.INVALID}

Place = Callable[[Buffer], "tuple[int, int] | None"]
"""Where a tensor's bytes are put beside the frame: segment (from 1) and offset; None for in the frame."""

Locate = Callable[[int, int, int], Buffer]
"""The bytes at segment, offset and length; ValueError when they are none that the sender may name."""


def frame(kind: Kind, body: bytes = b"") -> bytes:
    """A whole frame."""
    return HEADER.pack(len(body), kind) + body


def json_body(value: Any) -> bytes:
    return json.dumps(value).encode()


def json_frame(kind: Kind, value: Any) -> bytes:
    return frame(kind, json_body(value))


def _describe(tensor: Tensor, position: int, at: int, place: Place, data: list[Buffer]) -> tuple[bytes, int]:
    """What a frame says of a tensor, whose bytes are added to `data` when they travel with it, at `at`; and what is
    `at` for the next one."""
    payload, shape = tensor.data, tensor.shape
    size = len(payload)
    put = None if size <= INLINE_BYTES else place(payload)
    dimensions = len(shape)
    if put is not None:
        described = _TENSOR.pack(position, tensor.datatype.number, dimensions, *put, size)
    else:
        described = _TENSOR.pack(position, tensor.datatype.number, dimensions, 0, at, size)
        data.append(payload)
        at += size
        if over := size & 15:
            data.append(bytes(16 - over))
            at += 16 - over
    return described + _DIMENSIONS[dimensions].pack(*shape), at


def _assemble(
    kind: Kind, first: struct.Struct, described: bytes, data: list[Buffer], size: int, *values: int
) -> Buffer:
    """A frame, whole. `first` begins with the length of the description, `values` are the rest of it."""
    pad = -(HEADER.size + first.size + len(described)) & 15
    head = (
        HEADER.pack(first.size + len(described) + pad + size, kind)
        + first.pack(len(described), *values)
        + described
        + _PADDING[pad]
    )
    if not data:
        return head
    return b"".join((head, *data))


_PADDING = tuple(bytes(count) for count in range(16))


def _base(described_end: int) -> int:
    """Where in the body the tensors' bytes begin. Offsets count from the frame's start, which is its header's."""
    return (described_end + HEADER.size + 15 & ~15) - HEADER.size


def encode_execute(
    batch: int, items: Sequence[BatchItem], inputs: Mapping[str, int], outputs: Mapping[str, int], place: Place
) -> Buffer:
    """An EXECUTE frame. `inputs` and `outputs` are the positions of the names."""
    described: list[bytes] = []
    data: list[Buffer] = []
    at = 0
    for item in items:
        request = item.request
        parameters = json.dumps(request.parameters).encode() if request.parameters else b""
        request_id = request.id.encode("utf-8", "replace") if request.id else b""
        correlation, number, text_length = b"", 0, _NUMERIC
        if request.sequence_id:
            if isinstance(request.sequence_id, str):
                correlation = request.sequence_id.encode("utf-8", "replace")
                text_length = len(correlation)
            else:
                number = request.sequence_id
        tensors = request.inputs
        # All of them, each once, is what naming none means.
        wanted = request.outputs if len(request.outputs) != len(outputs) else ()
        described.append(
            _REQUEST.pack(
                item.key,
                number,
                request.timeout_us,
                item.rows,
                len(parameters),
                len(request_id),
                text_length,
                request.sequence_start | request.sequence_end << 1,
                len(tensors),
                len(wanted),
            )
        )
        if request_id or correlation or parameters or wanted:
            described.append(
                request_id + correlation + parameters + b"".join([_POSITION.pack(outputs[name]) for name in wanted])
            )
        for tensor in tensors:
            said, at = _describe(tensor, inputs[tensor.name], at, place, data)
            described.append(said)
    return _assemble(Kind.EXECUTE, _BATCH, b"".join(described), data, at, batch, len(items))


@dataclass(slots=True)
class Execute:
    """What a worker is to run."""

    batch: int
    items: list[BatchItem]


def decode_execute(
    body: memoryview, inputs: Sequence[str], outputs: Sequence[str], model: str, locate: Locate
) -> Execute:
    """The worker's reading of an EXECUTE frame's body, which the server has made. Tensors are views of `body`."""
    length, batch, count = _BATCH.unpack_from(body)
    at = _BATCH.size
    base = _base(at + length)
    items = []
    for _ in range(count):
        (key, correlation, timeout_us, rows, parameters_length, id_length, text_length, flags, n_inputs, n_outputs) = (
            _REQUEST.unpack_from(body, at)
        )
        at += _REQUEST.size
        request_id, wanted, parameters = "", (), {}
        if id_length:
            request_id = str(body[at : at + id_length], "utf-8")
            at += id_length
        if text_length != _NUMERIC:
            correlation = str(body[at : at + text_length], "utf-8")
            at += text_length
        if parameters_length:
            parameters = json.loads(bytes(body[at : at + parameters_length]))
            at += parameters_length
        if n_outputs:
            end = at + n_outputs * _POSITION.size
            wanted = tuple([outputs[position] for (position,) in _POSITION.iter_unpack(body[at:end])])
            at = end
        tensors = []
        for _ in range(n_inputs):
            position, number, dimensions, segment, offset, size = _TENSOR.unpack_from(body, at)
            at += _TENSOR.size
            shape = _DIMENSIONS[dimensions].unpack_from(body, at)
            at += dimensions * 8
            payload = locate(segment, offset, size) if segment else body[base + offset : base + offset + size]
            tensors.append(Tensor(inputs[position], _DATATYPES[number], shape, payload))
        start, end_ = (False, False) if not flags else (bool(flags & 1), bool(flags & 2))
        request = InferenceRequest(
            model, "", request_id, tensors, wanted, parameters, 0, timeout_us, correlation, start, end_
        )
        items.append(BatchItem(key, request, rows, False))
    return Execute(batch, items)


@dataclass(slots=True)
class Done:
    """A batch's end, as the worker says it. Times are monotonic nanoseconds: received, execution begun, ended.

    `wanted_bytes` found no room in the worker's arena; `retained` are blocks of the server's that the model holds on
    to.
    """

    batch: int
    replies: list[Reply]
    failed: bool
    times: tuple[int, int, int]
    wanted_bytes: int
    retained: list[tuple[int, int]]


Remains = Callable[[], "tuple[int, Sequence[tuple[int, int]]]"]
"""What is left of a batch once its answers are encoded: bytes that found no room, blocks that are retained."""


def encode_done(
    batch: int,
    replies: list[Reply],
    failed: bool,
    times: tuple[int, int, int],
    outputs: Mapping[str, int],
    place: Place,
    remains: Remains,
) -> Buffer:
    """A DONE frame. `replies` is emptied before `remains` is asked: what they look at is not retained by them."""
    described: list[bytes] = []
    data: list[Buffer] = []
    at = 0
    for reply in replies:
        at = _add_reply(reply, described, at, outputs, place, data)
    count = len(replies)
    reply = None
    replies.clear()
    wanted_bytes, retained = remains()
    described.append(_DONE.pack(failed, *times, wanted_bytes))
    if retained:
        described.extend([BLOCK.pack(*block) for block in retained])
    return _assemble(Kind.DONE, _BATCH, b"".join(described), data, at, batch, count)


def batch_of(body: Buffer) -> tuple[int, int]:
    """Which batch a DONE frame ends, and with how many replies, from the beginning of its body. FrameError."""
    if len(body) < _BATCH.size:
        raise FrameError(f"DONE: {len(body)} bytes")
    number, count = _BATCH_PEEK.unpack_from(body)
    return number, count


def decode_done(body: memoryview, outputs: Sequence[str], locate: Locate) -> Done:
    """The server's reading of a DONE frame's body. FrameError. Tensors in the frame are views of `body`."""
    try:
        length, batch, count = _BATCH.unpack_from(body)
        at = _BATCH.size
        end = at + length
        base = _base(end)
        replies: list[Reply] = []
        for _ in range(count):
            reply, at = _read_reply(body, at, base, outputs, locate)
            replies.append(reply)
        failed, received, begun, ended, wanted_bytes = _DONE.unpack_from(body, at)
        at += _DONE.size
        # What was read beyond the description's end was read for something else than it is.
        if at > end or end > len(body):
            raise FrameError("DONE: a description that ends too early")
        retained = decode_blocks(body[at:end]) if at < end else []
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"DONE: {_wrong(error)}") from error
    return Done(batch, replies, bool(failed), (received, begun, ended), wanted_bytes, retained)


@dataclass(slots=True)
class Response:
    """An answer ahead of its batch's end or after it. `sent_ns` is when the model sent it, monotonic nanoseconds."""

    key: int
    reply: Reply
    final: bool
    sent_ns: int


def encode_response(
    key: int, reply: Reply, final: bool, sent_ns: int, outputs: Mapping[str, int], place: Place
) -> Buffer:
    """A RESPONSE frame."""
    described: list[bytes] = []
    data: list[Buffer] = []
    size = _add_reply(reply, described, 0, outputs, place, data)
    return _assemble(Kind.RESPONSE, _RESPONSE, b"".join(described), data, size, key, final, sent_ns)


def decode_response(body: memoryview, outputs: Sequence[str], locate: Locate) -> Response:
    """The server's reading of a RESPONSE frame's body. FrameError."""
    try:
        length, key, final, sent_ns = _RESPONSE.unpack_from(body)
        end = _RESPONSE.size + length
        reply, at = _read_reply(body, _RESPONSE.size, _base(end), outputs, locate)
        if at > end or end > len(body):
            raise FrameError("RESPONSE: a description that ends too early")
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"RESPONSE: {_wrong(error)}") from error

    return Response(key, reply, bool(final), sent_ns)


def encode_infer(number: int, batch: int, request: InferenceRequest, place: Place, wanted: Callable[[], int]) -> Buffer:
    """An INFER frame. `wanted` says, when all is placed, how many bytes found no room. ValueError, struct.error."""
    size = 0
    for tensor in request.inputs:
        size += len(tensor.data)
        if tensor.datatype is DataType.INVALID:
            raise ValueError(f"input '{tensor.name}' has no datatype")
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"the inputs take {size} bytes, at most {MAX_ANSWER_BYTES} are allowed")
    if len(request.inputs) > MAX_CALL_TENSORS or len(request.outputs) > MAX_CALL_TENSORS:
        raise ValueError(f"at most {MAX_CALL_TENSORS} inputs and as many outputs are allowed")
    model, version = _short_text(request.model_name), _short_text(request.model_version)
    request_id = _text(request.id) if request.id else b""
    parameters = _parameters_text(request.parameters, "request") if request.parameters else b""
    correlation, numeric, correlation_length = b"", 0, _NUMERIC
    if request.sequence_id:
        if isinstance(request.sequence_id, str):
            correlation = _text(request.sequence_id)
            correlation_length = len(correlation)
        else:
            numeric = request.sequence_id
    described: list[bytes] = [model, version, request_id, parameters, correlation]
    for name in request.outputs:
        text = _short_text(name)
        described.append(_LENGTH.pack(len(text)) + text)
    data: list[Buffer] = []
    at = 0
    for tensor in request.inputs:
        name_text = _short_text(tensor.name)
        said, at = _describe(tensor, len(name_text), at, place, data)
        described.append(said + name_text)
    return _assemble(
        Kind.INFER,
        _INFER,
        b"".join(described),
        data,
        at,
        number,
        batch,
        wanted(),
        numeric,
        request.timeout_us,
        request.priority,
        request.sequence_start | request.sequence_end << 1,
        len(request.inputs),
        len(request.outputs),
        len(model),
        len(version),
        len(request_id),
        len(parameters),
        correlation_length,
    )


@dataclass(slots=True)
class Infer:
    """An inference that a worker asks for: made from a batch, or from none that the worker knows of (0).

    `wanted_bytes` found no room in the worker's arena.
    """

    number: int
    batch: int
    request: InferenceRequest
    wanted_bytes: int


def decode_infer(body: memoryview, locate: Locate) -> Infer:
    """The server's reading of an INFER frame's body. FrameError. Tensors in the frame are views of `body`."""
    try:
        (
            length, number, batch, wanted_bytes, correlation, timeout_us, priority, flags, n_inputs, n_outputs,
            model_length, version_length, id_length, parameters_length, correlation_length,
        ) = _INFER.unpack_from(body)  # fmt: skip
        texts = id_length + parameters_length + (correlation_length if correlation_length != _NUMERIC else 0)
        if n_inputs > MAX_CALL_TENSORS or n_outputs > MAX_CALL_TENSORS or texts > 3 * MAX_TEXT_BYTES:
            raise FrameError(f"INFER: {n_inputs} inputs, {n_outputs} outputs and {texts} bytes of text")
        at = _INFER.size
        end = at + length
        model = str(body[at : at + model_length], "utf-8")
        at += model_length
        version = str(body[at : at + version_length], "utf-8")
        at += version_length
        request_id = ""
        outputs: tuple[str, ...] = ()
        parameters: Mapping[str, ParameterValue] = NO_PARAMETERS
        if id_length:
            request_id = str(body[at : at + id_length], "utf-8")
            at += id_length
        if parameters_length:
            parameters = _parameters(body[at : at + parameters_length])
            at += parameters_length
        if correlation_length != _NUMERIC:
            correlation = str(body[at : at + correlation_length], "utf-8")
            at += correlation_length
        if n_outputs:
            outputs, at = _read_names(body, at, n_outputs)
        tensors, at = _read_tensors(body, at, _base(end), n_inputs, None, locate)
        # What was read beyond the description's end was read for something else than it is.
        if at > end or end > len(body):
            raise FrameError("INFER: a description that ends too early")
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"INFER: {_wrong(error)}") from error
    request = InferenceRequest(
        model,
        version,
        request_id,
        tensors,
        outputs,
        dict(parameters),
        priority,
        timeout_us,
        correlation,
        bool(flags & 1),
        bool(flags & 2),
    )
    return Infer(number, batch, request, wanted_bytes)


def _read_names(body: memoryview, at: int, count: int) -> tuple[tuple[str, ...], int]:
    names = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        names.append(str(body[at : at + length], "utf-8"))
        at += length
    return tuple(names), at


def encode_call_answer(number: int, response: InferenceResponse, place: Place) -> Buffer:
    """A CALL_ANSWER frame."""
    model, version = _short_text(response.model_name), _short_text(response.model_version)
    request_id = _text(response.id) if response.id else b""
    data: list[Buffer] = []
    at = 0
    error = response.error
    if error is None:
        code, outputs = 0, response.outputs
        text = json.dumps(response.parameters).encode() if response.parameters else b""
    else:
        code, outputs = _CODE_NUMBERS[error.code], []
        text = error.message.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
    described: list[bytes] = [model, version, request_id, text]
    for tensor in outputs:
        name = _short_text(tensor.name)
        said, at = _describe(tensor, len(name), at, place, data)
        described.append(said + name)
    return _assemble(
        Kind.CALL_ANSWER,
        _CALL_ANSWER,
        b"".join(described),
        data,
        at,
        number,
        response.final,
        error is not None,
        code,
        len(outputs),
        len(model),
        len(version),
        len(request_id),
        len(text),
    )


def decode_call_answer(body: memoryview, locate: Locate) -> tuple[int, InferenceResponse]:
    """The worker's reading of a CALL_ANSWER frame's body, which the server has made: which INFER it answers, and how.

    Tensors are views of `body`.
    """
    length, call, final, is_error, code, count, model_length, version_length, id_length, text_length = (
        _CALL_ANSWER.unpack_from(body)
    )
    at = _CALL_ANSWER.size
    base = _base(at + length)
    model = str(body[at : at + model_length], "utf-8")
    at += model_length
    version = str(body[at : at + version_length], "utf-8")
    at += version_length
    request_id = str(body[at : at + id_length], "utf-8") if id_length else ""
    at += id_length
    text = body[at : at + text_length]
    at += text_length
    outputs: list[Tensor] = []
    response = InferenceResponse(model, version, request_id, outputs, {}, None, bool(final))
    if is_error:
        response.error = InferenceError(_CODES[code], str(text, "utf-8", "replace"))
    elif text_length:
        response.parameters = json.loads(bytes(text))
    for _ in range(count):
        name_length, number, dimensions, segment, offset, size = _TENSOR.unpack_from(body, at)
        at += _TENSOR.size
        shape = _DIMENSIONS[dimensions].unpack_from(body, at)
        at += dimensions * 8
        name = str(body[at : at + name_length], "utf-8")
        at += name_length
        payload = locate(segment, offset, size) if segment else body[base + offset : base + offset + size]
        outputs.append(Tensor(name, _DATATYPES[number], shape, payload))
    return call, response


def _text(value: str) -> bytes:
    """Half of a surrogate pair is replaced. ValueError when it is too long for one field."""
    text = value.encode("utf-8", "replace")
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"a text of {len(text)} bytes, at most {MAX_TEXT_BYTES} are allowed")
    return text


@lru_cache(maxsize=128)
def _short_text(value: str) -> bytes:
    """As `_text`, for what has 16 bits of length: names of models and tensors, the same ones again and again."""
    text = value.encode("utf-8", "replace")
    if len(text) > 0xFFFF:
        raise ValueError(f"a name of {len(text)} bytes")
    return text


def _wrong(error: Exception) -> str:
    """What was found in a frame, for people."""
    if isinstance(error, struct.error):
        return "a description that ends too early"
    if isinstance(error, KeyError):
        return f"datatype {error}"
    if isinstance(error, IndexError):
        return "the number of an output or an error that there is not"
    return str(error)


def encode_blocks(kind: Kind, blocks: Sequence[tuple[int, int]]) -> bytes:
    return frame(kind, b"".join([BLOCK.pack(*block) for block in blocks]))


def decode_blocks(body: Buffer) -> list[tuple[int, int]]:
    """FrameError."""
    if len(body) % BLOCK.size or len(body) > MAX_BLOCKS * BLOCK.size:
        raise FrameError(f"{len(body)} bytes are no list of blocks")
    return [(segment, offset) for segment, offset in BLOCK.iter_unpack(body)]


def decode_json(body: Buffer) -> Any:
    """FrameError."""
    text = bytes(body)
    if len(text) > MAX_JSON_VALUES and sum(map(text.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise FrameError(f"JSON of more than {MAX_JSON_VALUES} values")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"no JSON: {error}") from error


def error_json(error: InferenceError) -> dict[str, str]:
    return {"code": error.code.name, "message": error.message}


def error_from_json(value: Any) -> InferenceError:
    """FrameError."""
    try:
        # JSON may spell halves of surrogate pairs, which no answer of the server's can carry.
        text = str(value["message"])[:MAX_TEXT_BYTES].encode("utf-8", "replace").decode()
        return InferenceError(ErrorCode[value["code"]], text)
    except (KeyError, TypeError) as error:
        raise FrameError(f"no error: {value!r:.100}") from error


def _add_reply(
    reply: Reply, described: list[bytes], at: int, outputs: Mapping[str, int], place: Place, data: list[Buffer]
) -> int:
    """Describe a reply. Outputs that the configuration does not have are left out, as if nobody had asked for them."""
    parameters = b""
    if isinstance(reply, Answer):
        size = at
        for tensor in reply.outputs:
            size += len(tensor.data)
        try:
            if size > MAX_ANSWER_BYTES:
                raise ValueError(f"the batch's outputs take {size} bytes, at most {MAX_ANSWER_BYTES} are allowed")
            if reply.parameters:
                parameters = _parameters_text(reply.parameters)
        except ValueError as error:
            reply = InferenceError(ErrorCode.INTERNAL, str(error))
    if isinstance(reply, Answer):
        head = len(described)
        described.append(b"")
        count = 0
        for tensor in reply.outputs:
            position = outputs.get(tensor.name)
            if position is not None:
                said, at = _describe(tensor, position, at, place, data)
                described.append(said)
                count += 1
                if count > len(outputs):
                    break  # one of them twice, which is the answer's fault whatever follows
        described[head] = _REPLY.pack(_ANSWERED, 0, count, len(parameters)) + parameters
    elif reply is None:
        described.append(_REPLY.pack(_OPEN, 0, 0, 0))
    else:
        text = reply.message.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
        described.append(_REPLY.pack(_ERROR, _CODE_NUMBERS[reply.code], 0, len(text)) + text)
    return at


def _read_reply(body: memoryview, at: int, base: int, outputs: Sequence[str], locate: Locate) -> "tuple[Reply, int]":
    """A reply, and where the next one begins."""
    what, code, count, length = _REPLY.unpack_from(body, at)
    at += _REPLY.size
    if length > MAX_TEXT_BYTES or count > len(outputs) + 1:
        raise FrameError(f"a reply with {count} outputs and {length} bytes of text")
    if what == _ANSWERED:
        parameters: Mapping[str, ParameterValue] = NO_PARAMETERS
        if length:
            parameters = _parameters(body[at : at + length])
            at += length
        tensors, at = _read_tensors(body, at, base, count, outputs, locate)
        return Answer(tensors, parameters), at
    if what == _ERROR:
        return InferenceError(_CODES[code], str(body[at : at + length], "utf-8", "replace")), at + length
    if what == _OPEN:
        return None, at
    raise FrameError(f"a reply of kind {what}")


def _read_tensors(
    body: memoryview, at: int, base: int, count: int, names: Sequence[str] | None, locate: Locate
) -> tuple[list[Tensor], int]:
    """Tensors that a worker has sent, and what follows them. Without `names` each has its own as text, which the number
    in its place is the length of."""
    tensors = []
    for _ in range(count):
        position, number, dimensions, segment, offset, size = _TENSOR.unpack_from(body, at)
        at += _TENSOR.size
        shape = _DIMENSIONS[dimensions].unpack_from(body, at)
        at += dimensions * 8
        if names is not None:
            name = names[position]
        else:
            name = str(body[at : at + position], "utf-8")
            at += position
        datatype = _DATATYPES[number]
        if segment:
            payload: Buffer = locate(segment, offset, size)
            if datatype is DataType.BYTES:
                # The sender may still write to it. Numbers are sent on as they are, whatever they are then; elements
                # are walked by their lengths, which must not change once they were checked.
                payload = bytes(payload)
        else:
            start = base + offset
            stop = start + size
            if stop > len(body):
                raise FrameError(f"a tensor that ends at byte {stop} of {len(body)}")
            payload = body[start:stop]
        tensors.append(Tensor(name, datatype, shape, payload))
    return tensors, at


def _parameters_text(parameters: Mapping[str, ParameterValue], of: str = "response") -> bytes:
    """ValueError, also from a number of more digits than Python writes. Half of a surrogate pair is replaced."""
    text = json.dumps(dict(parameters), ensure_ascii=False).encode("utf-8", "replace")
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"the {of}'s parameters take {len(text)} bytes, at most {MAX_TEXT_BYTES} are allowed")
    return text


def _parameters(text: Buffer) -> Mapping[str, ParameterValue]:
    value = decode_json(text)
    if not isinstance(value, dict) or not all(isinstance(each, bool | int | float | str) for each in value.values()):
        raise FrameError("parameters that are none")
    for name, each in value.items():
        f"{name}{each}".encode()  # ValueError for half of a surrogate pair
    return value
