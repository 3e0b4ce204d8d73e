"""The actions of a scheduler, which the pump performs in order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from halimede.core.config.model_config import ControlKind
from halimede.core.types import InferenceError
from halimede.core.types.statistics import FailureReason


class Slot(NamedTuple):
    """The place of one batch at an instance: the instance's ordinal in its model, and the number of the slot there.

    A tuple, because tuples hash and compare in native code.
    """

    instance: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One position in the batch of a sequence model, with its values of the model's control inputs.

    `request` None is a null row: an unused position before or between used ones. It gets a copy of another request's
    inputs with READY false, and its outputs are dropped. A control that is not in `controls` is false, or 0.
    """

    position: int
    request: int | None
    controls: Mapping[ControlKind, int | str]


@dataclass(slots=True)
class Execute:
    """Run these requests in this order as one batch in this slot. The batch ends with one `completed` of the slot.

    A slot may get its next batch before `completed` of the last one. The worker runs the batches of a slot in order.
    `rows` are the positions of the batch, including null rows; () means one request after the other without controls.
    """

    slot: Slot
    requests: tuple[int, ...]
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer this request with this error. It has left the queue and will not run."""

    request: int
    error: InferenceError
    reason: FailureReason


Action = Execute | Fail
