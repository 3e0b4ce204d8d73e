"""A stop ends every wait of the start."""

import os
import signal
from pathlib import Path

from support.forked import start_python
from support.front_ends import TWO
from support.served import add_python, notes_file
from support.server import LOOPBACK, Start, halimede, wait_until

HANGS_AFTERWARDS = """
import os, threading
scandir = os.scandir

def hanging(path="."):
    if os.path.exists({flag!r}) and str(path) == {repository!r}:
        with open({flag!r} + ".hangs", "w"):
            pass
        threading.Event().wait()
    return scandir(path)

os.scandir = hanging
"""
"""A played file system that gives no answer for the repository once the model is loaded."""

SLOW_ZYGOTE = """
import os, sys, time
if any("zygote" in each for each in sys.orig_argv):
    print("the zygote begins", file=sys.stderr, flush=True)
    server = os.getppid()
    while os.getppid() == server:
        time.sleep(0.05)
"""
"""A process that front ends are forked from, and that does not come to it as long as the server runs."""


def test_while_the_tables_wait_for_a_repository(start: Start, repository: Path):
    add_python(repository, "m", methods="def initialize(self, args): note('loaded')")
    flag = str(notes_file(repository, "m"))
    first = HANGS_AFTERWARDS.format(flag=flag, repository=str(repository))
    server = start("--model-repository", repository, "--frontend-processes=1", first=first)
    wait_until(Path(f"{flag}.hangs").exists, "the hang", server)
    assert "Started HTTPService" not in server.log

    server.process.send_signal(signal.SIGTERM)

    assert server.process.wait(5) == 0, server.log


def test_while_front_ends_start(repository: Path, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_ZYGOTE)
    log = tmp_path / "log"
    arguments = ["serve", *LOOPBACK, TWO, "--model-repository", str(repository), "--hang-timeout-secs=600"]
    with log.open("wb") as output:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        server = start_python(*halimede(), *arguments, stdout=output, stderr=output, environment=environment)
    try:
        wait_until(lambda: "the zygote begins" in log.read_text(), "the wait for front ends")

        server.send_signal(signal.SIGTERM)

        assert server.wait(5) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        server.kill()
