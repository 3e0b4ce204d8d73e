"""Pings in both directions and the age of a connection, by gRPC's rules. Pure: times are seconds, `now` is monotonic.

gRPC's rules are those of its C library's server (channel arguments `grpc.keepalive_*`, `grpc.http2.*ping*`,
`grpc.max_connection_age*`), with Triton's flags for them.
"""

from dataclasses import dataclass
from enum import Enum, auto
from math import inf

WITHOUT_CALLS_SECS = 2 * 3600.0
"""The shortest permitted interval of a client's pings while it has no calls, unless they are permitted."""


@dataclass(frozen=True, slots=True)
class KeepaliveRules:
    """The server pings a client from which nothing has arrived for `ping_after` while it has calls, or also without
    (`without_calls`), and ends a connection whose client does not answer a ping within `answer_within`.

    A client may ping every `client_interval`; the ping after `max_strikes` too early ones ends the connection (0: no
    limit). A connection older than `max_age` is asked to connect anew, and its calls may run for `age_grace` more.
    """

    ping_after: float = 7_200.0
    answer_within: float = 20.0
    without_calls: bool = False
    client_interval: float = 300.0
    max_strikes: int = 2
    max_age: float = inf
    age_grace: float = inf


class Due(Enum):
    """What `Keepalive.due` asks for."""

    PING = auto()
    PING_TIMEOUT = auto()
    """End the connection: the client has not answered a ping."""
    MAX_AGE = auto()
    """Send GOAWAY, and serve the calls that have begun."""
    GRACE_OVER = auto()
    """End the calls that still run, and the connection."""


class Keepalive:
    """One connection. The caller reports what is received and sent, calls `due` at `wake_at`, and does what it says."""

    __slots__ = ("_age_ends_at", "_client_pinged_at", "_grace_ends_at", "_received_at", "_rules", "_strikes",
                 "_waits_since")  # fmt: skip

    def __init__(self, rules: KeepaliveRules, now: float, age_factor: float = 1.0) -> None:
        """`age_factor` varies the age, so that the clients of a server do not all connect anew at once."""
        self._rules = rules
        self._received_at = now
        self._waits_since = inf
        self._client_pinged_at = -inf
        self._strikes = 0
        self._age_ends_at = now + rules.max_age * age_factor
        self._grace_ends_at = inf

    def received(self, now: float) -> bool:
        """Something has arrived; every byte shows that the client lives. Returns whether it answers a ping: then
        `wake_at` may be earlier than before."""
        self._received_at = now
        if self._waits_since == inf:
            return False
        self._waits_since = inf
        return True

    def quiet_s(self, now: float) -> float:
        """For how long nothing has arrived."""
        return now - self._received_at

    def sent_data(self) -> None:
        """HEADERS or DATA were sent: clients may ping after them, for example to measure the bandwidth."""
        self._client_pinged_at = -inf
        self._strikes = 0

    def is_ping_excessive(self, now: float, *, has_calls: bool) -> bool:
        """The client has sent a ping. Returns whether the connection must end for it."""
        rules = self._rules
        is_quiet = not has_calls and not rules.without_calls
        earliest = self._client_pinged_at + (WITHOUT_CALLS_SECS if is_quiet else rules.client_interval)
        self._client_pinged_at = now
        if now >= earliest:
            return False
        self._strikes += 1
        return rules.max_strikes > 0 and self._strikes > rules.max_strikes

    def wake_at(self, *, has_calls: bool) -> float:
        """When to call `due` again, unless something arrives."""
        return min(self._ping_event_at(has_calls), self._age_ends_at, self._grace_ends_at)

    def due(self, now: float, *, has_calls: bool) -> Due | None:
        """The next thing to do, None if there is none yet. Call it until it returns None."""
        if now >= self._grace_ends_at:
            self._grace_ends_at = inf
            return Due.GRACE_OVER
        if now >= self._age_ends_at:
            self._age_ends_at = inf
            self._grace_ends_at = now + self._rules.age_grace
            return Due.MAX_AGE
        if now < self._ping_event_at(has_calls):
            return None
        if self._waits_since < inf:
            self._waits_since = inf
            self._received_at = inf  # No further ping: the connection ends.
            return Due.PING_TIMEOUT
        self._waits_since = now
        return Due.PING

    def _ping_event_at(self, has_calls: bool) -> float:
        if self._waits_since < inf:
            return self._waits_since + self._rules.answer_within
        if has_calls or self._rules.without_calls:
            return self._received_at + self._rules.ping_after
        return inf
