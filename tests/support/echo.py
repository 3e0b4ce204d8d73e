"""A port on a loop in a thread, whose connections send back what they receive."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from math import inf
from typing import cast

from halimede.frontends.port import Port, PortLimits
from halimede.frontends.sockets import bind, bound_port
from halimede.frontends.totals import PortTotals
from support.loop_thread import LoopThread

PAGE = bytes(16 << 20)
"""More than the kernel's buffers hold."""


class Echo:
    """A service. The answer to `page` is PAGE, the one to `wait` is sent by `release`."""

    def __init__(
        self,
        log: Callable[[str], None],
        limits: PortLimits,
        tls: ssl.SSLContext | None,
        totals: PortTotals | None = None,
    ) -> None:
        self.unsent_bytes = 0
        self.waiting: list[EchoConnection] = []
        self.port = Port(
            lambda: EchoConnection(self),
            lambda: EchoConnection(self, b"reserved: "),
            service="Echo",
            limits=limits,
            log=log,
            unsent_bytes=lambda: self.unsent_bytes,
            refusal=b"refused",
            tls=tls,
            totals=totals,
        )

    def release(self) -> None:
        self.waiting.pop(0).answer(b"done")


class EchoConnection(asyncio.Protocol):
    def __init__(self, service: Echo, prefix: bytes = b"") -> None:
        self._service = service
        self._prefix = prefix
        self._loop = asyncio.get_running_loop()
        self._used_at = self._stalled_since = self._loop.time()
        self._unsent = 0
        self._is_busy = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._service.port.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._count(0)
        self._service.port.forget(self)

    def data_received(self, data: bytes) -> None:
        self._used_at = self._loop.time()
        if data == b"wait":
            self._is_busy = True
            self._service.waiting.append(self)
        else:
            self.answer(PAGE if data == b"page" else data)

    def answer(self, data: bytes) -> None:
        self._is_busy = False
        self._transport.write(self._prefix + data)

    def pause_writing(self) -> None:
        self._stalled_since = self._loop.time()
        self._count(self._transport.get_write_buffer_size())
        self._service.port.shed()

    def resume_writing(self) -> None:
        self._count(0)

    def _count(self, unsent: int) -> None:
        self._service.unsent_bytes += unsent - self._unsent
        self._unsent = unsent

    def abort(self) -> None:
        self._count(0)
        self._transport.abort()

    def close_if_idle(self, since: float = inf) -> bool:
        if self._is_busy or self._used_at > since:
            return False
        self._transport.close()
        return True

    def sweep(self, now: float) -> float:
        self._count(self._transport.get_write_buffer_size())
        return inf if self._is_busy else self._used_at

    def stall_order(self) -> tuple[bool, float] | None:
        return (False, self._stalled_since) if self._unsent else None


class RunningEcho(LoopThread):
    def __init__(
        self,
        limits: PortLimits,
        tls: ssl.SSLContext | None,
        loop_factory: Callable[[], asyncio.AbstractEventLoop],
        sockets: Sequence[socket.socket] | None,
        totals: PortTotals | None = None,
    ) -> None:
        super().__init__(loop_factory)
        self.service: Echo = self.call(lambda: Echo(self.log.append, limits, tls, totals))
        self.port = self.service.port
        sockets = sockets or bind("127.0.0.1", 0, "Echo")
        self.address = ("127.0.0.1", bound_port(sockets))
        self.call(lambda: self.port.serve(sockets))

    def another_port(self) -> Port:
        """A port that does not serve yet, with the default limits."""
        return Echo(self.log.append, PortLimits(), None).port

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)

    def use(self) -> socket.socket:
        """A connection that is served."""
        connection = self.connect()
        connection.sendall(b"x")
        assert connection.recv(100) == b"x"
        return connection
