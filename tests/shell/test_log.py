"""The log of a process: what it contains, and that logging neither blocks nor fails."""

import json
import logging
import os
import re
import threading
import time
from pathlib import Path

import pytest

from halimede.core.observe.log_lines import (
    LINES_PER_SECOND,
    MAX_LINE_BYTES,
    Severity,
    render_default,
)
from halimede.log import MAX_QUEUED_BYTES, MAX_QUEUED_LINES, LogHandler, LogOutput, LogWriter, log_table
from support.forked import start_python
from support.logs import FLUSH_S, HEAD, Log, run, stalled
from support.server import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def log(path: Path) -> Log:
    return Log(path)


@pytest.mark.parametrize(
    ("flags", "letters"),
    [
        ("", "I halimede.a, W halimede.a, E halimede.a, W asyncio"),
        ("log_verbose=1", "I halimede.a, I halimede.a, W halimede.a, E halimede.a, W asyncio"),
        ("log_info=False", "W halimede.a, E halimede.a, W asyncio"),
        ("log_warning=False", "I halimede.a, E halimede.a"),
        ("log_info=False, log_warning=False, log_error=False", ""),
    ],
)
def test_flags_choose_what_is_logged_to_stderr(flags: str, letters: str) -> None:
    done = run(
        f"configure(Settings({flags}))\n"
        "for name in ('halimede.a', 'asyncio'):\n"
        "    for level in (10, 20, 30, 40) if name == 'halimede.a' else (10, 20, 30):\n"
        "        logging.getLogger(name).log(level, name)\n"
    )
    seen = [f"{line[0]} {line.split('] ')[1][1:-1]}" for line in done.stderr.splitlines()]
    assert (done.returncode, done.stdout, ", ".join(seen)) == (0, "", letters)


WORKER_OUTPUT = """
configure(Settings(log_format=LogFormat.{form}))
from halimede.processes.output import log_line
log_line(40, "model.py:7", "m failed: Traceback:\\n  File \\x1b\\n    raise\\nValueError: why\\n", {{"model": "m"}})
"""


def on_a_terminal(program: str) -> str:
    """The output of the program on stderr, which is a terminal."""
    terminal, program_side = os.openpty()
    try:
        with open(program_side, "wb") as stderr, open(os.devnull, "wb") as stdout:
            assert start_python("-c", HEAD + program, stdout=stdout, stderr=stderr).wait(60) == 0
        return os.read(terminal, 1 << 16).decode().replace("\r\n", "\n")
    finally:
        os.close(terminal)


def test_traceback_of_a_worker_has_lines_of_its_own_on_a_terminal() -> None:
    for form in ("DEFAULT", "ISO8601"):
        first, *rest = on_a_terminal(WORKER_OUTPUT.format(form=form)).splitlines()
        assert first.endswith('model.py:7] "m failed: Traceback:"')
        assert rest == ["    File \\u001b", "      raise", "  ValueError: why"]


def test_traceback_of_a_worker_is_one_line_elsewhere(path: Path) -> None:
    assert len(on_a_terminal(WORKER_OUTPUT.format(form="JSON")).splitlines()) == 1
    assert len(run(WORKER_OUTPUT.format(form="DEFAULT")).stderr.splitlines()) == 1
    to_file = WORKER_OUTPUT.replace("log_format", f"log_file=Path({str(path)!r}), log_format").format(form="DEFAULT")
    assert on_a_terminal(to_file + "print('.', file=sys.stderr)\n") == ".\n"
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("DEFAULT", r'^I\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ <string>:6\] "hello"\n$'),
        ("ISO8601", r'^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ <string>:6\] "hello"\n$'),
        (
            "JSON",
            r'^{"time":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z","level":"INFO","pid":\d+,"file":"<string>",.*}\n$',
        ),
    ],
)
def test_the_flag_chooses_the_format(name: str, form: str) -> None:
    done = run(f"configure(Settings(log_format=LogFormat.{name}))\nlogging.getLogger('halimede.a').info('hello')\n")
    assert re.match(form, done.stderr), done.stderr


def test_record_has_its_model_and_request(log: Log) -> None:
    about = {"request_id": "7", "model": "digits", "version": 2}
    try:
        raise ValueError("first\nI0101 second")
    except ValueError:
        log.logger.exception("instance '%s' failed", "digits_0", extra=about)
    log.logger.error("nothing was raised", exc_info=True)
    failed, plain = log.documents()
    assert failed["message"] == "instance 'digits_0' failed"
    assert (failed["request_id"], failed["model"], failed["version"]) == ("7", "digits", "2")
    assert (failed["file"], failed["level"], failed["pid"]) == ("test_log.py", "ERROR", os.getpid())
    trace = str(failed["exception"])
    assert trace.startswith("Traceback (most recent call last):")
    assert trace.endswith("ValueError: first\nI0101 second")
    assert not {"request_id", "model", "version", "exception", "table"} & set(plain)


def test_a_table_names_the_line_that_logged_it(path: Path) -> None:
    logger = logging.Logger("halimede.table")
    writer = LogWriter(LogOutput(path), render_default)
    logger.addHandler(LogHandler(writer, frozenset(Severity)))
    log_table(logger, ("Model", "Version", "Status"), [("digits", "1", "READY")])
    writer.flush(FLUSH_S)
    head, *table = path.read_text().splitlines()
    assert head.split()[3].startswith("test_log.py:")
    assert table[1:4:2] == ["| Model  | Version | Status |", "| digits | 1       | READY  |"]


def test_line_shows_its_arguments_at_the_time_of_logging(log: Log) -> None:
    shape = [1, 3]
    for size in range(100):
        shape[0] = size
        log.logger.debug("%s", shape)
    assert log.messages() == [f"[{size}, 3]" for size in range(100)]


def test_unprintable_argument_still_gives_a_line(log: Log) -> None:
    class Hostile:
        def __str__(self) -> str:
            raise SystemError("no")

    class HostileError(Exception):
        __str__ = Hostile.__str__

        def __getattribute__(self, name: str) -> object:
            raise SystemError("no")

    log.logger.error("a %s", Hostile())
    log.logger.error("%d bottles", "ten")
    log.logger.error(Hostile())
    try:
        raise HostileError
    except HostileError:
        log.logger.exception("raised")
    first, second, third, fourth = log.documents()
    assert (first["message"], second["message"]) == ("a %s (SystemError)", "%d bottles (TypeError)")
    assert "Hostile" in str(third["message"])
    assert (fourth["message"], "HostileError" in str(fourth["exception"])) == ("raised", True)


def test_an_endless_message_is_cut(log: Log) -> None:
    log.logger.error("%s", "\x1b" * 1_000_000, extra={"request_id": "7" * 1_000_000, "model": b"not text"})
    (document,) = log.documents()
    assert str(document["message"]).endswith(" more characters)")
    assert len(json.dumps(document)) < MAX_LINE_BYTES
    assert "model" not in document


def test_threads_do_not_mix_their_lines(log: Log) -> None:
    def speak(name: int) -> None:
        for number in range(500):
            log.logger.debug("%d %d", name, number)

    threads = [threading.Thread(target=speak, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spoken = [tuple(map(int, str(message).split())) for message in log.messages()]
    for name in range(8):
        assert [number for speaker, number in spoken if speaker == name] == list(range(500))


def test_slow_text_on_one_thread_does_not_block_others(log: Log) -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Slow:
        def __str__(self) -> str:
            begun.set()
            return str(may_end.wait(FLUSH_S))

    thread = threading.Thread(target=log.logger.debug, args=("%s", Slow()))
    thread.start()
    begun.wait(FLUSH_S)
    log.logger.debug("quick")
    may_end.set()
    thread.join()
    assert log.messages() == ["quick", "True"]


def test_flood_of_one_kind_is_cut_and_counted(log: Log) -> None:
    for _ in range(10_000):
        log.logger.error("instance failed", extra={"model": "bad"})
    log.logger.error("instance failed", extra={"model": "good"})
    documents = log.documents()
    assert [document["model"] for document in documents].count("good") == 1
    written = [document for document in documents if document["message"] == "instance failed"]
    notes = [document for document in documents if "more lines like this one were suppressed" in document["message"]]
    suppressed = sum(int(str(note["message"]).split()[0]) for note in notes)
    assert suppressed + len(written) == 10_001
    # The goal: one second's lines. A slow machine may need some seconds for 10,000.
    assert LINES_PER_SECOND < len(written) <= 20 * LINES_PER_SECOND
    assert {(note["level"], note["model"], note["line"]) for note in notes} == {("ERROR", "bad", written[0]["line"])}


def test_end_of_a_flood_is_reported_without_another_line(log: Log, path: Path) -> None:
    def fail(times: int) -> None:
        for _ in range(times):
            log.logger.error("instance failed")

    fail(LINES_PER_SECOND)
    log.writer.flush(FLUSH_S)
    fail(1000)
    wait_until(lambda: any("suppressed" in line for line in path.read_text().splitlines()), "the count")


def test_unread_log_blocks_nothing_and_counts_dropped_lines(tmp_path: Path) -> None:
    lines = MAX_QUEUED_LINES + 5000
    with stalled(tmp_path) as (log, drain):
        for number in range(lines):
            log.logger.debug("line %d of an unread log", number)
        dropped = log.writer.dropped
        assert 0 < dropped < 5000
        seen: list[str] = []

        def is_reported() -> bool:
            seen.extend(str(document["message"]) for document in drain())
            return any("were dropped" in each for each in seen)

        wait_until(is_reported, "the count")
        *written, note = seen
        assert note == f"{dropped} log lines were dropped: they came faster than they could be written"
        assert written == [f"line {number} of an unread log" for number in range(lines - dropped)]
        log.logger.debug("afterwards")
        wait_until(lambda: [each["message"] for each in drain()] == ["afterwards"], "the next line")
        assert log.writer.dropped == dropped


def test_the_queue_is_bounded_in_bytes_too(tmp_path: Path) -> None:
    with stalled(tmp_path) as (log, _):
        for _ in range(2 * MAX_QUEUED_BYTES // 10_000):
            log.logger.debug("%s", "x" * 10_000)
        assert log.writer.dropped > MAX_QUEUED_BYTES // 10_000


def test_written_lines_make_room_in_the_queue(log: Log) -> None:
    for _ in range(3):
        for _ in range(MAX_QUEUED_BYTES // 20_000):
            log.logger.debug("%s", "x" * 10_000)
        log.writer.flush(FLUSH_S)
    assert log.writer.dropped == 0


def test_unread_log_does_not_delay_the_exit(tmp_path: Path) -> None:
    with stalled(tmp_path) as (log, _):
        for number in range(5000):
            log.logger.debug("line %d of an unread log", number)
        begun = time.monotonic()
        for _ in range(1000):
            log.writer.flush(0.1)
        # The first one waits 0.1 s, the others not at all: all of them would wait 100 s.
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise RuntimeError('last words')", "os.kill(os.getpid(), 2)"])
def test_nothing_is_lost_at_an_exit(end: str) -> None:
    done = run(
        "import os\nconfigure(Settings(log_verbose=1))\n"
        "for number in range(2000):\n"
        "    logging.getLogger('halimede.a').debug('line %d', number)\n" + end
    )
    lines = done.stderr.splitlines()
    assert [line.split('"')[1] for line in lines[:2000]] == [f"line {number}" for number in range(2000)]
    if "last words" in end:
        assert (done.returncode, lines[-1]) == (1, "  RuntimeError: last words")


def test_immediate_exit_writes_as_much_as_possible() -> None:
    done = run(
        "import os\nconfigure(Settings())\nlogging.getLogger('halimede.a').error('fire')\nshutdown(5)\nos._exit(7)"
    )
    assert (done.returncode, done.stderr.split("] ")[1]) == (7, '"fire"\n')


def test_uncaught_errors_and_warnings_are_quoted_in_the_log() -> None:
    done = run(
        "import threading, warnings\n"
        "configure(Settings(log_format=LogFormat.JSON))\n"
        "class Hostile:\n"
        "    def __del__(self):\n"
        "        raise ValueError('in a destructor\\nI0101')\n"
        "def die():\n"
        "    raise ValueError('in a thread\\nI0101')\n"
        "thread = threading.Thread(target=die, name='t1')\n"
        "thread.start(); thread.join()\n"
        "thread = threading.Thread(target=sys.exit)\n"
        "thread.start(); thread.join()\n"
        "Hostile()\n"
        "warnings.warn('look\\nI0101', RuntimeWarning)\n"
        "raise ValueError('in the program\\nI0101')\n"
    )
    documents = [json.loads(line) for line in done.stderr.splitlines()]
    thread, destructor, warning, program = (f"{each['level']} {each['message']}" for each in documents)
    assert thread == "ERROR thread 't1' ended by an exception"
    assert destructor.startswith("ERROR Exception ignored in: <function Hostile.__del__")
    assert warning.startswith("WARNING ")
    assert "RuntimeWarning: look\nI0101" in warning
    assert program == "ERROR unhandled exception"
    wheres = [each["exception"].rpartition("ValueError: ")[2] for each in documents if "exception" in each]
    assert wheres == ["in a thread\nI0101", "in a destructor\nI0101", "in the program\nI0101"]


def test_destructors_may_log_at_any_time(path: Path) -> None:
    # They run during any allocation, on the allocating thread.
    done = run(
        "import gc\n"
        f"configure(Settings(log_file=Path({str(path)!r}), log_verbose=1))\n"
        "log = logging.getLogger('halimede.a')\n"
        "class Dying:\n"
        "    def __init__(self):\n"
        "        self.me = self\n"
        "    def __del__(self):\n"
        "        log.error('dying')\n"
        "        log.debug('dying')\n"
        "for number in range(3000):\n"
        "    gc.set_threshold(1 + number % 20)\n"
        "    Dying()\n"
        "    log.error('living', extra={'model': str(number)})\n"
        "    log.debug('living')\n"
        "gc.collect()\n"
    )
    assert done.returncode == 0, done.stderr
    verbose = [line.split('"')[1] for line in path.read_text().splitlines() if line.startswith("I")]
    assert (verbose.count("dying"), verbose.count("living")) == (3000, 3000)
