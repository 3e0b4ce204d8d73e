"""The states of a server's streams (RFC 9113 section 5.1), and one stream's record.

    idle                 its number is above all numbers that the client has used
    OPEN                 both sides may send
    HALF_CLOSED_REMOTE   the client has sent END_STREAM
    HALF_CLOSED_LOCAL    the server has sent END_STREAM
    CLOSED               nothing more is sent; the record is dropped

Idle and closed streams have no record. Whether a late frame of a closed stream is a fault of the client depends on why
it closed: `Closed` is the reason, and it is kept for the streams that closed last.
"""

from collections import deque
from collections.abc import Mapping
from enum import Enum, IntEnum, auto
from typing import Generic, TypeVar

from halimede.core.types import Buffer

C = TypeVar("C")


class StreamState(IntEnum):
    """An integer, because it hashes without a Python call."""

    OPEN = auto()
    HALF_CLOSED_REMOTE = auto()
    HALF_CLOSED_LOCAL = auto()
    CLOSED = auto()


class StreamEvent(Enum):
    RECEIVED_END = auto()
    SENT_END = auto()
    RESET = auto()
    """RST_STREAM was sent or received, or the connection has ended."""


class Closed(Enum):
    """Why a stream is closed."""

    ENDED = auto()
    """Both sides have sent END_STREAM. Further frames are an error (STREAM_CLOSED)."""
    RESET_BY_CLIENT = auto()
    """As ENDED."""
    RESET_BY_SERVER = auto()
    """The client may not know yet: its frames are ignored."""


OPEN, HALF_CLOSED_REMOTE, HALF_CLOSED_LOCAL, CLOSED = StreamState

NEXT: Mapping[StreamEvent, Mapping[StreamState, StreamState]] = {
    StreamEvent.RECEIVED_END: {OPEN: HALF_CLOSED_REMOTE, HALF_CLOSED_LOCAL: CLOSED},
    StreamEvent.SENT_END: {OPEN: HALF_CLOSED_LOCAL, HALF_CLOSED_REMOTE: CLOSED},
    StreamEvent.RESET: dict.fromkeys(StreamState, CLOSED),
}
# The rows of every request.
ON_RECEIVED_END, ON_SENT_END = NEXT[StreamEvent.RECEIVED_END], NEXT[StreamEvent.SENT_END]


class Stream(Generic[C]):
    """One stream. `call` belongs to the application.

    `send_window` and `receive_window` are the bytes that the server and the client may still send. `uncredited` are the
    received bytes for which the client has not got credit. `unsent` has the parts of DATA that wait for a window, and
    `trailers` the block that follows them, which may be empty. `sent_bytes` counts DATA. `unreceived` is how much of
    the request's content-length has not arrived, None without one.
    """

    __slots__ = (
        "call",
        "id",
        "receive_window",
        "send_window",
        "sent_bytes",
        "state",
        "trailers",
        "uncredited",
        "unreceived",
        "unsent",
        "unsent_bytes",
    )

    def __init__(self, stream_id: int, receive_window: int, send_window: int, unreceived: int | None) -> None:
        self.id = stream_id
        self.state = OPEN
        self.receive_window = receive_window
        self.send_window = send_window
        self.uncredited = 0
        self.unreceived = unreceived
        self.unsent: deque[Buffer] | None = None
        self.unsent_bytes = 0
        self.sent_bytes = 0
        self.trailers: bytes | None = None
        self.call: C | None = None

    @property
    def is_closed(self) -> bool:
        return self.state is CLOSED

    def __repr__(self) -> str:
        return f"<Stream {self.id} {self.state.name} unsent={self.unsent_bytes}>"


class StreamTable(Generic[C]):
    """The streams of one connection.

    `open` has those that are not closed, by number; `unsent_bytes` is the DATA that they have not sent yet. Why a
    stream is closed is kept for the last `remembered` ones.
    """

    __slots__ = ("_reasons", "_remembered", "last_id", "open", "unsent_bytes")

    def __init__(self, remembered: int) -> None:
        self.open: dict[int, Stream[C]] = {}
        self.last_id = 0
        """The largest number that the client has used."""
        self.unsent_bytes = 0
        self._remembered = remembered
        self._reasons: dict[int, Closed] = {}

    def all(self) -> list[Stream[C]]:
        """A copy: streams may be closed while it is walked."""
        return list(self.open.values())

    def is_idle(self, stream_id: int) -> bool:
        """Whether no request has had this number. Even numbers are the server's, which opens no streams."""
        return stream_id > self.last_id or not stream_id & 1

    def end(self, stream: Stream[C]) -> bool:
        """The server has sent END_STREAM. Returns whether the stream is closed now."""
        stream.state = ON_SENT_END[stream.state]
        if stream.state is not CLOSED:
            return False
        del self.open[stream.id]
        self.remember(stream.id, Closed.ENDED)
        return True

    def close(self, stream: Stream[C], reason: Closed) -> None:
        """Drop a stream, and what it has not sent."""
        self._drop(stream)
        del self.open[stream.id]
        self.remember(stream.id, reason)

    def close_all(self) -> list[Stream[C]]:
        """Drop all streams, and return them."""
        streams = self.all()
        for stream in streams:
            self._drop(stream)
        self.open.clear()
        return streams

    def remember(self, stream_id: int, reason: Closed) -> None:
        """Keep why a stream is closed, and forget the oldest one."""
        reasons = self._reasons
        reasons[stream_id] = reason
        if len(reasons) > self._remembered:
            del reasons[next(iter(reasons))]

    def why_closed(self, stream_id: int) -> Closed | None:
        """None for a stream that is forgotten, or that was never opened."""
        return self._reasons.get(stream_id)

    def drop_unsent(self, stream: Stream[C]) -> None:
        """Forget the DATA of a stream that waits, and its trailers."""
        self.unsent_bytes -= stream.unsent_bytes
        stream.unsent = None
        stream.unsent_bytes = 0
        stream.trailers = None

    def _drop(self, stream: Stream[C]) -> None:
        stream.state = CLOSED
        self.drop_unsent(stream)
