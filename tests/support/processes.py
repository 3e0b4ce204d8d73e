"""The resources that a server process uses, from the kernel."""

from pathlib import Path

import psutil

from support.server import RunningServer


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
