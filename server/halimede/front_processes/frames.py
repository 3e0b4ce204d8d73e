"""The frames between the core and a front-end process."""

from halimede.channel.frames import MAX_CONTROL_BYTES, ChannelFrame, FrameKind, frame_table
from halimede.inference_frames.kinds import InferenceFrame

MAX_INFERS_BYTES = 3 << 30
"""Maximum bytes of the requests in one frame. A front-end process sends larger ones one at a time."""


class FrontFrame(FrameKind):
    """Requests and answers of a turn of the loop, questions, and the end."""

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

    INFERS = 46, MAX_INFERS_BYTES
    """Inferences that clients request."""
    ASK = 47, MAX_CONTROL_BYTES
    """A number, and what the process asks the server besides inferences."""
    DRAINED = 48, 0
    """The process has no connection left."""


INFERS, ANSWERS = int(FrontFrame.INFERS), int(FrontFrame.ANSWERS)

_INFERENCES = InferenceFrame.CALL_ANSWER, InferenceFrame.CANCEL_CALL, InferenceFrame.TAKEN
FRONT_FRAMES = frame_table(ChannelFrame, _INFERENCES, FrontFrame)
"""Front ends send inferences in INFERS, and no INFER."""
