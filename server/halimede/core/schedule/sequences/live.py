"""A sequence, and its queued requests."""

from collections import deque
from dataclasses import dataclass, field

from halimede.core.schedule.actions import Slot
from halimede.core.schedule.scheduler import Pending


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in the queue of its sequence. `eq=False`: requests are compared by identity."""

    pending: Pending
    enqueued_at: int
    sequence: "LiveSequence"


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence from its first request to the end of its last one. It is in one of these states:

    - in the backlog: `slot` is None;
    - assigned: it has `sequence_slot` at the instance of `slot`. At most one of its requests executes, which is
      `running`. If none does and requests are queued, the first one is eligible for the batches of the instance;
    - closed, in one of two ways: it has no queued request and gets none. A sequence slot is kept until `running` ends.
      A lost sequence is only remembered, so that its next request gets an error that explains it.
    """

    correlation: int | str
    slot: Slot | None = None
    sequence_slot: int = 0
    queue: deque[QueuedRequest] = field(default_factory=deque)
    running: QueuedRequest | None = None
    is_eligible: bool = False
    is_closed: bool = False
    is_lost: bool = False
    expires_at: int | None = None
    """The earliest timeout of its requests, while it is in the backlog."""
    id_bytes: int = 0
    """What was taken from `SequenceIds` for it."""

    def __repr__(self) -> str:
        where = "backlog" if self.slot is None else f"{self.slot.instance}.{self.slot.number}.{self.sequence_slot}"
        return f"<LiveSequence {self.correlation!r} {where} queue={len(self.queue)} running={self.running is not None}>"
