"""SIGTERM: in-flight work is answered, idle connections do not hold the exit, the code is 0."""

import http.client
import json
import queue
import signal
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from support.background import in_background
from support.balancer import Balancer
from support.calls import ONES, ONES_JSON, executing, load, metric, pending, unload
from support.h2client import SETTINGS, H2Client, frame
from support.models import add_identity
from support.server import RunningServer, Start, wait_until
from support.steady import SteadyClients

ENDLESS_DELAY = f"max_queue_delay_microseconds: {2**64 - 1}"


@pytest.fixture
def server(start: Start, repository: Path) -> RunningServer:
    delay = 'parameters {{ key: "execute_delay_ms" value {{ string_value: "{}" }} }} instance_group {{ kind: KIND_CPU count: {} }}'
    add_identity(repository, "quick")
    add_identity(repository, "slow", extra=delay.format(1500, 4))
    add_identity(repository, "stuck", extra=delay.format(600_000, 1))
    return start("--model-repository", repository, "--exit-timeout-secs=3")


@pytest.fixture
def connect_to():
    made: list[http.client.HTTPConnection] = []

    def open_connection(server: RunningServer) -> http.client.HTTPConnection:
        made.append(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30))
        return made[-1]

    yield open_connection
    for connection in made:
        connection.close()


@pytest.fixture
def connect(server: RunningServer, connect_to):
    return lambda: connect_to(server)


def ones() -> grpcclient.InferInput:
    tensor = grpcclient.InferInput("IN", [1, 16], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 16), np.float32))
    return tensor


def test_idle_connections_do_not_delay_the_exit(server: RunningServer, connect) -> None:
    idle = [connect() for _ in range(3)]
    for connection in idle:
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read() == b""
    silent = socket.create_connection(("127.0.0.1", server.http_port))
    channel = grpc.insecure_channel(server.grpc_url)
    grpc.channel_ready_future(channel).result(10)
    assert server.stop() == 0, server.log  # less than the exit timeout of 3 s; the goal is 1 s
    silent.close()
    channel.close()


def test_work_in_flight_is_answered(server: RunningServer, connect) -> None:
    answers: list[object] = []
    sent = threading.Barrier(4)

    def over_http() -> None:
        connection = connect()
        connection.connect()
        sent.wait()
        connection.request("POST", "/v2/models/slow/infer", ONES_JSON)
        response = connection.getresponse()
        answers.append((response.status, response.getheader("Connection")))
        response.read()

    def over_grpc() -> None:
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            client.is_server_live()
            sent.wait()
            answers.append(client.infer("slow", [ones()]).as_numpy("OUT").sum())

    callers = [threading.Thread(target=target) for target in (over_http, over_http, over_grpc)]
    for caller in callers:
        caller.start()
    sent.wait()
    wait_until(lambda: executing(server, "slow") == 3, "three executions", server)
    assert server.stop() == 0, server.log
    for caller in callers:
        caller.join()
    assert sorted(map(str, answers)) == ["(200, 'close')", "(200, 'close')", "16.0"]


def test_a_busy_connection_sees_that_the_server_is_not_ready(server: RunningServer, connect) -> None:
    """The port and idle connections are closed; requests pipelined behind running ones are still served in order."""
    connection = connect()
    connection.request("POST", "/v2/models/slow/infer", ONES_JSON)
    wait_until(lambda: executing(server, "slow") == 1, "the execution", server)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "received" in server.log, "the drain to begin", server)
    with pytest.raises(ConnectionError):
        wait_until(lambda: server.get("/v2/health/ready").status == 0, "the port to close", server)
    response = connection.getresponse()
    assert (response.status, response.getheader("Connection")) == (200, "close")
    assert server.process.wait(10) == 0


def test_a_client_that_stalls_in_its_request_does_not_hold_the_exit(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.http_port)) as stalled:
        stalled.sendall(b"POST /v2/models/quick/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\nx")
        wait_until(lambda: server.get("/v2/health/live").status == 200, "the head to be read", server)
        assert server.stop() == 0, "the server must exit before the timeout of 3 s, which gives exit code 1"


def test_a_drain_ends_at_the_exit_timeout(server: RunningServer, connect) -> None:
    connection = connect()
    connection.request("POST", "/v2/models/stuck/infer", ONES_JSON)
    wait_until(lambda: executing(server, "stuck") == 1, "the execution", server)
    queued = connect()
    queued.request("POST", "/v2/models/stuck/infer", ONES_JSON)
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    response = queued.getresponse()
    assert (response.status, b"Server is stopping" in response.read()) == (503, True)
    assert server.process.wait(20) == 1
    assert time.monotonic() - begun <= 3 + 3


def test_a_second_signal_stops_at_once(server: RunningServer, connect) -> None:
    connection = connect()
    connection.request("POST", "/v2/models/stuck/infer", ONES_JSON)
    wait_until(lambda: executing(server, "stuck") == 1, "the execution", server)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "received" in server.log, "the drain to begin", server)
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 1
    assert time.monotonic() - begun <= 5  # the goal is 1 s; the request would run for ten minutes


def test_a_stop_under_load_loses_no_answer(server: RunningServer, connect) -> None:
    """Each client gets all answers, except at most for one request that it sent into the closing connection."""
    outcomes: list[tuple[int, list[str], int]] = []
    begun = threading.Barrier(9)

    def ask(connection: http.client.HTTPConnection) -> None:
        right = broken = 0
        wrong: list[str] = []
        connection.connect()
        begun.wait()
        while not broken:
            try:
                connection.request("POST", "/v2/models/quick/infer", ONES_JSON)
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


PATIENT = {
    "dynamic": f"dynamic_batching {{ {ENDLESS_DELAY} }}",
    "levels": f"dynamic_batching {{ {ENDLESS_DELAY} priority_levels: 2 default_priority_level: 1 }}",
    "direct": f"sequence_batching {{ direct {{ {ENDLESS_DELAY} minimum_slot_utilization: 1 }} }}",
    "oldest": f"sequence_batching {{ oldest {{ {ENDLESS_DELAY} }} }}",
}
"""Batching of models whose batches wait without end for more requests."""


def test_batches_do_not_wait_for_their_delay_at_the_end(start: Start, repository: Path) -> None:
    """At an unload of one model, and at a stop with a batch of each."""
    for name, batching in PATIENT.items():
        add_identity(repository, name, extra=batching)
    server = start(
        "--model-repository",
        repository,
        "--model-control-mode=explicit",
        "--load-model=*",
        "--exit-timeout-secs=20",
    )
    sequence = {"parameters": {"sequence_id": 1, "sequence_start": True, "sequence_end": True}}

    def begin(name: str) -> Future[int]:
        call = in_background(lambda: server.post(f"/v2/models/{name}/infer", ONES | sequence).status)
        wait_until(lambda: pending(server, name) == 1, "the queued request", server)
        return call

    for name in PATIENT:
        call = begin(name)
        assert unload(server, name) == 200
        assert call.result(20) == 200, name
        assert load(server, name) == (200, "")
    calls = {name: begin(name) for name in PATIENT}
    assert server.stop() == 0, server.log
    assert {name: call.result(20) for name, call in calls.items()} == dict.fromkeys(PATIENT, 200)


def test_a_sequence_in_the_backlog_is_answered_at_the_stop(start: Start, repository: Path) -> None:
    """Its sequence slot is that of an idle sequence, which would end after a minute."""
    batching = "sequence_batching { oldest { max_candidate_sequences: 1 } max_sequence_idle_microseconds: 60000000 }"
    add_identity(repository, "seq", extra=batching)
    server = start("--model-repository", repository, "--exit-timeout-secs=20")

    def begin(sequence: int) -> int:
        parameters = {"sequence_id": sequence, "sequence_start": True}
        return server.post("/v2/models/seq/infer", ONES | {"parameters": parameters}).status

    assert begin(1) == 200
    calls = [in_background(lambda sequence=sequence: begin(sequence)) for sequence in (2, 3)]
    wait_until(lambda: pending(server, "seq") == 2, "the backlog", server)
    assert server.stop() == 0, server.log
    assert [call.result(20) for call in calls] == [200, 200]


class Delayed:
    """A server with a drain delay, and the time of its SIGTERM."""

    def __init__(self, running: RunningServer, delay_s: float) -> None:
        self.running = running
        self.delay_s = delay_s
        self.stopped_at = 0.0

    def terminate(self) -> None:
        self.stopped_at = time.monotonic()
        self.running.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "no longer ready" in self.running.log, "the delay to begin", self.running)

    def is_over(self) -> bool:
        return time.monotonic() - self.stopped_at >= self.delay_s


@pytest.fixture
def delayed(start: Start, repository: Path):
    def begin(delay_s: float, exit_timeout_s: float = 3) -> Delayed:
        extra = 'parameters { key: "execute_delay_ms" value { string_value: "600000" } }'
        add_identity(repository, "quick")
        add_identity(repository, "stuck", extra=extra)
        arguments = ["--model-repository", repository, f"--drain-delay={delay_s}"]
        return Delayed(start(*arguments, f"--exit-timeout-secs={exit_timeout_s}"), delay_s)

    return begin


def test_during_the_drain_delay_all_ports_serve_and_readiness_fails(delayed) -> None:
    """A load balancer sees the stop before it happens: its requests are still answered, on new connections too."""
    stopping = delayed(3)
    server = stopping.running
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        assert client.is_server_ready()
        stopping.terminate()
        answer = server.get("/v2/health/ready")
        assert (answer.status, answer.error) == (503, "Server exiting")
        assert server.get("/v2/health/live").status == 200
        assert not client.is_server_ready()
        assert client.is_server_live()
        assert client.infer("quick", [ones()]).as_numpy("OUT").sum() == 16
    with grpcclient.InferenceServerClient(server.grpc_url) as late:
        assert not late.is_server_ready()
    assert server.post("/v2/models/quick/infer", ONES).status == 200
    assert "nv_inference_request_success" in server.metrics()
    assert not stopping.is_over(), "all requests were sent within the delay"

    assert server.process.wait(20) == 0
    assert stopping.is_over()
    assert time.monotonic() - stopping.stopped_at < 3 + 4  # the goal is 1 s after the delay


def test_no_request_is_lost_while_the_delay_lasts(delayed) -> None:
    """Each request uses a new connection, as through a load balancer that has not noticed the stop yet."""
    stopping = delayed(1)
    server = stopping.running
    stopping.terminate()
    statuses = []
    while time.monotonic() - stopping.stopped_at < 0.7:
        statuses.append(server.post("/v2/models/quick/infer", ONES).status)
    assert set(statuses) == {200}
    assert server.process.wait(20) == 0


def test_clients_with_open_connections_lose_no_request_at_a_drain(start: Start, repository: Path) -> None:
    """Two servers behind one address, one of which stops: it gets new connections for half of its delay."""
    add_identity(repository, "quick")
    ending, staying = (start("--model-repository", repository, "--drain-delay=2") for _ in range(2))
    both = (ending, staying)
    with (
        Balancer([server.grpc_port for server in both]) as over_grpc,
        Balancer([server.http_port for server in both]) as over_http,
        SteadyClients(over_grpc.url, over_http.url, "quick", 16) as clients,
    ):

        def wait_for_answers() -> None:
            enough = {protocol: count + 50 for protocol, count in clients.answered.items()}
            wait_until(lambda: all(clients.answered[each] > enough[each] for each in enough), "answers", staying)

        wait_for_answers()
        assert metric(ending, "nv_inference_request_success", "quick") > 25
        ending.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        over_grpc.lead_to([staying.grpc_port])
        over_http.lead_to([staying.http_port])
        assert ending.process.wait(20) == 0
        wait_for_answers()
    assert clients.lost == []


def test_an_open_stream_is_served_until_the_delay_is_over(delayed) -> None:
    stopping = delayed(1)
    answers: queue.Queue[tuple[object, InferenceServerException | None]] = queue.Queue()
    with grpcclient.InferenceServerClient(stopping.running.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("quick", [ones()])
        assert answers.get(timeout=20)[1] is None
        stopping.terminate()
        while time.monotonic() - stopping.stopped_at < 0.7:
            client.async_stream_infer("quick", [ones()])
            assert answers.get(timeout=20)[1] is None
        error = answers.get(timeout=20)[1]
        assert error is not None
        assert error.message() == "GRPC server is shutting down and has stopped accepting new requests."
        assert stopping.is_over()
    assert stopping.running.process.wait(20) == 0


def test_the_exit_timeout_begins_when_the_delay_ends(delayed, connect_to) -> None:
    stopping = delayed(1.5, exit_timeout_s=1)
    connection = connect_to(stopping.running)
    connection.request("POST", "/v2/models/stuck/infer", ONES_JSON)
    wait_until(lambda: executing(stopping.running, "stuck") == 1, "the execution", stopping.running)
    stopping.terminate()
    response = connection.getresponse()
    assert (response.status, b"Server is stopping" in response.read()) == (503, True)
    assert time.monotonic() - stopping.stopped_at >= 2.5
    assert stopping.running.process.wait(20) == 1
    assert time.monotonic() - stopping.stopped_at <= 2.5 + 4  # the goal is 2 s


def test_a_second_signal_does_not_wait_for_the_delay(delayed) -> None:
    stopping = delayed(60)
    stopping.terminate()
    begun = time.monotonic()
    stopping.running.process.send_signal(signal.SIGINT)
    assert stopping.running.process.wait(20) == 1
    assert time.monotonic() - begun <= 5  # the goal is 1 s


def test_loads_are_refused_during_the_delay(start: Start, repository: Path) -> None:
    add_identity(repository, "late")
    server = start("--model-repository", repository, "--model-control-mode=explicit", "--drain-delay=60")
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "no longer ready" in server.log, "the delay to begin", server)
    status, text = load(server, "late")
    assert (status, "Server is stopping" in text) == (503, True)
    with (
        grpcclient.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="Server is stopping"),
    ):
        client.load_model("late")


def test_stalled_grpc_clients_do_not_hold_the_exit(start: Start, repository: Path) -> None:
    """One grants no flow-control credit for its answer, one sends nothing, one sends half a request."""
    add_identity(repository, "quick")
    server = start("--model-repository", repository, "--exit-timeout-secs=60")
    address = ("127.0.0.1", server.grpc_port)
    closed_window = frame(SETTINGS, payload=(4).to_bytes(2, "big") + bytes(4))
    with H2Client(address) as unread, H2Client(address) as half, socket.create_connection(address):
        unread.send(closed_window)
        unread.call("/inference.GRPCInferenceService/ServerLive")
        half.send_data(half.call("/inference.GRPCInferenceService/ModelInfer", None), b"\0\0\0\1\0a", is_end=False)
        wait_until(lambda: server.get("/v2/health/live").status == 200, "the calls to arrive", server)
        begun = time.monotonic()
        assert server.stop(60) == 0, server.log
        assert time.monotonic() - begun < 40, "the server must exit before the timeout"
