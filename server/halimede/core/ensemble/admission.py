"""How many calls of one step may be under way: an ensemble's `max_inflight_requests`.

One gate per step, shared by all requests of an ensemble's version. What comes above the limit waits in its order, in a
queue that is bounded, and leaves it early when its request is cancelled or its time is up. Nothing ever waits for a
place in that queue.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush

from halimede.core.types import ErrorCode, InferenceError

MAX_WAITING = 4096
"""Calls that may wait at one gate."""

STALE_DEADLINES = 64
"""Deadlines of calls that are gone stay until they come up; above this they are swept when they outnumber the others.
"""

Key = tuple[int, int]
"""A call: its request's ticket, and its number there."""


class Gate:
    """Decides which calls go on; times are nanoseconds. Keys are unique among those that are here."""

    __slots__ = ("_arrivals", "_deadlines", "_limit", "_max_waiting", "_waiting", "under_way")

    def __init__(self, limit: int, max_waiting: int = MAX_WAITING) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self.under_way = 0
        self._waiting: OrderedDict[Key, int | None] = OrderedDict()
        # (deadline, arrival, key); the arrival keeps the order of those with one deadline.
        self._deadlines: list[tuple[int, int, Key]] = []
        self._arrivals = 0

    def __repr__(self) -> str:
        return f"<Gate under_way={self.under_way}/{self._limit} waiting={len(self._waiting)}>"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def deadlines(self) -> int:
        """How many are kept, some of calls that are gone."""
        return len(self._deadlines)

    def enter(self) -> None:
        """A call goes on, whether or not there is room."""
        self.under_way += 1

    def try_enter(self, key: Key, deadline_ns: int | None) -> bool:
        """Whether the call goes on; if not, it waits, until the deadline at most. UNAVAILABLE when too many do."""
        if self.under_way < self._limit:
            self.under_way += 1
            return True
        if len(self._waiting) >= self._max_waiting:
            raise InferenceError(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")
        self._waiting[key] = deadline_ns
        if deadline_ns is not None:
            self._arrivals += 1
            heappush(self._deadlines, (deadline_ns, self._arrivals, key))
        return False

    def leave(self) -> Key | None:
        """A call is over; the one that goes on in its place, None when none waits or there is no room yet."""
        self.under_way -= 1
        if not self._waiting or self.under_way >= self._limit:
            return None
        self.under_way += 1
        key, _ = self._waiting.popitem(last=False)
        self._sweep()
        return key

    def try_remove(self, key: Key) -> bool:
        """Forget a call that waits; False when it does not."""
        if key not in self._waiting:
            return False
        del self._waiting[key]
        self._sweep()
        return True

    def expire(self, now_ns: int) -> list[Key]:
        """Forget the calls whose time is up, and say which they were, by deadline."""
        expired: list[Key] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            deadline, _, key = heappop(self._deadlines)
            if self._is_live(deadline, key):
                del self._waiting[key]
                expired.append(key)
        return expired

    def wake_at(self) -> int | None:
        """When `expire` has something to say, None for never."""
        while self._deadlines and not self._is_live(self._deadlines[0][0], self._deadlines[0][2]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _is_live(self, deadline: int, key: Key) -> bool:
        return self._waiting.get(key) == deadline

    def _sweep(self) -> None:
        if len(self._deadlines) > STALE_DEADLINES + 2 * len(self._waiting):
            self._deadlines = [each for each in self._deadlines if self._is_live(each[0], each[2])]
            heapify(self._deadlines)
