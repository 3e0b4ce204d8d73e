"""Calls between models and the batches that they wait for: finds deadlocks.

A model's code may call other models while its batch occupies an instance. A call is in a deadlock when every instance
that could serve it runs a batch that waits for this call, directly or through other calls. Only a new call can complete
such a circle, so it is enough to check each call when it is made.

A waiter, such as a batch, ends when all calls that it waits for are answered. An executing call is answered when all
its waiters can end. A queued call is answered when all waiters of one of its model's instances can end.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from halimede.core.graph import reachable


@dataclass(slots=True)
class Held:
    """The call is answered when all of these have ended: its batch, or the request of an ensemble."""

    by: Sequence[Hashable]


@dataclass(slots=True)
class Queued:
    """The call is served as soon as one instance is free. Has the waiters of each instance; empty for a free one.

    `in_sequence`: the call's sequence is at an instance, which is the only one listed.
    """

    instances: Sequence[Sequence[Hashable]]
    in_sequence: bool = False


Place = Held | Queued | None
"""Where a request is; None when it is finished."""


class WaitGraph:
    """The calls under way by what waits for them. `place_of` gives the place of a request by its ticket."""

    __slots__ = ("_calls", "_place_of", "_waiters")

    def __init__(self, place_of: Callable[[int], Place]) -> None:
        self._place_of = place_of
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
        place = self._place_of(ticket)
        # The usual case: the instances that serve the call wait for no other call.
        if _is_served(place, {waiter for waiter in _waiters_in(place) if waiter not in self._calls}):
            return False
        places, waiters = self._reachable(ticket)
        # Collect the waiters that can end, beginning with those that wait for no call, until none is added.
        ends: set[Hashable] = set()
        answered: set[int] = set()
        grows = True
        while grows:
            grows = False
            for waiter in waiters - ends:
                if self._calls.get(waiter, set()) <= answered:
                    ends.add(waiter)
                    grows = True
            for call, place in places.items():
                if call not in answered and _is_served(place, ends):
                    answered.add(call)
                    grows = True
        return ticket not in answered

    def _reachable(self, ticket: int) -> tuple[dict[int, Place], set[Hashable]]:
        """The places of all calls on which this call depends, and the waiters in these places."""
        places: dict[int, Place] = {}
        waiters: set[Hashable] = set()

        def dependencies(call: int) -> Iterator[int]:
            place = places[call] = self._place_of(call)
            for waiter in _waiters_in(place):
                # Many calls can wait for one waiter, which has many calls: they are listed once.
                if waiter not in waiters:
                    waiters.add(waiter)
                    yield from self._calls.get(waiter, ())

        reachable(ticket, dependencies)
        return places, waiters


def _waiters_in(place: Place) -> Sequence[Hashable]:
    match place:
        case Held(by):
            return by
        case Queued(instances):
            return [waiter for instance in instances for waiter in instance]
        case None:
            return ()


def _is_served(place: Place, ends: set[Hashable]) -> bool:
    match place:
        case Held(by):
            return ends.issuperset(by)
        case Queued(instances):
            return any(ends.issuperset(instance) for instance in instances)
        case None:
            return True
