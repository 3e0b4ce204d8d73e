"""Sets the number of threads for numpy's linear algebra in a process that was forked after numpy was loaded.

The zygote loads numpy with one thread, because it has to be forked, and the environment variable has no effect after
that. OpenBLAS, which numpy's wheels contain, has a function for it; other libraries keep their number of threads.
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
