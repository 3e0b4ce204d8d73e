"""The sending half of an HTTP/1.1 connection, sans I/O: answers in, bytes to write out.

A method that returns parts returns what the caller writes at once, in order, with one write per part.
`NEXT` is the table of states and events:

    OPEN    an answer may follow, one at a time
    PARTS   an answer in parts has begun, and others may follow it
    LAST    an answer in parts has begun, and its head says that the connection closes
    ENDED   nothing more is written; the connection closes when all is sent
"""

from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum, auto
from http import HTTPStatus

from halimede.core.types import Buffer
from halimede.core.wire.http_control import error_json
from halimede.frontends.http.framing import CLOSE, Head
from halimede.frontends.http.shared import Shared

JSON = b"Content-Type: application/json\r\n"
RETRY_LATER = b"Retry-After: 1\r\n"
PLAIN_TEXT = b"Content-Type: text/plain; charset=utf-8\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

DRAIN_LINGER_S = 0.5
"""How long a refused client has to read its answer once the server drains."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_ANSWER_HEAD = b"%b%bContent-Length: %d\r\n%b\r\n"
_STREAM_HEAD = b"%b%b%b%b\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_JOIN_BELOW = 16 << 10
"""Answers and parts of answers up to this size are copied together into one write; larger parts are written alone."""


class OutboxState(IntEnum):
    """An integer, because it hashes without a Python call."""

    OPEN = auto()
    PARTS = auto()
    LAST = auto()
    ENDED = auto()


class OutboxEvent(Enum):
    """What is written, or happens to the connection."""

    ANSWER = auto()
    LAST_ANSWER = auto()
    """A whole answer with `Connection: close`."""
    OPENING = auto()
    LAST_OPENING = auto()
    """The head of an answer in parts, with `Connection: close`."""
    END_OF_PARTS = auto()
    """The end of an answer in parts."""
    END_OF_DRAINED_PARTS = auto()
    """The end of an answer in parts; a drain began meanwhile."""
    LOST = auto()
    """The connection is closed."""


OPEN, PARTS, LAST, ENDED = OutboxState

NEXT: Mapping[OutboxEvent, Mapping[OutboxState, OutboxState]] = {
    OutboxEvent.ANSWER: {OPEN: OPEN},
    OutboxEvent.LAST_ANSWER: {OPEN: ENDED},
    OutboxEvent.OPENING: {OPEN: PARTS},
    OutboxEvent.LAST_OPENING: {OPEN: LAST},
    OutboxEvent.END_OF_PARTS: {PARTS: OPEN, LAST: ENDED},
    OutboxEvent.END_OF_DRAINED_PARTS: {PARTS: ENDED, LAST: ENDED},
    OutboxEvent.LOST: dict.fromkeys(OutboxState, ENDED),
}
# The usual row.
_ON_ANSWER = NEXT[OutboxEvent.ANSWER]


def answer_head(status: int, fields: bytes, size: int, connection: bytes) -> bytes:
    """The head of an answer with a body of `size` bytes; `fields` and `connection` are whole header lines."""
    return _ANSWER_HEAD % (_STATUS_LINES[status], fields, size, connection)


class Outbox:
    """One client's answers. Counts their unsent bytes, also in the total of all connections.

    `streamed` is the total number of bytes written of answers in parts. `unsent_bytes` is the count of the last
    `count_unsent`.
    """

    __slots__ = ("_shared", "_waiting", "state", "streamed", "unsent_bytes")

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.state = OPEN
        self.streamed = 0
        self.unsent_bytes = 0
        # Bytes that wait elsewhere for room here.
        self._waiting = 0

    # Whole answers.

    def answer(self, head: Head, status: int, fields: bytes, chunks: Sequence[Buffer]) -> Sequence[Buffer]:
        """The answer to the request of `head`. It closes the connection if the client or the listener wants that."""
        connection = CLOSE if self._shared.is_leaving else head.connection
        self.state = (NEXT[OutboxEvent.LAST_ANSWER] if connection is CLOSE else _ON_ANSWER)[self.state]
        if self._shared.cors is not None:
            fields += self._shared.cors.fields(head)
        size = 0
        for chunk in chunks:
            size += len(chunk)
        opening = _ANSWER_HEAD % (_STATUS_LINES[status], fields, size, connection)
        if head.method == b"HEAD":
            return (opening,)
        return (b"".join((opening, *chunks)),) if size <= _JOIN_BELOW else _joined(opening, chunks)

    def refusal(self, head: Head | None, status: int, message: str) -> Sequence[Buffer]:
        """The last answer, to a request that is refused; `head` is None if it could not be read."""
        self.state = NEXT[OutboxEvent.LAST_ANSWER][self.state]
        body = error_json(message)
        fields = JSON + RETRY_LATER if status == 503 else JSON
        if self._shared.cors is not None and head is not None:
            fields += self._shared.cors.fields(head)
        return (answer_head(status, fields, len(body), CLOSE) + body,)

    def linger_s(self) -> float:
        """How long a refused client has to read its answer."""
        return DRAIN_LINGER_S if self._shared.is_draining else self._shared.limits.linger_s

    # Answers in parts.

    def open_parts(self, head: Head, status: int, fields: bytes) -> bytes:
        """Begin an answer of unknown length. Its head is sent with its first part."""
        is_last = self._shared.is_leaving or not head.takes_chunks
        connection = CLOSE if is_last else head.connection
        self.state = NEXT[OutboxEvent.LAST_OPENING if connection is CLOSE else OutboxEvent.OPENING][self.state]
        if self._shared.cors is not None:
            fields += self._shared.cors.fields(head)
        return _STREAM_HEAD % (_STATUS_LINES[status], fields, _CHUNKED if head.takes_chunks else b"", connection)

    def part(self, head: Head, opening: bytes, part: Sequence[Buffer], *, is_last: bool) -> Sequence[Buffer]:
        """The head of the answer (or nothing), a part of it, and its end if this is the last part."""
        size = sum(map(len, part))
        before, after = opening, b""
        if head.takes_chunks:
            if size:
                before, after = b"%b%x\r\n" % (opening, size), b"\r\n"
            if is_last:
                after += _LAST_CHUNK
        self.streamed += len(before) + size + len(after)
        if is_last:
            self._waiting = 0
            end = OutboxEvent.END_OF_DRAINED_PARTS if self._shared.is_draining else OutboxEvent.END_OF_PARTS
            self.state = NEXT[end][self.state]
        return _joined(before, (*part, after))

    # What is unsent.

    def hold(self, size: int, written: int) -> bool:
        """Count `size` bytes that wait elsewhere with the `written` unsent ones. Returns whether the count changed."""
        if size == self._waiting:
            return False
        self._waiting = size
        self.count_unsent(written)
        return True

    def count_unsent(self, written: int) -> None:
        """Count the bytes that are written and unsent, and those that wait."""
        size = written + self._waiting
        self._shared.unsent_bytes += size - self.unsent_bytes
        self.unsent_bytes = size

    def drop(self) -> None:
        """Forget the unsent bytes: they will not be sent."""
        self._waiting = 0
        self.count_unsent(0)

    def lose(self) -> None:
        """The connection is gone."""
        self.state = NEXT[OutboxEvent.LOST][self.state]
        self.drop()


def _joined(head: bytes, chunks: Sequence[Buffer]) -> Sequence[Buffer]:
    """As few parts as possible, because each is a packet and wakes the client. Large parts are not joined."""
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
    return parts
