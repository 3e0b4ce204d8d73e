"""How many calls of one step may be under way: an ensemble's `max_inflight_requests`.

All requests of an ensemble's version share one gate per step. A call above the limit waits in a bounded queue, in the
order of arrival. It leaves the queue early if its request is cancelled or its timeout expires. A full queue refuses
further calls.
"""

from collections import OrderedDict

from halimede.core.deadlines import Deadlines
from halimede.core.types import unavailable

MAX_WAITING = 4096
"""Calls that may wait at one gate."""

Key = tuple[int, int]
"""A call: its request's ticket, and its number there."""


class Gate:
    """Decides which calls may proceed. Times are nanoseconds. Keys are unique among the calls that wait."""

    __slots__ = ("_deadlines", "_limit", "_max_waiting", "_waiting", "under_way")

    def __init__(self, limit: int, max_waiting: int = MAX_WAITING) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self.under_way = 0
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._deadlines = Deadlines[Key]()

    def __repr__(self) -> str:
        return f"<Gate under_way={self.under_way}/{self._limit} waiting={len(self._waiting)}>"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self) -> None:
        """Let a call proceed even above the limit."""
        self.under_way += 1

    def try_enter(self, key: Key, deadline_ns: int | None) -> bool:
        """Whether the call may proceed. If not, it waits until the deadline at most. UNAVAILABLE if too many wait."""
        if self.under_way < self._limit:
            self.under_way += 1
            return True
        if len(self._waiting) >= self._max_waiting:
            raise unavailable("Exceeds maximum queue size")
        self._waiting[key] = None
        if deadline_ns is not None:
            self._deadlines.add(key, deadline_ns)
        return False

    def leave(self) -> Key | None:
        """Note that a call has ended. Returns the waiting call that may proceed, if any."""
        self.under_way -= 1
        if not self._waiting or self.under_way >= self._limit:
            return None
        self.under_way += 1
        key, _ = self._waiting.popitem(last=False)
        self._deadlines.discard(key)
        return key

    def try_remove(self, key: Key) -> bool:
        """Remove a call that waits; False when it does not wait."""
        if key not in self._waiting:
            return False
        del self._waiting[key]
        self._deadlines.discard(key)
        return True

    def expire(self, now_ns: int) -> list[Key]:
        """Remove the calls whose timeout has expired. Returns them by deadline."""
        expired = self._deadlines.pop_due(now_ns)
        for key in expired:
            del self._waiting[key]
        return expired

    def wake_at(self) -> int | None:
        """When `expire` has a call to remove, None for never."""
        return self._deadlines.next()
