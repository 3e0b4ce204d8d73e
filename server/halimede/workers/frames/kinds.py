"""The header, kinds and size limits of frames, and the layout of frames that consist of a few numbers.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import struct
from enum import IntEnum
from typing import Any

from halimede.core.types import Buffer, ErrorCode

MAX_ANSWER_BYTES = 1 << 30
"""Maximum bytes of the answers of one batch. Workers never send a frame with more."""

MAX_INFERS_BYTES = 3 << 30
"""Maximum bytes of the requests in one frame. A front-end process sends larger ones one at a time."""

MAX_CONTROL_BYTES = 16 << 20
"""Maximum bytes of a JSON frame, and of a SERVICE_CALL."""

MAX_TEXT_BYTES = 64 << 10
"""Maximum bytes of an error's message, which is cut, and of a reply's parameters."""

MAX_CLIENT_TEXT_BYTES = 16 << 20
"""Maximum bytes of each text of a client's request: its id, its correlation, its parameters as JSON."""

MAX_LINE_BYTES = 16 << 10
"""Maximum bytes of a log line."""

MAX_UPDATES = 4096
"""Maximum metric updates in one frame."""

MAX_BLOCKS = 16 << 10
"""Maximum blocks in one frame: an arena cannot hold more blocks of tensors above INLINE_BYTES."""

MAX_CALLS = 256
"""Maximum service calls of one worker in flight; also the limit for its inferences."""

MAX_CALL_TENSORS = 4096
"""Maximum inputs of an inference that a worker requests, and of outputs that it names."""

WINDOW_RESPONSES = 32
"""Maximum answers of one request that its client has not acknowledged: the worker then waits."""


class FrameError(Exception):
    """A frame that a correct worker never sends."""


class FrameKind(IntEnum):
    """From the server to the worker below 32, from the worker to the server above."""

    START = 1
    """JSON: the worker's spec and its task."""
    EXECUTE = 2
    CANCEL = 3
    """A request's key."""
    CREDIT = 4
    """A request's key, and the number of answers that its client has received since the last CREDIT."""
    RELEASE = 5
    """Blocks of the worker's arena that the server no longer uses."""
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
    EXECUTE_NEXT_0 = 12
    """As EXECUTE, for a worker that runs another batch: it begins only if the worker gets its token, the first one of
    `workers.claim`."""
    EXECUTE_NEXT_1 = 13
    """The same with the second token."""
    ANSWERS = 14
    """Answers to INFERS, for a front-end process."""
    TOLD = 15
    """The number of an ASK, and its result."""
    LEAVE = 16
    """A front-end process is to ask its clients to connect elsewhere."""
    DRAIN = 17
    """A front-end process is to close its ports and connections once their requests are answered."""
    REOPEN = 18
    """A front-end process is to reopen its log file."""
    FORGET = 19
    """A seat whose sequence has ended: its state is to be dropped."""
    ASK_CANCEL = 20
    """A request's key. Its model is to see that it is cancelled, and what the model still answers is wanted."""

    STARTED = 32
    """JSON: properties of the runner, or the result of the task in START."""
    FAILED = 33
    """JSON: code and message of the error of the start."""
    DONE = 34
    RESPONSE = 35
    LOG = 36
    """Level and text."""
    METRICS = 37
    """Metric, operation and value, any number of times."""
    SERVICE_CALL = 38
    """What the model's code requests besides inferences."""
    UNUSED = 39
    """Blocks of the server's arena that the model kept beyond its batch and has now dropped."""
    READY = 40
    """Whether the model reports that it is ready."""
    STOPPED = 41
    INFER = 42
    """An inference that the model's code requests."""
    CANCEL_CALL = 43
    """The number of an INFER whose caller no longer needs it."""
    TAKEN = 44
    """The number of an INFER, and the number of its answers, none of them final, that were received."""
    MAPPED = 45
    """The number of a segment of another worker, and whether the worker reads it in place; else it gets copies."""
    INFERS = 46
    """Inferences that the clients of a front-end process request."""
    ASK = 47
    """A number, and what a front-end process asks the server besides inferences."""
    DRAINED = 48
    """A front-end process has no connection left."""
    STATE_FREED = 49
    """Bytes of states of sequences that the worker no longer keeps."""
    ASK_CANCEL_CALL = 50
    """The number of an INFER whose model may stop. Its caller still reads the answers."""


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
FORGET = struct.Struct("<I")
STATE_FREED = struct.Struct("<Q")

INBOUND, OUTBOUND, SHARED = 0, 1, 2
"""The use of a segment: requests, answers, or reading tensors of another worker."""

FIRST_SHARED = 1 << 15
"""The first number of other workers' segments. A worker's own segments are numbered from 1."""

METRIC_OPERATIONS = ("increment", "set", "observe")
PLACE_END = "\x1f"
"""Separates the optional place of a log line from its text."""

LOG_LEVELS = ("ERROR", "WARNING", "INFO", "VERBOSE")


# As numbers: looking up a member of an Enum costs as much as a small method.
EXECUTE, DONE, RESPONSE = int(FrameKind.EXECUTE), int(FrameKind.DONE), int(FrameKind.RESPONSE)
EXECUTE_NEXT = int(FrameKind.EXECUTE_NEXT_0), int(FrameKind.EXECUTE_NEXT_1)
"""By token."""
INFERS, ANSWERS = int(FrameKind.INFERS), int(FrameKind.ANSWERS)
INFER, CALL_ANSWER, METRICS = int(FrameKind.INFER), int(FrameKind.CALL_ANSWER), int(FrameKind.METRICS)
LIMITS = {
    FrameKind.STARTED: MAX_CONTROL_BYTES,
    FrameKind.FAILED: MAX_CONTROL_BYTES,
    FrameKind.SERVICE_CALL: MAX_CONTROL_BYTES,
    FrameKind.DONE: MAX_ANSWER_BYTES + MAX_CONTROL_BYTES,
    FrameKind.RESPONSE: MAX_ANSWER_BYTES + MAX_CONTROL_BYTES,
    FrameKind.LOG: MAX_LINE_BYTES + 1,
    FrameKind.METRICS: MAX_UPDATES * METRIC.size,
    FrameKind.UNUSED: MAX_BLOCKS * BLOCK.size,
    FrameKind.READY: 1,
    FrameKind.STOPPED: 0,
    FrameKind.INFER: MAX_ANSWER_BYTES + MAX_CONTROL_BYTES,
    FrameKind.CANCEL_CALL: CALL.size,
    FrameKind.ASK_CANCEL_CALL: CALL.size,
    FrameKind.TAKEN: TAKEN.size,
    FrameKind.MAPPED: MAPPED.size,
    FrameKind.INFERS: MAX_INFERS_BYTES,
    FrameKind.ASK: MAX_CONTROL_BYTES,
    FrameKind.DRAINED: 0,
    FrameKind.STATE_FREED: STATE_FREED.size,
}
"""The largest body of each kind that a worker or a front-end process sends."""

ERROR_CODES = tuple(ErrorCode)
ERROR_NUMBERS = {code: number for number, code in enumerate(ERROR_CODES)}


def encode_frame(kind: FrameKind, body: bytes = b"") -> bytes:
    """A whole frame."""
    return HEADER.pack(len(body), kind) + body


def unpack(layout: struct.Struct, body: Buffer, kind: FrameKind) -> tuple[Any, ...]:
    """The numbers of a frame that consists of numbers only. FrameError."""
    if len(body) != layout.size:
        raise unexpected(kind)
    return layout.unpack(body)


def unexpected(kind: FrameKind) -> FrameError:
    return FrameError(f"an unexpected {kind.name} frame")


def describe_decode_error(error: Exception) -> str:
    """A text for an error that decoding a frame raised."""
    if isinstance(error, struct.error):
        return "a description that ends too early"
    if isinstance(error, KeyError):
        return f"datatype {error}"
    if isinstance(error, IndexError):
        return "the number of an output or an error that does not exist"
    return str(error)
