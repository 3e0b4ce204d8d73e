"""The messages between the server and a worker process: an explicit codec, little-endian, the same on both sides.

A frame is its length and kind, four bytes each, and a body. Bodies that carry tensors have a part with their shapes and
places, and then the bytes of those that travel in the frame itself, at multiples of 16 from the frame's start; the
others lie in segments (`workers.segments`). Names of inputs and outputs travel as positions in the configuration, but
those of calls, which are another model's, as text. Control messages are JSON.

What a frame says of its requests and tensors is nearly always what one before it said. So numbers of a frame's own
(keys, times) stand apart from this description, and what was read of one is remembered by its bytes: a form, which
becomes requests and tensors over the frame's own bytes.

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

REMEMBERED_BYTES = 4 << 10
"""A longer description is read, and made, each time."""

_REMEMBERED = 128
"""Descriptions of each kind that are remembered: those of the shapes and sizes of batches that came last."""

_REMEMBERED_TENSORS = 16
"""A description of more is made each time."""

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
    HELD_UP = 46
    """The number of an INFER, and the batch that waits for it; 0 where all that the process does waits."""


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
HELD_UP = struct.Struct("<II")
METRIC = struct.Struct("<IBd")

INBOUND, OUTBOUND, BORROWED = 0, 1, 2
"""What a segment is for, as the server names it: requests, answers, or reading what another worker answered."""

FIRST_BORROWED = 1 << 15
"""Numbers of borrowed segments begin here, those of a worker's own at 1."""

METRIC_OPERATIONS = ("increment", "set", "observe")
PLACE_END = "\x1f"
"""Between a line of log's place, where it has one, and its text."""

LOG_LEVELS = ("ERROR", "WARNING", "INFO", "VERBOSE")

# Each begins with the length of the description.
# Batch, number of requests or replies. The keys of an EXECUTE's requests stand between this and its description.
_BATCH = struct.Struct("<IIH")
# correlation, timeout, rows, length of parameters, of id, of a text correlation (NUMERIC for a number), START and END,
# number of inputs, of outputs.
_REQUEST = struct.Struct("<QQIIIIBHH")
_NUMERIC = 0xFFFFFFFF
# position of the name or its length, datatype, number of dimensions, segment (0 for the frame itself), offset, length.
_TENSOR = struct.Struct("<HBBHQQ")
# What ends a DONE's description: whether it failed, times, bytes that found no room.
_DONE = struct.Struct("<B3QQ")
# what it is, error code, number of outputs, length of the error's text or the parameters.
_REPLY = struct.Struct("<BBHI")
# key, whether it is final, when the execution began, when it was sent.
_RESPONSE = struct.Struct("<IQBQQ")
# number, batch, bytes that found no room; then, remembered with the description: correlation, timeout, priority, START,
# END and whether one answer is wanted, number of inputs, of outputs, length of the model's name, of the version, of id,
# of parameters, of a text correlation.
_INFER_OWN = struct.Struct("<IIIQ")
_INFER = struct.Struct("<QQQBHHHHIII")
# number; then, remembered with the description: whether it is final, whether it is an error and its code, number of
# outputs, length of the model's name, of the version, of id, of the error's text or the parameters.
_CALL_ANSWER_OWN = struct.Struct("<II")
_CALL_ANSWER = struct.Struct("<BBBHHHII")
# Each with the header before it.
_WHOLE_BATCH, _WHOLE_RESPONSE = struct.Struct("<IIIIH"), struct.Struct("<IIIQBQQ")
_WHOLE_INFER, _WHOLE_CALL_ANSWER = struct.Struct("<IIIIIQ"), struct.Struct("<IIII")
_LENGTH = struct.Struct("<H")
_POSITION = struct.Struct("<H")
_BATCH_PEEK = struct.Struct("<4xIH")
_DIMENSIONS = tuple(struct.Struct(f"<{count}q") for count in range(MAX_DIMENSIONS + 1))

_ANSWERED, _ERROR, _OPEN = 0, 1, 2
# As numbers: to look up a member of an Enum costs as much as a small method.
EXECUTE, DONE, RESPONSE = int(Kind.EXECUTE), int(Kind.DONE), int(Kind.RESPONSE)
INFER, CALL_ANSWER = int(Kind.INFER), int(Kind.CALL_ANSWER)
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
    Kind.HELD_UP: HELD_UP.size,
}
"""The largest body of each kind that a worker sends."""

_INVALID, _BYTES = DataType.INVALID, DataType.BYTES
_DATATYPES = {each.number: each for each in DataType if each is not DataType.INVALID}

Place = Callable[[Buffer], "tuple[int, int] | None"]
"""Where a tensor's bytes are put beside the frame: segment (from 1) and offset; None for in the frame."""

Locate = Callable[[int, int, int], Buffer]
"""The bytes at segment, offset and length; ValueError when they are none that the sender may name."""

_TensorForm = tuple[str, DataType, tuple[int, ...], int, int, int]
"""Name, datatype, shape, segment (0 for the frame itself), offset, length."""


def frame(kind: Kind, body: bytes = b"") -> bytes:
    """A whole frame."""
    return HEADER.pack(len(body), kind) + body


def json_body(value: Any) -> bytes:
    return json.dumps(value).encode()


def json_frame(kind: Kind, value: Any) -> bytes:
    return frame(kind, json_body(value))


@lru_cache(8 * _REMEMBERED)
def _describe(name: int | str, datatype: DataType, shape: tuple[int, ...], segment: int, at: int, size: int) -> bytes:
    """What a frame says of a tensor, whose name is text or a position. struct.error, ValueError."""
    text = _short_text(name) if isinstance(name, str) else b""
    position = len(text) if isinstance(name, str) else name
    dimensions = len(shape)
    tensor = _TENSOR.pack(position, datatype.number, dimensions, segment, at, size)
    return tensor + _DIMENSIONS[dimensions].pack(*shape) + text


def _add(tensor: Tensor, name: int | str, described: list[bytes], at: int, place: Place, data: list[Buffer]) -> int:
    """Describe a tensor, whose bytes are added to `data` when they travel with it, at `at`; returns what is `at` for
    the next one."""
    payload = tensor.data
    size = len(payload)
    put = None if size <= INLINE_BYTES else place(payload)
    if put is not None:
        described.append(_describe(name, tensor.datatype, tensor.shape, *put, size))
        return at
    described.append(_describe(name, tensor.datatype, tensor.shape, 0, at, size))
    data.append(payload)
    over = -size & 15
    if over:
        data.append(_PADDING[over])
    return at + size + over


_PADDING = tuple(bytes(count) for count in range(16))


def _base(described_end: int) -> int:
    """Where in the body the tensors' bytes begin. Offsets count from the frame's start, which is its header's."""
    return (described_end + HEADER.size + 15 & ~15) - HEADER.size


def encode_execute(
    batch: int, items: Sequence[BatchItem], inputs: Mapping[str, int], outputs: Mapping[str, int], place: Place
) -> Buffer:
    """An EXECUTE frame. `inputs` and `outputs` are the positions of the names."""
    keys: list[int] = []
    described: list[bytes] = []
    data: list[Buffer] = []
    at = 0
    for item in items:
        keys.append(item.key)
        request = item.request
        tensors, wanted = request.inputs, request.outputs
        if len(wanted) == len(outputs):
            wanted = ()  # All of them, each once, is what naming none means.
        flags = request.sequence_start | request.sequence_end << 1
        if request.id or request.sequence_id or request.parameters:
            parameters = json.dumps(request.parameters).encode() if request.parameters else b""
            texts = _texts_of(request, parameters, _replaced)
            described.append(_request_text(request.timeout_us, item.rows, flags, len(tensors), len(wanted), texts))
        else:
            described.append(_known_request_text(request.timeout_us, item.rows, flags, len(tensors), len(wanted)))
        if wanted:
            described.extend([_POSITION.pack(outputs[name]) for name in wanted])
        for tensor in tensors:
            at = _add(tensor, inputs[tensor.name], described, at, place, data)
    count = len(keys)
    head = _execute_head(count)
    whole = b"".join(described)
    pad = _PADDING[-(head.size + len(whole)) & 15]
    length = head.size - HEADER.size + len(whole) + len(pad) + at
    return b"".join((head.pack(length, EXECUTE, len(whole), batch, count, *keys), whole, pad, *data))


@lru_cache(_REMEMBERED)
def _execute_head(count: int) -> struct.Struct:
    """What stands before an EXECUTE's description: header, _BATCH and keys."""
    return struct.Struct(f"<IIIIH{count}Q")


_Texts = tuple[int, int, int, int, bytes]
"""The correlation, if it is a number; the lengths of parameters, id and a text correlation; id, that and parameters."""

_NO_TEXTS: _Texts = 0, 0, 0, _NUMERIC, b""


def _request_text(
    timeout_us: int, rows: int, flags: int, n_inputs: int, n_outputs: int, texts: _Texts = _NO_TEXTS
) -> bytes:
    number, parameters, request_id, correlation, text = texts
    lengths = parameters, request_id, correlation
    return _REQUEST.pack(number, timeout_us, rows, *lengths, flags, n_inputs, n_outputs) + text


_known_request_text = lru_cache(_REMEMBERED)(_request_text)


def _texts_of(request: InferenceRequest, parameters: bytes, encode: Callable[[str], bytes]) -> _Texts:
    request_id = encode(request.id)
    if isinstance(request.sequence_id, str):
        text = encode(request.sequence_id)
        return 0, len(parameters), len(request_id), len(text) if text else _NUMERIC, request_id + text + parameters
    return request.sequence_id, len(parameters), len(request_id), _NUMERIC, request_id + parameters


def _replaced(value: str) -> bytes:
    """Half of a surrogate pair is replaced."""
    return value.encode("utf-8", "replace")


@dataclass(slots=True)
class Execute:
    """What a worker is to run."""

    batch: int
    items: list[BatchItem]


def decode_execute(
    body: memoryview, inputs: tuple[str, ...], outputs: tuple[str, ...], model: str, locate: Locate
) -> Execute:
    """The worker's reading of an EXECUTE frame's body, which the server has made. Tensors are views of `body`."""
    length, batch, count = _BATCH.unpack_from(body)
    start = _BATCH.size + count * KEY.size
    end = start + length
    if length <= REMEMBERED_BYTES:
        forms = _known_requests(bytes(body[start:end]), count, inputs, outputs)
    else:
        forms = _requests(body[start:end], count, inputs, outputs)
    base = _base(end)
    items = []
    for (key,), (rows, request_id, tensors, wanted, parameters, timeout_us, correlation, starts, ends) in zip(
        KEY.iter_unpack(body[_BATCH.size : start]), forms, strict=True
    ):
        request = InferenceRequest(
            model,
            "",
            request_id,
            _tensors(tensors, body, base, locate, False),
            wanted,
            json.loads(parameters) if parameters else {},
            0,
            timeout_us,
            correlation,
            starts,
            ends,
        )
        items.append(BatchItem(key, request, rows, False))
    return Execute(batch, items)


_RequestForm = tuple[int, str, Sequence[_TensorForm], tuple[str, ...], bytes, int, int | str, bool, bool]
"""Rows, id, inputs, outputs, parameters as JSON, timeout, correlation, START, END."""


def _requests(
    described: Buffer, count: int, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> Sequence[_RequestForm]:
    forms: list[_RequestForm] = []
    at = 0
    for _ in range(count):
        (correlation, timeout_us, rows, parameters_length, id_length, text_length, flags, n_inputs, n_outputs) = (
            _REQUEST.unpack_from(described, at)
        )
        at += _REQUEST.size
        request_id = str(described[at : at + id_length], "utf-8")
        at += id_length
        if text_length != _NUMERIC:
            correlation = str(described[at : at + text_length], "utf-8")
            at += text_length
        parameters = bytes(described[at : at + parameters_length])
        at += parameters_length
        end = at + n_outputs * _POSITION.size
        wanted = tuple([outputs[position] for (position,) in _POSITION.iter_unpack(described[at:end])])
        tensors, at = _tensor_forms(described, end, n_inputs, inputs)
        forms.append(
            (rows, request_id, tensors, wanted, parameters, timeout_us, correlation, bool(flags & 1), bool(flags & 2))
        )
    return forms


_known_requests = lru_cache(_REMEMBERED)(_requests)


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
    if retained:
        described.extend([BLOCK.pack(*block) for block in retained])
    described.append(_DONE.pack(failed, *times, wanted_bytes))
    whole = b"".join(described)
    pad = _PADDING[-(_WHOLE_BATCH.size + len(whole)) & 15]
    length = _BATCH.size + len(whole) + len(pad) + at
    return b"".join((_WHOLE_BATCH.pack(length, DONE, len(whole), batch, count), whole, pad, *data))


def batch_of(body: Buffer) -> tuple[int, int]:
    """Which batch a DONE frame ends, and with how many replies, from the beginning of its body. FrameError."""
    if len(body) < _BATCH.size:
        raise FrameError(f"DONE: {len(body)} bytes")
    number, count = _BATCH_PEEK.unpack_from(body)
    return number, count


def decode_done(body: memoryview, outputs: tuple[str, ...], locate: Locate) -> Done:
    """The server's reading of a DONE frame's body. FrameError. Tensors in the frame are views of `body`."""
    try:
        length, batch, count = _BATCH.unpack_from(body)
        end = _BATCH.size + length
        stop = end - _DONE.size
        if end > len(body) or stop < _BATCH.size:
            raise FrameError("DONE: a description that ends too early")
        failed, received, begun, ended, wanted_bytes = _DONE.unpack_from(body, stop)
        if length <= REMEMBERED_BYTES:
            forms, retained = _known_replies(bytes(body[_BATCH.size : stop]), count, outputs)
        else:
            forms, retained = _replies(body[_BATCH.size : stop], count, outputs)
        replies = _made(forms, body, _base(end), locate)
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"DONE: {_wrong(error)}") from error
    return Done(batch, replies, bool(failed), (received, begun, ended), wanted_bytes, [*retained])


@dataclass(slots=True)
class Response:
    """An answer ahead of its batch's end or after it. Times are monotonic nanoseconds: when the execution of its
    request began, and when the model sent it."""

    key: int
    reply: Reply
    final: bool
    times: tuple[int, int]


def encode_response(
    key: int, reply: Reply, final: bool, times: tuple[int, int], outputs: Mapping[str, int], place: Place
) -> Buffer:
    """A RESPONSE frame."""
    described: list[bytes] = []
    data: list[Buffer] = []
    size = _add_reply(reply, described, 0, outputs, place, data)
    whole = b"".join(described)
    pad = _PADDING[-(_WHOLE_RESPONSE.size + len(whole)) & 15]
    length = _RESPONSE.size + len(whole) + len(pad) + size
    return b"".join((_WHOLE_RESPONSE.pack(length, RESPONSE, len(whole), key, final, *times), whole, pad, *data))


def decode_response(body: memoryview, outputs: tuple[str, ...], locate: Locate) -> Response:
    """The server's reading of a RESPONSE frame's body. FrameError."""
    try:
        length, key, final, begun_ns, sent_ns = _RESPONSE.unpack_from(body)
        end = _RESPONSE.size + length
        if end > len(body):
            raise FrameError("RESPONSE: a description that ends too early")
        forms, retained = _replies(body[_RESPONSE.size : end], 1, outputs)
        if retained:
            raise FrameError("RESPONSE: blocks")
        (reply,) = _made(forms, body, _base(end), locate)
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"RESPONSE: {_wrong(error)}") from error
    return Response(key, reply, bool(final), (begun_ns, sent_ns))


def encode_infer(number: int, batch: int, request: InferenceRequest, place: Place, wanted: Callable[[], int]) -> Buffer:
    """An INFER frame. `wanted` says, when all is placed, how many bytes found no room. ValueError, struct.error."""
    size = 0
    for tensor in request.inputs:
        size += len(tensor.data)
        if tensor.datatype is _INVALID:
            raise ValueError(f"input '{tensor.name}' has no datatype")
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"the inputs take {size} bytes, at most {MAX_ANSWER_BYTES} are allowed")
    if len(request.inputs) > MAX_CALL_TENSORS or len(request.outputs) > MAX_CALL_TENSORS:
        raise ValueError(f"at most {MAX_CALL_TENSORS} inputs and as many outputs are allowed")
    is_plain = not (request.id or request.sequence_id or request.parameters)
    parameters = _parameters_text(request.parameters, "request") if request.parameters else b""
    texts = _NO_TEXTS if is_plain else _texts_of(request, parameters, _text)
    described: list[bytes] = []
    data: list[Buffer] = []
    at = 0
    for tensor in request.inputs:
        at = _add(tensor, tensor.name, described, at, place, data)
    is_short = is_plain and len(described) + len(request.outputs) <= _REMEMBERED_TENSORS
    whole = (_known_call_text if is_short else _call_text)(
        request.model_name,
        request.model_version,
        request.outputs,
        request.timeout_us,
        request.priority,
        request.sequence_start | request.sequence_end << 1 | request.wants_one << 2,
        texts,
        *described,
    )
    length = len(whole) - _INFER.size
    head = _WHOLE_INFER.pack(_INFER_OWN.size + len(whole) + at, INFER, length, number, batch, wanted())
    return b"".join((head, whole, *data))


def _call_text(
    model_name: str,
    model_version: str,
    outputs: tuple[str, ...],
    timeout_us: int,
    priority: int,
    flags: int,
    texts: _Texts,
    *tensors: bytes,
) -> bytes:
    """An INFER's description, and what is between that and its tensors' bytes."""
    model, version = _short_text(model_name), _short_text(model_version)
    numeric, parameters, request_id, correlation, text = texts
    lengths = len(tensors), len(outputs), len(model), len(version), request_id, parameters, correlation
    numbers = _INFER.pack(numeric, timeout_us, priority, flags, *lengths)
    names = [_LENGTH.pack(len(name)) + name for name in map(_short_text, outputs)]
    described = b"".join((numbers, model, version, text, *names, *tensors))
    return described + _PADDING[-(_WHOLE_INFER.size + len(described)) & 15]


_known_call_text = lru_cache(_REMEMBERED)(_call_text)


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
        length, number, batch, wanted_bytes = _INFER_OWN.unpack_from(body)
        end = _INFER_OWN.size + _INFER.size + length
        if end > len(body):
            raise FrameError("INFER: a description that ends too early")
        described = body[_INFER_OWN.size : end]
        model, version, request_id, inputs, outputs, parameters, priority, timeout_us, correlation, flags = (
            _known_call(bytes(described)) if length <= REMEMBERED_BYTES else _call(described)
        )
        tensors = _tensors(inputs, body, _base(end), locate, True)
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"INFER: {_wrong(error)}") from error
    request = InferenceRequest(
        model,
        version,
        request_id,
        tensors,
        outputs,
        dict(parameters) if parameters else {},
        priority,
        timeout_us,
        correlation,
        *flags,
    )
    return Infer(number, batch, request, wanted_bytes)


_Flags = tuple[bool, ...]
_CallForm = tuple[
    str, str, str, Sequence[_TensorForm], tuple[str, ...], Mapping[str, ParameterValue], int, int, int | str, _Flags
]
"""Model, version, id, inputs, outputs, parameters, priority, timeout, correlation; START, END, whether one answer is
wanted."""


def _call(described: Buffer) -> _CallForm:
    """FrameError, struct.error, ValueError, KeyError."""
    (
        correlation, timeout_us, priority, flags, n_inputs, n_outputs,
        model_length, version_length, id_length, parameters_length, correlation_length,
    ) = _INFER.unpack_from(described)  # fmt: skip
    texts = id_length + parameters_length + (correlation_length if correlation_length != _NUMERIC else 0)
    if n_inputs > MAX_CALL_TENSORS or n_outputs > MAX_CALL_TENSORS or texts > 3 * MAX_TEXT_BYTES:
        raise FrameError(f"INFER: {n_inputs} inputs, {n_outputs} outputs and {texts} bytes of text")
    at = _INFER.size
    model = str(described[at : at + model_length], "utf-8")
    at += model_length
    version = str(described[at : at + version_length], "utf-8")
    at += version_length
    request_id = str(described[at : at + id_length], "utf-8")
    at += id_length
    if correlation_length != _NUMERIC:
        correlation = str(described[at : at + correlation_length], "utf-8")
        at += correlation_length
    parameters = _parameters(described[at : at + parameters_length]) if parameters_length else NO_PARAMETERS
    at += parameters_length
    outputs, at = _read_names(described, at, n_outputs)
    tensors, at = _tensor_forms(described, at, n_inputs, None)
    # What was read beyond the description's end was read for something else than it is.
    if at > len(described):
        raise FrameError("INFER: a description that ends too early")
    saying = bool(flags & 1), bool(flags & 2), bool(flags & 4)
    return model, version, request_id, tensors, outputs, parameters, priority, timeout_us, correlation, saying


_known_call = lru_cache(_REMEMBERED)(_call)


def _read_names(described: Buffer, at: int, count: int) -> tuple[tuple[str, ...], int]:
    names = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(described, at)
        at += _LENGTH.size
        names.append(str(described[at : at + length], "utf-8"))
        at += length
    return tuple(names), at


def encode_call_answer(number: int, response: InferenceResponse, place: Place) -> Buffer:
    """A CALL_ANSWER frame."""
    described: list[bytes] = []
    data: list[Buffer] = []
    at = 0
    error = response.error
    if error is None:
        text = json.dumps(response.parameters).encode() if response.parameters else b""
        for tensor in response.outputs:
            at = _add(tensor, tensor.name, described, at, place, data)
    else:
        text = error.message.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
    is_short = not text and len(described) <= _REMEMBERED_TENSORS
    whole = (_known_answer_text if is_short and not response.id else _answer_text)(
        response.model_name,
        response.model_version,
        response.id,
        text,
        response.final,
        None if error is None else error.code,
        *described,
    )
    head = _WHOLE_CALL_ANSWER.pack(
        _CALL_ANSWER_OWN.size + len(whole) + at, CALL_ANSWER, len(whole) - _CALL_ANSWER.size, number
    )
    return b"".join((head, whole, *data))


def _answer_text(
    model_name: str, model_version: str, name: str, text: bytes, final: bool, code: ErrorCode | None, *tensors: bytes
) -> bytes:
    """A CALL_ANSWER's description, and what is between that and its tensors' bytes."""
    model, version, request_id = _short_text(model_name), _short_text(model_version), _text(name)
    number = 0 if code is None else _CODE_NUMBERS[code]
    lengths = len(tensors), len(model), len(version), len(request_id), len(text)
    numbers = _CALL_ANSWER.pack(final, code is not None, number, *lengths)
    described = b"".join((numbers, model, version, request_id, text, *tensors))
    return described + _PADDING[-(_WHOLE_CALL_ANSWER.size + len(described)) & 15]


_known_answer_text = lru_cache(_REMEMBERED)(_answer_text)


def decode_call_answer(body: memoryview, locate: Locate) -> tuple[int, InferenceResponse]:
    """The worker's reading of a CALL_ANSWER frame's body, which the server has made: which INFER it answers, and how.

    Tensors are views of `body`.
    """
    length, call = _CALL_ANSWER_OWN.unpack_from(body)
    end = _CALL_ANSWER_OWN.size + _CALL_ANSWER.size + length
    described = body[_CALL_ANSWER_OWN.size : end]
    form = _known_answer(bytes(described)) if length <= REMEMBERED_BYTES else _answer(described)
    model, version, request_id, tensors, parameters, code, text, final = form
    response = InferenceResponse(
        model,
        version,
        request_id,
        _tensors(tensors, body, _base(end), locate, False),
        json.loads(parameters) if parameters else {},
        None if code is None else InferenceError(code, text),
        final,
    )
    return call, response


_AnswerForm = tuple[str, str, str, Sequence[_TensorForm], bytes, ErrorCode | None, str, bool]
"""Model, version, id, outputs, parameters as JSON, the error's code, its text, whether it is final."""


def _answer(described: Buffer) -> _AnswerForm:
    final, is_error, code, count, model_length, version_length, id_length, text_length = _CALL_ANSWER.unpack_from(
        described
    )
    at = _CALL_ANSWER.size
    model = str(described[at : at + model_length], "utf-8")
    at += model_length
    version = str(described[at : at + version_length], "utf-8")
    at += version_length
    request_id = str(described[at : at + id_length], "utf-8")
    at += id_length
    text = bytes(described[at : at + text_length])
    tensors, _ = _tensor_forms(described, at + text_length, count, None)
    if is_error:
        return model, version, request_id, tensors, b"", _CODES[code], str(text, "utf-8", "replace"), bool(final)
    return model, version, request_id, tensors, text, None, "", bool(final)


_known_answer = lru_cache(_REMEMBERED)(_answer)


def _text(value: str) -> bytes:
    """As `_replaced`. ValueError when it is too long for one field."""
    text = _replaced(value)
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"a text of {len(text)} bytes, at most {MAX_TEXT_BYTES} are allowed")
    return text


@lru_cache(maxsize=128)
def _short_text(value: str) -> bytes:
    """As `_text`, for what has 16 bits of length: names of models and tensors, the same ones again and again."""
    text = _replaced(value)
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
    if isinstance(reply, Answer):
        size = at
        for tensor in reply.outputs:
            size += len(tensor.data)
        try:
            if size > MAX_ANSWER_BYTES:
                raise ValueError(f"the batch's outputs take {size} bytes, at most {MAX_ANSWER_BYTES} are allowed")
            parameters = _parameters_text(reply.parameters) if reply.parameters else b""
        except ValueError as error:
            return _add_reply(InferenceError(ErrorCode.INTERNAL, str(error)), described, at, outputs, place, data)
        head = len(described)
        described.append(b"")
        count = 0
        for tensor in reply.outputs:
            position = outputs.get(tensor.name)
            if position is not None:
                at = _add(tensor, position, described, at, place, data)
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


_ReplyForm = tuple[Sequence[_TensorForm], Mapping[str, ParameterValue], ErrorCode | None, str] | None
"""Outputs, parameters, the error's code, its text; None for a request that stays open."""


def _replies(
    described: Buffer, count: int, outputs: tuple[str, ...]
) -> tuple[Sequence[_ReplyForm], Sequence[tuple[int, int]]]:
    """Replies and, after them, blocks. FrameError, struct.error, IndexError, KeyError, ValueError."""
    forms: list[_ReplyForm] = []
    at = 0
    for _ in range(count):
        what, code, n_outputs, length = _REPLY.unpack_from(described, at)
        at += _REPLY.size
        if length > MAX_TEXT_BYTES or n_outputs > len(outputs) + 1:
            raise FrameError(f"a reply with {n_outputs} outputs and {length} bytes of text")
        text = described[at : at + length]
        if what == _ANSWERED:
            tensors, at = _tensor_forms(described, at + length, n_outputs, outputs)
            forms.append((tensors, _parameters(text) if length else NO_PARAMETERS, None, ""))
        elif what == _ERROR:
            forms.append(((), NO_PARAMETERS, _CODES[code], str(text, "utf-8", "replace")))
            at += length
        elif what == _OPEN:
            forms.append(None)
        else:
            raise FrameError(f"a reply of kind {what}")
    # What was read beyond the description's end was read for something else than it is.
    if at > len(described):
        raise FrameError("a description that ends too early")
    return forms, decode_blocks(described[at:]) if at < len(described) else ()


_known_replies = lru_cache(_REMEMBERED)(_replies)


def _made(forms: Sequence[_ReplyForm], body: memoryview, base: int, locate: Locate) -> list[Reply]:
    replies: list[Reply] = []
    for form in forms:
        if form is None:
            replies.append(None)
            continue
        tensors, parameters, code, text = form
        if code is not None:
            replies.append(InferenceError(code, text))
            continue
        outputs = _tensors(tensors, body, base, locate, True)
        replies.append(Answer(outputs, dict(parameters) if parameters else NO_PARAMETERS))
    return replies


def _tensor_forms(
    described: Buffer, at: int, count: int, names: tuple[str, ...] | None
) -> tuple[Sequence[_TensorForm], int]:
    """What is said of tensors, and where that ends. Without `names` each has its own as text, which the number in its
    place is the length of. struct.error, ValueError, IndexError, KeyError."""
    forms: list[_TensorForm] = []
    for _ in range(count):
        position, number, dimensions, segment, offset, size = _TENSOR.unpack_from(described, at)
        at += _TENSOR.size
        shape = _DIMENSIONS[dimensions].unpack_from(described, at)
        at += dimensions * 8
        if names is not None:
            name = names[position]
        else:
            name = str(described[at : at + position], "utf-8")
            at += position
        forms.append((name, _DATATYPES[number], shape, segment, offset, size))
    return forms, at


def _tensors(
    forms: Sequence[_TensorForm], body: memoryview, base: int, locate: Locate, may_change: bool
) -> list[Tensor]:
    """Tensors whose bytes are in `body` from `base` on, or where `locate` finds them. FrameError.

    `may_change`: the sender may still write to the latter. Numbers are sent on as they are, whatever they are then;
    elements of BYTES are walked by their lengths, which must not change once they were checked.
    """
    tensors = []
    for name, datatype, shape, segment, offset, size in forms:
        if segment:
            payload = locate(segment, offset, size)
            if may_change and datatype is _BYTES:
                payload = bytes(payload)
        else:
            start = base + offset
            stop = start + size
            if stop > len(body):
                raise FrameError(f"a tensor that ends at byte {stop} of {len(body)}")
            payload = body[start:stop]
        tensors.append(Tensor(name, datatype, shape, payload))
    return tensors


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
