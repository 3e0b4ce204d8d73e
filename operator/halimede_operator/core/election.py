"""Who of several operators acts: the rules around one Lease object, as values of one local clock.

As client-go's: a holder that does not renew is dead when its record has not changed for the lease's duration *as we
watched it*, by our own clock; the times written in the record are for people. So clocks that differ do no harm.

One thing is different on purpose. A holder that cannot renew (the API server is away) stops acting after
`RENEW_DEADLINE_S`, but stays: it renews when it can, unless it then sees that somebody else holds the lease. An outage
of the API server is not a reason to restart the operator.
"""

from dataclasses import dataclass
from enum import Enum, auto

LEASE_S = 15.0
RENEW_DEADLINE_S = 10.0
RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Record:
    """What the Lease says."""

    holder: str
    """'' when it was given back."""
    renewed: str
    """As written there; only compared."""
    transitions: int
    duration_s: float = LEASE_S


class Step(Enum):
    """What to do about the Lease now."""

    CREATE = auto()
    TAKE = auto()
    """Write ourselves into it: it is nobody's, or its holder is dead."""
    RENEW = auto()
    WAIT = auto()
    """Somebody else holds it."""
    GIVE_UP = auto()
    """It was ours and is somebody else's now: what we believe about the cluster may be old."""


class Election:
    def __init__(self, identity: str) -> None:
        self.identity = identity
        self._record: Record | None = None
        self._changed_at = 0.0
        """When we first saw the record as it is."""
        self._renewed_at: float | None = None
        """When the last write that succeeded was begun; None: never."""

    def saw(self, record: Record | None, now: float) -> None:
        """The Lease was read; None: there is none."""
        if record != self._record:
            self._record = record
            self._changed_at = now

    def wrote(self, record: Record, begun: float, now: float) -> None:
        """Our write of the record, begun then, succeeded."""
        self.saw(record, now)
        self._renewed_at = begun

    def step(self, now: float) -> Step:
        record = self._record
        if record is None:
            return Step.CREATE
        if record.holder == self.identity:
            return Step.RENEW
        if self._renewed_at is not None and record.holder:
            return Step.GIVE_UP
        if not record.holder or now >= self._changed_at + record.duration_s:
            return Step.TAKE
        return Step.WAIT

    def next_record(self, renewed: str) -> Record:
        """What to write for CREATE, TAKE and RENEW."""
        if self._record is None:
            return Record(self.identity, renewed, 0)
        taken = self._record.holder != self.identity
        return Record(self.identity, renewed, self._record.transitions + int(taken))

    def may_act(self, now: float) -> bool:
        """Whether nobody else can hold the lease at this time, so that writes are safe."""
        record = self._record
        if record is None or record.holder != self.identity or self._renewed_at is None:
            return False
        return now < self._renewed_at + RENEW_DEADLINE_S
