"""The frames of inferences, with their size limits, and the layout of those that consist of a few numbers.

Standard library only, for any CPython from 3.10 on.
"""

import struct

from halimede.channel.frames import MAX_CONTROL_BYTES, FrameKind
from halimede.core.types import ErrorCode

MAX_ANSWER_BYTES = 1 << 30
"""Maximum bytes of the answers of one batch, and of the inputs of an inference. Workers never send a frame with
more."""

MAX_CLIENT_TEXT_BYTES = 16 << 20
"""Maximum bytes of each text of a client's request: its id, its correlation, its parameters as JSON."""

MAX_CALL_TENSORS = 4096
"""Maximum inputs of an inference that a process requests, and of outputs that it names."""

CALL = struct.Struct("<I")
TAKEN = struct.Struct("<II")


class InferenceFrame(FrameKind):
    """Inferences that a process requests: of its model's code, or of its clients."""

    CALL_ANSWER = 10
    """An answer to an INFER."""

    INFER = 42, MAX_ANSWER_BYTES + MAX_CONTROL_BYTES
    """An inference that the model's code requests."""
    CANCEL_CALL = 43, CALL.size
    """The number of an INFER whose caller no longer needs it."""
    TAKEN = 44, TAKEN.size
    """The number of an INFER, and the number of its answers, none of them final, that were received."""
    ASK_CANCEL_CALL = 50, CALL.size
    """The number of an INFER whose model may stop. Its caller still reads the answers."""


# As numbers: looking up a member of an Enum costs as much as a small method.
INFER, CALL_ANSWER = int(InferenceFrame.INFER), int(InferenceFrame.CALL_ANSWER)

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
