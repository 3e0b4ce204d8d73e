"""The program of a front-end process: HTTP and gRPC on the core's listening sockets, until the core ends it."""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import uvloop

from halimede.channel.frames import ChannelFrame, encode_frame
from halimede.channel.json_frames import error_json, json_frame
from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.memory import Memory
from halimede.channel.process_end.reader import ServerGoneError
from halimede.channel.process_end.stop_signals import ignore_stop_signals
from halimede.core.accounts import FRONT_END_COPIES
from halimede.core.hangs import BEAT_SECS
from halimede.core.observe.start_summary import GRPC, HTTP
from halimede.core.types import InferenceError, ServerMetadata, internal, unavailable
from halimede.front_processes.core_life import CoreLife
from halimede.front_processes.frames import FRONT_FRAMES, FrontFrame
from halimede.front_processes.page import Page
from halimede.front_processes.remote import RemoteServer
from halimede.front_processes.services import make_servers
from halimede.front_processes.values import decode
from halimede.frontends.grpc.server import GrpcServer
from halimede.frontends.http.server import HttpServer
from halimede.inference_frames.kinds import InferenceFrame
from halimede.log import configure, dropped_lines, reopen, shutdown
from halimede.memory_group import memory_bounds
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.malloc import keep_large_buffers
from halimede.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """What a front-end process is to do. `process` is its number, of `processes`.

    With it come descriptors: the log's stream, the page, and the sockets of the services. `sockets` is how many each
    service has, in this order, by its name in the log.
    """

    settings: Settings
    metadata: ServerMetadata
    process: int
    processes: int
    sockets: Mapping[str, int]


def preload() -> None:
    """Import what a front end needs, in the process that front ends are forked from: the imports of this module."""


def main(descriptor: int) -> int:
    """Serve until the core closes the channel. Returns the process's exit code."""
    ignore_stop_signals()
    channel = Channel(descriptor, FRONT_FRAMES)
    memory = Memory(channel)
    try:
        kind, body = channel.receive()
    except ServerGoneError:
        return 0
    if kind is not ChannelFrame.START:
        raise RuntimeError(f"the first frame is {kind.name}, not START")
    order: Order = decode(Order, bytes(body))
    try:
        code = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_serve(order, channel, memory))
    except (InferenceError, OSError) as error:
        failure = error if isinstance(error, InferenceError) else internal(str(error))
        channel.send(json_frame(ChannelFrame.FAILED, error_json(failure)))
        code = 1
    except ServerGoneError:
        code = 0
    shutdown()
    return code


async def _serve(order: Order, channel: Channel, memory: Memory) -> int:
    """InferenceError, OSError if the services cannot be made."""
    stream, page = _take(channel), _take(channel)
    # Log lines go where the core's go, not to the pipe of this process.
    os.dup2(stream, 2)
    os.close(stream)
    try:
        configure(order.settings)
    except InferenceError as error:
        # The log's directory is gone since the core has started. The log is then standard error.
        log.error("%s", error)
    keep_large_buffers(memory_bounds())
    loop = asyncio.get_running_loop()
    # As in the core: log rotation may signal all processes of the server, and by default these signals end a process.
    loop.add_signal_handler(signal.SIGHUP, reopen)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(number, _ignore)
    front = _FrontEnd(order, channel, memory, Page(page, order.processes), loop)
    await front.serve(
        {name: [socket.socket(fileno=_take(channel)) for _ in range(count)] for name, count in order.sockets.items()}
    )
    return 0


def _ignore() -> None:
    """No effect."""


def _take(channel: Channel) -> int:
    descriptor = channel.take_descriptor()
    if descriptor is None:
        raise unavailable("a front-end process got fewer descriptors than it needs")
    return descriptor


class _FrontEnd:
    """The services of this process, and what the core tells it."""

    def __init__(
        self, order: Order, channel: Channel, memory: Memory, page: Page, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._order = order
        self._channel = channel
        self._page = page
        self._loop = loop
        self._core_life = CoreLife(page, order.settings.hang_timeout_secs)
        self._server = RemoteServer(channel, memory, page, self._core_life, order.metadata, loop)
        self._ended = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._services: list[HttpServer | GrpcServer] = []

    async def serve(self, sockets: Mapping[str, Sequence[socket.socket]]) -> None:
        """Serve on these sockets, by the names of the services, until the core ends it."""
        order, page = self._order, self._page
        memory = replace(memory_bounds(), copies=FRONT_END_COPIES)
        totals = {HTTP: page.http_totals(order.process), GRPC: page.grpc_totals(order.process)}
        for name, server in make_servers(order.settings, self._server, memory, totals).items():
            self._services.append(server)
            server.serve(sockets[name])
        # Objects of the start live as long as the process: the collector need not traverse them.
        gc.freeze()
        self._channel.read_on_loop(self._loop, self._perform)
        self._channel.send(json_frame(ChannelFrame.STARTED, {}))
        # Frames that came with the order.
        self._perform()
        while not self._ended.is_set():
            page.beat(order.process)
            self._core_life.check(monotonic_ns())
            page.publish_dropped_lines(order.process, dropped_lines())
            try:
                async with asyncio.timeout(BEAT_SECS):
                    await self._ended.wait()
            except TimeoutError:
                continue
        await asyncio.gather(*(service.close() for service in self._services))

    def _perform(self) -> None:
        """Handle the frames that have come."""
        server = self._server
        while (work := self._channel.received()) is not None:
            kind, body = work
            if kind is FrontFrame.ANSWERS:
                server.on_answers(body)
            elif kind is InferenceFrame.CALL_ANSWER:
                server.on_answer(body)
            elif kind is FrontFrame.LEAVE:
                for service in self._services:
                    service.send_away()
            elif kind is FrontFrame.DRAIN:
                self._draining = self._loop.create_task(self._drain())
            elif kind is FrontFrame.REOPEN:
                reopen()
            elif kind is ChannelFrame.STOP:
                self._ended.set()
                return

    async def _drain(self) -> None:
        await asyncio.gather(*(service.drain() for service in self._services))
        with suppress(ServerGoneError):
            self._channel.send(encode_frame(FrontFrame.DRAINED))
