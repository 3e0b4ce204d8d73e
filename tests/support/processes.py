"""The resources that processes use, from the kernel. All tests count them here."""

import gc
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from support.server import RunningServer

LIMIT_S = 30.0
LOOK_AGAIN_S = 0.05


def resident_bytes(server: RunningServer) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


def peak_bytes(server: RunningServer) -> int:
    """The peak resident memory since the start, or since `forget_peak`."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def forget_peak(server: RunningServer) -> None:
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")


def cpu_secs(server: RunningServer) -> float:
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


def open_files(pid: int | None = None) -> int:
    """The number of file descriptors of a process; None is this one, whose garbage is collected first."""
    if pid is None:
        gc.collect()
    return len(os.listdir(f"/proc/{pid or os.getpid()}/fd"))


@contextmanager
def holding_no_more(
    pid: int | None = None, *, files: int = 0, threads: float = math.inf, growth_bytes: float = math.inf
) -> Iterator[None]:
    """Check that a process holds no more after the block than before it; None is this process.

    The arguments are how many more open files, threads and bytes of resident memory are allowed. The first count is
    taken when nothing closes any more, so that it has nothing that ends by itself. The last one is "at most", because
    something of an earlier test may still end during the block.
    """
    before = _quiet_counts(pid)
    yield
    most = [count + more for count, more in zip(before, (files, threads, growth_bytes), strict=True)]
    deadline = time.monotonic() + LIMIT_S
    now = _counts(pid)
    while any(count > limit for count, limit in zip(now, most, strict=True)):
        assert time.monotonic() < deadline, f"files, threads, bytes: {now}, before {before}, allowed {most}"
        time.sleep(LOOK_AGAIN_S)
        now = _counts(pid)


def _quiet_counts(pid: int | None) -> tuple[int, int, int]:
    """The counts, as soon as two of files and threads in sequence are equal."""
    deadline = time.monotonic() + LIMIT_S
    last, now = None, _counts(pid)
    while now[:2] != last and time.monotonic() < deadline:
        time.sleep(LOOK_AGAIN_S)
        last, now = now[:2], _counts(pid)
    return now


def _counts(pid: int | None) -> tuple[int, int, int]:
    process = psutil.Process(pid)
    return open_files(pid), process.num_threads(), int(process.memory_info().rss)
