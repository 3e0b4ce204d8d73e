"""Brings what the watches tell into the cache, and what that is news for into the queue."""

import asyncio
from collections.abc import Callable
from typing import Any

from halimede_operator.cluster.cache import Cache
from halimede_operator.cluster.kinds import Resource
from halimede_operator.cluster.pulse import Pulse, Where
from halimede_operator.cluster.watching import Listed
from halimede_operator.core.api.spec import Key


class CacheFeed:
    """Of one loop, the cache's."""

    def __init__(self, cache: Cache, pulse: Pulse, wake: Callable[[Key], None]) -> None:
        self._cache = cache
        self._pulse = pulse
        self._wake = wake
        self.complete = asyncio.Event()
        """Set when every watch has listed all its objects once."""

    def listed(self, resource: Resource, namespace: str | None, page: Listed) -> None:
        for entry in page.entries:
            self._news(self._cache.learn(entry, listed=True))
        if page.uids is not None:
            self._news(self._cache.listed(resource, namespace, page.version, page.uids))
            self._pulse.listed(Where(resource, namespace))
            if self._pulse.is_listed():
                self.complete.set()

    def event(self, resource: Resource, kind: str | None, value: dict[str, Any]) -> None:
        """kind: ADDED, MODIFIED or DELETED."""
        if kind == "DELETED":
            metadata = value["metadata"]
            self._news(self._cache.delete(metadata["uid"], int(metadata["resourceVersion"])))
        else:
            self._news(self._cache.put(resource, value))

    def _news(self, keys: frozenset[Key]) -> None:
        for key in keys:
            self._wake(key)
