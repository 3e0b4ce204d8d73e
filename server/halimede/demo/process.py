"""A `halimede serve` child process on free loopback ports."""

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

LISTENING = {
    "http": re.compile(r"HTTPService listens at \S+:(\d+)"),
    "grpc": re.compile(r"GRPCInferenceService listens at \S+:(\d+)"),
    "metrics": re.compile(r"Metrics Service listens at \S+:(\d+)"),
}
LOOPBACK = "127.0.0.1"
POLL_S = 0.01
PROCESS_NAME_LIMIT = 15


class ServerNotReadyError(Exception):
    """The server ended or took too long to become ready; the text has the end of its log."""


class ServerProcess:
    """Runs from construction to the end of the `with` block; its log goes to the file `log`."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "halimede", "serve", *arguments]
        command += [f"--{service}-address={LOOPBACK}" for service in LISTENING]
        command += [f"--{service}-port=0" for service in LISTENING]
        with log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - this project's own command
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def address(self, service: str) -> str:
        """`host:port` of "http", "grpc" or "metrics"; known once the server is ready."""
        found = LISTENING[service].search(self.log.read_text(errors="replace"))
        if found is None:
            raise ServerNotReadyError(f"the server has not started {service}; its log is {self.log}")
        return f"{LOOPBACK}:{found[1]}"

    def wait_ready(self, timeout_s: float = 60) -> None:
        """Return when the server reports that it is ready, or raise ServerNotReadyError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._is_ready():
                return
            time.sleep(POLL_S)
        code = self._process.poll()
        what = f"not ready after {timeout_s:g} s" if code is None else f"ended with code {code}"
        raise ServerNotReadyError(f"the server is {what}:\n{self.log.read_text(errors='replace')[-3000:]}")

    def wait_logged(self, text: str, timeout_s: float = 10) -> None:
        """Return when the log contains the text, or raise ServerNotReadyError."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log.read_text(errors="replace"):
            if time.monotonic() > deadline:
                raise ServerNotReadyError(f"the server's log does not say '{text}'; it is {self.log}")
            time.sleep(POLL_S)

    def worker_pid(self, instance: str) -> int | None:
        """The process of this model instance, whose name it has; None if there is none."""
        parents: dict[int, int] = {}
        found: list[int] = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                pid, name, rest = re.split(r" \(|\) (?=\w )", stat.read_text(errors="replace"), maxsplit=2)
            except OSError:
                continue  # it has ended
            parents[int(pid)] = int(rest.split()[1])
            if name == instance[:PROCESS_NAME_LIMIT]:
                found.append(int(pid))
        # The parent of the workers is the process that forks them, and its parent is the server.
        return next((pid for pid in found if parents.get(parents[pid]) == self.pid), None)

    def stop(self, timeout_s: float = 30) -> int:
        """Stop the process, with SIGKILL if it does not end in time, and return its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _is_ready(self) -> bool:
        found = LISTENING["http"].search(self.log.read_text(errors="replace"))
        if found is None:
            return False
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{found[1]}/v2/health/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
