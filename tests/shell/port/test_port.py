"""A port's limits, and how its connections end, on both event loops."""

import asyncio
import os
import socket
from math import inf
from pathlib import Path
from typing import Any

import pytest

from halimede.frontends.port import SWEEP_STEP, PortLimits
from halimede.frontends.sockets import bind, bind_addresses, bound_port
from support.echo import PAGE


def received(connection: socket.socket) -> bytes:
    """All until the end, which is a reset if unread input was left."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def wait(running: Any, seconds: float) -> None:
    """Wait until the loop's clock has advanced."""
    begun = running.call(running.loop.time)
    running.wait_until(lambda: running.loop.time() > begun + seconds)


def test_a_connection_beyond_the_limit_is_refused(serve: Any, each_loop: Any) -> None:
    running = serve(PortLimits(max_connections=2, reserved_connections=0), loop_factory=each_loop)
    with running.use() as first, running.use():
        for _ in range(3):
            with running.connect() as third:
                assert received(third) == b"refused"
        first.close()
        running.wait_until(lambda: running.port.connection_count == 1)
        running.use().close()
    assert running.log == ["Echo service: new connections are refused: 2 connections are open, as many as are served"]


def test_idle_connections_are_closed_near_the_limit(serve: Any) -> None:
    running = serve(PortLimits(max_connections=4, crowded_idle_s=0.2, sweep_s=0.01))
    with running.use() as idle, running.use() as busy, running.use():
        busy.sendall(b"wait")
        running.wait_until(lambda: len(running.service.waiting) == 1)
        with running.use():  # with this one, nine of ten are in use
            # One is enough: a sweep closes the others only if they have been idle for as long by then.
            assert received(idle) == b""
            running.call(running.service.release)
            assert busy.recv(100) == b"done"
    assert running.log == []


def test_a_new_connection_takes_the_place_of_the_longest_idle_one(serve: Any) -> None:
    running = serve(PortLimits(max_connections=4, reserved_connections=1, replaced_idle_s=0.05, sweep_s=0.01))
    with running.use() as busy, running.use() as idle, running.use() as used:
        busy.sendall(b"wait")
        running.wait_until(lambda: len(running.service.waiting) == 1)
        wait(running, 0.01)
        with running.use() as last:
            used.sendall(b"x")
            assert used.recv(100) == b"x"
            wait(running, 0.1)
            with running.use():
                assert received(idle) == b""
                for connection in (used, last):
                    connection.sendall(b"x")
                    assert connection.recv(100) == b"x"
                running.call(running.service.release)
                assert busy.recv(100) == b"done"
    assert running.log == []


def test_control_calls_are_served_while_every_connection_is_busy(serve: Any) -> None:
    running = serve(PortLimits(max_connections=1, reserved_connections=2, replaced_idle_s=0.5, sweep_s=0.01))
    with running.use() as busy:
        busy.sendall(b"wait")
        running.wait_until(lambda: len(running.service.waiting) == 1)
        with running.connect() as first, running.connect() as second:
            running.wait_until(lambda: running.port.connection_count == 3)
            second.sendall(b"wait")
            running.wait_until(lambda: len(running.service.waiting) == 2)
            third = running.connect()
            # Its place is free for another at once, because it is idle.
            assert received(first) == b""
            third.sendall(b"wait")
            running.wait_until(lambda: len(running.service.waiting) == 3)
            with running.connect() as fourth:
                assert received(fourth) == b"refused"
            for each, answer in ((busy, b"done"), (second, b"reserved: done"), (third, b"reserved: done")):
                running.call(running.service.release)
                assert each.recv(100) == answer
            # And soon in any case.
            assert (received(second), received(third)) == (b"", b"")
            third.close()


def test_requests_are_served_between_the_checks_of_many_connections(serve: Any, each_loop: Any) -> None:
    running = serve(PortLimits(sweep_s=0.01), loop_factory=each_loop)
    steps = [0]

    class Swept:
        def __init__(self) -> None:
            self.count = 0

        def sweep(self, _now: float) -> float:
            self.count += 1
            steps[-1] += 1
            return inf

        def abort(self) -> None:
            running.port.forget(self)

    def between() -> None:
        steps.append(0)
        running.loop.call_soon(between)

    many = [Swept() for _ in range(1000)]

    def admit() -> None:
        between()
        for each in many:
            running.port.admit(each)

    running.call(admit)
    running.wait_until(lambda: all(each.count >= 3 for each in many))
    assert max(steps) == SWEEP_STEP
    # One round ends before the next begins.
    assert max(each.count for each in many) - min(each.count for each in many) <= 1


def test_the_slowest_reader_is_closed_when_too_much_is_unsent(serve: Any, each_loop: Any) -> None:
    running = serve(PortLimits(max_unsent_bytes=20 << 20), loop_factory=each_loop)
    with running.use() as slow, running.use() as slower:
        slower.sendall(b"page")
        running.wait_until(lambda: running.service.unsent_bytes > 8 << 20)
        begun = running.call(running.loop.time)
        running.wait_until(lambda: running.loop.time() > begun)
        slow.sendall(b"page")
        running.wait_until(lambda: running.port.connection_count == 1)
        assert len(received(slower)) < len(PAGE)
        left = len(PAGE)
        while left:
            left -= len(slow.recv(1 << 20))
    assert running.log == [
        "Echo service: 1 connections closed: more than 20971520 bytes of answers waited for clients that do not read"
    ]


def test_the_last_connections_are_served_and_idle_ones_closed(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop)
    early: list[socket.socket] = []

    async def connect_and_stop() -> None:
        # The loop accepts nothing between these lines.
        early.append(running.connect())
        early[0].sendall(b"wait")
        await running.port.stop_accepting()
        running.port.close_idle()

    with running.use() as idle:
        running.run(connect_and_stop())
        assert received(idle) == b""
    with pytest.raises(OSError):  # noqa: PT011 -- refused or reset
        running.connect().recv(1)
    ended = asyncio.run_coroutine_threadsafe(running.port.wait_closed(), running.loop)
    assert not ended.done()
    running.call(running.service.release)
    assert early[0].recv(100) == b"done"
    early[0].close()
    ended.result(10)


def test_close_ends_all_connections_and_may_be_called_again(serve: Any, each_loop: Any) -> None:
    running = serve(loop_factory=each_loop)
    with running.use() as busy, running.connect():
        busy.sendall(b"wait")
        running.wait_until(lambda: len(running.service.waiting) == 1)
        for _ in range(2):
            running.run(running.port.close())
        assert received(busy) == b""
    assert running.port.connection_count == 0


def test_all_addresses_of_a_name_are_served_on_one_port(serve: Any, each_loop: Any) -> None:
    addresses = [(socket.AF_INET, ("127.0.0.1",)), (socket.AF_INET, ("127.0.0.2",))]
    running = serve(loop_factory=each_loop, sockets=bind_addresses(addresses, 0))
    for _, (host,) in addresses:
        with socket.create_connection((host, running.address[1]), timeout=20) as client:
            client.sendall(b"x")
            assert client.recv(100) == b"x"
    running.run(running.port.stop_accepting())
    for _, (host,) in addresses:
        with socket.socket() as late:
            assert late.connect_ex((host, running.address[1])) != 0


def test_a_unix_socket_serves_and_its_file_is_removed(serve: Any, each_loop: Any, tmp_path: Path) -> None:
    sockets = bind(f"unix:{tmp_path}/s", 0, "Echo")
    assert bound_port(sockets) == 0
    running = serve(loop_factory=each_loop, sockets=sockets)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(f"{tmp_path}/s")
        client.sendall(b"x")
        assert client.recv(100) == b"x"
    running.run(running.port.stop_accepting())
    assert os.listdir(tmp_path) == []


def test_a_file_that_replaced_the_socket_is_left(serve: Any, tmp_path: Path) -> None:
    running = serve(sockets=bind(f"unix:{tmp_path}/s", 0, "Echo"))
    (tmp_path / "s").unlink()
    (tmp_path / "s").write_text("another's")
    running.run(running.port.close())
    assert (tmp_path / "s").read_text() == "another's"


def test_a_fault_of_the_owner_is_logged(serve: Any) -> None:
    running = serve()
    running.call(lambda: running.port.crashed("a test", ValueError("odd")))
    assert running.log == ["Echo service: unexpected error in a test: ValueError: odd"]
