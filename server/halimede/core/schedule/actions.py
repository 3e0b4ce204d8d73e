"""The actions of a scheduler, which the pump performs in order."""

from dataclasses import dataclass
from typing import NamedTuple

from halimede.core.types import InferenceError
from halimede.core.types.statistics import FailureReason


class Slot(NamedTuple):
    """It runs one batch of an instance at a time: the instance's ordinal in its model, and the number of the slot
    there.

    A tuple, because tuples hash and compare in native code.
    """

    instance: int
    number: int = 0


@dataclass(slots=True)
class Execute:
    """Run these requests in this order as one batch in this slot. The batch ends with one `completed` of the slot.

    A slot may get its next batch before `completed` of the last one. The worker runs the batches of a slot in order.
    `sequence_slots` are for sequence models, one for each request: the number, from 0, of the one that its sequence has
    at the instance. The worker keeps the sequence's implicit state there, until a request with START comes to the same
    sequence slot. In the direct strategy a sequence slot is also a row of the batch, and rows between that no request
    has are null rows; the requests are in the order of their sequence slots. () for other models.
    """

    slot: Slot
    requests: tuple[int, ...]
    sequence_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer this request with this error. It has left the queue and will not run."""

    request: int
    error: InferenceError
    reason: FailureReason


@dataclass(frozen=True, slots=True)
class Warn:
    """Write this line to the log: clients or the configuration have a problem that is not an error."""

    text: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the state of this sequence slot: its sequence has ended."""

    slot: Slot
    sequence_slot: int


Action = Execute | Fail | Forget | Warn
