"""One reconcile: observe, decide, apply, write the status, post events.

It is the same for a new object, a changed object, a restart of the operator and a changed child.
"""

import asyncio
import dataclasses
import datetime
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

from halimede_operator.api_server.errors import ApiError
from halimede_operator.cluster.cache import Cache
from halimede_operator.cluster.client import KubeApi, NotLeaderError
from halimede_operator.cluster.events import Events
from halimede_operator.cluster.indexes import Indexes
from halimede_operator.cluster.kinds import BY_KIND
from halimede_operator.cluster.nodes import Nodes
from halimede_operator.cluster.other_operators import OtherOperators
from halimede_operator.cluster.works import Works
from halimede_operator.core.api_errors import Meaning, message_for_author
from halimede_operator.core.children.diff import Apply, Conflict, Delete
from halimede_operator.core.decide import decide, strategy_now
from halimede_operator.core.decided import ApplyFailure, Decided, EventDraft, Performed
from halimede_operator.core.placement.choice import Devices
from halimede_operator.core.platform import Platform
from halimede_operator.core.pods.claims import unread_claims
from halimede_operator.core.pods.kubelet_events import (
    NO_PULL_SECRET,
    waits_for_device_claim,
    waits_for_pull_secrets,
    waits_for_volumes,
)
from halimede_operator.core.pods.read import placed_at
from halimede_operator.core.pods.refreshes import REFRESH_S, REFRESHED, failing_for_its_volumes, to_refresh
from halimede_operator.core.pods.scheduling import SCHEDULER_LIMIT_S, waits_for_devices, waits_for_scheduler
from halimede_operator.core.pods.served_versions import INDEX_LIMIT_S, is_newly_ready
from halimede_operator.core.pods.volume_claims import waits_for_claims
from halimede_operator.core.process.operator_mark import other_operator
from halimede_operator.core.process.workqueue import Failure
from halimede_operator.core.reading import at_rest, condition, integer_at, moment_at, moment_of
from halimede_operator.core.rollout.refused_pods import TRIED_AGAIN, TRY_AGAIN_S, to_try_again
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.spec.types import Key
from halimede_operator.core.status import status_of
from halimede_operator.core.status.events import events_of
from halimede_operator.core.status.merge_patch import merge_patch
from halimede_operator.core.subject import Subject
from halimede_operator.queue import Done, Failed, Gone, Outcome
from halimede_operator.reconcile.changes import ROLLOUT_SPACING_S, ChildWriter
from halimede_operator.reconcile.interruptions import NameTaken, OwnerUnknown, Stale, Vanished
from halimede_operator.reconcile.observer import OWNER_KNOWN_S, Observer
from halimede_operator.reconcile.placer import Placer, waits_for_devices_s

CONFLICT_AGAIN_S = 8.0
"""How often to check whether the name of a child is free again: the object that has it is not watched. Each check is
one GET per name."""
UNSCHEDULED_AGAIN_S = 30.0
"""The longest time between two looks for devices of pods that wait for some, because nodes are not watched."""
UNPLACED_AGAIN_S = 10.0
"""How often to look for devices for an object that has no pods because no devices fit."""
DEADLINE_AGAIN_S = 60.0
"""How often to check the deadlines of pods once a Deployment reports ProgressDeadlineExceeded. A pod with a long fetch,
or one that waited for a node, has a later deadline of its own, and no event comes when that passes."""
EVENTS_AFTER_S = 3.0
"""How long a pod waits for its volumes before its events are read. Most pods have their volumes by then, and to find
the events of one pod the API server reads all events of the namespace."""
REPORT_AFTER_S = 5.0
"""How long a transient failure lasts before the status reports it."""
OTHER_OPERATOR_AGAIN_S = 15.0
"""How often to check whether the operator that an object belongs to still runs."""
UNCLAIMED_S = 3.0
"""How long a new object is left to other operators, if any are known to run."""

log = logging.getLogger(__name__)


class Reconciler:
    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        indexes: Indexes,
        nodes: Nodes,
        works: Works,
        placer: Placer,
        events: Events,
        other_operators: OtherOperators,
        platform: Platform,
        wake: Callable[[Key], None],
        clock: Callable[[], float],
        today: Callable[[], datetime.datetime],
    ) -> None:
        """wake: enqueue a key. clock: monotonic seconds. today: the UTC time for statuses and events."""
        self._api = api
        # During a rollout an object may have twice its replicas.
        most_pods = 2 * platform.max_replicas
        self._observer = Observer(api, cache, indexes, nodes, works, other_operators.ours, most_pods, wake, clock)
        self._cache = cache
        self._children = ChildWriter(api, cache, clock)
        self._placer = placer
        self._wake = wake
        self._events = events
        self._other_operators = other_operators
        self._platform = platform
        self._clock = clock
        self._today = today
        self._failing_since: dict[Key, float] = {}
        """Since when changes of a key fail transiently."""
        self._children_with_taken_names: dict[Key, tuple[Object, ...]] = {}
        """Wanted children whose names other objects had."""
        self._unclaimed_since: dict[Key, float] = {}
        """Since when we know an object that no operator has written to yet; kept only while other operators run."""

    async def __call__(self, key: Key) -> Outcome:
        """Reconcile one object. Whatever fails becomes a `Failed`, and is in the object's status."""
        try:
            try:
                outcome = await self._attempt(key)
            except (Vanished, Stale, NotLeaderError):
                raise
            except ApiError as error:
                if error.is_conflict or error.meaning is Meaning.NAMESPACE_TERMINATING:
                    return Failed(_failure_of(error.meaning), str(error), error.retry_after_s)
                message = message_for_author(error.status, error.message, {}, None)
                failure = ApplyFailure(f"{error.verb} {error.path}", error.meaning, message)
                return await self._report(key, failure, error.retry_after_s)
            except Exception as error:
                log.exception("reconcile of %s raised an exception", key)
                failure = ApplyFailure("the operator failed", Meaning.TRANSIENT, at_rest(repr(error)))
                return await self._report(key, failure, None)
        except Vanished:
            return Done()
        except Stale as stale:
            return Failed(Failure.CONFLICT, str(stale))
        except NotLeaderError:
            return Failed(Failure.TRANSIENT, "another operator may hold the lease")
        if not isinstance(outcome, Failed):
            self._failing_since.pop(key, None)
        return outcome

    async def _attempt(self, key: Key) -> Outcome:
        try:
            return await self._reconcile(
                key, await self._observer.name_holders(key, self._children_with_taken_names.get(key, ()))
            )
        except NameTaken:
            return await self._reconcile(key, await self._observer.name_holders(key, await self._new_children(key)))
        except OwnerUnknown:
            self._observer.note_unknown_owner(key.kind)
            return await self._reconcile(key, ())

    async def _report(self, key: Key, failure: ApplyFailure, retry_after_s: float | None) -> Outcome:
        """Write the status of an object whose reconcile ended early. A request that failed may fail here, too."""
        failed = _failed(failure, retry_after_s)
        if self._is_to_be_awaited(key, failure, self._clock()) or (snapshot := self._observer.observe(key)) is None:
            return failed
        try:
            if await self._leave_to_others(snapshot) is None:
                await self._write_status(*self._decided_after_failure(snapshot), Performed(failure=failure))
        except ApiError:
            pass
        return failed

    def _decided_after_failure(self, snapshot: Snapshot) -> tuple[Subject, Decided]:
        """With the devices that the Deployment has, because asking for others may be what failed."""
        try:
            subject = Subject.of(snapshot, self._platform)
            decided = decide(subject, Devices(subject.placement), self._now())
        except Exception:  # noqa: BLE001 - it is what failed, and the log has it
            return Subject(snapshot, self._platform, None), Decided()
        return subject, dataclasses.replace(decided, changes=())

    def _is_to_be_awaited(self, key: Key, failure: ApplyFailure, begun: float) -> bool:
        """Whether to report a failure later, because it may be over soon. begun: the start of the reconcile."""
        if failure.meaning is not Meaning.TRANSIENT:
            self._failing_since.pop(key, None)
            return False
        return self._clock() - self._failing_since.setdefault(key, begun) < REPORT_AFTER_S

    async def _reconcile(self, key: Key, name_holders: Sequence[Object]) -> Outcome:
        begun = self._clock()
        for gone in self._cache.take_gone():
            # Not only in the reconcile of a deleted object: others may be placed before it, and wait for its devices.
            self._placer.forget(gone)
        snapshot = self._observer.observe(key)
        if snapshot is None:
            self._children.forget(key)
            self._children_with_taken_names.pop(key, None)
            self._unclaimed_since.pop(key, None)
            self._other_operators.left.pop(key, None)
            self._events.forget(key)
            return Gone()
        if "deletionTimestamp" in snapshot.object["metadata"]:
            return Done()
        if (wait_s := await self._leave_to_others(snapshot)) is not None:
            return Done(wait_s)
        # Each of these steps takes a tenth of a second if the object has a thousand pods. Other tasks run in between.
        await asyncio.sleep(0)
        subject = Subject.of(snapshot, self._platform, name_holders)
        devices, decided = await self._decide(subject)
        performed = Performed()
        again_in: list[float] = []
        if decided.unplaced:
            again_in.append(UNPLACED_AGAIN_S)
        if snapshot.is_owner_unknown:
            again_in.append(OWNER_KNOWN_S)
        if any(not isinstance(change, Conflict) for change in decided.changes):
            await self._observer.check_is_current(snapshot)
            if any(isinstance(change, Delete) for change in decided.changes):
                # The cache may lack a ReplicaSet, and its pods need the ConfigMap and ServiceAccount that it names.
                await self._observer.read_replica_sets(key)
                if (after := self._observer.observe(key)) is not None:
                    subject = Subject.of(after, self._platform, name_holders)
                    decided = decide(subject, devices, self._now())
            await self._observer.check_zero(decided)
            decided = await self._observer.without_rivals(decided)
            performed = await self._children.perform_all(
                subject, decided, functools.partial(self._announce, subject, decided)
            )
            if performed == Performed():
                await self._events.post(key, snapshot.object, decided.events, self._now())
            if performed.is_postponed:
                again_in.append(ROLLOUT_SPACING_S)
            if (after := self._observer.observe(key)) is None:
                return Gone()
            if after.object["metadata"]["generation"] != snapshot.object["metadata"]["generation"]:
                # The status would report the old spec's children as those of the new spec.
                raise Stale("it was changed while its children were made")
            subject = subject.seen(after)
        if not performed.is_postponed:
            decided = dataclasses.replace(decided, strategy=strategy_now(subject, decided, self._now()))
        if performed.failure is not None and self._is_to_be_awaited(key, performed.failure, begun):
            return _failed(performed.failure, performed.retry_after_s)
        again_in += await self._try_again(subject.snapshot)
        subject, checks_in = await self._with_causes(subject)
        again_in += checks_in
        self._children_with_taken_names.pop(key, None)
        if decided.conflicts:
            self._children_with_taken_names[key] = tuple(conflict.object for conflict in decided.conflicts)
            again_in.append(CONFLICT_AGAIN_S)
        await asyncio.sleep(0)
        try:
            if (event_in := await self._write_status(subject, decided, performed)) is not None:
                again_in.append(event_in)
        except ApiError:
            if performed.failure is None:
                raise
        if performed.failure is not None:
            return _failed(performed.failure, performed.retry_after_s)
        return Done(min(again_in, default=None))

    async def _decide(self, subject: Subject) -> tuple[Devices, Decided]:
        """Decide on the devices, then on the changes. Raises ApiError if the nodes cannot be read."""
        devices = await self._placer.devices_for(subject)
        decided = decide(subject, devices, self._now())
        if decided.strategy is not None and decided.strategy.needs_room and decided.placement is not None:
            devices = dataclasses.replace(devices, room=await self._placer.room(subject, decided.placement))
            decided = decide(subject, devices, self._now())
        return devices, decided

    async def _announce(self, subject: Subject, decided: Decided) -> None:
        """Write the status before a rollout with a gap, so that users read about the gap before it begins."""
        told = condition({"status": subject.status}, "RolloutStrategy").get("reason")
        generation = integer_at(subject.status, "observedGeneration")
        wanted = decided.strategy.policy if decided.strategy is not None else None
        if (told, generation) != (wanted, subject.snapshot.object["metadata"]["generation"]):
            await self._write_status(subject, decided, Performed(is_postponed=True))

    async def _with_causes(self, subject: Subject) -> tuple[Subject, list[float]]:
        """Add what the status needs about pods that do not start: nodes and kubelets' events.

        Also return the seconds after which to check again for what no watch reports.
        """
        snapshot = subject.snapshot
        again_in: list[float] = []
        if any(waits_for_devices(pod) for pod in snapshot.pods):
            text, asked = await self._placer.explanation(subject, self._subject)
            if asked is not None:
                self._wake(asked)
            snapshot = dataclasses.replace(snapshot, free_devices=text)
            again_in.append(self._devices_again_in(subject))
        if waiting := [pod for pod in snapshot.pods if waits_for_volumes(pod) or waits_for_device_claim(pod)]:
            age_s = max(self._waited_s(pod) for pod in waiting)
            if age_s >= EVENTS_AFTER_S:
                snapshot = await self._observer.with_kubelet_events(snapshot, waiting, type="Warning")
            # Often at first, and less often the longer nothing changes.
            again_in.append(min(60.0, max(EVENTS_AFTER_S, age_s / 4)))
        if pulling := [pod for pod in snapshot.pods if waits_for_pull_secrets(pod)]:
            snapshot = await self._observer.with_kubelet_events(snapshot, pulling, reason=NO_PULL_SECRET)
        if claiming := [pod for pod in snapshot.pods if waits_for_claims(pod)]:
            snapshot = await self._observer.with_volume_claims(snapshot, claiming)
            again_in.append(UNPLACED_AGAIN_S)
        if (unread := unread_claims(snapshot)) and "ResourceClaimTemplate" not in snapshot.unavailable:
            snapshot = await self._observer.with_claims(snapshot, unread)
        if any(waits_for_scheduler(pod) for pod in snapshot.pods):
            again_in.append(SCHEDULER_LIMIT_S)
        if any(is_newly_ready(pod, self._now()) and not _has_served(snapshot, pod) for pod in snapshot.pods):
            again_in.append(INDEX_LIMIT_S)
        late = [child for child in snapshot.children if _is_past_deadline(child)]
        again_in += [self._pods_deadline_in_s(child, snapshot.pods) for child in late]
        return subject.seen(snapshot), again_in

    def _subject(self, key: Key) -> Subject | None:
        snapshot = self._observer.observe(key)
        return Subject.of(snapshot, self._platform) if snapshot is not None else None

    async def _try_again(self, snapshot: Snapshot) -> list[float]:
        """Make Kubernetes try again to create refused pods, and to mount Secrets that were missing. Its controllers and
        kubelets do not see that a person has repaired the cause. Return the seconds after which to do it again."""
        now, again_in = self._now(), list[float]()
        if snapshot.refused_pods:
            await self._touch(snapshot.key, to_try_again(snapshot.replica_sets, now), {TRIED_AGAIN: now})
            again_in.append(TRY_AGAIN_S)
        if failing := failing_for_its_volumes(snapshot.pods, now):
            await self._touch(snapshot.key, to_refresh(failing, now), {REFRESHED: now})
            again_in.append(REFRESH_S)
        return again_in

    async def _touch(self, key: Key, values: Sequence[Object], annotations: Mapping[str, str]) -> None:
        for value in values:
            try:
                answer = await self._api.annotate(value, annotations)
            except ApiError as error:
                # We have no right to do it, or the object is gone. Kubernetes tries again by itself, only later.
                if not (error.is_refusal or error.is_conflict or error.status == 404):
                    raise
            else:
                self._observer.keep(BY_KIND[value["kind"]], answer, reconciled=key)

    def _devices_again_in(self, subject: Subject) -> float:
        """Seconds until a pod that waits for devices may get others, or until its message may be outdated."""
        waited_s = waits_for_devices_s(subject.snapshot, self._today())
        move_after_s = subject.spec.workload.accelerator.move_after_seconds if subject.spec is not None else 0
        left_s = move_after_s - waited_s
        # Often at first, and less often the longer nothing changes.
        again_s = min(UNSCHEDULED_AGAIN_S, max(UNPLACED_AGAIN_S, waited_s / 4))
        return min(left_s, again_s) if left_s > 0 else again_s

    def _pods_deadline_in_s(self, deployment: Object, pods: Sequence[Object]) -> float:
        """Seconds until the deadline of the pod that got its node last, at most DEADLINE_AGAIN_S."""
        placed = max(map(placed_at, pods), default="")
        if not placed:
            return DEADLINE_AGAIN_S
        passed = (self._today() - datetime.datetime.fromisoformat(placed)).total_seconds()
        left = deployment["spec"]["progressDeadlineSeconds"] - passed
        # Times in statuses are whole seconds.
        return DEADLINE_AGAIN_S if left < 0 else min(DEADLINE_AGAIN_S, left + 1.0)

    def _waited_s(self, pod: Object) -> float:
        """Seconds that the pod has waited for its volumes or its ResourceClaim: from the cluster's clocks to ours."""
        sandbox = condition(pod, "PodReadyToStartContainers")
        since = moment_at(sandbox or pod["metadata"], "lastTransitionTime" if sandbox else "creationTimestamp")
        if since is None:
            return EVENTS_AFTER_S
        return (self._today() - datetime.datetime.fromisoformat(since)).total_seconds()

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
            draft = EventDraft("Warning", "OtherOperator", message)
            await self._events.post(key, snapshot.object, [draft], self._now())
        return OTHER_OPERATOR_AGAIN_S

    def _now(self) -> str:
        return moment_of(self._today())

    async def _new_children(self, key: Key) -> list[Object]:
        subject = self._subject(key)
        changes = (await self._decide(subject))[1].changes if subject is not None else ()
        return [change.object for change in changes if isinstance(change, Apply) and change.is_new]

    async def _write_status(self, subject: Subject, decided: Decided, performed: Performed) -> float | None:
        """Write the status if it changed, and post its events. Returns the seconds until another event may be due."""
        today, snapshot = self._now(), subject.snapshot
        key, old = snapshot.key, snapshot.object.get("status") or {}
        new = status_of(subject, decided, performed, today)
        new["operator"] = self._other_operators.ours
        patch = merge_patch(old, new)
        if not patch:
            return await self._events.report(key, snapshot.object, (), new, today)
        resource = BY_KIND[key.kind]
        version = snapshot.object["metadata"]["resourceVersion"]
        try:
            # The version makes sure that we overwrite neither another object of this name nor a status that we have not
            # seen.
            answer = await self._api.patch_status(
                resource, key.namespace, key.name, {"metadata": {"resourceVersion": version}, "status": patch}
            )
        except ApiError as error:
            if error.status == 404 or error.meaning is Meaning.NAMESPACE_TERMINATING:
                raise Vanished from error
            if error.is_conflict:
                await self._observer.check_is_current(snapshot)
                raise Stale("its status was written since it was observed") from error
            raise
        self._observer.keep(resource, answer, reconciled=key)
        return await self._events.report(key, answer, events_of(old, new), new, today)


def _failed(failure: ApplyFailure, retry_after_s: float | None) -> Failed:
    return Failed(_failure_of(failure.meaning), f"{failure.object_ref}: {failure.message}", retry_after_s)


def _failure_of(meaning: Meaning) -> Failure:
    if meaning.is_refusal:
        return Failure.PERMANENT
    return Failure.CONFLICT if meaning is Meaning.CONFLICT else Failure.TRANSIENT


def _has_served(snapshot: Snapshot, pod: Object) -> bool:
    """Whether the pod's last index has a version that is READY."""
    index = snapshot.indexes.get(pod["metadata"]["uid"])
    return index is not None and any(version.state == "READY" for version in index.versions)


def _is_past_deadline(child: Object) -> bool:
    return condition(child, "Progressing").get("reason") == "ProgressDeadlineExceeded"
