"""What a terminal shows of a start."""

from dataclasses import replace

import pytest

from halimede.core.observe.log_lines import LogLine, Severity
from halimede.core.observe.start_summary import (
    Terminal,
    loading_line,
    problem_lines,
    summary_lines,
    url_of,
    without_repeat,
)
from halimede.core.types import ModelIndexEntry, ModelReadyState

PLAIN = Terminal(60, has_colours=False)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("0.0.0.0:8000", "http://localhost:8000/x"),
        (":::8000", "http://localhost:8000/x"),
        ("10.0.0.1:8000", "http://10.0.0.1:8000/x"),
        ("fe80::1:8000", "http://[fe80::1]:8000/x"),
        ("unix:/run/halimede", "unix:/run/halimede"),
    ],
)
def test_urls_are_those_of_clients_on_this_machine(address: str, url: str) -> None:
    assert url_of("http://", address, "/x") == url


def test_names_are_cut_to_the_width_and_cannot_control_the_terminal() -> None:
    index = [
        ModelIndexEntry("a" * 80, "1", ModelReadyState.READY),
        ModelIndexEntry("\x1b[2J", "12", ModelReadyState.UNAVAILABLE, "broken"),
        ModelIndexEntry("never requested"),
    ]
    lines = list(summary_lines("Halimede", [], index, {"a" * 80: 1.25}, PLAIN))
    assert [len(line) <= 60 for line in lines] == [True] * len(lines)
    assert lines[-2].split() == ["a" * 24 + "...", "1", "READY", "1.2"]
    assert lines[-1].split() == ["\\u001b[2J", "12", "UNAVAILABLE"]


def test_a_traceback_stays_as_it_is_below_its_problem() -> None:
    line = LogLine(0, Severity.WARNING, 1, "x.py", 1, "it\nfailed " + "again " * 12, trace='File "m.py"\n  code()')
    assert list(problem_lines(line, PLAIN)) == [
        "warning: it failed again again again again again again again",
        "  again again again again again",
        '  File "m.py"',
        "    code()",
    ]


def test_the_only_cause_of_a_failed_start_is_shown_once() -> None:
    first, second, third = (
        LogLine(0, Severity.ERROR, 1, "x.py", 1, text)
        for text in ("failed to load 'a': no file", "failed to load 'b': no room", "no trace of a cause")
    )
    end = LogLine(0, Severity.ERROR, 1, "x.py", 1, "failed to load all models: a: no file")
    assert without_repeat([first, third, end]) == [third, end]
    assert without_repeat([first, second, replace(end, message=f"{end.message}; b: no room")])[:2] == [first, second]
    assert without_repeat([replace(first, trace="File"), end]) == [replace(first, trace="File"), end]
    assert without_repeat([]) == []


def test_models_that_load_are_listed_with_their_seconds() -> None:
    assert loading_line([("a", 5.02), ("b", 0.2)], PLAIN) == "still loading: a (5 s), b (0 s)"
