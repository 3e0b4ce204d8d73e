"""The sequence slots of the instances.

A new sequence gets a sequence slot of the instance with the fewest sequences, so that they are spread over the
instances; of equal ones the first instance. It gets the lowest free sequence slot there, so that batches of the direct
strategy have few null rows.
"""

from heapq import heappop, heappush

from halimede.core.schedule.actions import Slot
from halimede.core.schedule.prefetch import TakeBack
from halimede.core.schedule.sequences.batchers import Batcher, DirectBatcher, OldestBatcher
from halimede.core.schedule.sequences.live import LiveSequence
from halimede.core.schedule.sequences.policy import DirectPolicy, SequencePolicy


class SlotSequences:
    """One slot: its sequence slots, its batcher, and the sequences of the batch that it runs (empty for none)."""

    __slots__ = ("_freed", "_next", "assigned", "batch", "batcher", "slot")

    def __init__(self, slot: Slot, batcher: Batcher) -> None:
        self.slot = slot
        self.batcher = batcher
        self.batch: list[LiveSequence] = []
        self.assigned: dict[int, LiveSequence] = {}
        """By sequence slot."""
        # Sequence slots are many if the configuration says so: those that were never taken are not listed.
        self._next = 0
        self._freed: list[int] = []
        """A heap of the free sequence slots below `_next`."""

    def __repr__(self) -> str:
        where = f"{self.slot.instance}.{self.slot.number}"
        return f"<SlotSequences {where} assigned={len(self.assigned)} running={len(self.batch)}>"

    def assign(self, sequence: LiveSequence) -> None:
        """Give the sequence the lowest free sequence slot."""
        if self._freed:
            sequence_slot = heappop(self._freed)
        else:
            sequence_slot = self._next
            self._next += 1
        sequence.slot, sequence.sequence_slot = self.slot, sequence_slot
        self.assigned[sequence_slot] = sequence

    def free(self, sequence_slot: int) -> None:
        del self.assigned[sequence_slot]
        heappush(self._freed, sequence_slot)


class SequenceSlots:
    """All slots by slot, and which of them have free sequence slots, or a request that may run."""

    __slots__ = ("_has_delays", "_policy", "_roomy", "_take_back", "by_slot", "ready")

    def __init__(self, policy: SequencePolicy, take_back: TakeBack | None) -> None:
        """Without `take_back` no batch is prefetched."""
        self._policy = policy
        self._take_back = take_back
        self._has_delays = True
        self.by_slot: dict[Slot, SlotSequences] = {}
        self._roomy: dict[Slot, SlotSequences] = {}
        """Those with a free sequence slot."""
        self.ready: dict[Slot, SlotSequences] = {}
        """Those that may get a batch: they run none although sequences are eligible, or their next can be prefetched.
        """

    def add(self, slot: Slot) -> None:
        """Add a slot without sequences. No effect when it exists."""
        if slot not in self.by_slot:
            policy = self._policy
            strategy = policy.strategy
            if isinstance(strategy, DirectPolicy):
                entry = SlotSequences(slot, DirectBatcher(strategy, policy.sequence_slots))
            else:
                entry = SlotSequences(slot, OldestBatcher(strategy, slot, self._take_back))
            if not self._has_delays:
                entry.batcher.end_delay()
            self.by_slot[slot] = self._roomy[slot] = entry

    def end_delays(self) -> None:
        """No batch of any slot waits for its delay from now on."""
        self._has_delays = False
        for entry in self.by_slot.values():
            entry.batcher.end_delay()

    def remove(self, slot: Slot) -> SlotSequences | None:
        self._roomy.pop(slot, None)
        self.ready.pop(slot, None)
        return self.by_slot.pop(slot, None)

    @property
    def sequence_slots(self) -> int:
        """The sequence slots of all slots, taken or not."""
        return len(self.by_slot) * self._policy.sequence_slots

    @property
    def assigned(self) -> int:
        """The sequence slots that sequences have."""
        return sum(len(entry.assigned) for entry in self.by_slot.values())

    @property
    def has_room(self) -> bool:
        return bool(self._roomy)

    def assign(self, sequence: LiveSequence) -> None:
        """Give the sequence a sequence slot. There must be a free one."""
        entry = min(self._roomy.values(), key=_fewest)
        entry.assign(sequence)
        if len(entry.assigned) >= self._policy.sequence_slots:
            del self._roomy[entry.slot]

    def free(self, slot: Slot, sequence_slot: int) -> None:
        """Free a sequence slot. No effect when its slot was removed."""
        entry = self.by_slot.get(slot)
        if entry is not None:
            entry.free(sequence_slot)
            self._roomy[slot] = entry

    def make_eligible(self, sequence: LiveSequence, now_ns: int) -> None:
        """The next request of an assigned sequence may run. No effect if that is known, or the sequence slot was
        removed."""
        if sequence.slot is None or sequence.is_eligible:
            return
        entry = self.by_slot[sequence.slot]
        entry.batcher.add(sequence, now_ns, is_idle=not entry.batch)
        sequence.is_eligible = True
        self._note(entry)

    def try_make_ineligible(self, sequence: LiveSequence) -> bool:
        """Undo `make_eligible`, also after the slot was removed; False if the request has begun."""
        entry = None if sequence.slot is None else self.by_slot.get(sequence.slot)
        if entry is None:
            return True
        if not entry.batcher.try_remove(sequence):
            return False
        sequence.is_eligible = False
        if not entry.batcher:
            self.ready.pop(entry.slot, None)
        return True

    def end(self, entry: SlotSequences) -> list[LiveSequence]:
        """The slot's batch has ended, and the prefetched one has begun. Returns the sequences of the first."""
        batch, entry.batch = entry.batch, entry.batcher.end()
        self._note(entry)
        return batch

    def _note(self, entry: SlotSequences) -> None:
        """Note whether the slot may get a batch."""
        if entry.batcher.can_prefetch() if entry.batch else entry.batcher:
            self.ready[entry.slot] = entry


def _fewest(entry: SlotSequences) -> tuple[int, Slot]:
    return len(entry.assigned), entry.slot
