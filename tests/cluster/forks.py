"""Processes of the operator. Most are forks of one that has imported it, since the import is most of what a start costs.

`python -m cluster.forks` reads commands and writes answers as lines of JSON: `{"arguments": [...], "log": PATH}` starts an operator and is answered
with its process id; a process id is answered with the status that this process has ended with, or null.
"""

import gc
import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from cluster.spaces import environment, python
from support.image import REPOSITORY_ROOT

PACKAGE = REPOSITORY_ROOT / "operator"
"""The folder in which the package is importable however the tests were started."""


def start_process(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """An operator that imports what it needs."""
    with log.open("w") as output:
        command = [sys.executable, "-m", "halimede_operator", *arguments]
        return subprocess.Popen(command, stdout=output, stderr=output, cwd=PACKAGE)


class Forks:
    """The process that starts operators."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            python("forks"),
            env={**environment(), "PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], str(PACKAGE)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def start(self, arguments: list[str], log: Path) -> "Fork":
        return Fork(self, self.ask({"arguments": arguments, "log": str(log)}))

    def ask(self, command: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


class Fork:
    """An operator's process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks = forks
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._forks.ask(self.pid)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                select.select([descriptor], [], [], timeout)
            finally:
                os.close(descriptor)
        status = self.poll()
        if status is None:
            raise TimeoutError(f"the process {self.pid} has not ended after {timeout} s")
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve() -> None:
    from halimede_operator.main import main

    # A collection would write to, and so copy, each page with objects of this process.
    gc.freeze()
    ended: dict[int, int] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if isinstance(command, int):
            if command not in ended:
                pid, status = os.waitpid(command, os.WNOHANG)
                if pid:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer = ended.get(command)
        elif not (answer := os.fork()):
            log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log, stream.fileno())
            os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
            main(command["arguments"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
