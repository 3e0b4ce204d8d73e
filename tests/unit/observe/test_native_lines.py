"""Output of native libraries as log lines."""

import pytest

from halimede.core.observe.log_lines import Severity
from halimede.core.observe.native_lines import NativeLine, read_native_line

PRINTED = "2026-11-23 05:12:45.155387755 [{}:onnxruntime:Default, inference_session.cc:3309 operator()] Exception: no"


@pytest.mark.parametrize(
    ("letter", "severity"),
    [
        ("V", Severity.VERBOSE),
        ("I", Severity.INFO),
        ("W", Severity.WARNING),
        ("E", Severity.ERROR),
        ("F", Severity.ERROR),
    ],
)
def test_line_of_onnx_runtime_keeps_its_severity_and_place(letter: str, severity: Severity) -> None:
    expected = NativeLine(severity, "inference_session.cc:3309", "onnxruntime: Exception: no")
    assert read_native_line(PRINTED.format(letter), "m") == expected


@pytest.mark.parametrize(
    ("letter", "severity"),
    [("I", Severity.VERBOSE), ("W", Severity.WARNING), ("E", Severity.ERROR), ("F", Severity.ERROR)],
)
def test_line_of_abseil_is_information_for_verbose_logs_only(letter: str, severity: Severity) -> None:
    printed = f"{letter}0000 00:00:1795690467.857294   27740 port.cc:153] oneDNN custom operations are on."
    expected = NativeLine(severity, "port.cc:153", "oneDNN custom operations are on.")
    assert read_native_line(printed, "m") == expected


def test_note_of_abseil_about_its_log_is_verbose() -> None:
    note = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
    assert read_native_line(note, "m") == NativeLine(Severity.VERBOSE, "m", note)


def test_colours_are_left_out() -> None:
    error = f"\x1b[1;31m{PRINTED.format('E')}"
    expected = NativeLine(Severity.ERROR, "inference_session.cc:3309", "onnxruntime: Exception: no")
    assert read_native_line(error, "m") == expected
    assert read_native_line(f"\x1b[m{error}", "m") == expected
    assert read_native_line("\x1b[m", "m") is None


@pytest.mark.parametrize("text", ["", "hello", "[E:onnxruntime:, x.cc:1 f] no time", "2026 [E:onnxruntime"])
def test_any_other_line_is_info_at_its_own_place(text: str) -> None:
    assert read_native_line(text, "m") == NativeLine(Severity.INFO, "m", text)
