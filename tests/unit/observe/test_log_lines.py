"""Log lines: their formats, hostile text, and floods."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.observe.log_lines import (
    LINES_PER_SECOND,
    MAX_CELL_CHARS,
    MAX_FIELD_BYTES,
    MAX_KINDS,
    MAX_LINE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_TABLE_CHARS,
    MAX_TRACE_CHARS,
    FloodLimit,
    LineKind,
    LogLine,
    Severity,
    clip,
    clip_trace,
    make_table,
    quote,
    render_default,
    render_iso8601,
    render_json,
)

# 2026-11-21T07:50:51.767849Z
AT_US = 1_795_247_451_767_849
STARTED = LogLine(AT_US, Severity.INFO, 597, "grpc_server.py", 2558, "Started GRPCInferenceService at 127.0.0.1:28001")
RENDERERS = [render_default, render_iso8601, render_json]

HOSTILE = [
    'a "model"\nE1121 07:50:51.767849 1 x.py:1] "fire"\r\n',
    "\x00\x07\x1b[2J\x1b]0;title\x07\x7f\x9b2J\x85",
    "two\u2028lines\u2029of\x0b\x0c\x1ctext",
    "\u202eegnahc on\u2066\u200b\ufeff",
    "\udcff\ud800 not UTF-8",
    "\U000e0041 \U0001f600 漢字 é",
    "back\\slash\\n",
]
ANY_TEXT = st.text(st.characters()) | st.sampled_from(HOSTILE) | st.text(st.sampled_from('\n\r\x1b\x00"\\\udc80a'))


def spelt(text: str) -> str:
    """The text as read back from a line: lone surrogates as text."""
    return text.encode("utf-8", "backslashreplace").decode()


@pytest.mark.parametrize(
    ("severity", "letter"),
    [(Severity.ERROR, "E"), (Severity.WARNING, "W"), (Severity.INFO, "I"), (Severity.VERBOSE, "I")],
)
def test_a_default_line_is_tritons(severity: Severity, letter: str) -> None:
    assert render_default(replace(STARTED, severity=severity)) == (
        f'{letter}1121 07:50:51.767849 597 grpc_server.py:2558] "Started GRPCInferenceService at 127.0.0.1:28001"'
    )


def test_an_iso8601_line_is_tritons() -> None:
    assert render_iso8601(STARTED) == (
        '2026-11-21T07:50:51Z I 597 grpc_server.py:2558] "Started GRPCInferenceService at 127.0.0.1:28001"'
    )


def test_a_json_line_has_the_fields_that_are_known() -> None:
    assert json.loads(render_json(STARTED)) == {
        "time": "2026-11-21T07:50:51.767849Z",
        "level": "INFO",
        "pid": 597,
        "file": "grpc_server.py",
        "line": 2558,
        "message": "Started GRPCInferenceService at 127.0.0.1:28001",
    }
    failed = replace(
        STARTED,
        severity=Severity.ERROR,
        message="",
        request_id="7",
        model="digits",
        version="2",
        trace="Traceback\n  x",
    )
    document = json.loads(render_json(failed))
    assert {name: document[name] for name in ("level", "message", "request_id", "model", "version", "exception")} == {
        "level": "ERROR",
        "message": "",
        "request_id": "7",
        "model": "digits",
        "version": "2",
        "exception": "Traceback\n  x",
    }


@pytest.mark.parametrize("render", RENDERERS)
@given(text=ANY_TEXT)
def test_any_text_makes_one_printable_line_and_is_read_back(render, text: str) -> None:  # type: ignore[no-untyped-def]
    line = render(replace(STARTED, message=text))
    assert line.isprintable()
    head, _, quoted = line.partition("] ")
    read = json.loads(line)["message"] if render is render_json else json.loads(quoted)
    assert read == spelt(text)
    if render is not render_json:
        assert head.endswith("597 grpc_server.py:2558")


@given(text=ANY_TEXT)
def test_every_text_of_a_json_line_is_quoted(text: str) -> None:
    table = make_table((text, "Version"), [(text, "1")])
    line = render_json(replace(STARTED, file=text, request_id=text, model=text, version=text, trace=text, table=table))
    assert line.isprintable()
    document = json.loads(line)
    assert document["file"] == spelt(text)
    assert all(document.get(name, "") == spelt(text) for name in ("request_id", "model", "version", "exception"))


@given(text=ANY_TEXT, times=st.integers(0, 3000), limit=st.integers(0, MAX_MESSAGE_BYTES))
def test_clipped_text_fits_its_limit_and_counts_the_rest(text: str, times: int, limit: int) -> None:
    whole = text * times
    kept = clip(whole, limit)
    if kept == whole:
        return
    beginning, _, mark = kept.rpartition("... (")
    assert whole.startswith(beginning)
    assert mark == f"{len(whole) - len(beginning)} more characters)"
    assert len(quote(beginning).encode()) - 2 <= limit < len(quote(whole).encode()) - 2


@pytest.mark.parametrize("render", RENDERERS)
@pytest.mark.parametrize("letter", ["a", '"', "\n", "\x1b", "é", "漢", "\U000e0041", "\udcff"])
def test_longest_line_fits_the_limit_of_container_runtimes(render, letter: str) -> None:  # type: ignore[no-untyped-def]
    message, field = clip(letter * 1_000_000, MAX_MESSAGE_BYTES), clip(letter * 1000, MAX_FIELD_BYTES)
    assert len(quote(message).encode()) > MAX_MESSAGE_BYTES // 2, "hardly anything was kept"
    longest = replace(STARTED, message=message, file=field, request_id=field, model=field, version=field)
    assert len(render(longest).encode()) < MAX_LINE_BYTES


@pytest.mark.parametrize("render", [render_default, render_iso8601])
@given(trace=ANY_TEXT)
def test_a_traceback_stands_indented_below_its_line(render, trace: str) -> None:  # type: ignore[no-untyped-def]
    first, *rest = render(replace(STARTED, message="no luck", trace=trace)).split("\n")
    assert first.endswith('] "no luck"')
    assert len(rest) == len(trace.splitlines())
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def test_a_long_traceback_keeps_both_ends() -> None:
    trace = clip_trace("Traceback\n" + "x" * 1_000_000 + "\nValueError: why")
    assert len(trace) < MAX_TRACE_CHARS + 100
    assert trace.startswith("Traceback\n")
    assert trace.endswith("\nValueError: why")
    assert "\n... (934490 characters) ...\n" in trace
    assert clip_trace("Traceback\nx") == "Traceback\nx"


ROWS = [("digits", "1", "READY"), ("x", "2", "UNAVAILABLE: no\nfile\x1b[2J")]


@pytest.mark.parametrize("render", [render_default, render_iso8601])
def test_a_table_is_drawn_below_its_line(render) -> None:  # type: ignore[no-untyped-def]
    head, *table = render(replace(STARTED, table=make_table(("Model", "Version", "Status"), ROWS))).split("\n")
    assert head.endswith("597 grpc_server.py:2558] ")
    assert table == [
        "+--------+---------+-------------------------------+",
        "| Model  | Version | Status                        |",
        "+--------+---------+-------------------------------+",
        "| digits | 1       | READY                         |",
        "| x      | 2       | UNAVAILABLE: no file\\u001b[2J |",
        "+--------+---------+-------------------------------+",
        "",
    ]


def test_a_table_in_json_is_one_record_with_its_rows() -> None:
    line = render_json(replace(STARTED, table=make_table(("Model", "Version", "Status"), ROWS)))
    assert json.loads(line)["table"] == [
        {"Model": "digits", "Version": "1", "Status": "READY"},
        {"Model": "x", "Version": "2", "Status": "UNAVAILABLE: no file\x1b[2J"},
    ]


def test_long_cell_does_not_widen_the_whole_table() -> None:
    table = make_table(("Model", "Status"), [("bad", "x" * 1_000_000), *((f"m{n}", "READY") for n in range(100_000))])
    assert table.rows[0] == ("bad", f"{'x' * MAX_CELL_CHARS}... ({1_000_000 - MAX_CELL_CHARS} more characters)")
    *_, last = table.rows
    assert last == (f"... {100_001 - (len(table.rows) - 1)} more", "")
    for render in RENDERERS:
        assert len(render(replace(STARTED, table=table))) < 1.1 * MAX_TABLE_CHARS


def test_a_table_without_rows_is_a_header() -> None:
    drawn = render_default(replace(STARTED, table=make_table(("Model", "Status"), [])))
    assert drawn.split("\n")[1:] == [
        "+-------+--------+",
        "| Model | Status |",
        "+-------+--------+",
        "+-------+--------+",
        "",
    ]


def kind(model: str = "", line: int = 1, severity: Severity = Severity.ERROR) -> LineKind:
    return LineKind(severity, "thread.py", line, model)


def admitted(limit: FloodLimit, of: LineKind, lines: int, now_s: float) -> int:
    return sum(limit.admit(of, now_s) for _ in range(lines))


def test_a_flood_is_cut_to_the_limit_in_each_second_and_counted() -> None:
    limit = FloodLimit()
    assert admitted(limit, kind("a"), 10_000, now_s=5.0) == LINES_PER_SECOND
    assert admitted(limit, kind("a"), 10_000, now_s=5.9) == 0
    assert limit.is_suppressing()
    assert limit.take_suppressed() == {kind("a"): 20_000 - LINES_PER_SECOND}
    assert not limit.is_suppressing()
    assert limit.take_suppressed() == {}
    assert admitted(limit, kind("a"), 10_000, now_s=6.0) == LINES_PER_SECOND


def test_models_and_places_in_the_code_do_not_hide_each_other() -> None:
    limit = FloodLimit()
    admitted(limit, kind("a"), 10_000, now_s=0.0)
    for other in (kind("b"), kind("a", line=2), kind("a", severity=Severity.WARNING), kind()):
        assert admitted(limit, other, LINES_PER_SECOND, now_s=0.0) == LINES_PER_SECOND
    assert limit.take_suppressed() == {kind("a"): 10_000 - LINES_PER_SECOND}


def test_verbose_lines_are_not_limited() -> None:
    assert admitted(FloodLimit(), kind(severity=Severity.VERBOSE), 10_000, now_s=0.0) == 10_000


def test_too_many_models_share_a_kind_until_there_is_room() -> None:
    limit = FloodLimit()
    names = [f"m{number}" for number in range(MAX_KINDS + 1000)]
    assert sum(limit.admit(kind(name), 0.0) for name in names) == MAX_KINDS + LINES_PER_SECOND
    assert limit.take_suppressed() == {kind(): 1000 - LINES_PER_SECOND}
    assert all(limit.admit(kind(f"new{number}"), 1.0) for number in range(1000))
