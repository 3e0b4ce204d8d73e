"""Ports on a loop in a thread."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence

import pytest
import uvloop

from halimede.frontends.port import PortLimits
from halimede.frontends.totals import PortTotals
from support.echo import RunningEcho
from support.loop_thread import LOOPS

Serve = Callable[..., RunningEcho]


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[RunningEcho] = []

    def start(
        limits: PortLimits | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
        sockets: Sequence[socket.socket] | None = None,
        totals: PortTotals | None = None,
    ) -> RunningEcho:
        running = RunningEcho(limits or PortLimits(), tls, loop_factory, sockets, totals)
        started.append(running)
        return running

    yield start
    for running in started:
        running.run(running.port.close())
        running.stop()


@pytest.fixture(params=LOOPS)
def each_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return LOOPS[request.param]
