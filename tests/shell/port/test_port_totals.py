"""Limits of a service whose connections are in several processes: two ports with the totals of one page."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from halimede.core.wire.http2.keepalive import KeepaliveRules
from halimede.front_processes.page import Page
from halimede.frontends.grpc.limits import GrpcLimits, HeldBytes
from halimede.frontends.grpc.limits import Shared as GrpcShared
from halimede.frontends.http.framing import Limits
from halimede.frontends.http.shared import Shared
from halimede.frontends.port import PortLimits
from halimede.frontends.totals import PortTotals
from support.echo import PAGE

MIB = 1 << 20


@pytest.fixture
def pages() -> Iterator[list[Page]]:
    descriptor = Page.create(2)
    yield [Page(descriptor, 2) for _ in range(2)]
    os.close(descriptor)


@pytest.fixture
def totals(pages: list[Page]) -> list[PortTotals]:
    return [page.http_totals(number) for number, page in enumerate(pages)]


def is_refused(connection: socket.socket) -> bool:
    with connection:
        connection.sendall(b"x")
        return connection.recv(100) == b"refused"


def test_connections_of_all_processes_count_to_the_limit(serve: Any, each_loop: Any, totals: list[PortTotals]):
    one, two = (
        serve(PortLimits(max_connections=4, reserved_connections=0), loop_factory=each_loop, totals=each)
        for each in totals
    )
    with one.use() as first, one.use(), two.use(), two.use():
        assert is_refused(one.connect())
        assert is_refused(two.connect())
        first.close()
        one.wait_until(lambda: one.port.connection_count == 1)
        two.use().close()
    for each in (one, two):
        each.wait_until(lambda each=each: each.port.connection_count == 0)
    assert [each.connections.others() for each in totals] == [0, 0]


def test_connections_of_a_process_that_ended_do_not_count(serve: Any, pages: list[Page], totals: list[PortTotals]):
    one = serve(PortLimits(max_connections=4, reserved_connections=0), totals=totals[0])
    totals[1].connections.publish(4)
    assert is_refused(one.connect())

    pages[0].clear(1)

    one.use().close()


def test_idle_connections_are_closed_near_the_limit_of_all(serve: Any, totals: list[PortTotals]):
    limits = PortLimits(max_connections=10, crowded_idle_s=0.05, sweep_s=0.01)
    one = serve(limits, totals=totals[0])
    with one.use() as idle:
        totals[1].connections.publish(9)
        assert idle.recv(1) == b""


def test_unread_answers_of_all_processes_count_to_the_limit(serve: Any, totals: list[PortTotals]):
    """The process with more than its share closes connections; both do if they have equal parts, as here."""
    one, two = (serve(PortLimits(sweep_s=0.01), totals=each) for each in totals)
    with one.use() as first, two.use() as second:
        first.sendall(b"page")
        one.wait_until(lambda: one.service.unsent_bytes > 0)
        most = one.service.unsent_bytes + MIB
        for each in (one, two):
            each.port.limits = replace(each.port.limits, max_unsent_bytes=most)
        second.sendall(b"page")
        one.wait_until(lambda: bool(one.log or two.log))
        two.wait_until(lambda: one.service.unsent_bytes + two.service.unsent_bytes <= most)
        lost = [received(each) < len(PAGE) for each in (first, second)]
    assert any(lost)
    assert "more than" in (one.log + two.log)[0]


def received(connection: socket.socket) -> int:
    """How much of a page arrives."""
    count = 0
    try:
        while count < len(PAGE) and (part := connection.recv(1 << 20)):
            count += len(part)
    except ConnectionResetError:
        pass
    return count


def test_ports_that_share_a_socket_have_equally_many_connections(serve: Any, each_loop: Any, totals: list[PortTotals]):
    listening = socket.create_server(("127.0.0.1", 0), backlog=100)
    listening.setblocking(False)
    ports = [
        serve(sockets=[each], loop_factory=each_loop, totals=total)
        for each, total in zip((listening, listening.dup()), totals, strict=True)
    ]
    made = [ports[0].use() for _ in range(40)]
    counts = [each.call(lambda each=each: each.port.connection_count) for each in ports]
    for each in made:
        each.close()
    assert sum(counts) == 40
    assert all(17 <= count <= 23 for count in counts), counts


def test_held_bytes_of_all_processes_count_together(pages: list[Page], totals: list[PortTotals]):
    one, two = (Shared(Limits(), 100, total_held=each.held_bytes) for each in totals)
    for shared, size in (one, 5), (two, 7), (one, 1):
        shared.wire.take(size)
    assert (one.wire.held_bytes, two.wire.held_bytes, one.wire.total_bytes, two.wire.total_bytes) == (6, 7, 13, 13)
    two.wire.give_back(7)
    assert (one.wire.total_bytes, two.wire.held_bytes) == (6, 0)
    grpc = [page.grpc_totals(number).held_bytes for number, page in enumerate(pages)]
    limits = GrpcLimits(max_held_bytes=100, max_connection_held_bytes=90)
    first, second = (HeldBytes(GrpcShared(limits, KeepaliveRules(), each)) for each in grpc)
    assert [first.hold(60), second.hold(40), second.hold(1)] == [True, True, False]
    first.release(1)
    assert second.hold(0)
