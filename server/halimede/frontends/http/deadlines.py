"""The time limits of one connection, checked by repeated sweeps. Pure: `now` is in seconds.

Each sweep compares with the previous one, so that no request sets a timer or reads the clock for its limits.
"""

from halimede.frontends.http.framing import Refusal
from halimede.frontends.http.receiver import Receiver, ReceiverState
from halimede.frontends.http.shared import Shared


class ReceiveDeadlines:
    """Limits for the duration of a head, the rate of a body, and an idle connection."""

    __slots__ = ("_bytes", "_idle_requests", "_shared", "_since", "_watched", "idle_since")

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        # The watched part of a request, since when it is watched, and the size of its body then.
        self._watched: tuple[ReceiverState, int] | None = None
        self._since = 0.0
        self._bytes = 0
        self.idle_since = 0.0
        """Since when the sweeps saw no request."""
        self._idle_requests = -1

    def check(self, receiver: Receiver, now: float) -> None:
        """Note the client's progress. Refuses a request that takes too long."""
        state, requests = receiver.state, receiver.requests
        if state is not ReceiverState.HEAD or requests != self._idle_requests:
            self.idle_since, self._idle_requests = now, requests
        if not receiver.is_receiving or receiver.is_full:
            self._watched = None
            return
        received = receiver.body_bytes
        # A head is identified by the number of requests before it, a body by its own request.
        watched = (state, requests)
        if watched != self._watched:
            self._watched, self._since, self._bytes = watched, now, received
            return
        limits = self._shared.limits
        waited = now - self._since
        if state is ReceiverState.HEAD:
            if waited >= limits.head_timeout_s:
                raise Refusal(408, f"the request's headers were not complete after {limits.head_timeout_s:g} s")
        elif waited >= limits.body_progress_s:
            wire = self._shared.wire
            is_scarce = wire.total_bytes > wire.limit_bytes // 2
            wanted = limits.scarce_progress_bytes if is_scarce else limits.body_progress_bytes
            if received - self._bytes < wanted:
                raise Refusal(
                    408, f"the request's body brought less than {wanted} bytes in {limits.body_progress_s:g} s"
                )
            self._since, self._bytes = now, received

    def is_idle_since(self, then: float, requests: int) -> bool:
        """Whether there was no request since `then`. `requests` is their number now: there may have been some since the
        last sweep."""
        return self.idle_since <= then and requests == self._idle_requests


class SendDeadline:
    """The limit for a client that does not read its answers."""

    __slots__ = ("_left", "_shared", "_size", "_stalled_since")

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._size = 0
        self._left = 0
        self._stalled_since = 0.0

    def is_over(self, size: int, streamed: int, now: float) -> bool:
        """Whether to close the connection. `size` bytes are unsent; `streamed` is the total of answers in parts."""
        # The client may read while a stream adds as much.
        left = size - streamed
        if size == 0 or left < self._left or self._size == 0:
            self._stalled_since = now
        elif now - self._stalled_since >= self._shared.limits.write_timeout_s:
            return True
        self._size, self._left = size, left
        return False

    def order(self) -> tuple[bool, float]:
        """Sort key: when the client last read something. Connections that no sweep has seen come last."""
        return self._size == 0, self._stalled_since
