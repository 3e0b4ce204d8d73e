"""One listening socket and its connections: start, drain, close."""

import asyncio
import resource
import socket
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from halimede.core.observe.access_lines import AccessLog, Protocol
from halimede.core.wire.http_control import error_json
from halimede.frontends.http.accept import MORE_FILES, ConnectionAcceptor, refuse_connection
from halimede.frontends.http.access import RequestLog
from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.framing import CLOSE, Limits
from halimede.frontends.http.outbox import JSON, RETRY_LATER, answer_head
from halimede.frontends.http.protocol import INTERNAL_ERROR, HttpConnection
from halimede.frontends.http.shared import Shared
from halimede.frontends.http.sockets import SocketFile, bind, bound_port

# The numbers of methods in the library of Triton's HTTP server, for its verbose log lines.
_METHOD_NUMBERS = {b"GET": 0, b"HEAD": 1, b"POST": 2, b"PUT": 3, b"DELETE": 4}

DRAIN_STALL_S = 1.0
DRAIN_PROGRESS_BYTES = 16 << 10
DRAIN_WRITE_STALL_S = 5.0
FAULT_LOG_S = 10.0
"""Minimum interval of log lines about a fault that every connection would repeat."""


async def _turns(count: int) -> None:
    """Let the event loop poll its sockets."""
    for _ in range(count):
        await asyncio.sleep(0)


def _stall_order(connection: HttpConnection) -> tuple[bool, float]:
    return connection.send_deadline.order()


class Listener:
    """Passes each complete request to `handle`, which answers it at once or later.

    Order of use: `serve` (or `start`), optionally `send_away`, `drain`, `close`. The connections share `shared`, and
    report to the access log by `requests`.
    """

    def __init__(
        self,
        handle: Callable[[Exchange], None],
        *,
        service: str,
        max_body: int,
        log: Callable[[str], None],
        limits: Limits,
        keep_names: bool = False,
        protocol: Protocol = Protocol.HTTP,
    ) -> None:
        """`keep_names`: heads have `sent_headers`."""
        self.handle = handle
        self.shared = Shared(limits, max_body, keep_names=keep_names)
        self.requests = RequestLog(protocol)
        self._service = service
        self._log = log
        self._connections: set[HttpConnection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: set[asyncio.Task[None]] = set()
        # Accepted, and not in `_connections` yet.
        self._expected: set[HttpConnection] = set()
        self._arriving: dict[asyncio.Task[Any], tuple[socket.socket, HttpConnection]] = {}
        self._acceptor: ConnectionAcceptor | None = None
        self._file: SocketFile | None = None
        self._max_descriptor = 0
        self._fault_logged_at: float | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def log_requests(self, log: Callable[[str], None]) -> None:
        """Log each request from now on, with Triton's text."""
        handle = self.handle

        def logged(exchange: Exchange) -> None:
            head = exchange.head
            log(f"HTTP request: {_METHOD_NUMBERS.get(head.method, -1)} {head.target.decode('latin-1')}")
            handle(exchange)

        self.handle = logged

    def log_access(self, access_log: AccessLog) -> None:
        """Report requests to the access log from now on."""
        self.requests.report_to(access_log)

    async def start(self, address: str, port: int, reuse_port: bool = False) -> int:
        """Bind and serve. Returns the bound port, 0 for a unix socket. See `sockets.bind`."""
        sock = bind(address, port, self._service, reuse_port=reuse_port)
        number = bound_port(sock)
        await self.serve(sock)
        return number

    async def serve(self, sock: socket.socket) -> None:
        """Accept connections on a socket that `bind` made, which the listener owns from then on."""
        loop = asyncio.get_running_loop()
        self._file = SocketFile.of(sock)
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_descriptor = open_files - self.shared.limits.spare_descriptors
        self._acceptor = ConnectionAcceptor(sock, self._take, self._on_shortage)
        self._sweep_timer = loop.call_later(self.shared.limits.sweep_s, self._sweep, loop)

    def send_away(self) -> None:
        """Continue to serve, and close each connection after its next answer, so that its client connects elsewhere."""
        self.shared.is_leaving = True

    async def drain(self) -> None:
        """Stop accepting, close idle connections at once, and return when all others are answered and closed.

        There is no deadline: to end it, cancel it, then call `close`.
        """
        self.shared.is_leaving = self.shared.is_draining = True
        # A client that stalls in its request or its answer does not delay the exit for long.
        limits = self.shared.limits
        self.shared.limits = replace(
            limits,
            head_timeout_s=DRAIN_STALL_S,
            body_progress_s=DRAIN_STALL_S,
            body_progress_bytes=DRAIN_PROGRESS_BYTES,
            write_timeout_s=min(limits.write_timeout_s, DRAIN_WRITE_STALL_S),
            sweep_s=DRAIN_STALL_S / 4,
        )
        # Connections that wait to be accepted and requests that wait to be read are taken first: closing would lose
        # them.
        if self._acceptor is not None:
            self._acceptor.accept_all()
        self._stop_accepting()
        await asyncio.gather(*self._arriving, return_exceptions=True)
        await _turns(2)
        for connection in tuple(self._connections):
            connection.close_if_idle()
        await self._empty.wait()

    async def close(self) -> None:
        """Close every connection and end every task now. Also after `drain`. A second call has no effect."""
        self.shared.is_leaving = self.shared.is_draining = True
        self._stop_accepting()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for arriving in self._arriving:
            arriving.cancel()
        await asyncio.gather(*self._arriving, return_exceptions=True)
        for connection in tuple(self._connections):
            connection.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._empty.wait()

    def _stop_accepting(self) -> None:
        # Remove the file first: no new client finds this server, and another server may create its own file.
        if self._file is not None:
            self._file.remove()
            self._file = None
        if self._acceptor is not None:
            self._acceptor.close()

    def begin(self, exchange: Exchange) -> None:
        """Pass a request to `handle`."""
        try:
            self.handle(exchange)
        except Exception as error:  # noqa: BLE001 -- whatever it was, the client gets an answer
            self.fail(exchange, error)

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
        """Log an internal fault and answer 500 without its details."""
        self.crashed(repr(exchange), error)
        exchange.respond(500, JSON, (error_json(INTERNAL_ERROR),))

    def crashed(self, where: str, error: BaseException) -> None:
        """Log an internal fault."""
        trace = "".join(traceback.format_exception(error)).rstrip()
        self._log(f"{self._service} service: unexpected error in {where}: {trace}")

    # The acceptor's calls.

    def _take(self, sock: socket.socket) -> None:
        most = self.shared.limits.max_connections
        if len(self._connections) + len(self._expected) >= most:
            refuse_connection(sock, self._refusal(f"{most} connections are open, as many as are served"))
        elif sock.fileno() >= self._max_descriptor:
            # The kernel assigns the lowest free number, so this one shows how many are taken.
            refuse_connection(sock, self._on_shortage(f"only the spare file descriptors are left; {MORE_FILES}"))
        else:
            loop = asyncio.get_running_loop()
            connection = HttpConnection(self, loop)
            self._expected.add(connection)
            arriving = loop.create_task(loop.connect_accepted_socket(lambda: connection, sock))
            self._arriving[arriving] = sock, connection
            arriving.add_done_callback(self._arrived)

    def _arrived(self, arriving: "asyncio.Task[Any]") -> None:
        sock, connection = self._arriving.pop(arriving)
        error = None if arriving.cancelled() else arriving.exception()
        if not arriving.cancelled() and error is None:
            return
        # The connection failed before it was set up, or the listener is closing.
        sock.close()
        self._expected.discard(connection)
        if error is not None and not isinstance(error, OSError):
            self.crashed("accepting a connection", error)

    def _on_shortage(self, reason: str) -> bytes:
        return self._refusal(f"cannot accept connections: {reason}")

    def _refusal(self, reason: str) -> bytes:
        """The answer for a client that is refused."""
        self.log_fault(f"new connections are refused: {reason}")
        body = error_json("the server has as many connections as it can serve")
        return answer_head(503, JSON + RETRY_LATER, len(body), CLOSE) + body

    def log_fault(self, text: str) -> None:
        """Log a fault that many connections repeat, once in FAULT_LOG_S."""
        now = asyncio.get_running_loop().time()
        if self._fault_logged_at is None or now - self._fault_logged_at >= FAULT_LOG_S:
            self._fault_logged_at = now
            self._log(f"{self._service} service: {text}")

    # The connections' calls.

    def admit(self, connection: HttpConnection) -> None:
        """Register a new connection."""
        self._expected.discard(connection)
        self._connections.add(connection)
        self._empty.clear()

    def forget(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def shed(self) -> None:
        """Close connections until at most `max_unsent_bytes` are unsent, the longest stalled first."""
        shared = self.shared
        most = shared.limits.max_unsent_bytes
        if shared.unsent_bytes <= most:
            return
        closed = 0
        for connection in sorted((each for each in self._connections if each.outbox.unsent_bytes), key=_stall_order):
            if shared.unsent_bytes <= most:
                break
            connection.abort()
            closed += 1
        if closed:
            self.log_fault(
                f"{closed} connections closed: more than {most} bytes of answers waited for clients that do not read"
            )

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        limits = self.shared.limits
        for connection in tuple(self._connections):
            connection.sweep(now)
        if len(self._connections) > limits.max_connections * 9 // 10:
            for connection in tuple(self._connections):
                if connection.receive_deadlines.is_idle_since(now - limits.crowded_idle_s):
                    connection.close_if_idle()
        self.shed()
        self._sweep_timer = loop.call_later(limits.sweep_s, self._sweep, loop)
