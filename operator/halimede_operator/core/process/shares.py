"""Divides the workers between groups: which group works next, so that a busy group does not delay the others.

- The group that has used the least time works next. A group that comes back starts at the time of the others: a pause
  earns no credit.
- One group has at most `most` workers, so that a free one remains for the next group.
- A group whose work is expensive has one worker (`MOST_EXPENSIVE`). All work shares one thread, and a step of one
  item waits for a step of each other item.
"""

import heapq
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

GroupT = TypeVar("GroupT", bound=Hashable)
ItemT = TypeVar("ItemT")

EXPENSIVE_S = 0.012
"""Of CPU, for one item on average. A reconcile of a model without peculiarities takes a third of it."""
MOST_EXPENSIVE = 1
MOST_OF_NEW = 2
"""Workers of a group of which nothing is known."""
TAKEN_S = 0.001
"""What each item is counted with at least."""
WEIGHT_OF_NEWEST = 0.25
REMEMBERED = 1000
"""Groups, at least."""


@dataclass(slots=True)
class _Group(Generic[ItemT]):
    used_s: float
    waiting: deque[ItemT] = field(default_factory=deque)
    working: int = 0
    mean_s: float | None = None
    """Of the last items; None before the first one has ended."""
    is_listed: bool = False
    """It has an item in the heap."""


class Shares(Generic[GroupT, ItemT]):
    """Items that may be worked on now, by group."""

    def __init__(self, most: int) -> None:
        """most: workers of one group."""
        self._most = most
        self._groups: dict[GroupT, _Group[ItemT]] = {}
        self._heap: list[tuple[float, int, GroupT]] = []
        self._count = 0
        self._reached_s = 0.0
        """What the group that was served last had used."""
        self._forget_at = REMEMBERED

    def __len__(self) -> int:
        """How many groups are remembered."""
        return len(self._groups)

    def add(self, group: GroupT, item: ItemT) -> None:
        """The item may be worked on; items of one group keep their order."""
        state = self._groups.setdefault(group, _Group(self._reached_s))
        if not state.waiting and not state.working:
            state.used_s = max(state.used_s, self._reached_s)
        state.waiting.append(item)
        self._list(group, state)

    @property
    def can_take(self) -> bool:
        """Whether `take` would return an item."""
        return bool(self._heap)

    def take(self) -> tuple[GroupT, ItemT] | None:
        """The next item, or None. `finish` must follow."""
        while self._heap:
            used_s, _, group = heapq.heappop(self._heap)
            state = self._groups[group]
            state.is_listed = False
            if state.used_s > used_s:
                # It has used more since it was listed.
                self._list(group, state)
                continue
            item = state.waiting.popleft()
            state.working += 1
            self._reached_s = state.used_s
            state.used_s += TAKEN_S
            self._list(group, state)
            return group, item
        return None

    def finish(self, group: GroupT, cost_s: float) -> None:
        """Work on an item of the group has ended. cost_s: its CPU time."""
        state = self._groups[group]
        state.working -= 1
        state.used_s += cost_s
        mean_s = cost_s if state.mean_s is None else state.mean_s
        state.mean_s = mean_s + WEIGHT_OF_NEWEST * (cost_s - mean_s)
        self._list(group, state)
        if len(self._groups) > self._forget_at:
            self._forget_idle()

    def _list(self, group: GroupT, state: _Group[ItemT]) -> None:
        if state.waiting and not state.is_listed and state.working < self._most_of(state):
            state.is_listed = True
            self._count += 1
            heapq.heappush(self._heap, (state.used_s, self._count, group))

    def _most_of(self, state: _Group[ItemT]) -> int:
        if state.mean_s is None:
            return MOST_OF_NEW
        return self._most if state.mean_s < EXPENSIVE_S else MOST_EXPENSIVE

    def _forget_idle(self) -> None:
        """Forget idle groups, except those that have used more than the others while these had work."""
        busy = {group: state for group, state in self._groups.items() if state.waiting or state.working}
        if busy:
            busy |= {group: state for group, state in self._groups.items() if state.used_s > self._reached_s}
        self._groups = busy
        self._forget_at = max(REMEMBERED, 2 * len(busy))
