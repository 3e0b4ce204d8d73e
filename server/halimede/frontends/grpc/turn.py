"""The turns of one connection: what it reads, begins and ends when the loop has more to do than one turn takes.

What a connection has read waits for the turn of its client. Of a trusted proxy each call waits for the turn of the
address for which it is made. The calls of a lost connection end some at a time, because a client may have many.
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from time import monotonic
from typing import Protocol

from halimede.core.wire.http2.connection import MAX_FRAMES_AT_ONCE, Http2Connection
from halimede.core.wire.http2.events import Event
from halimede.frontends.grpc.call import Call, Route
from halimede.frontends.grpc.limits import HeldBytes
from halimede.frontends.grpc.reading import Pause, Reading
from halimede.frontends.port import Connection as PortConnection
from halimede.frontends.turns import CALLS_AT_ONCE, FORWARDED, FRAMES_OF_A_CALL, Turns, address_of, has_left

LOST = "the connection ended before the whole answer was sent"
_NOTHING = memoryview(b"")


class Connection(PortConnection, Protocol):
    """What a turn uses of its connection."""

    h2: Http2Connection[Route, Call]
    held: HeldBytes

    def handle(self, events: Sequence[Event[Route, Call]], now: float) -> None: ...

    def process(self, nbytes: int, now: float) -> None: ...


class ConnectionTurn:
    """`is_waiting`: the connection has something to do in its turn. `is_lost`: only its calls are left.

    `is_proxied`: its client is a trusted proxy.
    """

    __slots__ = (
        "_address",
        "_connection",
        "_forget",
        "_reading",
        "_transport",
        "_turns",
        "is_lost",
        "is_proxied",
        "is_waiting",
    )

    def __init__(
        self,
        connection: Connection,
        turns: Turns,
        forget: Callable[[], None],
        transport: asyncio.Transport,
        reading: Reading,
    ) -> None:
        """`forget` is called when the connection is lost and its calls have ended."""
        self._connection = connection
        self._turns = turns
        self._forget = forget
        self._transport = transport
        self._reading = reading
        peer = transport.get_extra_info("peername")
        self.is_proxied = turns.is_proxy(peer)
        # What the connection counts by. Each call of a proxy has an address of its own.
        self._address: Hashable = (None if self.is_proxied else address_of(peer)) or self
        self.is_waiting = False
        self.is_lost = False

    def receive(self, data: memoryview, now: float) -> None:
        """Process what was read, or keep it for the turn of this connection."""
        h2 = self._connection.h2
        most = MAX_FRAMES_AT_ONCE if self.is_proxied else self._turns.admits(now)
        if self.is_waiting or most <= 0:
            h2.reader.keep(data)
        else:
            self._process(data, now, most)
        if h2.reader.has_unread and not h2.is_failed and not self.is_waiting:
            self._reading.pause(Pause.UNREAD)
            self._wait()

    def _process(self, data: memoryview, now: float, most_requests: int) -> None:
        connection = self._connection
        h2 = connection.h2
        before = h2.begun
        events = h2.receive(data, now, most_requests)
        calls = 0 if self.is_proxied else h2.begun - before
        if h2.frames >= FRAMES_OF_A_CALL * (calls or 1):
            calls = h2.frames // FRAMES_OF_A_CALL
        if calls:
            self._turns.begins(now, calls)
        connection.handle(events, now)

    def begin_proxied(self, call: Call) -> None:
        """Begin a call of a proxy. It may have to wait for the turn of its client."""
        turns, now = self._turns, monotonic()
        if turns.admits(now) > 0:
            turns.begins(now)
            call.begin()
            return
        # What the client sends waits with its call.
        call.pause()
        turns.wait(self._address_of(call), call, partial(self._begin_waiting, call))

    def admits_message(self, call: Call) -> bool:
        """Whether a message of a stream may be handled now. Otherwise the call waits, and then takes its turn."""
        turns, now = self._turns, monotonic()
        if turns.admits(now) > 0:
            turns.begins(now)
            return True
        turns.wait(self._address_of(call), call, partial(call.resume, is_turn=True))
        return False

    def _address_of(self, call: Call) -> Hashable:
        """What a call counts by."""
        if not self.is_proxied:
            return self._address
        added = [value for name, value in call.head.metadata if name == FORWARDED]
        return (self._turns.forwarded_for(",".join(added)) if added else None) or self

    def lose(self) -> None:
        """The connection is lost: end its calls, and then forget it."""
        self.is_lost = True
        if not self.is_waiting:
            self._end_lost()

    def leave_some(self) -> bool:
        """End some calls of a client that has left. Returns whether those were all."""
        calls = [stream.call for stream in self._connection.h2.table.all() if stream.call is not None]
        for call in calls[:CALLS_AT_ONCE]:
            call.leave(LOST)
        return len(calls) <= CALLS_AT_ONCE

    def _wait(self) -> None:
        self.is_waiting = True
        self._turns.wait(self._address, self, self._go_on)

    def _go_on(self) -> None:
        """It is this connection's turn."""
        self.is_waiting = False
        if self.is_lost:
            self._end_lost()
        elif not self._transport.is_closing():
            if has_left(self._transport):
                # What it has asked for is not begun. Its end would otherwise be seen after all of that.
                self._connection.abort()
            else:
                self._connection.process(0, monotonic())

    def receive_kept(self, now: float) -> None:
        """Process some of what was kept."""
        h2 = self._connection.h2
        try:
            self._process(_NOTHING, now, CALLS_AT_ONCE)
        finally:
            if h2.reader.has_unread and not h2.is_failed:
                self._wait()
            else:
                self._reading.resume(Pause.UNREAD)

    def _end_lost(self) -> None:
        if self.leave_some():
            self._connection.held.forget_unsent()
            self._forget()
        else:
            self._wait()

    def _begin_waiting(self, call: Call) -> None:
        if call.is_open:
            self._turns.begins(monotonic())
            call.begin()
            call.resume()
