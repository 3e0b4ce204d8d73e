"""A real server process on free loopback ports."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.forked import Process, start_python

LISTENING = re.compile(r"(HTTPService|GRPCInferenceService|Metrics Service) listens at [^ ]*?:(\d+)")
START_LIMIT_S = 60.0
LOOPBACK = (
    *("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"),
    *("--http-port=0", "--grpc-port=0", "--metrics-port=0"),
    # On every machine: tests count the processes, files and memory of a server. `shell/front_processes` has servers
    # with more.
    "--frontend-processes=1",
)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> object:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        document = json.loads(self.body)
        assert set(document) == {"error"}
        return document["error"]


@dataclass
class RunningServer:
    """A process of `halimede serve`. Ports are read from its `… listens at …` lines."""

    process: subprocess.Popen[bytes] | Process
    log_path: Path
    ports: dict[str, int] = field(default_factory=dict)
    answer_limit_s: float = 30.0
    """How long an answer may take."""

    @property
    def http_port(self) -> int:
        return self.ports["HTTPService"]

    @property
    def grpc_port(self) -> int:
        return self.ports["GRPCInferenceService"]

    @property
    def metrics_port(self) -> int:
        return self.ports["Metrics Service"]

    @property
    def http_url(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def request(
        self,
        method: str,
        path: str,
        body: bytes | str | object = b"",
        headers: dict[str, str] | None = None,
        *,
        port: int = 0,
    ) -> Answer:
        """Send one HTTP request on a new connection; a body that is neither bytes nor text is sent as JSON."""
        raw = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", port or self.http_port, timeout=self.answer_limit_s)
        try:
            connection.request(method, path, raw or None, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, body: bytes | str | object = b"", headers: dict[str, str] | None = None) -> Answer:
        return self.request("POST", path, body, headers)

    def metrics(self) -> str:
        answer = self.request("GET", "/metrics", port=self.metrics_port)
        assert answer.status == 200
        return answer.body.decode()

    def wait_ready(self) -> None:
        def ready() -> bool:
            # A server that ends while it starts refuses connections; its log says why.
            with suppress(ConnectionError):
                return self.get("/v2/health/ready").status == 200
            return False

        wait_until(ready, "the server to be ready", self)

    def stop(self, limit_s: float = 30.0) -> int:
        """Send SIGTERM and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


Start = Callable[..., RunningServer]
"""Starts a server that is stopped at the end of the test."""


def wait_until(condition, what: str, server: RunningServer | None = None, limit_s: float = START_LIMIT_S) -> None:  # type: ignore[no-untyped-def]
    """Poll every few milliseconds, less often after a while: a poll may cost more than the server's own work."""
    began_at = time.monotonic()
    deadline = began_at + limit_s
    while not condition():
        if server is not None and server.process.poll() is not None:
            raise AssertionError(f"the server exited with {server.process.returncode} before {what}\n{server.log}")
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}\n{server.log if server else ''}"
        waited_s = time.monotonic() - began_at
        time.sleep(0.005 if waited_s < 0.1 else 0.02 if waited_s < 1 else 0.05)


def start_server(
    log_directory: Path,
    arguments: Sequence[str | Path],
    *,
    ready: bool = True,
    environment: dict[str, str] | None = None,
    forked: bool = True,
    first: str = "",
) -> RunningServer:
    """Start on loopback with free ports and wait until it listens, and with `ready` until it is ready.

    Of ports and addresses the given arguments have precedence. The server is a fork of a process that has imported it,
    unless it is not to be `forked`. It runs the code `first` before all else.
    """
    program = [*halimede(first), "serve", *LOOPBACK, *(str(argument) for argument in arguments)]
    if not forked:
        return start_command(log_directory, [sys.executable, *program], ready=ready, environment=environment)
    log_path = _new_log(log_directory)
    with log_path.open("wb") as log:
        process = start_python(*program, stdout=log, stderr=log, environment={**os.environ, **(environment or {})})
    return _wait_started(RunningServer(process, log_path), ready=ready)


@contextmanager
def serving(log_directory: Path, arguments: Sequence[str | Path], **options: Any) -> Iterator[RunningServer]:
    """`start_server` for several tests, after which the server must still run and then stop with status 0."""
    running = start_server(log_directory, arguments, **options)
    yield running
    assert running.process.poll() is None, f"the server died\n{running.log}"
    assert running.stop() == 0, running.log


def halimede(first: str = "") -> list[str]:
    """Python's arguments to run the command `halimede`, after the code `first`."""
    if not first:
        return ["-m", "halimede"]
    return ["-c", f"{first}\nimport runpy\nrunpy.run_module('halimede', run_name='__main__', alter_sys=True)"]


def start_command(
    log_directory: Path, command: Sequence[str], *, ready: bool = True, environment: dict[str, str] | None = None
) -> RunningServer:
    """As `start_server`, with the whole command line."""
    log_path = _new_log(log_directory)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **(environment or {})}
        )
    return _wait_started(RunningServer(process, log_path), ready=ready)


def _new_log(directory: Path) -> Path:
    return directory / f"server-{time.monotonic_ns()}.log"


def _wait_started(server: RunningServer, *, ready: bool) -> RunningServer:
    def listening() -> bool:
        server.ports = {name: int(port) for name, port in LISTENING.findall(server.log)}
        return len(server.ports) == 3

    try:
        wait_until(listening, "its ports", server)
        if ready:
            server.wait_ready()
    except BaseException:
        server.kill()
        raise
    return server
