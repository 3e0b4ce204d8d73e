"""The zygote: one process that the server starts by exec, and whose forks the workers are.

It has imported what every worker needs, so that a worker is there within milliseconds and shares that memory, and it
has one thread and no locks, which is what makes forking safe; the server itself is never forked. It obeys commands from
one socket (SOCK_SEQPACKET, one JSON object each). When that closes, because the server ended or was killed, it kills
everything below it and ends. What it cannot understand it ignores.

    {"do": "spawn", "worker": 7, "name": "m_0_0", "python": "", "environment": {}, "directory": "", "entry": "a.b:f"}
        with three descriptors: the worker's end of its channel, the write end for its output, and a status socket
    {"do": "kill", "worker": 7, "signal": 9}

`python` "" is a fork of the zygote, else the interpreter to run. To a worker's status socket go {"pid": 4711}, then one
of {"exit": 3} and {"signal": 11}; or {"error": "…"} where it could not be started.

Nothing of a worker outlives it. Orphans below a worker become its children and, when it is gone, the zygote's: each
child of the zygote that is no worker is killed. That holds for daemons and other sessions too. Should the zygote itself
be killed, the kernel kills the workers.

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
from typing import Any

from halimede.workers.child import bootstrap

PRELOADED = ("numpy", "halimede.workers.child.main")

MAX_COMMAND_BYTES = 128 << 10
MAX_ERROR_CHARACTERS = 1024

CHANNEL_DESCRIPTOR = 512
"""From here on a worker's channel has its number: models that close everything below 256 keep it."""

OOM_SCORE = 500
"""How much rather than the server the kernel takes a worker when memory runs out, of 1,000."""

END_LIMIT_SECS = 5
"""After so long the zygote leaves alone what does not die even by SIGKILL, as a process that waits for a disk."""

CLEAN_UP_SECS = 0.7
"""How long multiprocessing's resource trackers may take to unlink what a dead worker has left in /dev/shm."""

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

DESCRIPTORS = struct.Struct("3i")

_COMMANDS: dict[str, dict[str, type]] = {
    "spawn": {"worker": int, "name": str, "python": str, "environment": dict, "directory": str, "entry": str},
    "kill": {"worker": int, "signal": int},
}


@dataclass(slots=True)
class Spawn:
    """A worker to be."""

    worker: int
    name: str
    python: str
    environment: dict[str, str]
    directory: str
    entry: str
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
    """Serve the socket until it closes; in a forked worker, the exit code that its entry returned."""
    if sys.platform != "linux":
        raise SystemExit(f"worker processes need Linux, this is {sys.platform}")
    _preload()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # What was imported is no garbage, and a worker that collected it would write to pages that all share.
    gc.collect()
    gc.freeze()
    # A worker leaves through here, so that none of the zygote's frames and objects is alive in it.
    spawn = Zygote(socket.socket(fileno=descriptor)).serve()
    return 0 if spawn is None else bootstrap.call(spawn.entry, spawn.channel)


def _preload() -> None:
    # OpenBLAS starts its threads when it is loaded, and of a process with threads only the one that forks survives.
    # Python keeps the environment twice; models see it as the server has it.
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for module in PRELOADED:
        import_module(module)
    if before is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = before


class Zygote:
    """The loop: commands in, deaths out."""

    def __init__(self, command: socket.socket) -> None:
        self._command = command
        self._workers: dict[int, Worker] = {}
        """By pid."""
        self._spared: dict[int, float] = {}
        """Processes that remove what a dead worker has left in the system, by pid, and until when they may."""

    def serve(self) -> Spawn | None:
        """None when the server is gone and everything below is dead; in each forked worker, what it is to be."""
        news, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # These mean the server, which may want its workers for a while yet; the zygote ends after it.
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        poll = select.poll()
        poll.register(news, select.POLLIN)
        poll.register(self._command, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(1000 if self._spared else None)]
            if self._spared:
                self._kill_strays()
            if news in ready:
                os.read(news, 4096)
                self._reap()
            if self._command.fileno() not in ready:
                continue
            received = self._receive()
            if received is None:
                self._end()
                return None
            spawn = self._obey(*received)
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

    def _obey(self, data: bytes, descriptors: list[int]) -> Spawn | None:
        command = _understand(data)
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
        zygote = os.getpid()
        # A signal that is sent to the worker before it has set its own handlers must wait for them, and not be ignored.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError as error:
            _tell(spawn.status, {"error": f"cannot fork: {error.strerror}"})
            os.close(spawn.status)
            pid = -1
        if pid == 0:
            self._become(spawn, zygote)
            return True
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if pid > 0:
            self._workers[pid] = Worker(spawn.worker, pid, spawn.status)
            _tell(spawn.status, {"pid": pid})
        return False

    def _become(self, spawn: Spawn, zygote: int) -> None:
        """In a fork: become the worker, as far as its entry."""
        # The object would close whatever has its number later.
        self._command.detach()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(1)  # it died before the kernel was told
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        os.setsid()
        _be_killed_first()
        os.dup2(spawn.output, 1)
        os.dup2(spawn.output, 2)
        spawn.channel = _move_up(spawn.channel)
        for descriptor in _open_descriptors() - {0, 1, 2, spawn.channel, spawn.status}:
            with suppress(OSError):
                os.close(descriptor)
        _reset_signals()
        with _telling(spawn.status, "cannot set its environment"):
            os.environ.update(spawn.environment)
        if spawn.directory:
            with _telling(spawn.status, f"cannot enter folder '{spawn.directory}'"):
                os.chdir(spawn.directory)
        if spawn.python:
            os.set_inheritable(spawn.channel, True)
            arguments = [spawn.python, bootstrap.PATH, str(spawn.channel), spawn.entry, spawn.name]
            with _telling(spawn.status, f"cannot run '{spawn.python}'"):
                os.execv(spawn.python, arguments)  # noqa: S606  # the interpreter that the server names
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)  # as Python starts with them
        _prctl(PR_SET_NAME, spawn.name.encode("utf-8", "replace")[:15])
        os.close(spawn.status)

    def _reap(self) -> None:
        """Tell of workers that died, once what they leave is being killed; each death among that comes here again."""
        ended: list[tuple[Worker, dict[str, Any]]] = []
        with suppress(ChildProcessError):
            # Not reaped yet, so that a worker's number stays taken until its group has been killed.
            while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                worker = self._workers.pop(dead.si_pid, None)
                if worker is not None:
                    _kill_group(worker.pid)
                    how = "exit" if dead.si_code == os.CLD_EXITED else "signal"
                    ended.append((worker, {how: dead.si_status}))
                os.waitpid(dead.si_pid, 0)
        self._kill_strays()
        for worker, exit_ in ended:
            _tell(worker.status, exit_)
            os.close(worker.status)

    def _kill_strays(self) -> None:
        """Kill every child that is no worker; what multiprocessing has to clean up after one gets some time for it."""
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
                # Trackers end by themselves once all else has: a moment each, and not for ever.
                if os.waitpid(-1, os.WNOHANG if self._spared else 0) == (0, 0):
                    time.sleep(0.005)
            except ChildProcessError:
                return


def _understand(data: bytes) -> dict[str, Any]:
    """A command with all its fields; {} for what is none."""
    try:
        command = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    fields = _COMMANDS.get(str(command.get("do"))) if isinstance(command, dict) else None
    if fields is None or command.keys() != {"do", *fields}:
        return {}
    return command if all(isinstance(command[name], type_) for name, type_ in fields.items()) else {}


def _tell(status: int, message: dict[str, Any]) -> None:
    with suppress(OSError):  # nobody asks for this worker any more
        os.write(status, json.dumps(message).encode())


@contextmanager
def _telling(status: int, what: str) -> Iterator[None]:
    """What fails in here ends the new worker, and the server is told."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        _tell(status, {"error": f"{what}: {why}"[:MAX_ERROR_CHARACTERS]})
        os._exit(1)


def _prctl(option: int, argument: int | bytes) -> None:
    # Failures are those of other kernels' options; what depends on these is said in the module's first lines.
    if isinstance(argument, bytes):
        ctypes.CDLL(None).prctl(option, ctypes.c_char_p(argument), 0, 0, 0)
    else:
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(argument), 0, 0, 0)


def _be_killed_first() -> None:
    with suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        score = min(int(file.read()) + OOM_SCORE, 1000)
        file.seek(0)
        file.write(str(score))


def _move_up(channel: int) -> int:
    with suppress(OSError):  # where the limit of open files is lower than that
        return fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, CHANNEL_DESCRIPTOR)
    return channel


def _open_descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _kill_group(leader: int) -> None:
    """The worker; its children become the zygote's by that, and are killed as strays."""
    if not os.path.exists(_CHILDREN % (os.getpid(), os.getpid())):
        with suppress(OSError):
            os.killpg(leader, signal.SIGKILL)
    with suppress(OSError):
        os.kill(leader, signal.SIGKILL)


def _is_resource_tracker(pid: int) -> bool:
    """Whether it is what multiprocessing starts beside a process to unlink its shared memory and semaphores."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"multiprocessing.resource_tracker" in file.read(4096)
    return False


_CHILDREN = "/proc/%d/task/%d/children"


def _children() -> set[int]:
    """Of this process, whose one thread has its number."""
    pid = os.getpid()
    try:
        with open(_CHILDREN % (pid, pid)) as file:
            return {int(child) for child in file.read().split()}
    except OSError:
        return set()  # a kernel without this file: groups are killed all the same
