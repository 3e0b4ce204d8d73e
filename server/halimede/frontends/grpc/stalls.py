"""Which clients make no progress. Decides without a clock: `now` is in seconds."""

from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from halimede.core.wire.http2.streams import Stream, StreamState
from halimede.frontends.grpc.call import Call
from halimede.frontends.grpc.limits import GrpcLimits


class _Duty(Enum):
    """What a client is to do."""

    READ = auto()
    """Take some of an answer."""
    SEND = auto()
    """Send the rest of a message."""
    BEGIN = auto()
    """Send the only message of its call, or the rest of a request that is not one of gRPC's."""


_Task = tuple[_Duty, int, int, int]
"""What a client is to do, the number of the message, how many bytes have been transferred, and of how many."""


@dataclass(slots=True)
class _Seen:
    """What the looks have seen of one task: since when, and the transferred bytes at the last progress."""

    duty: tuple[_Duty, int]
    since: float
    size: int
    progress_at: float


class CallStalls:
    """The calls of one connection whose clients take nothing of their answers, or send too little of a message."""

    def __init__(self) -> None:
        self._seen: dict[Stream[Call], _Seen] = {}

    @property
    def read_at(self) -> float | None:
        """When the client took something of an answer that waits for it; None if no look has seen one wait."""
        return max((seen.progress_at for seen in self._seen.values() if seen.duty[0] is _Duty.READ), default=None)

    def find(
        self, streams: list[Stream[Call]], now: float, limits: GrpcLimits, *, is_scarce: bool
    ) -> list[tuple[Stream[Call], str]]:
        """The streams of clients that take too long, and what they have failed to do.

        `is_scarce`: messages hold so much memory that they must arrive faster.
        """
        seen: dict[Stream[Call], _Seen] = {}
        stalled = []
        for stream in streams:
            task = _task(stream)
            if task is None:
                continue
            duty, number, size, whole = task
            before = self._seen.get(stream)
            if before is None or before.duty != (duty, number):
                seen[stream] = _Seen((duty, number), now, size, now)
                continue
            seen[stream] = before
            if failure := _failure(before, duty, size, whole, now, limits, is_scarce=is_scarce):
                stalled.append((stream, failure))
        self._seen = seen
        return stalled


def _task(stream: Stream[Call]) -> _Task | None:
    """What the client of a stream is to do; None if it is the server's turn, or if a stream may stay idle."""
    if stream.unsent_bytes:
        return _Duty.READ, 0, stream.sent_bytes, 0
    call = stream.call
    if call is None:
        is_incomplete = stream.state is StreamState.OPEN and stream.trailers is None
        return (_Duty.BEGIN, 0, 0, 0) if is_incomplete else None
    incoming = call.incoming
    if incoming is not None and (received := incoming.received_bytes) is not None:
        return _Duty.SEND, incoming.complete, received, incoming.announced_bytes
    return (_Duty.BEGIN, 0, 0, 0) if call.method.is_unary and call.is_awaiting else None


def _failure(
    seen: _Seen, duty: _Duty, size: int, whole: int, now: float, limits: GrpcLimits, *, is_scarce: bool
) -> str:
    """What the client has failed to do; "" for nothing. Progress is noted in `seen`."""
    if duty is not _Duty.SEND:
        if size != seen.size:
            seen.size, seen.progress_at = size, now
        if now - seen.progress_at < limits.stall_s:
            return ""
        return f"{'read its answer' if duty is _Duty.READ else 'sent its request'} for {limits.stall_s:g} s"
    whole_s = limits.message_s + whole / limits.message_bytes_per_s
    if now - seen.since >= whole_s:
        return f"sent its message of {whole} bytes within {whole_s:.0f} s"
    progress_s = min(limits.progress_s, limits.stall_s)
    if now - seen.progress_at < progress_s:
        return ""
    wanted = limits.scarce_progress_bytes if is_scarce else limits.progress_bytes
    if size - seen.size < wanted:
        return f"sent {wanted} bytes of its message in {progress_s:g} s"
    seen.size, seen.progress_at = size, now
    return ""


class TransportStall:
    """A client that reads nothing at all, or does not complete a frame. `since` is inf while it makes progress."""

    def __init__(self, now: float) -> None:
        self.since = inf
        self.looked_at = now
        self._unsent_bytes = 0

    def look(self, unsent_bytes: int, now: float, *, is_within_frame: bool) -> float:
        """For how long the client has stalled. `is_within_frame`: it has begun a frame and sent nothing since the last
        look."""
        is_stalled = (unsent_bytes and unsent_bytes == self._unsent_bytes) or is_within_frame
        self._unsent_bytes, self.looked_at = unsent_bytes, now
        if not is_stalled:
            self.since = inf
            return 0.0
        self.since = min(self.since, now)
        return now - self.since
