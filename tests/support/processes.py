"""The resources that processes use, from the kernel. All tests count them here."""

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from support.server import RunningServer

LIMIT_S = 30.0
RUN_LIMIT_S = 1.0
"""For what a run of work leaves to be closed, if work runs several times."""

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

    The arguments are how many more open files, threads and bytes of its own resident memory are allowed. Pages of program
    files do not count: the kernel maps them when code runs for the first time. The first count is taken when nothing
    closes any more, so that it has nothing that ends by itself. The last one is "at most", because something of an
    earlier test may still end during the block.
    """
    before = _quiet_counts(pid)
    yield
    excess = _excess(pid, before, (files, threads, growth_bytes), LIMIT_S)
    assert not excess, excess


def check_holds_no_more(
    work: Callable[[], None], pid: int, *, files: int = 0, threads: float = math.inf, growth_bytes: float = math.inf
) -> None:
    """As `holding_no_more`, for the best of three runs of `work`: a leak grows each time, the allocator's free memory does
    not."""
    excess = []
    while len(excess) < 3:
        before = _quiet_counts(pid)
        work()
        excess.append(_excess(pid, before, (files, threads, growth_bytes), RUN_LIMIT_S))
        if not excess[-1]:
            return
    raise AssertionError("\n".join(excess))


def _excess(pid: int | None, before: Sequence[int], more: Sequence[float], limit_s: float) -> str:
    """Wait until the counts are no higher than before and what is allowed; otherwise say how they differ."""
    most = [count + each for count, each in zip(before, more, strict=True)]
    deadline = time.monotonic() + limit_s
    while True:
        now = _counts(pid)
        if all(count <= limit for count, limit in zip(now, most, strict=True)):
            return ""
        if time.monotonic() > deadline:
            return f"files, threads, bytes: {now}, before {before}, allowed {most}"
        time.sleep(LOOK_AGAIN_S)


def _quiet_counts(pid: int | None) -> tuple[int, int, int]:
    """The counts, as soon as two of files and threads in sequence are equal."""
    deadline = time.monotonic() + LIMIT_S
    last, now = None, _counts(pid)
    while now[:2] != last and time.monotonic() < deadline:
        time.sleep(LOOK_AGAIN_S)
        last, now = now[:2], _counts(pid)
    return now


def _counts(pid: int | None) -> tuple[int, int, int]:
    status = Path(f"/proc/{pid or os.getpid()}/status").read_text()
    values = {name: value.split() for name, _, value in (line.partition(":") for line in status.splitlines())}
    own_kb = int(values["RssAnon"][0]) + int(values["RssShmem"][0])
    return open_files(pid), int(values["Threads"][0]), own_kb * 1024
