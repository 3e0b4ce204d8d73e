"""Operators of other releases that own objects, and whether they still run."""

from collections.abc import Callable
from dataclasses import dataclass

from halimede_operator.api_server.errors import ApiError
from halimede_operator.cluster.client import KubeApi
from halimede_operator.cluster.kinds import LEASES
from halimede_operator.core.process.operator_mark import FREE_AFTER_S
from halimede_operator.core.spec.types import Key

KEPT_S = 10.0
"""How long the last answer about a Lease is used."""
MOST_LEASES = 1000
"""How many Leases are remembered. Every user who may write statuses can name some."""


@dataclass(frozen=True, slots=True)
class _Seen:
    asked: float
    version: str | None
    """None: the Lease does not exist. "": we may not read it."""
    changed: float
    """When this version was first seen, by our own clock."""


class OtherOperators:
    def __init__(self, api: KubeApi, ours: str, clock: Callable[[], float]) -> None:
        """ours: our own Lease, as `namespace/name`."""
        self.ours = ours
        self.left: dict[Key, str] = {}
        """Objects that belong to other operators, and the Leases of those. Only the reconciler changes it."""
        self._api = api
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    async def runs(self, lease: str) -> bool:
        """Whether the operator that holds this Lease may still write. A Lease that we may not read counts as renewed.

        Raises ApiError if the API server cannot be asked.
        """
        now = self._clock()
        seen = self._seen.get(lease)
        if seen is None or now >= seen.asked + KEPT_S:
            version = await self._version(lease)
            if len(self._seen) >= MOST_LEASES:
                self._seen.clear()
            changed = seen.changed if seen is not None and seen.version == version else now
            seen = self._seen[lease] = _Seen(now, version, changed)
        return seen.version is not None and (not seen.version or now < seen.changed + FREE_AFTER_S)

    async def _version(self, lease: str) -> str | None:
        """The Lease's resourceVersion; None if it does not exist, "" if we may not read it."""
        namespace, _, name = lease.partition("/")
        try:
            value = await self._api.get(LEASES, namespace, name)
        except ApiError as error:
            if not error.is_refusal:
                raise
            return ""
        return None if value is None else str(value["metadata"]["resourceVersion"])
