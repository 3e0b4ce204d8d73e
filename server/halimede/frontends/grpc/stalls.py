"""Which clients make no progress. Decides without a clock: `now` is in seconds."""

from math import inf

from halimede.core.wire.http2.streams import Stream
from halimede.frontends.grpc.call import Call


class CallStalls:
    """The calls of one connection whose clients take nothing of their answers, or send too little of a message."""

    def __init__(self) -> None:
        # What the last look saw, by stream: bytes received of a message and bytes of DATA sent, and since when.
        self._seen: dict[Stream[Call], tuple[int | None, int, float]] = {}

    def find(
        self, streams: list[Stream[Call]], now: float, *, stall_s: float, progress_bytes: int
    ) -> list[tuple[Stream[Call], str]]:
        """The streams that have stalled for `stall_s`, and what their clients have failed to do."""
        seen: dict[Stream[Call], tuple[int | None, int, float]] = {}
        stalled = []
        for stream in streams:
            incoming = None if stream.call is None else stream.call.incoming
            received = None if incoming is None else incoming.received_bytes
            if received is None and not stream.unsent_bytes:
                continue
            before = self._seen.get(stream)
            if before is None or _has_progressed(before, received, stream, progress_bytes):
                seen[stream] = received, stream.sent_bytes, now
                continue
            seen[stream] = before
            if now - before[2] >= stall_s:
                stalled.append((stream, "read its answer" if stream.unsent_bytes else "sent its message"))
        self._seen = seen
        return stalled


def _has_progressed(
    before: tuple[int | None, int, float], received: int | None, stream: Stream[Call], progress_bytes: int
) -> bool:
    """Whether the client has taken something of the answer, or sent enough of its message."""
    if stream.sent_bytes != before[1]:
        return True
    if received is None or stream.unsent_bytes:
        return False
    return before[0] is None or not 0 <= received - before[0] < progress_bytes


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
