"""The cluster's nodes, as far as status tells about them: read when asked for, kept for a while."""

from collections.abc import Callable

from halimede_operator.cluster.client import ApiError, KubeApi
from halimede_operator.core.snapshot import Object

KEPT_S = 10.0
FORBIDDEN_S = 600.0


class Nodes:
    def __init__(self, api: KubeApi, clock: Callable[[], float], *, may_read: bool) -> None:
        self._api = api
        self._clock = clock
        self._may_read = may_read
        self._nodes: tuple[Object, ...] = ()
        self._good_until = float("-inf")

    async def read(self) -> tuple[Object, ...]:
        """Names, labels, taints and allocatable; () where they may not be read or cannot be."""
        if self._may_read and self._clock() >= self._good_until:
            try:
                self._nodes = tuple(_brief(node) for node in await self._api.list_nodes())
                self._good_until = self._clock() + KEPT_S
            except ApiError as error:
                self._nodes = ()
                self._good_until = self._clock() + (FORBIDDEN_S if error.is_refusal else KEPT_S)
        return self._nodes


def _brief(node: Object) -> Object:
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    return {
        "metadata": {"name": metadata["name"], "labels": metadata.get("labels") or {}},
        "spec": {name: spec[name] for name in ("taints", "unschedulable") if name in spec},
        "status": {"allocatable": status.get("allocatable") or {}},
    }
