"""Log lines as values: how each format renders them, how they are cut, and how floods are limited.

One record is one line, with any text. Unprintable characters are escaped, so that text from a client or a model can
neither fake a line of its own nor control the terminal of a reader. In the text formats a table and a
traceback follow below their line, the traceback indented; in JSON they are fields.
"""

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import NamedTuple

MAX_LINE_BYTES = 16 << 10
"""Maximum length of a line without table and traceback: container runtimes cut longer lines, which breaks JSON."""
MAX_MESSAGE_BYTES = 12 << 10
MAX_FIELD_BYTES = 256
MAX_TRACE_CHARS = 64 << 10
MAX_CELL_CHARS = 512
MAX_TABLE_CHARS = 1 << 20

LINES_PER_SECOND = 100
"""Maximum rate per kind of line: see `FloodLimit`."""
MAX_KINDS = 1024

_WIDEST = 12
"""Maximum number of bytes for one character: two escapes of six."""
_STEP = 512
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Severity(Enum):
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    VERBOSE = "verbose"


# Triton's letters; Triton logs verbose messages as information.
_LETTERS = {Severity.ERROR: "E", Severity.WARNING: "W", Severity.INFO: "I", Severity.VERBOSE: "I"}

# Python's names, which log collectors know.
_JSON_LEVELS = {Severity.ERROR: "ERROR", Severity.WARNING: "WARNING", Severity.INFO: "INFO", Severity.VERBOSE: "DEBUG"}


class LogTable(NamedTuple):
    """A table whose cells and rows are already cut: see `make_table`."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(slots=True)
class LogLine:
    """One record, independent of the code that logged it. `time_us` counts from 1970. Texts are already cut; "" means
    none."""

    time_us: int
    severity: Severity
    process: int
    file: str
    line: int
    message: str
    request_id: str = ""
    model: str = ""
    version: str = ""
    trace: str = ""
    table: LogTable | None = None
    is_plain: bool = False
    """Whether the text formats show only the message, as it is, even if it has several lines."""
    fields: Mapping[str, str | float] = field(default_factory=dict)
    """Additional fields in the JSON format; in the text formats the message contains them."""


def render_default(line: LogLine) -> str:
    """`I1121 07:50:51.767849 597 server.py:42] "text"`, the time in UTC, without a newline at the end."""
    return _render_text(f"{_LETTERS[line.severity]}{_time(line):%m%d %H:%M:%S.%f}", line)


def render_iso8601(line: LogLine) -> str:
    """`2026-11-21T07:50:51Z I 597 server.py:42] "text"`, without a newline at the end."""
    return _render_text(f"{_time(line):%Y-%m-%dT%H:%M:%SZ} {_LETTERS[line.severity]}", line)


def render_json(line: LogLine) -> str:
    """One JSON object, without a newline at the end. Empty fields are omitted."""
    texts = {
        "message": line.message,
        "model": line.model,
        "version": line.version,
        "request_id": line.request_id,
        "exception": line.trace,
    }
    fields = [
        f'"time":"{_time(line):%Y-%m-%dT%H:%M:%S.%fZ}"',
        f'"level":"{_JSON_LEVELS[line.severity]}"',
        f'"pid":{line.process}',
        f'"file":{quote(line.file)}',
        f'"line":{line.line}',
        *(f'"{name}":{quote(text)}' for name, text in texts.items() if text or name == "message"),
        *(f'"{name}":{quote(value) if isinstance(value, str) else value}' for name, value in line.fields.items()),
    ]
    if line.table is not None:
        names = [quote(name) for name in line.table.header]
        rows = (
            "{" + ",".join(f"{name}:{quote(cell)}" for name, cell in zip(names, row, strict=True)) + "}"
            for row in line.table.rows
        )
        fields.append(f'"table":[{",".join(rows)}]')
    return "{" + ",".join(fields) + "}"


def quote(text: str) -> str:
    """A JSON string of printable characters only. It parses to the same text, except that lone surrogates become the
    text of their escapes, because strict readers refuse them even as escapes."""
    if not text.isprintable():
        text = text.encode("utf-8", "backslashreplace").decode()
    return printable(json.dumps(text, ensure_ascii=False))


def clip(text: str, limit_bytes: int) -> str:
    """`text`, cut if its quoted form is longer than `limit_bytes`; it ends with the number of missing characters."""
    if len(text) * _WIDEST <= limit_bytes:
        return text
    end, left = 0, limit_bytes
    # In steps, so that little more is quoted than fits: quoting a long text of escapes takes milliseconds.
    while (size := _quoted_bytes(step := text[end : end + _STEP])) <= left:
        end, left = end + len(step), left - size
        if end == len(text):
            return text
    while (size := _quoted_bytes(step)) > left:
        step = step[: len(step) * left // size]
    end += len(step)
    return f"{text[:end]}... ({len(text) - end} more characters)"


def clip_trace(trace: str) -> str:
    """A traceback, without its middle if it is too long: the beginning shows the place, the end the error."""
    missing = len(trace) - MAX_TRACE_CHARS
    if missing <= 0:
        return trace
    half = MAX_TRACE_CHARS // 2
    return f"{trace[:half]}\n... ({missing} characters) ...\n{trace[-half:]}"


def trace_of(error: BaseException | None) -> str:
    """The traceback of an error, clipped; "" for none. Never raises."""
    if error is None:
        return ""
    try:
        return clip_trace("".join(traceback.format_exception(error)).rstrip("\n"))
    except Exception as unprintable:  # noqa: BLE001  # an exception's `__str__` may raise any error
        return f"{type(error).__name__} (no traceback: {type(unprintable).__name__})"


def make_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> LogTable:
    """A table with each cell on one line; if there are too many rows, the last one says how many are missing."""
    cells = [tuple(_cell(each) for each in row) for row in rows]
    width = sum(max(map(len, column)) + 3 for column in zip(header, *cells, strict=True)) + 1
    most = max(1, MAX_TABLE_CHARS // width)
    if missing := len(cells[most:]):
        cells[most:] = [(f"... {missing} more", *("" for _ in header[1:]))]
    return LogTable(tuple(header), tuple(cells))


class LineKind(NamedTuple):
    """Lines of one kind come from one place in the code and concern one model."""

    severity: Severity
    file: str
    line: int
    model: str


class FloodLimit:
    """Lets `LINES_PER_SECOND` lines of a kind pass in each second and counts the others.

    Without a limit, a model or client that fails at each request would fill the disk and push out all other lines.
    Models do not share a kind, so that none hides another's lines. Verbose lines all pass, because they were requested.
    With more than `MAX_KINDS` kinds in a second, new ones are no longer separated by model.
    """

    def __init__(self) -> None:
        self._lines: dict[LineKind, int] = {}
        """The lines of the second that ends at `_end_s`."""
        self._end_s = 0.0
        self._suppressed: dict[LineKind, int] = {}

    def admit(self, kind: LineKind, now_s: float) -> bool:
        """Whether this line should be written; if not, it is counted as suppressed."""
        if kind.severity is Severity.VERBOSE:
            return True
        if now_s >= self._end_s:
            self._lines.clear()
            self._end_s = now_s + 1
        if len(self._lines) >= MAX_KINDS and kind not in self._lines:
            kind = kind._replace(model="")
        lines = self._lines.get(kind, 0)
        if lines < LINES_PER_SECOND:
            self._lines[kind] = lines + 1
            return True
        self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
        return False

    def is_suppressing(self) -> bool:
        return bool(self._suppressed)

    def take_suppressed(self) -> dict[LineKind, int]:
        """The number of suppressed lines of each kind since the last call."""
        taken, self._suppressed = self._suppressed, {}
        return taken


def _time(line: LogLine) -> datetime:
    return _EPOCH + timedelta(microseconds=line.time_us)


def _render_text(head: str, line: LogLine) -> str:
    if line.is_plain:
        return line.message
    head = f"{head} {line.process} {printable(line.file)}:{line.line}] "
    # Triton puts a table below the head of its line, and an empty line after it.
    text = f"{head}{quote(line.message)}" if line.table is None else f"{head}\n{_drawn(line.table)}\n"
    return text + "".join(f"\n  {printable(each)}" for each in line.trace.splitlines())


def _drawn(table: LogTable) -> str:
    """The table drawn as Triton draws tables, so that scripts find the same columns."""
    cells = [table.header, *(tuple(printable(cell) for cell in row) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    drawn = [
        "|" + "|".join(f" {cell:<{width}} " for cell, width in zip(row, widths, strict=True)) + "|" for row in cells
    ]
    return "\n".join([rule, drawn[0], rule, *drawn[1:], rule])


def _cell(text: str) -> str:
    kept = " ".join(text[:MAX_CELL_CHARS].split())
    return kept if len(text) <= MAX_CELL_CHARS else f"{kept}... ({len(text) - MAX_CELL_CHARS} more characters)"


def _quoted_bytes(text: str) -> int:
    return len(quote(text).encode()) - 2


def printable(text: str) -> str:
    """`text` with unprintable characters as JSON escapes: controls, line and paragraph separators, bidirectional text
    marks, lone surrogates."""
    if text.isprintable():
        return text
    return "".join([each if each.isprintable() else json.dumps(each)[1:-1] for each in text])
