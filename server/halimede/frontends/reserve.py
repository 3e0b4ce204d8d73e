"""Room in a port that is full: idle connections that are replaced, and a few more for control calls."""

from collections.abc import Callable, Container
from math import inf
from typing import Any, Protocol


class IdleConnection(Protocol):
    """A connection that was idle when it was last checked."""

    def close_if_idle(self, since: float) -> bool:
        """Close unless a request is received or processed, or was after `since`. Returns whether it closes."""


class Reserve:
    """One per port. A round of checks calls `note` for each idle connection, and then `end_round`."""

    def __init__(self, make: Callable[[], Any] | None) -> None:
        """`make` makes a connection that serves control calls alone; None for a port without such connections."""
        self._make = make
        self.connections: dict[Any, None] = {}
        """Those of `try_make`, in order, which are not closed."""
        self._noted: list[tuple[float, IdleConnection]] = []
        self._idle: list[tuple[float, IdleConnection]] = []
        """The longest idle last."""

    def try_make(self, most: int, open_connections: Container[object]) -> Any | None:
        """A connection for control calls. It replaces the first of `most` that is idle, for however short a time: what
        serves probes must not be used up by clients that do nothing. None if all are busy."""
        if self._make is None or not most:
            return None
        if len(self.connections) >= most:
            replaced = next(
                (each for each in self.connections if each in open_connections and each.close_if_idle(inf)), None
            )
            if replaced is None:
                return None
            del self.connections[replaced]
            # Some clients take a second to close, in which their descriptors are in use.
            replaced.abort()
        connection = self._make()
        self.connections[connection] = None
        return connection

    def note(self, connection: IdleConnection, idle_since: float) -> None:
        """The connection is idle since then."""
        self._noted.append((idle_since, connection))

    def end_round(self) -> None:
        """Forget what earlier rounds have noted."""
        self._idle, self._noted = self._noted, []
        self._idle.sort(key=lambda one: one[0], reverse=True)

    def replace(self, open_connections: Container[object], since: float) -> bool:
        """Close the longest idle connection, if it is idle since then or earlier. Returns whether one was closed."""
        while self._idle:
            _, connection = self._idle.pop()
            if connection in open_connections and connection.close_if_idle(since):
                return True
        return False
