"""What tests cost: wall time and CPU seconds of each, as JSON, and a budget of CPU seconds per folder.

Each process that runs tests has a cgroup of its own. Servers, pods and kubelets that a test starts inherit it and keep
it when their parents end, so that its `cpu.stat` counts them all. Where no cgroup can be made, the CPU time of the
process and of its ended children is used: it lacks processes that others reap.
"""

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

CPU = "cpu_s"
FAILS_ABOVE = 1.5
"""Times its budget that a folder may need before the run fails."""


class Meter:
    """CPU seconds of this process and of all that it starts."""

    def __init__(self, name: str) -> None:
        self._came_from, self._group = _enter_new_group(name)
        # Kubelet puts containers into groups of its own, except in the second hierarchy of a machine with cgroup v1.
        self.counts_containers = self._group is not None and self._group.is_relative_to("/sys/fs/cgroup/unified")

    def cpu_s(self) -> float:
        if self._group is None:
            usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
            return sum(usage.ru_utime + usage.ru_stime for usage in usages)
        values = dict(line.split() for line in (self._group / "cpu.stat").read_text().splitlines())
        return int(values["usage_usec"]) / 1e6

    def close(self) -> None:
        """Leave the group, and remove it if no process is left in it."""
        if self._group is not None and self._came_from is not None:
            (self._came_from / "cgroup.procs").write_text(str(os.getpid()))
            with suppress(OSError):
                self._group.rmdir()


def _enter_new_group(name: str) -> tuple[Path | None, Path | None]:
    """The group that this process was in, and the new one that it is in now; none where groups cannot be made."""
    [own] = [line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")] or [""]
    for hierarchy in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        came_from = hierarchy / own.removeprefix("0::").strip("/")
        group = came_from / f"halimede-{name}-{os.getpid()}"
        if own and (came_from / "cgroup.procs").exists():
            try:
                group.mkdir()
                (group / "cgroup.procs").write_text(str(os.getpid()))
            except OSError:
                continue
            if (group / "cpu.stat").exists():
                return came_from, group
    return None, None


class Measured:
    """Of a process that runs tests: attaches its CPU seconds to the last report of each test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._meter = Meter("tests")
        self._before = self._meter.cpu_s()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._before = self._meter.cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown":
            report.user_properties.append((CPU, self._meter.cpu_s() - self._before))
        return report

    def pytest_sessionfinish(self) -> None:
        output: dict[str, Any] = getattr(self._config, "workeroutput", {})
        output[CPU] = self._meter.cpu_s()
        output["counts_containers"] = self._meter.counts_containers
        self._meter.close()
        if totals := self._config.pluginmanager.get_plugin("costs"):
            totals.add_process(output)


class Totals:
    """Of the process that reports to the user: collects the costs of all tests and writes them."""

    def __init__(self, path: Path, budget: Mapping[str, float] | None) -> None:
        self._path, self._budget = path, budget
        self._is_warm = built_programs().exists()
        self._begun = time.monotonic()
        self._tests: dict[str, dict[str, Any]] = defaultdict(lambda: {"wall_s": 0.0, CPU: 0.0, "outcome": "passed"})
        self._processes: list[dict[str, Any]] = []
        self._lines: list[str] = []

    def add_process(self, output: dict[str, Any]) -> None:
        self._processes.append(output)

    def pytest_testnodedown(self, node: Any) -> None:
        """Of xdist: a process that ran tests has ended; one that crashed has no output."""
        self.add_process(getattr(node, "workeroutput", {}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests[report.nodeid]
        test["wall_s"] += report.duration
        test[CPU] += dict(report.user_properties).get(CPU, 0.0) if report.when == "teardown" else 0.0
        if report.outcome != "passed":
            test["outcome"] = report.outcome

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        by_folder = sums(self._tests, self._budget or ())
        document = {
            "wall_s": time.monotonic() - self._begun,
            CPU: sum(process.get(CPU, 0.0) for process in self._processes),
            "counts_containers": all(process.get("counts_containers") for process in self._processes),
            "folders": by_folder,
            "tests": self._tests,
        }
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(document, indent=1))
        if self._budget is not None and not self._is_warm:
            self._lines = ["No folder is held against its budget: this run built programs, which counts for its tests"]
        elif self._budget is not None:
            spent = {folder: cost[CPU] for folder, cost in by_folder.items()}
            unknown = () if document["counts_containers"] else ("tests/cluster",)
            self._lines, is_failure = judge(spent, self._budget, unknown)
            if is_failure:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._lines:
            terminalreporter.write_line(line)


def built_programs() -> Path:
    """The folder of programs that tests build once on a machine: Kubernetes alone takes twenty CPU minutes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halimede" / "kubernetes"


def sums(tests: Mapping[str, Mapping[str, float]], folders: Iterable[str]) -> dict[str, dict[str, float]]:
    """Wall and CPU seconds per folder: of those named the deepest that holds the test, otherwise the first two levels."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"wall_s": 0.0, CPU: 0.0})
    deepest_first = sorted(folders, key=len, reverse=True)
    for test, cost in tests.items():
        path = test.partition("::")[0]
        named = next((folder for folder in deepest_first if path.startswith(f"{folder}/")), None)
        total = found[named or "/".join(path.split("/")[:-1][:3])]
        for key in total:
            total[key] += cost[key]
    return found


def judge(spent: Mapping[str, float], budget: Mapping[str, float], unknown: Collection[str]) -> tuple[list[str], bool]:
    """What to print about folders above their budget of CPU seconds, and whether the run fails for one."""
    lines, is_failure = [], False
    for folder, cpu_s in sorted(spent.items()):
        if folder in unknown:
            lines.append(f"{folder}: CPU time unknown, since no cgroup of cgroup v2 beside v1 can be written")
        elif folder not in budget:
            lines.append(f"{folder} has no budget of CPU seconds: name one")
            is_failure = True
        elif cpu_s > budget[folder]:
            lines.append(f"{folder} took {cpu_s:.0f} CPU seconds of a budget of {budget[folder]:.0f}")
            is_failure |= cpu_s > FAILS_ABOVE * budget[folder]
    return lines, is_failure
