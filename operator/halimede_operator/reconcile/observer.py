"""Takes snapshots from the cache, and reads from the API server itself where the cache may be old."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from halimede_operator.api_server.errors import ApiError
from halimede_operator.cluster.cache import Cache, Entry
from halimede_operator.cluster.client import KubeApi
from halimede_operator.cluster.indexes import Indexes
from halimede_operator.cluster.kinds import (
    AUTOSCALERS,
    BY_KIND,
    DEPLOYMENTS,
    MODELS,
    PODS,
    REPLICA_SETS,
    RESOURCE_CLAIMS,
    VOLUME_CLAIMS,
    Resource,
)
from halimede_operator.cluster.nodes import Nodes
from halimede_operator.cluster.works import Works
from halimede_operator.core.children.diff import Apply, Conflict
from halimede_operator.core.children.name_collisions import contending_keys
from halimede_operator.core.decided import Change, Decided
from halimede_operator.core.labels import controller_of, is_orphan_of, selector_of
from halimede_operator.core.names import child_name
from halimede_operator.core.pods.claims import allocated, claim_of
from halimede_operator.core.pods.volume_claims import claim_names, volume_claim
from halimede_operator.core.process.operator_mark import other_operator
from halimede_operator.core.reading import clean
from halimede_operator.core.rollout.refused_pods import refusal
from halimede_operator.core.scaling.idle import kept_idle, may_sleep
from halimede_operator.core.scaling.scalers import KINDS as SCALER_KINDS
from halimede_operator.core.scaling.scalers import SCALED_OBJECT, rival_of
from halimede_operator.core.snapshot import Contender, Object, Snapshot, VolumeClaim
from halimede_operator.core.spec.ensemble import member_names
from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.reconcile.interruptions import Stale, Vanished

T = TypeVar("T")

NO_ZERO_S = 600.0
"""How long the answer that the API server refuses minReplicas 0 is used. An upgrade may change its feature gates."""
OWNER_KNOWN_S = 31.0
"""After this time the API server knows a new kind as an owner: its admission plugin reads the kinds every 30 s."""
MAX_ENDED_PODS = 64
"""How many ended pods of one object are read. The newest ones are."""
MAX_CLAIMS_READ = 64
"""How many ResourceClaims of one object are read at a time: as many as the status lists pods."""
MAX_VOLUME_CLAIMS = 4
"""How many PersistentVolumeClaims of one object are read."""
MAX_PODS_ASKED = 4
"""For how many pods of one object events are read: all its pods have the same volumes."""


class Observer:
    """Observes the API server's objects and the pods for the reconciler."""

    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        indexes: Indexes,
        nodes: Nodes,
        works: Works,
        own_lease: str,
        most_pods: int,
        wake: Callable[[Key], None],
        clock: Callable[[], float],
    ) -> None:
        """own_lease: our own Lease, as `namespace/name`. most_pods: how many pods of one object are read. wake: enqueue
        a key. clock: monotonic seconds."""
        self._api = api
        self._cache = cache
        self._indexes = indexes
        self._nodes = nodes
        self._works = works
        self._own_lease = own_lease
        self._most_pods = most_pods
        self._wake = wake
        self._clock = clock
        self._no_zero = ""
        self._no_zero_until = float("-inf")
        self._unknown_until: dict[Kind, float] = {}
        """Kinds that the API server did not know as owners, and until when that is believed."""

    def observe(self, key: Key) -> Snapshot | None:
        """Take a snapshot from the cache, without a request; None if the object does not exist."""
        cache = self._cache
        entry = cache.find(key.kind, key.namespace, key.name)
        if entry is None:
            self._indexes.of(key, ())
            self._nodes.short_of(key, ())
            self._works.forget(key)
            return None
        value = entry.object
        names = member_names(value) if key.kind is Kind.MODEL_ENSEMBLE else frozenset()
        members = {name: cache.get(Key(Kind.INFERENCE_MODEL, key.namespace, name)) for name in sorted(names)}
        others = (cache.find(other.kind, other.namespace, other.name) for other in contending_keys(key))
        contenders = tuple(
            Contender(other.object, any(child.kind == DEPLOYMENTS.kind for child in self._children_of(other)))
            for other in others
            if other is not None
        )
        children = sorted(self._children_of(entry), key=lambda child: (child.kind, child.name))
        replica_sets = [
            replica_set
            for child in children
            if child.kind == DEPLOYMENTS.kind
            for replica_set in cache.owned_by(child.uid)
            if replica_set.kind == REPLICA_SETS.kind
        ]
        pods = [pod for owner in replica_sets for pod in cache.owned_by(owner.uid) if pod.kind == PODS.kind]
        read_pods, has_more_pods = _most_useful(pods, self._most_pods)
        pod_objects = tuple(pod.object for pod in sorted(read_pods, key=lambda pod: pod.name))
        replica_set_objects = tuple(owner.object for owner in sorted(replica_sets, key=lambda owner: owner.name))
        return Snapshot(
            key=key,
            object=value,
            members={name: member for name, member in members.items() if member is not None},
            children=tuple(child.object for child in children),
            replica_sets=replica_set_objects,
            pods=pod_objects,
            has_more_pods=has_more_pods,
            indexes=self._indexes.of(key, pod_objects),
            shortages=self._nodes.short_of(key, pod_objects),
            contenders=contenders,
            keda_hpa=self._keda_hpa(key),
            no_zero=self._no_zero if self._clock() < self._no_zero_until else "",
            is_owner_unknown=self._clock() < self._unknown_until.get(key.kind, float("-inf")),
            idle=self._works.idle(key, pod_objects if may_sleep(value) else (), kept_idle(value)),
            unavailable=cache.unavailable,
            refused_pods=tuple(message for owner in replica_set_objects if (message := refusal(owner))),
        )

    def note_unknown_owner(self, kind: Kind) -> None:
        """Note that the API server refused a child because it does not know the kind of the owner yet."""
        self._unknown_until[kind] = self._clock() + OWNER_KNOWN_S

    def _children_of(self, entry: Entry) -> Iterator[Entry]:
        """The children of an object, and those that an earlier object of its name left behind."""
        yield from self._cache.owned_by(entry.uid)
        if (key := entry.key) is not None:
            yield from (child for child in self._cache.labelled_for(key) if is_orphan_of(key, child.object))

    def _keda_hpa(self, key: Key) -> Object | None:
        # It has the labels of the ScaledObject, and so ours.
        entry = self._cache.find(AUTOSCALERS.kind, key.namespace, child_name(key.name))
        if entry is None or entry.key != key:
            return None
        owner = controller_of(found := entry.object)
        return found if owner is not None and owner["kind"] == SCALED_OBJECT else None

    def keep(self, resource: Resource, value: Object, *, reconciled: Key) -> None:
        """Store an answer of the API server, and wake the keys that it concerns, except the one being reconciled."""
        self._wake_all(self._cache.put(resource, value), but=reconciled)

    async def check_is_current(self, snapshot: Snapshot) -> None:
        """Read the object and an ensemble's members from the API server itself, because the cache may be old.

        Called before any write. Raises Stale if something changed, and Vanished if the object is deleted or is being
        deleted.
        """
        key, known = snapshot.key, snapshot.object["metadata"]
        resource = BY_KIND[key.kind]
        value = await self._api.get(resource, key.namespace, key.name)
        if value is None:
            self._wake_all(self._cache.delete(known["uid"], int(known["resourceVersion"])))
            raise Vanished
        self.keep(resource, value, reconciled=key)
        metadata = value["metadata"]
        if "deletionTimestamp" in metadata:
            raise Vanished
        if (metadata["uid"], metadata["generation"]) != (known["uid"], known["generation"]):
            raise Stale("it was changed since it was observed")
        if other_operator(value, self._own_lease) != other_operator(snapshot.object, self._own_lease):
            raise Stale("another operator took it since it was observed")
        members = await asyncio.gather(*[self._api.get(MODELS, key.namespace, name) for name in snapshot.members])
        for known_member, member in zip(snapshot.members.values(), members, strict=True):
            known = known_member["metadata"]
            if member is None:
                self._wake_all(self._cache.delete(known["uid"], int(known["resourceVersion"])), but=key)
                raise Stale("a member is deleted since it was observed")
            self.keep(MODELS, member, reconciled=key)
            if (member["metadata"]["uid"], member["metadata"]["generation"]) != (known["uid"], known["generation"]):
                raise Stale("a member was changed since it was observed")

    async def read_replica_sets(self, key: Key) -> None:
        """Read the ReplicaSets from the API server into the cache, which may lack some."""
        for value in await self._api.list_labelled(REPLICA_SETS, key.namespace, selector_of(key)):
            self.keep(REPLICA_SETS, value, reconciled=key)

    async def name_holders(self, key: Key, wanted: Sequence[Object]) -> list[Object]:
        """The objects that have the names of wanted children.

        They are read from the API server if the cache lacks them: only objects with our label are watched.
        """
        owner = self._cache.find(key.kind, key.namespace, key.name)
        if owner is None or not wanted:
            return []
        found = await asyncio.gather(*[self._find(value) for value in wanted])
        existing = [value for value in found if value is not None]
        for value in existing:
            if any(reference["uid"] == owner.uid for reference in value["metadata"].get("ownerReferences") or ()):
                # It is ours; its watch event has not arrived yet.
                self.keep(BY_KIND[value["kind"]], value, reconciled=key)
        return existing

    async def check_zero(self, decided: Decided) -> None:
        """Raise Stale if the API server refuses a decided HPA because its minReplicas is 0: then it gets 1.

        Whether 0 is allowed is a feature gate of the API server, which only a dry run tells.
        """
        for change in decided.changes:
            if not isinstance(change, Apply) or change.object["kind"] != AUTOSCALERS.kind:
                continue
            if change.object["spec"].get("minReplicas") != 0:
                continue
            try:
                await self._api.try_apply(change.object, is_new=change.is_new)
            except ApiError as error:
                if not any(cause.field == "spec.minReplicas" for cause in error.causes):
                    # The apply is refused for the same cause, which is then reported as that of this child.
                    continue
                self._no_zero = clean(error.message, 256)
                self._no_zero_until = self._clock() + NO_ZERO_S
                raise Stale("the API server refuses an HPA with 0 as minReplicas") from error

    async def without_rivals(self, decided: Decided) -> Decided:
        """The decision, with a Conflict in place of a new scaler if another HPA scales the Deployment already.

        Only objects with our label are watched, so the HPAs of the namespace are listed before a scaler is made.
        """
        changes = [await self._unless_rival(change) for change in decided.changes]
        return dataclasses.replace(decided, changes=tuple(changes))

    async def _unless_rival(self, change: Change) -> Change:
        if not isinstance(change, Apply) or not change.is_new or change.object["kind"] not in SCALER_KINDS:
            return change
        namespace = change.object["metadata"]["namespace"]
        rival = rival_of(change.object, await self._api.list_labelled(AUTOSCALERS, namespace, {}))
        if rival is None:
            return change
        # Items of lists have neither apiVersion nor kind.
        named = {"apiVersion": AUTOSCALERS.api_version, "kind": AUTOSCALERS.kind, "metadata": rival["metadata"]}
        owner = controller_of(rival)
        text = "somebody else" if owner is None else f"{owner['kind']} {owner['name']}"
        target = rival["spec"]["scaleTargetRef"]
        return Conflict(named, f"{text}, and scales {target.get('kind')} {target.get('name')}")

    async def _find(self, value: Object) -> Object | None:
        """The existing object of this kind and name, from the cache or else from the API server."""
        kind, metadata = value["kind"], value["metadata"]
        known = self._cache.find(kind, metadata["namespace"], metadata["name"])
        if known is not None:
            return known.object
        return await self._api.get(BY_KIND[kind], metadata["namespace"], metadata["name"])

    async def with_kubelet_events(self, snapshot: Snapshot, pods: Sequence[Object], **fields: str) -> Snapshot:
        """The snapshot with the events about the newest of these pods. fields: that the events must have."""
        newest = sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or "", reverse=True)
        uids = [pod["metadata"]["uid"] for pod in newest[:MAX_PODS_ASKED]]
        found = await _permitted(self._api.events_about(snapshot.key.namespace, uid, **fields) for uid in uids)
        if found is None:
            # Without the right to read events the status can list the mounts, but not what is wrong with them.
            return snapshot
        events = {**snapshot.kubelet_events, **dict(zip(uids, found, strict=True))}
        return dataclasses.replace(snapshot, kubelet_events=events)

    async def with_volume_claims(self, snapshot: Snapshot, pods: Sequence[Object]) -> Snapshot:
        """The snapshot with the PersistentVolumeClaims of these pods."""
        names = sorted({name for pod in pods for name in claim_names(pod)})[:MAX_VOLUME_CLAIMS]
        found = await _permitted(self._volume_claim(snapshot.key.namespace, name) for name in names)
        if found is None:
            # Without the right to read claims the status has the scheduler's words.
            return snapshot
        return dataclasses.replace(snapshot, volume_claims=dict(zip(names, found, strict=True)))

    async def _volume_claim(self, namespace: str, name: str) -> VolumeClaim | None:
        value = await self._api.get(VOLUME_CLAIMS, namespace, name)
        if value is None:
            return None
        return volume_claim(value, await self._api.events_about(namespace, value["metadata"]["uid"]))

    async def with_claims(self, snapshot: Snapshot, pods: Sequence[Object]) -> Snapshot:
        """The snapshot with what the ResourceClaims of these pods were allocated."""
        asked = sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))[:MAX_CLAIMS_READ]
        namespace = snapshot.key.namespace
        found = await _permitted(self._api.get(RESOURCE_CLAIMS, namespace, claim_of(pod)) for pod in asked)
        if found is None:
            return snapshot
        names = [pod["metadata"]["name"] for pod in asked]
        claims = {name: allocated(claim) for name, claim in zip(names, found, strict=True) if claim is not None}
        return dataclasses.replace(snapshot, allocated=claims)

    def _wake_all(self, keys: frozenset[Key], but: Key | None = None) -> None:
        for key in keys:
            if key != but:
                self._wake(key)


async def _permitted(reads: Iterable[Awaitable[T]]) -> list[T] | None:
    """The results, in order; None without the right to read them. Raises ApiError."""
    try:
        return await asyncio.gather(*reads)
    except ApiError as error:
        if not error.is_refusal:
            raise
        return None


def _most_useful(pods: Sequence[Entry], most: int) -> tuple[list[Entry], bool]:
    """The pods to read, and whether that leaves out some in which something may run."""
    live = sorted((pod for pod in pods if not pod.has_ended), key=lambda pod: pod.name)
    ended = sorted((pod for pod in pods if pod.has_ended), key=lambda pod: pod.version, reverse=True)
    return live[:most] + ended[:MAX_ENDED_PODS], len(live) > most
