"""Which calls wait for which batches: finds the call that nobody will ever answer.

A model's code may call other models while its batch holds an instance. A call that only instances could serve whose own
batches wait for it, directly or through other calls, would wait for ever. Only a new call can close such a circle: one
look when a call is made finds them all.

What holds a call up ends when all calls that it waits for are answered. A call that runs is answered when all that
holds it up can end; one that is queued, when all that holds up one of its model's instances can.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Held:
    """It is answered when all of these have ended: its batch, or the steps of an ensemble's request, and the like."""

    by: Sequence[Hashable]


@dataclass(slots=True)
class Queued:
    """It is served as soon as one of these instances is: each by what holds it up, nothing for one that is free."""

    instances: Sequence[Sequence[Hashable]]


Place = Held | Queued | None
"""Where a request is; None where nothing holds it up, because it is over."""


class WaitGraph:
    """The calls that are under way, by what waits for them. `place_of` says where a request is, by ticket."""

    __slots__ = ("_calls", "_place_of", "_waiters")

    def __init__(self, place_of: Callable[[int], Place]) -> None:
        self._place_of = place_of
        self._calls: dict[Hashable, set[int]] = {}
        self._waiters: dict[int, Hashable] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def tickets(self) -> Iterable[int]:
        """Of all calls under way, in the order in which they were made."""
        return self._waiters

    def add(self, ticket: int, waiter: Hashable) -> None:
        """From now on `waiter` waits for this call."""
        self._waiters[ticket] = waiter
        self._calls.setdefault(waiter, set()).add(ticket)

    def remove(self, ticket: int) -> None:
        """The call is answered; ignored when it is not known."""
        waiter = self._waiters.pop(ticket, None)
        if waiter is None:
            return
        calls = self._calls[waiter]
        calls.discard(ticket)
        if not calls:
            del self._calls[waiter]

    def is_stuck(self, ticket: int) -> bool:
        """Whether nothing that can happen will answer this call."""
        place = self._place_of(ticket)
        # Nearly always whoever serves it waits for nobody: then there is nothing more to look at.
        if _is_served(place, {waiter for waiter in _waiters_in(place) if waiter not in self._calls}):
            return False
        places, waiters = self._reachable(ticket)
        # What can end is found from its ends on: who waits for nobody, then who waits for those, until no more is.
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
        """The places of all calls on which the answer to this one may depend, and the batches and the like in them."""
        places: dict[int, Place] = {}
        waiters: set[Hashable] = set()
        pending = [ticket]
        while pending:
            call = pending.pop()
            if call in places:
                continue
            place = places[call] = self._place_of(call)
            for waiter in _waiters_in(place):
                if waiter not in waiters:
                    waiters.add(waiter)
                    pending.extend(self._calls.get(waiter, ()))
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
