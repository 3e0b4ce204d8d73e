"""Limits that the system sets this process."""

import os
import resource
from contextlib import suppress


def raise_open_files() -> None:
    """Allow as many open files as the system lets us have.

    The soft limit is 1,024 on most systems, for the sake of programs that call `select`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A hard limit may be above what the kernel has room for.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def count_open_files() -> int:
    """The files that this process has open; the limit, where not even the list of them can be opened."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return open_files_limit()
