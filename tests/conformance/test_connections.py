"""Many, broken and hostile connections to the running server, and their effect on other clients."""

import gzip
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import quantiles

import psutil
import pytest
import tritonclient.grpc

from support.calls import ONES_JSON, canceled, metric, pending
from support.models import add_identity
from support.processes import cpu_secs, holding_no_more, resident_bytes
from support.server import RunningServer, serving, start_server, wait_until

INFER = ONES_JSON.encode()
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
MIB = 1 << 20
MAX_CONNECTIONS = 10_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    add_identity(path, "ident")
    add_identity(path, "large", dims="-1", max_batch_size=0)
    one = "instance_group { kind: KIND_CPU count: 1 }"
    add_identity(path, "slow", extra=f'{one} parameters {{ key: "execute_delay_ms" value {{ string_value: "1000" }} }}')
    return path


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("log"), ["--model-repository", models], forked=False) as running:
        yield running
    assert "unexpected error" not in running.log


def connect(server: RunningServer, *, receive_buffer: int = 0) -> socket.socket:
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.http_port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_all(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def post(path: str, body: bytes, fields: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (path.encode(), fields, len(body), body)


def is_live(server: RunningServer) -> bool:
    return server.get("/v2/health/live").status == 200


@contextmanager
def probe(server: RunningServer, port: int = 0) -> Iterator[Callable[[], list[float]]]:
    """Request health continuously from another process; returns the seconds of each answer."""
    script = (
        "import socket, sys, time\n"
        "c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "print('ready', flush=True)\n"
        "import select\n"
        "while not select.select([sys.stdin], [], [], 0.002)[0]:\n"
        "    t = time.perf_counter(); c.sendall(b'GET /v2/health/live HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\n"
        "    assert c.recv(1000).startswith(b'HTTP/1.1 200 '); print(time.perf_counter() - t, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(port or server.http_port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    first = float(process.stdout.readline())

    def stop() -> list[float]:
        out, _ = process.communicate(b"stop\n", timeout=30)
        assert process.returncode == 0
        return [first, *(float(line) for line in out.split())]

    try:
        yield stop
    finally:
        process.kill()
        process.wait()


LONGEST_DELAY_S = 1.0
"""Limit of a probe's request under the load of a test. It takes milliseconds on an idle machine."""


def p99(times: list[float]) -> float:
    return quantiles(times, n=100)[98]


# Clients that disconnect.


def test_queued_requests_of_clients_that_left_are_never_executed(server: RunningServer) -> None:
    before = canceled(server, "slow"), metric(server, "nv_inference_exec_count", "slow")
    request = post("/v2/models/slow/infer", INFER)
    first = connect(server)
    first.sendall(request)
    waiting = [connect(server) for _ in range(30)]
    for connection in waiting:
        connection.sendall(request)
    wait_until(lambda: pending(server, "slow") == 30, "all of them to queue", server)
    for number, connection in enumerate(waiting):
        if number % 3 == 0:
            reset(connection)
        elif number % 3 == 1:
            connection.close()
        else:
            connection.shutdown(socket.SHUT_WR)
    wait_until(lambda: pending(server, "slow") == 0, "none of them to queue", server)
    assert first.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    first.close()
    assert server.post("/v2/models/slow/infer", INFER).status == 200
    after = canceled(server, "slow"), metric(server, "nv_inference_exec_count", "slow")
    assert after == (before[0] + 30, before[1] + 2)
    for connection in waiting:
        connection.close()


def test_closed_connections_leave_no_descriptors_or_memory(server: RunningServer) -> None:
    churn(server, 200)
    with holding_no_more(server.process.pid, files=2, growth_bytes=8 * MIB), probe(server) as stop:
        churn(server, 2000)
        times = stop()
    assert p99(times) < LONGEST_DELAY_S  # The goal is 5 ms on an idle machine.


@pytest.mark.load
def test_thirty_thousand_connections_leave_nothing_behind(server: RunningServer) -> None:
    churn(server, 2000)
    with holding_no_more(server.process.pid, files=2, growth_bytes=8 * MIB):
        churn(server, 30_000)


def churn(server: RunningServer, count: int) -> None:
    """Connections that send and close, send and reset, only connect, or send half a request."""
    for number in range(count):
        with connect(server) as connection:
            match number % 4:
                case 0:
                    connection.sendall(LIVE)
                    assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
                case 1:
                    connection.sendall(post("/v2/models/ident/infer", INFER))
                    reset(connection)
                case 2:
                    connection.sendall(LIVE[:20])


# Clients that do not read.


def test_clients_that_do_not_read_use_bounded_memory(server: RunningServer) -> None:
    size = 2 * MIB
    tensor = {"name": "IN", "shape": [size // 4], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    request = post("/v2/models/large/infer", head + bytes(size), b"Inference-Header-Content-Length: %d\r\n" % len(head))
    with connect(server) as warm:
        warm.sendall(request)
        assert warm.recv(15) == b"HTTP/1.1 200 OK"
    before = resident_bytes(server)
    with ExitStack() as stack, probe(server) as stop:
        greedy = [stack.enter_context(connect(server, receive_buffer=4096)) for _ in range(100)]
        for connection in greedy:
            connection.settimeout(0.02)
            try:
                for _ in range(10):  # 2 GiB of answers, if the server wrote them all.
                    connection.sendall(request)
            except TimeoutError:
                pass  # The server does not read from clients that do not read.
        # At most one answer and one received request of each client.
        assert resident_bytes(server) - before < 100 * 2 * size + 100 * MIB
        times = stop()
        assert is_live(server)
    assert p99(times) < LONGEST_DELAY_S  # The goal is twice the time without these clients, a few milliseconds.


@pytest.mark.load
def test_clients_that_do_not_read_are_closed_after_a_minute(server: RunningServer) -> None:
    size = 8 * MIB
    body = json.dumps({"inputs": [{"name": "IN", "shape": [size // 4], "datatype": "FP32"}]}).encode()
    body = body.replace(b'"FP32"', b'"FP32","parameters":{"binary_data_size":%d}' % size)
    body = body[:-1] + b',"parameters":{"binary_data_output":true}}'
    with connect(server, receive_buffer=4096) as greedy:
        fields = b"Inference-Header-Content-Length: %d\r\n" % len(body)
        greedy.sendall(post("/v2/models/large/infer", body + bytes(size), fields))
        begun = time.monotonic()
        own = greedy.getsockname()[1]
        wait_until(lambda: not is_connected(server, own), "it to be closed", server, limit_s=80)
        assert 55 < time.monotonic() - begun < 75


def is_connected(server: RunningServer, port: int) -> bool:
    connections = psutil.Process(server.process.pid).net_connections("tcp4")
    return any(each.raddr and each.raddr.port == port for each in connections)


# Many clients.


def test_a_thousand_idle_connections_are_cheap(models: Path, tmp_path: Path) -> None:
    # A separate server, because memory of earlier connections would be reused.
    running = start_server(tmp_path, ["--model-repository", models], forked=False)
    try:
        with ExitStack() as stack:
            connect_idle(running, stack, 1000, max_kib_each=10)  # The goal is 8.
    finally:
        running.kill()


@pytest.mark.load
def test_ten_thousand_idle_connections_are_cheap_and_one_more_gets_503(models: Path, tmp_path: Path) -> None:
    running = start_server(tmp_path, ["--model-repository", models], forked=False)
    try:
        with ExitStack() as stack:
            connect_idle(running, stack, MAX_CONNECTIONS - 10, max_kib_each=8)
            for _ in range(10):
                stack.enter_context(connect(running)).sendall(LIVE)
            answer = read_all(stack.enter_context(connect(running)))
            assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b"\r\nRetry-After: 1\r\n" in answer
            text = "new connections are refused: 10000 connections are open, as many as are served"
            wait_until(lambda: text in running.log, "the line of the log", running)
        wait_until(lambda: is_live(running), "it to recover", running)
    finally:
        running.kill()


def connect_idle(server: RunningServer, stack: ExitStack, count: int, *, max_kib_each: float) -> None:
    with probe(server) as stop:
        alone = probed(stop)
    before = resident_bytes(server)
    idle = [stack.enter_context(connect(server)) for _ in range(count)]
    for connection in idle:
        connection.sendall(LIVE)
    for connection in idle:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    kib_each = (resident_bytes(server) - before) / 1024 / count
    assert kib_each <= max_kib_each, kib_each
    with probe(server) as stop:
        beside = probed(stop)
    assert p99(beside) < 2 * p99(alone) + 0.5  # The goal is twice, on an idle machine.


def probed(stop: Callable[[], list[float]], seconds: float = 0.5) -> list[float]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)
    return stop()


@pytest.mark.parametrize("count", [20, pytest.param(2000, marks=pytest.mark.load)])
def test_half_sent_requests_time_out_without_delaying_others(server: RunningServer, count: int) -> None:
    with ExitStack() as stack, probe(server) as stop:
        half = [stack.enter_context(connect(server)) for _ in range(count)]
        begun = time.monotonic()
        for number, connection in enumerate(half):
            connection.sendall(
                LIVE[:30] if number % 2 else b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\nx"
            )
        while time.monotonic() - begun < 8:
            for connection in half:
                connection.sendall(b"x")  # Single bytes at intervals are not progress.
            time.sleep(0.2)
        for connection in half:
            assert read_all(connection).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert time.monotonic() - begun < 30
        times = stop()
    assert p99(times) < LONGEST_DELAY_S


# No descriptors left.


def test_clients_without_requests_do_not_use_up_the_descriptors(models: Path, tmp_path: Path) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
    server = start_server(tmp_path, ["--model-repository", models], first=limit)
    try:
        with ExitStack() as stack:
            connections = [stack.enter_context(connect(server)) for _ in range(300)]
            for connection in connections:
                with suppress(OSError):  # The server may have refused the connection already.
                    connection.sendall(LIVE)
            answers = [first_answer(connection) for connection in connections]
            served = [connection for connection, answer in zip(connections, answers, strict=True) if b" 200 " in answer]
            assert len(served) > 100
            assert {answer[:12] for answer in answers} <= {b"HTTP/1.1 200", b"HTTP/1.1 503", b""}
            # They stay connected. Once they are idle for a while, new clients take their places.
            with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
                wait_until(
                    lambda: is_live(server) and client.is_server_live(), "probes to be served", server, limit_s=10
                )
                wait_until(
                    lambda: server.post("/v2/models/ident/infer", INFER).status == 200, "room", server, limit_s=10
                )
            # The remaining descriptors are reserved: metrics can be read, models loaded.
            assert "nv_" in server.metrics()

            begun = cpu_secs(server)
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline:
                time.sleep(0.05)
            assert cpu_secs(server) - begun < 0.5  # The goal is 0; a busy loop would use the whole second.
            assert server.log.count("new connections are refused") <= 1
        assert server.stop() == 0
    finally:
        server.kill()


def first_answer(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1000)
    except ConnectionResetError:
        return b""


# Requests that need much processing.


def deep(levels: int) -> bytes:
    return b'{"inputs":' + b"[" * levels


SPACED = INFER.replace(b'"shape":', b'"shape":' + b" \n\t " * (4 * MIB)).replace(b":", b":" + b"\n   " * (2 * MIB), 5)
"""A request that consists almost entirely of white space."""

HEAVY = {
    "a large tensor in JSON": lambda: post(
        "/v2/models/large/infer",
        b'{"inputs":[{"name":"IN","shape":[4000000],"datatype":"FP32","data":[' + b"1.25," * 3_999_999 + b"1]}]}",
    ),
    "only brackets": lambda: post("/v2/models/large/infer", deep(60 * MIB)),
    "JSON that ends too early": lambda: post(
        "/v2/models/large/infer",
        b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":[' + b"[],[" * 5_000_000,
    ),
    "a long string": lambda: post("/v2/models/large/infer", b'{"id":"' + b"\\u0041" * (9 * MIB) + b'"}'),
    "many objects": lambda: post("/v2/models/large/infer", b'{"inputs":[' + b'{"name":"x"},' * 4_000_000 + b"{}]}"),
    "white space": lambda: post("/v2/models/ident/infer", SPACED),
    "a bomb": lambda: post("/v2/models/large/infer", gzip.compress(bytes(200 * MIB), 1), b"Content-Encoding: gzip\r\n"),
    "empty gzip members": lambda: post(
        "/v2/models/large/infer", gzip.compress(b"") * (63 * MIB // 20), b"Content-Encoding: gzip\r\n"
    ),
    "chunks of a byte": lambda: (
        b"POST /v2/models/large/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1\r\nx\r\n" * 65_000
        + b"0\r\n\r\n"
    ),
    "a long list of codings": lambda: post(
        "/v2/models/ident/infer", INFER, b"Accept-Encoding: %b\r\n" % (b"a," * 15_000)
    ),
}


@pytest.mark.parametrize("kind", HEAVY)
def test_heavy_requests_do_not_delay_other_requests(server: RunningServer, kind: str) -> None:
    request = HEAVY[kind]()
    with probe(server) as stop, connect(server) as connection:
        sending = threading.Thread(target=lambda: connection.sendall(request))
        sending.start()
        # The goal is 20 ms on an idle machine.
        assert connection.recv(9) == b"HTTP/1.1 "
        sending.join()
        times = stop()
    assert max(times) < LONGEST_DELAY_S


def test_a_request_may_be_white_space_up_to_the_limit(server: RunningServer) -> None:
    assert 56 * MIB < len(SPACED) < 64 * MIB
    for path, document in {
        "infer": SPACED,
        "generate": b'{"IN":' + b" " * (63 * MIB) + b"[%b]}" % b",".join([b"1"] * 16),
    }.items():
        assert server.post(f"/v2/models/ident/{path}", document).status == 200
