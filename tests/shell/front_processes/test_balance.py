"""Connections are shared out evenly, for HTTP and gRPC, also after a restart."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from halimede.front_processes.page import Page
from support.front_ends import TWO, front_ends, open_connections, wait_for_front_ends
from support.models import add_identity
from support.server import RunningServer, serving, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "quick")
    with serving(tmp_path_factory.mktemp("log"), [TWO, "--model-repository", repository]) as running:
        yield running


def counts(server: RunningServer, port: int) -> list[int]:
    return [open_connections(process, port) for process in front_ends(server)]


def connect(stack: ExitStack, port: int, count: int) -> None:
    for _ in range(count):
        stack.enter_context(socket.create_connection(("127.0.0.1", port)))


def idle(server: RunningServer) -> None:
    for port in (server.http_port, server.grpc_port):
        wait_until(lambda port=port: counts(server, port) == [0, 0], "no connections", server)


@pytest.mark.parametrize("service", ["HTTPService", "GRPCInferenceService"])
def test_forty_connections_are_twenty_for_each(server: RunningServer, service: str):
    port = server.ports[service]
    idle(server)
    with ExitStack() as stack:
        connect(stack, port, 40)
        wait_until(lambda: sum(counts(server, port)) == 40, "all to be accepted", server)
        assert all(17 <= count <= 23 for count in counts(server, port)), counts(server, port)


def page(server: RunningServer) -> Page:
    """The page of the running server."""
    for each in Path(f"/proc/{server.process.pid}/fd").iterdir():
        if "halimede-page" in str(each.readlink()):
            descriptor = os.open(each, os.O_RDWR)
            try:
                return Page(descriptor, 2)
            finally:
                os.close(descriptor)
    raise AssertionError("the core has no page")


def test_connections_of_a_process_that_died_are_not_counted(server: RunningServer):
    port = server.grpc_port
    idle(server)
    # What all others than the second process have.
    first = page(server).grpc_totals(1).connections
    with ExitStack() as stack:
        connect(stack, port, 10)
        wait_until(lambda: sum(counts(server, port)) == 10, "all to be accepted", server)
        assert first.others() == counts(server, port)[0] > 0
        before = front_ends(server)
        os.kill(before[0].pid, signal.SIGKILL)
        wait_for_front_ends(server, besides=before[:1])
        assert first.others() == 0


def test_a_process_that_is_started_again_gets_the_next_connections(server: RunningServer):
    port = server.http_port
    idle(server)
    with ExitStack() as stack:
        connect(stack, port, 20)
        wait_until(lambda: sum(counts(server, port)) == 20, "all to be accepted", server)
        before = front_ends(server)
        os.kill(before[0].pid, signal.SIGKILL)
        wait_for_front_ends(server, besides=before[:1])
        kept = counts(server, port)
        assert kept[0] <= 1
        connect(stack, port, 20)
        wait_until(lambda: sum(counts(server, port)) >= sum(kept) + 20, "all to be accepted", server)
        first, second = counts(server, port)
        assert abs(first - second) <= 6, (first, second)
