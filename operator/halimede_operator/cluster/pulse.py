"""Signs of life of the watches: what readiness, liveness and the metric of their age are told from.

Written by the thread of the watches, read by the loop; every write is one assignment in a dict.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from halimede_operator.cluster.kinds import Resource

STUCK_S = 180.0


@dataclass(frozen=True, slots=True)
class Where:
    """One watch: a kind, in one namespace or in all."""

    resource: Resource
    namespace: str | None

    def __str__(self) -> str:
        return f"{self.resource.plural} in {self.namespace}" if self.namespace is not None else self.resource.plural


class Pulse:
    def __init__(self, watches: Iterable[Where], now: float) -> None:
        self._told = dict.fromkeys(watches, now)
        """When a list, an event or a bookmark last came."""
        self._tried = dict(self._told)
        """When it last asked, answered or not."""
        self._listed: set[Where] = set()

    def told(self, where: Where, now: float) -> None:
        self._told[where] = now

    def tried(self, where: Where, now: float) -> None:
        self._tried[where] = now

    def listed(self, where: Where) -> None:
        self._listed.add(where)

    def is_listed(self) -> bool:
        """Whether every watch has listed all its objects once."""
        return self._listed >= self._told.keys()

    def unlisted(self) -> list[Where]:
        return [where for where in self._told if where not in self._listed]

    def ages(self, now: float) -> dict[str, float]:
        """Seconds since the API server last told anything of a kind, in the namespace where that is longest ago."""
        ages: dict[str, float] = {}
        for where, told in self._told.items():
            ages[where.resource.kind] = max(ages.get(where.resource.kind, 0.0), now - told)
        return ages

    def stuck(self, now: float) -> list[Where]:
        """Watches that neither heard anything nor asked for long.

        One that asks in vain is alive: starting it anew would not help against an API server that is away.
        """
        return [where for where, told in self._told.items() if now - max(told, self._tried[where]) > STUCK_S]
