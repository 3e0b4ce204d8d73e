"""Reads what the cluster has of devices, and what pods hold of it, for all objects together."""

import asyncio
from collections.abc import Callable

from halimede_operator.api_server.errors import ApiError
from halimede_operator.cluster.client import KubeApi
from halimede_operator.cluster.kinds import NODES, PODS
from halimede_operator.core.placement.inventory import Inventory, has_devices, inventory_of, node_part, summary_of

KEPT_S = 10.0
"""How long the lists are used. They are read only while an object needs a decision, however many objects there are."""
FORBIDDEN_S = 30.0


class Inventories:
    """The newest inventory. Used by one event loop."""

    def __init__(self, api: KubeApi, clock: Callable[[], float], *, may_read: bool) -> None:
        """may_read: False for an operator of some namespaces, which sees neither nodes nor the pods of others."""
        self._api = api
        self._clock = clock
        self._may_read = may_read
        self._inventory: Inventory | None = None
        self._good_until = float("-inf")
        self._reading: asyncio.Task[Inventory | None] | None = None

    async def read(self) -> Inventory | None:
        """The inventory, at most KEPT_S old; None if we may not read nodes and pods. Raises ApiError.

        Callers that come while it is being read get the same one.
        """
        if not self._may_read or self._clock() < self._good_until:
            return self._inventory
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(self._reading)

    async def _read(self) -> Inventory | None:
        try:
            nodes = await self._api.list_reduced(NODES, lambda node: node_part(node) if has_devices(node) else None)
            names = frozenset(node["metadata"]["name"] for node in nodes)
            pods = await self._api.list_reduced(PODS, lambda pod: summary_of(pod, names)) if names else []
        except ApiError as error:
            if not error.is_refusal:
                raise
            self._inventory, self._good_until = None, self._clock() + FORBIDDEN_S
            return None
        self._inventory, self._good_until = inventory_of(nodes, pods), self._clock() + KEPT_S
        return self._inventory
