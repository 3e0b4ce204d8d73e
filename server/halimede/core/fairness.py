"""Which client is served next when clients ask for more than the server can do at once.

Clients are known by their addresses, and an address has connections. Addresses take turns, and the connections of an
address take turns when it has one. So a client that sends little waits for one turn of each other address at most,
however much those send.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

FRESH_IN_A_ROW = 3
"""After so many turns of keys that have had none lately, one that has had some is next."""

REMEMBERED_KEYS = 1024
"""Of how many keys it is known that they have had a turn."""


class Rotation(Generic[K]):
    """Keys that wait for a turn. Most turns are for those that have had none lately, because they ask for little."""

    def __init__(self) -> None:
        self._fresh: deque[K] = deque()
        self._served: deque[K] = deque()
        self._had_turns: dict[K, None] = {}
        self._fresh_turns = 0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._served)

    def add(self, key: K) -> None:
        """The key, which does not wait yet, waits for a turn."""
        (self._served if key in self._had_turns else self._fresh).append(key)

    def take(self) -> K:
        """Take the next key. IndexError if no key waits."""
        if self._fresh and (self._fresh_turns < FRESH_IN_A_ROW or not self._served):
            self._fresh_turns += 1
            key = self._fresh.popleft()
        else:
            self._fresh_turns = 0
            key = self._served.popleft()
        self._had_turns.pop(key, None)
        self._had_turns[key] = None
        if len(self._had_turns) > REMEMBERED_KEYS:
            del self._had_turns[next(iter(self._had_turns))]
        return key


class _Address(Generic[T]):
    """What waits of one address, by its connections."""

    def __init__(self) -> None:
        self.connections: Rotation[Hashable] = Rotation()
        self.items: dict[Hashable, T] = {}


class FairQueue(Generic[T]):
    """Items of connections of addresses, of which each connection has one at most."""

    def __init__(self) -> None:
        self._rotation: Rotation[Hashable] = Rotation()
        self._addresses: dict[Hashable, _Address[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, address: Hashable, connection: Hashable, item: T) -> None:
        """Add an item of a connection. ValueError if it has one: a second one would upset the order for all."""
        waiting = self._addresses.get(address)
        if waiting is not None and connection in waiting.items:
            raise ValueError(f"{connection!r} waits already")
        if waiting is None:
            waiting = self._addresses[address] = _Address()
            self._rotation.add(address)
        waiting.connections.add(connection)
        waiting.items[connection] = item
        self._count += 1

    def pop(self) -> T:
        """Take the next item. IndexError if the queue is empty."""
        address = self._rotation.take()
        waiting = self._addresses[address]
        item = waiting.items.pop(waiting.connections.take())
        self._count -= 1
        if waiting.items:
            self._rotation.add(address)
        else:
            del self._addresses[address]
        return item
