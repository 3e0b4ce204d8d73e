"""The cores that this process may use."""

import os
from pathlib import Path


def available_cores() -> int:
    """The cores that this process may use: its CPU affinity, or fewer if a container has a quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        return min(cores, quota_cores(Path("/sys/fs/cgroup/cpu.max").read_text()) or cores)
    except OSError:
        return cores


def quota_cores(cpu_max: str) -> int | None:
    """Whole cores in a cgroup's `cpu.max` ("200000 100000" is 2), at least 1; None without a quota."""
    quota, _, period = cpu_max.strip().partition(" ")
    if not quota.isdecimal() or not period.isdecimal():
        return None
    return max(1, int(quota) // max(1, int(period)))
