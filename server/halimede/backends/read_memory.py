"""Bound the memory in which a model file is read: a small file may claim to be as large as it likes.

The bound is a base and a multiple of the file's size. `--backend-config BACKEND,read-memory-mb=N` sets the base. Only
the reading of a file is bounded, not what its model needs when it is made and runs.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halimede.backends.api import ModelSource
from halimede.core.config.parameters import number_setting
from halimede.core.types import InferenceError
from halimede.core.types.error import clip, invalid

MEMORY_SETTING = "read-memory-mb"
BASE_MIB = 1024
PER_BYTE = 32
"""Bytes of memory for each byte of a file."""
_MOST_MIB = 1 << 30
_MIB = 1 << 20
_DATA_FIELD = 5
"""Of /proc/self/statm: the pages of data and stacks."""


def read_memory(backend: str, source: ModelSource, path: Path) -> int:
    """The bytes of memory in which this file of the model may be read. INVALID_ARG for a wrong setting; OSError."""
    base_mib = number_setting(backend, source.options, MEMORY_SETTING, BASE_MIB, 1, _MOST_MIB)
    return base_mib * _MIB + PER_BYTE * path.stat().st_size


def too_much_memory(backend: str, source: ModelSource, path: Path, limit_bytes: int) -> InferenceError:
    """The error for a file that needs more."""
    text = f"model '{clip(source.name)}': reading {clip(path.name)} takes more than {limit_bytes // _MIB} MiB of memory"
    return invalid(
        f"{text}. If you trust the file, allow more with --backend-config {backend},{MEMORY_SETTING}=N, which is "
        f"{BASE_MIB} by default; {PER_BYTE} times the size of the file come on top of it"
    )


@contextmanager
def limited_memory(backend: str, source: ModelSource, path: Path) -> Iterator[None]:
    """Read a file of the model within. INVALID_ARG if that needs too much memory, or for a wrong setting; OSError.

    For a worker process before it runs the model: the bound holds for all of the process, from now on until the end.
    """
    limit_bytes = read_memory(backend, source, path)
    now_bytes = int(Path("/proc/self/statm").read_text().split()[_DATA_FIELD]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    most = [each for each in before if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(now_bytes + limit_bytes, *most, 1 << 62), before[1]))
    try:
        yield
    except MemoryError:
        raise too_much_memory(backend, source, path, limit_bytes) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
