"""Worker processes of tests, and process state from the kernel."""

import asyncio
import json
import os
import select
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from halimede.core.restarts import ProcessExit
from halimede.processes.launcher import Launcher, WorkerProcess

FOLDER = str(Path(__file__).parent)
OBEY = "talkative:obey"
LIMIT_S = 30.0


class Talk:
    """A worker that executes code that the test sends (`support/talkative.py`)."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self._answers = process.channel.makefile("r")

    def say(self, code: str) -> None:
        """Execute code in the worker, without an answer."""
        self.process.channel.sendall(json.dumps(code).encode() + b"\n")

    def ask(self, code: str, limit_s: float = LIMIT_S) -> Any:
        self.process.channel.settimeout(limit_s)
        self.say(code)
        line = self._answers.readline()
        assert line, f"the worker ended: {ended(self.process)}\n{printed(self.process)}"
        return json.loads(line)

    def end(self) -> ProcessExit:
        """Close the channel and return the worker's exit."""
        self._answers.close()
        self.process.channel.close()
        return ended(self.process)

    def close(self) -> None:
        self._answers.close()
        self.process.close()


class Crew:
    """Workers of a launcher; the end of `with` stops and frees them, and closes the launcher unless it is shared."""

    def __init__(self, shared: Launcher | None = None) -> None:
        self.launcher = shared or Launcher()
        self._is_shared = shared is not None
        self._talks: list[Talk] = []
        self._processes: list[WorkerProcess] = []

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_shared:
            self.launcher.close()
        for each in self._talks:
            each.close()
        for process in self._processes:
            process.close()

    @property
    def zygote(self) -> int:
        pid = self.launcher.zygote_pid
        assert pid is not None
        return pid

    def spawn(self, name: str = "m_0_0", entry: str = OBEY, **how: Any) -> WorkerProcess:
        process = self.launcher.spawn(name, entry=entry, **how)
        self._processes.append(process)
        return process

    def talk(self, **how: Any) -> Talk:
        each = Talk(self.spawn(**how))
        self._talks.append(each)
        return each


def ended(process: WorkerProcess) -> ProcessExit:
    return asyncio.run(asyncio.wait_for(process.wait(), LIMIT_S))


def printed(process: WorkerProcess, until: str = "") -> str:
    """The output of a worker: until it contains this text, or until its end."""
    text, deadline = b"", time.monotonic() + LIMIT_S
    poll = select.poll()
    poll.register(process.output, select.POLLIN)
    while not until or until.encode() not in text:
        assert poll.poll(max(0.0, deadline - time.monotonic()) * 1000), f"no more than {text!r}"
        with suppress(BlockingIOError):
            piece = os.read(process.output, 65536)
            if not piece:
                break
            text += piece
    return text.decode()


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
