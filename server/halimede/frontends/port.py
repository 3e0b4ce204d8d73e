"""The listening sockets of one service and their connections, whatever protocol these speak.

A port accepts, counts and limits connections, and ends them. Its owner makes an asyncio protocol for each, which calls
`admit` in `connection_made` and `forget` in `connection_lost`.
"""

import asyncio
import os
import resource
import socket
import ssl
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol

from halimede.core.accounts import MemoryBounds
from halimede.core.types import shortage_of
from halimede.frontends.accept import MORE_FILES, ConnectionAcceptor, refuse_connection
from halimede.frontends.reserve import Reserve
from halimede.frontends.sockets import SocketFile
from halimede.frontends.totals import PortTotals

FAULT_LOG_S = 10.0
"""Minimum interval of log lines about a fault that every connection would repeat."""

LAST_HANDSHAKES_S = 1.0
"""How long the last connections may take for TLS once no more are accepted."""

SWEEP_STEP = 128
"""Connections that are checked at a time, which takes half a millisecond. Ten thousand at once took 36."""

SWEEP_PAUSE_S = 0.002
"""Time between two steps. Without it the loop would not let go of the GIL, for which executing threads wait."""


@dataclass(frozen=True, slots=True)
class PortLimits:
    """The limits of one port. Times are seconds, sizes are bytes.

    Over all connections, unread answers hold at most `max_unsent_bytes`, or twice as much while all clients read.
    `spare_descriptors` are left to the rest of the process. When nine of ten connections, or descriptors, are taken,
    connections that were idle for `crowded_idle_s` are closed. When all are taken, a new connection takes the place of
    the one that is idle for the longest time, and at least for `replaced_idle_s`. If there is none,
    `reserved_connections` more are accepted for control calls. These are closed when they are idle for as long, or when
    another one comes. Connections are checked every `sweep_s`, so that none of them needs a timer.
    """

    max_connections: int = 10_000
    max_unsent_bytes: int = 1 << 30
    spare_descriptors: int = 32
    reserved_connections: int = 8
    crowded_idle_s: float = 60.0
    replaced_idle_s: float = 2.0
    handshake_timeout_s: float = 10.0
    sweep_s: float = 1.0

    def within(self, memory: MemoryBounds) -> "PortLimits":
        """These limits in a process with so much memory."""
        return replace(self, max_unsent_bytes=memory.at_most(self.max_unsent_bytes))


class Connection(Protocol):
    """What a port calls on its connections."""

    def abort(self) -> None:
        """Close now. Unsent bytes are no longer counted when this returns."""

    def close_if_idle(self, since: float = inf) -> bool:
        """Close unless a request is received or processed, or was after `since`. Returns whether it closes."""

    def sweep(self, now: float) -> float:
        """Enforce time limits, and count the unsent bytes. Returns since when it is idle; infinite during a request."""

    def stall_order(self) -> tuple[bool, float] | None:
        """Sort key, smallest for the client that has read nothing for the longest time; None if nothing is unsent."""


class Port:
    """Order of use: `serve`, then `stop_accepting`, `close_idle` and `wait_closed` to end gently, and `close`.

    `limits` may be replaced at any time.
    """

    def __init__(
        self,
        make_connection: Callable[[], asyncio.BaseProtocol],
        make_reserved: Callable[[], asyncio.BaseProtocol] | None = None,
        *,
        service: str,
        limits: PortLimits,
        log: Callable[[str], None],
        unsent_bytes: Callable[[], int],
        refusal: bytes = b"",
        tls: ssl.SSLContext | None = None,
        totals: PortTotals | None = None,
    ) -> None:
        """`make_reserved` makes a connection that serves control calls alone. `service` is the name in log lines;
        `unsent_bytes` gives the total of all connections. A connection that is refused gets `refusal`; with `tls` it is
        only closed. With `totals`, limits hold over all front-end processes."""
        self.limits = limits
        self._make_connection = make_connection
        self.service = service
        self._log = log
        self._unsent_bytes = unsent_bytes
        self._refusal = b"" if tls is not None else refusal
        self._tls = tls
        self._totals = totals
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        # Accepted, and not in `_connections` yet: TLS may take a while.
        self._expected: set[object] = set()
        self._arriving: dict[asyncio.Task[Any], tuple[socket.socket, object]] = {}
        self._reserve = Reserve(make_reserved)
        self._acceptors: list[ConnectionAcceptor] = []
        self._files: list[SocketFile] = []
        self._max_descriptor = 0
        self._fault_logged_at: float | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Port {self.service} connections={len(self._connections)}+{len(self._expected)}>"

    @property
    def connection_count(self) -> int:
        """The number of connections, without those that are still in the TLS handshake."""
        return len(self._connections)

    def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections on sockets that `bind` made, which the port owns from then on."""
        loop = asyncio.get_running_loop()
        self._files = [file for sock in sockets if (file := SocketFile.of(sock)) is not None]
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_descriptor = open_files - self.limits.spare_descriptors
        is_ours = None if self._totals is None else self._totals.connections.is_least
        self._acceptors = [ConnectionAcceptor(sock, self._take, self._on_shortage, is_ours) for sock in sockets]
        self._sweep_timer = loop.call_later(self.limits.sweep_s, self._sweep, loop)

    async def stop_accepting(self) -> None:
        """Accept all connections that wait, and no others. Returns when input that they had sent is read.

        Closing them at once would lose their requests.
        """
        for acceptor in self._acceptors:
            acceptor.accept_all()
        self._close_sockets()
        if self._arriving:
            _, late = await asyncio.wait(self._arriving, timeout=LAST_HANDSHAKES_S)
            for arriving in late:
                arriving.cancel()
        # The event loop polls its sockets.
        for _ in range(2):
            await asyncio.sleep(0)

    def close_idle(self) -> None:
        """Close idle connections."""
        for connection in tuple(self._connections):
            connection.close_if_idle()

    async def wait_closed(self) -> None:
        """Return when all connections are closed."""
        await self._empty.wait()

    async def close(self) -> None:
        """Close the sockets and every connection now. A second call has no effect."""
        self._close_sockets()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for arriving in self._arriving:
            arriving.cancel()
        await asyncio.gather(*self._arriving, return_exceptions=True)
        for connection in tuple(self._connections):
            connection.abort()
        await self._empty.wait()

    def _close_sockets(self) -> None:
        # Remove the files first: no new client finds this server, and another server may create its own file.
        for file in self._files:
            file.remove()
        self._files.clear()
        for acceptor in self._acceptors:
            acceptor.close()

    def crashed(self, where: str, error: BaseException) -> None:
        """Log an internal fault, or what the server lacks."""
        if (shortage := shortage_of(error)) is not None:
            self._log(f"{self.service} service: {where}: {shortage.message}")
            return
        trace = "".join(traceback.format_exception(error)).rstrip()
        self._log(f"{self.service} service: unexpected error in {where}: {trace}")

    def log_fault(self, text: str) -> None:
        """Log a fault that many connections repeat, once in FAULT_LOG_S."""
        now = asyncio.get_running_loop().time()
        if self._fault_logged_at is None or now - self._fault_logged_at >= FAULT_LOG_S:
            self._fault_logged_at = now
            self._log(f"{self.service} service: {text}")

    # The acceptors' calls.

    def _take(self, sock: socket.socket) -> None:
        limits, count = self.limits, self._count()
        # The kernel assigns the lowest free number, so this one shows how many are taken.
        over = max(count - limits.max_connections, sock.fileno() - self._max_descriptor)
        most = limits.reserved_connections
        # Those that are replaced may take a second to close.
        has_room = over < 2 * most
        since = asyncio.get_running_loop().time() - limits.replaced_idle_s
        if over < 0 or (has_room and self._reserve.replace(self._connections, since)):
            self._accept(sock, self._make_connection())
        elif has_room and (reserved := self._reserve.try_make(most, self._connections)) is not None:
            self._accept(sock, reserved)
        elif count >= limits.max_connections:
            text = f"{limits.max_connections} connections are open, as many as are served"
            refuse_connection(sock, self._refuse(text))
        else:
            refuse_connection(sock, self._on_shortage(f"only the spare file descriptors are left; {MORE_FILES}"))

    def _accept(self, sock: socket.socket, connection: asyncio.BaseProtocol) -> None:
        loop = asyncio.get_running_loop()
        self._expected.add(connection)
        self._count()
        arriving = loop.create_task(
            loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self.limits.handshake_timeout_s,
            )
        )
        self._arriving[arriving] = sock, connection
        arriving.add_done_callback(self._arrived)

    def _arrived(self, arriving: "asyncio.Task[Any]") -> None:
        sock, connection = self._arriving.pop(arriving)
        error = None if arriving.cancelled() else arriving.exception()
        if not arriving.cancelled() and error is None:
            return
        # The connection or its handshake failed, or the port is closing.
        sock.close()
        self._expected.discard(connection)
        self._reserve.connections.pop(connection, None)
        self._count()
        # An OSError, which includes those of TLS, is the client's matter: with a line for each, any client could fill
        # the log.
        if error is not None and not isinstance(error, OSError):
            self.crashed("accepting a connection", error)

    def _on_shortage(self, reason: str) -> bytes:
        return self._refuse(f"cannot accept connections: {reason}")

    def _refuse(self, reason: str) -> bytes:
        """The answer for a client that is refused."""
        self.log_fault(f"new connections are refused: {reason}")
        return self._refusal

    # The connections' calls.

    def admit(self, connection: Connection) -> None:
        """Register a new connection."""
        self._expected.discard(connection)
        self._connections.add(connection)
        self._empty.clear()

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""
        self._connections.discard(connection)
        self._reserve.connections.pop(connection, None)
        self._count()
        if not self._connections:
            self._empty.set()

    def _count(self) -> int:
        """The number of connections of the server, with those that are still arriving."""
        own = len(self._connections) + len(self._expected)
        return own if self._totals is None else self._totals.connections.publish(own)

    def shed(self) -> None:
        """Close connections until at most `max_unsent_bytes` are unsent, the longest stalled first.

        A client that has read something since the last sweep keeps its connection, unless twice as much is unsent.
        """
        most = self._most_unsent()
        if self._unsent_bytes() <= most:
            return
        now, sweep_s = asyncio.get_running_loop().time(), self.limits.sweep_s
        stalled = [(order, each) for each in self._connections if (order := each.stall_order()) is not None]
        stalled.sort(key=lambda one: one[0])
        closed = 0
        for (is_new, since), connection in stalled:
            unsent = self._unsent_bytes()
            if unsent <= most or (unsent <= 2 * most and (is_new or now - since < sweep_s)):
                break
            connection.abort()
            closed += 1
        if closed:
            self.log_fault(
                f"{closed} connections closed: more than {most} bytes of answers waited for clients that do not read"
            )

    def _most_unsent(self) -> int:
        """How many bytes may be unsent here. Among several processes the one that has more than its share closes
        connections."""
        most = self.limits.max_unsent_bytes
        if self._totals is None:
            return most
        total, own = self._totals.unsent_bytes, self._unsent_bytes()
        # Less than the share: of processes with equal parts, none would close any.
        return max(most - (total.publish(own) - own), total.share() - 1)

    def _sweep(self, loop: asyncio.AbstractEventLoop, unswept: Sequence[Connection] = ()) -> None:
        """Check connections: those `unswept`, or a new round over all of them. Events are handled between the steps."""
        unswept = unswept or tuple(self._connections)
        now = loop.time()
        limits, reserve = self.limits, self._reserve
        is_crowded = (
            self._count() > limits.max_connections * 9 // 10 or _lowest_descriptor() > self._max_descriptor * 9 // 10
        )
        for connection in unswept[:SWEEP_STEP]:
            if connection not in self._connections:
                continue
            idle_since = connection.sweep(now)
            if connection in reserve.connections:
                connection.close_if_idle(now - limits.replaced_idle_s)
            elif is_crowded and not connection.close_if_idle(now - limits.crowded_idle_s) and idle_since < inf:
                reserve.note(connection, idle_since)
        unswept = unswept[SWEEP_STEP:]
        if not unswept:
            reserve.end_round()
            self.shed()
        self._sweep_timer = loop.call_later(SWEEP_PAUSE_S if unswept else limits.sweep_s, self._sweep, loop, unswept)


def _lowest_descriptor() -> float:
    """The lowest free number of a descriptor, which shows how many are taken; infinite if none is free."""
    try:
        descriptor = os.dup(2)
    except OSError:
        return inf
    os.close(descriptor)
    return descriptor
