"""The frames of workers, with their size limits, and the layout of those that consist of a few numbers.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import struct

from halimede.channel.frames import MAX_CONTROL_BYTES, ChannelFrame, FrameKind, frame_table
from halimede.inference_frames.kinds import MAX_ANSWER_BYTES, InferenceFrame

MAX_LINE_BYTES = 16 << 10
"""Maximum bytes of a log line."""

MAX_UPDATES = 4096
"""Maximum metric updates in one frame."""

MAX_CALLS = 256
"""Maximum service calls of one worker in flight; also the limit for its inferences."""

WINDOW_RESPONSES = 32
"""Maximum answers of one request that its client has not acknowledged: the worker then waits."""

KEY = struct.Struct("<Q")
CREDIT = struct.Struct("<QI")
METRIC = struct.Struct("<IBd")
FORGET = struct.Struct("<I")
STATE_FREED = struct.Struct("<Q")


class WorkerFrame(FrameKind):
    """Batches and service calls, and what goes with them."""

    EXECUTE = 2
    CANCEL = 3
    """A request's key."""
    CREDIT = 4
    """A request's key, and the number of answers that its client has received since the last CREDIT."""
    SERVICE_RESULT = 7
    """The result of a SERVICE_CALL."""
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

    DONE = 34, MAX_ANSWER_BYTES + MAX_CONTROL_BYTES
    RESPONSE = 35, MAX_ANSWER_BYTES + MAX_CONTROL_BYTES
    LOG = 36, MAX_LINE_BYTES + 1
    """Level and text."""
    METRICS = 37, MAX_UPDATES * METRIC.size
    """Metric, operation and value, any number of times."""
    SERVICE_CALL = 38, MAX_CONTROL_BYTES
    """What the model's code requests besides inferences."""
    READY = 40, 1
    """Whether the model reports that it is ready."""
    STOPPED = 41, 0
    STATE_FREED = 49, STATE_FREED.size
    """Bytes of states of sequences that the worker no longer keeps."""


WORKER_FRAMES = frame_table(ChannelFrame, InferenceFrame, WorkerFrame)
"""The frames between the server and a worker process."""

METRIC_OPERATIONS = ("increment", "set", "observe")
ORIGIN_END = "\x1f"
"""Separates the optional origin of a log line from its text."""

LOG_LEVELS = ("ERROR", "WARNING", "INFO", "VERBOSE")

# As numbers: looking up a member of an Enum costs as much as a small method.
EXECUTE, DONE, RESPONSE = int(WorkerFrame.EXECUTE), int(WorkerFrame.DONE), int(WorkerFrame.RESPONSE)
EXECUTE_NEXT = int(WorkerFrame.EXECUTE_NEXT_0), int(WorkerFrame.EXECUTE_NEXT_1)
"""By token."""
