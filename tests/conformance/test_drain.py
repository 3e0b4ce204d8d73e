"""SIGTERM: in-flight work is answered, idle connections do not hold the exit, the code is 0."""

import http.client
import json
import signal
import socket
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from support.models import add_identity
from support.server import RunningServer, start_server, wait_until

BODY = {"inputs": [{"name": "IN", "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16}]}


@pytest.fixture
def server(tmp_path: Path):
    delay = 'parameters {{ key: "execute_delay_ms" value {{ string_value: "{}" }} }} instance_group {{ kind: KIND_CPU count: {} }}'
    add_identity(tmp_path / "models", "quick")
    add_identity(tmp_path / "models", "slow", extra=delay.format(1500, 4))
    add_identity(tmp_path / "models", "stuck", extra=delay.format(600_000, 1))
    running = start_server(tmp_path, ["--model-repository", tmp_path / "models", "--exit-timeout-secs=3"])
    yield running
    running.kill()


@pytest.fixture
def connect(server: RunningServer):
    made: list[http.client.HTTPConnection] = []

    def open_connection() -> http.client.HTTPConnection:
        made.append(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30))
        return made[-1]

    yield open_connection
    for connection in made:
        connection.close()


def test_idle_connections_do_not_delay_the_exit(server: RunningServer, connect) -> None:
    idle = [connect() for _ in range(3)]
    for connection in idle:
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read() == b""
    silent = socket.create_connection(("127.0.0.1", server.http_port))
    channel = grpc.insecure_channel(server.grpc_url)
    grpc.channel_ready_future(channel).result(10)
    begun = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begun <= 2.0, server.log  # the goal is 1 s; the rest is for a busy machine
    silent.close()
    channel.close()


def test_work_in_flight_is_answered(server: RunningServer, connect) -> None:
    answers: list[object] = []
    sent = threading.Barrier(4)

    def over_http() -> None:
        connection = connect()
        connection.connect()
        sent.wait()
        connection.request("POST", "/v2/models/slow/infer", json.dumps(BODY))
        response = connection.getresponse()
        answers.append((response.status, response.getheader("Connection")))
        response.read()

    def over_grpc() -> None:
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            tensor = grpcclient.InferInput("IN", [1, 16], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 16), np.float32))
            client.is_server_live()
            sent.wait()
            answers.append(client.infer("slow", [tensor]).as_numpy("OUT").sum())

    callers = [threading.Thread(target=target) for target in (over_http, over_http, over_grpc)]
    for caller in callers:
        caller.start()
    sent.wait()
    wait_until(lambda: executing(server, "slow") == 3, "three executions", server)
    assert server.stop() == 0, server.log
    for caller in callers:
        caller.join()
    assert sorted(map(str, answers)) == ["(200, 'close')", "(200, 'close')", "16.0"]


def executing(server: RunningServer, model: str) -> int:
    name = f'halimede_executing_requests{{model="{model}",version="1"}}'
    return next((int(line.split()[-1]) for line in server.metrics().splitlines() if line.startswith(name)), 0)


def test_a_connection_that_is_kept_open_by_its_work_sees_the_server_unready(server: RunningServer, connect) -> None:
    """The port is closed and idle connections are; what a client pipelined behind its work is still taken in order."""
    connection = connect()
    connection.request("POST", "/v2/models/slow/infer", json.dumps(BODY))
    wait_until(lambda: executing(server, "slow") == 1, "the execution", server)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in server.log, "the drain to begin", server)
    with pytest.raises(ConnectionError):
        wait_until(lambda: server.get("/v2/health/ready").status == 0, "the port to close", server)
    response = connection.getresponse()
    assert (response.status, response.getheader("Connection")) == (200, "close")
    assert server.process.wait(10) == 0


def test_a_client_that_stalls_in_its_request_does_not_hold_the_exit(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.http_port)) as stalled:
        stalled.sendall(b"POST /v2/models/quick/infer HTTP/1.1\r\nContent-Length: 100000\r\n\r\nx")
        wait_until(lambda: server.get("/v2/health/live").status == 200, "the head to be read", server)
        begun = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun < 2.9, "it ended by itself, not at the exit timeout of 3 s"


def test_a_drain_has_an_end(server: RunningServer, connect) -> None:
    connection = connect()
    connection.request("POST", "/v2/models/stuck/infer", json.dumps(BODY))
    wait_until(lambda: executing(server, "stuck") == 1, "the execution", server)
    queued = connect()
    queued.request("POST", "/v2/models/stuck/infer", json.dumps(BODY))
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    response = queued.getresponse()
    assert (response.status, b"Server is stopping" in response.read()) == (503, True)
    assert server.process.wait(20) == 1
    assert time.monotonic() - begun <= 3 + 3


def test_a_second_signal_stops_at_once(server: RunningServer, connect) -> None:
    connection = connect()
    connection.request("POST", "/v2/models/stuck/infer", json.dumps(BODY))
    wait_until(lambda: executing(server, "stuck") == 1, "the execution", server)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in server.log.lower(), "the drain to begin", server)
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 1
    assert time.monotonic() - begun <= 1.5


def test_a_stop_under_load_loses_no_answer(server: RunningServer, connect) -> None:
    """Every caller has every answer but, at most, that of the one request it sent into the closing connection."""
    outcomes: list[tuple[int, list[str], int]] = []
    begun = threading.Barrier(9)

    def ask(connection: http.client.HTTPConnection) -> None:
        right = broken = 0
        wrong: list[str] = []
        connection.connect()
        begun.wait()
        while not broken:
            try:
                connection.request("POST", "/v2/models/quick/infer", json.dumps(BODY))
                response = connection.getresponse()
                answer = json.loads(response.read())
            except (ConnectionError, http.client.RemoteDisconnected, TimeoutError):
                broken += 1
                continue
            if response.status == 200 and answer["outputs"][0]["data"] == [1.0] * 16:
                right += 1
            else:
                wrong.append(f"{response.status} {answer}")
        outcomes.append((right, wrong, broken))

    callers = [threading.Thread(target=ask, args=(connect(),)) for _ in range(8)]
    for caller in callers:
        caller.start()
    begun.wait()
    quick = 'nv_inference_request_success{model="quick",version="1"} '
    wait_until(lambda: int(server.metrics().split(quick)[1].split()[0]) > 200, "some load", server)
    assert server.stop() == 0, server.log
    for caller in callers:
        caller.join()
    assert [(wrong, broken) for _, wrong, broken in outcomes] == [([], 1)] * 8
    assert sum(right for right, _, _ in outcomes) > 200
