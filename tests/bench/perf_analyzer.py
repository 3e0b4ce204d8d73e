"""NVIDIA's load generator, perf_analyzer, from package wheels.

The binary is in tritonclient 2.40.0, the last wheel with it. Two of its shared libraries are not in base systems, and come
from the nvidia-pytriton wheel.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "halimede-bench"
WHEELS = ("tritonclient==2.40.0", "nvidia-pytriton==0.7.0")
# The path of each file in its wheel, and the file name that the loader expects.
WANTED = (
    (re.compile(r".*/bin/perf_analyzer$"), "perf_analyzer"),
    (re.compile(r".*\.libs/libcudart-[^/]*$"), "libcudart.so.12"),
    (re.compile(r".*\.libs/libb64-[^/]*$"), "libb64.so.0d"),
)
WINDOW_MS = 1500
WINDOWS = 3


def fetch() -> Path:
    """The folder with the binary and its libraries, downloaded the first time (70 MB)."""
    home = CACHE / "perf-analyzer"
    if home.exists():
        return home
    downloads = CACHE / "wheels"
    partial = CACHE / f"perf-analyzer.{os.getpid()}"
    partial.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads), *WHEELS], check=True
    )
    for wheel in downloads.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                for pattern, name in WANTED:
                    if pattern.match(member):
                        (partial / name).write_bytes(archive.read(member))
    shutil.rmtree(downloads)
    (partial / "perf_analyzer").chmod(0o755)
    partial.rename(home)
    return home


@contextmanager
def loading(
    model: str, protocol: str, address: str, callers: int, rows: int = 1, data: Path | None = None
) -> Iterator[None]:
    """Keep `callers` requests of so many rows in flight during the block, for at most ten minutes.

    `data` is a file of its `--input-data`; without one the inputs are random bytes.
    """
    home = fetch()
    command = [str(home / "perf_analyzer"), "-m", model, "-i", protocol, "-u", address, "-b", str(rows)]
    command += ["--concurrency-range", str(callers), "--max-threads", str(callers), "-p", "200000", "-r", "3"]
    command += ["--input-data", str(data)] if data is not None else []
    environment = {**os.environ, "LD_LIBRARY_PATH": str(home)}
    output = subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdout=output, stderr=output) as running:
        try:
            yield
            if running.poll() is not None:
                raise RuntimeError(f"perf_analyzer on {model} over {protocol} ended with {running.returncode}")
        finally:
            running.kill()


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the requests of a load, as the clients see it, in seconds."""

    mean_s: float
    p99_s: float


def latency(model: str, address: str, callers: int, rows: int) -> Latency:
    """The latency over HTTP while `callers` requests of `rows` rows each are in flight."""
    output = load(model, "http", address, callers, "-b", str(rows))
    mean, p99 = re.search(r"infer/sec, latency (\d+) usec", output), re.search(r"p99 latency: (\d+) usec", output)
    if mean is None or p99 is None:
        raise RuntimeError(f"perf_analyzer on {model} reported no latency: {output.strip()[-1500:]}")
    return Latency(int(mean[1]) / 1e6, int(p99[1]) / 1e6)


def load(model: str, protocol: str, address: str, callers: int, *more: str) -> str:
    """Keep `callers` requests in flight for some seconds: WINDOWS windows, regardless of their spread, and a start-up.

    `more` are further arguments. Returns what perf_analyzer prints.
    """
    home = fetch()
    command = [str(home / "perf_analyzer"), "-m", model, "-i", protocol, "-u", address, "-b", "1"]
    command += ["--concurrency-range", str(callers), "-p", str(WINDOW_MS), "-r", str(WINDOWS), "-s", "900", *more]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    # Its exit code is 0 in some failures, so that its output is checked. An uneven load is not a failure: the results
    # are measured at the server.
    if not re.search(r"throughput: [\d.]+ infer/sec|Failed to obtain stable measurement", done.stdout):
        output = (done.stdout + done.stderr).strip()
        raise RuntimeError(f"perf_analyzer on {model} over {protocol} ended with {done.returncode}: {output[-1500:]}")
    return done.stdout
