"""Makes the decided changes of an object's children."""

from collections.abc import Awaitable, Callable
from typing import TypeGuard

from halimede_operator.api_server.errors import ApiError
from halimede_operator.cluster.cache import Cache
from halimede_operator.cluster.client import KubeApi
from halimede_operator.cluster.kinds import BY_KIND, DEPLOYMENTS
from halimede_operator.core.api_errors import Meaning, is_dry_run_unsupported, is_owner_unknown, message_for_author
from halimede_operator.core.children.diff import Apply, Conflict, Delete, Hold, may_be_applied
from halimede_operator.core.children.field_owners import taken_over
from halimede_operator.core.decided import ApplyFailure, Change, Decided, Performed, reference_of
from halimede_operator.core.labels import TEMPLATE_HASH
from halimede_operator.core.reading import at, at_rest
from halimede_operator.core.rollout.refused_pods import is_room_made, old_pods, trial_pod, why_old_pods_stay
from halimede_operator.core.rollout.strategy import surges
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.spec.types import Key
from halimede_operator.core.subject import Subject
from halimede_operator.reconcile.interruptions import NameTaken, OwnerUnknown, Vanished

ROLLOUT_SPACING_S = 3.0
"""Shortest time between two changes of a Deployment's template, so that a hundred edits make a few rollouts."""


class ChildWriter:
    """Creates, changes and deletes children."""

    def __init__(self, api: KubeApi, cache: Cache, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self._api = api
        self._cache = cache
        self._clock = clock
        self._rolled_out_at: dict[Key, float] = {}
        """When a Deployment's template was last changed."""

    def forget(self, key: Key) -> None:
        """Forget an object that no longer exists."""
        self._rolled_out_at.pop(key, None)

    async def perform_all(
        self, subject: Subject, decided: Decided, announce: Callable[[], Awaitable[None]]
    ) -> Performed:
        """Make the decided changes in order, up to the first one that fails.

        Nothing changes for the pods that serve before the API server has answered all dry runs. announce: called then,
        if old pods may end before new ones serve.
        """
        snapshot, key = subject.snapshot, subject.snapshot.key
        is_rollout = any(self._is_rollout(change) for change in decided.changes)
        is_early = self._clock() < self._rolled_out_at.get(key, float("-inf")) + ROLLOUT_SPACING_S
        is_postponed = is_rollout and is_early
        takes_pods_away = decided.strategy is not None and decided.strategy.takes_pods_away
        begins_gap = takes_pods_away and (
            is_rollout or (bool(snapshot.refused_pods) and any(map(self._has_surged, decided.changes)))
        )
        has_unchecked_parts = subject.spec is not None and subject.spec.workload.has_unchecked_parts
        accepted: Object | None = None
        change: Change
        try:
            for change in decided.changes:
                is_unchecked = has_unchecked_parts and self._changes_template(change)
                if _is_of_deployment(change) and (is_unchecked or begins_gap):
                    # Before any write, so that a mistake in the template leaves all children as they are.
                    accepted = await self._dry_run(change.object, is_new=change.is_new)
            if begins_gap and not is_postponed:
                for change in filter(_is_of_account, decided.changes):
                    # Without it a pod is refused.
                    await self._perform(change)
        except ApiError as error:
            return _report_failure(change, error, snapshot)
        if takes_pods_away and not is_postponed and any(map(_is_of_deployment, decided.changes)):
            if begins_gap and accepted is not None and (refused := await self._try_pod(accepted, snapshot)) is not None:
                return refused
            await announce()
        try:
            for change in decided.changes:
                if self._is_rollout(change):
                    if is_postponed:
                        return Performed(is_postponed=True)
                    await self._perform(change)
                    self._rolled_out_at[key] = self._clock()
                # A postponed template may be replaced by another edit before it is applied.
                elif not (is_postponed and _is_for_new_pods(change)) and not (begins_gap and _is_of_account(change)):
                    await self._perform(change)
        except ApiError as error:
            return _report_failure(change, error, snapshot)
        return Performed()

    async def _try_pod(self, deployment: Object, snapshot: Snapshot) -> Performed | None:
        """Ask whether new pods would be admitted. Return why the old ones must stay; None if they need not.

        deployment: with the new template.
        """
        try:
            await self._api.try_create(trial_pod(deployment, snapshot.replica_sets))
        except ApiError as error:
            going = old_pods(snapshot.pods, deployment)
            is_made = is_room_made(
                error.message, going, by_all=at(deployment, "spec", "strategy", "type") == "Recreate"
            )
            meaning = why_old_pods_stay(error.meaning, error.message, is_room_made=is_made)
            if meaning is None:
                return None
            if meaning is Meaning.NAMESPACE_TERMINATING:
                raise Vanished from error
            if meaning is Meaning.CONFLICT:
                raise
            message = f"the pods stay as they are, because new ones would be refused: {at_rest(error.message)}"
            return Performed(
                failure=ApplyFailure(reference_of(deployment), meaning, message), retry_after_s=error.retry_after_s
            )
        return None

    def _is_rollout(self, change: Change) -> bool:
        """Whether it changes the pod template of a Deployment that exists."""
        return self._changes_template(change) and not change.is_new

    def _has_surged(self, change: Change) -> bool:
        """Whether the change is of a Deployment that keeps its old pods until new ones serve."""
        live = self._live(change) if _is_of_deployment(change) else None
        return live is not None and surges(live)

    def _changes_template(self, change: Change) -> TypeGuard[Apply]:
        """Whether the change creates a Deployment or changes its pod template."""
        if not _is_of_deployment(change):
            return False
        live = self._live(change)
        return live is None or _annotation(live, TEMPLATE_HASH) != _annotation(change.object, TEMPLATE_HASH)

    def _live(self, change: Apply) -> Object | None:
        """The existing object that the change is of; None if the change creates one."""
        metadata = change.object["metadata"]
        entry = self._cache.find(change.object["kind"], metadata["namespace"], metadata["name"])
        return entry.object if entry is not None else None

    async def _dry_run(self, value: Object, *, is_new: bool) -> Object:
        """The object that an apply would make. Raises what the apply would raise, and writes nothing.

        Returns `value` itself if a webhook with side effects makes a dry run impossible.
        """
        try:
            return await self._api.try_apply(value, is_new=is_new)
        except ApiError as error:
            if not is_dry_run_unsupported(error.message) and await self._conflicting_edits(value, error) is None:
                raise
        return value

    async def _perform(self, change: Change) -> None:
        match change:
            case Apply(value, is_new):
                answer = await (self._api.apply(value, is_new=True) if is_new else self._apply(value))
                self._cache.put(BY_KIND[value["kind"]], answer)
            case Delete(_, kind, namespace, name, uid, version):
                await self._api.delete(BY_KIND[kind], namespace, name, uid, version)
            case Hold(value):
                self._cache.put(BY_KIND[value["kind"]], await self._api.hold(value))
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


def _is_for_new_pods(change: Change) -> bool:
    """Whether new pods need the changed object, and existing pods do not."""
    return isinstance(change, Apply) and change.object["kind"] in _FOR_NEW_PODS


def _is_of_account(change: Change) -> bool:
    return isinstance(change, Apply) and bool(change.object["kind"] == "ServiceAccount")


def _is_of_deployment(change: Change) -> TypeGuard[Apply]:
    return isinstance(change, Apply) and bool(change.object["kind"] == DEPLOYMENTS.kind)


_FOR_NEW_PODS = ("ConfigMap", "ServiceAccount", "ResourceClaimTemplate")


def _report_failure(change: Change, error: ApiError, snapshot: Snapshot) -> Performed:
    """How to report that the API server refused a change. Raises if the error is no failure of the change itself."""
    if is_owner_unknown(error.message):
        raise OwnerUnknown(str(error)) from error
    match error.meaning:
        case Meaning.NAMESPACE_TERMINATING:
            raise Vanished from error
        case Meaning.CONFLICT if isinstance(change, Apply) and change.is_new:
            raise NameTaken(str(error)) from error
        case Meaning.CONFLICT:
            raise error
    wanted = change.object if isinstance(change, Apply) else {}
    message = message_for_author(error.status, error.message, wanted, snapshot.object.get("spec"))
    return Performed(
        failure=ApplyFailure(_reference(change), error.meaning, message), retry_after_s=error.retry_after_s
    )


def _annotation(value: Object, name: str) -> str | None:
    text: str | None = (value["metadata"].get("annotations") or {}).get(name)
    return text


def _reference(change: Change) -> str:
    match change:
        case Delete(_, kind, namespace, name):
            return f"{kind} {namespace}/{name}"
        case Apply(value) | Conflict(value) | Hold(value):
            return reference_of(value)
