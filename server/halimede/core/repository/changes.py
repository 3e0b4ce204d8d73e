"""Which models have changed on disk since the previous check.

A fingerprint represents all files of a model. A model is due when its fingerprint differs from the loaded one and has
been unchanged for a while, so that files are not read while they are written. Each fingerprint is due once, even if
its load fails: the next attempt follows the next change of the files. ABSENT stands for a model without files, or
without a load: so a new model is due, and one whose directory was removed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

ABSENT = ""
"""The fingerprint of a model whose directory is gone, or that was never loaded."""


@dataclass(slots=True)
class _Seen:
    """The last fingerprint, since when it is the same, and the one that was due last or is loaded."""

    fingerprint: str
    since_ns: int
    handled: str


class Changes:
    """The fingerprints of earlier checks. Call `due` with every check, in order."""

    def __init__(self, settle_ns: int) -> None:
        self._settle_ns = settle_ns
        self._seen: dict[str, _Seen] = {}

    def due(self, found: Mapping[str, str], loaded: Mapping[str, str], now_ns: int) -> list[str]:
        """The models to load now, or to unload if they are ABSENT in `found`; both mappings are fingerprints by name.

        `found` has all watched models; others are forgotten. A model that is not in `loaded` is due when it changes
        after it was first found.
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
