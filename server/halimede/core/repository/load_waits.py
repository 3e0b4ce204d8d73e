"""Which loads wait for which others: an ensemble's for those of its steps' models, and a model's that loads another.

A load that would wait for itself, directly or through others, would wait for ever. Such a circle can only be closed by
a new wait, so that it is looked for before one begins.
"""

from collections import defaultdict
from collections.abc import Iterable

from halimede.core.graph import path


class LoadWaits:
    """Names of models that wait, and for what. One may wait for another several times over."""

    __slots__ = ("_waits",)

    def __init__(self) -> None:
        self._waits: defaultdict[str, list[str]] = defaultdict(list)

    def add(self, waiting: str, names: Iterable[str]) -> None:
        """From now on the load of `waiting` waits for those of `names`."""
        self._waits[waiting].extend(names)

    def remove(self, waiting: str, names: Iterable[str]) -> None:
        """It waits no longer, once for each."""
        for name in names:
            self._waits[waiting].remove(name)
        if not self._waits[waiting]:
            del self._waits[waiting]

    def path(self, waiting: str, name: str) -> tuple[str, ...]:
        """How `waiting` waits for `name`: both, with those between them; () where it does not."""
        return path(waiting, name, lambda at: self._waits.get(at, ()))
