"""One HTTP/1.1 connection on the event loop: performs what `Receiver` and `Outbox` decide.

The transport fills the receiver's memory and writes what the outbox returns. A connection has one exchange at a time,
so answers are in order by construction. Reading pauses while too much is unused or unsent, and after a piece of a body
with many chunks until it is the connection's turn again.
"""

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Protocol, cast

from halimede.core.types import Buffer, shortage_of, unavailable
from halimede.frontends.http.access import CLIENT_LEFT, RequestLog
from halimede.frontends.http.deadlines import ReceiveDeadlines, SendDeadline
from halimede.frontends.http.exchange import Exchange, Stream
from halimede.frontends.http.framing import Head, Refusal
from halimede.frontends.http.outbox import CONTINUE, OPEN, Outbox
from halimede.frontends.http.receiver import CHUNKED, ENDED, HEAD, NO_ROOM, REQUEST, Receiver, ReceiverEvent
from halimede.frontends.http.shared import Shared
from halimede.frontends.port import Port
from halimede.frontends.turns import has_left

INTERNAL_ERROR = "internal error of the server; its log has the cause"


class ConnectionOwner(Protocol):
    """What a connection uses of its listener."""

    shared: Shared
    requests: RequestLog
    port: Port

    def admits(self, peer: object, now: float) -> bool: ...

    def count(self, now: float, calls: int = 1) -> None: ...

    def wait(self, connection: "HttpConnection", peer: object, go_on: Callable[[], None]) -> None: ...

    def begin(self, exchange: Exchange, peer: object) -> None: ...

    def fail(self, exchange: Exchange, error: BaseException) -> None: ...


class HttpConnection(asyncio.BufferedProtocol):
    """One client. Everything runs on the event loop's thread, in plain calls from the transport and from exchanges."""

    __slots__ = (
        "_begin",
        "_linger_timer",
        "_listener",
        "_loop",
        "_peer",
        "_reading",
        "_receive_deadlines",
        "_receiver",
        "_send_deadline",
        "_transport",
        "exchange",
        "fail",
        "outbox",
    )

    def __init__(
        self,
        listener: ConnectionOwner,
        loop: asyncio.AbstractEventLoop,
        begin: Callable[[Exchange, object], None] | None = None,
    ) -> None:
        """`begin` is called instead of the listener's."""
        self._listener = listener
        self._begin = begin or listener.begin
        self.fail = listener.fail
        self._loop = loop
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)  # Set before anything else is called.
        self._receiver = Receiver(listener.shared)
        self.outbox = Outbox(listener.shared)
        self._receive_deadlines = ReceiveDeadlines(listener.shared)
        self._send_deadline = SendDeadline(listener.shared)
        self._reading = True
        self._linger_timer: asyncio.TimerHandle | None = None
        # The client's address for the access log.
        self._peer: object = None
        self.exchange: Exchange | None = None

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._listener.shared.limits.write_buffer_bytes)
        # Read now, because a lost connection has no peer name.
        self._peer = transport.get_extra_info("peername")
        self._listener.port.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- the reason changes nothing
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._listener.port.forget(self)
        self._receiver.end()
        self.outbox.lose()
        self._on_disconnect()

    def eof_received(self) -> bool:
        """The client sends nothing more. As in Triton, it counts as disconnected, and its request is cancelled."""
        self._receiver.end()
        self._on_disconnect()
        return False  # The transport sends what was written, then closes.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 -- we know better
        return self._receiver.room()

    def buffer_updated(self, nbytes: int) -> None:
        receiver, now = self._receiver, monotonic()
        try:
            takes_turns = receiver.state is HEAD or receiver.state is CHUNKED
            if takes_turns and not receiver.awaits_turn and not self._listener.admits(self._peer, now):
                receiver.awaits_turn = True
                receiver.received(nbytes, now)
                self._update_reading()
                self._listener.wait(self, self._peer, self._wake)
            else:
                self._take(receiver.received(nbytes, now))
        except Exception as error:  # noqa: BLE001 -- whatever it was, the client gets an answer
            self._listener.count(now)
            self._refuse(error)

    def pause_writing(self) -> None:
        self._receiver.is_held_back = True
        self._update_reading()
        self.outbox.count_unsent(self._transport.get_write_buffer_size())
        self._listener.port.shed()

    def resume_writing(self) -> None:
        self._receiver.is_held_back = False
        self.outbox.count_unsent(0)  # The rest is small, and a sweep finds it if it stays.
        self._update_reading()
        self._schedule_next()
        stream = self.exchange
        if not isinstance(stream, Stream) or stream.on_room is None:
            return
        try:
            stream.on_room()
        except Exception as error:  # noqa: BLE001 -- an internal fault must not leave the client waiting
            stream.break_off(error)

    # Receiving.

    def _take(self, event: ReceiverEvent | None) -> None:
        receiver = self._receiver
        if receiver.awaits_turn:
            self._listener.count(monotonic(), receiver.chunk_calls)
            self._listener.wait(self, self._peer, self._wake)
            self._update_reading()
        elif receiver.backlog is not None or not self._reading:
            self._update_reading()
        if event is None:
            return
        if event is REQUEST:
            exchange = self.exchange = Exchange(self, cast("Head", receiver.head), receiver.take_body())
            self._begin(exchange, self._peer)
        elif event is ENDED:
            self._transport.close()
        elif receiver.awaits_continue:
            self._write((CONTINUE,))

    def _wake(self) -> None:
        """It is this connection's turn: continue to read."""
        self._receiver.awaits_turn = False
        if self._transport.is_closing():
            return
        if has_left(self._transport):
            # What it has asked for is not begun. Its end would otherwise be seen after all of that.
            self.abort()
            return
        self._update_reading()
        self._read_next()

    def _update_reading(self) -> None:
        wanted = not self._receiver.is_full
        if wanted == self._reading or self._transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _schedule_next(self) -> None:
        """Continue with pipelined input in the next turn of the loop: one request per turn lets others run."""
        if self._receiver.can_go_on:
            self._loop.call_soon(self._read_next)

    def _read_next(self) -> None:
        if not self._receiver.can_go_on:
            # Such as a connection that waits for its turn since this was scheduled: `_take` would end its rest early.
            return
        try:
            self._take(self._receiver.go_on(monotonic()))
        except Exception as error:  # noqa: BLE001 -- as in buffer_updated
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        """Answer, end the sending side, and discard input: closing at once would reset the unread answer."""
        if isinstance(error, Refusal):
            refusal = error
        else:
            self._listener.port.crashed("receiving a request", error)
            shortage = shortage_of(error)
            refusal = Refusal(500, INTERNAL_ERROR) if shortage is None else Refusal(503, shortage.message)
        receiver, outbox = self._receiver, self.outbox
        if not receiver.can_be_refused:
            return
        if outbox.state is not OPEN:
            self.abort()  # An answer in parts has begun: there can be no other.
            return
        head = receiver.head
        seconds = None if head is None else monotonic() - receiver.began_at
        self._listener.requests.note(head, refusal.status, seconds, self._peer, failure=refusal.message)
        self.exchange = None
        receiver.refuse()
        self._write(outbox.refusal(head, refusal.status, refusal.message))
        self._update_reading()
        if not self._transport.is_closing():
            self._transport.write_eof()
        self._linger(outbox.linger_s())

    def _linger(self, seconds: float) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._linger_timer = self._loop.call_later(seconds, self._transport.abort)

    # The exchange's calls.

    @property
    def has_room(self) -> bool:
        return not self._receiver.is_held_back

    def count(self, exchange: Exchange, size: int) -> None:
        """Count bytes that are made of the body of `exchange`. UNAVAILABLE when they are too many."""
        if self.exchange is exchange and not self._receiver.can_hold(size):
            raise unavailable(NO_ROOM)

    def answer(self, exchange: Exchange, status: int, fields: bytes, chunks: Sequence[Buffer]) -> None:
        """Send the answer to `exchange` if it is the current one."""
        if self.exchange is not exchange:
            return
        self.exchange = None
        # A reference cycle with the handler's call: without this, the body would stay until the garbage collector runs.
        exchange.on_gone = None
        if status >= self._listener.requests.noted_from:
            self._note(exchange, status, chunks=chunks)
        self._write(self.outbox.answer(exchange.head, status, fields, chunks))
        self._finish()

    def begin(self, exchange: Exchange, status: int, fields: bytes) -> Stream:
        """Replace `exchange` by a stream. The stream has ended already if the exchange is not the current one."""
        if self.exchange is not exchange:
            return Stream(self, exchange, b"", status)
        stream = Stream(self, exchange, self.outbox.open_parts(exchange.head, status, fields), status)
        self.exchange = stream
        exchange.on_gone = None  # As in `answer`.
        return stream

    def send_part(self, stream: Stream, opening: bytes, part: Sequence[Buffer], *, is_last: bool) -> None:
        """Send the head of the answer (or nothing), a part of it, and its end if this is the last part."""
        if self.exchange is not stream:
            return
        if is_last:
            self.exchange = None
            stream.on_gone = stream.on_room = None  # As in `answer`.
            if stream.failure or stream.status >= self._listener.requests.noted_from:
                self._note(stream, stream.status, failure=stream.failure)
        self._write(self.outbox.part(stream.head, opening, part, is_last=is_last))
        if is_last:
            self._finish()

    def hold(self, stream: Stream, size: int) -> None:
        """Count bytes that wait for room here with those that are unsent."""
        if self.exchange is stream and self.outbox.hold(size, self._transport.get_write_buffer_size()):
            self._listener.port.shed()

    def _write(self, parts: Sequence[Buffer]) -> None:
        if self._transport.is_closing():
            return  # A write failed, and the transport is about to report it.
        if len(parts) == 1:
            self._transport.write(parts[0])
        else:
            self._transport.writelines(parts)

    def _finish(self) -> None:
        """A complete answer is written: read the next request, or close the connection."""
        if self.outbox.state is not OPEN:
            self._close()
            return
        if self._receiver.answered():
            self._loop.call_soon(self._read_next)

    def _close(self) -> None:
        """Close when everything written is sent."""
        self._receiver.end()
        self._transport.close()

    def _on_disconnect(self) -> None:
        """The client has disconnected: notify the handler of its request."""
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        self._note(exchange, CLIENT_LEFT, failure="the connection ended before the whole answer was sent")
        on_gone, exchange.on_gone = exchange.on_gone, None  # As in `answer`.
        if on_gone is None:
            return
        try:
            on_gone()
        except Exception as error:  # noqa: BLE001 -- there is no client to answer
            self._listener.port.crashed(repr(exchange), error)

    def _note(self, exchange: Exchange, status: int, *, failure: str = "", chunks: Sequence[Buffer] = ()) -> None:
        """Report an exchange that ended to the access log."""
        self._listener.requests.note(
            exchange.head,
            status,
            monotonic() - self._receiver.began_at,
            self._peer,
            model=exchange.model,
            version=exchange.version,
            request_id=exchange.request_id,
            failure=failure,
            chunks=chunks,
        )

    # The port's calls.

    def close_if_idle(self, since: float = inf) -> bool:
        """Close unless a request is received or processed (in a drain its answer closes), or was after `since`. Returns
        whether it closes now."""
        if since < inf and not self._receive_deadlines.is_idle_since(since, self._receiver.requests):
            return False
        if self._receiver.is_idle:
            self._close()
            return True
        if self._receiver.is_discarding:
            self._linger(self.outbox.linger_s())
        return False

    def abort(self) -> None:
        """Close now, even with unsent bytes."""
        self.outbox.drop()
        self._transport.abort()

    def sweep(self, now: float) -> float:
        """Enforce the time limits. Called every `PortLimits.sweep_s`, so that no request sets a timer. Returns since
        when the connection is idle; infinite during a request."""
        written = self._transport.get_write_buffer_size()
        if self._send_deadline.is_over(written, self.outbox.streamed, now):
            self.abort()
            return inf
        self.outbox.count_unsent(written)
        try:
            self._receive_deadlines.check(self._receiver, now)
        except Refusal as refusal:
            self._refuse(refusal)
        return self._receive_deadlines.idle_since if self._receiver.is_idle else inf

    def stall_order(self) -> tuple[bool, float] | None:
        """Sort key: when the client last read something; None if nothing is unsent."""
        return self._send_deadline.order() if self.outbox.unsent_bytes else None
