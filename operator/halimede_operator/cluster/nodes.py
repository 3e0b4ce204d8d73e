"""Periodically reads the nodes on which our pods hold devices."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from halimede_operator.api_server.errors import ApiError
from halimede_operator.cluster.client import KubeApi
from halimede_operator.core.placement.devices import Held, held_devices, shortages
from halimede_operator.core.snapshot import Object, Shortage
from halimede_operator.core.spec.types import Key

FORBIDDEN_S = 30.0
PERIOD_S = 3.0
SPACING_S = 0.05
"""The time between the reads of two nodes. It bounds the rate of requests: each of many nodes is read less often."""


class Nodes:
    """Shortages of devices on nodes. Used by one event loop; `run` reads nodes until it is cancelled."""

    def __init__(
        self, api: KubeApi, wake: Callable[[Key], None], *, may_read: bool, period_s: float = PERIOD_S
    ) -> None:
        self._api = api
        self._wake = wake
        self._may_read = may_read
        self._period_s = period_s
        self._held: dict[Key, Held] = {}
        self._seen: dict[str, tuple[Shortage, ...]] = {}
        """Shortages by node, at the last look."""
        self._short: dict[str, tuple[Shortage, ...]] = {}
        """Shortages by node, seen at both of the last two looks. One look is not enough: pods and nodes are not read at
        the same time, and a kubelet that starts has no devices until their plugin has registered."""

    def short_of(self, key: Key, pods: Iterable[Object]) -> Mapping[str, tuple[Shortage, ...]]:
        """Shortages, by node, of the devices that this key's pods hold. From now on these nodes are read regularly."""
        held = held_devices(pods) if self._may_read else {}
        if held:
            self._held[key] = held
        else:
            self._held.pop(key, None)
        found = {
            node: tuple(each for each in self._short.get(node, ()) if each.resource in held[node]) for node in held
        }
        return {node: short for node, short in found.items() if short}

    async def run(self) -> None:
        """Read the nodes on which pods hold devices, until cancelled; wake keys when a shortage begins or ends."""
        while True:
            names = sorted({node for held in self._held.values() for node in held})
            for gone in self._seen.keys() - set(names):
                del self._seen[gone]
                self._short.pop(gone, None)
            for name in names:
                try:
                    await self._look(name)
                except ApiError as error:
                    if error.is_refusal:
                        await asyncio.sleep(FORBIDDEN_S)
                    # After other errors the last known shortages remain.
                await asyncio.sleep(SPACING_S)
            await asyncio.sleep(max(0.0, self._period_s - SPACING_S * len(names)))

    async def _look(self, name: str) -> None:
        node = await self._api.get_node(name)
        held = [(key, held[name]) for key, held in self._held.items() if name in held]
        seen = shortages(node, sum((each for _, each in held), Counter())) if node is not None else ()
        before = {each.resource for each in self._seen.get(name, ())}
        self._seen[name] = seen
        short = tuple(each for each in seen if each.resource in before)
        if short != self._short.get(name, ()):
            self._short[name] = short
            for key, _ in held:
                self._wake(key)
