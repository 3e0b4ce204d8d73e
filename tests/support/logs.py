"""Loggers whose output a test reads."""

import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from halimede.core.observe.log_lines import (
    Severity,
    render_json,
)
from halimede.log import LogHandler, LogOutput, LogWriter
from support.forked import run_python

FLUSH_S = 30.0
HEAD = "import logging, sys\nfrom pathlib import Path\nfrom halimede.log import *\nfrom halimede.settings import *\n"
"""The first lines of a program for `run`."""


class Log:
    """A separate logger in JSON with verbose lines, which are not rate limited."""

    def __init__(self, path: Path | None) -> None:
        self.writer = LogWriter(LogOutput(path), render_json)
        self.logger = logging.Logger("halimede.test")
        self.logger.addHandler(LogHandler(self.writer, frozenset(Severity)))
        self._path = path

    def documents(self) -> list[dict[str, object]]:
        self.writer.flush(FLUSH_S)
        assert self._path is not None
        return read(self._path)

    def messages(self) -> list[object]:
        return [document["message"] for document in self.documents()]


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def stalled(directory: Path) -> Iterator[tuple[Log, Callable[[], list[dict[str, object]]]]]:
    """A log into a pipe that is not read, and a function that reads its current content."""
    fifo = directory / "pipe"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    log = Log(fifo)
    rest = bytearray()

    def drain() -> list[dict[str, object]]:
        try:
            while data := os.read(reader, 1 << 20):
                rest.extend(data)
        except BlockingIOError:
            pass
        end = rest.rfind(b"\n") + 1
        lines = rest[:end].splitlines()
        del rest[:end]
        return [json.loads(line) for line in lines]

    try:
        yield log, drain
    finally:
        os.close(reader)


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run in a new process: the root logger is one per process, and pytest has handlers on it."""
    return run_python("-c", HEAD + program)
