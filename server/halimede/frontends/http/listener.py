"""One listening socket and its connections: start, drain, close."""

import asyncio
import errno
import socket
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.wire.http_control import error_json
from halimede.frontends.http.framing import HeadReader, Limits
from halimede.frontends.http.protocol import INTERNAL_ERROR, JSON, Connection, Exchange

_BACKLOG = 1024
DRAIN_STALL_S = 1.0
_BUFFER_BYTES = 64 << 10
# A peer that vanished without a word is noticed within two minutes. Accepted sockets inherit the options.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))


def bind(address: str, port: int, service: str) -> socket.socket:
    """A socket that listens on `address`:`port`; port 0 takes any free one (`getsockname()[1]`).

    It listens already, because Linux lets two sockets bind one port as long as neither does. UNAVAILABLE
    `failed to start <service> service: Socket '<address>:<port>' already in use` (or the other reason) on failure.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            sock.setblocking(False)
            sock.bind(where)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        reason = "already in use" if error.errno == errno.EADDRINUSE else f"cannot be opened: {error.strerror}"
        raise InferenceError(
            ErrorCode.UNAVAILABLE, f"failed to start {service} service: Socket '{address}:{port}' {reason}"
        ) from None
    return sock


async def _turns(count: int) -> None:
    """Let the event loop look at its sockets."""
    for _ in range(count):
        await asyncio.sleep(0)


class Listener:
    """Gives every whole request to `handle`, which answers it at once or later.

    Order of use: `serve` (or `start`), `drain`, `close`. `buffer` is where every connection receives: it is filled and
    used up within one callback of the transport, so one is enough for all.
    """

    def __init__(
        self,
        handle: Callable[[Exchange], None],
        *,
        service: str,
        max_body: int,
        log: Callable[[str], None],
        limits: Limits,
    ) -> None:
        self.handle = handle
        self.max_body = max_body
        self.limits = limits
        self.is_draining = False
        self.held_bytes = 0
        self._is_accepting = True
        self.heads = HeadReader()
        self.buffer = bytearray(_BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        self._service = service
        self._log = log
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    async def start(self, address: str, port: int) -> int:
        """Bind and serve; the bound port."""
        sock = bind(address, port, self._service)
        bound: int = sock.getsockname()[1]
        await self.serve(sock)
        return bound

    async def serve(self, sock: socket.socket) -> None:
        """Accept connections on a socket that `bind` made, which is the listener's from here on."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self, loop), sock=sock, backlog=_BACKLOG)
        self._sweep_timer = loop.call_later(self.limits.sweep_s, self._sweep, loop)

    async def drain(self) -> None:
        """Stop accepting, close idle connections at once, and return when every other one is answered and closed.

        Has no deadline of its own: cancel it, then `close`.
        """
        self.is_draining = True
        # A client that stalls in the middle of its request does not hold the exit for long.
        self.limits = replace(
            self.limits, head_timeout_s=DRAIN_STALL_S, body_progress_s=DRAIN_STALL_S, sweep_s=DRAIN_STALL_S / 4
        )
        # What has reached this machine is taken in first, connections that wait to be accepted and requests that wait
        # to be read: closing over them would lose them.
        await _turns(2)
        if self._server is not None:
            self._server.close()
        await _turns(2)
        self._is_accepting = False
        for connection in tuple(self._connections):
            connection.close_if_idle()
        await self._empty.wait()

    async def close(self) -> None:
        """Close every connection now and end every task. Also after `drain`; a second call does nothing."""
        self.is_draining = True
        if self._server is not None:
            self._server.close()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for connection in tuple(self._connections):
            connection.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._empty.wait()

    def spawn(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that answers `exchange`; `close` ends it."""
        task = asyncio.get_running_loop().create_task(self._supervise(exchange, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _supervise(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 -- whatever it was, the client gets an answer
            self.fail(exchange, error)

    def fail(self, exchange: Exchange, error: BaseException) -> None:
        """Log a fault of ours and answer 500 without its details."""
        self.crashed(repr(exchange), error)
        exchange.respond(500, JSON, (error_json(INTERNAL_ERROR),))

    def crashed(self, where: str, error: BaseException) -> None:
        """Log a fault of ours."""
        trace = "".join(traceback.format_exception(error)).rstrip()
        self._log(f"{self._service} service: unexpected error in {where}: {trace}")

    # The connections' calls.

    def admit(self, connection: Connection) -> str | None:
        """Register a new connection, and say why it must be turned away, if it must."""
        is_full = len(self._connections) >= self.limits.max_connections
        self._connections.add(connection)
        self._empty.clear()
        if not self._is_accepting:
            return "the server is exiting"
        return "the server has as many connections as it can serve" if is_full else None

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in tuple(self._connections):
            connection.sweep(now)
        self._sweep_timer = loop.call_later(self.limits.sweep_s, self._sweep, loop)
