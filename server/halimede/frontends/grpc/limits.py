"""Limits of the gRPC front end, and state that its connections share."""

import asyncio
from dataclasses import InitVar, dataclass, field, replace
from typing import Protocol

from halimede.core.accounts import UNBOUNDED, Account, ByteKind, MemoryBounds
from halimede.core.wire.http2.keepalive import KeepaliveRules
from halimede.core.wire.http2.limits import Http2Limits
from halimede.frontends.totals import Total

_BUFFER_BYTES = 64 << 10
_HTTP2 = Http2Limits()


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """The limits of one listener. Times are seconds, sizes are bytes.

    A connection must be set up (preface and SETTINGS) within `handshake_s`. A client loses the call if it takes nothing
    of an answer, or does not begin the only message of a call, for `stall_s` (while the server drains, for
    `drain_stall_s`). A message that has begun must bring `progress_bytes` in every `progress_s`, and be complete after
    `message_s` and a second for each `message_bytes_per_s` of it. When half of `max_held_bytes` is held, it must bring
    `scarce_progress_bytes` instead: otherwise a few slow clients would block the messages of all others. Messages that
    are received or worked on hold at most `max_held_bytes` over all connections, and `max_connection_held_bytes` on
    one. `write_ahead_bytes` are given to the transport of a connection before it has sent them. After a fault, input is
    discarded for `linger_s` or `linger_bytes`, so that the client reads the reason instead of a reset. A connection is
    asked to leave not before `leave_after_s`, because its client may still be connecting. Its answer to GOAWAY is
    awaited for `goaway_answer_s` without any bytes of it, and at most for `goaway_busy_s`, which is gRPC's own limit.
    """

    http2: Http2Limits = _HTTP2
    max_metadata_bytes: int = 16 << 10
    max_held_bytes: int = 1 << 30
    max_connection_held_bytes: int = 256 << 20
    write_ahead_bytes: int = 1 << 20
    handshake_s: float = 10.0
    stall_s: float = 60.0
    drain_stall_s: float = 5.0
    progress_s: float = 10.0
    progress_bytes: int = 1 << 10
    scarce_progress_bytes: int = 1 << 20
    message_s: float = 60.0
    message_bytes_per_s: int = 64 << 10
    leave_after_s: float = 0.25
    goaway_answer_s: float = 1.0
    goaway_busy_s: float = 20.0
    linger_s: float = 5.0
    linger_bytes: int = 1 << 20

    def for_messages(self, max_message_bytes: int, stall_s: float, message_s: float) -> "GrpcLimits":
        """These limits with these times, and with room for one message of the largest permitted size: as it is sent,
        and once more for its decoded form."""
        most = 2 * max_message_bytes
        return replace(
            self,
            stall_s=stall_s,
            message_s=message_s,
            max_connection_held_bytes=max(self.max_connection_held_bytes, most),
            max_held_bytes=max(self.max_held_bytes, most),
        )


class Flushing(Protocol):
    """A connection with outgoing bytes."""

    def flush(self) -> None: ...


@dataclass(slots=True)
class Shared:
    """One per listener. The listener and its connections change it on the loop's thread only.

    All connections receive into `view`: it is filled and used within one callback of the transport. `wire` has
    the bytes of requests that are received or worked on, `unsent_bytes` counts answers that clients have not read. With
    `total_held`, `wire` is a part of the sum over all front-end processes.
    """

    limits: GrpcLimits
    keepalive: KeepaliveRules
    total_held: InitVar[Total | None] = None
    memory: InitVar[MemoryBounds] = UNBOUNDED
    view: memoryview = field(default_factory=lambda: memoryview(bytearray(_BUFFER_BYTES)))
    wire: Account = field(init=False)
    unsent_bytes: int = 0
    is_leaving: bool = False
    is_draining: bool = False
    unflushed: list[Flushing] = field(default_factory=list)

    def __post_init__(self, total_held: Total | None, memory: MemoryBounds) -> None:
        publish = None if total_held is None else total_held.publish
        self.wire = Account(ByteKind.WIRE, self.limits.max_held_bytes, publish, memory)

    def flush_later(self, connection: Flushing) -> None:
        """Write a connection's outgoing bytes when the current callbacks have run: the answers of a batch together."""
        if not self.unflushed:
            asyncio.get_running_loop().call_soon(self._flush)
        self.unflushed.append(connection)

    def _flush(self) -> None:
        connections, self.unflushed = self.unflushed, []
        for connection in connections:
            connection.flush()


class HeldBytes:
    """The bytes of one connection, which count with those of its listener: of requests that are received or worked on,
    of incomplete frames, of answers that wait for room elsewhere, and of answers that the client has not read."""

    __slots__ = ("_kept", "_requests", "_shared", "_unsent", "_waiting")

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._requests = 0
        self._kept = 0
        self._waiting = 0
        self._unsent = 0

    def hold(self, size: int) -> bool:
        """Count bytes that are held for requests. Returns whether they are within their limits."""
        shared = self._shared
        self._requests += size
        is_within = shared.wire.take(size)
        return is_within and self._requests <= shared.limits.max_connection_held_bytes

    def release(self, size: int) -> None:
        """Bytes of requests are free."""
        self._requests -= size
        self._shared.wire.give_back(size)

    @property
    def has_kept(self) -> bool:
        return self._kept > 0

    def set_kept(self, size: int) -> bool:
        """`size` bytes are kept of frames that are incomplete, or wait for their turn. Returns as `hold`."""
        more, self._kept = size - self._kept, size
        if more > 0:
            return self.hold(more)
        self.release(-more)
        return True

    def wait(self, size: int) -> None:
        """Count bytes of answers that wait for room."""
        self._waiting += size

    @property
    def has_unsent(self) -> bool:
        """Whether answers are counted, or should be."""
        return bool(self._unsent or self._waiting)

    def set_unsent(self, size: int) -> None:
        """`size` bytes wait in the connection and its transport; those that wait elsewhere are added."""
        size += self._waiting
        self._shared.unsent_bytes += size - self._unsent
        self._unsent = size

    def forget_unsent(self) -> None:
        """The connection is closed: nothing is unsent."""
        self._shared.unsent_bytes -= self._unsent
        self._unsent = 0
