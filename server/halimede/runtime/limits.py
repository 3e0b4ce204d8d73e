"""The system's limits for this process."""

import os
import resource
from contextlib import suppress


def raise_open_files() -> None:
    """Raise the limit of open files to the highest that the system allows.

    The soft limit is 1,024 on most systems, for the sake of programs that call `select`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The kernel may refuse the hard limit.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def count_open_files() -> int:
    """The number of open files; the limit if their list cannot be opened, because none is left for it. 0 without /proc,
    which is no reason for a warning."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        return 0
    except OSError:
        return open_files_limit()
