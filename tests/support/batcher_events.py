"""Events of random scripts against a batcher."""

from collections.abc import Callable
from dataclasses import dataclass

from halimede.core.schedule.actions import Slot
from halimede.core.schedule.scheduler import Pending
from halimede.core.types import InferenceError


@dataclass(frozen=True, slots=True)
class Cancel:
    back: int
    """How many keys before the last one."""


@dataclass(frozen=True, slots=True)
class Complete:
    slot: Slot


@dataclass(frozen=True, slots=True)
class Add:
    slot: Slot


@dataclass(frozen=True, slots=True)
class Lose:
    slot: Slot
    is_unread: bool
    """Whether the worker had not read its batches."""


@dataclass(frozen=True, slots=True)
class Advance:
    ns: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Sleep until `wake_at`."""


def outcome(enqueue: Callable[[Pending, int], None], pending: Pending, now: int) -> InferenceError | None:
    try:
        enqueue(pending, now)
    except InferenceError as error:
        return error
    return None
