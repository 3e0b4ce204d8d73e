"""Lines of the operator's log, with texts that users chose."""

import logging
import sys

from halimede_operator.log import TextFormatter

FORGED = "a\n2030-01-01 00:00:00,000 ERROR x: forged\r\x1b[2J\x9b\u2028\u202e\ud800"


def record(message: str, error: bool = False) -> logging.LogRecord:
    info = sys.exc_info() if error else None
    return logging.LogRecord("halimede", logging.WARNING, "", 1, "field %s: ü🙂", (message,), info)


def test_a_text_message_is_one_line_without_control_characters():
    line = TextFormatter().format(record(FORGED))
    assert line.isprintable()
    assert line.endswith(
        r"WARNING halimede: field a\n2030-01-01 00:00:00,000 ERROR x: forged\r\x1b[2J\x9b\u2028\u202e\ud800: ü🙂"
    )


def test_lines_of_an_exception_are_indented():
    try:
        raise ValueError(FORGED)
    except ValueError:
        _, *lines = TextFormatter().format(record("x", error=True)).split("\n")
    assert any("Traceback" in line for line in lines)
    assert all(line.startswith("    ") and line.isprintable() for line in lines)
