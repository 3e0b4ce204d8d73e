"""What a connection tells its caller, in the order in which the client's frames arrived."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from halimede.core.wire.http2.codes import ConnectionFault
from halimede.core.wire.http2.streams import Stream

T = TypeVar("T")
C = TypeVar("C")


@dataclass(slots=True)
class RequestBegins(Generic[T, C]):
    """`is_end`: no DATA follows."""

    stream: Stream[C]
    head: T
    is_end: bool


@dataclass(slots=True)
class DataArrives(Generic[C]):
    """`data` is valid until `receive` is called again. `size` is to be passed to `credit` when it is used."""

    stream: Stream[C]
    data: memoryview
    size: int
    is_end: bool


@dataclass(slots=True)
class RequestEnds(Generic[C]):
    """The client has sent everything, and trailers after its DATA."""

    stream: Stream[C]


@dataclass(slots=True)
class StreamIsReset(Generic[C]):
    """Nothing more can be sent: the client has reset the stream, or has broken a rule (`fault`)."""

    stream: Stream[C]
    fault: str


@dataclass(slots=True)
class StreamHasRoom(Generic[C]):
    """All DATA that waited is written."""

    stream: Stream[C]


@dataclass(slots=True)
class Pinged:
    """The client has sent a ping, which is answered already."""


@dataclass(slots=True)
class ConnectionFails(Generic[C]):
    """The client has broken a rule. GOAWAY is in the outgoing bytes; nothing more is read. `streams` were open."""

    fault: ConnectionFault
    streams: list[Stream[C]]


Event = (
    RequestBegins[T, C]
    | DataArrives[C]
    | RequestEnds[C]
    | StreamIsReset[C]
    | StreamHasRoom[C]
    | Pinged
    | ConnectionFails[C]
)
