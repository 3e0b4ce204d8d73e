"""The run of the tests on a GPU, on this machine: its processes, and the whole without a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "gpu" / "run.py"
TESTS = """
    import os, signal, subprocess, sys, time
    from pathlib import Path
    import pytest

    pytestmark = pytest.mark.gpu

    def test_figure(record_property):
        record_property("speed", 2.5)

    def test_hangs():
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        Path(__file__).with_name("left").write_text(str(left.pid))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(600)

    def test_crashes():
        os.kill(os.getpid(), signal.SIGKILL)

    def test_fails():
        assert "cause" == ""

    def test_skips():
        pytest.skip("not here")
"""
RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from gpu.run import Run, Site, Suite, adopt_orphans
from gpu.progress import Limits
folder = Path(sys.argv[2])
adopt_orphans()
limits = Limits(test_s=2, start_s=60, whole_s=100)
Run(Site(sys.executable), "cpu", folder, limits, Suite(folder, ["test_it.py"])).tests()
"""


def test_all_tests_have_results_though_some_hang_crash_or_fail(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(dedent(TESTS))
    command = [sys.executable, "-c", RUN, str(ROOT / "tests"), str(tmp_path)]
    subprocess.run(command, timeout=60, check=True)
    results = json.loads((tmp_path / "results.json").read_text())
    found = {each["test"].partition("::")[2]: each for each in results["results"]}
    assert {name: each["outcome"] for name, each in found.items()} == {
        "test_figure": "passed",
        "test_hangs": "timed out",
        "test_crashes": "crashed",
        "test_fails": "failed",
        "test_skips": "skipped",
    }
    assert found["test_figure"]["figures"] == {"speed": "2.5"}
    assert "cause" in found["test_fails"]["details"]
    assert found["test_skips"]["reason"] == "not here"
    assert not results["is_good"]
    assert not psutil.pid_exists(int((tmp_path / "left").read_text()))


@pytest.mark.large
@pytest.mark.timeout(600)
def test_a_dry_run_passes_here_with_the_pack_and_without() -> None:
    done = subprocess.run([ROOT / "tests/gpu/run.sh", "--dry-run"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "MiB of wheels" in done.stdout
    here = json.loads((ROOT / "build/gpu-run/here/results.json").read_text())
    passed = {each["test"].rpartition("::")[2] for each in here["results"] if each["outcome"] == "passed"}
    assert "test_a_request_beyond_the_memory_fails_and_the_next_is_answered" in passed


@pytest.mark.large
def test_a_run_without_a_gpu_says_what_it_skips_and_fails(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / ".venv/bin/python", PROGRAM, f"--out={tmp_path}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "No GPU is here. Skipped: tests/gpu/test_devices_gpu.py, " in done.stdout
