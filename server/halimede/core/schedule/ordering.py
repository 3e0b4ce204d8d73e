"""`preserve_ordering`: answers are sent in the order of their requests, even if instances finish in another order."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Slot(Generic[T]):
    answers: list[T] = field(default_factory=list)
    final: bool = False


class ResponseOrder(Generic[T]):
    """Holds answers back until those of all earlier requests are released. `T` is the caller's type of an answer.

    Every key that was `enqueued` must be `completed` once with `final`: failures and cancellations are answers,
    too. A request that the scheduler refused is withdrawn.
    """

    def __init__(self) -> None:
        self._slots: OrderedDict[int, _Slot[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def enqueued(self, key: int) -> None:
        """Give the request a place behind all present keys."""
        self._slots[key] = _Slot()

    def withdraw(self, key: int) -> None:
        """Remove a request that has no answer yet. Its answers are sent at once, and no other answer waits for them."""
        del self._slots[key]

    def completed(self, key: int, answer: T, final: bool = True) -> list[T]:
        """Add an answer of a request; return those that may be sent now, in order."""
        slot = self._slots.get(key)
        if slot is None:
            return [answer]
        slot.answers.append(answer)
        slot.final = final
        if key != next(iter(self._slots)):
            return []
        released: list[T] = []
        while self._slots:
            slot = next(iter(self._slots.values()))
            released += slot.answers
            slot.answers.clear()
            if not slot.final:
                break
            self._slots.popitem(last=False)
        return released
