"""Accepting connections without free descriptors, on both event loops."""

import asyncio
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import uvloop

from halimede.frontends.http.framing import Limits
from halimede.frontends.http.server import HttpServer
from halimede.frontends.http.sockets import bind

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
OPEN_FILES = 400


@pytest.fixture(params=LOOPS)
def each_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return LOOPS[request.param]


@contextmanager
def few_files(limit: int) -> Iterator[None]:
    """Lower the limit of open files of this process, which is both server and client."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert len(os.listdir("/proc/self/fd")) < limit - 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def no_files_left() -> Iterator[list[int]]:
    """Use up all descriptors; closing those in the list frees them."""
    taken: list[int] = []
    try:
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            yield taken
    finally:
        for number in taken:
            os.close(number)


def answer(connection: socket.socket) -> bytes:
    """Read until the end; a server without descriptors may end with a reset."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def is_served(running: Any, connection: socket.socket) -> bool:
    with connection:
        connection.connect(("127.0.0.1", running.port))
        connection.sendall(LIVE)
        return answer(connection).startswith(b"HTTP/1.1 200 OK\r\n")


def is_readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def is_refused(running: Any, connected: ExitStack) -> bool:
    """Open a further connection, and return whether it is refused with 503."""
    taken = running.listener.connection_count
    connection = connected.enter_context(running.connect())
    running.wait_until(lambda: running.listener.connection_count > taken or is_readable(connection))
    return is_readable(connection) and answer(connection).startswith(b"HTTP/1.1 503 ")


def clients(count: int) -> list[socket.socket]:
    made = [socket.socket() for _ in range(count)]
    for each in made:
        each.settimeout(20)
    return made


def test_without_descriptors_clients_get_503_until_some_are_free(serve: Any, each_loop: Any) -> None:
    with few_files(OPEN_FILES):
        running = serve(loop_factory=each_loop, limits=Limits(spare_descriptors=0))
        refused, later, idle = clients(20), clients(5), running.connect()
        running.wait_until(lambda: running.listener.connection_count == 1)
        with no_files_left() as taken:
            for client in refused:
                client.connect(("127.0.0.1", running.port))
                received = answer(client)
                assert received.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
                assert b"\r\nRetry-After: 1\r\n" in received
                assert b"\r\nConnection: close\r\n" in received
            idle.sendall(LIVE)
            assert answer(idle).startswith(b"HTTP/1.1 200 OK\r\n")
            while taken:
                os.close(taken.pop())
        assert all(is_served(running, client) for client in later)
        assert running.log == [
            "HTTP service: new connections are refused: cannot accept connections: Too many open files; "
            "a larger `ulimit -n` is right"
        ]
        for client in (*refused, idle):
            client.close()


def test_without_even_the_reserve_the_listener_waits_without_spinning(serve: Any, each_loop: Any) -> None:
    with few_files(OPEN_FILES), clients(1)[0] as waiting:
        running = serve(loop_factory=each_loop)
        late = running.call(lambda: HttpServer(running.core, max_input_size=1000, log=running.log.append))
        sock = bind("127.0.0.1", 0, "HTTP")
        where = sock.getsockname()
        with no_files_left() as taken:
            running.run(late.serve(sock))  # The listener cannot open its reserve descriptor either.
            waiting.connect(where)
            waiting.sendall(LIVE)
            started_s = time.process_time()
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline:
                time.sleep(0.05)
            assert time.process_time() - started_s < 0.5  # The goal is 0; a busy loop would use the whole second.
            while taken:
                os.close(taken.pop())
            assert answer(waiting).startswith(b"HTTP/1.1 200 OK\r\n")
        assert len(running.log) == 1
        running.run(late.close())


def test_some_descriptors_are_left_to_the_rest_of_the_process(serve: Any, each_loop: Any) -> None:
    with few_files(OPEN_FILES), ExitStack() as connected:
        running = serve(loop_factory=each_loop, limits=Limits(spare_descriptors=50))
        refused = 0
        while refused < 5:
            # In sequence, because other descriptors of this process may be closed at any time.
            refused += is_refused(running, connected)
        assert OPEN_FILES - 80 < len(os.listdir("/proc/self/fd")) < OPEN_FILES - 30
        connected.close()
        running.wait_until(lambda: not running.listener.connection_count)
        assert is_served(running, clients(1)[0])
        assert len(running.log) == 1
        assert "only the spare file descriptors are left" in running.log[0]


def test_a_drain_accepts_connections_of_the_backlog(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop)
    connected: list[socket.socket] = []

    async def connect_and_drain() -> None:
        # The loop accepts nothing between these lines.
        for client in clients(100):
            client.connect(("127.0.0.1", running.port))
            client.sendall(LIVE)
            connected.append(client)
        await running.listener.drain()

    running.run(connect_and_drain())
    for client in connected:
        assert answer(client).startswith(b"HTTP/1.1 200 OK\r\n")
        client.close()


def test_connections_reset_before_accept_do_not_affect_others(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop)

    async def connect_and_reset() -> None:
        for client in clients(200):
            client.connect(("127.0.0.1", running.port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()

    running.run(connect_and_reset())
    assert is_served(running, clients(1)[0])
    running.wait_until(lambda: not running.listener.connection_count)
    assert running.log == []


def test_connections_that_arrive_together_count_once(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop, limits=Limits(max_connections=100))
    connected = clients(110)

    async def connect_all() -> None:
        for client in connected:
            client.connect(("127.0.0.1", running.port))

    running.run(connect_all())
    for client in connected[:100]:
        client.sendall(LIVE)
    assert [answer(client)[9:12] for client in connected] == [b"200"] * 100 + [b"503"] * 10
    for client in connected:
        client.close()
