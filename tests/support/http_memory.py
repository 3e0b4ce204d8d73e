"""HTTP connections over a transport in memory, for tests that split the input anywhere; requests without a connection."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from halimede.core.types import Buffer
from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.framing import Head, Limits
from halimede.frontends.http.listener import Listener
from halimede.frontends.http.protocol import HttpConnection
from halimede.frontends.port import PortLimits

LIMITS = Limits(pipelined_bytes=256, write_buffer_bytes=1000)
PORT_LIMITS = PortLimits()
MAX_BODY = 200_000


class MemoryTransport(asyncio.Transport):
    """Keeps what is written. It counts as sent when `take` is called, or immediately if `is_fast`."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.unsent = 0
        self.is_fast = True
        self.reading = True
        self.eof = False
        self.closed = ""
        self.high = 0
        self.ended = asyncio.Event()
        self.protocol: HttpConnection

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high or 0

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        assert not self.eof
        self.written.append(bytes(data))
        if not self.is_fast:
            self.unsent += len(data)
            if self.unsent > self.high:
                self.protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        for data in list_of_data:
            self.write(data)

    def take(self, size: int) -> None:
        """The client reads this number of bytes."""
        was_over = self.unsent > self.high
        self.unsent -= size
        if was_over and self.unsent <= self.high // 4:
            self.protocol.resume_writing()

    def write_eof(self) -> None:
        self.eof = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closed = self.closed or "close"

    def abort(self) -> None:
        self.closed = "abort"
        self.ended.set()

    def is_closing(self) -> bool:
        return bool(self.closed)


@dataclass
class Client:
    transport: MemoryTransport
    connection: HttpConnection
    listener: Listener
    seen: list[tuple[bytes, bytes, bytes]]
    exchanges: list[Exchange]
    log: list[str]

    def send(self, data: bytes) -> None:
        """Deliver bytes as a transport does."""
        while data and not self.transport.closed:
            buffer = self.connection.get_buffer(-1)
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            self.connection.buffer_updated(size)
            data = data[size:]

    @property
    def answers(self) -> bytes:
        return b"".join(self.transport.written)


def connect(
    *,
    answer: bool = True,
    limits: Limits = LIMITS,
    port_limits: PortLimits = PORT_LIMITS,
    handle: Callable[[Exchange], None] | None = None,
) -> Client:
    """A connection whose requests are recorded, and answered immediately with their number if `answer`."""
    seen: list[tuple[bytes, bytes, bytes]] = []
    exchanges: list[Exchange] = []
    log: list[str] = []

    def note(exchange: Exchange) -> None:
        seen.append((exchange.head.method, exchange.head.target, bytes(exchange.body)))
        exchanges.append(exchange)
        if answer:
            exchange.respond(200, b"", (b"%d" % len(seen),))

    listener = Listener(
        handle or note, service="Test", max_body=MAX_BODY, log=log.append, limits=limits, port_limits=port_limits
    )
    transport = MemoryTransport()
    connection = HttpConnection(listener, asyncio.get_running_loop())
    transport.protocol = connection
    connection.connection_made(transport)
    return Client(transport, connection, listener, seen, exchanges, log)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def two_parts(data: bytes) -> Iterator[list[bytes]]:
    for cut in range(len(data) + 1):
        yield [data[:cut], data[cut:]]
    yield [data[at : at + 1] for at in range(len(data))]


class SentExchange(Exchange):
    """A whole request without a connection, which keeps its answer; `status` is 0 before the answer."""

    def __init__(self, method: bytes, target: bytes, headers: dict[bytes, bytes], content: bytes) -> None:
        super().__init__(cast("HttpConnection", self), Head(method, target, headers, b"", len(content)), content)
        self.status = 0
        self.answer_body = b""

    @property
    def is_open(self) -> bool:
        return not self.status

    def respond(self, status: int, fields: bytes = b"", chunks: Sequence[Buffer] = ()) -> None:
        if not self.status:
            self.status = status
            self.answer_body = b"".join(chunks)


def connect_to(first: Client) -> Client:
    """Another client of the same listener."""
    transport = MemoryTransport()
    connection = HttpConnection(first.listener, asyncio.get_running_loop())
    transport.protocol = connection
    connection.connection_made(transport)
    return Client(transport, connection, first.listener, first.seen, first.exchanges, first.log)
