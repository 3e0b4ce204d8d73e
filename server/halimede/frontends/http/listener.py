"""One HTTP service: its port, the exchanges of its connections, and how they end."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from halimede.core.accounts import UNBOUNDED, MemoryBounds
from halimede.core.observe.access_lines import AccessLog, Protocol
from halimede.core.types import internal, shortage_of
from halimede.core.wire.http_control import error_json
from halimede.frontends.http.access import RequestLog
from halimede.frontends.http.answers import respond_infer_error
from halimede.frontends.http.cors import Cors
from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.framing import CLOSE, Head, Limits
from halimede.frontends.http.outbox import JSON, RETRY_LATER, answer_head
from halimede.frontends.http.protocol import INTERNAL_ERROR, HttpConnection
from halimede.frontends.http.routes import is_inference
from halimede.frontends.http.shared import Shared
from halimede.frontends.port import Port, PortLimits
from halimede.frontends.totals import PortTotals
from halimede.frontends.turns import FORWARDED, Turns, address_of

# The numbers of methods in the library of Triton's HTTP server, for its verbose log lines.
_METHOD_NUMBERS = {b"GET": 0, b"HEAD": 1, b"POST": 2, b"PUT": 3, b"DELETE": 4}

DRAIN_STALL_S = 1.0
DRAIN_PROGRESS_BYTES = 16 << 10
DRAIN_WRITE_STALL_S = 5.0

_TOO_MANY = error_json("the server has as many connections as it can serve")
_REFUSAL = answer_head(503, JSON + RETRY_LATER, len(_TOO_MANY), CLOSE) + _TOO_MANY


class Listener:
    """Passes each complete request to `handle`, which answers it at once or later.

    Order of use: `serve`, optionally `send_away`, `drain`, `close`. The connections share `shared` and
    `port`, and report to the access log by `requests`.
    """

    def __init__(
        self,
        handle: Callable[[Exchange], None],
        *,
        service: str,
        max_body: int,
        log: Callable[[str], None],
        limits: Limits,
        port_limits: PortLimits,
        keep_names: bool = False,
        protocol: Protocol = Protocol.HTTP,
        access_log: AccessLog | None = None,
        log_request: Callable[[str], None] | None = None,
        totals: PortTotals | None = None,
        memory: MemoryBounds = UNBOUNDED,
        turns: Turns | None = None,
        cors: Cors | None = None,
    ) -> None:
        """`keep_names`: heads have `sent_headers`. Bodies are within `memory`. `turns` are shared with the process's
        other servers. `log_request` gets a line for each request, with Triton's text."""
        self.handle = handle if log_request is None else partial(_log_and_handle, log_request, handle)
        self._turns = turns or Turns()
        total_held = None if totals is None else totals.held_bytes
        self.shared = Shared(limits, max_body, keep_names=keep_names, total_held=total_held, memory=memory, cors=cors)
        self.requests = RequestLog(protocol, access_log)
        self.port = Port(
            lambda: HttpConnection(self, asyncio.get_running_loop()),
            lambda: HttpConnection(self, asyncio.get_running_loop(), self._begin_control),
            service=service,
            limits=port_limits,
            log=log,
            unsent_bytes=lambda: self.shared.unsent_bytes,
            refusal=_REFUSAL,
            totals=totals,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections on sockets that `bind` made, which the listener owns from then on."""
        self.port.serve(sockets)

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
        )
        self.port.limits = replace(self.port.limits, sweep_s=DRAIN_STALL_S / 4)
        await self.port.stop_accepting()
        self.port.close_idle()
        await self.port.wait_closed()

    async def close(self) -> None:
        """Close every connection and end every task now. Also after `drain`. A second call has no effect."""
        self.shared.is_leaving = self.shared.is_draining = True
        await self.port.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def admits(self, peer: object, now: float) -> bool:
        """Whether heads and chunks of this peer may be read in this turn. Otherwise their connections `wait`.

        Those of a trusted proxy are always read, because they say whose turn it is.
        """
        return self._turns.admits(now) > 0 or self._turns.is_proxy(peer)

    def count(self, now: float, calls: int = 1) -> None:
        """Count a request that is refused before it begins, or what costs as much as so many."""
        self._turns.begins(now, calls)

    def wait(self, connection: HttpConnection, peer: object, go_on: Callable[[], None]) -> None:
        """Call `go_on` when it is the turn of the connection."""
        self._turns.wait(address_of(peer) or connection, connection, go_on)

    def begin(self, exchange: Exchange, peer: object) -> None:
        """Pass a request of this peer to `handle`, or let it wait for its turn."""
        turns, now = self._turns, monotonic()
        if turns.admits(now) > 0:
            turns.begins(now)
            self._begin(exchange)
        else:
            turns.wait(self._address(exchange.head, peer) or exchange, exchange, partial(self._begin_waiting, exchange))

    def _begin_control(self, exchange: Exchange, peer: object) -> None:
        """As `begin`, for a connection of the port's reserve, which serves control calls alone."""
        if is_inference(exchange.head.target):
            exchange.respond(503, JSON + RETRY_LATER, (_TOO_MANY,))
        else:
            self.begin(exchange, peer)

    def _address(self, head: Head, peer: object) -> Hashable | None:
        """What a request counts by in the turns of the loop; None without an address."""
        if not self._turns.is_proxy(peer):
            return address_of(peer)
        added = head.headers.get(FORWARDED.encode())
        return None if added is None else self._turns.forwarded_for(added.decode("latin-1"))

    def _begin_waiting(self, exchange: Exchange) -> None:
        if exchange.is_open:
            self._turns.begins(monotonic())
            self._begin(exchange)

    def _begin(self, exchange: Exchange) -> None:
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
        """Log an internal fault and answer 500 without its details, or 503 with what the server lacks."""
        self.port.crashed(repr(exchange), error)
        respond_infer_error(exchange, shortage_of(error) or internal(INTERNAL_ERROR))


def _log_and_handle(log: Callable[[str], None], handle: Callable[[Exchange], None], exchange: Exchange) -> None:
    head = exchange.head
    log(f"HTTP request: {_METHOD_NUMBERS.get(head.method, -1)} {head.target.decode('latin-1')}")
    handle(exchange)
