"""Starts worker processes and reports how each ended: the server's side of the zygotes.

A zygote starts with its first worker; if it dies, the next start of a worker starts it again. Thread-safe. Works with
or without an event loop: loads run on threads of their own.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType

from halimede.core.accounts import UNBOUNDED, MemoryBounds
from halimede.core.hangs import STOPPED, ProcessKind, front_end_is_alive, zygote_is_alive
from halimede.core.restarts import ProcessExit, StartFaultError, is_brief_fault
from halimede.core.types import ErrorCode, InferenceError, unavailable, unsupported
from halimede.memory_group import own_groups
from halimede.processes import bootstrap
from halimede.processes.hangs import HangChecks, read_stat
from halimede.processes.zygote import DESCRIPTORS, MAX_COMMAND_BYTES, PRELOAD_VARIABLE

log = logging.getLogger(__name__)

ZYGOTE_ENTRY = "halimede.processes.zygote:main"

SEND_LIMIT_SECS = 30.0
"""A zygote that accepts no command for this long hangs. Its socket holds about a hundred commands, so a start
waits only if more are sent while the zygote imports."""

END_LIMIT_SECS = 5.0

_NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


class Launcher:
    """Starts worker processes."""

    def __init__(self, hang_timeout_secs: float = 10.0, memory: MemoryBounds = UNBOUNDED) -> None:
        """The owner runs `hangs` on its loop: it ends processes that hang for `hang_timeout_secs`. `memory`
        bounds what the server and each worker exchange."""
        self.hangs = HangChecks(hang_timeout_secs)
        self.memory = memory
        self._lock = threading.Lock()
        self._zygotes: dict[str, Zygote] = {}
        """By what they preload."""
        self._next_number = 1
        self._closed = False

    def __repr__(self) -> str:
        pids = [zygote.process.pid for zygote in self._zygotes.values()]
        return f"<Launcher {'closed' if self._closed else f'zygotes={pids}'}>"

    @property
    def zygote_pid(self) -> int | None:
        """Of the one that preloads no runtime; None before its first start. The process may have died since."""
        zygote = self._zygotes.get("")
        return zygote.process.pid if zygote is not None else None

    def spawn(
        self,
        name: str,
        *,
        entry: str,
        python: str = "",
        module: str = "",
        preload: str = "",
        environment: Mapping[str, str] = _NO_ENVIRONMENT,
        working_directory: str | None = None,
        beats: Callable[[], int] | None = None,
    ) -> "WorkerProcess":
        """Start a process that calls `entry` (`module:function`) with its channel's descriptor.

        `python` is the interpreter to run, "" for a fork of the zygote, in which Python's own variables (PYTHONPATH) no
        longer take effect. The zygote has imported `module`, which must start no thread, and has called `preload`
        (`module:function`). `environment` overrides the server's. `beats` is how often a front end has beaten: from its
        first beat on it hangs if it does not beat, while other processes hang only if they are stopped. Returns before
        the process runs; a failed start is reported as its Exit. StartFaultError if the system refuses, InferenceError
        UNAVAILABLE if the launcher is closed.
        """
        if sys.platform != "linux":
            raise unsupported(f"worker processes need Linux, this is {sys.platform}")
        server_ends: list[socket.socket | int] = []
        worker_ends: list[socket.socket | int] = []
        try:
            channel, worker_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            server_ends.append(channel)
            worker_ends.append(worker_channel)
            status, worker_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            server_ends.append(status)
            worker_ends.append(worker_status)
            output, worker_output = os.pipe()
            server_ends.append(output)
            worker_ends.append(worker_output)
            os.set_blocking(output, False)
            status.setblocking(False)
            worker_status.setblocking(False)
            command: dict[str, object] = {
                "do": "spawn",
                "name": name,
                "entry": entry,
                "module": module,
                "python": python,
                "environment": dict(environment),
                "directory": working_directory or "",
            }
            kills = own_groups().oom_kills()
            passed = (worker_channel.fileno(), worker_output, worker_status.fileno())
            zygote, number = self._send_spawn(command, passed, preload)
        except (OSError, MemoryError) as error:
            _close(server_ends)
            cause = "out of memory"
            if isinstance(error, OSError):
                cause = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
            text = f"cannot start a process for '{name}': {cause}"
            raise StartFaultError(ErrorCode.UNAVAILABLE, text, is_brief=is_brief_fault(error)) from error
        except InferenceError:
            _close(server_ends)
            raise
        finally:
            _close(worker_ends)
        process = WorkerProcess(self, zygote, name, number, channel, output, status, kills, beats)
        self.hangs.add(process)
        return process

    def close(self) -> None:
        """End the zygotes and all workers, and refuse further starts. Blocks until they have ended, seconds at most."""
        with self._lock:
            self._closed = True
            zygotes, self._zygotes = self._zygotes, {}
        for zygote in zygotes.values():
            self.hangs.discard(zygote)
            zygote.disconnect()
            zygote.kill_if_stopped()
        for zygote in zygotes.values():
            zygote.end(END_LIMIT_SECS)

    def _send_spawn(
        self, command: dict[str, object], passed: tuple[int, int, int], preload: str
    ) -> "tuple[Zygote, int]":
        with self._lock:
            number, self._next_number = self._next_number, self._next_number + 1
            command["worker"] = number
            zygote = self._zygotes.get(preload)
            if zygote is not None:
                try:
                    zygote.send(command, passed)
                    return zygote, number
                except (BrokenPipeError, ConnectionResetError, TimeoutError):
                    del self._zygotes[preload]
                    self.hangs.discard(zygote)
                    zygote.end(0)
                    log.error("the process that starts workers %s: started again", zygote.exit_text())
            if self._closed:
                raise unavailable("no process is started: the server is stopping")
            zygote = self._zygotes[preload] = Zygote(preload)
            self.hangs.add(zygote)
            zygote.send(command, passed)
            return zygote, number


class Zygote:
    """One process of a zygote, started by the constructor. `command` is the server's end of its socket."""

    kind = ProcessKind.ZYGOTE

    def __init__(self, preload: str = "") -> None:
        self.hang = ""
        """Why the server ended it, if it hung."""
        self._preload = preload
        self.command, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.command.settimeout(SEND_LIMIT_SECS)
        # The same socket, for senders that must not block.
        self._quick = self.command.dup()
        self._quick.setblocking(False)
        try:
            # A session of its own, so that signals of a terminal reach neither the zygote nor workers. The zygote ends
            # when its socket closes. PR_SET_PDEATHSIG is not used for that: the kernel would send the signal already at
            # the end of the thread that started the zygote.
            self.process = subprocess.Popen(  # noqa: S603  # the server's interpreter and a file of this package
                [sys.executable, bootstrap.PATH, str(zygote_end.fileno()), ZYGOTE_ENTRY],
                pass_fds=(zygote_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, PRELOAD_VARIABLE: preload} if preload else None,
                start_new_session=True,
            )
        except BaseException:
            self.command.close()
            self._quick.close()
            raise
        finally:
            zygote_end.close()
        self._stat = read_stat(self.process.pid)

    def __repr__(self) -> str:
        return f"<Zygote {self._preload or 'of workers'} pid={self.process.pid}>"

    def shows_life(self) -> bool:
        """Whether it has shown life since the last call. Always True after its end: a dead process does not hang."""
        before, self._stat = self._stat, read_stat(self.process.pid)
        has_beaten = self._take_beats()
        if before is None or self._stat is None:
            return True
        return zygote_is_alive(before, self._stat, has_beaten=has_beaten)

    def _take_beats(self) -> bool:
        has_beaten = False
        with suppress(OSError):  # no more, or the socket is closed
            while self._quick.recv(1):
                has_beaten = True
        return has_beaten

    def kill_if_stopped(self) -> None:
        """Kill it if a signal has stopped it: otherwise it would outlive the server, with its workers."""
        stat = read_stat(self.process.pid)
        if stat is not None and stat.letter == STOPPED:
            self.process.kill()

    def end_hung(self, silence_secs: float) -> None:
        """Kill it, and its workers with it; the next start of a worker starts another."""
        self.hang = f"the process that starts workers hung for {silence_secs:.1f} s"
        self.process.kill()

    def send(self, command: dict[str, object], passed: tuple[int, ...] = ()) -> None:
        """Send one command. OSError if the zygote has died or hangs, or if the system refuses."""
        data = json.dumps(command).encode()
        if len(data) > MAX_COMMAND_BYTES:
            raise OSError(f"its environment and paths take {len(data)} bytes, at most {MAX_COMMAND_BYTES} are allowed")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, DESCRIPTORS.pack(*passed))] if passed else []
        self.command.sendmsg([data], rights)

    def send_nowait(self, command: dict[str, object]) -> None:
        """Send one command without blocking; a thread waits if the socket is full. No effect if the zygote has died."""
        data = json.dumps(command).encode()
        try:
            self._quick.send(data)
        except BlockingIOError:
            threading.Thread(target=self._send_blocking, args=(data,), daemon=True).start()
        except OSError:
            return

    def _send_blocking(self, data: bytes) -> None:
        with suppress(OSError):
            self.command.send(data)

    def disconnect(self) -> None:
        """Close the socket, so that the zygote kills its workers and ends."""
        self.command.close()
        self._quick.close()

    def end(self, limit_secs: float) -> None:
        """Disconnect, and wait for the end. If the zygote runs for longer than the limit, it is killed, and its workers
        with it."""
        self.disconnect()
        try:
            self.process.wait(limit_secs)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_LIMIT_SECS)

    def exit_text(self) -> str:
        code = self.process.returncode
        if code is None:
            return "hangs"
        return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"


class WorkerProcess:
    """A worker process and the server's ends of its sockets.

    `channel` is a blocking stream socket. `output` is the non-blocking read end of the pipe for standard output and
    error. `status` is read only by this class.
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
        beats: Callable[[], int] | None,
    ) -> None:
        self.kind = ProcessKind.FRONT_END if beats is not None else ProcessKind.WORKER
        self.name = name
        self.channel = channel
        self.output = output
        self.status = status
        self._launcher = launcher
        self._zygote = zygote
        self._number = number
        self._oom_kills_before = oom_kills_before
        self._beats = beats
        self._last_beat = 0
        self._hang = ""
        """Why the server ended it, if it hung."""
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._exit: ProcessExit | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.name} pid={self._pid} {'running' if self._exit is None else self._exit}>"

    @property
    def pid(self) -> int | None:
        """None until the zygote has reported it. After the process has ended, another one may get the same pid."""
        self._read()
        return self._pid

    def kill(self, signal_number: int) -> None:
        """Send the signal unless the process has ended. The zygote sends it, because only it knows whose the pid is."""
        if self._exit is None:
            self._zygote.send_nowait({"do": "kill", "worker": self._number, "signal": signal_number})

    def shows_life(self) -> bool:
        """Whether it has shown life since the last call. Always True without a process: before its start, after its
        end."""
        pid = self.pid
        if pid is None or self._exit is not None:
            return True
        stat = read_stat(pid)
        if stat is None:
            return True
        if self._beats is not None and (beat := self._beats()):
            before, self._last_beat = self._last_beat, beat
            return front_end_is_alive(stat, has_beaten=beat != before)
        return stat.letter != STOPPED

    def end_hung(self, silence_secs: float) -> None:
        """Kill it."""
        self._hang = f"it hung for {silence_secs:.1f} s"
        self.kill(signal.SIGKILL)

    async def wait(self) -> ProcessExit:
        """Wait for the end of the process. Only one task may wait at a time; cancelling stops only the wait."""
        if (exit_ := self._read()) is not None:
            return exit_
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[ProcessExit] = loop.create_future()

        def on_status() -> None:
            if (exit_ := self._read()) is not None and not ended.done():
                ended.set_result(exit_)

        loop.add_reader(self.status, on_status)
        try:
            return await ended
        finally:
            loop.remove_reader(self.status)

    def close(self) -> None:
        """Free the descriptors; no task may wait. Does not end the process, but closes its channel."""
        self._launcher.hangs.discard(self)
        with self._lock:
            if not self._closed:
                self._closed = True
                _close([self.channel, self.status, self.output])

    def _read(self) -> ProcessExit | None:
        """Read the zygote's reports; returns how the process ended, None while it runs."""
        with self._lock:
            while self._exit is None and not self._closed:
                try:
                    report = self.status.recv(4096)
                except BlockingIOError:
                    break
                except OSError:
                    report = b""
                self._exit = self._parse_report(json.loads(report)) if report else self._exit_without_zygote()
            return self._exit

    def _parse_report(self, report: dict[str, int | str]) -> ProcessExit | None:
        match report:
            case {"pid": int(pid)}:
                self._pid = pid
            case {"exit": int(code)}:
                return ProcessExit(code=code)
            case {"signal": int(number)}:
                return self._killed(number)
            case {"error": str(text)}:
                return ProcessExit(error=text, is_brief=report.get("is_brief") is True)
        return None

    def _exit_without_zygote(self) -> ProcessExit:
        if self._pid is None:
            why = self._zygote.hang or "the process that starts workers ended"
            return ProcessExit(error=f"{why} before it had started this one", is_brief=True)
        # The kernel has killed the worker with its zygote, but not the processes that the worker had started. While any
        # of them exists, no other process group gets this number.
        with suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)
        return self._killed(signal.SIGKILL)

    def _killed(self, number: int) -> ProcessExit:
        if hang := self._hang or self._zygote.hang:
            return ProcessExit(signal=int(number), hang=hang)
        by_kernel = number == signal.SIGKILL and own_groups().oom_kills() > self._oom_kills_before
        return ProcessExit(signal=int(number), out_of_memory=by_kernel)


def _close(ends: list[socket.socket | int]) -> None:
    for end in ends:
        if isinstance(end, int):
            os.close(end)
        else:
            end.close()
