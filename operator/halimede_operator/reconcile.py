"""One reconcile: observe, plan, apply, status, events. The same for a new object, a change, a restart and a child's
change."""

import asyncio
import dataclasses
import datetime
from collections.abc import Callable, Sequence

from halimede_operator.cluster.cache import Cache
from halimede_operator.cluster.client import ApiError, KubeApi, NotLeaderError
from halimede_operator.cluster.events import Events
from halimede_operator.cluster.indexes import Indexes
from halimede_operator.cluster.kinds import BY_KIND, DEPLOYMENTS, MODELS, PODS, REPLICA_SETS
from halimede_operator.cluster.nodes import Nodes
from halimede_operator.core.api.spec import Key, Kind
from halimede_operator.core.diff import Apply, Conflict, Delete, may_be_applied
from halimede_operator.core.labels import TEMPLATE_HASH, selector_of
from halimede_operator.core.merge_patch import merge_patch
from halimede_operator.core.ownership import taken_over
from halimede_operator.core.plan import Plan, member_names, plan
from halimede_operator.core.platform import Platform
from halimede_operator.core.pods import waits_for_volumes
from halimede_operator.core.reading import condition, moment_at
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.status import ApplyFailure, events_of, status_of
from halimede_operator.core.workqueue import Failure
from halimede_operator.queue import Done, Failed, Gone, Outcome

CONFLICT_AGAIN_S = 300.0
"""A stranger's object of the same name is not watched; it may be gone by then."""
UNSCHEDULED_AGAIN_S = 30.0
"""Nodes are not watched; they may offer more by then."""
MOUNT_PATIENCE_S = 3.0
"""Most pods have their volumes by then. To find the events of one, the API server reads all of the namespace."""
MOST_PODS_ASKED = 4
"""About their volumes, of one object: they have the same."""
ROLLOUT_SPACING_S = 3.0
"""A Deployment's template changes no more often, so that a hundred edits make a few rollouts."""


class _Stale(Exception):
    """The plan was made from what is not so any more."""


class _Taken(_Stale):
    """Something has the name of a child that was to be made."""


class _Vanished(Exception):
    """The object, or its namespace, goes or is gone: its children go with it."""


class Reconciler:
    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        indexes: Indexes,
        nodes: Nodes,
        events: Events,
        platform: Platform,
        wake: Callable[[Key], None],
        clock: Callable[[], float],
        today: Callable[[], datetime.datetime],
    ) -> None:
        """clock: seconds that never go back. today: the time in UTC, for people."""
        self._api = api
        self._cache = cache
        self._indexes = indexes
        self._nodes = nodes
        self._events = events
        self._platform = platform
        self._wake = wake
        self._clock = clock
        self._today = today
        self._rolled: dict[Key, float] = {}
        """When a Deployment's template was last changed."""

    async def __call__(self, key: Key) -> Outcome:
        try:
            try:
                return await self._reconcile(key)
            except _Taken:
                return await self._reconcile(key, await self._find_strangers(key))
        except _Vanished:
            return Done()
        except _Stale as stale:
            return Failed(Failure.CONFLICT, str(stale))
        except NotLeaderError:
            return Failed(Failure.TRANSIENT, "another operator may hold the lease")
        except ApiError as error:
            failure = (
                Failure.PERMANENT if error.is_refusal else Failure.CONFLICT if error.is_conflict else Failure.TRANSIENT
            )
            return Failed(failure, str(error), error.retry_after_s)

    async def _reconcile(self, key: Key, strangers: Sequence[Object] = ()) -> Outcome:
        snapshot = self._observe(key)
        if snapshot is None:
            self._rolled.pop(key, None)
            return Gone()
        if "deletionTimestamp" in snapshot.object["metadata"]:
            return Done()
        planned = plan(snapshot, self._platform, strangers)
        failures: list[ApplyFailure] = []
        again_in: list[float] = []
        is_postponed = False
        if any(not isinstance(change, Conflict) for change in planned.changes):
            await self._check_is_current(snapshot)
            if any(isinstance(change, Delete) for change in planned.changes):
                planned = await self._with_replica_sets(snapshot, planned, strangers)
            for change in planned.changes:
                if self._rolls_too_soon(key, change):
                    # What comes after it comes with it.
                    again_in.append(ROLLOUT_SPACING_S)
                    is_postponed = True
                    break
                if (failure := await self._make(change)) is not None:
                    failures.append(failure)
                    break
            if (after := self._observe(key)) is None:
                return Gone()
            if after.object["metadata"]["generation"] != snapshot.object["metadata"]["generation"]:
                # Its status would tell of the new spec what was made by the old one.
                raise _Stale("it was changed while its children were made")
            snapshot = after
        if any(_is_unscheduled(pod) for pod in snapshot.pods):
            snapshot = dataclasses.replace(snapshot, nodes=await self._nodes.read())
            again_in.append(UNSCHEDULED_AGAIN_S)
        if waiting := [pod for pod in snapshot.pods if waits_for_volumes(pod)]:
            age_s = max(self._waited_s(pod) for pod in waiting)
            if age_s >= MOUNT_PATIENCE_S:
                snapshot = dataclasses.replace(snapshot, mount_events=await self._failed_mounts(key, waiting))
            # Often while it is news, and less often the longer nothing changes.
            again_in.append(min(60.0, max(MOUNT_PATIENCE_S, age_s / 4)))
        conflicts = [change for change in planned.changes if isinstance(change, Conflict)]
        if conflicts:
            again_in.append(CONFLICT_AGAIN_S)
        await self._tell(snapshot, planned, failures, conflicts, is_postponed)
        if failures:
            return Failed(Failure.PERMANENT, f"{failures[0].object_ref}: {failures[0].message}")
        return Done(min(again_in, default=None))

    def _waited_s(self, pod: Object) -> float:
        """How long for its volumes, by its node's clock and ours."""
        since = moment_at(condition(pod, "PodReadyToStartContainers"), "lastTransitionTime")
        if since is None:
            return MOUNT_PATIENCE_S
        return (self._today() - datetime.datetime.fromisoformat(since)).total_seconds()

    async def _failed_mounts(self, key: Key, pods: Sequence[Object]) -> dict[str, tuple[Object, ...]]:
        """By uid, of the newest of these pods."""
        newest = sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or "", reverse=True)
        uids = [pod["metadata"]["uid"] for pod in newest[:MOST_PODS_ASKED]]
        try:
            found = await asyncio.gather(*[self._api.failed_mounts(key.namespace, uid) for uid in uids])
        except ApiError as error:
            if not error.is_refusal:
                raise
            # Without the right to read events the status says what is mounted, and not what is wrong with it.
            return {}
        return dict(zip(uids, found, strict=True))

    def _observe(self, key: Key) -> Snapshot | None:
        cache = self._cache
        entry = cache.find(key.kind, key.namespace, key.name)
        if entry is None:
            self._indexes.of(key, ())
            self._nodes.short_of(key, ())
            return None
        value = entry.object
        names = member_names(value) if key.kind is Kind.MODEL_ENSEMBLE else frozenset()
        members = {name: cache.get(Key(Kind.INFERENCE_MODEL, key.namespace, name)) for name in sorted(names)}
        children = sorted(cache.owned_by(entry.uid), key=lambda child: (child.kind, child.name))
        replica_sets = [
            replica_set
            for child in children
            if child.kind == DEPLOYMENTS.kind
            for replica_set in cache.owned_by(child.uid)
            if replica_set.kind == REPLICA_SETS.kind
        ]
        pods = [pod for owner in replica_sets for pod in cache.owned_by(owner.uid) if pod.kind == PODS.kind]
        pod_objects = tuple(pod.object for pod in sorted(pods, key=lambda pod: pod.name))
        replica_set_objects = tuple(owner.object for owner in sorted(replica_sets, key=lambda owner: owner.name))
        return Snapshot(
            key=key,
            object=value,
            members={name: member for name, member in members.items() if member is not None},
            children=tuple(child.object for child in children),
            replica_sets=replica_set_objects,
            pods=pod_objects,
            indexes=self._indexes.of(key, pod_objects),
            shortages=self._nodes.short_of(key, pod_objects),
            quota_messages=tuple(message for owner in replica_set_objects for message in _replica_failures(owner)),
        )

    async def _check_is_current(self, snapshot: Snapshot) -> None:
        """Ask the API server itself before anything is written: what we have of the object, or of an ensemble's
        members, may be old."""
        key, known = snapshot.key, snapshot.object["metadata"]
        resource = BY_KIND[key.kind]
        value = await self._api.get(resource, key.namespace, key.name)
        if value is None:
            self._learn(self._cache.delete(known["uid"], int(known["resourceVersion"])))
            raise _Vanished
        self._learn(self._cache.put(resource, value), but=key)
        metadata = value["metadata"]
        if "deletionTimestamp" in metadata:
            raise _Vanished
        if (metadata["uid"], metadata["generation"]) != (known["uid"], known["generation"]):
            raise _Stale("it was changed since it was looked at")
        members = await asyncio.gather(*[self._api.get(MODELS, key.namespace, name) for name in snapshot.members])
        for known_member, member in zip(snapshot.members.values(), members, strict=True):
            known = known_member["metadata"]
            if member is None:
                self._learn(self._cache.delete(known["uid"], int(known["resourceVersion"])), but=key)
                raise _Stale("a member is gone since it was looked at")
            self._learn(self._cache.put(MODELS, member), but=key)
            if (member["metadata"]["uid"], member["metadata"]["generation"]) != (known["uid"], known["generation"]):
                raise _Stale("a member was changed since it was looked at")

    async def _with_replica_sets(self, snapshot: Snapshot, planned: Plan, strangers: Sequence[Object]) -> Plan:
        """The plan by the ReplicaSets that there are: what we know of them may be old, and their pods need what they
        name."""
        key = snapshot.key
        for value in await self._api.list_labelled(REPLICA_SETS, key.namespace, selector_of(key)):
            self._learn(self._cache.put(REPLICA_SETS, value), but=key)
        after = self._observe(key)
        return planned if after is None else plan(after, self._platform, strangers)

    async def _find_strangers(self, key: Key) -> list[Object]:
        """What has the names of children that are to be made, and is not known: only what has our labels is watched."""
        snapshot = self._observe(key)
        if snapshot is None:
            return []
        changes = plan(snapshot, self._platform).changes
        new = [change.object for change in changes if isinstance(change, Apply) and change.is_new]
        found = await asyncio.gather(
            *[
                self._api.get(BY_KIND[value["kind"]], value["metadata"]["namespace"], value["metadata"]["name"])
                for value in new
            ]
        )
        there = [value for value in found if value is not None]
        uid = snapshot.object["metadata"]["uid"]
        for value in there:
            if any(owner["uid"] == uid for owner in value["metadata"].get("ownerReferences") or ()):
                # Ours, of which the watch has not told yet.
                self._learn(self._cache.put(BY_KIND[value["kind"]], value), but=key)
        return there

    def _rolls_too_soon(self, key: Key, change: Apply | Delete | Conflict) -> bool:
        if not isinstance(change, Apply) or change.is_new or change.object["kind"] != DEPLOYMENTS.kind:
            return False
        metadata = change.object["metadata"]
        entry = self._cache.find(DEPLOYMENTS.kind, metadata["namespace"], metadata["name"])
        if entry is None or _annotation(entry.object, TEMPLATE_HASH) == _annotation(change.object, TEMPLATE_HASH):
            return False
        now = self._clock()
        if now < self._rolled.get(key, float("-inf")) + ROLLOUT_SPACING_S:
            return True
        self._rolled[key] = now
        return False

    async def _make(self, change: Apply | Delete | Conflict) -> ApplyFailure | None:
        try:
            match change:
                case Apply(value, is_new):
                    answer = await (self._api.apply(value, is_new=True) if is_new else self._apply(value))
                    self._cache.put(BY_KIND[value["kind"]], answer)
                case Delete(_, kind, namespace, name, uid, version):
                    await self._api.delete(BY_KIND[kind], namespace, name, uid, version)
                case Conflict():
                    pass
        except ApiError as error:
            if error.says_namespace_goes or (error.status == 404 and isinstance(change, Apply)):
                raise _Vanished from error
            if error.is_conflict and isinstance(change, Apply) and change.is_new:
                raise _Taken(str(error)) from error
            if not error.is_refusal:
                raise
            return ApplyFailure(_reference(change), error.status, error.reason, str(error))
        return None

    async def _apply(self, value: Object) -> Object:
        try:
            return await self._api.apply(value)
        except ApiError as error:
            if error.status != 422:
                raise
            metadata = value["metadata"]
            found = await self._api.get(BY_KIND[value["kind"]], metadata["namespace"], metadata["name"])
            if found is None or not may_be_applied(value, found):
                raise
            owners = taken_over(value, found, error.causes)
            if owners is None:
                raise
        # Once for what stands: when it is refused again, nothing of others is in its way any more.
        await self._api.set_owners(found, owners)
        return await self._api.apply(value)

    async def _tell(
        self,
        snapshot: Snapshot,
        planned: Plan,
        failures: list[ApplyFailure],
        conflicts: list[Conflict],
        is_postponed: bool,
    ) -> None:
        today = self._today().strftime("%Y-%m-%dT%H:%M:%SZ")
        key, old = snapshot.key, snapshot.object.get("status") or {}
        new = status_of(snapshot, planned.spec, planned.problems, failures, conflicts, today, is_postponed=is_postponed)
        patch = merge_patch(old, new)
        if not patch:
            return
        resource = BY_KIND[key.kind]
        version = snapshot.object["metadata"]["resourceVersion"]
        try:
            # With the version, so that neither another object of this name nor a status that we have not
            # seen is written over.
            answer = await self._api.patch_status(
                resource, key.namespace, key.name, {"metadata": {"resourceVersion": version}, "status": patch}
            )
        except ApiError as error:
            if error.status == 404 or error.says_namespace_goes:
                raise _Vanished from error
            if error.is_conflict:
                await self._check_is_current(snapshot)
                raise _Stale("its status was written since it was looked at") from error
            raise
        self._learn(self._cache.put(resource, answer), but=key)
        await self._events.post(key, answer, events_of(old, new), today)

    def _learn(self, keys: frozenset[Key], but: Key | None = None) -> None:
        for key in keys:
            if key != but:
                self._wake(key)


def _is_unscheduled(pod: Object) -> bool:
    return any(
        condition["type"] == "PodScheduled" and condition["status"] == "False"
        for condition in (pod.get("status") or {}).get("conditions") or ()
    )


def _replica_failures(replica_set: Object) -> list[str]:
    conditions = (replica_set.get("status") or {}).get("conditions") or ()
    return [
        condition.get("message", "")
        for condition in conditions
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True"
    ]


def _annotation(value: Object, name: str) -> str | None:
    text: str | None = (value["metadata"].get("annotations") or {}).get(name)
    return text


def _reference(change: Apply | Delete | Conflict) -> str:
    match change:
        case Delete(_, kind, namespace, name):
            return f"{kind} {namespace}/{name}"
        case Apply(value) | Conflict(value):
            return f"{value['kind']} {value['metadata']['namespace']}/{value['metadata']['name']}"
