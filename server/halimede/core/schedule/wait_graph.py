"""Calls between models and the batches that they wait for: finds deadlocks.

A model's code may call other models while its batch occupies an instance. A call is in a deadlock when every instance
that could serve it runs a batch that waits for this call, directly or through other calls. Only a new call can complete
such a circle, so it is enough to check each call when it is made.

A waiter, such as a batch, ends when all calls that it waits for are answered. A call is answered when all waiters of
one of the ways to serve it can end: an executing call has one way, a queued one a way for each instance.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Dependencies:
    """What a request waits for: the ways in which it can be served, each with the waiters that must end before.

    A request that executes has one way: its batch, or the request of an ensemble, must end. A queued one has a way for
    each instance, empty for a free one. `in_sequence`: it is queued, and the instance that has its sequence is its only
    way.
    """

    ways: Sequence[Sequence[Hashable]]
    in_sequence: bool = False

    def is_served(self, ends: set[Hashable]) -> bool:
        """Whether the request is answered when these waiters have ended."""
        return any(ends.issuperset(way) for way in self.ways)

    def waiters(self) -> set[Hashable]:
        """The waiters of all ways."""
        return {waiter for way in self.ways for waiter in way}


ANSWERED = Dependencies([()])
"""The dependencies of a finished request."""


class WaitGraph:
    """The calls under way by what waits for them. `dependencies_of` gives those of a request by its ticket."""

    __slots__ = ("_calls", "_dependencies_of", "_waiters")

    def __init__(self, dependencies_of: Callable[[int], Dependencies]) -> None:
        self._dependencies_of = dependencies_of
        self._calls: dict[Hashable, set[int]] = {}
        self._waiters: dict[int, Hashable] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def tickets(self) -> Iterable[int]:
        """The tickets of all calls under way, in the order of the calls."""
        return self._waiters

    def add(self, ticket: int, waiter: Hashable) -> None:
        """Add a call that `waiter` waits for."""
        self._waiters[ticket] = waiter
        self._calls.setdefault(waiter, set()).add(ticket)

    def remove(self, ticket: int) -> None:
        """Remove a call that is answered. Ignored when it is unknown."""
        waiter = self._waiters.pop(ticket, None)
        if waiter is None:
            return
        calls = self._calls[waiter]
        calls.discard(ticket)
        if not calls:
            del self._calls[waiter]

    def is_stuck(self, ticket: int) -> bool:
        """Whether the call is in a deadlock."""
        needs = self._dependencies_of(ticket)
        # The usual case: the instances that serve the call wait for no other call.
        if needs.is_served({waiter for waiter in needs.waiters() if waiter not in self._calls}):
            return False
        reachable, waiters = self._reachable(ticket)
        # Collect the calls that are answered, beginning with those behind waiters without calls, until none is added.
        answered: set[int] = set()
        while True:
            ends = {waiter for waiter in waiters if self._calls.get(waiter, set()) <= answered}
            found = {call for call, needs in reachable.items() if call not in answered and needs.is_served(ends)}
            if not found:
                return ticket not in answered
            answered |= found

    def _reachable(self, ticket: int) -> tuple[dict[int, Dependencies], set[Hashable]]:
        """The dependencies of all calls on which this call depends, and the waiters in them."""
        reachable: dict[int, Dependencies] = {}
        waiters: set[Hashable] = set()
        pending = [ticket]
        while pending:
            call = pending.pop()
            reachable[call] = self._dependencies_of(call)
            # Many calls can wait for one waiter, which has many calls: they are listed once.
            for waiter in reachable[call].waiters() - waiters:
                waiters.add(waiter)
                pending += self._calls.get(waiter, ())
        return reachable, waiters
