"""How many threads numpy's linear algebra uses in a process that was forked after numpy was loaded.

The zygote loads numpy with one thread, so that it may be forked at all; what a model's process is to have cannot be
said by the environment any more. OpenBLAS, which numpy's wheels carry, can be told; others keep what they have.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def set_blas_threads(threads: int) -> None:
    """Have every OpenBLAS of this process use so many."""
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
