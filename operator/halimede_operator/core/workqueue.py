"""Which key is worked on next, and when: the queue between what watches tell and `reconcile`.

- A key waits once, however often it is added; added while it is in work, it waits again when that work is done.
- A key that failed waits longer each time (1 s to 5 minutes; 10 minutes where only a person can help), and forgets
  that when it succeeds. News about it (`add`) cuts that wait short, to `IMPATIENCE_S`, since the news may be the cure;
  what the API server asked for (`not_before`) is kept.
- Two runs of one key start at least `SPACING_S` apart, so that a burst of events costs one run.
- Every key is looked at again after about `RESYNC_S`, at its own time within it.
- Who is due first is first; a failing key holds nobody up.
"""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar
from zlib import crc32

KeyT = TypeVar("KeyT", bound=Hashable)

SPACING_S = 0.2
IMPATIENCE_S = 5.0
RESYNC_S = 600.0
RESYNC_JITTER = 0.1


class Failure(Enum):
    """What kind of failure it was: (first wait, longest wait), seconds."""

    CONFLICT = (0.05, 5.0)
    """Somebody else wrote first."""
    TRANSIENT = (1.0, 300.0)
    PERMANENT = (300.0, 600.0)
    """The API server refuses it, and will do so until somebody changes something."""

    def wait_s(self, failures: int) -> float:
        """After so many failures in a row, of 1 and more."""
        first, longest = self.value
        # The exponent is bounded, so that a key that fails for a year does not overflow.
        return float(min(longest, first * 2.0 ** min(failures - 1, 30)))


@dataclass(slots=True)
class _Entry:
    due: float | None = None
    """When it is to be worked on; None while it is in work and nothing was said since."""
    in_work: bool = False
    started: float = float("-inf")
    spacing: float = SPACING_S
    failures: int = 0
    floor: float = float("-inf")
    """Not to be worked on before."""

    def forgive(self) -> None:
        self.failures = 0
        self.spacing = SPACING_S
        self.floor = float("-inf")


class WorkQueue(Generic[KeyT]):
    """All times are seconds of one clock that never goes back."""

    def __init__(self) -> None:
        self._entries: dict[KeyT, _Entry] = {}
        # Entries are left behind when a key's due changes, and are skipped when they come up.
        self._heap: list[tuple[float, int, KeyT]] = []
        self._count = 0

    def add(self, key: KeyT, now: float) -> None:
        """There is news about the key."""
        entry = self._entries.setdefault(key, _Entry())
        due = max(now, entry.started + entry.spacing, entry.floor)
        if entry.due is not None and entry.due <= due:
            return
        entry.due = due
        if not entry.in_work:
            self._push(key, due)

    def take(self, now: float) -> KeyT | None:
        """The key to work on, if any is due; `done` or `failed` must follow."""
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.due != due or entry.in_work:
                continue
            entry.due = None
            entry.in_work = True
            entry.started = now
            return key
        return None

    def done(self, key: KeyT, now: float, again_in: float | None = None) -> None:
        """It went well; it is due again after `again_in`, or at its resync."""
        entry = self._finish(key)
        entry.forgive()
        wait = now + min(RESYNC_S * _jitter(key), again_in if again_in is not None else float("inf"))
        entry.due = wait if entry.due is None else min(entry.due, wait)
        self._push(key, entry.due)

    def failed(self, key: KeyT, now: float, failure: Failure, not_before: float | None = None) -> float:
        """It did not; returns after how many seconds it is due again.

        not_before: when the API server would be asked again at the earliest; news does not change that.
        """
        entry = self._finish(key)
        entry.failures += 1
        entry.floor = not_before if not_before is not None else float("-inf")
        wait = failure.wait_s(entry.failures)
        entry.spacing = max(SPACING_S, min(wait, IMPATIENCE_S))
        heard = entry.due is not None
        entry.due = max(min(now + wait, entry.started + entry.spacing) if heard else now + wait, entry.floor)
        self._push(key, entry.due)
        return entry.due - now

    def retry(self, now: float) -> None:
        """Whatever keys failed of may be over: none that failed waits for its turn any longer."""
        for key, entry in self._entries.items():
            if entry.failures and not entry.in_work and entry.due is not None:
                entry.due = max(min(entry.due, now), entry.floor)
                self._push(key, entry.due)

    def forget(self, key: KeyT) -> None:
        """The key in work is gone for good, unless there was news about it meanwhile."""
        entry = self._finish(key)
        if entry.due is None:
            del self._entries[key]
            return
        entry.forgive()
        self._push(key, entry.due)

    def wake_at(self) -> float | None:
        """When somebody should call `take` again; None: not before the next `add` or `done`."""
        while self._heap:
            due, _, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.due == due and not entry.in_work:
                return due
            heapq.heappop(self._heap)
        return None

    def depth(self, now: float) -> int:
        """How many keys are due and not in work: what a user would call the backlog."""
        return sum(
            1 for entry in self._entries.values() if not entry.in_work and entry.due is not None and entry.due <= now
        )

    def _finish(self, key: KeyT) -> _Entry:
        entry = self._entries[key]
        entry.in_work = False
        return entry

    def _push(self, key: KeyT, due: float) -> None:
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, key))
        if len(self._heap) > 1000 + 4 * len(self._entries):
            live = ((e.due, e.in_work, k) for k, e in self._entries.items())
            self._heap = [(due, n, k) for n, (due, in_work, k) in enumerate(live) if due is not None and not in_work]
            self._count = len(self._heap)
            heapq.heapify(self._heap)


def _jitter(key: Hashable) -> float:
    """From 1 - RESYNC_JITTER to 1, the same for a key in every process."""
    return 1.0 - RESYNC_JITTER * crc32(str(key).encode()) / 2**32
