"""The receiving half of an HTTP/1.1 connection, sans I/O: bytes in, events out.

The caller receives into `room()`, calls `received`, and gets an event, or None while more bytes are needed. One request
is processed at a time: bytes that a client sends after it are kept and not parsed until `answered`; then `go_on` reads
the next request from them. `NEXT` is the table of states and events:

    HEAD     a head is awaited, or incomplete
    BODY     a body of known length is received into its final buffer
    CHUNKED  a chunked body is decoded as it arrives
    WORKING  a request is complete, its answer is not
    LINGER   refused and answered; input is discarded
    CLOSED   nothing more is read

No result depends on how the bytes are cut into pieces. Time is an argument: `now`, in seconds of a monotonic clock.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum, auto
from typing import cast

import numpy as np

from halimede.core.types import Buffer
from halimede.frontends.http.framing import ChunkedBody, Head, Refusal, body_too_large, find_head
from halimede.frontends.http.shared import Shared

NO_ROOM = "the server holds as many bytes of request bodies as it can, try again later"

CHUNKS_OF_A_CALL = 256
"""So many chunks of a body cost as much as a call. After a piece of a body with more of them, which may take some
milliseconds, the connection waits for its turn."""


class ReceiverState(IntEnum):
    """An integer, because it hashes without a Python call."""

    HEAD = auto()
    BODY = auto()
    CHUNKED = auto()
    WORKING = auto()
    LINGER = auto()
    CLOSED = auto()


class ReceiverEvent(Enum):
    """Events that change a receiver's state. `received` and `go_on` return the first four."""

    BODY_BEGINS = auto()
    CHUNKS_BEGIN = auto()
    REQUEST = auto()
    """A request is complete."""
    ENDED = auto()
    """The connection is to be closed, or the client sends nothing more."""
    ANSWERED = auto()
    """The answer is complete, and the connection stays."""
    REFUSED = auto()


# Module names, because an attribute of an Enum costs a call.
HEAD, BODY, CHUNKED, WORKING, LINGER, CLOSED = ReceiverState
REQUEST, ENDED = ReceiverEvent.REQUEST, ReceiverEvent.ENDED

NEXT: Mapping[ReceiverEvent, Mapping[ReceiverState, ReceiverState]] = {
    ReceiverEvent.BODY_BEGINS: {HEAD: BODY},
    ReceiverEvent.CHUNKS_BEGIN: {HEAD: CHUNKED},
    ReceiverEvent.REQUEST: {HEAD: WORKING, BODY: WORKING, CHUNKED: WORKING},
    ReceiverEvent.ANSWERED: {WORKING: HEAD},
    ReceiverEvent.REFUSED: {HEAD: LINGER, BODY: LINGER, CHUNKED: LINGER, WORKING: LINGER},
    ReceiverEvent.ENDED: dict.fromkeys(ReceiverState, CLOSED),
}
# The rows of every request.
_ON_REQUEST, _ON_ANSWERED = NEXT[ReceiverEvent.REQUEST], NEXT[ReceiverEvent.ANSWERED]
_NO_BODY = memoryview(b"")


class Receiver:
    """One client's requests. A wrong request raises a `Refusal`, which the caller answers; then it calls `refuse`.

    `head` is the head of the current request, None without one. It was complete at `began_at`. `requests` is
    the number of heads so far. `awaits_continue` is whether the client of the body that has just
    begun waits for `100 Continue`. `backlog` has the received bytes that are not used yet: a partial head, or
    pipelined requests; None if there are none. While `is_held_back`, which the caller sets, no further request begins.
    While `awaits_turn`, other connections come first: no head and no chunk is read. The caller ends it, and may begin
    it. The last piece of a chunked body cost as much as `chunk_calls`.
    """

    __slots__ = (
        "_backlog_at",
        "_body",
        "_chunked",
        "_discardable",
        "_discarded",
        "_filled",
        "_held",
        "_kept",
        "_shared",
        "awaits_continue",
        "awaits_turn",
        "backlog",
        "began_at",
        "chunk_calls",
        "head",
        "is_held_back",
        "requests",
        "state",
    )

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.state = HEAD
        self.head: Head | None = None
        self.began_at = 0.0
        self.requests = 0
        self.awaits_continue = False
        self.is_held_back = False
        self.awaits_turn = False
        self.chunk_calls = 0
        # The body: of announced length with `_filled` bytes so far, or chunked.
        self._body: Buffer = _NO_BODY
        self._filled = 0
        self._chunked: ChunkedBody | None = None
        # The bytes that this request has taken from the account, and those that the backlog has.
        self._held = 0
        self._kept = 0
        # Valid from `_backlog_at` on.
        self.backlog: bytearray | None = None
        self._backlog_at = 0
        self._discarded = 0
        self._discardable = 0

    # Bytes in.

    def room(self) -> memoryview:
        """The memory to receive into; never empty."""
        if self.state is BODY:
            return memoryview(self._body)[self._filled :]
        if self.state is WORKING:
            # It is kept until the answer, which may take long. It cannot be refused, so it must be little.
            return self._shared.view[: self._shared.limits.pipelined_bytes]
        return self._shared.view

    def received(self, size: int, now: float) -> ReceiverEvent | None:
        """Process the first `size` bytes of `room()`."""
        state = self.state
        if state is HEAD:
            if self.backlog is None and not self.is_held_back and not self.awaits_turn:
                return self._read_head(self._shared.buffer, 0, size, now)
            self._keep(self._shared.buffer, 0, size)
            return self.go_on(now)
        if state is BODY:
            self._filled += size
            self._hold(size)
            return self._complete() if self._filled == len(self._body) else None
        if state is CHUNKED:
            if not self.awaits_turn:
                return self._read_chunks(self._shared.buffer, 0, size)
            self._keep(self._shared.buffer, 0, size)
            return None
        if state is WORKING:
            self._keep(self._shared.buffer, 0, size)
        elif state is LINGER:
            self._discarded += size
            if self._discarded > self._discardable:
                return self.end()
        return None

    def go_on(self, now: float) -> ReceiverEvent | None:
        """Read one request, or the available part of it, from the kept bytes; or a piece of a chunked body."""
        backlog = self.backlog
        if not self.can_go_on or backlog is None:
            return None
        if self.state is CHUNKED:
            self.backlog = None
            self._count_kept()
            return self._read_chunks(backlog, self._backlog_at, len(backlog))
        return self._read_head(backlog, self._backlog_at, len(backlog), now)

    @property
    def can_go_on(self) -> bool:
        """Whether there are kept bytes, and the next request may begin, or its chunked body may go on."""
        if self.backlog is None or self.is_held_back or self.awaits_turn:
            return False
        return self.state is HEAD or self.state is CHUNKED

    @property
    def is_full(self) -> bool:
        """Whether the caller should not receive now."""
        if self.is_held_back or self.awaits_turn:
            return True
        return self.state is WORKING and self.kept_bytes > self._shared.limits.pipelined_bytes

    @property
    def kept_bytes(self) -> int:
        """Number of received bytes that are not used yet."""
        return 0 if self.backlog is None else len(self.backlog) - self._backlog_at

    @property
    def is_idle(self) -> bool:
        """Whether no request is current."""
        return self.state is HEAD and self.backlog is None

    @property
    def is_discarding(self) -> bool:
        return self.state is LINGER

    @property
    def can_be_refused(self) -> bool:
        """Whether nothing was refused, and the client is connected."""
        return self.state in NEXT[ReceiverEvent.REFUSED]

    @property
    def is_receiving(self) -> bool:
        """Whether a request has begun and is incomplete."""
        state = self.state
        return (state is HEAD and self.backlog is not None) or state is BODY or state is CHUNKED

    @property
    def body_bytes(self) -> int:
        """Number of body bytes received so far."""
        return self._filled if self._chunked is None else len(self._chunked.body)

    # What the caller does with it.

    def take_body(self) -> Buffer:
        """The body of the complete request. It is not kept here: it is valid as long as it is referenced."""
        body, self._body = self._body, _NO_BODY
        return body

    def can_hold(self, size: int) -> bool:
        """Count bytes that are held for the request. Returns whether all connections are within their limit."""
        self._held += size
        return self._shared.wire.take(size)

    def answered(self) -> bool:
        """The answer is complete: the next request may begin. Returns whether to `go_on`."""
        self.state = _ON_ANSWERED[self.state]
        self.head = None
        if self._held:
            self._release_held()
        return self.backlog is not None and not self.is_held_back

    def refuse(self) -> None:
        """The request was refused: the rest of its body and `linger_bytes` more are discarded.

        A client that was accepted, and then refused for lack of room, may send all of its body before it reads.
        """
        left = len(self._body) - self._filled if self.state is BODY else 0
        self._discardable = left + self._shared.limits.linger_bytes
        self.awaits_turn = False
        self.state = NEXT[ReceiverEvent.REFUSED][self.state]
        self._drop()

    def end(self) -> ReceiverEvent:
        """Read nothing more."""
        self.state = NEXT[ReceiverEvent.ENDED][self.state]
        self._drop()
        return ReceiverEvent.ENDED

    def _drop(self) -> None:
        self.head = self.backlog = self._chunked = None
        self._body = _NO_BODY
        self._release_held()
        self._count_kept()

    def _release_held(self) -> None:
        self._shared.wire.give_back(self._held)
        self._held = 0

    # Requests.

    def _read_head(self, data: bytearray, at: int, end: int, now: float) -> ReceiverEvent | None:
        """Read one request from `data`, or the available part of it, and keep what comes after it."""
        while data.startswith(b"\r\n", at, end):
            at += 2  # Some clients send an empty line after a body.
        shared = self._shared
        stop = find_head(data, at, end, shared.limits)
        if not stop:
            self._keep(data, at, end)
            return None
        self.began_at = now
        head = self.head = shared.heads.read(memoryview(data)[at:stop])
        self.requests += 1
        length = head.content_length
        if length is None:
            self.awaits_continue = stop == end and bool(head.headers.get(b"expect"))
            self._chunked = ChunkedBody(head, shared.max_body, shared.limits)
            self.state = NEXT[ReceiverEvent.CHUNKS_BEGIN][self.state]
            self.backlog = None
            self._count_kept()
            return self._read_chunks(data, stop, end) or ReceiverEvent.CHUNKS_BEGIN
        if length > shared.max_body:
            raise body_too_large(head, length, shared.max_body)
        here = end - stop
        if here >= length:
            if length:
                self._body = bytes(data[stop : stop + length])
            if here > length or data is self.backlog:
                self._keep(data, stop + length, end)
            self.state = _ON_REQUEST[self.state]
            return REQUEST
        # Memory from numpy is not touched before data arrives: an announced length alone uses no memory.
        body = np.empty(length, dtype=np.uint8).data
        body[:here] = memoryview(data)[stop:end]
        self._body = body
        self._filled = here
        self.backlog = None
        self._count_kept()
        self.awaits_continue = not here and bool(head.headers.get(b"expect"))
        self.state = NEXT[ReceiverEvent.BODY_BEGINS][self.state]
        most = shared.wire.limit_bytes
        if length > most:
            raise Refusal(503, f"a body of {length} bytes does not fit into the {most} that the server may hold")
        self._hold(here)
        return ReceiverEvent.BODY_BEGINS

    def _read_chunks(self, data: bytearray, at: int, end: int) -> ReceiverEvent | None:
        chunked = cast("ChunkedBody", self._chunked)
        size, chunks = len(chunked.body), chunked.chunks
        at = chunked.feed(data, at, end)
        self._hold(len(chunked.body) - size)
        self.chunk_calls = (chunked.chunks - chunks) // CHUNKS_OF_A_CALL
        if self.chunk_calls:
            self.awaits_turn = True
        if not chunked.is_complete:
            return None
        self._chunked = None
        self._keep(data, at, end)
        self._body = chunked.body
        return self._complete()

    def _complete(self) -> ReceiverEvent:
        self.state = _ON_REQUEST[self.state]
        return REQUEST

    def _hold(self, size: int) -> None:
        """Count received body bytes. Refuses a request that brings too many. Small bodies are not counted."""
        if not self.can_hold(size):
            raise Refusal(503, NO_ROOM)

    def _keep(self, data: bytearray, at: int, end: int) -> None:
        """Make `data[at:end]` the backlog, or its continuation when `data` is the shared buffer. Refuses the request
        that is to begin when too much is held."""
        backlog = self.backlog
        if data is backlog:
            self._backlog_at = at
            if at == end:
                self.backlog = None
        elif at == end:
            return
        elif backlog is None:
            self.backlog = data[at:end]
            self._backlog_at = 0
        else:
            if self._backlog_at:
                del backlog[: self._backlog_at]
                self._backlog_at = 0
            backlog += memoryview(data)[at:end]
        if not self._count_kept() and self.state is not WORKING:
            raise Refusal(503, NO_ROOM)

    def _count_kept(self) -> bool:
        """Count the backlog as it is now. Returns whether all connections are within their limit."""
        more = (0 if self.backlog is None else len(self.backlog)) - self._kept
        self._kept += more
        if more > 0:
            return self._shared.wire.take(more)
        if more:
            self._shared.wire.give_back(-more)
        return True
