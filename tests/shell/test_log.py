"""Log lines, as scripts that know Triton read them."""

import json
import logging
import subprocess
import sys

import pytest

from halimede.log import TritonFormatter, log_table


def record(level: int, message: str) -> logging.LogRecord:
    made = logging.LogRecord("halimede.x", level, "/src/grpc_server.py", 2558, message, None, None)
    # 2026-11-21T07:50:51.767849Z
    made.created, made.process = 1795247451.767849, 597
    return made


@pytest.mark.parametrize(
    ("level", "letter"),
    [(logging.DEBUG, "V"), (logging.INFO, "I"), (logging.WARNING, "W"), (logging.ERROR, "E"), (logging.CRITICAL, "E")],
)
def test_a_line_is_tritons(level: int, letter: str) -> None:
    line = TritonFormatter().format(record(level, "Started GRPCInferenceService at 127.0.0.1:28001"))
    assert line == (
        f'{letter}1121 07:50:51.767849 597 grpc_server.py:2558] "Started GRPCInferenceService at 127.0.0.1:28001"'
    )


def test_a_message_cannot_forge_a_line() -> None:
    message = 'a "model"\nE1121 07:50:51.767849 1 x.py:1] "fire"\r\x1b[2J'
    line = TritonFormatter().format(record(logging.INFO, message))
    head, quoted = line.split("] ", 1)
    assert (head, json.loads(quoted)) == ("I1121 07:50:51.767849 597 grpc_server.py:2558", message)
    assert line.isprintable()


def test_a_traceback_stands_indented_below_its_line() -> None:
    failed = record(logging.ERROR, "no luck")
    try:
        raise ValueError("first\nI0101 second")
    except ValueError as error:
        failed.exc_info = (type(error), error, error.__traceback__)
    first, *rest = TritonFormatter().format(failed).splitlines()
    assert first.endswith('] "no luck"')
    assert rest[0] == "  Traceback (most recent call last):"
    assert rest[-2:] == ["  ValueError: first", "  I0101 second"]


def test_a_table_is_drawn_as_it_is() -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.extend(TritonFormatter().format(record).splitlines())

    logger = logging.Logger("halimede.table")
    logger.addHandler(Keep())
    log_table(logger, ("Model", "Version", "Status"), [("digits", "1", "READY"), ("x", "2", "UNAVAILABLE: no\nfile")])
    head, *table = lines
    assert head.split()[3].startswith("test_log.py:")
    assert table == [
        "+--------+---------+----------------------+",
        "| Model  | Version | Status               |",
        "+--------+---------+----------------------+",
        "| digits | 1       | READY                |",
        "| x      | 2       | UNAVAILABLE: no file |",
        "+--------+---------+----------------------+",
    ]


@pytest.mark.parametrize(
    ("flags", "letters"),
    [
        ("", "I halimede.a, W halimede.a, E halimede.a, W asyncio"),
        ("log_verbose=1", "V halimede.a, I halimede.a, W halimede.a, E halimede.a, W asyncio"),
        ("log_info=False", "W halimede.a, E halimede.a, W asyncio"),
        ("log_warning=False", "I halimede.a, E halimede.a"),
        ("log_info=False, log_warning=False, log_error=False", ""),
    ],
)
def test_flags_choose_what_is_logged_to_stderr(flags: str, letters: str) -> None:
    # In a process of its own: the root logger is one per process, and pytest has handlers on it.
    program = (
        "import logging\n"
        "from halimede.log import configure\n"
        "from halimede.settings import Settings\n"
        f"configure(Settings({flags}))\n"
        "for name in ('halimede.a', 'asyncio'):\n"
        "    for level in (10, 20, 30, 40) if name == 'halimede.a' else (10, 20, 30):\n"
        "        logging.getLogger(name).log(level, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    seen = [f"{line[0]} {line.split('] ')[1][1:-1]}" for line in done.stderr.splitlines()]
    assert (done.stdout, ", ".join(seen)) == ("", letters)
