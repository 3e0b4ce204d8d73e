"""The kinds and size limits of a worker's frames, and the layout of frames that consist of a few numbers.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import struct
from enum import IntEnum

from halimede.channel.frames import CHANNEL_FRAMES, MAX_CONTROL_BYTES, FrameTable
from halimede.core.types import ErrorCode

MAX_ANSWER_BYTES = 1 << 30
"""Maximum bytes of the answers of one batch. Workers never send a frame with more."""

MAX_CLIENT_TEXT_BYTES = 16 << 20
"""Maximum bytes of each text of a client's request: its id, its correlation, its parameters as JSON."""

MAX_LINE_BYTES = 16 << 10
"""Maximum bytes of a log line."""

MAX_UPDATES = 4096
"""Maximum metric updates in one frame."""

MAX_CALLS = 256
"""Maximum service calls of one worker in flight; also the limit for its inferences."""

MAX_CALL_TENSORS = 4096
"""Maximum inputs of an inference that a worker requests, and of outputs that it names."""

WINDOW_RESPONSES = 32
"""Maximum answers of one request that its client has not acknowledged: the worker then waits."""


class WorkerFrame(IntEnum):
    """Batches, and what goes with them. From the server to the worker below 32, from the worker to the server above."""

    EXECUTE = 2
    CANCEL = 3
    """A request's key."""
    CREDIT = 4
    """A request's key, and the number of answers that its client has received since the last CREDIT."""
    ASK_READY = 8
    EXECUTE_NEXT_0 = 12
    """As EXECUTE, for a worker that runs another batch: it begins only if the worker gets its token, the first one of
    `workers.claim`."""
    EXECUTE_NEXT_1 = 13
    """The same with the second token."""
    FORGET = 19
    """A sequence slot whose sequence has ended: its state is to be dropped."""
    ASK_CANCEL = 20
    """A request's key. Its model is to see that it is cancelled, and what the model still answers is wanted."""

    DONE = 34
    RESPONSE = 35
    LOG = 36
    """Level and text."""
    METRICS = 37
    """Metric, operation and value, any number of times."""
    READY = 40
    """Whether the model reports that it is ready."""
    STOPPED = 41
    STATE_FREED = 49
    """Bytes of states of sequences that the worker no longer keeps."""


class CallFrame(IntEnum):
    """Inferences and other calls that a process requests. Numbered as WorkerFrame, without common numbers."""

    SERVICE_RESULT = 7
    """The result of a SERVICE_CALL."""
    CALL_ANSWER = 10
    """An answer to an INFER."""

    SERVICE_CALL = 38
    """What the model's code requests besides inferences."""
    INFER = 42
    """An inference that the model's code requests."""
    CANCEL_CALL = 43
    """The number of an INFER whose caller no longer needs it."""
    TAKEN = 44
    """The number of an INFER, and the number of its answers, none of them final, that were received."""
    ASK_CANCEL_CALL = 50
    """The number of an INFER whose model may stop. Its caller still reads the answers."""


KEY = struct.Struct("<Q")
CREDIT = struct.Struct("<QI")
CALL = struct.Struct("<I")
TAKEN = struct.Struct("<II")
METRIC = struct.Struct("<IBd")
FORGET = struct.Struct("<I")
STATE_FREED = struct.Struct("<Q")

METRIC_OPERATIONS = ("increment", "set", "observe")
ORIGIN_END = "\x1f"
"""Separates the optional origin of a log line from its text."""

LOG_LEVELS = ("ERROR", "WARNING", "INFO", "VERBOSE")


# As numbers: looking up a member of an Enum costs as much as a small method.
EXECUTE, DONE, RESPONSE = int(WorkerFrame.EXECUTE), int(WorkerFrame.DONE), int(WorkerFrame.RESPONSE)
EXECUTE_NEXT = int(WorkerFrame.EXECUTE_NEXT_0), int(WorkerFrame.EXECUTE_NEXT_1)
"""By token."""
INFER, CALL_ANSWER, METRICS = int(CallFrame.INFER), int(CallFrame.CALL_ANSWER), int(WorkerFrame.METRICS)
WORKER_FRAMES: FrameTable = {
    **CHANNEL_FRAMES,
    WorkerFrame.EXECUTE: None,
    WorkerFrame.CANCEL: None,
    WorkerFrame.CREDIT: None,
    CallFrame.SERVICE_RESULT: None,
    WorkerFrame.ASK_READY: None,
    CallFrame.CALL_ANSWER: None,
    WorkerFrame.EXECUTE_NEXT_0: None,
    WorkerFrame.EXECUTE_NEXT_1: None,
    WorkerFrame.FORGET: None,
    WorkerFrame.ASK_CANCEL: None,
    CallFrame.SERVICE_CALL: MAX_CONTROL_BYTES,
    WorkerFrame.DONE: MAX_ANSWER_BYTES + MAX_CONTROL_BYTES,
    WorkerFrame.RESPONSE: MAX_ANSWER_BYTES + MAX_CONTROL_BYTES,
    WorkerFrame.LOG: MAX_LINE_BYTES + 1,
    WorkerFrame.METRICS: MAX_UPDATES * METRIC.size,
    WorkerFrame.READY: 1,
    WorkerFrame.STOPPED: 0,
    CallFrame.INFER: MAX_ANSWER_BYTES + MAX_CONTROL_BYTES,
    CallFrame.CANCEL_CALL: CALL.size,
    CallFrame.ASK_CANCEL_CALL: CALL.size,
    CallFrame.TAKEN: TAKEN.size,
    WorkerFrame.STATE_FREED: STATE_FREED.size,
}
"""The frames between the server and a worker process."""

ERROR_CODES = tuple(ErrorCode)
ERROR_NUMBERS = {code: number for number, code in enumerate(ERROR_CODES)}


def describe_decode_error(error: Exception) -> str:
    """A text for an error that decoding a frame raised."""
    if isinstance(error, struct.error):
        return "a description that ends too early"
    if isinstance(error, KeyError):
        return f"datatype {error}"
    if isinstance(error, IndexError):
        return "the number of an output or an error that does not exist"
    return str(error)
