"""The run of the tests on a GPU, on this machine: its processes, and the whole without a GPU."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from support.played_driver import PlayedDriver, PlayedGpu, cuda_library
from support.probe import provided

ROOT = Path(__file__).parents[2]
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
MAKE = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from gpu.run import Run, Site, Suite, adopt_orphans, execute
from gpu.progress import Limits

def make(device):
    folder = Path(sys.argv[2])
    adopt_orphans()
    limits = Limits(test_s=2, start_s=60, whole_s=100)
    return Run(Site(sys.executable), device, folder, limits, Suite(folder, ["test_it.py"]))
"""
RUN = f"{MAKE}make('cpu').tests()"
WITHOUT_GPU = f"{MAKE}sys.exit(execute(make('gpu')))"


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
    command = [sys.executable, "-c", WITHOUT_GPU, str(ROOT / "tests"), str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "No GPU is here. Skipped: test_it.py" in done.stdout


@pytest.mark.large
def test_the_tests_of_the_driver_pass_on_a_played_gpu(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    def used_mib() -> int:
        taken = (path for path in (tmp_path / "taken").iterdir() if psutil.pid_exists(int(path.name)))
        return 500 + sum(int(path.read_text() or 0) for path in taken)

    (tmp_path / "taken").mkdir()
    gpu = PlayedGpu("GPU-00000000-0000-0000-0000-000000000007", 81559, used_mib=500)
    driver = provided(request.config, lambda: PlayedDriver(tmp_path, gpu))
    libraries = [driver.environment["LD_LIBRARY_PATH"], str(provided(request.config, cuda_library).parent)]
    played = {"LD_LIBRARY_PATH": ":".join(libraries), "PLAYED_UUID": "7", "PLAYED_TAKEN": str(tmp_path / "taken")}
    files = [f"tests/gpu/test_{name}_gpu.py" for name in ("devices", "server", "python_dlpack")]
    # PyTorch and CuPy need more of CUDA than is played.
    chosen = "not torch and not cupy and not beyond_the_memory and not start_of_models and not does_not_fit"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", chosen, *files]
    log = tmp_path / "log"
    with log.open("wb") as output:
        environment = os.environ | driver.environment | played
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        while run.poll() is None:
            driver.show(replace(gpu, used_mib=used_mib()))
            with suppress(subprocess.TimeoutExpired):
                run.wait(0.02)
    finally:
        run.kill()
    assert run.returncode == 0, log.read_text()
    assert "6 passed" in log.read_text()
