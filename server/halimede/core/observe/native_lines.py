"""Convert the output of native libraries to log lines."""

import re
from typing import NamedTuple

from halimede.core.observe.log_lines import Severity

_SEVERITIES = {
    "V": Severity.VERBOSE,
    "I": Severity.INFO,
    "W": Severity.WARNING,
    "E": Severity.ERROR,
    "F": Severity.ERROR,
}
# `2026-11-23 05:08:17.547576949 [E:onnxruntime:, file.cc:572 Function] text`. Errors have colour codes even in a pipe;
# the code that ends the colour comes before the next line.
_COLOURS = re.compile(r"(?:\x1b\[[0-9;]*m)+")
_ONNX_RUNTIME = re.compile(r"\d{4}-\d\d-\d\d [\d:.]+ \[([VIWEF]):onnxruntime:[^,\]]*, ([^ :]+:\d+) [^\]]*\] (.*)")

# `I0000 00:00:1795690467.857294   27740 port.cc:153] text`: Abseil before its log is set up, as always in
# TensorFlow. Its lines of information are of use to its authors alone.
_ABSEIL = re.compile(r"([IWEF])0000 00:00:[\d.]+ +\d+ ([^ :]+:\d+)\] (.*)")
_ABSEIL_NOTE = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"


class NativeLine(NamedTuple):
    severity: Severity
    origin: str
    text: str


def read_native_line(text: str, origin: str) -> NativeLine | None:
    """The log line for a printed line; `origin` is used unless the library gives one. None for colour codes only."""
    plain = _COLOURS.sub("", text)
    match = _ONNX_RUNTIME.fullmatch(plain)
    if match is not None:
        return NativeLine(_SEVERITIES[match[1]], match[2], f"onnxruntime: {match[3]}")
    match = _ABSEIL.fullmatch(plain)
    if match is not None:
        severity = Severity.VERBOSE if match[1] == "I" else _SEVERITIES[match[1]]
        return NativeLine(severity, match[2], match[3])
    severity = Severity.VERBOSE if plain == _ABSEIL_NOTE else Severity.INFO
    return NativeLine(severity, origin, plain) if plain or not text else None
