"""Log lines, in Triton's forms or as JSON, on stderr or in `--log-file`. Logging never delays the serving.

The thread that logs renders its record to text, because arguments may change and a traceback keeps a batch's tensors
alive, and puts the text into a bounded queue. One thread writes. If the queue is full, or the system refuses a line (a
full disk, a closed pipe), the line is dropped and counted. A later line reports the count.

    configure(settings)     before anything else; opens the file
    shutdown(timeout_s)     write the queued lines; automatic at a normal exit, call it before `os._exit`
    reopen()                check whether the file was rotated (SIGHUP); also done each second while lines are written
"""

import errno
import logging
import os
import select
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType

from halimede.core.observe.access_lines import Access, access_line
from halimede.core.observe.log_lines import (
    LINES_PER_SECOND,
    MAX_FIELD_BYTES,
    MAX_MESSAGE_BYTES,
    FloodLimit,
    LineKind,
    LogLine,
    LogTable,
    Severity,
    clip,
    clip_trace,
    make_table,
    render_default,
    render_iso8601,
    render_json,
    trace_of,
)
from halimede.core.types import invalid, shortage_of
from halimede.settings import LogFormat, Settings

PACKAGE = "halimede"

MAX_QUEUED_LINES = 8192
MAX_QUEUED_BYTES = 8 << 20
BATCH_BYTES = 64 << 10
"""Maximum size of one write."""
REPORT_INTERVAL_S = 1.0
"""How often the log reports dropped lines."""
CHECK_INTERVAL_S = 1.0
"""How often the file's path is checked while lines are written."""
EXIT_FLUSH_S = 1.0

_LINE_OVERHEAD_BYTES = 512
_STDERR = 2
_OVERFLOW = "they came faster than they could be written"
_HERE = LineKind(Severity.WARNING, "log.py", 0, "")
LEVELS = {
    Severity.VERBOSE: logging.DEBUG,
    Severity.INFO: logging.INFO,
    Severity.WARNING: logging.WARNING,
    Severity.ERROR: logging.ERROR,
}
_RENDERERS: dict[LogFormat, Callable[[LogLine], str]] = {
    LogFormat.DEFAULT: render_default,
    LogFormat.ISO8601: render_iso8601,
    LogFormat.JSON: render_json,
}

log = logging.getLogger(__name__)


def configure(settings: Settings) -> None:
    """Send every logger's messages to the log: the package's own by the flags, other libraries' from warnings up.

    Raises InferenceError if `--log-file` cannot be opened; the log then goes to stderr.
    """
    _hold_standard_streams()
    try:
        output = LogOutput(settings.log_file)
    except OSError as error:
        _install(settings, LogOutput(None))
        text = f"--log-file: {settings.log_file} cannot be opened: {error.strerror}"
        raise invalid(text) from error
    _install(settings, output)


def shutdown(timeout_s: float = EXIT_FLUSH_S) -> None:
    """Write the lines logged so far, for at most `timeout_s`. After a timeout, later calls do not wait."""
    for handler in handlers():
        handler.writer.flush(timeout_s)


def reopen() -> None:
    """Reopen the log file now if its path leads to another file or to none."""
    for handler in handlers():
        handler.writer.reopen()


def dropped_lines() -> int:
    """Number of lines dropped since the start, because the queue was full or they could not be written."""
    return sum(handler.writer.dropped for handler in handlers())


def log_table(logger: logging.Logger, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Log a table at INFO: in Triton's form, or in JSON as one record with the rows as data."""
    logger.info("table of %s", ", ".join(header), extra={"table": make_table(header, rows)}, stacklevel=2)


def admits_access(kind: LineKind) -> bool:
    """Whether the access log takes a line of this kind now."""
    return any(handler.admit(kind) for handler in handlers())


def log_access(access: Access) -> None:
    """Log a request that ended. Call it only after `admits_access` returned True."""
    for handler in handlers():
        handler.writer.put(access_line(access, time.time_ns() // 1000, os.getpid()))


class LogHandler(logging.Handler):
    """Renders records to lines on the thread that logs, before their arguments can change."""

    def __init__(self, writer: "LogWriter", wanted: frozenset[Severity], *, on_terminal: bool = False) -> None:
        super().__init__()
        self.writer = writer
        self.deliver: Callable[[LogLine], None] = writer.put
        self._wanted = wanted
        self.on_terminal = on_terminal

    def handle(self, record: logging.LogRecord) -> bool:
        """Without the lock of `logging`: a long traceback on one thread must not delay the others."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        file = clip(record.filename, MAX_FIELD_BYTES)
        kind = LineKind(_severity(record.levelno), file, record.lineno, _field(record, "model"))
        if self.admit(kind):
            in_lines = self.on_terminal and getattr(record, "in_lines", False) is True
            self.deliver(_line(record, kind, in_lines=in_lines))

    def admit(self, kind: LineKind) -> bool:
        """Whether a line of this kind is to be rendered. A line that is left out costs almost no time."""
        return kind.severity in self._wanted and self.writer.admit(kind)

    def flush(self) -> None:
        """Called by `logging` at the exit of the interpreter."""
        self.writer.flush(EXIT_FLUSH_S)


class LogWriter:
    """Writes lines in their order, on a daemon thread of its own. Only `flush` waits."""

    def __init__(self, output: "LogOutput", render: Callable[[LogLine], str]) -> None:
        self._output = output
        self._render = render
        # A put may be interrupted at any point, also by a destructor that logs. Besides lines with their sizes there
        # are events, set once all lines before them are written, and None, which only wakes the thread.
        self._queue: SimpleQueue[tuple[LogLine, int] | threading.Event | None] = SimpleQueue()
        # Reentrant for the same reason. It guards the three below it.
        self._lock = threading.RLock()
        self._limit = FloodLimit()
        self._queued_bytes = 0
        self.dropped = 0
        # Used only by the thread: dropped lines that were reported, why the others were dropped, when to report next.
        self._reported = 0
        self._why = _OVERFLOW
        self._report_at_s: float | None = None
        # Used by the callers of `flush`.
        self._is_late = False
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def admit(self, kind: LineKind) -> bool:
        """Whether a line of this kind may be offered; see FloodLimit."""
        with self._lock:
            was_suppressing = self._limit.is_suppressing()
            is_admitted = self._limit.admit(kind, time.monotonic())
        if not is_admitted and not was_suppressing:
            self._queue.put(None)
        return is_admitted

    def put(self, line: LogLine) -> None:
        """Queue the line, or count it as dropped."""
        size = _size_bytes(line)
        with self._lock:
            if self._queue.qsize() >= MAX_QUEUED_LINES or self._queued_bytes + size > MAX_QUEUED_BYTES:
                self.dropped += 1
                return
            self._queued_bytes += size
            # Under the lock, so that the thread cannot have written the line before it was counted.
            self._queue.put((line, size))

    def flush(self, timeout_s: float) -> None:
        if self._is_late:
            return
        written = threading.Event()
        self._queue.put(written)
        self._is_late = not written.wait(timeout_s)

    def reopen(self) -> None:
        self._output.check_now()
        self._queue.put(None)

    def _run(self) -> None:
        while True:
            lines, size, written = self._take()
            self._output.follow(time.monotonic())
            try:
                self._write([self._encode(line) for line in lines])
            except MemoryError:
                self._drop(len(lines), "no memory")
            with self._lock:
                self._queued_bytes -= size
            self._report_if_due(is_last=written is not None)
            if written is not None:
                written.set()

    def _take(self) -> tuple[list[LogLine], int, threading.Event | None]:
        """Wait for lines; return them and their size, up to the next event, for which a caller waits."""
        lines: list[LogLine] = []
        size = 0
        try:
            item = self._queue.get(timeout=REPORT_INTERVAL_S if self._has_unreported() else None)
            while not isinstance(item, threading.Event):
                if item is not None:
                    lines.append(item[0])
                    size += item[1]
                if size >= BATCH_BYTES:
                    return lines, size, None
                item = self._queue.get_nowait()
        except Empty:
            return lines, size, None
        return lines, size, item

    def _has_unreported(self) -> bool:
        return self.dropped != self._reported or self._limit.is_suppressing()

    def _report_if_due(self, *, is_last: bool) -> None:
        """Report dropped lines: at most once in `REPORT_INTERVAL_S`, counted from the first dropped line."""
        if not self._has_unreported():
            return
        now_s = time.monotonic()
        if self._report_at_s is None:
            self._report_at_s = now_s + REPORT_INTERVAL_S
        if now_s < self._report_at_s and not is_last:
            return
        self._report_at_s = None
        with self._lock:
            suppressed = self._limit.take_suppressed()
            dropped = self.dropped
        if dropped != self._reported:
            text = f"{dropped - self._reported} log lines were dropped: {self._why}"
            lost, _ = self._output.write([self._encode(_note(_HERE, text))])
            if not lost:
                self._reported, self._why = dropped, _OVERFLOW
        why = f"more lines like this one were suppressed: {LINES_PER_SECOND} in a second are written"
        self._write([self._encode(_note(kind, f"{count} {why}")) for kind, count in suppressed.items()])

    def _write(self, lines: list[bytes]) -> None:
        lost, why = self._output.write(lines)
        if lost:
            self._drop(lost, why)

    def _drop(self, count: int, why: str) -> None:
        self._why = why
        with self._lock:
            self.dropped += count

    def _encode(self, line: LogLine) -> bytes:
        return f"{self._render(line)}\n".encode()


class LogOutput:
    """Standard error, or the file at `path`, which is opened again when it was moved or deleted.

    Only `check_now` may be called from several threads. Raises OSError if the file cannot be opened at first.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd = _open(path) if path is not None else _STDERR if sys.stderr is not None else None
        self._check_at_s = 0.0
        self._is_torn = False
        self.is_terminal = self._fd == _STDERR and os.isatty(_STDERR)

    def check_now(self) -> None:
        self._check_at_s = 0.0

    def follow(self, now_s: float) -> None:
        """Reopen the file if its path no longer leads to it. Checks at most once in `CHECK_INTERVAL_S`."""
        if self._path is None or now_s < self._check_at_s:
            return
        self._check_at_s = now_s + CHECK_INTERVAL_S
        try:
            if self._fd is not None and os.path.samestat(self._path.stat(), os.fstat(self._fd)):
                return
        except OSError:
            pass  # only an attempt to open it shows whether the path leads to a file again
        old = self._fd
        try:
            self._fd = _open(self._path)
        except OSError:
            if old is None or _has_name(old):
                return  # a file that was moved still has readers
            self._fd = None
        self._is_torn = False
        # It may have the same number, if other code closed it.
        if old is not None and old != self._fd:
            with suppress(OSError):  # closing a remote file may raise an earlier error
                os.close(old)

    def write(self, lines: Sequence[bytes]) -> tuple[int, str]:
        """Write lines, each with its newline. Returns how many of them were not written whole, and why."""
        if not lines:
            return 0, ""
        if self._fd is None:
            return len(lines), os.strerror(errno.EBADF)
        # The rest of a line that was cut must not join the line after it.
        parts = [b"\n", *lines] if self._is_torn else lines
        done, error = _write_all(self._fd, parts)
        if error is None:
            self._is_torn = False
            return 0, ""
        ends = [0, *accumulate(map(len, parts))]
        whole = bisect_right(ends, done) - 1
        self._is_torn = done != ends[whole] or (self._is_torn and whole == 0)
        return min(len(lines), len(parts) - whole), error.strerror or str(error)


def _install(settings: Settings, output: LogOutput) -> None:
    switches = {
        Severity.VERBOSE: settings.log_verbose > 0,
        Severity.INFO: settings.log_info,
        Severity.WARNING: settings.log_warning,
        Severity.ERROR: settings.log_error,
    }
    wanted = frozenset(severity for severity, is_on in switches.items() if is_on)
    on_terminal = output.is_terminal and settings.log_format is not LogFormat.JSON
    handler = LogHandler(LogWriter(output, _RENDERERS[settings.log_format]), wanted, on_terminal=on_terminal)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    # gRPC logs a traceback whenever a client's deadline passes during an answer; our own code logs what matters.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
    # The lowest level is on the logger itself: a message below it then costs 0.1 us.
    lowest = min((LEVELS[severity] for severity in wanted), default=logging.CRITICAL + 1)
    logging.getLogger(PACKAGE).setLevel(lowest)
    # Python would print these to stderr, unquoted, and block while stderr is not read.
    logging.captureWarnings(True)
    sys.excepthook = _log_unhandled
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_end_of_thread


def handlers() -> list[LogHandler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, LogHandler)]


def _severity(level: int) -> Severity:
    if level >= logging.ERROR:
        return Severity.ERROR
    if level >= logging.WARNING:
        return Severity.WARNING
    return Severity.INFO if level >= logging.INFO else Severity.VERBOSE


def _line(record: logging.LogRecord, kind: LineKind, *, in_lines: bool) -> LogLine:
    try:
        message = record.getMessage()
    except Exception as error:  # noqa: BLE001  # a `__str__` may raise any error, which must not reach the code that logs
        message = f"{record.msg if isinstance(record.msg, str) else type(record.msg)} ({type(error).__name__})"
    table = getattr(record, "table", None)
    logged = record.exc_info[1] if record.exc_info else None
    shortage = shortage_of(logged)
    if shortage is not None:
        message = f"{message}: {shortage.message}"
    trace = trace_of(logged) if shortage is None else ""
    if in_lines:
        # A worker's traceback arrives as text. It is shown below the first line, like the server's own.
        message, _, rest = message.partition("\n")
        trace = clip_trace(rest.rstrip("\n"))
    return LogLine(
        round(record.created * 1_000_000),
        kind.severity,
        record.process or 0,
        kind.file,
        kind.line,
        clip(message, MAX_MESSAGE_BYTES),
        request_id=_field(record, "request_id"),
        model=kind.model,
        version=_field(record, "version"),
        trace=trace,
        table=table if isinstance(table, LogTable) else None,
    )


def _field(record: logging.LogRecord, name: str) -> str:
    """The fields of `extra`, which other libraries may use for any value."""
    value = getattr(record, name, "")
    return clip(str(value), MAX_FIELD_BYTES) if isinstance(value, str | int) else ""


def _note(kind: LineKind, message: str) -> LogLine:
    """A line about the log itself."""
    now_us = time.time_ns() // 1000
    return LogLine(now_us, kind.severity, os.getpid(), kind.file, kind.line, message, model=kind.model)


def _size_bytes(line: LogLine) -> int:
    """The approximate memory that the line uses."""
    cells = sum(sys.getsizeof(cell) for row in line.table.rows for cell in row) if line.table is not None else 0
    return _LINE_OVERHEAD_BYTES + sys.getsizeof(line.message) + sys.getsizeof(line.trace) + cells


def _open(path: Path) -> int:
    # Without O_NONBLOCK the open of a pipe without a reader would block the start.
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)


def _has_name(fd: int) -> bool:
    try:
        return os.fstat(fd).st_nlink > 0
    except OSError:
        return False  # a stale handle of a remote file, or one that other code closed


def _write_all(fd: int, lines: Sequence[bytes]) -> tuple[int, OSError | None]:
    """How many bytes were written, and the error that ended the write early."""
    done = 0
    for piece in _pieces(lines):
        end = done + len(piece)
        while done < end:
            try:
                done += os.write(fd, piece[done - end :])
            except BlockingIOError:
                # Non-blocking by `_open`, or by another process that shares our stderr.
                full = select.poll()
                full.register(fd, select.POLLOUT)
                full.poll()
            except OSError as error:
                return done, error
    return done, None


def _pieces(lines: Sequence[bytes]) -> Iterator[bytes]:
    """Lines that are written together. Up to PIPE_BUF bytes are not mixed with those of another front-end process,
    which writes to the same pipe."""
    start = size = 0
    for index, line in enumerate(lines):
        if size and size + len(line) > select.PIPE_BUF:
            yield b"".join(lines[start:index])
            start, size = index, 0
        size += len(line)
    yield b"".join(lines[start:])


def _hold_standard_streams() -> None:
    """Open /dev/null as each of 0, 1 and 2 that the parent closed. Otherwise a socket would get the number, and the
    prints of a library would go to a client."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _log_unhandled(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:  # noqa: ARG001  # the hook's arguments
    log.critical("unhandled exception", exc_info=error)


def _log_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    where = unraisable.err_msg or "Exception ignored in"
    log.error("%s: %r", where, unraisable.object, exc_info=unraisable.exc_value)


def _log_end_of_thread(args: threading.ExceptHookArgs) -> None:
    if not issubclass(args.exc_type, SystemExit):
        name = args.thread.name if args.thread is not None else "unknown"
        log.error("thread '%s' ended by an exception", name, exc_info=args.exc_value)
