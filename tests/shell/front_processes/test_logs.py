"""Log lines of front-end processes: in the form of the core's, in the same file, and in the new one after a rotation."""

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from support.calls import ONES_JSON
from support.forked import start_python
from support.front_ends import (
    TWO,
    Connection,
    connect,
    connections_to_each,
    front_ends,
    grpc_client,
    wait_for_front_ends,
)
from support.models import add_identity
from support.server import LISTENING, LOOPBACK, RunningServer, Start, wait_until

LINE = re.compile(r"^(?P<head>[IWEV]\d{4} \d\d:\d\d:\d\d\.\d{6} )(?P<pid>\d+) (?P<place>\S+)\] (?P<text>.*)$")
INFER = "/v2/models/quick/infer"


@dataclass
class Logged:
    server: RunningServer
    path: Path

    def lines(self, *texts: str) -> list[dict[str, str]]:
        """The lines with these texts."""
        found = [LINE.match(line) for line in self.path.read_text().splitlines() if all(each in line for each in texts)]
        return [match.groupdict() for match in found if match]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Logged]]:
    """One without front-end processes, and one with two."""
    repository, log = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("log")
    add_identity(repository, "quick")
    made = []
    for flag in ("--frontend-processes=1", TWO):
        path = log / f"server{flag[-1]}.log"
        arguments = ("--model-repository", repository, "--log-access=all", "--log-verbose=1")
        made.append(Logged(started(path, flag, *arguments), path))
    yield made
    for each in made:
        assert each.server.process.poll() is None, each.path.read_text()
        assert each.server.stop() == 0, each.path.read_text()


def started(path: Path, *arguments: str | Path) -> RunningServer:
    """As `start_server`, with a log file, in which the ports are."""
    program = ["-m", "halimede", "serve", *LOOPBACK, *map(str, arguments), f"--log-file={path}"]
    with open(os.devnull, "wb") as nowhere:
        process = start_python(*program, stdout=nowhere, stderr=nowhere)
    server = RunningServer(process, path)

    def listening() -> bool:
        server.ports = {name: int(port) for name, port in LISTENING.findall(server.log)} if path.exists() else {}
        return len(server.ports) == 3

    wait_until(listening, "its ports")
    server.wait_ready()
    return server


@pytest.fixture
def alone(servers: list[Logged]) -> Logged:
    return servers[0]


@pytest.fixture
def two(servers: list[Logged]) -> Logged:
    return servers[1]


def without_numbers(line: dict[str, str]) -> tuple[str, str, str]:
    """Everything but times, ports and the process."""
    return line["head"][0], line["place"], re.sub(r"\d+(\.\d+)?", "0", line["text"])


def test_lines_have_the_form_of_the_core(alone: Logged, two: Logged):
    def log_all(logged: Logged) -> None:
        """One of each kind, in an order."""
        connection = connect(logged.server)
        for body in (ONES_JSON, "{"):
            connection.post(INFER, body)
        connection.get("/v2/models/none")
        connection.http.close()
        with grpc_client(logged.server.grpc_url) as client:
            assert client.is_model_ready("quick")

    found = []
    for logged in (alone, two):
        log_all(logged)
        wait_until(lambda logged=logged: logged.lines("ModelReady"), "the last line", logged.server)
        lines = logged.lines("quick") + logged.lines("/v2/models/none")
        found.append({without_numbers(line) for line in lines})
    assert found[0] == found[1]
    assert any("infer" in text for _, _, text in found[0])


def test_each_process_writes_its_lines_to_the_file(two: Logged):
    with connections_to_each(two.server) as fronts:
        for front in fronts:
            assert front.post(INFER, ONES_JSON).status == 200
        for front in fronts:
            wait_until(
                lambda front=front: any(line["pid"] == str(front.pid) for line in two.lines(INFER)),
                "its lines",
                two.server,
            )
    assert {line["pid"] for line in two.lines("Started HTTPService")} == {str(two.server.process.pid)}


def use_until_in(path: Path, fronts: list[Connection]) -> None:
    """Send requests until lines of all these processes are in the file."""

    def are_in() -> bool:
        for front in fronts:
            assert front.post(INFER, ONES_JSON).status == 200
        return path.exists() and all(f" {front.pid} " in path.read_text() for front in fronts)

    wait_until(are_in, f"lines of all processes in {path}")


def everyone(server: RunningServer) -> list[psutil.Process]:
    return [psutil.Process(server.process.pid), *front_ends(server)]


def open_files(process: psutil.Process) -> list[str]:
    return [each.path for each in process.open_files()]


def test_after_a_rotation_all_processes_write_to_the_new_file(two: Logged):
    server, path = two.server, two.path
    with connections_to_each(server) as fronts:
        use_until_in(path, fronts)
        assert all(str(path) in open_files(each) for each in everyone(server))
        moved = path.rename(path.with_name("server.log.1"))
        server.process.send_signal(signal.SIGHUP)
        # Without another line, so that the old file can be compressed.
        wait_until(
            lambda: not any(str(moved) in open_files(each) for each in everyone(server)), "the old file to be closed"
        )
        use_until_in(path, fronts)
        # Lines are written in their order: those before the rotation have all been written.
        before = moved.read_bytes()
        use_until_in(path, fronts)
        for front in fronts:
            assert front.post(INFER, ONES_JSON).status == 200
        assert moved.read_bytes() == before
    assert server.get("/v2/health/ready").status == 200


def test_a_process_that_is_started_again_writes_to_the_new_file(two: Logged):
    server, path = two.server, two.path
    path.rename(path.with_name("server.log.2"))
    server.process.send_signal(signal.SIGHUP)
    wait_until(path.exists, "the new file")
    before = front_ends(server)
    before[0].kill()
    wait_for_front_ends(server, besides=before[:1])
    with connections_to_each(server) as fronts:
        use_until_in(path, fronts)
    (line,) = two.lines("front-end process 0 ended by signal 9")
    assert line["head"][0] == "E"


def dropped(server: RunningServer) -> int:
    (line,) = (each for each in server.metrics().splitlines() if each.startswith("halimede_log_dropped_lines_total"))
    return int(float(line.split()[-1]))


def test_dropped_lines_of_all_processes_are_counted_over_a_restart(start: Start, repository: Path, tmp_path: Path):
    """The directory of the log is gone, so that every line is lost; the restart does not need it."""
    add_identity(repository, "quick")
    path = tmp_path / "logs" / "server.log"
    path.parent.mkdir()
    server = started(path, TWO, "--model-repository", repository, "--log-access=all")
    try:
        path.unlink()
        path.parent.rmdir()
        server.log_path = tmp_path / "none"
        server.log_path.touch()
        server.process.send_signal(signal.SIGHUP)
        with connections_to_each(server) as fronts:

            def use(count: int) -> None:
                for _ in range(count):
                    for front in fronts:
                        assert front.post(INFER, ONES_JSON).status == 200

            use(1)
            before = dropped(server)
            use(100)
            wait_until(lambda: dropped(server) >= before + 150, "the lines that both lost", server)
        wait_until(lambda: counted_twice(server), "a count that does not change", server)
        before = dropped(server)
        killed = front_ends(server)
        for each in killed:
            each.kill()
        wait_for_front_ends(server, besides=killed)
        assert dropped(server) >= before
    finally:
        server.kill()


def counted_twice(server: RunningServer) -> bool:
    """Whether the processes have published their counts."""
    before = dropped(server)
    time.sleep(1.5)
    return dropped(server) == before
