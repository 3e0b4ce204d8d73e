"""Counts over all front-end processes of one server, so that a limit holds for the server and not for each process.

The processes share a page of numbers. Each writes its own part of a count and reads those of the others; a part that is
read is at most some microseconds old. A server with one process has no totals.
"""

from dataclasses import dataclass


class Total:
    """One count. All methods take less than a microsecond for a few processes."""

    __slots__ = ("_cells", "_others", "_own")

    def __init__(self, cells: memoryview, own: int, others: tuple[int, ...]) -> None:
        """`cells` has format "Q"; `own` and `others` are the indices of the parts."""
        self._cells = cells
        self._own = own
        self._others = others

    def publish(self, part: int) -> int:
        """Set this process's part. Returns the sum of all."""
        self._cells[self._own] = part
        return part + self.others()

    def others(self) -> int:
        """The sum of the other processes' parts."""
        cells, total = self._cells, 0
        for index in self._others:
            total += cells[index]
        return total

    def share(self) -> int:
        """What this process has when all have the same, rounded up."""
        cells = self._cells
        return -(-(cells[self._own] + self.others()) // (1 + len(self._others)))

    def is_least(self) -> bool:
        """Whether no other process has a smaller part."""
        cells = self._cells
        own = cells[self._own]
        return all(cells[index] >= own for index in self._others)


@dataclass(frozen=True, slots=True)
class PortTotals:
    """The totals of one service: its connections, the bytes held for requests, and those of unread answers."""

    connections: Total
    held_bytes: Total
    unsent_bytes: Total
