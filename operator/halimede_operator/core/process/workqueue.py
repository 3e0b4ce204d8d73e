"""The work queue between watches and reconciles: decides which key is reconciled next, and when.

- A key is queued at most once, however often it is added. If it is added while it is in work, it is queued again when
  that work is done.
- A key that failed waits longer each time (1 s to 5 minutes; 5 to 30 s if a person can repair the cause, who then waits
  for the effect). A success resets the wait. A change (`add`) shortens the wait to `WAIT_AFTER_CHANGE_S`, because it
  may have fixed the cause; the wait that the API server asked for (`not_before`) stays.
- Two runs of one key start at least `SPACING_S` apart, so that a burst of events costs one run; and so far apart that
  the key takes at most a tenth of the CPU.
- Every key is reconciled again about every `RESYNC_S`, at a time of its own within that period.
- Keys of one group (a namespace) run in the order in which they are due. Groups share the workers (`shares`). A
  failing key does not delay others.
"""

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar
from zlib import crc32

from halimede_operator.core.process.shares import Shares

KeyT = TypeVar("KeyT", bound=Hashable)

SPACING_S = 0.2
SPACING_OF_COST = 10.0
"""Times the CPU time of a key's run."""
MAX_SPACING_S = 30.0
WAIT_AFTER_CHANGE_S = 5.0
RESYNC_S = 600.0
RESYNC_JITTER = 0.1


class Failure(Enum):
    """Kinds of failures. The value is (first wait, longest wait) in seconds."""

    CONFLICT = (0.05, 5.0)
    """The object was changed by another write."""
    TRANSIENT = (1.0, 300.0)
    PERMANENT = (5.0, 30.0)
    """The API server refuses the write until a person changes something: a quota, a right, an admission rule. That is
    not watched, so it is noticed only by another attempt."""

    def wait_s(self, failures: int) -> float:
        """Seconds to wait after this many failures in a row, at least 1."""
        first, longest = self.value
        # The exponent is bounded, or a key that fails for a year would overflow it.
        return float(min(longest, first * 2.0 ** min(failures - 1, 30)))


@dataclass(slots=True)
class _Entry:
    due: float | None = None
    """When to work on it; None while it is in work and was not added since."""
    in_work: bool = False
    ready: bool = False
    """It is due and waits for its group's turn."""
    started: float = float("-inf")
    spacing: float = SPACING_S
    failures: int = 0
    floor: float = float("-inf")
    """Earliest time to work on it."""

    def reset(self, cost_s: float) -> None:
        self.failures = 0
        self.spacing = _spacing_of(cost_s)
        self.floor = float("-inf")


class WorkQueue(Generic[KeyT]):
    """All times are seconds of one monotonic clock."""

    def __init__(self, group_of: Callable[[KeyT], Hashable], most_of_group: int) -> None:
        """most_of_group: how many keys of one group may be in work."""
        self._group_of = group_of
        self._shares: Shares[Hashable, KeyT] = Shares(most_of_group)
        self._entries: dict[KeyT, _Entry] = {}
        self._taken_at = 0.0
        """The last time at which keys were taken: those that have waited since for their group's turn are due."""
        # When a key's due time changes, its old heap item stays and is skipped when it is popped.
        self._heap: list[tuple[float, int, KeyT]] = []
        self._count = 0

    def add(self, key: KeyT, now: float) -> None:
        """Something changed that concerns the key."""
        entry = self._entries.setdefault(key, _Entry())
        due = max(now, entry.started + entry.spacing, entry.floor)
        if entry.due is not None and entry.due <= due:
            return
        entry.due = due
        if not entry.in_work:
            self._push(key, due)

    def take(self, now: float) -> KeyT | None:
        """The next key that is due, or None. `done`, `failed` or `forget` must follow."""
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.due != due or entry.in_work or entry.ready:
                continue
            entry.ready = True
            self._shares.add(self._group_of(key), key)
        self._taken_at = now
        if (taken := self._shares.take()) is None:
            return None
        key = taken[1]
        entry = self._entries[key]
        entry.due = None
        entry.in_work, entry.ready = True, False
        entry.started = now
        return key

    def done(self, key: KeyT, now: float, again_in: float | None = None, cost_s: float = 0.0) -> None:
        """The work succeeded. The key is due again after `again_in` seconds, or at its resync.

        cost_s: CPU time of the work, here and below.
        """
        entry = self._finish(key, cost_s)
        entry.reset(cost_s)
        wait = now + min(RESYNC_S * _jitter(key), again_in if again_in is not None else float("inf"))
        # It may have been added before the cost was known.
        entry.due = wait if entry.due is None else min(max(entry.due, entry.started + entry.spacing), wait)
        self._push(key, entry.due)

    def failed(
        self, key: KeyT, now: float, failure: Failure, not_before: float | None = None, cost_s: float = 0.0
    ) -> float:
        """The work failed. Return the seconds until the key is due again.

        not_before: earliest time of the next attempt, also after a change (`add`).
        """
        entry = self._finish(key, cost_s)
        entry.failures += 1
        entry.floor = not_before if not_before is not None else float("-inf")
        wait = failure.wait_s(entry.failures)
        entry.spacing = max(_spacing_of(cost_s), min(wait, WAIT_AFTER_CHANGE_S))
        was_added = entry.due is not None
        entry.due = max(min(now + wait, entry.started + entry.spacing) if was_added else now + wait, entry.floor)
        self._push(key, entry.due)
        return max(0.0, entry.due - now)

    def retry(self, now: float) -> None:
        """The cause of all failures may be over: make every failed key due now."""
        for key, entry in self._entries.items():
            if entry.failures and not entry.in_work and not entry.ready and entry.due is not None:
                entry.due = max(min(entry.due, now), entry.floor)
                self._push(key, entry.due)

    def forget(self, key: KeyT, cost_s: float = 0.0) -> None:
        """Remove the key in work. If it was added meanwhile, it stays queued instead."""
        entry = self._finish(key, cost_s)
        if entry.due is None:
            del self._entries[key]
            return
        entry.reset(cost_s)
        self._push(key, entry.due)

    def wake_at(self) -> float | None:
        """When to call `take` again; None: not before the next `add`, `done`, `failed` or `retry`."""
        if self._shares.can_take:
            return self._taken_at
        while self._heap:
            due, _, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.due == due and not entry.in_work and not entry.ready:
                return due
            heapq.heappop(self._heap)
        return None

    def depth(self, now: float) -> int:
        """How many keys are due and not in work: the backlog."""
        return sum(1 for _ in self._due(now))

    def oldest_wait_s(self, now: float) -> float:
        """For how long the key that waits longest has been due, in seconds; 0 if none is due."""
        return max((now - due for due in self._due(now)), default=0.0)

    def _due(self, now: float) -> Iterator[float]:
        """When each key of the backlog became due."""
        for entry in self._entries.values():
            if not entry.in_work and entry.due is not None and entry.due <= now:
                yield entry.due

    def _finish(self, key: KeyT, cost_s: float) -> _Entry:
        self._shares.finish(self._group_of(key), cost_s)
        entry = self._entries[key]
        entry.in_work = False
        return entry

    def _push(self, key: KeyT, due: float) -> None:
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, key))
        if len(self._heap) > 1000 + 4 * len(self._entries):
            pending = ((e.due, e.in_work or e.ready, k) for k, e in self._entries.items())
            self._heap = [(due, n, k) for n, (due, is_out, k) in enumerate(pending) if due is not None and not is_out]
            self._count = len(self._heap)
            heapq.heapify(self._heap)


def _spacing_of(cost_s: float) -> float:
    return min(max(SPACING_S, SPACING_OF_COST * cost_s), MAX_SPACING_S)


def _jitter(key: Hashable) -> float:
    """A factor from 1 - RESYNC_JITTER to 1, the same for a key in every process."""
    return 1.0 - RESYNC_JITTER * crc32(str(key).encode()) / 2**32
