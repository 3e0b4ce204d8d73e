"""Accepting connections without free descriptors, on both event loops."""

import os
import resource
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from halimede.frontends.port import PortLimits
from halimede.frontends.sockets import bind
from support.processes import open_files

FREE_FILES = 300


@contextmanager
def few_files() -> Iterator[int]:
    """Lower the limit of open files of this process, which is both server and client: only FREE_FILES more can be
    opened. Yields the limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = open_files() + FREE_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield limit
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
    """One answer; a server without descriptors may end with a reset after it."""
    try:
        return connection.recv(100)
    except ConnectionResetError:
        return b""


def is_served(running: Any, connection: socket.socket) -> bool:
    with connection:
        connection.connect(running.address)
        connection.sendall(b"x")
        return answer(connection) == b"x"


def is_readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def is_refused(running: Any, connected: ExitStack) -> bool:
    """Open a further connection, and return whether it is refused."""
    taken = running.port.connection_count
    connection = connected.enter_context(running.connect())
    running.wait_until(lambda: running.port.connection_count > taken or is_readable(connection))
    return is_readable(connection) and answer(connection) == b"refused"


def clients(count: int) -> list[socket.socket]:
    made = [socket.socket() for _ in range(count)]
    for each in made:
        each.settimeout(20)
    return made


def test_without_descriptors_clients_are_refused_until_some_are_free(serve: Any, each_loop: Any) -> None:
    with few_files():
        running = serve(PortLimits(spare_descriptors=0), loop_factory=each_loop)
        refused, later, idle = clients(20), clients(5), running.use()
        with no_files_left() as taken:
            for client in refused:
                client.connect(running.address)
                assert answer(client) == b"refused"
            idle.sendall(b"x")
            assert answer(idle) == b"x"
            while taken:
                os.close(taken.pop())
        assert all(is_served(running, client) for client in later)
        assert running.log == [
            "Echo service: new connections are refused: cannot accept connections: Too many open files; "
            "a larger `ulimit -n` is right"
        ]
        for client in (*refused, idle):
            client.close()


def test_without_even_the_reserve_the_port_waits_without_spinning(serve: Any, each_loop: Any) -> None:
    with few_files(), clients(1)[0] as waiting:
        running = serve(loop_factory=each_loop)
        late = running.call(running.another_port)
        sockets = bind("127.0.0.1", 0, "Echo")
        where = sockets[0].getsockname()
        with no_files_left() as taken:
            running.call(lambda: late.serve(sockets))  # The port cannot open its reserve descriptor either.
            waiting.connect(where)
            waiting.sendall(b"x")
            started_s = time.process_time()
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline:
                time.sleep(0.05)
            assert time.process_time() - started_s < 0.5  # The goal is 0; a busy loop would use the whole second.
            while taken:
                os.close(taken.pop())
            assert answer(waiting) == b"x"
        assert len(running.log) == 1
        running.run(late.close())


def test_some_descriptors_are_left_to_the_rest_of_the_process(serve: Any, each_loop: Any) -> None:
    with few_files() as limit, ExitStack() as connected:
        running = serve(
            PortLimits(spare_descriptors=50, reserved_connections=0, replaced_idle_s=60), loop_factory=each_loop
        )
        refused = 0
        while refused < 5:
            # In sequence, because other descriptors of this process may be closed at any time.
            refused += is_refused(running, connected)
        assert limit - 80 < open_files() < limit - 30
        connected.close()
        running.wait_until(lambda: not running.port.connection_count)
        assert is_served(running, clients(1)[0])
        assert len(running.log) == 1
        assert "only the spare file descriptors are left" in running.log[0]


def test_connections_of_the_backlog_are_accepted_at_the_end(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop)
    connected: list[socket.socket] = []

    async def connect_and_stop() -> None:
        # The loop accepts nothing between these lines.
        for client in clients(100):
            client.connect(running.address)
            client.sendall(b"x")
            connected.append(client)
        await running.port.stop_accepting()

    running.run(connect_and_stop())
    for client in connected:
        assert answer(client) == b"x"
        client.close()


def test_connections_reset_before_accept_do_not_affect_others(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop)

    async def connect_and_reset() -> None:
        for client in clients(200):
            client.connect(running.address)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()

    running.run(connect_and_reset())
    assert is_served(running, clients(1)[0])
    running.wait_until(lambda: not running.port.connection_count)
    assert running.log == []


def test_connections_that_arrive_together_count_once(serve: Any, each_loop: Any) -> None:
    running = serve(PortLimits(max_connections=100, reserved_connections=0), loop_factory=each_loop)
    connected = clients(110)

    async def connect_all() -> None:
        for client in connected:
            client.connect(running.address)

    running.run(connect_all())
    for client in connected[:100]:
        client.sendall(b"x")
    assert [answer(client) for client in connected] == [b"x"] * 100 + [b"refused"] * 10
    for client in connected:
        client.close()
