"""What every frame has: its header, its kind, how large it may be; and the layout of the frames that are a few numbers.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import struct
from enum import IntEnum
from typing import Any

from halimede.core.types import Buffer, ErrorCode

MAX_ANSWER_BYTES = 1 << 30
"""Of one batch's answers: a frame with more, and what describes them, is none of ours."""

MAX_CONTROL_BYTES = 16 << 20
"""Of a frame of JSON, and of a SERVICE_CALL."""

MAX_TEXT_BYTES = 64 << 10
"""Of an error's message, which is cut, and of a reply's parameters."""

MAX_LINE_BYTES = 16 << 10
"""Of a line of log."""

MAX_UPDATES = 4096
"""Changes of metrics in one frame."""

MAX_BLOCKS = 16 << 10
"""Blocks in one frame: an arena has no more of tensors that do not travel in frames."""

MAX_CALLS = 256
"""Service calls of one worker that the server performs at a time; also the limit of its inferences."""

MAX_CALL_TENSORS = 4096
"""Inputs of an inference that a worker asks for, and outputs that it names."""


WINDOW_RESPONSES = 32
"""Answers of one request that its client has not taken yet: the worker sends no more of them."""


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
    SERVICE_RESULT = 7
    """The result of a SERVICE_CALL."""
    ASK_READY = 8
    STOP = 9
    CALL_ANSWER = 10
    """An answer to an INFER."""
    UNMAP = 11
    """The number of a segment of another worker that is to be unmapped."""

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
    SERVICE_CALL = 38
    """What the model's code requests besides inferences."""
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
    """The number of a segment of another worker, and whether it is mapped. After False the worker gets only copies."""


HEADER = struct.Struct("<II")
KEY = struct.Struct("<Q")
CREDIT = struct.Struct("<QI")
CALL = struct.Struct("<I")
TAKEN = struct.Struct("<II")
BLOCK = struct.Struct("<HQ")
SEGMENT = struct.Struct("<HB")
UNMAP = struct.Struct("<H")
MAPPED = struct.Struct("<HB")
METRIC = struct.Struct("<IBd")

INBOUND, OUTBOUND, SHARED = 0, 1, 2
"""What a segment is for: requests, answers, or reading tensors of another worker."""

FIRST_SHARED = 1 << 15
"""Numbers of other workers' segments begin here, those of a worker's own at 1."""

METRIC_OPERATIONS = ("increment", "set", "observe")
PLACE_END = "\x1f"
"""Between a line of log's place, where it has one, and its text."""

LOG_LEVELS = ("ERROR", "WARNING", "INFO", "VERBOSE")


# As numbers: to look up a member of an Enum costs as much as a small method.
EXECUTE, DONE, RESPONSE = int(Kind.EXECUTE), int(Kind.DONE), int(Kind.RESPONSE)
INFER, CALL_ANSWER, METRICS = int(Kind.INFER), int(Kind.CALL_ANSWER), int(Kind.METRICS)
LIMITS = {
    Kind.STARTED: MAX_CONTROL_BYTES,
    Kind.FAILED: MAX_CONTROL_BYTES,
    Kind.SERVICE_CALL: MAX_CONTROL_BYTES,
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

ERROR_CODES = tuple(ErrorCode)
ERROR_NUMBERS = {code: number for number, code in enumerate(ERROR_CODES)}


def encode_frame(kind: Kind, body: bytes = b"") -> bytes:
    """A whole frame."""
    return HEADER.pack(len(body), kind) + body


def unpack(layout: struct.Struct, body: Buffer, kind: Kind) -> tuple[Any, ...]:
    """The numbers of a frame that has nothing else. FrameError."""
    if len(body) != layout.size:
        raise unasked(kind)
    return layout.unpack(body)


def unasked(kind: Kind) -> FrameError:
    return FrameError(f"a {kind.name} frame that was not asked for")


def describe_decode_error(error: Exception) -> str:
    """What was found in a frame, for people."""
    if isinstance(error, struct.error):
        return "a description that ends too early"
    if isinstance(error, KeyError):
        return f"datatype {error}"
    if isinstance(error, IndexError):
        return "the number of an output or an error that there is not"
    return str(error)
