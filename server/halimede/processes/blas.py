"""The threads of OpenBLAS, numpy's linear algebra.

The zygote loads numpy with one thread, because it has to be forked, and the environment variable has no effect after
that. OpenBLAS, which numpy's wheels contain, has a function for it; other libraries keep their number of threads.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}

_TIMEOUT, _EXPONENT = "OPENBLAS_THREAD_TIMEOUT", "20"
"""A thread of OpenBLAS that has nothing to do spins for 2 ** 20 cycles, which is half a millisecond, before it sleeps.

By default it is 2 ** 26 cycles: 30 ms of CPU per thread when a process starts, and after each operation.
"""


@contextmanager
def loading_blas(variables: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Within, numpy is imported: OpenBLAS reads its variables then. Models see the environment of the server."""
    before = {name: os.environ.get(name) for name in (*variables, _TIMEOUT)}
    os.environ.update(variables)
    os.environ.setdefault(_TIMEOUT, _EXPONENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def set_blas_threads(threads: int) -> None:
    """Set the number of threads of every OpenBLAS in this process."""
    with suppress(OSError):
        libraries = {
            line.split(maxsplit=5)[5].strip()
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "openblas" in line
        }
        for path in libraries:
            library = ctypes.CDLL(path)
            for name in _SETTERS:
                setter = getattr(library, name, None)
                if setter is not None:
                    setter(threads)
                    break
