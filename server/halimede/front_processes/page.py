"""A page of numbers that the core and all front-end processes map.

The first number counts the changes of the models that serve: a front end keeps what it knows of a model as long as the
number stays the same. Then follow the state of the server, and the beats of the core, by which front ends see that it
runs. Each process has its parts of the totals, and its beats, by which the core sees that it runs.
"""

import mmap
import os

from halimede.frontends.totals import PortTotals, Total

_CHANGES = 0
_READY = 1
_DRAINING = 2
_CORE_BEATS = 3
_FIRST_PROCESS = 4

_HTTP_PARTS = 0
_GRPC_PARTS = 3
_DROPPED_LINES = 6
_BEATS = 7
_PARTS = 8
"""Numbers of each process."""


class Page:
    """The page, mapped into this process."""

    def __init__(self, descriptor: int, processes: int) -> None:
        """Maps the page of `create`; the caller keeps the descriptor. OSError."""
        self._processes = processes
        self._cells = memoryview(mmap.mmap(descriptor, _size(processes))).cast("Q")

    @staticmethod
    def create(processes: int) -> int:
        """The descriptor of a new page. OSError."""
        descriptor = os.memfd_create("halimede-page", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _size(processes))
        return descriptor

    @property
    def changes(self) -> int:
        """How often the models that serve have changed."""
        return self._cells[_CHANGES]

    @property
    def is_ready(self) -> bool:
        """Whether the server is ready."""
        return bool(self._cells[_READY])

    @property
    def is_draining(self) -> bool:
        """Whether the server drains."""
        return bool(self._cells[_DRAINING])

    @property
    def core_beats(self) -> int:
        """How often the core has beaten."""
        return self._cells[_CORE_BEATS]

    # Only the core calls these three.

    def note_change(self) -> None:
        """Count a change of the models that serve."""
        self._cells[_CHANGES] += 1

    def publish_state(self, *, is_ready: bool, is_draining: bool) -> None:
        """Set the state of the server."""
        self._cells[_READY], self._cells[_DRAINING] = is_ready, is_draining

    def beat_core(self) -> None:
        """The core runs."""
        self._cells[_CORE_BEATS] += 1

    # Parts of each process.

    def http_totals(self, process: int) -> PortTotals:
        """The totals of the HTTP service, for one process."""
        return self._totals(process, _HTTP_PARTS)

    def grpc_totals(self, process: int) -> PortTotals:
        """The totals of the gRPC service, for one process."""
        return self._totals(process, _GRPC_PARTS)

    def clear(self, process: int) -> None:
        """The process has ended: its parts of the totals and its beats are 0."""
        for part in (*range(_DROPPED_LINES), _BEATS):
            self._cells[self._index(process, part)] = 0

    def beat(self, process: int) -> None:
        """This process runs. Only the process itself calls this, several times a second."""
        self._cells[self._index(process, _BEATS)] += 1

    def beats(self, process: int) -> int:
        """How often the process has beaten since its start."""
        return self._cells[self._index(process, _BEATS)]

    def publish_dropped_lines(self, process: int, count: int) -> None:
        """`count` lines of this process were not logged since its start."""
        self._cells[self._index(process, _DROPPED_LINES)] = count

    def keep_dropped_lines(self, process: int) -> int:
        """The lines of a process that has ended, which are no longer counted here."""
        index = self._index(process, _DROPPED_LINES)
        count, self._cells[index] = self._cells[index], 0
        return count

    def dropped_lines(self) -> int:
        """Of all processes."""
        return sum(self._cells[self._index(process, _DROPPED_LINES)] for process in range(self._processes))

    def _totals(self, process: int, first: int) -> PortTotals:
        return PortTotals(*(self._total(process, first + part) for part in range(3)))

    def _total(self, process: int, part: int) -> Total:
        others = tuple(self._index(other, part) for other in range(self._processes) if other != process)
        return Total(self._cells, self._index(process, part), others)

    def _index(self, process: int, part: int) -> int:
        return _FIRST_PROCESS + process * _PARTS + part


def _size(processes: int) -> int:
    return -(-8 * (_FIRST_PROCESS + processes * _PARTS) // mmap.PAGESIZE) * mmap.PAGESIZE
