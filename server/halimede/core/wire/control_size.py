"""How large a request may be that is no inference.

Such a request is parsed in one call, which holds the event loop for up to 0.1 ms per KiB (a list of empty lists): one
of 64 MiB would stop the server for six seconds. What is honoured of them are names, numbers and flags. The files that
a load request may have are not: when they are, they are to be read in steps.
"""

from halimede.core.types import ErrorCode, InferenceError

MAX_CONTROL_BYTES = 64 << 10


def control_too_large(what: str, size_bytes: int | str) -> InferenceError:
    """The refusal of a request of more than MAX_CONTROL_BYTES; `what` it asks for. The size may be said in words."""
    return InferenceError(
        ErrorCode.INVALID_ARG,
        f"{what}: the request has {size_bytes} bytes, at most {MAX_CONTROL_BYTES} are taken. Configurations and files "
        "are not taken with a request: a model loads as it is on disk.",
    )
