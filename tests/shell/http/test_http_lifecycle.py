"""Ports, limits over real sockets, draining and closing, on both event loops."""

import asyncio
import concurrent.futures
import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from halimede.core.observe.start_summary import HTTP, METRICS
from halimede.front_processes.services import bind_port
from halimede.frontends.http.framing import Limits
from halimede.frontends.metrics import MetricsServer
from halimede.frontends.port import PortLimits
from halimede.frontends.sockets import bind
from halimede.settings import Settings

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
BODY = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":[1]}]}'
HELD = b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(params=LOOPS)
def each_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return LOOPS[request.param]


def error_of(answer: bytes) -> str:
    text: str = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return text


def test_the_error_names_the_service_whose_port_is_in_use(http: Any) -> None:
    settings = Settings(
        http_address="127.0.0.1", http_port=http.port, metrics_address="127.0.0.1", metrics_port=http.port
    )
    for service, name in (("HTTP", HTTP), ("Metrics", METRICS)):
        with pytest.raises(
            OSError, match=f"failed to start {service} service: Socket '127.0.0.1:{http.port}' already in"
        ):
            bind_port(name, settings)


def test_a_bound_socket_keeps_early_clients_until_it_is_served(serve: Any) -> None:
    sockets = bind("127.0.0.1", 0, "HTTP")
    with socket.create_connection(sockets[0].getsockname(), timeout=20) as early:
        early.sendall(LIVE)
        serve(sockets=sockets)
        assert early.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_request_may_arrive_byte_by_byte(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop)
    with running.connect() as connection, connection.makefile("rb") as reader:
        request = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
        for byte in request % (len(BODY), BODY):
            connection.sendall(bytes([byte]))
        assert reader.readline() == b"HTTP/1.1 200 OK\r\n"
        assert b'"data":[1.0]' in reader.read()


def test_a_large_answer_reaches_a_client_that_reads_slowly_and_half_closes(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop)
    size = 900_000
    head = (
        b'{"inputs":[{"name":"IN","shape":[%d],"datatype":"FP32","parameters":{"binary_data_size":%d}}],"parameters":{"binary_data_output":true}}'
        % (size // 4, size)
    )
    data = bytes(range(250)) * (size // 250)
    with running.connect() as connection, connection.makefile("rb") as reader:
        connection.sendall(
            b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n" % len(head)
            + b"Content-Length: %d\r\n\r\n%b" % (len(head) + size, head)
        )
        connection.sendall(data)
        assert reader.readline() == b"HTTP/1.1 200 OK\r\n"
        connection.shutdown(socket.SHUT_WR)
        assert reader.read().endswith(data)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + b"".join(b"h%d: x\r\n" % n for n in range(1000)) + b"\r\n", 431),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nbig: " + b"x" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 1048577\r\n\r\n" + b"x" * 300_000, 400),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 1099511627776\r\n\r\n{", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n100001\r\n" + b"x" * 300_000, 400),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 65_537, 400),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n", 400),
    ],
)
def test_the_answer_names_the_exceeded_limit(http: Any, request_bytes: bytes, status: int) -> None:
    answer = http.exchange(request_bytes)
    assert answer.split(b" ", 2)[1] == b"%d" % status
    assert error_of(answer)
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1") == 1
    assert http.ask("GET", "/v2/health/live").status == 200


def test_the_texts_of_the_limits(http: Any) -> None:
    for path in ("/v2", "/v2/models/echo/infer", "/v2/models/echo/generate"):
        for fields, excess in {
            b"": "request JSON size of 1048577 bytes exceeds the maximum allowed input size",
            b"Inference-Header-Content-Length: 0\r\n": "request binary size of 1048577 bytes exceeds the maximum allowed value",
        }.items():
            head = b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: 1048577\r\n\r\n" % (path.encode(), fields)
            assert error_of(http.exchange(head)) == (
                f"{excess} of 1048576 bytes. Use --http-max-input-size to increase the limit."
            )
    chunks = b"1\r\nx\r\n" * 65_537
    assert error_of(http.exchange(b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)) == (
        "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks."
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_an_announced_body_takes_no_memory_before_it_arrives(serve: Any) -> None:
    running = serve()
    running.listener.max_body = 64 << 20
    before = resident_bytes()
    connections = [running.connect() for _ in range(10)]
    for connection in connections:
        connection.sendall(
            b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{" % (60 << 20)
        )
    assert running.ask("GET", "/v2/health/live").status == 200
    assert resident_bytes() - before < 20 << 20
    for connection in connections:
        connection.close()


def test_a_client_that_never_reads_costs_a_bounded_amount(serve: Any, each_loop: Any) -> None:
    page = bytes(1 << 20)
    rendered: list[int] = []

    def render() -> Iterator[None]:
        rendered.append(len(rendered))
        yield
        return [page]

    running = serve(make=lambda _core, log: MetricsServer(render, log=log.append), loop_factory=each_loop)
    with running.connect() as connection, connection.makefile("rb") as reader:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 49)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        running.wait_until(lambda: len(rendered) > 0)
        for _ in range(100):
            running.call(lambda: None)
        assert len(rendered) < 20  # The kernel's socket buffers take some of them.
        assert len(reader.read()) > 50 << 20
    assert len(rendered) == 50


def test_half_sent_requests_end_after_their_time(serve: Any) -> None:
    running = serve(limits=Limits(head_timeout_s=0.05, body_progress_s=0.05), port_limits=PortLimits(sweep_s=0.01))
    for request in (b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nab"):
        with running.connect() as connection, connection.makefile("rb") as reader:
            connection.sendall(request)
            assert reader.read().startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_one_connection_too_many_gets_503(serve: Any) -> None:
    running = serve(port_limits=PortLimits(max_connections=2, reserved_connections=0))
    first, second = running.connect(), running.connect()
    for connection in (first, second):
        connection.sendall(LIVE)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    with running.connect() as third, third.makefile("rb") as reader:
        answer = reader.read()
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nRetry-After: 1\r\n" in answer
    assert error_of(answer) == "the server has as many connections as it can serve"
    first.close()
    second.close()
    running.wait_until(lambda: not running.listener.port.connection_count)
    assert running.ask("GET", "/v2/health/live").status == 200


def test_the_reserve_serves_control_calls_alone(serve: Any) -> None:
    running = serve(port_limits=PortLimits(max_connections=1))
    with running.connect() as busy:
        busy.sendall(HELD)
        running.wait_until(lambda: running.core.held)
        with running.connect() as probe:
            for request, status in ((LIVE, b"200 OK"), (HELD, b"503 Service Unavailable"), (LIVE, b"200 OK")):
                probe.sendall(request)
                assert probe.recv(1000).startswith(b"HTTP/1.1 " + status)
        running.call(running.core.release)
        assert busy.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")


def test_idle_connections_are_closed_near_the_limit_of_connections(serve: Any) -> None:
    running = serve(port_limits=PortLimits(max_connections=4, crowded_idle_s=0.2, sweep_s=0.01))
    idle, silent, busy = running.connect(), running.connect(), running.connect()
    idle.sendall(LIVE)
    assert idle.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    busy.sendall(HELD)
    running.wait_until(lambda: len(running.core.held) == 1 and running.listener.port.connection_count == 3)
    last = running.connect()  # with this one, nine of ten are in use
    last.sendall(HELD)
    assert (idle.recv(1), silent.recv(1)) == (b"", b"")
    running.wait_until(lambda: len(running.core.held) == 2)
    for connection in (busy, last):
        running.call(running.core.release)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
        connection.close()
    idle.close()
    silent.close()


def test_idle_connections_stay_open_far_from_the_limit(serve: Any) -> None:
    running = serve(port_limits=PortLimits(max_connections=4, crowded_idle_s=0.0, sweep_s=0.01))
    with running.connect() as idle:
        for _ in range(3):
            idle.sendall(LIVE)
            assert idle.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
            for _ in range(50):
                running.call(lambda: None)


def test_a_slow_body_does_not_hold_a_drain(serve: Any) -> None:
    running = serve()
    with running.connect() as connection, connection.makefile("rb") as reader:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 60000\r\n\r\n")
        assert [reader.readline(), reader.readline()] == [b"HTTP/1.1 100 Continue\r\n", b"\r\n"]
        drain = start_drain(running)
        answered = threading.Event()

        def dribble() -> None:
            # Three times the rate that is required outside a drain.
            while not answered.wait(0.1):
                try:
                    connection.sendall(bytes(400))
                except OSError:
                    return

        dribbling = threading.Thread(target=dribble)
        dribbling.start()
        try:
            assert reader.read().startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        finally:
            answered.set()
            dribbling.join()
    drain.result(20)


def start_drain(running: Any) -> "concurrent.futures.Future[None]":
    drain = asyncio.run_coroutine_threadsafe(running.listener.drain(), running.loop)
    running.wait_until(lambda: running.listener.shared.is_draining)
    return drain


def test_a_drain_answers_requests_in_flight_and_closes_idle_connections(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop)
    idle, busy, half = running.connect(), running.connect(), running.connect()
    idle.sendall(LIVE)
    assert idle.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    busy.sendall(HELD)
    half.sendall(LIVE[:10])
    running.wait_until(lambda: len(running.core.held) == 1 and running.listener.port.connection_count == 3)
    drain = start_drain(running)

    assert idle.recv(1000) == b""
    with pytest.raises(OSError):  # noqa: PT011 -- refused or reset
        socket.create_connection(("127.0.0.1", running.port), timeout=20).recv(1)
    assert not drain.done()
    half.sendall(LIVE[10:])
    with half.makefile("rb") as reader:
        assert b"Connection: close\r\n" in reader.read()
    running.call(running.core.release)
    with busy.makefile("rb") as reader:
        answer = reader.read()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nConnection: close\r\n" in answer
    drain.result(10)
    for connection in (idle, busy, half):
        connection.close()


def test_a_drain_answers_connections_that_wait_to_be_accepted(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop)
    waiting: list[socket.socket] = []

    async def connect_and_drain() -> None:
        # The loop accepts nothing between these lines.
        for _ in range(10):
            waiting.append(running.connect())
            waiting[-1].sendall(LIVE)
        await running.listener.drain()

    running.run(connect_and_drain())
    for connection in waiting:
        with connection, connection.makefile("rb") as reader:
            answer = reader.read()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nConnection: close\r\n" in answer


def test_a_drain_without_connections_ends_immediately(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop)
    assert running.ask("GET", "/v2/health/live").status == 200
    running.run(running.listener.drain())


def test_close_ends_connections_that_a_drain_waits_for(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop)
    running.core.load_gate = running.call(asyncio.Event)
    with running.connect() as busy, running.connect() as loading:
        busy.sendall(HELD)
        loading.sendall(b"POST /v2/repository/models/echo/load HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        running.wait_until(lambda: len(running.core.held) == 1 and len(running.core.calls) == 1)
        drain = start_drain(running)
        assert not drain.done()
        running.run(running.listener.close())
        drain.result(10)
        assert running.core.cancelled == [1]
        running.run(running.listener.close())
