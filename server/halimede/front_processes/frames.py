"""The frames between the core and a front-end process."""

from enum import IntEnum

from halimede.channel.frames import CHANNEL_FRAMES, MAX_CONTROL_BYTES, FrameTable
from halimede.workers.frames.kinds import CALL, TAKEN, CallFrame

MAX_INFERS_BYTES = 3 << 30
"""Maximum bytes of the requests in one frame. A front-end process sends larger ones one at a time."""


class FrontFrame(IntEnum):
    """From the core below 32, from the front-end process above."""

    ANSWERS = 14
    """Answers to INFERS."""
    TOLD = 15
    """The number of an ASK, and its result."""
    LEAVE = 16
    """The process is to ask its clients to connect elsewhere."""
    DRAIN = 17
    """The process is to close its ports and connections once their requests are answered."""
    REOPEN = 18
    """The process is to reopen its log file."""

    INFERS = 46
    """Inferences that clients request."""
    ASK = 47
    """A number, and what the process asks the server besides inferences."""
    DRAINED = 48
    """The process has no connection left."""


INFERS, ANSWERS = int(FrontFrame.INFERS), int(FrontFrame.ANSWERS)

FRONT_FRAMES: FrameTable = {
    **CHANNEL_FRAMES,
    CallFrame.CALL_ANSWER: None,
    FrontFrame.ANSWERS: None,
    FrontFrame.TOLD: None,
    FrontFrame.LEAVE: None,
    FrontFrame.DRAIN: None,
    FrontFrame.REOPEN: None,
    CallFrame.CANCEL_CALL: CALL.size,
    CallFrame.TAKEN: TAKEN.size,
    FrontFrame.INFERS: MAX_INFERS_BYTES,
    FrontFrame.ASK: MAX_CONTROL_BYTES,
    FrontFrame.DRAINED: 0,
}
