"""Deadlines of keys that may be removed before they expire."""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

STALE_DEADLINES = 64
"""Entries of removed keys stay in the heap until they are its first. Above this number they are removed when they
outnumber the others."""

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Keys by deadline in nanoseconds. Keys with the same deadline are in the order in which they were added."""

    __slots__ = ("_added", "_deadline_of", "_heap")

    def __init__(self) -> None:
        self._deadline_of: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._deadline_of)

    @property
    def entries(self) -> int:
        """How many entries are kept, including those of removed keys."""
        return len(self._heap)

    def add(self, key: K, deadline_ns: int) -> None:
        """Add a key that is not present."""
        if len(self._heap) > 2 * len(self._deadline_of) + STALE_DEADLINES:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapify(self._heap)
        self._deadline_of[key] = deadline_ns
        self._added += 1
        heappush(self._heap, (deadline_ns, self._added, key))

    def discard(self, key: K) -> None:
        """Remove a key. Ignored when it is not present."""
        self._deadline_of.pop(key, None)

    def next(self) -> int | None:
        """The earliest deadline; None when there is no key."""
        while self._heap:
            if self._is_current(self._heap[0]):
                return self._heap[0][0]
            heappop(self._heap)
        return None

    def pop_due(self, now_ns: int) -> list[K]:
        """Remove the keys whose deadline has come. Returns them by deadline."""
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now_ns:
            entry = heappop(self._heap)
            if self._is_current(entry):
                del self._deadline_of[entry[2]]
                due.append(entry[2])
        return due

    def clear(self) -> None:
        self._deadline_of.clear()
        self._heap.clear()

    def _is_current(self, entry: tuple[int, int, K]) -> bool:
        # A key may have been removed and added again: then only the entry with its present deadline counts. Two entries
        # with the same key and deadline are the same deadline.
        return self._deadline_of.get(entry[2]) == entry[0]
