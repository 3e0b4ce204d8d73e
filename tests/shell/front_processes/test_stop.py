"""SIGTERM: a server with front-end processes loses no accepted request, and leaves nothing behind."""

import http.client
import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

import support.h2client
from support.background import in_background
from support.calls import ONES_JSON, executing
from support.front_ends import connections_to_each, front_ends, grpc_client, grpc_clients_of_each
from support.models import add_identity
from support.served import add_python, alive, descendants, notes_file
from support.server import RunningServer, Start, wait_until

PKI = Path(support.h2client.__file__).parent / "pki"
COUNTED = """
for request in requests:
    note("x")
return [answer(request) for request in requests]
"""
SLOW = (
    'parameters { key: "execute_delay_ms" value { string_value: "1000" } } instance_group { kind: KIND_CPU count: 4 }'
)


def ones() -> grpcclient.InferInput:
    tensor = grpcclient.InferInput("IN", [1, 16], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 16), np.float32))
    return tensor


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def stop(server: RunningServer) -> None:
    """Stop, and check that nothing is left."""
    everyone = descendants(server.process.pid)
    assert server.stop() == 0, server.log
    assert all(is_refused(port) for port in server.ports.values())
    wait_until(lambda: not alive(everyone), f"the end of {everyone}")


def test_no_accepted_request_is_lost_at_a_stop_under_load(start: Start, repository: Path):
    """The model counts what it has executed: as many answers must have arrived."""
    add_python(repository, "counted", COUNTED)
    server = start("--model-repository", repository)
    right, wrong = [0] * 8, []

    def over_http(me: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        try:
            while True:
                connection.request("POST", "/v2/models/counted/infer", ONES_JSON)
                response = connection.getresponse()
                if response.status != 200 or json.loads(response.read())["outputs"][0]["data"] != [1.0] * 16:
                    wrong.append(str(response.status))
                right[me] += 1
        except (ConnectionError, http.client.RemoteDisconnected):
            return
        finally:
            connection.close()

    def over_grpc(me: int) -> None:
        with grpc_client(server.grpc_url) as client:
            try:
                while True:
                    assert client.infer("counted", [ones()]).as_numpy("OUT").sum() == 16
                    right[me] += 1
            except InferenceServerException as error:
                if error.status() != "StatusCode.UNAVAILABLE":
                    wrong.append(str(error))

    callers = [threading.Thread(target=(over_http, over_grpc)[number % 2], args=(number,)) for number in range(8)]
    for caller in callers:
        caller.start()
    wait_until(lambda: min(right) > 50, "some load of each client", server)
    stop(server)
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert wrong == []
    assert sum(right) == len(notes_file(repository, "counted").read_text().splitlines())


def test_work_in_flight_on_both_front_ends_is_answered(start: Start, repository: Path):
    add_identity(repository, "slow", extra=SLOW)
    server = start("--model-repository", repository)
    with connections_to_each(server) as fronts, grpc_clients_of_each(server) as clients:
        two = {front.pid: front for front in fronts}.values()
        calls: list[Any] = [in_background(lambda one=one: one.post("/v2/models/slow/infer", ONES_JSON)) for one in two]
        calls += [in_background(lambda one=one: one.infer("slow", [ones()])) for one in clients]
        wait_until(lambda: executing(server, "slow") >= 2, "executions", server)
        stop(server)
        first, second, *rest = [call.result(30) for call in calls]
        assert [(each.status, each.headers.get("connection")) for each in (first, second)] == [(200, "close")] * 2
        assert [each.as_numpy("OUT").sum() for each in rest] == [16] * len(clients)


def test_during_the_drain_delay_every_connection_is_served_and_not_ready(start: Start, repository: Path):
    add_identity(repository, "quick")
    server = start("--model-repository", repository, "--drain-delay=600")
    with connections_to_each(server, each=5) as fronts, grpc_clients_of_each(server) as clients:
        assert {front.get("/v2/health/ready").status for front in fronts} == {200}
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "no longer ready" in server.log, "the delay to begin", server)
        for client in clients:
            assert not client.is_server_ready()
            assert client.infer("quick", [ones()]).as_numpy("OUT").sum() == 16
        ready = [front.get("/v2/health/ready") for front in fronts]
        assert [(answer.status, answer.error) for answer in ready] == [(503, "Server exiting")] * len(fronts)
        assert {answer.headers.get("connection") for answer in ready} == {"close"}
        assert {server.post("/v2/models/quick/infer", ONES_JSON).status for _ in range(20)} == {200}
        assert {server.get("/v2/health/ready").status for _ in range(6)} == {503}
        assert {server.get("/v2/health/live").status for _ in range(6)} == {200}
    # The end of the delay is the same as without front-end processes.
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 1


def test_a_front_end_that_starts_during_the_drain_delay_sends_clients_away(start: Start, repository: Path):
    add_identity(repository, "quick")
    server = start("--model-repository", repository, "--drain-delay=600")
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "no longer ready" in server.log, "the delay to begin", server)
    before = front_ends(server)
    for each in before:
        each.kill()
    wait_until(
        lambda: len({each.pid for each in front_ends(server)} - {each.pid for each in before}) == 2, "others", server
    )
    answer = server.post("/v2/models/quick/infer", ONES_JSON)
    assert (answer.status, answer.headers.get("connection")) == (200, "close")


def test_a_front_end_that_dies_during_a_drain_does_not_hold_it(start: Start, repository: Path):
    add_identity(repository, "slow", extra=SLOW.replace("1000", "3000"))
    server = start("--model-repository", repository)
    with connections_to_each(server) as fronts:
        first, second = {front.pid: front for front in fronts}.values()
        lost, kept = (
            in_background(lambda one=one: one.post("/v2/models/slow/infer", ONES_JSON)) for one in (first, second)
        )
        wait_until(lambda: executing(server, "slow") == 2, "two executions", server)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Waiting for in-flight requests" in server.log, "the drain", server)
        psutil.Process(first.pid).kill()
        with pytest.raises(ConnectionError):
            lost.result(30)
        assert kept.result(30).status == 200
    assert server.process.wait(30) == 0, server.log


def test_a_stop_while_a_front_end_is_down(start: Start, repository: Path):
    add_identity(repository, "quick")
    server = start("--model-repository", repository)
    for _ in range(2):
        dead = front_ends(server)[0]
        dead.kill()
        wait_until(lambda dead=dead: dead not in front_ends(server), "its end", server)
    stop(server)


def test_sockets_of_files_and_tls(start: Start, repository: Path, tmp_path: Path):
    """The number at the end of a file's name is read as the port."""
    add_identity(repository, "quick")
    tls = ("--grpc-use-ssl=true", f"--grpc-server-cert={PKI / 'server.pem'}", f"--grpc-server-key={PKI / 'server.key'}")
    path = tmp_path / "http:1"
    server = start("--model-repository", repository, f"--http-address=unix:{path}", *tls, ready=False)

    def get(target: str) -> bytes:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(30)
            raw.connect(str(path))
            raw.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            return b"".join(iter(lambda: raw.recv(1 << 16), b""))

    wait_until(lambda: get("/v2/health/ready").startswith(b"HTTP/1.1 200"), "the server to be ready", server)
    for _ in range(20):
        assert get("/v2/models/quick/ready").startswith(b"HTTP/1.1 200")
    for _ in range(6):
        with grpc_client(f"localhost:{server.grpc_port}", ssl=True, root_certificates=str(PKI / "root.pem")) as client:
            assert client.infer("quick", [ones()]).as_numpy("OUT").sum() == 16
    assert server.stop() == 0, server.log
    assert not path.exists()


def test_grpc_on_a_unix_socket(start: Start, repository: Path, tmp_path: Path):
    add_identity(repository, "quick")
    path = tmp_path / "grpc:1"
    server = start("--model-repository", repository, f"--grpc-address=unix:{path}")
    for _ in range(6):
        with grpc_client(f"unix:{path}") as client:
            assert client.infer("quick", [ones()]).as_numpy("OUT").sum() == 16
    assert server.stop() == 0, server.log
    assert not path.exists()


def test_a_certificate_that_cannot_be_used_ends_the_start(start: Start, repository: Path, tmp_path: Path):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nonsense")
    tls = ("--grpc-use-ssl=true", f"--grpc-server-cert={wrong}", f"--grpc-server-key={wrong}")
    texts = []
    for count in (1, 2):
        with pytest.raises(AssertionError, match="exited with 1 ") as caught:
            start("--model-repository", repository, *tls, f"--frontend-processes={count}")
        texts += [line.partition("] ")[2] for line in str(caught.value).splitlines() if line.startswith("E")]
    assert len(texts) == 2
    assert texts[0] == texts[1]


def test_a_busy_port_ends_the_start(start: Start, repository: Path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(AssertionError, match=rf"exited with 1 .*(.|\n)*{port}"):
            start("--model-repository", repository, f"--grpc-port={port}")
