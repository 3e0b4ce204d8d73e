"""The log of a real server, and that faults of the log do not affect requests."""

import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import onnx
import pytest

from support.calls import ONES_JSON
from support.forked import start_python
from support.models import add_identity, save_onnx
from support.ports import free_port
from support.served import add_python
from support.served import infer as infer_python
from support.server import RunningServer, Start, halimede, start_server, wait_until


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    add_identity(tmp_path / "models", "ident")
    return tmp_path / "models"


@pytest.fixture
def start(tmp_path: Path, repository: Path) -> Iterator[Start]:
    """A server with another log target. Its ports are given, because they cannot be read from the log."""
    running: list[RunningServer] = []

    def begin(*arguments: str, ready: bool = True, first: str = "", **options: object) -> RunningServer:
        ports = [free_port() for _ in range(3)]
        command = [
            *(*halimede(first), "serve", f"--model-repository={repository}"),
            *("--model-control-mode=explicit", "--load-model=ident", *arguments),
            *(f"--{service}-address=127.0.0.1" for service in ("http", "grpc", "metrics")),
            *(f"--{service}-port={port}" for service, port in zip(("http", "grpc", "metrics"), ports, strict=True)),
        ]
        unread = tmp_path / "unread"
        unread.touch()
        process = (
            subprocess.Popen([sys.executable, *command], stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
            if "preexec_fn" in options
            else start_python(*command, **options)  # type: ignore[arg-type]
        )
        names = ("HTTPService", "GRPCInferenceService", "Metrics Service")
        running.append(RunningServer(process, unread, dict(zip(names, ports, strict=True))))
        if ready:
            wait_until(lambda: is_ready(running[-1]), "the server to be ready", running[-1])
        return running[-1]

    yield begin
    for server in running:
        server.kill()


def is_ready(server: RunningServer) -> bool:
    try:
        return server.get("/v2/health/ready").status == 200
    except OSError:
        return False


def infer(server: RunningServer, times: int) -> None:
    connection = HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    for _ in range(times):
        connection.request("POST", "/v2/models/ident/infer", ONES_JSON)
        response = connection.getresponse()
        assert (response.status, len(response.read()) > 0) == (200, True)
    connection.close()


def reload(server: RunningServer, times: int) -> None:
    """Reload a model; each reload writes some lines."""
    for _ in range(times):
        for what in ("unload", "load"):
            assert server.post(f"/v2/repository/models/ident/{what}").status == 200


def dropped_lines(server: RunningServer) -> int:
    for line in server.metrics().splitlines():
        if line.startswith("halimede_log_dropped_lines_total"):
            return int(float(line.split()[-1]))
    raise AssertionError("no metric of dropped lines")


@pytest.mark.parametrize("requests", [600, pytest.param(5000, marks=pytest.mark.large)])
def test_unread_output_blocks_neither_requests_nor_the_exit(start: Start, requests: int) -> None:
    reader, writer = os.pipe()
    # Full before the first line, so that no line of the start can be written either.
    os.set_blocking(writer, False)
    room = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    assert os.write(writer, b"x" * room) == room
    os.set_blocking(writer, True)
    with open(writer, "wb", closefd=False) as output:
        server = start("--log-verbose=1", stdout=output, stderr=output)
    infer(server, requests // 2)
    reload(server, 20)
    infer(server, requests // 2)
    begun = time.monotonic()
    assert server.stop() == 0
    # The goal: about a second longer than with a log that is read.
    assert time.monotonic() - begun < 15
    os.set_blocking(reader, False)
    assert os.read(reader, 2 * room) == b"x" * room
    os.close(reader)
    os.close(writer)


def test_unread_output_does_not_delay_a_second_signal(start: Start) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, b"x" * fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ))
    os.set_blocking(writer, True)
    with open(writer, "wb", closefd=False) as output:
        server = start("--drain-delay=60", stdout=output, stderr=output)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not is_ready(server), "the drain to begin")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 1
    os.close(reader)
    os.close(writer)


def test_a_log_pipe_without_a_reader_stops_nothing(start: Start) -> None:
    reader, writer = os.pipe()
    with open(writer, "wb", closefd=False) as output:
        server = start(stdout=output, stderr=output)
    os.close(writer)
    os.close(reader)
    reload(server, 5)
    infer(server, 10)
    wait_until(lambda: dropped_lines(server) >= 15, "the lines of five loads to be dropped")
    assert server.stop() == 0


def test_a_server_without_standard_streams_serves_and_keeps_their_numbers(start: Start) -> None:
    server = start(preexec_fn=lambda: os.closerange(0, 3))
    reload(server, 5)
    infer(server, 10)
    for number in range(3):
        assert Path(f"/proc/{server.process.pid}/fd/{number}").readlink() == Path(os.devnull)
    wait_until(lambda: dropped_lines(server) >= 15, "the lines of five loads to be dropped")
    assert server.stop() == 0


def test_a_log_file_may_be_moved_and_deleted_while_the_server_writes_it(start: Start, tmp_path: Path) -> None:
    path, moved, standard = tmp_path / "server.log", tmp_path / "server.log.1", tmp_path / "standard"
    with standard.open("wb") as output:
        server = start(f"--log-file={path}", stdout=output, stderr=output)
    wait_until(lambda: "Started HTTPService at" in path.read_text(), "the start's lines", server)
    path.rename(moved)
    server.process.send_signal(signal.SIGHUP)
    wait_until(path.exists, "the new file after the rotation", server)
    before = moved.read_bytes()
    reload(server, 1)
    wait_until(lambda: "successfully loaded 'ident'" in path.read_text(), "its lines", server)
    assert moved.read_bytes() == before
    path.unlink()

    def is_there() -> bool:
        reload(server, 1)
        return path.exists()

    wait_until(is_there, "the new file after the deletion, without a signal", server)
    infer(server, 10)
    assert dropped_lines(server) == 0
    assert server.stop() == 0
    assert "Signal (15) received" in path.read_text()
    assert standard.read_bytes() == b""


def test_a_full_disk_affects_only_the_log(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))"
    with (tmp_path / "standard").open("wb") as output:
        server = start(f"--log-file={path}", first=limit, stdout=output, stderr=output)
    reload(server, 20)
    infer(server, 100)
    wait_until(lambda: dropped_lines(server) >= 60, "the lines of twenty loads to be dropped")
    assert path.stat().st_size == 500
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    wait_until(lambda: "log lines were dropped: File too large" in path.read_text(), "the count", server)
    dropped = re.search(r'"(\d+) log lines were dropped: ', path.read_text())
    assert dropped is not None
    assert int(dropped[1]) == dropped_lines(server)
    assert server.stop() == 0
    assert "Signal (15) received" in path.read_text()


def test_each_line_of_a_json_log_is_a_document(repository: Path, tmp_path: Path) -> None:
    server = start_server(tmp_path, [f"--model-repository={repository}", "--log-format=json"])
    try:
        # A stop ends the start, with its tables.
        wait_until(lambda: '"READY"' in server.log, "the table of models", server)
        assert server.stop() == 0
    finally:
        server.kill()
    documents = [json.loads(line) for line in server.log.splitlines()]
    assert all({"time", "level", "pid", "file", "line", "message"} <= set(document) for document in documents)
    assert {document["pid"] for document in documents} == {server.process.pid}
    (loaded,) = (document for document in documents if document["message"] == "successfully loaded 'ident'")
    assert loaded["model"] == "ident"
    tables = [document["table"] for document in documents if "table" in document]
    assert [{"Model": "ident", "Version": "1", "Status": "READY"}] in tables


def test_a_log_file_that_cannot_be_opened_ends_the_start_early(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with (tmp_path / "standard").open("wb") as output:
        server = start(f"--log-file={path}", ready=False, stdout=output, stderr=output)
    assert server.process.wait(60) == 1
    (line,) = (tmp_path / "standard").read_text().splitlines()
    assert f'"--log-file: {path} cannot be opened: No such device or address"' in line


PRINTS_EVERYWHERE = r"""
import warnings
print("a print")
warnings.warn("a warning")
os.write(2, b"a native library\\\\n")
return [answer(request) for request in requests]
"""


def test_output_of_libraries_and_models_is_json_in_a_json_log(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    for name in ("on-thread", "in-process"):
        add_onnx_that_fails(repository, name)
    (repository / "in-process" / "config.pbtxt").write_text(
        'parameters { key: "ISOLATION" value { string_value: "process" } }'
    )
    add_python(repository, "prints", PRINTS_EVERYWHERE)
    server = start_server(
        tmp_path,
        [
            *(f"--model-repository={repository}", "--model-control-mode=explicit", "--load-model=prints"),
            "--log-format=json",
        ],
    )
    try:
        assert infer_python(server, "prints")[0] == 200
        for name in ("on-thread", "in-process"):
            assert server.post(f"/v2/repository/models/{name}/load").status != 200
        # The server does not wait for the end of the runtime's output.
        wait_until(lambda: server.log.count('"onnxruntime: Exception during') >= 2, "its lines", server)
        assert server.stop() == 0
    finally:
        server.kill()
    documents = [json.loads(line) for line in server.log.splitlines()]
    runtime = [each for each in documents if each["message"].startswith("onnxruntime: Exception during")]
    assert {(each["level"], each["file"]) for each in runtime} == {("ERROR", "inference_session.cc")}
    assert "in-process" in {each.get("model", "") for each in runtime}
    printed = [each["message"] for each in documents if each.get("model") == "prints"]
    for text in ("a print", "a warning", "a native library"):
        assert any(text in message for message in printed), text


def add_onnx_that_fails(repository: Path, name: str) -> None:
    """A model whose kernel ONNX Runtime cannot create; the runtime prints a line."""
    node = onnx.helper.make_node("LpNormalization", ["IN"], ["OUT"], p=7)
    tensors = [(each, "FP32", ["N", 4]) for each in ("IN", "OUT")]
    save_onnx(repository / name / "1" / "model.onnx", [node], tensors[:1], tensors[1:])
