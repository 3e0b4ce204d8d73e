"""Runs tests in the copy of the tree, to their first failure and within a time."""

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import psutil

from mutants.tree import Tree

PR_SET_CHILD_SUBREAPER = 36
NO_TESTS = 5
END_S = 10


class End(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    """Of pytest, or it could not read the tests."""


@dataclass(frozen=True, slots=True)
class Run:
    end: End
    test: str
    """That failed, or ran last."""
    seconds: float


class Runner:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.folder = tree.folder / "watch"
        self.folder.mkdir(exist_ok=True)
        # Servers that a test left behind become children of this process, which ends them.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

    def run(
        self,
        files: Sequence[str],
        limit_s: float,
        *,
        only: Collection[str] = (),
        without: Collection[str] = (),
        marks: str | None = None,
        profile: str = "ci",
        to_the_end: bool = False,
    ) -> Run:
        """Run these files in their order, or `only` some of their tests, but not those `without`."""
        (self.folder / "plan").write_text(json.dumps({"only": list(only), "without": list(without)}))
        (self.folder / "started").write_text("")
        (self.folder / "reports").write_text("")
        command = [
            *(str(self.tree.python), "-m", "pytest", "-p", "mutants_watch", "-p", "no:cacheprovider"),
            *("--tb=line", *(() if to_the_end else ("-x",)), *(("-m", marks) if marks else ()), *files),
        ]
        # Without CI: what this machine lacks is skipped.
        environment = {**os.environ, "HYPOTHESIS_PROFILE": profile, "MUTANTS_FOLDER": str(self.folder)}
        for name in ("CI", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"):
            environment.pop(name, None)
        begun = time.monotonic()
        with (self.folder / "output").open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.tree.root, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_children()
        return self._result(code, time.monotonic() - begun, files)

    def _result(self, code: int | None, seconds: float, files: Sequence[str]) -> Run:
        failed = [report["test"] for report in self.reports() if report["outcome"] == "failed"]
        last = self.started()[-1].partition("\t")[0] if self.started() else files[0]
        if code in (0, NO_TESTS):
            return Run(End.PASSED, last, seconds)
        if failed:
            return Run(End.FAILED, failed[0], seconds)
        return Run(End.TIMEOUT if code is None else End.CRASHED, last, seconds)

    def started(self) -> list[str]:
        """Tests and their phases, as they began."""
        return (self.folder / "started").read_text().splitlines()

    def reports(self) -> list[dict[str, str | float]]:
        return [json.loads(line) for line in (self.folder / "reports").read_text().splitlines()]


def _end_children() -> None:
    """End all processes that the run left, however they were started."""
    deadline = time.monotonic() + END_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
