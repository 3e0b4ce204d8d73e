"""Front ends in processes of their own: the CPU of the core's own process, and of all, per request, and the rate."""

import json
import os
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import models
import perf_analyzer
import psutil

from halimede.demo.process import ServerProcess

MODEL = "ident"
CALLERS = 48
SETTLING_S = 1.5
WINDOW_S = 4.0
ROUNDS = 3


@dataclass(slots=True)
class Fronts:
    """By round, with so many front-end processes: CPU microseconds per request, and requests per second."""

    processes: int
    core_us: list[float] = field(default_factory=list)
    all_us: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def measured(scratch: Path) -> list[Fronts]:
    """1 and 2 processes, and 4 and 8 where there are the cores for them. Each round has a server of each kind."""
    cores = len(os.sched_getaffinity(0))
    found = [Fronts(count) for count in (1, 2, 4, 8) if count <= max(2, cores // 2)]
    repository = models.write_repository(scratch / "fronts")
    for _ in range(ROUNDS):
        for each in found:
            arguments = [f"--model-repository={repository}", f"--frontend-processes={each.processes}"]
            with ServerProcess(arguments, scratch / "fronts.log") as server:
                server.wait_ready()
                _measure(server, each)
    return found


def _measure(server: ServerProcess, fronts: Fronts) -> None:
    core = psutil.Process(server.pid)
    processes = [core, *core.children(recursive=True)]
    address = server.address("http")
    with perf_analyzer.loading(MODEL, "http", address, CALLERS):
        time.sleep(SETTLING_S)
        start, before, answered = time.perf_counter(), list(map(_cpu_s, processes)), _answered(address)
        time.sleep(WINDOW_S)
        took, after = time.perf_counter() - start, list(map(_cpu_s, processes))
        requests = _answered(address) - answered
    spent = [(later - earlier) / requests * 1e6 for later, earlier in zip(after, before, strict=True)]
    fronts.core_us.append(spent[0])
    fronts.all_us.append(sum(spent))
    fronts.rates.append(requests / took)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _answered(address: str) -> int:
    with urllib.request.urlopen(f"http://{address}/v2/models/{MODEL}/stats", timeout=30) as answer:
        (found,) = json.load(answer)["model_stats"]
    return int(found["inference_stats"]["success"]["count"])
