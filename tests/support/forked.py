"""Runs Python programs in forks of one process that has imported the server's commands, which is ten times faster than to
start an interpreter.

A program finds modules imported that it did not import itself: a test of imports needs an interpreter of its own.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

IMPORTED = (
    "halimede.cli",
    "halimede.backend_kit.kit",
    "halimede.commands.check",
    "halimede.commands.check_backend",
    "halimede.commands.explain_config",
)
MAX_MESSAGE_BYTES = 128 << 10


def run_python(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    limit_s: float = 100.0,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of Python with these arguments, `-m MODULE …` or `-c CODE …`; captures the output."""
    return _forks().run([*map(str, arguments)], {**os.environ, **(environment or {})}, directory or Path.cwd(), limit_s)


@cache
def _forks() -> "Forks":
    made = Forks()
    atexit.register(made.close)
    return made


class Forks:
    """The process that forks for each program."""

    def __init__(self) -> None:
        self._channel, their_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # -P: the folder of this file is no place of modules.
        command = [sys.executable, "-P", __file__, str(their_end.fileno()), *IMPORTED]
        # A thread of OpenBLAS would be missing in a fork.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        with their_end:
            self._process = subprocess.Popen(
                command,
                pass_fds=[their_end.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def run(
        self, arguments: list[str], environment: Mapping[str, str], directory: Path, limit_s: float
    ) -> subprocess.CompletedProcess[str]:
        program = {"arguments": arguments, "environment": dict(environment), "directory": str(directory)}
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            self._channel.settimeout(limit_s)
            socket.send_fds(self._channel, [json.dumps(program).encode()], [output.fileno(), errors.fileno()])
            try:
                code = self._channel.recv(64)
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)
                raise
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode())
        assert code, "the process that forks has ended"
        return subprocess.CompletedProcess(arguments, int(code), *texts)

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


def main(descriptor: int, modules: list[str]) -> None:
    for module in modules:
        import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack threads"
    gc.freeze()
    with socket.socket(fileno=descriptor) as channel:
        while True:
            message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 2)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                break
            for each in descriptors:
                os.close(each)
            _, status = os.waitpid(pid, 0)
            channel.send(str(os.waitstatus_to_exitcode(status)).encode())
    become(descriptors, **json.loads(message))


def become(outputs: list[int], arguments: list[str], environment: dict[str, str], directory: str) -> None:
    """Run the program as this process."""
    for target, descriptor in enumerate(outputs, 1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    kind, program, *sys.argv[1:] = arguments
    sys.argv[0] = kind
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(program, "<string>", "exec"), names)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
