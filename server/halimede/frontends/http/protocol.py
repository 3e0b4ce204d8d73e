"""HTTP/1.1 on one connection: bytes in, exchanges out, answers back.

One exchange per connection is in work at a time, so answers are in order by construction; what a client pipelines
behind it waits unparsed, and beyond `Limits.pipelined_bytes` is not even read. States:

    HEAD     nothing in work; a head is awaited, or partly in the backlog   -> BODY, CHUNKED, WORKING
    BODY     a body of known length arrives straight in its final buffer    -> WORKING
    CHUNKED  a chunked body is decoded as it arrives                        -> WORKING
    WORKING  the handler has the exchange, or sends its answer in parts     -> HEAD, CLOSED
    LINGER   refused and answered; input is discarded                       -> CLOSED
    CLOSED   closing or closed; nothing more is read

Every state goes to LINGER by a refusal and to CLOSED when the client goes. Reading pauses while too much is unused or
unsent, and for a loop turn after a piece of a body with many chunks.
"""

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, cast

import numpy as np

from halimede.core.types import Buffer, ErrorCode, InferenceError
from halimede.core.wire.http_control import error_json
from halimede.frontends.http.access import CLIENT_LEFT
from halimede.frontends.http.framing import CLOSE, ChunkedBody, Head, Refusal, body_too_large, find_head

if TYPE_CHECKING:
    from halimede.frontends.http.listener import Listener

JSON = b"Content-Type: application/json\r\n"
RETRY_LATER = b"Retry-After: 1\r\n"
PLAIN_TEXT = b"Content-Type: text/plain; charset=utf-8\r\n"

_NO_ROOM = "the server holds as many bytes of request bodies as it can, try again later"
INTERNAL_ERROR = "internal error of the server; its log says more"

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_ANSWER_HEAD = b"%b%bContent-Length: %d\r\n%b\r\n"
_STREAM_HEAD = b"%b%b%b%b\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_JOIN_BELOW = 16 << 10
"""Answers and parts of answers up to this size are copied together into one write; larger parts are written alone."""


_CHUNKS_PER_TURN = 1_000
"""After a piece of a body with more chunks than this, some milliseconds of work, other connections have their turn."""

_DRAIN_LINGER_S = 0.5
"""How long a refused client has to read its answer once the server drains."""


def answer_head(status: int, fields: bytes, size: int, connection: bytes) -> bytes:
    """The head of an answer with a body of `size` bytes; `fields` and `connection` are whole header lines."""
    return _ANSWER_HEAD % (_STATUS_LINES[status], fields, size, connection)


class _State(Enum):
    HEAD = auto()
    BODY = auto()
    CHUNKED = auto()
    WORKING = auto()
    LINGER = auto()
    CLOSED = auto()


class Exchange:
    """One whole request, and the way to answer it.

    `body` is valid as long as it is referenced. `on_gone` is called once if the client leaves before the answer.
    `model`, `version` and `request_id` are for the access log: those of an inference, once they are known.
    """

    __slots__ = ("_connection", "body", "head", "model", "on_gone", "request_id", "version")

    def __init__(self, connection: "Connection", head: Head, body: Buffer) -> None:
        self._connection = connection
        self.head = head
        self.body = body
        self.on_gone: Callable[[], None] | None = None
        self.model = ""
        self.version = ""
        self.request_id = ""

    @property
    def is_open(self) -> bool:
        """Whether an answer is still wanted: none was given, and the client is there."""
        return self._connection.exchange is self

    def count(self, size: int) -> None:
        """So many bytes more are held for this request: they count with its body. UNAVAILABLE for too many."""
        self._connection.count(self, size)

    def respond(self, status: int, fields: bytes = b"", chunks: Sequence[Buffer] = ()) -> None:
        """Answer. `fields` are whole header lines; the body is `chunks` in order, referenced until it is sent.

        Only the first call has an effect, and none once the client is gone.
        """
        self._connection.answer(self, status, fields, chunks)

    def stream(self, status: int, fields: bytes = b"") -> "Stream":
        """Answer in parts, as the one answer that there is. Nothing is sent before the first part.

        The stream takes the place of the exchange, `on_gone` included.
        """
        return self._connection.begin(self, status, fields)

    def __repr__(self) -> str:
        return f"<Exchange {self.head.method.decode('latin-1')} {self.head.target.decode('latin-1')}>"


class Stream(Exchange):
    """An answer whose length nobody knows: a chunk per part, or to HTTP/1.0 until the connection closes.

    `on_room` is called each time that `has_room` has become true again. `failure` is why the answer ends as an error,
    for the access log: the status says that it began well.
    """

    __slots__ = ("_opening", "failure", "on_room", "status")

    def __init__(self, connection: "Connection", exchange: Exchange, opening: bytes, status: int) -> None:
        super().__init__(connection, exchange.head, b"")
        self.on_gone = exchange.on_gone
        self.model = exchange.model
        self.version = exchange.version
        self.request_id = exchange.request_id
        self.status = status
        self.failure = ""
        self.on_room: Callable[[], None] | None = None
        self._opening = opening

    @property
    def has_room(self) -> bool:
        """Whether the client takes what is sent; else it is better to wait than to send more."""
        return self._connection.has_room

    def send(self, part: Sequence[Buffer], *, is_last: bool = False) -> None:
        """Send a part, at once; its buffers are referenced until they are sent. Nothing happens once it has ended."""
        opening, self._opening = self._opening, b""
        self._connection.send_part(self, opening, part, is_last=is_last)

    def hold(self, size: int) -> None:
        """So many bytes wait elsewhere for room here: they count with what is unsent."""
        self._connection.hold(self, size)

    def respond(self, status: int, fields: bytes = b"", chunks: Sequence[Buffer] = ()) -> None:  # noqa: ARG002
        """It is too late for another answer: the client sees that this one is cut off."""
        self._connection.cut(self)


class Connection(asyncio.BufferedProtocol):
    """One client. Everything runs on the event loop's thread, in plain calls from the transport and from `answer`."""

    __slots__ = (
        "_backlog",
        "_backlog_at",
        "_began_at",
        "_body",
        "_chunked",
        "_discarded",
        "_filled",
        "_head",
        "_held",
        "_idle_requests",
        "_idle_since",
        "_linger_timer",
        "_listener",
        "_loop",
        "_peer",
        "_reading",
        "_requests",
        "_resting",
        "_state",
        "_streamed",
        "_transport",
        "_waiting",
        "_watched",
        "_watched_bytes",
        "_watched_since",
        "_write_left",
        "_write_paused",
        "_write_size",
        "_write_stalled_since",
        "exchange",
        "unsent",
    )

    def __init__(self, listener: "Listener", loop: asyncio.AbstractEventLoop) -> None:
        self._listener = listener
        self._loop = loop
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)  # Set before anything else is called.
        self._state = _State.HEAD
        self.exchange: Exchange | None = None
        # Bytes received and not used yet: a partial head, or what a client pipelined; valid from `_backlog_at` on.
        self._backlog: bytearray | None = None
        self._backlog_at = 0
        # The request being received: its head, and its body in one of the two forms.
        self._head: Head | None = None
        self._body = memoryview(b"")
        self._filled = 0
        self._held = 0
        self._chunked: ChunkedBody | None = None
        self._requests = 0
        # For the access log: who the client is, and when the head of its last request was there.
        self._peer: object = None
        self._began_at = 0.0
        self._reading = True
        self._resting = False
        self._write_paused = False
        self._discarded = 0
        self._linger_timer: asyncio.TimerHandle | None = None
        # What the sweep saw last: the phase it watches, since when, and how far it was.
        self._watched: tuple[_State, int] | None = None
        self._watched_since = 0.0
        self._watched_bytes = 0
        self._idle_since = 0.0
        self._idle_requests = -1
        self._write_size = 0
        self._write_left = 0
        self._write_stalled_since = 0.0
        # Of answers in parts: bytes that were written, and those that wait elsewhere for room here.
        self._streamed = 0
        self._waiting = 0
        # The part of the listener's `unsent_bytes` that waits here.
        self.unsent = 0

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._listener.limits.write_buffer_bytes)
        # Asked now, because a connection that is lost does not know it any more.
        self._peer = transport.get_extra_info("peername")
        self._listener.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- the reason changes nothing
        self._state = _State.CLOSED
        self._backlog = self._chunked = self._head = None
        self._body = memoryview(b"")
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._listener.forget(self)
        self._let_go()
        self._waiting = 0
        self._count_unsent(0)
        self._give_up()

    def eof_received(self) -> bool:
        """The client will send nothing more: by Triton's rule it has left, and what it asked for is cancelled."""
        self._state = _State.CLOSED
        self._give_up()
        return False  # The transport sends what is written and closes.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 -- we know better
        if self._state is _State.BODY:
            return self._body[self._filled :]
        return self._listener.view

    def buffer_updated(self, nbytes: int) -> None:
        try:
            state = self._state
            if state is _State.HEAD and self._backlog is None:
                self._read_head(self._listener.buffer, 0, nbytes)
            elif state is _State.BODY:
                self._filled += nbytes
                self._hold(nbytes)
                if self._filled == len(self._body):
                    self._take_body(self._body)
            elif state is _State.CHUNKED:
                self._read_chunks(self._listener.buffer, 0, nbytes)
            elif state is _State.LINGER:
                self._discarded += nbytes
                if self._discarded > self._listener.limits.linger_bytes:
                    self._close()
            elif state is not _State.CLOSED:
                self._keep(self._listener.buffer, 0, nbytes)
                if state is _State.HEAD:
                    self._read_backlog()
        except Refusal as refusal:
            self._refuse(refusal.status, refusal.message)
        except Exception as error:  # noqa: BLE001 -- a fault of ours must not leave the client without an answer
            self._listener.crashed("receiving a request", error)
            self._refuse(500, INTERNAL_ERROR)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._update_reading()
        self._count_unsent(self._transport.get_write_buffer_size())
        self._shed()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._count_unsent(0)  # What is left is little, and the sweep finds it if it stays.
        self._update_reading()
        self._schedule_backlog()
        stream = self.exchange
        if not isinstance(stream, Stream) or stream.on_room is None:
            return
        try:
            stream.on_room()
        except Exception as error:  # noqa: BLE001 -- a fault of ours must not leave the client waiting
            self._listener.fail(stream, error)

    # Receiving.

    def _read_head(self, data: bytearray, at: int, end: int) -> None:
        """Take one request from `data`, or as much of it as is there; keep what comes after it for later."""
        while data.startswith(b"\r\n", at, end):
            at += 2  # Some clients end a body with a line of its own.
        listener = self._listener
        stop = find_head(data, at, end, listener.limits)
        if not stop:
            self._keep(data, at, end)
            return
        self._began_at = monotonic()
        head = listener.heads.read(memoryview(data)[at:stop])
        self._requests += 1
        length = head.content_length
        if length == 0:
            self._keep(data, stop, end)
            self._work(Exchange(self, head, b""))
            return
        if length is None:
            self._meet_expectation(head, is_body_here=stop < end)
            self._head = head
            self._chunked = ChunkedBody(head, listener.max_body, listener.limits)
            self._state = _State.CHUNKED
            self._backlog = None
            self._read_chunks(data, stop, end)
            return
        if length > listener.max_body:
            self._head = head
            raise body_too_large(head, length, listener.max_body)
        here = end - stop
        if here >= length:
            body = bytes(data[stop : stop + length])
            self._keep(data, stop + length, end)
            self._work(Exchange(self, head, body))
            return
        self._meet_expectation(head, is_body_here=here > 0)
        self._head = head
        # Memory from numpy is not touched before data arrives: an announced length alone costs no memory.
        self._body = np.empty(length, dtype=np.uint8).data
        self._body[:here] = memoryview(data)[stop:end]
        self._filled = here
        self._hold(here)
        self._backlog = None
        self._state = _State.BODY

    def _meet_expectation(self, head: Head, is_body_here: bool) -> None:
        """Tell a client that waits for it to send its body."""
        if not is_body_here and head.headers.get(b"expect"):
            self._transport.write(_CONTINUE)

    def _read_chunks(self, data: bytearray, at: int, end: int) -> None:
        chunked = cast("ChunkedBody", self._chunked)
        size, chunks = len(chunked.body), chunked.chunks
        at = chunked.feed(data, at, end)
        self._hold(len(chunked.body) - size)
        if chunked.chunks - chunks > _CHUNKS_PER_TURN:
            self._rest()
        if chunked.is_complete:
            self._chunked = None
            self._keep(data, at, end)
            self._take_body(chunked.body)

    def _rest(self) -> None:
        """Read on in the next loop turn; a transport would go on at once for as long as something is there."""
        self._resting = True
        self._update_reading()
        self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._resting = False
        self._update_reading()

    def _hold(self, size: int) -> None:
        """Count body bytes that came, and refuse the request that brings too many. Small bodies are not counted."""
        if not self._can_hold(size):
            raise Refusal(503, _NO_ROOM)

    def _can_hold(self, size: int) -> bool:
        """Count bytes that are held for the request, and say whether all connections hold no more than they may."""
        self._held += size
        self._listener.held_bytes += size
        return self._listener.held_bytes <= self._listener.limits.max_held_bytes

    def _let_go(self) -> None:
        self._listener.held_bytes -= self._held
        self._held = 0

    def _take_body(self, body: Buffer) -> None:
        head = cast("Head", self._head)
        self._head = None
        self._body = memoryview(b"")
        self._work(Exchange(self, head, body))

    def _keep(self, data: bytearray, at: int, end: int) -> None:
        """Make `data[at:end]` the backlog, or its continuation when `data` is the listener's buffer."""
        backlog = self._backlog
        if data is backlog:
            self._backlog_at = at
            if at == end:
                self._backlog = None
        elif at == end:
            return
        elif backlog is None:
            self._backlog = data[at:end]
            self._backlog_at = 0
        else:
            if self._backlog_at:
                del backlog[: self._backlog_at]
                self._backlog_at = 0
            backlog += memoryview(data)[at:end]
        self._update_reading()

    def _schedule_backlog(self) -> None:
        """Go on with pipelined input in the next loop turn: one request per turn, so that nobody else waits long."""
        if self._backlog is not None and self._state is _State.HEAD and not self._write_paused:
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        try:
            self._read_backlog()
        except Refusal as refusal:
            self._refuse(refusal.status, refusal.message)
        except Exception as error:  # noqa: BLE001 -- as in buffer_updated
            self._listener.crashed("receiving a request", error)
            self._refuse(500, INTERNAL_ERROR)

    def _read_backlog(self) -> None:
        if self._backlog is not None and self._state is _State.HEAD and not self._write_paused:
            self._read_head(self._backlog, self._backlog_at, len(self._backlog))
            self._update_reading()

    def _update_reading(self) -> None:
        """Read unless too much is unused or unsent, or others come first."""
        waiting = 0 if self._backlog is None else len(self._backlog) - self._backlog_at
        wanted = not (self._write_paused or self._resting) and waiting <= self._listener.limits.pipelined_bytes
        if wanted == self._reading or self._transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # Answering.

    def _work(self, exchange: Exchange) -> None:
        self._state = _State.WORKING
        self.exchange = exchange
        try:
            self._listener.handle(exchange)
        except Exception as error:  # noqa: BLE001 -- whatever it was, the client gets an answer
            self._listener.fail(exchange, error)

    def answer(self, exchange: Exchange, status: int, fields: bytes, chunks: Sequence[Buffer]) -> None:
        """Send the answer to `exchange` if it is the one in work."""
        if self.exchange is not exchange:
            return
        self.exchange = None
        if self._held:
            self._let_go()
        if status >= self._listener.noted_from:
            self._note(exchange, status, chunks=chunks)
        head = exchange.head
        connection = CLOSE if self._listener.is_draining else head.connection
        self._send(status, fields, chunks, connection, is_body_sent=head.method != b"HEAD")
        if connection is CLOSE:
            self._close()
            return
        self._state = _State.HEAD
        if self._backlog is not None:
            self._schedule_backlog()

    def count(self, exchange: Exchange, size: int) -> None:
        """Count bytes that are made of the body of `exchange`. UNAVAILABLE where they are too many."""
        if self.exchange is exchange and not self._can_hold(size):
            raise InferenceError(ErrorCode.UNAVAILABLE, _NO_ROOM)

    @property
    def has_room(self) -> bool:
        return not self._write_paused

    def begin(self, exchange: Exchange, status: int, fields: bytes) -> Stream:
        """A stream in the place of `exchange`; one that has ended where that is not in work any more."""
        head = exchange.head
        closes = self._listener.is_draining or not head.takes_chunks
        connection = CLOSE if closes else head.connection
        coding = _CHUNKED if head.takes_chunks else b""
        stream = Stream(self, exchange, _STREAM_HEAD % (_STATUS_LINES[status], fields, coding, connection), status)
        if self.exchange is exchange:
            self.exchange = stream
        return stream

    def send_part(self, stream: Stream, opening: bytes, part: Sequence[Buffer], *, is_last: bool) -> None:
        """Send what opens the answer (or nothing), a part of it and, if it is the last one, what ends it."""
        if self.exchange is not stream:
            return
        size = sum(map(len, part))
        is_chunked = stream.head.takes_chunks
        before, after = opening, b""
        if is_chunked and size:
            before, after = b"%b%x\r\n" % (opening, size), b"\r\n"
        if is_chunked and is_last:
            after += _LAST_CHUNK
        self._streamed += len(before) + size + len(after)
        if is_last:
            self._waiting = 0
            self.exchange = None
            self._let_go()
            if stream.failure or stream.status >= self._listener.noted_from:
                self._note(stream, stream.status, failure=stream.failure)
        if not self._transport.is_closing():
            self._write_large(before, (*part, after))
        if not is_last:
            return
        if not is_chunked or self._listener.is_draining or stream.head.connection is CLOSE:
            self._close()
            return
        self._state = _State.HEAD
        self._schedule_backlog()

    def hold(self, stream: Stream, size: int) -> None:
        """Count bytes that wait for room here with those that are unsent."""
        if self.exchange is not stream or size == self._waiting:
            return
        self._waiting = size
        self._count_unsent(self._transport.get_write_buffer_size())
        self._shed()

    def cut(self, stream: Stream) -> None:
        """End an answer so that its client cannot take it for whole."""
        if self.exchange is stream:
            self.abort()

    def _send(
        self, status: int, fields: bytes, chunks: Sequence[Buffer], connection: bytes, is_body_sent: bool = True
    ) -> None:
        if self._transport.is_closing():
            return  # A write failed, and the transport is about to say so.
        size = sum(map(len, chunks))
        head = _ANSWER_HEAD % (_STATUS_LINES[status], fields, size, connection)
        if not is_body_sent:
            self._transport.write(head)
        elif size <= _JOIN_BELOW:
            self._transport.write(b"".join((head, *chunks)))
        else:
            self._write_large(head, chunks)

    def _write_large(self, head: bytes, chunks: Sequence[Buffer]) -> None:
        """Send in one call, because each is a packet and wakes the client; what is large is not joined."""
        parts: list[Buffer] = []
        small: list[Buffer] = [head]
        for chunk in chunks:
            if len(chunk) <= _JOIN_BELOW:
                small.append(chunk)
                continue
            if small:
                parts.append(b"".join(small))
                small = []
            parts.append(chunk)
        if small:
            parts.append(b"".join(small))
        self._transport.writelines(parts)

    def _refuse(self, status: int, message: str) -> None:
        """Answer, send our end of file, and discard what still comes: closing at once would reset the answer away."""
        if self._state is _State.CLOSED:
            return
        head = self._head if self.exchange is None else self.exchange.head
        self._listener.note(head, status, self._seconds() if head is not None else None, self._peer, failure=message)
        self.exchange = self._backlog = self._chunked = self._head = None
        self._body = memoryview(b"")
        self._let_go()
        self._state = _State.LINGER
        fields = JSON + RETRY_LATER if status == 503 else JSON
        self._send(status, fields, (error_json(message),), CLOSE)
        self._update_reading()
        if not self._transport.is_closing():
            self._transport.write_eof()
        self._linger(_DRAIN_LINGER_S if self._listener.is_draining else self._listener.limits.linger_s)

    def _linger(self, seconds: float) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._linger_timer = self._loop.call_later(seconds, self._transport.abort)

    def _close(self) -> None:
        """Close as soon as what was written is sent."""
        self._state = _State.CLOSED
        self._backlog = None
        self._transport.close()

    def _give_up(self) -> None:
        """The client is gone: whoever works for it is told."""
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        self._note(exchange, CLIENT_LEFT, failure="the connection ended before the whole answer was sent")
        if exchange.on_gone is None:
            return
        try:
            exchange.on_gone()
        except Exception as error:  # noqa: BLE001 -- nobody is left to be told
            self._listener.crashed(repr(exchange), error)

    def _note(self, exchange: Exchange, status: int, *, failure: str = "", chunks: Sequence[Buffer] = ()) -> None:
        """Report an exchange that ended to the access log."""
        self._listener.note(
            exchange.head,
            status,
            self._seconds(),
            self._peer,
            model=exchange.model,
            version=exchange.version,
            request_id=exchange.request_id,
            failure=failure,
            chunks=chunks,
        )

    def _seconds(self) -> float:
        return monotonic() - self._began_at

    # The listener's calls.

    def close_if_idle(self) -> None:
        """Close unless a request is being received or in work; its answer will say `Connection: close`."""
        if self._state is _State.HEAD and self._backlog is None:
            self._close()
        elif self._state is _State.LINGER:
            self._linger(_DRAIN_LINGER_S)

    def close_if_idle_since(self, then: float) -> None:
        """Close if nothing was asked for since `then`, as far as the sweeps saw."""
        if self._idle_since <= then:
            self.close_if_idle()

    def abort(self) -> None:
        """Close now, whatever is unsent."""
        self._waiting = 0
        self._count_unsent(0)
        self._transport.abort()

    def stall_order(self) -> tuple[bool, float]:
        """Sorts connections by when their clients last took something; those that the sweep has not seen come last."""
        return self._write_size == 0, self._write_stalled_since

    def _count_unsent(self, size: int) -> None:
        size += self._waiting
        self._listener.unsent_bytes += size - self.unsent
        self.unsent = size

    def _shed(self) -> None:
        if self._listener.unsent_bytes > self._listener.limits.max_unsent_bytes:
            self._listener.shed()

    def sweep(self, now: float) -> None:
        """Enforce the time limits; called every `Limits.sweep_s`, so that no request sets a timer of its own."""
        self._sweep_writing(now)
        state = self._state
        if state is not _State.HEAD or self._requests != self._idle_requests:
            self._idle_since, self._idle_requests = now, self._requests
        is_receiving = (state is _State.HEAD and self._backlog is not None) or state in {_State.BODY, _State.CHUNKED}
        if not is_receiving or not self._reading:
            self._watched = None
            return
        received = self._filled if self._chunked is None else len(self._chunked.body)
        # A head counts with the requests before it, a body with its own.
        watched = (state, self._requests)
        if watched != self._watched:
            self._watched, self._watched_since, self._watched_bytes = watched, now, received
            return
        limits = self._listener.limits
        waited = now - self._watched_since
        if state is _State.HEAD:
            if waited >= limits.head_timeout_s:
                self._refuse(408, f"the request's headers were not complete after {limits.head_timeout_s:g} s")
        elif waited >= limits.body_progress_s:
            is_scarce = self._listener.held_bytes > limits.max_held_bytes // 2
            wanted = limits.scarce_progress_bytes if is_scarce else limits.body_progress_bytes
            if received - self._watched_bytes < wanted:
                self._refuse(
                    408,
                    f"the request's body brought less than {wanted} bytes in {limits.body_progress_s:g} s",
                )
            self._watched_since, self._watched_bytes = now, received

    def _sweep_writing(self, now: float) -> None:
        size = self._transport.get_write_buffer_size()
        # What a stream adds meanwhile does not hide that its client takes something.
        left = size - self._streamed
        if size == 0 or left < self._write_left or self._write_size == 0:
            self._write_stalled_since = now
        elif now - self._write_stalled_since >= self._listener.limits.write_timeout_s:
            self.abort()
            return
        self._write_size, self._write_left = size, left
        if size + self._waiting != self.unsent:
            self._count_unsent(size)
