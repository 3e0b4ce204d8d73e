"""The time limits of one connection, from what repeated sweeps see of it. Pure: `now` is in seconds.

Each sweep compares with what the one before saw, so that no request sets a timer or reads the clock for its limits.
"""

from halimede.frontends.http.framing import Refusal
from halimede.frontends.http.receiver import Receiver, State
from halimede.frontends.http.shared import Shared


class ReceiveDeadlines:
    """How long a head may take, how slowly a body may come, and since when a client has asked for nothing."""

    __slots__ = ("_bytes", "_idle_requests", "_idle_since", "_shared", "_since", "_watched")

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        # The part of a request that is watched, since when, and how much of its body there was.
        self._watched: tuple[State, int] | None = None
        self._since = 0.0
        self._bytes = 0
        self._idle_since = 0.0
        self._idle_requests = -1

    def check(self, receiver: Receiver, now: float) -> None:
        """Note how far the client is; refuses a request that takes too long."""
        state, requests = receiver.state, receiver.requests
        if state is not State.HEAD or requests != self._idle_requests:
            self._idle_since, self._idle_requests = now, requests
        if not receiver.is_receiving or receiver.is_full:
            self._watched = None
            return
        received = receiver.body_bytes
        # A head counts with the requests before it, a body with its own.
        watched = (state, requests)
        if watched != self._watched:
            self._watched, self._since, self._bytes = watched, now, received
            return
        limits = self._shared.limits
        waited = now - self._since
        if state is State.HEAD:
            if waited >= limits.head_timeout_s:
                raise Refusal(408, f"the request's headers were not complete after {limits.head_timeout_s:g} s")
        elif waited >= limits.body_progress_s:
            is_scarce = self._shared.held_bytes > limits.max_held_bytes // 2
            wanted = limits.scarce_progress_bytes if is_scarce else limits.body_progress_bytes
            if received - self._bytes < wanted:
                raise Refusal(
                    408, f"the request's body brought less than {wanted} bytes in {limits.body_progress_s:g} s"
                )
            self._since, self._bytes = now, received

    def is_idle_since(self, then: float) -> bool:
        """Whether nothing was asked for since `then`, as far as the checks saw."""
        return self._idle_since <= then


class SendDeadline:
    """How long a client may take nothing of its answers."""

    __slots__ = ("_left", "_shared", "_size", "_stalled_since")

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._size = 0
        self._left = 0
        self._stalled_since = 0.0

    def is_over(self, size: int, streamed: int, now: float) -> bool:
        """Whether to give the client up. `size` bytes are unsent, `streamed` were ever written of answers in parts."""
        # Parts that a stream adds do not hide that its client reads.
        left = size - streamed
        if size == 0 or left < self._left or self._size == 0:
            self._stalled_since = now
        elif now - self._stalled_since >= self._shared.limits.write_timeout_s:
            return True
        self._size, self._left = size, left
        return False

    def order(self) -> tuple[bool, float]:
        """Sorts connections by when their clients last took something; those that no check has seen come last."""
        return self._size == 0, self._stalled_since
