"""The file of a log: it is moved, deleted, emptied, closed or full, and logging continues."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.logs import FLUSH_S, HEAD, Log, read, run
from support.server import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def log(path: Path) -> Log:
    return Log(path)


def test_moved_or_deleted_log_file_is_recreated(log: Log, path: Path) -> None:
    log.logger.debug("before")
    assert log.messages() == ["before"]
    moved = path.rename(path.with_name("server.log.1"))
    # As after SIGHUP: without another line, so that the old file can be compressed.
    log.writer.reopen()
    wait_until(path.exists, "the new file")
    log.logger.debug("between")
    assert log.messages() == ["between"]
    path.unlink()

    def is_there() -> bool:
        log.logger.debug("afterwards")
        log.writer.flush(FLUSH_S)
        return path.exists()

    wait_until(is_there, "the new file, which the path is looked at for once a second")
    assert set(log.messages()) == {"afterwards"}
    assert [each["message"] for each in read(moved)] == ["before"]
    assert log.writer.dropped == 0


def test_log_file_closed_by_a_library_is_reopened(log: Log, path: Path) -> None:
    log.logger.debug("before")
    assert log.messages() == ["before"]
    (number,) = (int(fd) for fd in os.listdir("/proc/self/fd") if is_open_at(int(fd), path))
    os.close(number)

    def is_written_again() -> bool:
        log.logger.debug("afterwards")
        return "afterwards" in log.messages()

    wait_until(is_written_again, "the file to be opened anew")
    (number,) = (int(fd) for fd in os.listdir("/proc/self/fd") if is_open_at(int(fd), path))


def is_open_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def test_a_file_that_was_emptied_is_written_from_its_beginning(log: Log, path: Path) -> None:
    log.logger.debug("before")
    assert log.messages() == ["before"]
    path.write_text("")
    log.logger.debug("afterwards")
    assert log.messages() == ["afterwards"]


def test_a_file_that_is_already_there_is_continued(path: Path) -> None:
    path.write_text('{"message":"of the last run"}\n')
    log = Log(path)
    log.logger.debug("of this one")
    assert log.messages() == ["of the last run", "of this one"]


def test_log_waits_for_a_deleted_directory_to_return(tmp_path: Path) -> None:
    home = tmp_path / "logs"
    home.mkdir()
    log = Log(home / "server.log")
    log.logger.debug("before")
    assert log.messages() == ["before"]
    (home / "server.log").unlink()
    home.rmdir()

    def lost() -> bool:
        log.logger.debug("into nothing")
        log.writer.flush(FLUSH_S)
        return log.writer.dropped > 0

    wait_until(lost, "lines that are lost")
    home.mkdir()
    wait_until((home / "server.log").exists, "the new file")
    wait_until(lambda: any("log lines were dropped" in str(each) for each in log.messages()), "the count")


def test_full_disk_only_loses_lines() -> None:
    log = Log(Path("/dev/full"))
    for number in range(100):
        log.logger.debug("line %d", number)
    log.writer.flush(FLUSH_S)
    assert log.writer.dropped == 100


def test_line_after_one_cut_by_a_full_disk_is_intact(path: Path) -> None:
    done = run(
        "import resource\n"
        "def limit(size):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))\n"
        f"configure(Settings(log_file=Path({str(path)!r}), log_format=LogFormat.JSON, log_verbose=1))\n"
        "log = logging.getLogger('halimede.a')\n"
        "limit(1000)\n"
        "for number in range(100):\n"
        "    log.debug('line %d', number)\n"
        "shutdown()\n"
        "limit(resource.RLIM_INFINITY)\n"
        "log.debug('there is room again')\n"
        "shutdown()\n"
        "print(dropped_lines())\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    dropped = int(done.stdout)
    *lines, cut, again, note = path.read_text().splitlines()
    assert len(lines) == 100 - dropped > 0
    assert [json.loads(line)["message"] for line in lines] == [f"line {number}" for number in range(len(lines))]
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut)
    assert json.loads(again)["message"] == "there is room again"
    assert json.loads(note)["message"] == f"{dropped} log lines were dropped: File too large"


def test_log_without_stderr_writes_to_no_other_file(tmp_path: Path) -> None:
    innocent = tmp_path / "innocent"
    program = (
        f"{HEAD}import os\n"
        "configure(Settings())\n"
        f"opened = open({str(innocent)!r}, 'wb')\n"
        "logging.getLogger('halimede.a').error('fire')\n"
        "os.write(2, b'a library that prints')\n"
        "shutdown()\n"
        "print(opened.fileno() > 2, dropped_lines(), flush=True)\n"
        "import subprocess\n"
        "subprocess.run([sys.executable, '-c', 'import sys; print(sys.stderr is not None)'])\n"
    )
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "True 1\nTrue\n")
    assert innocent.read_bytes() == b""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere/server.log", "No such file or directory"),
        ("", "Is a directory"),
        ("fifo", "No such device or address"),
    ],
)
def test_a_file_that_cannot_be_opened_is_an_error_that_names_the_flag(tmp_path: Path, name: str, why: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    path = tmp_path / name
    done = run(
        "from halimede.core.types import InferenceError\n"
        "try:\n"
        f"    configure(Settings(log_file=Path({str(path)!r})))\n"
        "except InferenceError as error:\n"
        "    logging.getLogger('halimede.a').error('%s', error)\n"
    )
    assert done.stderr.split("] ")[1] == f'"--log-file: {path} cannot be opened: {why}"\n'
