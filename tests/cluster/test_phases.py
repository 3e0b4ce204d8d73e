"""What a test run reports while it waits."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cluster.spaces import environment, eventually
from support import phases
from support.environment import run_step
from support.phases import only_one, phase

HOLDER = """
import sys
from pathlib import Path
from support.phases import only_one
with only_one(Path(sys.argv[1]), "programs"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_waiting_process_reports_for_what_and_how_long(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "lock"
    output = ""

    def wait() -> None:
        with only_one(lock, "programs"):
            pass

    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        assert holder.stdin
        assert holder.stdout.readline() == b"held\n"
        waiting = threading.Thread(target=wait)
        waiting.start()

        def has_reported() -> bool:
            nonlocal output
            output += capfd.readouterr().err
            return output.endswith("\n")

        eventually(has_reported, "the reason for waiting")
        assert output == f"Waiting for process {holder.pid}, which is busy with programs ...\n"
        holder.stdin.close()
        waiting.join()
    assert capfd.readouterr().err.startswith(output.removesuffix(" ...\n") + ": ")
    assert lock.read_text() == str(os.getpid())


def test_a_long_step_reports_for_how_long_it_is_busy(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(phases, "SILENT_S", 0.01)
    monkeypatch.setattr(phases, "TELL_EVERY_S", 0.01)
    output = ""

    def has_reported() -> bool:
        nonlocal output
        output += capfd.readouterr().err
        return "Building ... busy for 0 s\n" in output

    with phase("Building", "a minute or two"):
        eventually(has_reported, "the report")
    assert output.startswith("Building (a minute or two) ...\n")


def test_a_slow_installation_reports_that_it_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "gate")
    # Also more than a pipe holds is given once.
    command = ["sh", "-c", f"cat > {tmp_path}/given; cat {tmp_path}/gate"]
    given = "x==1\n" * 50_000
    step = threading.Thread(target=run_step, args=(command, given, time.monotonic(), 0.05))
    step.start()
    output = ""

    def has_reported() -> bool:
        nonlocal output
        output += capfd.readouterr().out
        return "still downloading or unpacking" in output

    eventually(has_reported, "the report")
    (tmp_path / "gate").write_text("")
    step.join()
    assert (tmp_path / "given").read_text() == given
    with pytest.raises(subprocess.CalledProcessError):
        run_step(["false"], "", 0.0)


def test_a_short_wait_reports_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with only_one(tmp_path / "lock", "programs"), phase("Building"):
        pass
    assert capfd.readouterr() == ("", "")
