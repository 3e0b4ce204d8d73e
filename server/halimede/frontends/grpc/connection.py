"""One connection of a gRPC client on the event loop: performs what `Http2Connection` decides.

The transport receives into the listener's buffer, or directly into the memory of a large message. Reading pauses while
the client does not take what is written. A connection has one timer, for its keepalive and its age; all other limits
are checked by the sweep of its port.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import Protocol, cast

from halimede.core.observe.access_lines import AccessLog
from halimede.core.types import Buffer
from halimede.core.wire.grpc_call import NOT_GRPC_BLOCK, NOT_GRPC_TEXT
from halimede.core.wire.http2.codes import ConnectionFault, H2Code
from halimede.core.wire.http2.connection import Http2Connection
from halimede.core.wire.http2.events import (
    ConnectionFails,
    DataArrives,
    Event,
    Pinged,
    RequestBegins,
    RequestEnds,
    StreamHasRoom,
    StreamIsReset,
)
from halimede.core.wire.http2.fields import RequestFields
from halimede.core.wire.http2.keepalive import Due
from halimede.core.wire.http2.sender import Sender
from halimede.core.wire.http2.streams import Stream
from halimede.frontends.grpc.alarm import Alarm
from halimede.frontends.grpc.call import NO_ROOM, UNAVAILABLE, Call, Route, shutting_down
from halimede.frontends.grpc.closing import Closing
from halimede.frontends.grpc.incoming import Incoming
from halimede.frontends.grpc.limits import HeldBytes, Shared
from halimede.frontends.grpc.reading import Pause, Reading
from halimede.frontends.grpc.stalls import CallStalls, TransportStall
from halimede.frontends.grpc.turn import ConnectionTurn
from halimede.frontends.peer import client_of
from halimede.frontends.turns import Turns

_FREE_BYTES = 4 << 10
"""So much of an incomplete frame is not counted: heads of frames and small requests are often cut."""

_JOIN_BELOW = 64 << 10
"""Up to this size all outgoing parts are copied together into one write. With TLS no write is larger: its transport
does not count as unsent what it has encrypted of one write."""


class ConnectionOwner(Protocol):
    """What a connection uses of its listener."""

    shared: Shared
    access_log: AccessLog | None
    turns: Turns

    def admit(self, connection: "GrpcConnection") -> None: ...

    def forget(self, connection: "GrpcConnection") -> None: ...

    def shed(self) -> None: ...

    def crashed(self, where: str, error: BaseException) -> None: ...

    def age_factor(self) -> float:
        """Varies the age of connections."""

    def route(self, fields: RequestFields) -> Route:
        """What becomes of the calls with these fields."""


class GrpcConnection(asyncio.BufferedProtocol):
    """One client. Everything runs on the event loop's thread."""

    __slots__ = (
        "_alarm",
        "_began_at",
        "_call_stalls",
        "_closing",
        "_idle_since",
        "_is_direct",
        "_is_encrypted",
        "_is_paused",
        "_is_unflushed",
        "_loop",
        "_owner",
        "_peer",
        "_reading",
        "_shut_down_at",
        "_stall",
        "_transport",
        "h2",
        "held",
        "turn",
    )

    def __init__(
        self,
        owner: ConnectionOwner,
        loop: asyncio.AbstractEventLoop,
        route: Callable[[RequestFields], Route] | None = None,
    ) -> None:
        """`route` is called instead of the owner's."""
        shared = owner.shared
        now = monotonic()
        self._owner = owner
        self._loop = loop
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)  # Set before anything else is called.
        self._reading: Reading = cast("Reading", None)  # As the transport.
        self._peer: object = None
        self.h2: Http2Connection[Route, Call] = Http2Connection(route or owner.route, shared.limits.http2, now)
        self.held = HeldBytes(shared)
        self._alarm = Alarm(shared.keepalive, owner.age_factor(), loop, lambda: bool(self.h2.table.open), self._on_due)
        self._closing = Closing(loop)
        self._began_at = now
        self._idle_since = now
        self._is_direct = False
        self._is_encrypted = False
        self._is_paused = False
        self._is_unflushed = False
        self._shut_down_at = inf
        self._call_stalls = CallStalls()
        self._stall = TransportStall(now)

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._reading = Reading(self._transport, self._loop, self._owner.shared.view)
        # Half of what is written ahead: a transport that is full always reports when it has room again.
        self._transport.set_write_buffer_limits(high=self._owner.shared.limits.write_ahead_bytes // 2)
        self._peer = transport.get_extra_info("peername")
        self.turn = ConnectionTurn(
            self, self._owner.turns, partial(self._owner.forget, self), self._transport, self._reading
        )
        self._is_encrypted = transport.get_extra_info("sslcontext") is not None
        self._began_at = self._idle_since = monotonic()
        self.h2.out.room = self._owner.shared.limits.write_ahead_bytes
        self._owner.admit(self)
        self.flush()
        self._alarm.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- the reason changes nothing
        self._alarm.cancel()
        self._closing.cancel()
        self.held.set_kept(0)
        self.held.forget_unsent()
        self.turn.lose()

    def eof_received(self) -> bool:
        """The client sends nothing more, and counts as disconnected."""
        self.turn.leave_some()
        return False  # The transport sends what was written, then closes.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 -- we know better
        reader = self.h2.reader
        self._is_direct = False
        if reader.data_left:
            stream = self.h2.table.open.get(reader.data_stream)
            incoming = None if stream is None or stream.call is None else stream.call.incoming
            if incoming is not None and (room := incoming.room()) is not None:
                self._is_direct = True
                return room[: reader.data_left]
        return self._reading.room

    def buffer_updated(self, nbytes: int) -> None:
        now = monotonic()
        if self._alarm.keepalive.received(now):
            self._alarm.set()
        self.process(nbytes, now)

    def process(self, nbytes: int, now: float) -> None:
        """Process input: `nbytes` that were received, or for 0 some of what was kept before."""
        h2 = self.h2
        try:
            if nbytes and self._is_direct:
                self._receive_directly(nbytes, now)
            elif self._closing.has_begun:
                self._closing.discard(nbytes, self._transport, self._owner.shared.limits)
            elif nbytes:
                self.turn.receive(self._reading.room[:nbytes], now)
            else:
                self.turn.receive_kept(now)
        except Exception as error:  # noqa: BLE001 -- whatever it was, the connection must not stay half alive
            self._owner.crashed("receiving from a client", error)
            self._fail(H2Code.INTERNAL_ERROR, "internal error of the server; its log has the cause")
        if (
            ((kept_bytes := h2.kept_bytes) > _FREE_BYTES or self.held.has_kept)
            and not self.held.set_kept(kept_bytes)
            and not h2.reader.has_unread
        ):
            self._fail(H2Code.ENHANCE_YOUR_CALM, NO_ROOM)
        if h2.out.outgoing:
            if not self._is_unflushed:
                self.flush()
        elif h2.is_over:
            self._closing.begin(
                self._transport, self._alarm.keepalive, self._owner.shared.limits, is_failed=h2.is_failed
            )
        self._reading.took(monotonic() - now)

    def pause_writing(self) -> None:
        self._is_paused = True
        self.h2.out.room = 0
        # What the client makes us write in answer to its frames must not grow while it does not read.
        self._reading.pause(Pause.UNSENT)
        self._count_unsent()
        self._owner.shed()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._reading.resume(Pause.UNSENT)
        self._write_waiting()
        self.flush()

    # Receiving.

    def _receive_directly(self, size: int, now: float) -> None:
        h2 = self.h2
        call = cast("Call", h2.table.open[h2.reader.data_stream].call)
        room = cast("memoryview", cast("Incoming", call.incoming).room())
        for event in h2.received_directly(room[:size], now):
            if isinstance(event, DataArrives):
                call.take_directly(size, is_end=event.is_end)
            else:
                self.handle([event], now)

    def handle(self, events: Sequence[Event[Route, Call]], now: float) -> None:
        """Perform what the client's frames ask for."""
        for event in events:
            if isinstance(event, DataArrives):
                call = event.stream.call
                if call is not None:
                    call.take_data(event.data, event.size, is_end=event.is_end)
                else:
                    _take_data_without_call(self.h2, event.stream, event.size, is_end=event.is_end)
            elif isinstance(event, RequestBegins):
                self._begin(event.stream, event.head, is_end=event.is_end)
            else:
                self._handle_rare(event, now)

    def _handle_rare(self, event: Event[Route, Call], now: float) -> None:
        match event:
            case RequestEnds(stream):
                if stream.call is not None:
                    stream.call.take_data(memoryview(b""), 0, is_end=True)
                else:
                    _take_data_without_call(self.h2, stream, 0, is_end=True)
            case StreamIsReset(stream, fault):
                if stream.call is not None:
                    stream.call.leave(fault or "the client cancelled the call")
            case StreamHasRoom(stream):
                if stream.call is not None and stream.call.on_room is not None:
                    stream.call.on_room()
            case Pinged():
                if self._alarm.keepalive.is_ping_excessive(now, has_calls=bool(self.h2.table.open)):
                    self._fail(H2Code.ENHANCE_YOUR_CALM, "too_many_pings")
            case ConnectionFails(fault, streams):
                _leave(streams, f"the connection was ended: {fault.text}")

    def _begin(self, stream: Stream[Call], route: Route, *, is_end: bool) -> None:
        self._idle_since = inf
        self._alarm.call_begins()
        if not route.head.is_grpc:
            # It is answered when it is complete: stream.call stays None.
            if is_end:
                _answer_other(self.h2.out, stream)
            return
        stream.call = call = Call(self, stream, route)
        if self.turn.is_proxied:
            self.turn.begin_proxied(call)
        else:
            call.begin()
        if is_end and call.is_open:
            call.take_data(memoryview(b""), 0, is_end=True)

    # Sending.

    def flush_later(self) -> None:
        if not self._is_unflushed:
            self._is_unflushed = True
            self._owner.shared.flush_later(self)

    def flush(self) -> None:
        """Write what is outgoing, and DATA that waits as far as there is room."""
        self._is_unflushed = False
        h2, transport = self.h2, self._transport
        out = h2.out
        while out.outgoing:
            parts = out.take()
            if self._closing.has_begun or transport.is_closing():
                return
            size = sum(map(len, parts))
            if size <= _JOIN_BELOW:
                transport.write(b"".join(parts))
            elif self._is_encrypted:
                _write_in_pieces(transport, parts)
            else:
                transport.writelines(parts)
            if out.has_sent:
                out.has_sent = False
                self._alarm.keepalive.sent_data()
            if out.room <= 0:
                self._write_waiting()
        if h2.table.unsent_bytes or self.held.has_unsent:
            self._count_unsent()
        if h2.is_over:
            self._closing.begin(transport, self._alarm.keepalive, self._owner.shared.limits, is_failed=h2.is_failed)

    def _write_waiting(self) -> None:
        if self._is_paused:
            return
        out = self.h2.out
        out.room = self._owner.shared.limits.write_ahead_bytes - self._transport.get_write_buffer_size()
        self.handle(out.write_waiting(), 0.0)

    def _count_unsent(self) -> None:
        self.held.set_unsent(self._transport.get_write_buffer_size() + self.h2.table.unsent_bytes)

    # The end.

    def _fail(self, code: H2Code, text: str) -> None:
        """End the connection, and its calls, with GOAWAY."""
        if not self.h2.is_failed:
            fault = ConnectionFault(code, text)
            _leave(self.h2.fail(fault), f"the connection was ended: {text}")

    def _on_due(self, due: Due, now: float) -> None:
        if self._closing.has_begun:
            return
        match due:
            case Due.PING:
                self.h2.out.ping()
            case Due.PING_TIMEOUT:
                self._fail(H2Code.ENHANCE_YOUR_CALM, "ping_timeout")
            case Due.MAX_AGE:
                self.h2.shut_down("max_age")
                self._shut_down_at = now
            case Due.GRACE_OVER:
                self.h2.send_final_goaway()
                for stream in self.h2.table.all():
                    if stream.call is not None:
                        stream.call.cut_off(UNAVAILABLE, "max connection age")
        self.flush()

    # The calls' calls.

    @property
    def access_log(self) -> AccessLog | None:
        return self._owner.access_log

    @property
    def client(self) -> str:
        return client_of(self._peer)

    # The listener's calls.

    def send_away(self) -> None:
        """Ask the client to make further calls on another connection. Those that it still makes here are served."""
        if monotonic() - self._began_at >= self._owner.shared.limits.leave_after_s:
            self.h2.send_away()
            self.flush()

    def shut_down(self) -> None:
        """Serve the calls that the client has made, and no others; then close."""
        self._shut_down_at = monotonic()
        self.h2.shut_down()
        for stream in self.h2.table.all():
            if stream.call is not None and stream.call.on_drain is not None:
                stream.call.on_drain()
        self.flush()

    def close_if_idle(self, since: float = inf) -> bool:
        """Close unless a call is in progress, or was after `since`. A call that the client is just making is served.
        Returns whether it closes."""
        if self.h2.table.open or self._idle_since > since or self._shut_down_at < inf:
            return False
        self.shut_down()
        return True

    def abort(self) -> None:
        """Close now. Unsent bytes are no longer counted when this returns."""
        _leave(self.h2.table.all(), "the connection was closed")
        self.held.forget_unsent()
        self._transport.abort()

    def stall_order(self) -> tuple[bool, float] | None:
        if not self.held.has_unsent:
            return None
        if self._stall.since < inf:
            return False, self._stall.since
        read_at = self._call_stalls.read_at
        return (True, 0.0) if read_at is None else (False, read_at)

    def sweep(self, now: float) -> float:
        """Enforce time limits, and count the unsent bytes. Returns since when no call is in progress, infinite during a
        call. A client that has yet to begin is idle too."""
        if self.turn.is_lost:
            return inf
        shared = self._owner.shared
        limits = shared.limits
        h2 = self.h2
        self._count_unsent()
        if not h2.is_greeted:
            if now - self._began_at >= limits.handshake_s:
                self.abort()
            return self._idle_since
        if h2.table.open:
            self._sweep_calls(now)
        elif self._idle_since == inf:
            self._idle_since = now
        if self._has_stalled(now):
            self.abort()
            return inf
        if shared.is_leaving and not shared.is_draining:
            self.send_away()
        if self._is_goaway_unanswered(now):
            h2.send_final_goaway()
        if h2.out.outgoing:
            self.flush()
        return inf if h2.table.open else self._idle_since

    def _is_goaway_unanswered(self, now: float) -> bool:
        """Whether the client's answer to GOAWAY does not come: calls that it made before it are not awaited either.

        While bytes of it arrive, its calls and its answer may wait behind them.
        """
        limits = self._owner.shared.limits
        waited_s = now - self._shut_down_at
        quiet_s = min(waited_s, self._alarm.keepalive.quiet_s(now))
        return waited_s >= limits.goaway_busy_s or quiet_s >= limits.goaway_answer_s

    def _has_stalled(self, now: float) -> bool:
        """Whether the client has read nothing at all, or has not completed what it has begun, for too long."""
        stall = self._stall
        is_within = self.h2.is_within and not self.turn.is_waiting
        is_within_frame = is_within and self._alarm.keepalive.quiet_s(now) > now - stall.looked_at
        stalled_s = stall.look(self._transport.get_write_buffer_size(), now, is_within_frame=is_within_frame)
        return stalled_s >= self._owner.shared.limits.stall_s

    def _sweep_calls(self, now: float) -> None:
        """End the calls of a client that makes no progress."""
        limits = self._owner.shared.limits
        if now - self._shut_down_at >= limits.stall_s:
            for stream in self.h2.table.all():
                if stream.call is not None and stream.call.is_awaiting:
                    stream.call.cut_off(UNAVAILABLE, shutting_down().message)
        wire = self._owner.shared.wire
        is_scarce = wire.total_bytes > wire.limit_bytes // 2
        stalled = self._call_stalls.find(self.h2.table.all(), now, limits, is_scarce=is_scarce)
        for stream, what in stalled:
            if stream.call is not None:
                stream.call.cut_off(UNAVAILABLE, f"the client has not {what}")
                # A status says more than a reset.
                self.h2.out.cut_short(stream)
            self.h2.out.reset(stream, H2Code.CANCEL)


def _write_in_pieces(transport: asyncio.Transport, parts: Sequence[Buffer]) -> None:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _JOIN_BELOW):
            transport.write(view[start : start + _JOIN_BELOW])


def _take_data_without_call(h2: Http2Connection[Route, Call], stream: Stream[Call], size: int, *, is_end: bool) -> None:
    """DATA of a request that does not speak gRPC, or of a call that has ended."""
    if is_end:
        _answer_other(h2.out, stream)
    else:
        h2.credit.use(stream, size)


def _answer_other(sender: Sender[Call], stream: Stream[Call]) -> None:
    """Answer a request that is complete and is not one of gRPC's."""
    if stream.trailers is None:
        sender.respond(stream, NOT_GRPC_BLOCK)
        sender.send(stream, (NOT_GRPC_TEXT,), len(NOT_GRPC_TEXT))
        sender.finish(stream)


def _leave(streams: Sequence[Stream[Call]], text: str) -> None:
    """End the calls of clients that cannot be answered any more."""
    for stream in streams:
        if stream.call is not None:
            stream.call.leave(text)
