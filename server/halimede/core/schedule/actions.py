"""What a scheduler decides: values that the pump performs in order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from halimede.core.config.model_config import ControlKind
from halimede.core.types import InferenceError
from halimede.core.types.statistics import FailureReason


class Slot(NamedTuple):
    """One of the batches that an instance runs at a time: the instance's ordinal in its model, and the slot's number.

    A tuple, because the hash and the comparison of tuples are native code.
    """

    instance: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One position in the batch of a sequence model, and what the model's control inputs say there.

    `request` None is a null row: a position between or before others that no sequence uses. It gets a copy of another
    request's inputs, with a READY of false, and its outputs are dropped. A control that is not named is false, or 0.
    """

    position: int
    request: int | None
    controls: Mapping[ControlKind, int | str]


@dataclass(slots=True)
class Execute:
    """Run these requests, in this order, as one batch in this slot. Each has its end in one `completed` of the slot.

    A slot may be given its next batch before `completed` of its last one: it lies ready at the worker, which runs the
    batches of a slot in the order in which it got them. `rows` says where the requests stand in the batch, by position
    and with every null row; () has them one after the other, without controls.
    """

    slot: Slot
    requests: tuple[int, ...]
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer this request with this error; it left the queue and will never run."""

    request: int
    error: InferenceError
    reason: FailureReason


Action = Execute | Fail
