"""A server at a terminal of its own."""

import fcntl
import os
import pty
import signal
import struct
import termios
import threading
from collections.abc import Sequence
from pathlib import Path

from support.forked import start_python
from support.server import LOOPBACK


class TerminalServer:
    """A process of `halimede serve` whose standard error is a terminal; all that it writes there is kept."""

    def __init__(
        self,
        *arguments: str | Path,
        columns: int = 80,
        environment: dict[str, str] | None = None,
        program: Sequence[str] = ("-m", "halimede", "serve"),
    ) -> None:
        """`program` is what Python runs; the arguments follow."""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        variables = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "TERM")}
        with os.fdopen(theirs, "wb") as terminal:
            self.process = start_python(
                *program,
                *LOOPBACK,
                *arguments,
                stdout=terminal,
                stderr=terminal,
                environment={**variables, **(environment or {})},
            )
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def shown(self) -> str:
        return bytes(self._shown).decode().replace("\r\n", "\n")

    def stop(self) -> int:
        """Interrupt it, as Ctrl-C does, and return its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.ended()

    def ended(self) -> int:
        code = self.process.wait(30)
        self._reader.join()
        return code

    def kill(self) -> None:
        self.process.kill()
        self._reader.join()

    def _read(self) -> None:
        # Reading fails when no process has the terminal open any more.
        try:
            while piece := os.read(self._ours, 1 << 16):
                self._shown += piece
        except OSError:
            pass
        os.close(self._ours)
