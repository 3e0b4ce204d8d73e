"""Posts Kubernetes events about our objects."""

import logging
from collections.abc import Callable, Sequence

from halimede_operator.api_server.errors import ApiError
from halimede_operator.cluster.client import KubeApi
from halimede_operator.core.decided import EventDraft
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Key
from halimede_operator.core.status.events import EventLimit, LastingStates

log = logging.getLogger(__name__)

LONGEST_MESSAGE = 1024
COMPONENT = "halimede.dev/operator"


class Events:
    def __init__(self, api: KubeApi, instance: str, clock: Callable[[], float]) -> None:
        self._api = api
        self._instance = instance
        self._clock = clock
        self._limit = EventLimit()
        self._states = LastingStates()

    async def report(
        self, key: Key, about: Object, drafts: Sequence[EventDraft], status: Object, now: str
    ) -> float | None:
        """Post the events about an object whose state has lasted long enough. now: RFC 3339.

        Returns the seconds after which to call this again without new drafts; None if none are held back.
        """
        due, again_s = self._states.due(key, drafts, status, self._clock())
        await self.post(key, about, due, now)
        return again_s

    def forget(self, key: Key) -> None:
        """Forget an object that no longer exists."""
        self._states.forget(key)

    async def post(self, key: Key, about: Object, drafts: Sequence[EventDraft], now: str) -> None:
        """Post events about an object, unless `EventLimit` suppresses them. now: RFC 3339.

        A failed post is only logged, because the status has the same information.
        """
        metadata = about["metadata"]
        for draft in drafts:
            if not self._limit.try_send(key, draft, self._clock()):
                continue
            event = {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
                "involvedObject": {
                    "apiVersion": about["apiVersion"],
                    "kind": about["kind"],
                    "namespace": metadata["namespace"],
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                    "resourceVersion": metadata["resourceVersion"],
                },
                "type": draft.type,
                "reason": draft.reason,
                "message": draft.message[:LONGEST_MESSAGE],
                "count": 1,
                "firstTimestamp": now,
                "lastTimestamp": now,
                "source": {"component": COMPONENT},
                "reportingComponent": COMPONENT,
                "reportingInstance": self._instance,
            }
            try:
                await self._api.create_event(metadata["namespace"], event)
            except ApiError as error:
                log.info("no event %s for %s/%s: %s", draft.reason, metadata["namespace"], metadata["name"], error)
