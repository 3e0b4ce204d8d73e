"""Writes the output of a worker process, and of C++ libraries in the server, to the server's log, at a limited rate.

If a model prints faster than its output is read, only its printing blocks. All methods run on the loop.
"""

import asyncio
import logging
import os
from collections.abc import Mapping

from halimede.core.observe.native_lines import read_native_line
from halimede.log import LEVELS

log = logging.getLogger(__name__)

_READ_BYTES = 64 << 10
_PAUSE_SECS = 0.05
"""Pause after a read that filled the buffer, which limits reading to 1.3 MB/s."""

_LAST_READS = 4
"""Reads at `close`: a pipe holds 64 KiB, unless the model has enlarged it."""

_LINES_PER_SECOND = 500
"""Lines above this rate are dropped: making a log record takes time on the loop, and the log accepts fewer anyway."""

_LINE_BYTES = 8 << 10
"""Longer lines are split."""


def log_line(level: int, origin: str, text: str, about: Mapping[str, str]) -> None:
    """Log a line of a worker with its own origin (`model.py:11`). On a terminal, a traceback in it spans several
    lines."""
    if log.isEnabledFor(level):
        file, _, line = origin.rpartition(":")
        number = int(line) if line.isascii() and line.isdigit() and len(line) < 10 else 0
        extra = {**about, "in_lines": True}
        log.handle(log.makeRecord(log.name, level, file or origin, number, "%s", (text,), None, extra=extra))


class OutputReader:
    """Reads one pipe until its end. The caller keeps ownership of the descriptor."""

    def __init__(self, descriptor: int, origin: str, about: Mapping[str, str], loop: asyncio.AbstractEventLoop) -> None:
        """`origin` names the origin of the output; log lines show it instead of a file."""
        self._descriptor = descriptor
        self._origin = origin
        self._about = about
        self._loop = loop
        self._rest = b""
        self._pause: asyncio.TimerHandle | None = None
        self._lines = 0
        self._left_out = 0
        self._second: asyncio.TimerHandle | None = None
        self._is_open = True
        loop.add_reader(descriptor, self._read)

    def close(self) -> None:
        """Read what is available, then stop reading. The last lines are kept first: they often explain why the process
        ended."""
        if not self._is_open:
            return
        lines: list[bytes] = []
        for _ in range(_LAST_READS):
            if not (data := self._receive()):
                break
            lines += self._split(data)
        self._lines = 0
        first = max(0, len(lines) + 1 - _LINES_PER_SECOND)
        self._left_out += first
        for line in lines[first:]:
            self._log_line(line)
        self._end()

    def _read(self) -> None:
        data = self._receive()
        if data is None:
            return
        if not data:
            self._end()
            return
        for line in self._split(data):
            self._log_line(line)
        if len(data) == _READ_BYTES:
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_later(_PAUSE_SECS, self._resume)

    def _receive(self) -> bytes | None:
        """The available bytes; None if there are none yet, b"" at the end."""
        try:
            return os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _split(self, data: bytes) -> list[bytes]:
        """The lines that are complete now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [line[at : at + _LINE_BYTES] for line in whole for at in range(0, len(line) or 1, _LINE_BYTES)]
        while len(self._rest) >= _LINE_BYTES:
            lines.append(self._rest[:_LINE_BYTES])
            self._rest = self._rest[_LINE_BYTES:]
        return lines

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._descriptor, self._read)

    def _log_line(self, line: bytes) -> None:
        if self._second is None:
            self._second = self._loop.call_later(1, self._end_second)
        if self._lines >= _LINES_PER_SECOND:
            self._left_out += 1
            return
        self._lines += 1
        printed = read_native_line(line.decode("utf-8", "replace"), self._origin)
        if printed is not None:
            log_line(LEVELS[printed.severity], printed.origin, printed.text, self._about)

    def _end_second(self) -> None:
        self._second = None
        self._lines = 0
        left_out, self._left_out = self._left_out, 0
        if left_out:
            text = "%d lines of its output were left out: at most %d are taken in a second"
            log.warning(text, left_out, _LINES_PER_SECOND, extra=self._about)

    def _end(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._descriptor)
        if self._rest:
            self._log_line(self._rest)
        if self._second is not None:
            self._second.cancel()
            self._end_second()
