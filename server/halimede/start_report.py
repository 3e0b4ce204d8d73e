"""What the log shows of the start: Triton's tables, or on a terminal a summary.

On a terminal the start is for a person. So the server's own lines below WARNING are left out until it serves, and its
warnings and errors are kept and come last, below the summary. What models print is shown at once. Scripts, which read
the tables and the other lines, have no terminal; `tritonserver` and --log-verbose show everything there, too.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence

from halimede import __version__
from halimede.core.inventory import Inventory
from halimede.core.observe.log_lines import LogLine, Severity
from halimede.core.observe.start_summary import (
    GRPC,
    HTTP,
    METRICS,
    MOST_COLUMNS,
    Terminal,
    loading_line,
    problem_lines,
    summary_lines,
    url_of,
    without_repeat,
)
from halimede.core.types import ModelIndexEntry, ModelReadyState, ServerMetadata
from halimede.log import LEVELS, PACKAGE, LogHandler, handlers, log_table
from halimede.processes.output import log as prints_log
from halimede.settings import Settings
from halimede.startup import AGENTS, BACKENDS, MODELS, OPTIONS, backend_rows, model_rows, option_rows

log = logging.getLogger(__name__)

LOADING_INTERVAL_SECS = 5.0
"""How often a line names the models that still load."""
MOST_KEPT = 200
"""Maximum number of warnings and errors that are kept until the summary; others are written at once."""

_STDERR = 2


class TerminalStart:
    """Keeps the problems of a start on a terminal. From `end` on the log is as usual."""

    def __init__(self, handler: LogHandler) -> None:
        self._handler = handler
        self._kept: list[LogLine] = []
        self._is_over = False
        # Reentrant, because a destructor may log at any point.
        self._lock = threading.RLock()
        self._terminal = Terminal(_columns(), _has_colours(os.environ))
        self._set_levels(logging.WARNING, logging.INFO)
        handler.deliver = self._keep

    def show_loading(self, loading: Sequence[tuple[str, float]]) -> None:
        """Show which models still load, with their seconds so far, and what went wrong until now."""
        self._write_kept()
        if loading:
            self._write([loading_line(loading, self._terminal)])

    def end(self) -> None:
        """Write the problems; later lines are written at once, in the form of the log. Also for a start that failed:
        its last error is then the last line."""
        if self._is_over:
            return
        with self._lock:
            self._is_over = True
            self._write_kept()
        self._handler.deliver = self._handler.writer.put
        self._set_levels(LEVELS[Severity.INFO], logging.NOTSET)

    def end_with_summary(
        self, addresses: Mapping[str, str], index: Sequence[ModelIndexEntry], seconds: Mapping[str, float]
    ) -> None:
        """`addresses` has the address of each service; `seconds` is how long the load of each model took."""
        ready = len({entry.name for entry in index if entry.state is ModelReadyState.READY})
        title = f"Halimede {__version__} serves {ready} model{'' if ready == 1 else 's'}"
        urls = [
            (name, url_of(scheme, addresses[service], path))
            for name, service, scheme, path in (
                ("HTTP", HTTP, "http://", ""),
                ("gRPC", GRPC, "", ""),
                ("metrics", METRICS, "http://", "/metrics"),
            )
            if service in addresses
        ]
        lines = list(summary_lines(title, urls, index, seconds, self._terminal))
        self._write([*lines, ""] if self._kept else lines)
        self.end()

    def _keep(self, line: LogLine) -> None:
        is_problem = line.severity in (Severity.WARNING, Severity.ERROR)
        with self._lock:
            if is_problem and not self._is_over and len(self._kept) < MOST_KEPT:
                self._kept.append(line)
                return
        self._handler.writer.put(line)

    def _write_kept(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, []
            self._write([text for line in without_repeat(kept) for text in problem_lines(line, self._terminal)])

    def _write(self, lines: list[str]) -> None:
        if lines:
            plain = LogLine(time.time_ns() // 1000, Severity.INFO, os.getpid(), "", 0, "\n".join(lines), is_plain=True)
            self._handler.writer.put(plain)

    def _set_levels(self, own: int, prints: int) -> None:
        logging.getLogger(PACKAGE).setLevel(own)
        prints_log.setLevel(prints)


def begin_on_terminal(settings: Settings) -> TerminalStart | None:
    """Begin a start whose log is for a person; None if it is for programs, or if everything was asked for."""
    if settings.has_start_tables or settings.log_verbose or not settings.log_info:
        return None
    return next((TerminalStart(handler) for handler in handlers() if handler.on_terminal), None)


def log_tables(
    settings: Settings, index: Sequence[ModelIndexEntry], metadata: ServerMetadata, inventory: Inventory
) -> None:
    """Triton's start-up output, in its order."""
    log_table(log, AGENTS, [])
    log_table(log, BACKENDS, backend_rows(settings))
    log_table(log, MODELS, model_rows(index))
    if settings.allow_metrics and settings.allow_gpu_metrics:
        for device in inventory.devices:
            log.info("Collecting metrics for GPU %d: %s", device.index, device.name)
    if settings.allow_metrics and settings.allow_cpu_metrics:
        log.info("Collecting CPU metrics")
    log_table(log, OPTIONS, option_rows(settings, metadata))


def _columns() -> int:
    try:
        # A terminal that does not know its size says 0.
        return os.get_terminal_size(_STDERR).columns or MOST_COLUMNS
    except OSError:
        return MOST_COLUMNS


def _has_colours(environment: Mapping[str, str]) -> bool:
    """By https://no-color.org: any text in NO_COLOR but an empty one switches colours off."""
    return not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
