"""When each watch last received anything from the API server: for readiness, liveness and the metric of watch ages.

kopf's thread writes and our event loop reads. No lock is needed, because each write is one assignment in a dict.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from halimede_operator.cluster.kinds import Resource, resource_of

STUCK_S = 180.0
"""A watch that neither received anything nor sent a request for longer is stuck."""


@dataclass(frozen=True, slots=True)
class Collection:
    """What one watch covers: a kind, in one namespace or (None) in all."""

    resource: Resource
    namespace: str | None

    def __str__(self) -> str:
        return f"{self.resource.plural} in {self.namespace}" if self.namespace is not None else self.resource.plural


def collection_of(path: str) -> Collection | None:
    """The collection that a request's path is for; None if it is no watched collection."""
    collection = resource_of(path)
    return Collection(*collection) if collection is not None else None


class WatchHealth:
    """Times are monotonic seconds."""

    def __init__(self, watches: Iterable[Collection], now: float) -> None:
        self._received_at = dict.fromkeys(watches, now)
        """When a list, an event or a bookmark last came."""
        self._requested_at = dict(self._received_at)
        """When the last request was sent, whether it was answered or not."""
        self._listed: set[Collection] = set()
        self._requested: set[Collection] = set()
        """Those for which kopf sent a request since it was started."""

    def record_answer(self, where: Collection, now: float) -> None:
        """Record that the API server sent a list, an event or a bookmark."""
        self._received_at[where] = now

    def record_request(self, where: Collection, now: float) -> None:
        """Record that a request is about to be sent."""
        self._requested_at[where] = now
        self._requested.add(where)

    def expect(self, watches: Iterable[Collection], now: float) -> None:
        """Replace the watched collections by these. Called while kopf does not run."""
        self._received_at = {where: self._received_at.get(where, now) for where in watches}
        self._requested_at = dict.fromkeys(self._received_at, now)
        self._listed &= self._received_at.keys()
        self._requested.clear()

    def restarted(self, now: float) -> None:
        """Give all watches the full time to receive something: kopf is about to start them, or the process hardly ran
        for a while."""
        self._requested_at = dict.fromkeys(self._requested_at, now)

    def listed(self, where: Collection) -> None:
        """Record that a list of the collection is complete."""
        self._listed.add(where)

    def unlisted(self) -> list[Collection]:
        """Collections that have never been listed completely."""
        return [where for where in self._received_at if where not in self._listed]

    def ignored(self) -> list[Collection]:
        """Collections for which kopf sends no requests, although it sends some for others.

        It did not find their kind when it started.
        """
        return [where for where in self._received_at if where not in self._requested] if self._requested else []

    def ages(self, now: float) -> dict[str, float]:
        """Seconds since the API server last sent anything about a kind; with several namespaces, the longest time."""
        ages: dict[str, float] = {}
        for where, received in self._received_at.items():
            ages[where.resource.kind] = max(ages.get(where.resource.kind, 0.0), now - received)
        return ages

    def stuck(self, now: float) -> list[Collection]:
        """Collections whose watch neither received anything nor sent a request for STUCK_S.

        A watch whose requests fail is not stuck: a restart would not help while the API server does not answer.
        """
        return [
            where
            for where, received in self._received_at.items()
            if now - max(received, self._requested_at[where]) > STUCK_S
        ]
