"""How long a call of a model's code may be queued: `BLS_TIMEOUT_MS` of the model that calls.

The server refuses a call that completes a circle (`core.schedule.wait_graph`), but it cannot know every wait: a model
may wait for a thread that calls its own model. Such a call is queued until its timeout expires. A call that executes is
never ended.

Nothing is kept per call. The server has a record of each call under way; when the earliest deadline may have passed, it
searches these records. So a call costs one comparison, and a deadline is kept to within `SEARCH_PAUSE_NS`.
"""

from collections.abc import Iterable

SEARCH_PAUSE_NS = 50_000_000
"""Minimum time between two searches of all calls."""


class CallTimeouts:
    """When to search the calls under way, and which of them have timed out. Times are nanoseconds."""

    __slots__ = ("wake_at",)

    def __init__(self) -> None:
        self.wake_at: int | None = None
        """When to search next; None when no call has a deadline."""

    def __repr__(self) -> str:
        return f"<CallTimeouts wake_at={self.wake_at}>"

    def begin(self, deadline_ns: int) -> bool:
        """A call is made that may be queued until then. Returns whether `wake_at` is now earlier."""
        if self.wake_at is not None and self.wake_at <= deadline_ns:
            return False
        self.wake_at = deadline_ns
        return True

    def due(self, deadlines: Iterable[tuple[int, int]], now_ns: int) -> list[int]:
        """The tickets whose deadline has come, of all calls under way as (ticket, deadline). Sets `wake_at`."""
        due: list[int] = []
        earliest: int | None = None
        for ticket, deadline_ns in deadlines:
            if deadline_ns <= now_ns:
                due.append(ticket)
            elif earliest is None or deadline_ns < earliest:
                earliest = deadline_ns
        self.wake_at = None if earliest is None else max(earliest, now_ns + SEARCH_PAUSE_NS)
        return due
