"""`support.forked`: programs in forks behave as in interpreters of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import support.forked
from support.forked import Process, run_python, start_python
from support.server import wait_until

SUPPORT = Path(support.forked.__file__).parent
FOREVER = "import time; print('runs', flush=True); time.sleep(1000)"


def start(folder: Path, program: str, *arguments: str, **options: Any) -> Process:
    """With its output in files of `folder`."""
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        return start_python("-c", program, *arguments, stdout=out, stderr=err, **options)


def start_forever(folder: Path) -> Process:
    process = start(folder, FOREVER)
    wait_until(lambda: (folder / "out").read_text() == "runs\n", "its output")
    return process


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_a_process(tmp_path: Path, code: int) -> None:
    process = start(tmp_path, "import sys; sys.exit(int(sys.argv[1]))", str(code))
    assert (process.wait(60), process.poll(), process.returncode) == (code, code, code)


NESTED = "from support.forked import run_python; print(run_python('-c', 'pass', limit_s=60))"


def test_a_fork_loads_no_library_of_a_folder_that_the_machine_names(tmp_path: Path) -> None:
    # One of many in a folder such as CUDA's: nothing needs it, and it cannot be loaded.
    (tmp_path / "libbroken.so.1").write_bytes(b"no library")
    named = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(SUPPORT.parent)}
    printed = subprocess.check_output([sys.executable, "-c", NESTED], env=os.environ | named, text=True)
    assert "returncode=0" in printed


def test_an_exception_ends_a_process_as_it_ends_an_interpreter(tmp_path: Path) -> None:
    assert start(tmp_path, "raise ValueError('so')").wait(60) == 1
    assert (tmp_path / "err").read_text().endswith("\nValueError: so\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_running_process_gets_signals(tmp_path: Path, number: signal.Signals) -> None:
    process = start_forever(tmp_path)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(number)
    assert process.wait(60) == -number
    assert not psutil.pid_exists(process.pid)
    process.kill()


def test_many_processes_run_at_once(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(5)]
    for folder in folders:
        folder.mkdir()
    processes = [start_forever(folder) for folder in folders]
    processes[2].kill()
    assert processes[2].wait(60) == -signal.SIGKILL
    assert [process.poll() for process in processes] == [None, None, -signal.SIGKILL, None, None]
    for process in processes:
        process.terminate()
    assert [process.wait(60) for process in processes].count(-signal.SIGTERM) == 4


def test_a_process_has_its_own_environment_folder_and_outputs(tmp_path: Path) -> None:
    program = "import os, sys; print(dict(os.environ), os.getcwd(), sys.argv); print('error', file=sys.stderr)"
    process = start(tmp_path, program, "an argument", environment={"PATH": "/bin"}, directory=tmp_path)
    assert process.wait(60) == 0
    assert (tmp_path / "out").read_text() == f"{ {'PATH': '/bin'} } {tmp_path} ['-c', 'an argument']\n"
    assert (tmp_path / "err").read_text() == "error\n"


def test_a_process_shares_no_descriptors_and_handlers(tmp_path: Path) -> None:
    """Another process runs meanwhile: its descriptors are the forking process's."""
    other = start_forever(tmp_path)
    program = (
        "import os, signal; print([os.path.exists(f'/proc/self/fd/{n}') for n in range(64)].count(True), "
        "[signal.getsignal(n) in (signal.SIG_DFL, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGCHLD)], "
        "signal.pthread_sigmask(signal.SIG_BLOCK, []), os.getpgid(0) == os.getpid(), os.read(0, 1))"
    )
    assert run_python("-c", program).stdout == "3 [True, True] set() True b''\n"
    other.kill()


def test_a_process_for_which_nobody_waits_may_end(tmp_path: Path) -> None:
    pid = start_forever(tmp_path).pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid), "its end")
    assert run_python("-c", "print(1)").stdout == "1\n"


def test_processes_have_different_random_numbers() -> None:
    program = "import random, uuid; print(random.random(), uuid.uuid4())"
    assert run_python("-c", program).stdout != run_python("-c", program).stdout


def test_a_process_beyond_its_time_is_killed_and_the_others_are_not(tmp_path: Path) -> None:
    other = start_forever(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("-c", FOREVER, limit_s=0.1)
    assert other.poll() is None
    other.kill()


@pytest.mark.parametrize("ending", ["os._exit(0)", "os.kill(os.getpid(), 9)", "pass"])
def test_processes_end_with_the_process_that_started_them(tmp_path: Path, ending: str) -> None:
    program = (
        f"import os; from support.forked import start_python\nwith open({str(tmp_path / 'out')!r}, 'w') as out:\n"
        f"    process = start_python('-c', {FOREVER!r}, stdout=out, stderr=out, imported=())\n"
        f"print(process.pid, flush=True); {ending}"
    )
    search = {**os.environ, "PYTHONPATH": str(Path(support.forked.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=search, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    process = int(ended.stdout)
    wait_until(lambda: not psutil.pid_exists(process) or psutil.Process(process).status() == "zombie", "its end")
