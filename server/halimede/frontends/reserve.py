"""Room in a port that is full: idle connections that are replaced, and a few more for control calls."""

from collections.abc import Callable, Container
from typing import Any, Protocol


class IdleConnection(Protocol):
    """A connection that was idle when it was last checked."""

    def close_if_idle(self, since: float) -> bool:
        """Close unless a request is received or processed, or was after `since`. Returns whether it closes."""


class Reserve:
    """One per port. A round of checks calls `note` for each idle connection, and then `end_round`."""

    def __init__(self, make: Callable[[], Any] | None) -> None:
        """`make` makes a connection that serves control calls alone; None for a port without such connections."""
        self.make = make
        self.connections: set[object] = set()
        """Those that `make` has made and that are not closed."""
        self._noted: list[tuple[float, IdleConnection]] = []
        self._idle: list[tuple[float, IdleConnection]] = []
        """The longest idle last."""

    def note(self, connection: IdleConnection, idle_since: float) -> None:
        """The connection is idle since then."""
        self._noted.append((idle_since, connection))

    def end_round(self) -> None:
        """Forget what earlier rounds have noted."""
        self._idle, self._noted = self._noted, []
        self._idle.sort(key=lambda one: one[0], reverse=True)

    def replace(self, open_connections: Container[object], since: float) -> bool:
        """Close the connection that is idle for the longest time, and at least since then. False if there is none."""
        while self._idle:
            _, connection = self._idle.pop()
            if connection in open_connections and connection.close_if_idle(since):
                return True
        return False
