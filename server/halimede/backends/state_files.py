"""Read the files with the initial states of a model's sequences, `<model directory>/initial_state/<data_file>`.

Standard library and numpy only, for any CPython from 3.10 on, because they are read where the model runs.
"""

import os
import stat
from math import prod

from halimede.core.sequences.plan import SequencePlan, State
from halimede.core.types import DataType, invalid
from halimede.core.types.tensor import split_bytes

FOLDER = "initial_state"
MAX_STRINGS_BYTES = 64 << 20
"""Maximum size of a file with strings. The size of other files follows from datatype and dims."""


def read_state_files(plan: SequencePlan, model_directory: str) -> dict[str, bytes]:
    """The contents by the input name of the state. INVALID_ARG for a file that is not a state of its dims."""
    files = {}
    for state in plan.states:
        if state.data_file is not None:
            files[state.input_name] = _read(state, state.data_file, model_directory)
    return files


def _read(state: State, name: str, model_directory: str) -> bytes:
    path = os.path.join(model_directory, FOLDER, name)
    called = f"the initial state of '{state.input_name}'"
    # The checked path is the opened one: it has no links.
    real, root = os.path.realpath(path), os.path.realpath(model_directory)
    if not real.startswith(root + os.sep):
        raise invalid(f"{called}: {path} is a link that leads out of the model's directory; copy the file there")
    is_text = state.datatype is DataType.BYTES
    wanted = state.datatype.itemsize * prod(state.initial_shape)
    limit = MAX_STRINGS_BYTES if is_text else wanted
    try:
        # Without O_NONBLOCK the open of a FIFO waits for a writer that may never come.
        with open(real, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise invalid(f"{called}: {path} is not a regular file")
            data = file.read(limit + 1)
            size = max(len(data), os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise invalid(f"{called} cannot be read: {error}") from error
    dims = ",".join(map(str, state.initial_shape))
    if not is_text and size != wanted:
        raise invalid(f"{called}: {path} has {size} bytes, {state.datatype.name} of shape [{dims}] has {wanted}")
    if is_text and size > limit:
        raise invalid(f"{called}: {path} has {size} bytes, at most {limit} are allowed")
    count = prod(state.initial_shape)
    if is_text and not _has_strings(data, count):
        raise invalid(f"{called}: {path} must have {count} strings for shape [{dims}], each after its 4-byte length")
    return data


def _has_strings(data: bytes, count: int) -> bool:
    try:
        return len(split_bytes(data)) == count
    except ValueError:
        return False
