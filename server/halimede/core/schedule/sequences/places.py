"""The seats of the instances.

A new sequence gets a seat of the instance with the fewest sequences, so that they are spread over the instances; of
equal ones the first instance. It gets the lowest free seat there, so that batches of the direct strategy have few null
rows.
"""

from heapq import heappop, heappush

from halimede.core.schedule.actions import Slot
from halimede.core.schedule.prefetch import TakeBack
from halimede.core.schedule.sequences.batchers import Batcher, DirectBatcher, OldestBatcher
from halimede.core.schedule.sequences.live import LiveSequence
from halimede.core.schedule.sequences.policy import DirectPolicy, SequencePolicy


class Place:
    """One slot: its seats, its batcher, and the sequences of the batch that it runs (empty for none)."""

    __slots__ = ("_freed", "_next", "batch", "batcher", "seated", "slot")

    def __init__(self, slot: Slot, batcher: Batcher) -> None:
        self.slot = slot
        self.batcher = batcher
        self.batch: list[LiveSequence] = []
        self.seated: dict[int, LiveSequence] = {}
        """By seat."""
        # Seats are many if the configuration says so: those that were never taken are not listed.
        self._next = 0
        self._freed: list[int] = []
        """A heap of the free seats below `_next`."""

    def __repr__(self) -> str:
        return f"<Place {self.slot.instance}.{self.slot.number} seated={len(self.seated)} running={len(self.batch)}>"

    def seat(self, sequence: LiveSequence) -> None:
        """Give the sequence the lowest free seat."""
        if self._freed:
            seat = heappop(self._freed)
        else:
            seat = self._next
            self._next += 1
        sequence.slot, sequence.seat = self.slot, seat
        self.seated[seat] = sequence

    def free(self, seat: int) -> None:
        del self.seated[seat]
        heappush(self._freed, seat)


class Places:
    """All slots by slot, and which of them have free seats, or a request that may run."""

    __slots__ = ("_has_delays", "_policy", "_roomy", "_take_back", "by_slot", "ready")

    def __init__(self, policy: SequencePolicy, take_back: TakeBack | None) -> None:
        """Without `take_back` no batch is prefetched."""
        self._policy = policy
        self._take_back = take_back
        self._has_delays = True
        self.by_slot: dict[Slot, Place] = {}
        self._roomy: dict[Slot, Place] = {}
        """Those with a free seat."""
        self.ready: dict[Slot, Place] = {}
        """Those that may get a batch: they run none although sequences are eligible, or their next can be prefetched.
        """

    def add(self, slot: Slot) -> None:
        """Add a slot without sequences. No effect when it exists."""
        if slot not in self.by_slot:
            policy = self._policy
            strategy = policy.strategy
            if isinstance(strategy, DirectPolicy):
                place = Place(slot, DirectBatcher(strategy, policy.seats))
            else:
                place = Place(slot, OldestBatcher(strategy, slot, self._take_back))
            if not self._has_delays:
                place.batcher.end_delay()
            self.by_slot[slot] = self._roomy[slot] = place

    def end_delays(self) -> None:
        """No batch of any slot waits for its delay from now on."""
        self._has_delays = False
        for place in self.by_slot.values():
            place.batcher.end_delay()

    def remove(self, slot: Slot) -> Place | None:
        self._roomy.pop(slot, None)
        self.ready.pop(slot, None)
        return self.by_slot.pop(slot, None)

    @property
    def seats(self) -> int:
        """The seats of all slots, taken or not."""
        return len(self.by_slot) * self._policy.seats

    @property
    def seated(self) -> int:
        """The seats that sequences have."""
        return sum(len(place.seated) for place in self.by_slot.values())

    @property
    def has_room(self) -> bool:
        return bool(self._roomy)

    def seat(self, sequence: LiveSequence) -> None:
        """Give the sequence a seat. There must be a free one."""
        place = min(self._roomy.values(), key=_fewest)
        place.seat(sequence)
        if len(place.seated) >= self._policy.seats:
            del self._roomy[place.slot]

    def free(self, slot: Slot, seat: int) -> None:
        """Free a seat. No effect when its slot was removed."""
        place = self.by_slot.get(slot)
        if place is not None:
            place.free(seat)
            self._roomy[slot] = place

    def make_eligible(self, sequence: LiveSequence, now_ns: int) -> None:
        """The next request of a seated sequence may run. No effect if that is known, or the seat was removed."""
        if sequence.slot is None or sequence.is_eligible:
            return
        place = self.by_slot[sequence.slot]
        place.batcher.add(sequence, now_ns, is_idle=not place.batch)
        sequence.is_eligible = True
        self._note(place)

    def try_make_ineligible(self, sequence: LiveSequence) -> bool:
        """Undo `make_eligible`, also after the slot was removed; False if the request has begun."""
        place = None if sequence.slot is None else self.by_slot.get(sequence.slot)
        if place is None:
            return True
        if not place.batcher.try_remove(sequence):
            return False
        sequence.is_eligible = False
        if not place.batcher:
            self.ready.pop(place.slot, None)
        return True

    def end(self, place: Place) -> list[LiveSequence]:
        """The slot's batch has ended, and the prefetched one has begun. Returns the sequences of the first."""
        batch, place.batch = place.batch, place.batcher.end()
        self._note(place)
        return batch

    def _note(self, place: Place) -> None:
        """Note whether the place may get a batch."""
        if place.batcher.can_prefetch() if place.batch else place.batcher:
            self.ready[place.slot] = place


def _fewest(place: Place) -> tuple[int, Slot]:
    return len(place.seated), place.slot
