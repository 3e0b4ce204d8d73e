"""Leader election: which of several operators acts. The rules around one Lease object, with times of one local clock.

The rules are those of client-go. A holder that does not renew counts as dead when its record has not changed for the
lease's duration *while we watched it*, by our own clock. The times in the record are for people only, so clock
skew is harmless.

One rule differs on purpose. A holder that cannot renew, because the API server does not answer, stops acting after
`RENEW_DEADLINE_S`, but its process keeps running. It renews as soon as it can, unless another operator then holds the
lease. An outage of the API server is no reason to restart the operator.
"""

from dataclasses import dataclass
from enum import Enum, auto

LEASE_S = 15.0
RENEW_DEADLINE_S = 10.0
RETRY_S = 2.0
MAX_LEASE_S = 60.0
"""Every holder stops acting long before, so a longer duration, which only somebody else can have written, counts as
this one."""
MAX_TRANSITIONS = 2**31 - 1
"""The API server refuses more."""


@dataclass(frozen=True, slots=True)
class Record:
    """The content of the Lease."""

    holder: str
    """'' after it was released."""
    renewed: str
    """As the Lease has it. It is only compared, never parsed."""
    transitions: int
    duration_s: float = LEASE_S


class Step(Enum):
    """What to do with the Lease now."""

    CREATE = auto()
    TAKE = auto()
    """Become its holder: it has no holder, or the holder is dead."""
    RENEW = auto()
    WAIT = auto()
    """Another operator holds it."""
    LOST = auto()
    """We held it, and another operator holds it now: our view of the cluster may be outdated."""


class Election:
    """The state of one candidate. All times are seconds of one monotonic clock."""

    def __init__(self, identity: str, renew_deadline_s: float = RENEW_DEADLINE_S) -> None:
        self.identity = identity
        self._renew_deadline_s = renew_deadline_s
        self._record: Record | None = None
        self._changed_at = 0.0
        """When we first saw the record as it is."""
        self._renewed_at: float | None = None
        """When the last successful write began; None if there was none."""

    def saw(self, record: Record | None, now: float) -> None:
        """The Lease was read; None if it does not exist."""
        if record != self._record:
            self._record = record
            self._changed_at = now

    def wrote(self, record: Record, begun: float, now: float) -> None:
        """Our write of the record succeeded. begun: when it began."""
        self.saw(record, now)
        self._renewed_at = begun

    def step(self, now: float) -> Step:
        """What to do with the Lease at this time."""
        record = self._record
        if record is None:
            return Step.CREATE
        if record.holder == self.identity:
            return Step.RENEW
        if self._renewed_at is not None and record.holder:
            return Step.LOST
        if not record.holder or now >= self._changed_at + min(record.duration_s, MAX_LEASE_S):
            return Step.TAKE
        return Step.WAIT

    def next_record(self, renewed: str) -> Record:
        """The record to write for CREATE, TAKE and RENEW."""
        if self._record is None:
            return Record(self.identity, renewed, 0)
        taken = self._record.holder != self.identity
        return Record(self.identity, renewed, min(self._record.transitions + int(taken), MAX_TRANSITIONS))

    def may_act(self, now: float) -> bool:
        """Whether no other operator can hold the lease at this time, so that writes are safe."""
        record = self._record
        if record is None or record.holder != self.identity or self._renewed_at is None:
            return False
        return now < self._renewed_at + self._renew_deadline_s
