"""The order of requests with priority levels: by level, and within a level by rules that depend on what happened."""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge

from halimede.core.schedule.prefetch import Batch
from halimede.core.schedule.scheduler import Pending

RETURNED = 0
"""The level of requests of a batch that did not run."""


@dataclass(slots=True, eq=False)
class LevelRequest:
    """A queued request. The policy of `arrival_level` applies; `level` is above it when the request has moved.

    `batch` is the prefetched batch of the request.
    """

    pending: Pending
    enqueued_at: int
    arrival_level: int
    level: int
    is_late: bool = False
    batch: Batch | None = None


Line = OrderedDict[int, LevelRequest]
"""Requests by key, in order. Ordered dictionaries: requests leave from the front and, when cancelled, from anywhere."""


@dataclass(slots=True)
class Lines:
    """The requests of one level: its own arrivals, those that moved here, and the late ones of both kinds."""

    own: Line = field(default_factory=OrderedDict)
    moved: Line = field(default_factory=OrderedDict)
    late: Line = field(default_factory=OrderedDict)

    def __bool__(self) -> bool:
        return bool(self.own or self.moved or self.late)

    def in_order(self) -> Iterator[LevelRequest]:
        if self.moved:
            yield from merge(self.moved.values(), self.own.values(), key=_enqueued_at)
        else:
            yield from self.own.values()
        yield from self.late.values()

    def line_of(self, request: LevelRequest) -> Line:
        if request.is_late:
            return self.late
        return self.moved if request.level < request.arrival_level else self.own


class LevelOrder:
    """Batches that did not run, and then the requests of all levels. Iterates over the latter."""

    __slots__ = ("_levels", "_lines", "returned")

    def __init__(self) -> None:
        # Only levels with requests have lines: their number is configured, and may be very large.
        self._lines: dict[int, Lines] = {}
        self._levels: list[int] = []
        self.returned: deque[Line] = deque()
        """The batches that did not run."""

    def __bool__(self) -> bool:
        return bool(self._levels or self.returned)

    def __iter__(self) -> Iterator[LevelRequest]:
        for level in self._levels:
            yield from self._lines[level].in_order()

    def append(self, request: LevelRequest) -> None:
        """Add a request behind those of its line."""
        self._line_of(request)[request.pending.key] = request

    def prepend(self, requests: Sequence[LevelRequest]) -> None:
        """Add requests, in their order, before those of their lines."""
        for request in reversed(requests):
            line = self._line_of(request)
            line[request.pending.key] = request
            line.move_to_end(request.pending.key, last=False)

    def put_back(self, requests: Sequence[LevelRequest]) -> None:
        """Add a batch that did not run, before all others. Its requests are of the level RETURNED."""
        self.returned.appendleft(OrderedDict((request.pending.key, request) for request in requests))

    def remove(self, request: LevelRequest) -> None:
        key, level = request.pending.key, request.level
        if level == RETURNED:
            line = next(line for line in self.returned if key in line)
            del line[key]
            if not line:
                self.returned.remove(line)
            return
        lines = self._lines[level]
        del lines.line_of(request)[key]
        if not lines:
            del self._lines[level]
            self._levels.remove(level)

    def clear(self) -> None:
        for each in (self._lines, self._levels, self.returned):
            each.clear()

    def _line_of(self, request: LevelRequest) -> Line:
        lines = self._lines.get(request.level)
        if lines is None:
            lines = self._lines[request.level] = Lines()
            insort(self._levels, request.level)
        return lines.line_of(request)


def _enqueued_at(request: LevelRequest) -> int:
    return request.enqueued_at
