"""What a test run reports while it waits."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster.spaces import environment, eventually
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


def test_a_short_wait_reports_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with only_one(tmp_path / "lock", "programs"), phase("Building"):
        pass
    assert capfd.readouterr() == ("", "")
