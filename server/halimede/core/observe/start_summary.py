"""The start of a server as people read it on a terminal: where it listens, its models, and problems last."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from halimede.core.observe.log_lines import LogLine, Severity, printable
from halimede.core.types import ModelIndexEntry, ModelReadyState

HTTP, GRPC, METRICS = "HTTPService", "GRPCInferenceService", "Metrics Service"
"""The names of the services in the log."""
MOST_COLUMNS = 100
"""Longer lines are hard to read, however wide the terminal is."""
_HEADS = ("model", "version", "state", "seconds")
_ANYWHERE = {"0.0.0.0", "::", "[::]", ""}

_RESET = "\x1b[0m"
_COLOURS = {Severity.ERROR: "\x1b[31m", Severity.WARNING: "\x1b[33m", Severity.INFO: "\x1b[32m"}


@dataclass(frozen=True, slots=True)
class Terminal:
    """The width in columns, and whether texts are coloured."""

    columns: int
    has_colours: bool

    @property
    def width(self) -> int:
        return min(self.columns, MOST_COLUMNS)

    def coloured(self, text: str, severity: Severity) -> str:
        return f"{_COLOURS[severity]}{text}{_RESET}" if self.has_colours else text


def summary_lines(
    title: str,
    urls: Sequence[tuple[str, str]],
    index: Sequence[ModelIndexEntry],
    seconds: Mapping[str, float],
    terminal: Terminal,
) -> Iterator[str]:
    """The title, a line for each URL, and a table of the models that were requested.

    `urls` are names and addresses; `seconds` is how long the load of each model took.
    """
    yield terminal.coloured(title, Severity.INFO)
    for name, url in urls:
        yield f"  {name:<8} {url}"
    yield ""
    models = [entry for entry in index if entry.state is not None]
    if not models:
        yield "  no model is loaded"
        return
    widths = [len(head) for head in _HEADS]
    rows = [(printable(entry.name), entry.version, entry.state, seconds.get(entry.name)) for entry in models]
    states = max(len(state.value) for _, _, state, _ in rows if state is not None)
    versions = max(widths[1], *(len(version) for _, version, _, _ in rows))
    room = max(len(_HEADS[0]), terminal.width - versions - states - widths[3] - 8)
    names = min(room, max(widths[0], *(len(name) for name, *_ in rows)))
    yield f"  {_HEADS[0]:<{names}}  {_HEADS[1]:<{versions}}  {_HEADS[2]:<{states}}  {_HEADS[3]}"
    for name, version, state, secs in rows:
        severity = Severity.INFO if state is ModelReadyState.READY else Severity.ERROR
        shown = terminal.coloured(f"{state.value if state else '':<{states}}", severity)
        cut = name if len(name) <= names else f"{name[: names - 3]}..."
        yield f"  {cut:<{names}}  {version:<{versions}}  {shown}  {'' if secs is None else f'{secs:.1f}'}".rstrip()


def problem_lines(line: LogLine, terminal: Terminal) -> Iterator[str]:
    """A warning or an error, wrapped to the terminal; a traceback follows as it is, indented."""
    head = f"{line.severity.value}: "
    text = printable(" ".join(line.message.split()))
    first, *rest = _wrapped(head + text, terminal.width)
    yield terminal.coloured(head.rstrip(), line.severity) + first[len(head) - 1 :]
    yield from rest
    yield from (f"  {printable(each)}" for each in line.trace.splitlines())


def without_repeat(lines: Sequence[LogLine]) -> list[LogLine]:
    """The problems, of which the last one repeats the others' causes if the start has failed. If that is one cause, it
    is left out above; several are easier to read in lines of their own."""
    repeated = [line for line in lines[:-1] if not line.trace and _cause(line) and _cause(line) in lines[-1].message]
    return [line for line in lines if [line] != repeated]


def _cause(line: LogLine) -> str:
    return line.message.partition(": ")[2]


def loading_line(loading: Iterable[tuple[str, float]], terminal: Terminal) -> str:
    """Which models still load, each with its seconds so far."""
    text = ", ".join(f"{printable(name)} ({secs:.0f} s)" for name, secs in loading)
    return "\n".join(_wrapped(f"still loading: {text}", terminal.width))


def url_of(scheme: str, endpoint: str, path: str = "") -> str:
    """Where clients on this machine reach a service that listens at `endpoint`: ADDRESS:PORT, or `unix:PATH`."""
    if endpoint.startswith("unix:"):
        return endpoint
    address, _, port = endpoint.rpartition(":")
    if address in _ANYWHERE:
        address = "localhost"
    elif ":" in address and not address.startswith("["):
        address = f"[{address}]"
    return f"{scheme}{address}:{port}{path}"


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns, except for single words that are longer, such as paths."""
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
