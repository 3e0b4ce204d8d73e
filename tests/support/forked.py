"""Runs Python programs in forks of a process that has imported what they import, which is ten times faster than to start
an interpreter.

A program finds modules imported that it did not import itself, and what the interpreter and its libraries read of the
environment when they start has no effect, except for PYTHONPATH and LD_LIBRARY_PATH: a test of these needs an
interpreter of its own.
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

SERVER = (
    "encodings.idna",
    "halimede.app",
    "halimede.cli",
    "halimede.conformance_kit.kit",
    "halimede.backends.identity",
    "halimede.backends.onnxruntime.backend",
    "halimede.commands.check",
    "halimede.commands.check_backend",
    "halimede.commands.debug",
    "halimede.commands.explain_config",
    "halimede.commands.fetch",
    "halimede.commands.planner",
    "halimede.commands.serve",
    "halimede.fetch.fetcher",
    "pynvml",
)
OPERATOR = ("halimede_operator.main", "halimede_operator.metrics_api.main", "halimede_operator.operator")
MAX_MESSAGE_BYTES = 128 << 10
NUMBER = struct.Struct("i")
"""A process identifier or an exit code, in the pipe of a process."""


class Process:
    """A running fork, with the methods of `subprocess.Popen` that tests use. It leads a process group."""

    def __init__(self, arguments: list[str], numbers: int) -> None:
        """`numbers` is a pipe with the process identifier, and at the end with the exit code."""
        self.args = arguments
        self.returncode: int | None = None
        self._numbers = numbers
        self._reading = threading.Lock()
        weakref.finalize(self, os.close, numbers)
        self.pid = self._read()

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, limit_s: float | None) -> int | None:
        ready = select.poll()
        ready.register(self._numbers, select.POLLIN)
        if self.returncode is None and ready.poll(limit_s and limit_s * 1000):
            with self._reading:
                if self.returncode is None:
                    self.returncode = self._read()
        return self.returncode

    def _read(self) -> int:
        data = os.read(self._numbers, NUMBER.size)
        assert data, "the process that forks has ended"
        return int(NUMBER.unpack(data)[0])


def start_python(
    *arguments: str | Path,
    stdout: IO[Any],
    stderr: IO[Any],
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    imported: tuple[str, ...] = SERVER,
) -> Process:
    """As `subprocess.Popen` of Python with these arguments, `-m MODULE …` or `-c CODE …`, without input.

    The process is killed when this process ends.
    """
    texts = [*map(str, arguments)]
    variables = dict(os.environ if environment is None else environment)
    program = {"arguments": texts, "environment": variables, "directory": str(directory or Path.cwd())}
    numbers, their_end = os.pipe()
    try:
        descriptors = [their_end, stdout.fileno(), stderr.fileno()]
        socket.send_fds(_forks(imported), [json.dumps(program).encode()], descriptors)
    finally:
        os.close(their_end)
    return Process(texts, numbers)


def run_python(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    limit_s: float = 100.0,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of Python with these arguments, and with these variables more; captures the output."""
    variables = {**os.environ, **(environment or {})}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start_python(*arguments, stdout=output, stderr=errors, environment=variables, directory=directory)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(process.args, code, *texts)


@cache
def _forks(modules: tuple[str, ...]) -> socket.socket:
    """The channel to a process that has imported the modules and forks for each program."""
    channel, their_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with their_end:
        process = subprocess.Popen(
            # -P: the folder of this file is no place of modules.
            [sys.executable, "-P", __file__, str(their_end.fileno()), *modules],
            pass_fds=[their_end.fileno()],
            stdin=subprocess.DEVNULL,
            # Python chooses here how a program's output is buffered: as in a file, not as in a terminal.
            stdout=subprocess.DEVNULL,
            # A thread of OpenBLAS would be missing in a fork.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
    atexit.register(process.wait)
    atexit.register(channel.close)
    return channel


def main(descriptor: int, modules: list[str]) -> None:
    for module in modules:
        import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack threads"
    # A collection would write to, and so copy, each page with objects in a fork.
    gc.freeze()
    with socket.socket(fileno=descriptor) as channel:
        forked = fork_until_closed(channel)
    if forked is not None:
        become(*forked)


def fork_until_closed(channel: socket.socket) -> tuple[bytes, list[int]] | None:
    """Fork for each program of the channel: returns in each fork with its program and output, and with None at the end."""
    running: dict[int, tuple[int, int]] = {}
    """By descriptor of a process: its identifier, and the pipe for its exit code."""
    ready = select.poll()
    ready.register(channel, select.POLLIN)
    while True:
        for descriptor, _ in ready.poll():
            if descriptor != channel.fileno():
                ready.unregister(descriptor)
                pid, numbers = running.pop(descriptor)
                _, status = os.waitpid(pid, 0)
                with suppress(BrokenPipeError):  # the process that started it does not read its exit code
                    os.write(numbers, NUMBER.pack(os.waitstatus_to_exitcode(status)))
                os.close(numbers)
                os.close(descriptor)
                continue
            program, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 3)
            if not program:
                for pid, _ in running.values():
                    os.killpg(pid, signal.SIGKILL)
                return None
            numbers, *outputs = descriptors
            pid = os.fork()
            if pid == 0:
                # Here, too: it may run before the call below.
                os.setpgid(0, 0)
                return program, outputs
            os.setpgid(pid, pid)
            process = os.pidfd_open(pid)
            running[process] = pid, numbers
            ready.register(process, select.POLLIN)
            for output in outputs:
                os.close(output)
            os.write(numbers, NUMBER.pack(pid))


def become(program: bytes, outputs: list[int]) -> None:
    """Run the program as this process."""
    for target, descriptor in enumerate(outputs, 1):
        os.dup2(descriptor, target)
    os.closerange(3, 1 << 20)
    made = json.loads(program)
    os.chdir(made["directory"])
    known = os.environ.get("LD_LIBRARY_PATH")
    os.environ.clear()
    os.environ.update(made["environment"])
    sys.path[:0] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if (libraries := os.environ.get("LD_LIBRARY_PATH", "")) and libraries != known:
        # The linker read the variable when the interpreter started. It finds a loaded library by its name. A value of
        # the machine, such as the folder of CUDA's libraries, is known already.
        for library in Path(libraries).glob("*.so*"):
            ctypes.CDLL(str(library))
    kind, text, *sys.argv[1:] = made["arguments"]
    sys.argv[0] = kind
    if kind == "-m":
        runpy.run_module(text, run_name="__main__", alter_sys=True)
    else:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, "<string>", "exec"), names)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
