"""Which loads wait for which others: an ensemble's for those of its steps' models, and a model's that loads another.

A load that waits for itself, directly or through others, would never end. Only a new wait can close such a circle, so
each wait is checked before it begins.
"""

from collections import defaultdict
from collections.abc import Iterable

from halimede.core.graph import path


class LoadWaits:
    """The models that wait, and for which models. A model may wait for another several times at once."""

    __slots__ = ("_waits",)

    def __init__(self) -> None:
        self._waits: defaultdict[str, list[str]] = defaultdict(list)

    def add(self, waiting: str, names: Iterable[str]) -> None:
        """From now on the load of `waiting` waits for those of `names`."""
        self._waits[waiting].extend(names)

    def remove(self, waiting: str, names: Iterable[str]) -> None:
        """End one wait for each of the names."""
        for name in names:
            self._waits[waiting].remove(name)
        if not self._waits[waiting]:
            del self._waits[waiting]

    def path(self, waiting: str, name: str) -> tuple[str, ...]:
        """The chain of waits from `waiting` to `name`, both included; () if it does not wait for it."""
        return path(waiting, name, lambda at: self._waits.get(at, ()))
