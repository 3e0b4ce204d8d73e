"""One reconcile: observe, plan, apply, write the status, post events.

It is the same for a new object, a changed object, a restart of the operator and a changed child.
"""

import asyncio
import dataclasses
import datetime
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeGuard

from halimede_operator.cluster.cache import Cache
from halimede_operator.cluster.client import ApiError, KubeApi, NotLeaderError
from halimede_operator.cluster.events import Events
from halimede_operator.cluster.indexes import Indexes
from halimede_operator.cluster.kinds import BY_KIND, DEPLOYMENTS, MODELS, PODS, REPLICA_SETS
from halimede_operator.cluster.nodes import Nodes
from halimede_operator.cluster.other_operators import OtherOperators
from halimede_operator.core.api.spec import Key, Kind
from halimede_operator.core.api_errors import Meaning, told
from halimede_operator.core.diff import Apply, Conflict, Delete, may_be_applied
from halimede_operator.core.labels import TEMPLATE_HASH, selector_of
from halimede_operator.core.merge_patch import merge_patch
from halimede_operator.core.name_collisions import contending_keys
from halimede_operator.core.operator_mark import other_operator
from halimede_operator.core.ownership import taken_over
from halimede_operator.core.plan import Plan, member_names, plan
from halimede_operator.core.platform import Platform
from halimede_operator.core.pods.kubelet_events import waits_for_pull_secrets, waits_for_volumes
from halimede_operator.core.pods.placement import SCHEDULER_PATIENCE_S, waits_for_scheduler
from halimede_operator.core.reading import condition, moment_at
from halimede_operator.core.snapshot import Contender, Object, Snapshot
from halimede_operator.core.status import ApplyFailure, EventDraft, events_of, status_of
from halimede_operator.core.workqueue import Failure
from halimede_operator.queue import Done, Failed, Gone, Outcome

CONFLICT_AGAIN_S = 8.0
"""The object that has a child's name is not watched, so check again whether it is gone. Costs one GET per name."""
UNSCHEDULED_AGAIN_S = 30.0
"""Nodes are not watched, so check again whether they offer more."""
DEADLINE_AGAIN_S = 60.0
"""Once a Deployment reports ProgressDeadlineExceeded, a pod with a long fetch has a later deadline of its own. No event
comes when that one passes."""
MOUNT_PATIENCE_S = 3.0
"""Most pods have their volumes by then. Events are not asked for earlier, because to find the events of one pod the API
server reads all events of the namespace."""
MOST_PODS_ASKED = 4
"""Of one object, when asking for events: all its pods have the same volumes."""
ROLLOUT_SPACING_S = 3.0
"""Shortest time between two changes of a Deployment's template, so that a hundred edits make a few rollouts."""
UNTOLD_S = 5.0
"""A transient failure is reported in the status only after it has lasted this long."""
OTHER_OPERATOR_AGAIN_S = 15.0
"""How often to check whether the operator that an object belongs to still runs."""
UNCLAIMED_S = 3.0
"""How long a new object is left to other operators, if any are known to run."""

log = logging.getLogger(__name__)


class _Stale(Exception):
    """The plan was made from a state that has changed since."""


class _NameTaken(_Stale):
    """Another object has the name of a child that was to be created."""


class _Vanished(Exception):
    """The object or its namespace is deleted or being deleted; its children are deleted with it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Performed:
    """How many of the planned changes were made, and why not all."""

    is_postponed: bool = False
    """The Deployment's template changed too recently. This change and those planned after it are made later."""
    failure: ApplyFailure | None = None
    retry_after_s: float | None = None


class Reconciler:
    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        indexes: Indexes,
        nodes: Nodes,
        events: Events,
        other_operators: OtherOperators,
        platform: Platform,
        wake: Callable[[Key], None],
        clock: Callable[[], float],
        today: Callable[[], datetime.datetime],
    ) -> None:
        """wake: enqueue a key. clock: monotonic seconds. today: the UTC time for statuses and events."""
        self._api = api
        self._cache = cache
        self._indexes = indexes
        self._nodes = nodes
        self._events = events
        self._other_operators = other_operators
        self._platform = platform
        self._wake = wake
        self._clock = clock
        self._today = today
        self._rolled_out_at: dict[Key, float] = {}
        """When a Deployment's template was last changed."""
        self._failing_since: dict[Key, float] = {}
        """Since when changes of a key fail transiently."""
        self._children_with_taken_names: dict[Key, tuple[Object, ...]] = {}
        """Wanted children whose names other objects had."""
        self._unclaimed_since: dict[Key, float] = {}
        """Since when we know an object that no operator has written to yet; kept only while other operators run."""

    async def __call__(self, key: Key) -> Outcome:
        """Reconcile one object. Errors of the API server become a `Failed`."""
        try:
            try:
                return await self._reconcile(
                    key, await self._objects_with_names_of(key, self._children_with_taken_names.get(key, ()))
                )
            except _NameTaken:
                return await self._reconcile(key, await self._objects_with_names_of(key, self._new_children(key)))
        except _Vanished:
            return Done()
        except _Stale as stale:
            return Failed(Failure.CONFLICT, str(stale))
        except NotLeaderError:
            return Failed(Failure.TRANSIENT, "another operator may hold the lease")
        except ApiError as error:
            return Failed(_failure_of(error.meaning), str(error), error.retry_after_s)

    async def _reconcile(self, key: Key, strangers: Sequence[Object]) -> Outcome:
        begun = self._clock()
        snapshot = self._observe(key)
        if snapshot is None:
            self._rolled_out_at.pop(key, None)
            self._failing_since.pop(key, None)
            self._children_with_taken_names.pop(key, None)
            self._unclaimed_since.pop(key, None)
            self._other_operators.left.pop(key, None)
            return Gone()
        if "deletionTimestamp" in snapshot.object["metadata"]:
            return Done()
        if (wait_s := await self._leave_to_others(snapshot)) is not None:
            return Done(wait_s)
        planned = plan(snapshot, self._platform, strangers)
        made = _Performed()
        again_in: list[float] = []
        if any(not isinstance(change, Conflict) for change in planned.changes):
            await self._check_is_current(snapshot)
            if any(isinstance(change, Delete) for change in planned.changes):
                planned = await self._with_replica_sets(snapshot, planned, strangers)
            made = await self._perform_all(snapshot, planned)
            if made.is_postponed:
                again_in.append(ROLLOUT_SPACING_S)
            if (after := self._observe(key)) is None:
                return Gone()
            if after.object["metadata"]["generation"] != snapshot.object["metadata"]["generation"]:
                # The status would report the old spec's children as those of the new spec.
                raise _Stale("it was changed while its children were made")
            snapshot = after
        if made.failure is not None and made.failure.meaning is Meaning.TRANSIENT:
            if self._clock() - self._failing_since.setdefault(key, begun) < UNTOLD_S:
                return _failed(made.failure, made.retry_after_s)
        else:
            self._failing_since.pop(key, None)
        if any(_is_unscheduled(pod) for pod in snapshot.pods):
            snapshot = dataclasses.replace(snapshot, nodes=await self._nodes.read())
            again_in.append(UNSCHEDULED_AGAIN_S)
        if waiting := [pod for pod in snapshot.pods if waits_for_volumes(pod)]:
            age_s = max(self._waited_s(pod) for pod in waiting)
            if age_s >= MOUNT_PATIENCE_S:
                snapshot = await self._with_events(snapshot, waiting, self._api.failed_mounts)
            # Often at first, and less often the longer nothing changes.
            again_in.append(min(60.0, max(MOUNT_PATIENCE_S, age_s / 4)))
        if pulling := [pod for pod in snapshot.pods if waits_for_pull_secrets(pod)]:
            snapshot = await self._with_events(snapshot, pulling, self._api.failed_pull_secrets)
        if any(waits_for_scheduler(pod) for pod in snapshot.pods):
            again_in.append(SCHEDULER_PATIENCE_S)
        if any(_is_past_deadline(child) for child in snapshot.children):
            again_in.append(DEADLINE_AGAIN_S)
        conflicts = [change for change in planned.changes if isinstance(change, Conflict)]
        self._children_with_taken_names.pop(key, None)
        if conflicts:
            self._children_with_taken_names[key] = tuple(conflict.object for conflict in conflicts)
            again_in.append(CONFLICT_AGAIN_S)
        try:
            await self._write_status(snapshot, planned, made, conflicts)
        except ApiError:
            if made.failure is None:
                raise
        if made.failure is not None:
            return _failed(made.failure, made.retry_after_s)
        return Done(min(again_in, default=None))

    def _waited_s(self, pod: Object) -> float:
        """Seconds that the pod has waited for its volumes: from its node's clock to ours."""
        since = moment_at(condition(pod, "PodReadyToStartContainers"), "lastTransitionTime")
        if since is None:
            return MOUNT_PATIENCE_S
        return (self._today() - datetime.datetime.fromisoformat(since)).total_seconds()

    async def _with_events(
        self, snapshot: Snapshot, pods: Sequence[Object], ask: Callable[[str, str], Awaitable[tuple[Object, ...]]]
    ) -> Snapshot:
        """The snapshot with the kubelets' events about the newest of these pods."""
        newest = sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or "", reverse=True)
        uids = [pod["metadata"]["uid"] for pod in newest[:MOST_PODS_ASKED]]
        try:
            found = await asyncio.gather(*[ask(snapshot.key.namespace, uid) for uid in uids])
        except ApiError as error:
            if not error.is_refusal:
                raise
            # Without the right to read events the status can list the mounts, but not what is wrong with them.
            return snapshot
        events = {**snapshot.kubelet_events, **dict(zip(uids, found, strict=True))}
        return dataclasses.replace(snapshot, kubelet_events=events)

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
        others = (cache.find(other.kind, other.namespace, other.name) for other in contending_keys(key))
        contenders = tuple(
            Contender(other.object, any(child.kind == DEPLOYMENTS.kind for child in cache.owned_by(other.uid)))
            for other in others
            if other is not None
        )
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
            contenders=contenders,
            quota_messages=tuple(message for owner in replica_set_objects for message in _replica_failures(owner)),
        )

    async def _leave_to_others(self, snapshot: Snapshot) -> float | None:
        """How many seconds to leave the object to another operator; None if it is ours."""
        key, other_operators = snapshot.key, self._other_operators
        lease = other_operator(snapshot.object, other_operators.ours)
        if "status" in snapshot.object:
            self._unclaimed_since.pop(key, None)
        elif (
            other_operators.left and self._clock() < self._unclaimed_since.setdefault(key, self._clock()) + UNCLAIMED_S
        ):
            # An operator that knows of no other one takes new objects at once.
            return UNCLAIMED_S
        if lease is None or not await other_operators.runs(lease):
            other_operators.left.pop(key, None)
            return None
        if other_operators.left.get(key) != lease:
            other_operators.left[key] = lease
            message = (
                f"the operator with the Lease {lease} has this object, and the one with the Lease "
                f"{other_operators.ours} leaves it alone: let only one of them watch this namespace, or delete the "
                "Lease of one that is gone"
            )
            log.warning("%s: %s", key, message)
            today = self._today().strftime("%Y-%m-%dT%H:%M:%SZ")
            await self._events.post(key, snapshot.object, [EventDraft("Warning", "OtherOperator", message)], today)
        return OTHER_OPERATOR_AGAIN_S

    async def _check_is_current(self, snapshot: Snapshot) -> None:
        """Read the object and an ensemble's members from the API server itself, because the cache may be old.

        Called before any write. Raises _Stale if something changed, and _Vanished if the object is gone or going.
        """
        key, known = snapshot.key, snapshot.object["metadata"]
        resource = BY_KIND[key.kind]
        value = await self._api.get(resource, key.namespace, key.name)
        if value is None:
            self._wake_all(self._cache.delete(known["uid"], int(known["resourceVersion"])))
            raise _Vanished
        self._wake_all(self._cache.put(resource, value), but=key)
        metadata = value["metadata"]
        if "deletionTimestamp" in metadata:
            raise _Vanished
        if (metadata["uid"], metadata["generation"]) != (known["uid"], known["generation"]):
            raise _Stale("it was changed since it was looked at")
        if other_operator(value, self._other_operators.ours) != other_operator(
            snapshot.object, self._other_operators.ours
        ):
            raise _Stale("another operator took it since it was looked at")
        members = await asyncio.gather(*[self._api.get(MODELS, key.namespace, name) for name in snapshot.members])
        for known_member, member in zip(snapshot.members.values(), members, strict=True):
            known = known_member["metadata"]
            if member is None:
                self._wake_all(self._cache.delete(known["uid"], int(known["resourceVersion"])), but=key)
                raise _Stale("a member is gone since it was looked at")
            self._wake_all(self._cache.put(MODELS, member), but=key)
            if (member["metadata"]["uid"], member["metadata"]["generation"]) != (known["uid"], known["generation"]):
                raise _Stale("a member was changed since it was looked at")

    async def _with_replica_sets(self, snapshot: Snapshot, planned: Plan, strangers: Sequence[Object]) -> Plan:
        """Plan again with the ReplicaSets read from the API server.

        The cache may lack a ReplicaSet, and its pods need the ConfigMap and ServiceAccount that it names.
        """
        key = snapshot.key
        for value in await self._api.list_labelled(REPLICA_SETS, key.namespace, selector_of(key)):
            self._wake_all(self._cache.put(REPLICA_SETS, value), but=key)
        after = self._observe(key)
        return planned if after is None else plan(after, self._platform, strangers)

    def _new_children(self, key: Key) -> list[Object]:
        snapshot = self._observe(key)
        changes = plan(snapshot, self._platform).changes if snapshot is not None else ()
        return [change.object for change in changes if isinstance(change, Apply) and change.is_new]

    async def _objects_with_names_of(self, key: Key, wanted: Sequence[Object]) -> list[Object]:
        """The objects that have the names of wanted children.

        They are read from the API server if the cache lacks them: only objects with our label are watched.
        """
        owner = self._cache.find(key.kind, key.namespace, key.name)
        if owner is None or not wanted:
            return []
        found = await asyncio.gather(*[self._find(value) for value in wanted])
        there = [value for value in found if value is not None]
        for value in there:
            if any(reference["uid"] == owner.uid for reference in value["metadata"].get("ownerReferences") or ()):
                # It is ours; its watch event has not arrived yet.
                self._wake_all(self._cache.put(BY_KIND[value["kind"]], value), but=key)
        return there

    async def _find(self, value: Object) -> Object | None:
        """The existing object of this kind and name, from the cache or else from the API server."""
        kind, metadata = value["kind"], value["metadata"]
        known = self._cache.find(kind, metadata["namespace"], metadata["name"])
        if known is not None:
            return known.object
        return await self._api.get(BY_KIND[kind], metadata["namespace"], metadata["name"])

    async def _perform_all(self, snapshot: Snapshot, planned: Plan) -> _Performed:
        """Make the planned changes in order, up to the first one that fails."""
        key = snapshot.key
        change: Apply | Delete | Conflict
        try:
            for change in planned.changes:
                if planned.has_unchecked_parts and self._changes_template(change):
                    # A dry run before any write, so that a mistake in the template leaves all children as they are.
                    await self._dry_run(change.object, is_new=change.is_new)
            for change in planned.changes:
                is_rollout = self._changes_template(change) and not change.is_new
                if is_rollout and self._clock() < self._rolled_out_at.get(key, float("-inf")) + ROLLOUT_SPACING_S:
                    return _Performed(is_postponed=True)
                await self._perform(change)
                if is_rollout:
                    self._rolled_out_at[key] = self._clock()
        except ApiError as error:
            return _report_failure(change, error, snapshot)
        return _Performed()

    def _changes_template(self, change: Apply | Delete | Conflict) -> TypeGuard[Apply]:
        """Whether it creates a Deployment or changes its pod template."""
        if not isinstance(change, Apply) or change.object["kind"] != DEPLOYMENTS.kind:
            return False
        metadata = change.object["metadata"]
        entry = self._cache.find(DEPLOYMENTS.kind, metadata["namespace"], metadata["name"])
        return entry is None or _annotation(entry.object, TEMPLATE_HASH) != _annotation(change.object, TEMPLATE_HASH)

    async def _dry_run(self, value: Object, *, is_new: bool) -> None:
        """Dry run of an apply: raises what the apply would raise, and writes nothing."""
        try:
            await self._api.try_apply(value, is_new=is_new)
        except ApiError as error:
            if await self._conflicting_edits(value, error) is None:
                raise

    async def _perform(self, change: Apply | Delete | Conflict) -> None:
        match change:
            case Apply(value, is_new):
                answer = await (self._api.apply(value, is_new=True) if is_new else self._apply(value))
                self._cache.put(BY_KIND[value["kind"]], answer)
            case Delete(_, kind, namespace, name, uid, version):
                await self._api.delete(BY_KIND[kind], namespace, name, uid, version)
            case Conflict():
                pass

    async def _apply(self, value: Object) -> Object:
        try:
            return await self._api.apply(value)
        except ApiError as error:
            if (edits := await self._conflicting_edits(value, error)) is None:
                raise
        # Once is enough: if the apply is refused again, fields of others are not the cause.
        await self._api.set_owners(*edits)
        return await self._api.apply(value)

    async def _conflicting_edits(self, value: Object, error: ApiError) -> tuple[Object, list[Object]] | None:
        """The existing object, and its managedFields after the take-over of the fields that the apply was refused for.

        None if the error is not caused by fields of others.
        """
        if error.status != 422:
            return None
        metadata = value["metadata"]
        found = await self._api.get(BY_KIND[value["kind"]], metadata["namespace"], metadata["name"])
        if found is None or not may_be_applied(value, found):
            return None
        owners = taken_over(value, found, error.causes)
        return None if owners is None else (found, owners)

    async def _write_status(
        self,
        snapshot: Snapshot,
        planned: Plan,
        made: _Performed,
        conflicts: list[Conflict],
    ) -> None:
        today = self._today().strftime("%Y-%m-%dT%H:%M:%SZ")
        key, old = snapshot.key, snapshot.object.get("status") or {}
        new = status_of(
            snapshot,
            planned.spec,
            planned.problems,
            [made.failure] if made.failure is not None else [],
            conflicts,
            today,
            is_postponed=made.is_postponed,
            waiting_settings=planned.waiting_settings,
        )
        new["operator"] = self._other_operators.ours
        patch = merge_patch(old, new)
        if not patch:
            return
        resource = BY_KIND[key.kind]
        version = snapshot.object["metadata"]["resourceVersion"]
        try:
            # The version makes sure that we overwrite neither another object of this name nor a status that we have not
            # seen.
            answer = await self._api.patch_status(
                resource, key.namespace, key.name, {"metadata": {"resourceVersion": version}, "status": patch}
            )
        except ApiError as error:
            if error.status == 404 or error.meaning is Meaning.NAMESPACE_GOES:
                raise _Vanished from error
            if error.is_conflict:
                await self._check_is_current(snapshot)
                raise _Stale("its status was written since it was looked at") from error
            raise
        self._wake_all(self._cache.put(resource, answer), but=key)
        await self._events.post(key, answer, events_of(old, new), today)

    def _wake_all(self, keys: frozenset[Key], but: Key | None = None) -> None:
        for key in keys:
            if key != but:
                self._wake(key)


def _report_failure(change: Apply | Delete | Conflict, error: ApiError, snapshot: Snapshot) -> _Performed:
    """How to report that the API server refused a change. Raises if the error is no failure of the change itself."""
    match error.meaning:
        case Meaning.NAMESPACE_GOES:
            raise _Vanished from error
        case Meaning.CONFLICT if isinstance(change, Apply) and change.is_new:
            raise _NameTaken(str(error)) from error
        case Meaning.CONFLICT:
            raise error
    wanted = change.object if isinstance(change, Apply) else {}
    message = told(error.status, error.message, wanted, snapshot.object.get("spec"))
    return _Performed(
        failure=ApplyFailure(_reference(change), error.meaning, message), retry_after_s=error.retry_after_s
    )


def _failed(failure: ApplyFailure, retry_after_s: float | None) -> Failed:
    return Failed(_failure_of(failure.meaning), f"{failure.object_ref}: {failure.message}", retry_after_s)


def _failure_of(meaning: Meaning) -> Failure:
    if meaning.is_refusal:
        return Failure.PERMANENT
    return Failure.CONFLICT if meaning is Meaning.CONFLICT else Failure.TRANSIENT


def _is_unscheduled(pod: Object) -> bool:
    return any(
        condition["type"] == "PodScheduled" and condition["status"] == "False"
        for condition in (pod.get("status") or {}).get("conditions") or ()
    )


def _is_past_deadline(child: Object) -> bool:
    return condition(child, "Progressing").get("reason") == "ProgressDeadlineExceeded"


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
