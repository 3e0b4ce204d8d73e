"""`halimede fetch` in forks of a process that has imported it: the import is most of what a small fetch costs."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["halimede.commands.fetch", "halimede.fetch.fetcher"])


class Forked:
    """A running `halimede fetch`, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        log.write_bytes(b"")
        self._process = _FORKS.Process(target=_run, args=(list(arguments), str(log), dict(environment)), daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"the process {self._process.pid} has not ended after {timeout} s")
        return code

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    """Of the fork."""
    # A collection would write to, and so copy, each page with objects of the process that it was forked from.
    gc.freeze()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)

    # Not by the command line's entry point: finding that one reads the metadata of all installed packages.
    from halimede.commands.fetch import fetch

    fetch.main(arguments)
