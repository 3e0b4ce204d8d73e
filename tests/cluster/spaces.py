"""Linux namespaces, each held by a first process, and the programs in them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil  # type: ignore[import-untyped]  # the package has no types

from cluster.keeper import NAMESPACES

T = TypeVar("T")

LIMIT_S = 90.0
CLEAN_UP_LIMIT_S = 600.0
"""Unpacked images are some hundred thousand files, and a busy disk removes them slowly."""
TESTS = Path(__file__).parents[1]


def eventually(
    look: Callable[[], T | None],
    what: str,
    limit_s: float = LIMIT_S,
    check: Callable[[], None] = lambda: None,
    pause_s: float = 0.1,
) -> T:
    """Poll until the result is true, for at most `limit_s`; AssertionError names what was missing. `check` raises if
    waiting cannot help."""
    deadline = time.monotonic() + limit_s
    while not (found := look()):
        check()
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(pause_s)
    return found


def python(module: str, *arguments: object) -> tuple[str, ...]:
    """The command that runs a module of this folder."""
    return (sys.executable, "-m", f"cluster.{module}", *map(str, arguments))


def environment() -> dict[str, str]:
    """This process', and this folder's modules; the way out of this machine leads nowhere in a cluster."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    # Kubernetes' programs hold little here, so at Go's default they collect garbage all the time, for a third of what
    # they compute.
    return {**kept, "PYTHONPATH": str(TESTS), "PYTHONSAFEPATH": "1", "GOGC": "500"}


def run(*command: str | Path, given: str | None = None, limit_s: float = LIMIT_S) -> str:
    """The output of a command; AssertionError with all output if it fails. `given` is its input."""
    done = subprocess.run(
        command, input=given or "", capture_output=True, text=True, timeout=limit_s, check=False
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@dataclass
class Program:
    """A process that runs until it is stopped; its output goes into a file."""

    name: str
    command: Sequence[str | Path]
    log: Path
    _outer: subprocess.Popen[bytes] | None = None

    def start(self, keep_open: Sequence[int] = ()) -> None:
        with self.log.open("ab") as log:
            self._outer = subprocess.Popen(
                self.command, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, pass_fds=keep_open,
            )  # fmt: skip

    @property
    def outer_pid(self) -> int:
        """Of the process that waits for the program itself."""
        assert self._outer is not None, f"{self.name} does not run"
        return self._outer.pid

    def check(self) -> None:
        """AssertionError with its last output when it has ended."""
        assert self._outer is not None, f"{self.name} was not started"
        assert self._outer.poll() is None, f"{self.name} ended with {self._outer.returncode}:\n{self.last_output()}"

    def last_output(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def stop(self) -> None:
        """By SIGKILL: its state is no longer needed."""
        if self._outer is None:
            return
        # `nsenter` waits for the program itself, which is its child.
        for process in psutil.Process(self._outer.pid).children() if self._outer.poll() is None else ():
            process.kill()
        self.collect()

    def terminate(self) -> None:
        """By SIGTERM: it has things to do before it ends."""
        if self._outer is not None:
            self._outer.terminate()
            self.collect(CLEAN_UP_LIMIT_S)

    def collect(self, limit_s: float = LIMIT_S) -> None:
        """Wait for the end of a program that somebody else has killed."""
        if self._outer is not None:
            self._outer.wait(limit_s)
            self._outer = None


@dataclass
class Space:
    """A network, mount, process and host name namespace."""

    first: int
    """The process that holds it, by the number that the caller sees."""
    logs: Path
    programs: dict[str, Program] = field(default_factory=dict)

    def inside(self, *command: str | Path) -> list[str]:
        """The command line that runs a command in here."""
        return ["nsenter", f"--target={self.first}", "--net", "--mount", "--pid", "--uts", "--", *map(str, command)]

    def run(self, *command: str | Path) -> str:
        """The output of a command in this space; AssertionError if it fails."""
        return run(*self.inside(*command))

    def wire(self, script: str) -> None:
        """Run shell lines in the network alone: numbers of processes in them are the caller's."""
        run("nsenter", f"--target={self.first}", "--net", "--", "sh", "-ec", script)

    def start(self, name: str, *command: str | Path) -> Program:
        program = Program(name, self.inside(*command), self.logs / f"{name}.log")
        program.start()
        self.programs[name] = program
        return program

    def check(self) -> None:
        """AssertionError when one of the programs in here has ended."""
        for program in self.programs.values():
            program.check()

    def nest(self, name: str, first: Path) -> "Space":
        """A space of its own within this one; it ends with this one or by its first process."""
        (self.logs / name).mkdir(exist_ok=True)
        program = self.start(name, "unshare", *NAMESPACES, first)
        found = eventually(lambda: find_first(program.outer_pid, first), f"{name} to start", check=program.check)
        return Space(found, self.logs / name)

    def kill(self) -> None:
        """Everything in here at once, as if the power failed."""
        os.kill(self.first, signal.SIGKILL)
        self.collect()

    def collect(self) -> None:
        for program in self.programs.values():
            program.collect()


def find_first(outer: int, first: Path) -> int | None:
    """The process that runs `first` below `outer`, once it does."""
    for process in psutil.Process(outer).children(recursive=True):
        try:
            if process.exe() == str(first):
                return int(process.pid)
        except psutil.Error:
            continue  # it just became another program
    return None
