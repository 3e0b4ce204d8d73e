"""What tests cost is counted, and held against the budget."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.costs import CPU, Meter, judge, sums

ROOT = Path(__file__).parents[2]
BUSY_S = 0.3
BUSY = f"""
import os, time
while time.process_time() < {BUSY_S}:
    pass
"""
ORPHAN = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {BUSY!r} + "print('done', flush=True)"], start_new_session=True)
"""


def test_cpu_time_of_processes_whose_parent_has_ended_is_counted() -> None:
    meter = Meter("test")
    try:
        if not meter.counts_containers:
            pytest.skip("no group of cgroup v2 beside v1 can be made here")
        before = meter.cpu_s()
        # The pipe ends when the orphan has.
        done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, check=True)
        assert done.stdout == b"done\n"
        assert BUSY_S <= meter.cpu_s() - before <= BUSY_S + 2
    finally:
        meter.close()


def test_a_closed_meter_leaves_no_group() -> None:
    before = Path("/proc/self/cgroup").read_text()
    meter = Meter("test")
    during = Path("/proc/self/cgroup").read_text()
    meter.close()
    assert Path("/proc/self/cgroup").read_text() == before
    assert (f"halimede-test-{os.getpid()}" in during) or not meter.counts_containers


def test_costs_are_summed_by_the_deepest_folder_that_has_a_budget() -> None:
    cost = {"wall_s": 1.0, CPU: 2.0}
    tests = {"tests/shell/http/test_a.py::test_b": cost, "tests/shell/test_c.py::test_d[tests/unit/x]": cost}
    assert sums(tests, ["tests/shell", "tests/shell/http", "tests"]) == {"tests/shell/http": cost, "tests/shell": cost}
    assert sums(tests, []) == {"tests/shell/http": cost, "tests/shell": cost}


@pytest.mark.parametrize(
    ("spent", "line", "fails"),
    [
        (100.0, None, False),
        (101.0, "tests/a took 101 CPU seconds of a budget of 100", False),
        (150.0, "tests/a took 150 CPU seconds of a budget of 100", False),
        (151.0, "tests/a took 151 CPU seconds of a budget of 100", True),
    ],
)
def test_above_its_budget_a_folder_is_named_and_far_above_the_run_fails(
    spent: float, line: str | None, fails: bool
) -> None:
    assert judge({"tests/a": spent}, {"tests/a": 100}, ()) == ([line] if line else [], fails)


def test_a_folder_without_a_budget_fails_the_run() -> None:
    assert judge({"tests/new": 1}, {}, ()) == (["tests/new has no budget of CPU seconds: name one"], True)


def test_a_folder_whose_containers_are_not_counted_is_not_judged() -> None:
    lines, fails = judge({"tests/cluster": 1000}, {"tests/cluster": 1}, ("tests/cluster",))
    assert (len(lines), "unknown" in lines[0], fails) == (1, True, False)


INNER = f"""
import time

def test_busy():
    begun = time.process_time()
    while time.process_time() < begun + {BUSY_S}:
        pass

def test_idle():
    time.sleep({BUSY_S})
"""


def run(folder: Path, budget_s: float, *arguments: str, inner: str = INNER, warm: bool = True) -> tuple[int, str, Any]:
    """A run of pytest over one file with this project's settings: exit code, output, and the costs that it wrote."""
    tests = folder / "tests"
    tests.mkdir()
    (tests / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tests / "test_inner.py").write_text(inner)
    if warm:
        (folder / "cache" / "halimede" / "kubernetes").mkdir(parents=True)
    (folder / "budget.json").write_text(json.dumps({"tests": budget_s}))
    options = ["-c", "/dev/null", f"--rootdir={folder}", f"--budget={folder / 'budget.json'}", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments, "tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, json.loads((folder / "build" / "durations.json").read_text())


@pytest.mark.parametrize("arguments", [[], ["-n1"]], ids=["one process", "xdist"])
def test_a_test_is_charged_what_it_computes(tmp_path: Path, arguments: list[str]) -> None:
    code, output, costs = run(tmp_path, 100, *arguments)
    assert (code, "CPU seconds" in output) == (0, False), output
    busy, idle = (costs["tests"][f"tests/test_inner.py::test_{name}"] for name in ("busy", "idle"))
    assert (busy["outcome"], idle["outcome"]) == ("passed", "passed")
    assert BUSY_S <= busy[CPU] < BUSY_S + 0.2
    assert idle[CPU] < 0.2
    assert min(busy["wall_s"], idle["wall_s"]) >= BUSY_S
    assert costs["folders"]["tests"][CPU] == pytest.approx(busy[CPU] + idle[CPU])
    # Imports and collection belong to no test.
    assert costs[CPU] > busy[CPU] + idle[CPU]


def test_a_run_far_above_its_budget_fails(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, BUSY_S / 2, "-n1")
    assert (code, "tests took 0 CPU seconds of a budget of 0" in output) == (1, True), output


def test_a_test_with_marks_of_two_targets_is_refused(tmp_path: Path) -> None:
    inner = "import pytest\n@pytest.mark.large\n@pytest.mark.load\ndef test_both(): pass\n"
    code, output, _ = run(tmp_path, 100, inner=inner)
    assert (code, "test_both has the marks ['large', 'load']" in output) == (pytest.ExitCode.USAGE_ERROR, True), output


def test_a_run_that_builds_programs_is_not_held_against_the_budget(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, BUSY_S / 2, warm=False)
    assert (code, "No folder is held against its budget" in output) == (0, True), output
