"""A reader of a document, who enters its commands in a terminal; servers run in a second one."""

import os
import re
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from support.documents import Block
from support.server import wait_until

SERVER = re.compile(r"^(?:exec )?(?:\S*/)?(?:halimede serve|tritonserver)\b", re.MULTILINE)
STARTED = "Started Metrics Service"
LIMIT_S = 300.0
"""Some commands import a large library, which takes a minute on a busy machine."""


@dataclass
class Reader:
    """Variables and the current folder last from one block to the next, as in a terminal.

    `work` is the folder of the first block, `home` the home folder, and `settings` are further variables.
    """

    work: Path
    home: Path
    settings: dict[str, str] = field(default_factory=dict)
    server: subprocess.Popen[bytes] | None = None

    def enter(self, block: Block) -> None:
        """Run the block. An AssertionError has what it printed, and the log of the server."""
        text = block.text
        if block.language == "python":
            text = f"python - <<'END OF PYTHON'\n{text}END OF PYTHON\n"
        if SERVER.search(text) is None:
            self._run(text)
        else:
            self._serve(text)

    def _command(self, text: str) -> list[str]:
        return ["bash", "-euo", "pipefail", "-c", f'if [ -e ~/state ]; then . ~/state; cd "$PWD"; fi\n{text}']

    def _environment(self) -> dict[str, str]:
        home = str(self.home)
        # curl reads a file of CURL_HOME, which makes it fail on error statuses.
        return {**os.environ, "HOME": home, "CURL_HOME": home, **self.settings}

    def _run(self, text: str) -> None:
        command = self._command(f"{text}\ndeclare -px > ~/state\n")
        done = subprocess.run(
            command, cwd=self.work, env=self._environment(), capture_output=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout.decode()}\n{done.stderr.decode()}\n{self.log()}"

    def _serve(self, text: str) -> None:
        """Run the commands of a block whose last one is a server, in place of the server that runs."""
        self.stop()
        with (self.home / "server.log").open("wb") as log:
            # In a new session, so that a signal reaches the server behind the shell.
            self.server = subprocess.Popen(
                self._command(text),
                cwd=self.work,
                env=self._environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        server = self.server
        wait_until(
            lambda: STARTED in self.log() or server.poll() is not None, f"the server of\n{text}", limit_s=LIMIT_S
        )
        assert server.poll() is None, f"{text}\n{self.log()}"

    def log(self) -> str:
        path = self.home / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop(self) -> None:
        """End the server, which must exit with 0."""
        if self.server is None:
            return
        server, self.server = self.server, None
        try:
            os.killpg(server.pid, signal.SIGTERM)
            assert server.wait(30) == 0, self.log()
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()

    def leave(self) -> None:
        """Kill the server, if one runs."""
        if self.server is not None:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
