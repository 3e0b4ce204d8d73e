"""The size limit of requests other than inferences.

Such a request is parsed in one call, which blocks the event loop for up to 0.1 ms per KiB (a list of empty lists): one
of 64 MiB would stop the server for six seconds. Only their names, numbers and flags are used. The files of
a load request are not supported; support for them would have to read them in steps.
"""

from halimede.core.types import InferenceError, invalid

MAX_CONTROL_BYTES = 64 << 10


def control_too_large(what: str, size_bytes: int | str) -> InferenceError:
    """The error for a request of more than MAX_CONTROL_BYTES. `what` names the call; the size may be given in words."""
    return invalid(
        f"{what}: the request has {size_bytes} bytes, at most {MAX_CONTROL_BYTES} are taken. Configurations and files "
        "are not accepted in a request: models are loaded from the repository."
    )
