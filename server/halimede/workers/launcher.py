"""Starts worker processes, and says how each ended: the server's side of the zygote.

The zygote is started with the first worker, and again with the next one after it died. Thread-safe, and used with an
event loop or without one: loads run on threads of their own.
"""

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from halimede.core.supervise import Exit, oom_count_files, oom_kills
from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.child import bootstrap
from halimede.workers.zygote import DESCRIPTORS, MAX_COMMAND_BYTES

log = logging.getLogger(__name__)

ZYGOTE_ENTRY = "halimede.workers.zygote:main"

SEND_LIMIT_SECS = 10.0
"""A zygote that took no command for so long hangs. Its socket has room for some hundred, so that only who starts more
than these while it imports waits at all."""

END_LIMIT_SECS = 5.0

_NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


class Launcher:
    """Starts worker processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygote: Zygote | None = None
        self._next_number = 1
        self._closed = False
        self._oom_counter = _find_oom_counter()

    def __repr__(self) -> str:
        zygote = self._zygote
        return f"<Launcher {'closed' if self._closed else f'zygote={zygote.process.pid}' if zygote else 'idle'}>"

    @property
    def zygote_pid(self) -> int | None:
        """None while there is none; it may have died since."""
        zygote = self._zygote
        return zygote.process.pid if zygote is not None else None

    def spawn(
        self,
        name: str,
        *,
        entry: str,
        python: str = "",
        environment: Mapping[str, str] = _NO_ENVIRONMENT,
        working_directory: str | None = None,
    ) -> "WorkerProcess":
        """Start a process that calls `entry` (`module:function`) with its channel's descriptor.

        `python` is the interpreter to run, "" for a fork of the zygote, which has read the variables of Python itself
        (PYTHONPATH) already. `environment` is set over the server's. Returns before the process is there: what keeps it
        from coming up is its Exit. InferenceError UNAVAILABLE when the system refuses, or when the launcher is closed.
        """
        if sys.platform != "linux":
            raise InferenceError(ErrorCode.UNSUPPORTED, f"worker processes need Linux, this is {sys.platform}")
        ours: list[socket.socket | int] = []
        theirs: list[socket.socket | int] = []
        try:
            channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            ours.append(channel)
            theirs.append(their_channel)
            status, their_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.append(status)
            theirs.append(their_status)
            output, their_output = os.pipe()
            ours.append(output)
            theirs.append(their_output)
            os.set_blocking(output, False)
            status.setblocking(False)
            their_status.setblocking(False)
            command: dict[str, object] = {
                "do": "spawn",
                "name": name,
                "entry": entry,
                "python": python,
                "environment": dict(environment),
                "directory": working_directory or "",
            }
            kills = self._oom_kills()
            passed = (their_channel.fileno(), their_output, their_status.fileno())
            zygote, number = self._send_spawn(command, passed)
        except OSError as error:
            _close(ours)
            text = f"cannot start a process for '{name}': {error.strerror or error}"
            raise InferenceError(ErrorCode.UNAVAILABLE, text) from error
        except InferenceError:
            _close(ours)
            raise
        finally:
            _close(theirs)
        return WorkerProcess(self, zygote, name, number, channel, output, status, kills)

    def close(self) -> None:
        """End the zygote with every worker and wait for that, blocking for seconds at most; nothing starts any more."""
        with self._lock:
            self._closed = True
            zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.end(END_LIMIT_SECS)

    def send_kill(self, zygote: "Zygote", number: int, signal_number: int) -> None:
        """Have the worker of this number, if it is still there, get the signal."""
        zygote.send_soon({"do": "kill", "worker": number, "signal": signal_number})

    def has_oom_kills_since(self, count: int) -> bool:
        """Whether the kernel has killed something of this server for want of memory since `count` was read."""
        return self._oom_kills() > count

    def _send_spawn(self, command: dict[str, object], passed: tuple[int, int, int]) -> "tuple[Zygote, int]":
        with self._lock:
            number, self._next_number = self._next_number, self._next_number + 1
            command["worker"] = number
            if self._zygote is not None:
                try:
                    self._zygote.send(command, passed)
                    return self._zygote, number
                except (BrokenPipeError, ConnectionResetError, TimeoutError):
                    self._zygote.end(0)
                    log.error("the process that starts workers %s: started again", self._zygote.how_it_ended())
                    self._zygote = None
            if self._closed:
                raise InferenceError(ErrorCode.UNAVAILABLE, "no process is started: the server is stopping")
            self._zygote = Zygote()
            self._zygote.send(command, passed)
            return self._zygote, number

    def _oom_kills(self) -> int:
        if self._oom_counter is None:
            return 0
        try:
            return oom_kills(self._oom_counter.read_text())
        except OSError:
            return 0


class Zygote:
    """One life of the zygote; made by starting it. `command` is the server's end of its socket."""

    def __init__(self) -> None:
        self.command, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.command.settimeout(SEND_LIMIT_SECS)
        # The same socket, for those who must not wait.
        self._quick = self.command.dup()
        self._quick.setblocking(False)
        try:
            # A session of its own: what a terminal sends to the server is not for it, nor for workers. It learns of the
            # server's end by its socket: the kernel's signal for a parent's death would come when the thread ends that
            # started it.
            self.process = subprocess.Popen(  # noqa: S603  # our own interpreter and file
                [sys.executable, bootstrap.PATH, str(theirs.fileno()), ZYGOTE_ENTRY],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            self.command.close()
            self._quick.close()
            raise
        finally:
            theirs.close()

    def send(self, command: dict[str, object], passed: tuple[int, ...] = ()) -> None:
        """One command; OSError when the zygote has died, hangs, or the system refuses."""
        data = json.dumps(command).encode()
        if len(data) > MAX_COMMAND_BYTES:
            raise OSError(f"its environment and paths take {len(data)} bytes, at most {MAX_COMMAND_BYTES} are allowed")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, DESCRIPTORS.pack(*passed))] if passed else []
        self.command.sendmsg([data], rights)

    def send_soon(self, command: dict[str, object]) -> None:
        """One command, without waiting for a zygote that takes none now: then a thread waits. Nothing when it died."""
        data = json.dumps(command).encode()
        try:
            self._quick.send(data)
        except BlockingIOError:
            threading.Thread(target=self._send_patiently, args=(data,), daemon=True).start()
        except OSError:
            return

    def _send_patiently(self, data: bytes) -> None:
        with suppress(OSError):
            self.command.send(data)

    def end(self, limit_secs: float) -> None:
        """Have it kill its workers and end; kill it when it has not after so long, and its workers die by that."""
        self.command.close()
        self._quick.close()
        try:
            self.process.wait(limit_secs)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_LIMIT_SECS)

    def how_it_ended(self) -> str:
        code = self.process.returncode
        if code is None:
            return "hangs"
        return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"


class WorkerProcess:
    """A worker process and the server's ends of its sockets.

    `channel` is a blocking stream socket, `output` a non-blocking pipe's read end (standard output and error), `status`
    is read here alone.
    """

    def __init__(
        self,
        launcher: Launcher,
        zygote: Zygote,
        name: str,
        number: int,
        channel: socket.socket,
        output: int,
        status: socket.socket,
        oom_kills_before: int,
    ) -> None:
        self.name = name
        self.channel = channel
        self.output = output
        self.status = status
        self._launcher = launcher
        self._zygote = zygote
        self._number = number
        self._oom_kills_before = oom_kills_before
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._exit: Exit | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.name} pid={self._pid} {'running' if self._exit is None else self._exit}>"

    @property
    def pid(self) -> int | None:
        """None before the zygote has said it. It may be another process's once this one has ended."""
        self._read()
        return self._pid

    def kill(self, signal_number: int) -> None:
        """Send the signal, unless it has ended: the zygote knows, so that no other process of that number is hit."""
        if self._exit is None:
            self._launcher.send_kill(self._zygote, self._number, signal_number)

    async def wait(self) -> Exit:
        """How it ended, at once when it does. One may wait at a time; cancelling stops the waiting alone."""
        if (exit_ := self._read()) is not None:
            return exit_
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Exit] = loop.create_future()

        def look() -> None:
            if (exit_ := self._read()) is not None and not ended.done():
                ended.set_result(exit_)

        loop.add_reader(self.status, look)
        try:
            return await ended
        finally:
            loop.remove_reader(self.status)

    def wait_sync(self, timeout_secs: float) -> Exit | None:
        """How it ended, without an event loop; None when it has not after so long."""
        poll = select.poll()
        poll.register(self.status, select.POLLIN)
        deadline = time.monotonic() + timeout_secs
        while (exit_ := self._read()) is None:
            left_secs = deadline - time.monotonic()
            if left_secs <= 0:
                return None
            poll.poll(left_secs * 1000)
        return exit_

    def close(self) -> None:
        """Free the descriptors, when nobody waits; it does not end the process, which sees its channel closed."""
        with self._lock:
            if not self._closed:
                self._closed = True
                _close([self.channel, self.status, self.output])

    def _read(self) -> Exit | None:
        """Take in what the zygote has said; how the process ended, None while it has not."""
        with self._lock:
            while self._exit is None and not self._closed:
                try:
                    said = self.status.recv(4096)
                except BlockingIOError:
                    break
                except OSError:
                    said = b""
                self._exit = self._understand(json.loads(said)) if said else self._without_zygote()
            return self._exit

    def _understand(self, said: dict[str, int | str]) -> Exit | None:
        match said:
            case {"pid": int(pid)}:
                self._pid = pid
            case {"exit": int(code)}:
                return Exit(code=code)
            case {"signal": int(number)}:
                return self._killed(number)
            case {"error": str(text)}:
                return Exit(error=text)
        return None

    def _without_zygote(self) -> Exit:
        if self._pid is None:
            return Exit(error="the process that starts workers ended before it had started this one")
        # The kernel has killed the worker with its zygote, but not what the worker had started. As long as any of that
        # is there, no other process gets this number.
        with suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)
        return self._killed(signal.SIGKILL)

    def _killed(self, number: int) -> Exit:
        by_kernel = number == signal.SIGKILL and self._launcher.has_oom_kills_since(self._oom_kills_before)
        return Exit(signal=int(number), out_of_memory=by_kernel)


def _find_oom_counter() -> Path | None:
    try:
        files = oom_count_files(Path("/proc/self/cgroup").read_text())
    except OSError:
        return None
    return next((Path(file) for file in files if os.access(file, os.R_OK)), None)


def _close(ends: list[socket.socket | int]) -> None:
    for end in ends:
        if isinstance(end, int):
            os.close(end)
        else:
            end.close()
