"""Which models have changed on disk, from one look at them to the next.

A fingerprint stands for all of a model's files. A model is due once its fingerprint differs from the one that is loaded
and has stood still for a while, so that files are not read while they are written. Each fingerprint is due once,
whatever comes of its load: a load that fails is not tried again before the files change again.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class _Seen:
    """The last fingerprint, since when it is the same, and the one that was due last or is loaded."""

    fingerprint: str
    since_ns: int
    handled: str


class Changes:
    """Told of every look, in order."""

    def __init__(self, settle_ns: int) -> None:
        self._settle_ns = settle_ns
        self._seen: dict[str, _Seen] = {}

    def due(self, found: Mapping[str, str], loaded: Mapping[str, str], now_ns: int) -> list[str]:
        """The models to load now; both mappings are fingerprints by name.

        `found` has all models that are looked at; others are forgotten. One that is not in `loaded` is due when it
        changes after it was found first.
        """
        self._seen = {name: seen for name, seen in self._seen.items() if name in found}
        due = []
        for name, fingerprint in found.items():
            seen = self._seen.get(name)
            if seen is None:
                seen = self._seen[name] = _Seen(fingerprint, now_ns, loaded.get(name, fingerprint))
            if fingerprint != seen.fingerprint:
                seen.fingerprint, seen.since_ns = fingerprint, now_ns
            if fingerprint == loaded.get(name):
                seen.handled = fingerprint
            elif fingerprint != seen.handled and now_ns - seen.since_ns >= self._settle_ns:
                seen.handled = fingerprint
                due.append(name)
        return due
