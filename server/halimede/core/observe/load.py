"""What the executor of a model version does at the time of a scrape."""

from collections.abc import Sequence
from dataclasses import dataclass

from halimede.core.observe.busy import Busy
from halimede.core.types.statistics import SequenceCount


@dataclass(frozen=True, slots=True)
class Load:
    """`queued` requests wait, the oldest one since `oldest_wait_ns`, and instances execute `executing` requests.

    `parked` is how many instances ended too often and are not restarted for minutes, `unstartable` is how many the
    machine has not started for some time. `busy` has each scheduled instance. `sequences` is None for
    a model without sequences, `in_steps` the number of requests whose steps an ensemble executes; None for a model.
    """

    queued: int = 0
    executing: int = 0
    oldest_wait_ns: int = 0
    parked: int = 0
    unstartable: int = 0
    busy: Sequence[Busy] = ()
    sequences: SequenceCount | None = None
    in_steps: int | None = None
