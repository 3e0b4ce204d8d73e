"""The zygote: one process that the server starts by exec, and from which workers are forked.

It has imported what every worker needs, so that workers start within milliseconds and share that memory. It has one
thread and no locks, which makes forking safe; the server itself is never forked. It performs commands from one socket
(SOCK_SEQPACKET, one JSON object each). When the socket closes, because the server ended or was killed, it kills all
processes below it and ends. It ignores invalid commands.

    {"do": "spawn", "worker": 7, "name": "m_0_0", "python": "", "environment": {}, "directory": "", "entry": "a.b:f",
     "module": "a.c"}
        with three descriptors: the worker's end of its channel, the write end for its output, and a status socket
    {"do": "kill", "worker": 7, "signal": 9}

On the same socket it sends a beat, one byte, several times a second, so that the server notices if it hangs.

A server has one zygote more for each runtime that takes seconds to import (`backends.api.Preloads`).

`python` is the interpreter to run, "" for a fork of the zygote, which imports `module` first, so that all later workers
have it. The zygote writes {"pid": 4711} to a worker's status socket, then {"exit": 3} or {"signal": 11}; or
{"error": "…"} if the worker could not be started, with "is_brief": true if the system refused the process.

No process that a worker starts outlives it. Orphans below a worker become its children and, after its end, children of
the zygote, which kills every child that is not a worker. This includes daemons and processes in other sessions. If the
zygote itself is killed, the kernel kills the workers.

Standard library only (with numpy preloaded), for Linux.
"""

import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

from halimede.core.hangs import BEAT_SECS
from halimede.processes import bootstrap
from halimede.processes.blas import ONE_THREAD, loading_blas

PRELOADED = ("numpy", "halimede.workers.host.main")

PRELOAD_VARIABLE = "HALIMEDE_ZYGOTE_PRELOAD"
"""The environment variable with the `module:function` that the zygote calls before it forks; workers do not have it."""

BEAT = b"."
MAX_COMMAND_BYTES = 128 << 10
MAX_ERROR_CHARACTERS = 1024

CHANNEL_DESCRIPTOR = 512
"""The lowest descriptor for a worker's channel, so that models that close all descriptors below 256 do not close it."""

OOM_SCORE = 500
"""Added to a worker's out-of-memory score (of 1,000), so that the kernel kills workers before the server."""

END_LIMIT_SECS = 5
"""How long the zygote waits at its end for processes that SIGKILL does not end, such as one that waits for a disk."""

CLEAN_UP_SECS = 0.7
"""How long multiprocessing's resource trackers may take to unlink the files of a dead worker in /dev/shm."""

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

DESCRIPTORS = struct.Struct("3i")

_COMMANDS: dict[str, dict[str, type]] = {
    "spawn": {
        "worker": int,
        "name": str,
        "python": str,
        "environment": dict,
        "directory": str,
        "entry": str,
        "module": str,
    },
    "kill": {"worker": int, "signal": int},
}


@dataclass(slots=True)
class Spawn:
    """A worker that is to be started."""

    worker: int
    name: str
    python: str
    environment: dict[str, str]
    directory: str
    entry: str
    module: str
    channel: int
    output: int
    status: int


@dataclass(slots=True)
class Worker:
    """A worker that has not been reaped."""

    number: int
    pid: int
    status: int


def main(descriptor: int) -> int:
    """Serve the socket until it closes. In a forked worker, returns the exit code of its entry."""
    if sys.platform != "linux":
        raise SystemExit(f"worker processes need Linux, this is {sys.platform}")
    # Imported objects are not garbage, and a worker that traversed them would write to shared pages.
    gc.disable()
    _preload()
    gc.freeze()
    gc.enable()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A worker returns to here before it runs, so that the zygote's frames and objects are freed in it.
    spawn = Zygote(socket.socket(fileno=descriptor)).serve()
    return 0 if spawn is None else bootstrap.call(spawn.entry, spawn.channel)


def _preload() -> None:
    # OpenBLAS starts its threads when it is loaded, and a fork has only the thread that called fork.
    with loading_blas(ONE_THREAD):
        for module in PRELOADED:
            import_module(module)
        if entry := os.environ.pop(PRELOAD_VARIABLE, ""):
            _preload_runtime(entry)


def _preload_runtime(entry: str) -> None:
    """Call `module:function`. A worker that needs it calls it again, so its errors and its output come from there."""
    module, _, function = entry.partition(":")
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    with suppress(BaseException):
        getattr(import_module(module), function)()
    os.dup2(stderr, 2)
    os.close(stderr)
    os.close(nothing)


class Zygote:
    """The loop: commands in, deaths out."""

    def __init__(self, command: socket.socket) -> None:
        self._command = command
        self._workers: dict[int, Worker] = {}
        """By pid."""
        self._spared: dict[int, float] = {}
        """Processes that clean up after a dead worker, by pid, and the time until which they may run."""

    def serve(self) -> Spawn | None:
        """Serve until the server has ended and all processes below are dead, then return None. Returns the command in
        each forked worker."""
        wakeup, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # These signals are for the server, which may still need its workers; the zygote ends after the server.
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        poll.register(self._command, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(BEAT_SECS * 1000)]
            with suppress(OSError):  # the server does not read, or has ended
                self._command.send(BEAT, socket.MSG_DONTWAIT)
            if self._spared:
                self._kill_strays()
            if wakeup in ready:
                os.read(wakeup, 4096)
                self._reap()
            if self._command.fileno() not in ready:
                continue
            received = self._receive()
            if received is None:
                self._end()
                return None
            spawn = self._perform(*received)
            if spawn is not None:
                return spawn

    def _receive(self) -> tuple[bytes, list[int]] | None:
        try:
            data, ancillary, _, _ = self._command.recvmsg(
                MAX_COMMAND_BYTES, socket.CMSG_SPACE(DESCRIPTORS.size), socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return None
        descriptors: list[int] = []
        for _, _, passed in ancillary:
            descriptors += struct.unpack(f"{len(passed) // 4}i", passed[: len(passed) // 4 * 4])
        return (data, descriptors) if data or descriptors else None

    def _perform(self, data: bytes, descriptors: list[int]) -> Spawn | None:
        command = _parse_command(data)
        if command.pop("do", "") == "kill":
            self._kill(command["worker"], command["signal"])
        elif command and len(descriptors) == 3:
            spawn = Spawn(**command, channel=descriptors[0], output=descriptors[1], status=descriptors[2])
            if self._spawn(spawn):
                return spawn
            descriptors = [spawn.channel, spawn.output]
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _kill(self, number: int, signal_number: int) -> None:
        for worker in self._workers.values():
            if worker.number == number:
                with suppress(OSError, OverflowError):
                    os.kill(worker.pid, signal_number)

    def _spawn(self, spawn: Spawn) -> bool:
        """Fork; True in the worker. The status socket stays open here until the worker has been reaped."""
        if spawn.module and not spawn.python and spawn.module not in sys.modules:
            # An error of the import comes from the worker, which imports it, too.
            with suppress(Exception):
                import_module(spawn.module)
            gc.collect()
            gc.freeze()
        zygote = os.getpid()
        # A signal for the worker stays pending until the worker has set its own handlers, and is not lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError as error:
            _report(spawn.status, {"error": f"cannot fork: {error.strerror}", "is_brief": True})
            os.close(spawn.status)
            pid = -1
        if pid == 0:
            self._become_worker(spawn, zygote)
            return True
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if pid > 0:
            self._workers[pid] = Worker(spawn.worker, pid, spawn.status)
            _report(spawn.status, {"pid": pid})
        return False

    def _become_worker(self, spawn: Spawn, zygote: int) -> None:
        """In the fork: set up the worker's process, up to the call of its entry."""
        # Otherwise the object would later close another file with the same descriptor.
        self._command.detach()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(1)  # the zygote died before PR_SET_PDEATHSIG took effect
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        os.setsid()
        _raise_oom_score()
        os.dup2(spawn.output, 1)
        os.dup2(spawn.output, 2)
        spawn.channel = _move_up(spawn.channel)
        _close_all_but({0, 1, 2, spawn.channel, spawn.status})
        _reset_signals()
        with _reporting(spawn.status, "cannot set its environment"):
            os.environ.update(spawn.environment)
        if spawn.directory:
            with _reporting(spawn.status, f"cannot enter folder '{spawn.directory}'"):
                os.chdir(spawn.directory)
        if spawn.python:
            os.set_inheritable(spawn.channel, True)
            arguments = [spawn.python, bootstrap.PATH, str(spawn.channel), spawn.entry, spawn.name]
            with _reporting(spawn.status, f"cannot run '{spawn.python}'"):
                os.execv(spawn.python, arguments)  # noqa: S606  # the interpreter that the server names
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)  # as Python starts with them
        _prctl(PR_SET_NAME, spawn.name.encode("utf-8", "replace")[:15])
        os.close(spawn.status)

    def _reap(self) -> None:
        """Report dead workers, after killing the processes that they leave. Those are reaped by later calls."""
        ended: list[tuple[Worker, dict[str, Any]]] = []
        with suppress(ChildProcessError):
            # WNOWAIT: a worker's pid stays reserved until its process group has been killed.
            while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                worker = self._workers.pop(dead.si_pid, None)
                if worker is not None:
                    _kill_group(worker.pid)
                    how = "exit" if dead.si_code == os.CLD_EXITED else "signal"
                    ended.append((worker, {how: dead.si_status}))
                os.waitpid(dead.si_pid, 0)
        self._kill_strays()
        for worker, exit_ in ended:
            _report(worker.status, exit_)
            os.close(worker.status)

    def _kill_strays(self) -> None:
        """Kill every child that is not a worker; resource trackers of multiprocessing get CLEAN_UP_SECS to finish."""
        now = time.monotonic()
        strays = _children() - self._workers.keys()
        self._spared = {pid: until for pid, until in self._spared.items() if pid in strays}
        for pid in strays:
            if pid not in self._spared and _is_resource_tracker(pid):
                self._spared[pid] = now + CLEAN_UP_SECS
            if now < self._spared.get(pid, 0):
                continue
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _end(self) -> None:
        for pid in self._workers:
            _kill_group(pid)
        self._workers.clear()
        signal.alarm(END_LIMIT_SECS)
        while True:
            self._kill_strays()
            try:
                # Resource trackers end soon after all other processes.
                if os.waitpid(-1, os.WNOHANG if self._spared else 0) == (0, 0):
                    time.sleep(0.005)
            except ChildProcessError:
                return


def _parse_command(data: bytes) -> dict[str, Any]:
    """A command with all its fields; {} if it is invalid."""
    try:
        command = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    fields = _COMMANDS.get(str(command.get("do"))) if isinstance(command, dict) else None
    if fields is None or command.keys() != {"do", *fields}:
        return {}
    return command if all(isinstance(command[name], type_) for name, type_ in fields.items()) else {}


def _report(status: int, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the server has closed the status socket
        os.write(status, json.dumps(message).encode())


@contextmanager
def _reporting(status: int, what: str) -> Iterator[None]:
    """Report an error of the block to the server and end the new worker."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        _report(status, {"error": f"{what}: {why}"[:MAX_ERROR_CHARACTERS]})
        os._exit(1)


def _prctl(option: int, argument: int | bytes) -> None:
    # Errors are ignored: the options exist on every kernel that is supported.
    if isinstance(argument, bytes):
        ctypes.CDLL(None).prctl(option, ctypes.c_char_p(argument), 0, 0, 0)
    else:
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(argument), 0, 0, 0)


def _raise_oom_score() -> None:
    with suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        score = min(int(file.read()) + OOM_SCORE, 1000)
        file.seek(0)
        file.write(str(score))


def _move_up(channel: int) -> int:
    with suppress(OSError):  # the limit of open files may be lower
        return fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, CHANNEL_DESCRIPTOR)
    return channel


def _close_all_but(kept: set[int]) -> None:
    try:
        found = {int(name) for name in os.listdir("/proc/self/fd")}
    except OSError:  # /proc is not mounted
        for below, above in pairwise((*sorted(kept), os.sysconf("SC_OPEN_MAX"))):
            os.closerange(below + 1, above)
        return
    for descriptor in found - kept:
        with suppress(OSError):
            os.close(descriptor)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _kill_group(leader: int) -> None:
    """Kill the worker. Its children become children of the zygote, which kills them as strays."""
    if not os.path.exists(_CHILDREN % (os.getpid(), os.getpid())):
        with suppress(OSError):
            os.killpg(leader, signal.SIGKILL)
    with suppress(OSError):
        os.kill(leader, signal.SIGKILL)


def _is_resource_tracker(pid: int) -> bool:
    """Whether it is the process of multiprocessing that unlinks shared memory and semaphores of another process."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"multiprocessing.resource_tracker" in file.read(4096)
    return False


_CHILDREN = "/proc/%d/task/%d/children"


def _children() -> set[int]:
    """The children of this process, whose only thread has its pid."""
    pid = os.getpid()
    try:
        with open(_CHILDREN % (pid, pid)) as file:
            return {int(child) for child in file.read().split()}
    except OSError:
        return set()  # a kernel without this file: `_kill_group` kills process groups instead
