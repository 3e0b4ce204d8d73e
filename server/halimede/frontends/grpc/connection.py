"""One connection of a gRPC client on the event loop: performs what `Http2Connection` decides.

The transport receives into the listener's buffer, or directly into the memory of a large message. Reading pauses while
the client does not take what is written. A connection has one timer, for its keepalive and its age; all other limits
are checked by the sweep of its port.
"""

import asyncio
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Protocol, cast

from halimede.core.observe.access_lines import AccessLog
from halimede.core.types import Buffer
from halimede.core.wire.grpc_call import NOT_GRPC_BLOCK, NOT_GRPC_TEXT, CallHead, read_head
from halimede.core.wire.http2.codes import ConnectionFault, H2Code
from halimede.core.wire.http2.connection import (
    ConnectionFails,
    DataArrives,
    Event,
    Http2Connection,
    Pinged,
    RequestBegins,
    RequestEnds,
    StreamHasRoom,
    StreamIsReset,
)
from halimede.core.wire.http2.keepalive import Due, Keepalive
from halimede.core.wire.http2.streams import CLOSED, Stream
from halimede.frontends.grpc.call import UNAVAILABLE, Call, shutting_down
from halimede.frontends.grpc.limits import Shared
from halimede.frontends.peer import client_of

_JOIN_BELOW = 64 << 10
"""Up to this size all outgoing parts are copied together into one write. With TLS no write is larger: its transport
does not count as unsent what it has encrypted of one write."""


class ConnectionOwner(Protocol):
    """What a connection uses of its listener."""

    shared: Shared
    access_log: AccessLog | None

    def admit(self, connection: "GrpcConnection") -> None: ...

    def forget(self, connection: "GrpcConnection") -> None: ...

    def shed(self) -> None: ...

    def crashed(self, where: str, error: BaseException) -> None: ...

    def age_factor(self) -> float:
        """Varies the age of connections."""

    def begin(self, connection: "GrpcConnection", stream: Stream[Call], head: CallHead) -> None:
        """Begin a call, or refuse it."""


class GrpcConnection(asyncio.BufferedProtocol):
    """One client. Everything runs on the event loop's thread."""

    __slots__ = (
        "_alarm",
        "_alarm_at",
        "_began_at",
        "_counted_unsent",
        "_discarded",
        "_held_bytes",
        "_idle_since",
        "_is_alarm_for_calls",
        "_is_closing",
        "_is_direct",
        "_is_encrypted",
        "_is_paused",
        "_is_unflushed",
        "_keepalive",
        "_last_size",
        "_linger_timer",
        "_loop",
        "_owner",
        "_peer",
        "_progress",
        "_shut_down_at",
        "_stalled_since",
        "_swept_at",
        "_transport",
        "_waiting_bytes",
        "h2",
    )

    def __init__(self, owner: ConnectionOwner, loop: asyncio.AbstractEventLoop) -> None:
        shared = owner.shared
        now = monotonic()
        self._owner = owner
        self._loop = loop
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)  # Set before anything else is called.
        self._peer: object = None
        self.h2: Http2Connection[CallHead, Call] = Http2Connection(read_head, shared.limits.http2, now)
        self._keepalive = Keepalive(shared.keepalive, now, owner.age_factor())
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = inf
        self._is_alarm_for_calls = False
        self._linger_timer: asyncio.TimerHandle | None = None
        self._began_at = now
        self._idle_since = now
        self._is_direct = False
        self._is_encrypted = False
        self._is_paused = False
        self._is_unflushed = False
        # Everything is written, and the client is to close.
        self._is_closing = False
        self._held_bytes = 0
        self._waiting_bytes = 0
        self._counted_unsent = 0
        self._discarded = 0
        self._shut_down_at = inf
        # What the last sweep saw, by stream: bytes received of a message and bytes of DATA sent, and since when.
        self._progress: dict[Stream[Call], tuple[int | None, int, float]] = {}
        self._stalled_since = inf
        self._swept_at = now
        self._last_size = 0

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Half of what is written ahead: a transport that is full always reports when it has room again.
        self._transport.set_write_buffer_limits(high=self._owner.shared.limits.write_ahead_bytes // 2)
        self._peer = transport.get_extra_info("peername")
        self._is_encrypted = transport.get_extra_info("sslcontext") is not None
        self._began_at = self._idle_since = monotonic()
        self.h2.room = self._owner.shared.limits.write_ahead_bytes
        self._owner.admit(self)
        self.flush()
        self._set_alarm()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- the reason changes nothing
        for timer in (self._alarm, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._owner.forget(self)
        self._end_calls("the connection ended before the whole answer was sent")
        shared = self._owner.shared
        shared.unsent_bytes -= self._counted_unsent
        self._counted_unsent = 0

    def eof_received(self) -> bool:
        """The client sends nothing more, and counts as disconnected."""
        self._end_calls("the connection ended before the whole answer was sent")
        return False  # The transport sends what was written, then closes.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 -- we know better
        reader = self.h2.reader
        self._is_direct = False
        if reader.data_left:
            stream = self.h2.streams.get(reader.data_stream)
            if stream is not None and stream.call is not None and (room := stream.call.room()) is not None:
                self._is_direct = True
                return room[: reader.data_left]
        return self._owner.shared.view

    def buffer_updated(self, nbytes: int) -> None:
        now = monotonic()
        self._keepalive.received(now)
        h2 = self.h2
        try:
            if self._is_direct:
                self._receive_directly(nbytes, now)
            elif self._is_closing:
                self._discard(nbytes)
            else:
                self._handle(h2.receive(self._owner.shared.view[:nbytes], now), now)
        except Exception as error:  # noqa: BLE001 -- whatever it was, the connection must not stay half alive
            self._crash(error)
        if h2.outgoing:
            self.flush()
        elif h2.is_over:
            self._close(self._owner.shared.limits.goaway_answer_s)

    def pause_writing(self) -> None:
        self._is_paused = True
        self.h2.room = 0
        # What the client makes us write in answer to its frames must not grow while it does not read.
        self._transport.pause_reading()
        self._count_unsent()
        self._owner.shed()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._transport.resume_reading()
        self._write_waiting()
        self.flush()

    # Receiving.

    def _receive_directly(self, size: int, now: float) -> None:
        h2 = self.h2
        stream = h2.streams[h2.reader.data_stream]
        call = cast("Call", stream.call)
        room = cast("memoryview", call.room())
        for event in h2.received_directly(room[:size], now):
            if isinstance(event, DataArrives):
                call.take_directly(size, is_end=event.is_end)
            else:
                self._handle([event], now)

    def _handle(self, events: Sequence[Event[CallHead, Call]], now: float) -> None:
        for event in events:
            if isinstance(event, DataArrives):
                call = event.stream.call
                if call is not None:
                    call.take_data(event.data, event.size, is_end=event.is_end)
                else:
                    self._take_data_without_call(event.stream, event.size, is_end=event.is_end)
            elif isinstance(event, RequestBegins):
                self._begin(event.stream, event.head, is_end=event.is_end)
            else:
                self._handle_rare(event, now)

    def _handle_rare(self, event: Event[CallHead, Call], now: float) -> None:
        match event:
            case RequestEnds(stream):
                if stream.call is not None:
                    stream.call.take_data(memoryview(b""), 0, is_end=True)
                else:
                    self._take_data_without_call(stream, 0, is_end=True)
            case StreamIsReset(stream, fault):
                if stream.call is not None:
                    stream.call.leave(fault or "the client cancelled the call")
            case StreamHasRoom(stream):
                if stream.call is not None and stream.call.on_room is not None:
                    stream.call.on_room()
            case Pinged():
                if self._keepalive.is_ping_excessive(now, has_calls=bool(self.h2.streams)):
                    self._fail(H2Code.ENHANCE_YOUR_CALM, "too_many_pings")
            case ConnectionFails(fault, streams):
                self._on_failure(fault, streams)

    def _begin(self, stream: Stream[Call], head: CallHead, *, is_end: bool) -> None:
        self._idle_since = inf
        if not self._is_alarm_for_calls:
            self._set_alarm()
        if not head.is_grpc:
            # It is answered when it is complete: stream.call stays None.
            if is_end:
                self._answer_other(stream)
            return
        self._owner.begin(self, stream, head)
        if is_end and stream.call is not None:
            stream.call.take_data(memoryview(b""), 0, is_end=True)

    def _take_data_without_call(self, stream: Stream[Call], size: int, *, is_end: bool) -> None:
        """DATA of a request that is none of gRPC's, or of a call that has ended."""
        if is_end:
            self._answer_other(stream)
        else:
            self.h2.credit(stream, size)

    def _answer_other(self, stream: Stream[Call]) -> None:
        if stream.trailers is None:
            self.h2.respond(stream, NOT_GRPC_BLOCK)
            self.h2.send(stream, (NOT_GRPC_TEXT,), len(NOT_GRPC_TEXT))
            self.h2.finish(stream)

    # Sending.

    def flush_later(self) -> None:
        if not self._is_unflushed:
            self._is_unflushed = True
            self._owner.shared.flush_later(self)

    def flush(self) -> None:
        """Write what is outgoing, and DATA that waits as far as there is room."""
        self._is_unflushed = False
        h2, transport = self.h2, self._transport
        while h2.outgoing:
            parts = h2.take_outgoing()
            if self._is_closing or transport.is_closing():
                return
            size = sum(map(len, parts))
            if size <= _JOIN_BELOW:
                transport.write(b"".join(parts))
            elif self._is_encrypted:
                self._write_in_pieces(parts)
            else:
                transport.writelines(parts)
            if h2.has_sent:
                h2.has_sent = False
                self._keepalive.sent_data()
            if h2.room <= 0:
                self._write_waiting()
        if self._counted_unsent or h2.unsent_bytes or self._waiting_bytes:
            self._count_unsent()
        if h2.is_over:
            limits = self._owner.shared.limits
            self._close(limits.linger_s if h2.is_failed else limits.goaway_answer_s)

    def _write_in_pieces(self, parts: Sequence[Buffer]) -> None:
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _JOIN_BELOW):
                self._transport.write(view[start : start + _JOIN_BELOW])

    def _write_waiting(self) -> None:
        if self._is_paused:
            return
        h2 = self.h2
        h2.room = self._owner.shared.limits.write_ahead_bytes - self._transport.get_write_buffer_size()
        self._handle(h2.write_waiting(), 0.0)

    def _count_unsent(self) -> None:
        unsent = self._transport.get_write_buffer_size() + self.h2.unsent_bytes + self._waiting_bytes
        self._owner.shared.unsent_bytes += unsent - self._counted_unsent
        self._counted_unsent = unsent

    # The end.

    def _fail(self, code: H2Code, text: str) -> None:
        """End the connection, and its calls, with GOAWAY."""
        if not self.h2.is_failed:
            fault = ConnectionFault(code, text)
            self._on_failure(fault, self.h2.fail(fault))

    def _on_failure(self, fault: ConnectionFault, streams: Sequence[Stream[Call]]) -> None:
        for stream in streams:
            if stream.call is not None:
                stream.call.leave(f"the connection was ended: {fault.text}")

    def _crash(self, error: Exception) -> None:
        self._owner.crashed("receiving from a client", error)
        self._fail(H2Code.INTERNAL_ERROR, "internal error of the server; its log has the cause")

    def _close(self, linger_s: float) -> None:
        """Everything is written: end the sending side, and discard input until the client closes.

        Closing with unread input would reset the connection before the client has read the GOAWAY.
        """
        if self._is_closing:
            return
        self._is_closing = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            # With TLS this tells the client by close_notify. A client that has calls ignores it until the connection is
            # closed: waiting for an answer as long as TLS does by default, half a minute, would keep its calls open.
            self._transport.close()
            linger_s = min(linger_s, self._owner.shared.limits.goaway_answer_s)
        is_failed = self.h2.is_failed
        busy_until = 0.0 if is_failed else monotonic() + self._owner.shared.limits.goaway_busy_s
        self._linger_timer = self._loop.call_later(linger_s, self._end_linger, linger_s, busy_until)

    def _end_linger(self, linger_s: float, busy_until: float) -> None:
        """Close, but not while the client receives the end of its answers, unless the connection failed.

        Then the transport holds bytes, or the client sends credit for those that it reads. Credit that arrived after
        the close would reset the connection, and the client would lose what it has not read.
        """
        now = monotonic()
        is_receiving = self._transport.get_write_buffer_size() or not self._keepalive.is_quiet_since(now - linger_s)
        if is_receiving and now < busy_until:
            self._linger_timer = self._loop.call_later(linger_s, self._end_linger, linger_s, busy_until)
        else:
            self._transport.abort()

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > self._owner.shared.limits.linger_bytes:
            self._transport.abort()

    def _end_calls(self, text: str) -> None:
        for stream in tuple(self.h2.streams.values()):
            if stream.call is not None:
                stream.call.leave(text)

    # The timer.

    def _set_alarm(self) -> None:
        self._is_alarm_for_calls = bool(self.h2.streams)
        wake_at = self._keepalive.wake_at(has_calls=self._is_alarm_for_calls)
        if wake_at >= self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = wake_at
        self._alarm = self._loop.call_later(max(0.0, wake_at - monotonic()), self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm, self._alarm_at = None, inf
        if self._is_closing:
            return
        now = monotonic()
        while (due := self._keepalive.due(now, has_calls=bool(self.h2.streams))) is not None:
            match due:
                case Due.PING:
                    self.h2.ping()
                case Due.PING_TIMEOUT:
                    self._fail(H2Code.ENHANCE_YOUR_CALM, "ping_timeout")
                case Due.MAX_AGE:
                    self.h2.shut_down("max_age")
                    self._shut_down_at = now
                case Due.GRACE_OVER:
                    self.h2.send_final_goaway()
                    for stream in tuple(self.h2.streams.values()):
                        if stream.call is not None:
                            stream.call.cut_off(UNAVAILABLE, "max connection age")
        self._set_alarm()
        self.flush()

    # The calls' calls.

    @property
    def access_log(self) -> AccessLog | None:
        return self._owner.access_log

    @property
    def client(self) -> str:
        return client_of(self._peer)

    def hold(self, size: int) -> bool:
        shared = self._owner.shared
        self._held_bytes += size
        shared.held_bytes += size
        limits = shared.limits
        return self._held_bytes <= limits.max_connection_held_bytes and shared.held_bytes <= limits.max_held_bytes

    def wait(self, size: int) -> None:
        self._waiting_bytes += size

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
        for stream in tuple(self.h2.streams.values()):
            if stream.call is not None and stream.call.on_drain is not None:
                stream.call.on_drain()
        self.flush()

    def close_if_idle(self, since: float = inf) -> None:
        """Close unless a call is in progress, or was after `since`. A call that the client is just making is served."""
        if not self.h2.streams and self._idle_since <= since:
            self.shut_down()

    def abort(self) -> None:
        """Close now. Unsent bytes are no longer counted when this returns."""
        self._end_calls("the connection was closed")
        self._owner.shared.unsent_bytes -= self._counted_unsent
        self._counted_unsent = 0
        self._transport.abort()

    def stall_order(self) -> tuple[bool, float] | None:
        return (False, self._stalled_since) if self._counted_unsent else None

    def sweep(self, now: float) -> None:
        """Enforce time limits, and count the unsent bytes."""
        shared = self._owner.shared
        limits = shared.limits
        h2 = self.h2
        self._count_unsent()
        if not h2.is_greeted:
            if now - self._began_at >= limits.handshake_s:
                self.abort()
            return
        if not h2.streams and self._idle_since == inf:
            self._idle_since = now
        elif h2.streams:
            self._sweep_streams(now)
        self._sweep_transport(now)
        if shared.is_leaving and not shared.is_draining:
            self.send_away()
        if self._is_goaway_unanswered(now):
            h2.send_final_goaway()
        if h2.outgoing:
            self.flush()

    def _is_goaway_unanswered(self, now: float) -> bool:
        """Whether the client's answer to GOAWAY does not come: calls that it made before it are not awaited either.

        While bytes of it arrive, its calls and its answer may wait behind them.
        """
        limits = self._owner.shared.limits
        waited_s = now - self._shut_down_at
        return waited_s >= limits.goaway_busy_s or (
            waited_s >= limits.goaway_answer_s and self._keepalive.is_quiet_since(now - limits.goaway_answer_s)
        )

    def _sweep_transport(self, now: float) -> None:
        """Close if the client reads nothing at all, or does not complete a frame."""
        size = self._transport.get_write_buffer_size()
        is_stalled = (size and size == self._last_size) or (
            self.h2.reader.is_within and not self.h2.reader.data_left and self._keepalive.is_quiet_since(self._swept_at)
        )
        self._last_size, self._swept_at = size, now
        if not is_stalled:
            self._stalled_since = inf
        elif self._stalled_since == inf:
            self._stalled_since = now
        elif now - self._stalled_since >= self._owner.shared.limits.stall_s:
            self.abort()

    def _sweep_streams(self, now: float) -> None:
        """End the calls of a client that makes no progress."""
        limits = self._owner.shared.limits
        stall_s = limits.stall_s
        progress: dict[Stream[Call], tuple[int | None, int, float]] = {}
        for stream in tuple(self.h2.streams.values()):
            call = stream.call
            if call is not None and call.is_awaiting and now - self._shut_down_at >= stall_s:
                call.cut_off(UNAVAILABLE, shutting_down().message)
                continue
            received = None if call is None else call.received_bytes
            if received is None and not stream.unsent_bytes:
                continue
            before = self._progress.get(stream)
            if before is None or _has_progressed(before, received, stream, limits.progress_bytes):
                progress[stream] = (received, stream.sent_bytes, now)
                continue
            progress[stream] = before
            if now - before[2] < stall_s:
                continue
            text = (
                "the client has not read its answer" if stream.unsent_bytes else "the client has not sent its message"
            )
            if call is not None:
                call.cut_off(UNAVAILABLE, f"{text} for {stall_s:g} s")
            if stream.state is not CLOSED:
                self.h2.reset(stream, H2Code.CANCEL)
        self._progress = progress


def _has_progressed(
    before: tuple[int | None, int, float], received: int | None, stream: Stream[Call], progress_bytes: int
) -> bool:
    """Whether the client has taken something of the answer, or sent enough of its message."""
    if stream.sent_bytes != before[1]:
        return True
    if received is None or stream.unsent_bytes:
        return False
    return before[0] is None or not 0 <= received - before[0] < progress_bytes
