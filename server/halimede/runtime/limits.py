"""Limits that the system sets this process."""

import resource


def raise_open_files() -> int:
    """Allow as many open files as the system lets us have, and return how many that are.

    The soft limit is 1,024 on most systems, for the sake of programs that call `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft  # a hard limit above what the kernel has room for
    return hard
