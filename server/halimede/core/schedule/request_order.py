"""The order of queued requests: by level, and within a level by rules that depend on what happened.

Level 1 is the first. Within a level, those within their timeout come before the late ones. The first are in the order
of arrival, the late ones in that of their timeouts.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain, islice

from halimede.core.schedule.prefetch import Batch
from halimede.core.schedule.scheduler import Pending


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in the queue. The policy of `arrival_level` applies; `level` is above it when the request has moved.

    `batch` is its batch if that is prefetched or did not run: then it is not in the order. `begins` means that it joins
    no request before it.
    """

    pending: Pending
    enqueued_at: int
    arrival_level: int
    level: int
    is_late: bool = False
    begins: bool = False
    batch: Batch | None = None


Line = OrderedDict[int, QueuedRequest]
"""Requests by key, in order. Ordered dictionaries: requests leave from the front and, when cancelled, from anywhere."""


@dataclass(slots=True)
class Lines:
    """The requests of one level: its own arrivals, those that moved here, and the late ones of both kinds."""

    own: Line = field(default_factory=OrderedDict)
    moved: Line = field(default_factory=OrderedDict)
    late: Line = field(default_factory=OrderedDict)

    @property
    def is_empty(self) -> bool:
        return not (self.own or self.moved or self.late)

    def in_order(self) -> Iterable[QueuedRequest]:
        own = self.own.values()
        on_time = merge(self.moved.values(), own, key=_enqueued_at) if self.moved else own
        return chain(on_time, self.late.values()) if self.late else on_time

    def line_of(self, request: QueuedRequest) -> Line:
        if request.is_late:
            return self.late
        return self.moved if request.level < request.arrival_level else self.own


class RequestOrder:
    """The requests of all levels, in order."""

    __slots__ = ("_default", "_levels", "_lines", "usual")

    def __init__(self, default: int) -> None:
        """Most requests have the level `default`."""
        # Only other levels with requests have lines: their number is configured, and may be very large.
        self._default = default
        self._lines: dict[int, Lines] = {}
        self._levels: list[int] = []
        self.usual: Lines
        """Those of the level `default`. They are kept when they are empty."""
        self.clear()

    def __iter__(self) -> Iterator[QueuedRequest]:
        if len(self._levels) == 1:
            return iter(self.usual.in_order())
        return chain.from_iterable(self._lines[level].in_order() for level in self._levels)

    @property
    def first(self) -> QueuedRequest:
        """There must be one."""
        return next(iter(self))

    def append(self, request: QueuedRequest) -> None:
        """Add an arrival, or a request that has moved to its level or is late now."""
        self._line_of(request)[request.pending.key] = request

    def prepend(self, requests: Sequence[QueuedRequest]) -> None:
        """Add requests, in their order, before those of their lines."""
        for request in reversed(requests):
            line = self._line_of(request)
            line[request.pending.key] = request
            line.move_to_end(request.pending.key, last=False)

    def remove(self, request: QueuedRequest) -> None:
        lines = self._lines[request.level]
        del lines.line_of(request)[request.pending.key]
        if lines.is_empty and request.level != self._default:
            del self._lines[request.level]
            self._levels.remove(request.level)

    def pop(self, count: int) -> list[int]:
        """Remove so many requests from the front. Returns their keys."""
        own = self.usual.own
        if len(self._levels) == 1 and not self.usual.moved and count <= len(own):
            # As below, but faster.
            if count == len(own):
                keys = [*own]
                own.clear()
                return keys
            keys = [*islice(own, count)]
            for key in keys:
                del own[key]
            return keys
        requests = [*islice(self, count)]
        for request in requests:
            self.remove(request)
        return [request.pending.key for request in requests]

    def clear(self) -> None:
        self.usual = Lines()
        self._lines = {self._default: self.usual}
        self._levels = [self._default]

    def _line_of(self, request: QueuedRequest) -> Line:
        lines = self._lines.get(request.level) or self._make_lines(request.level)
        return lines.line_of(request)

    def _make_lines(self, level: int) -> Lines:
        lines = self._lines[level] = Lines()
        insort(self._levels, level)
        return lines


def _enqueued_at(request: QueuedRequest) -> int:
    return request.enqueued_at
