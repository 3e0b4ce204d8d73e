"""Decides what one pass changes: the children of an object, and what to tell about it. Pure."""

from collections.abc import Sequence

from halimede_operator.core.api_errors import Meaning
from halimede_operator.core.children.desired import build, desired
from halimede_operator.core.children.diff import Apply, Conflict, Delete, Hold, diff
from halimede_operator.core.children.name_collisions import name_collision
from halimede_operator.core.decided import ApplyFailure, Change, Decided, EventDraft, reference_of
from halimede_operator.core.labels import GENERATION, INPUTS, PLACEMENT, without_blocking
from halimede_operator.core.placement.choice import Devices, placement_of
from halimede_operator.core.platform import Platform
from halimede_operator.core.revisions.inputs import inputs_of
from halimede_operator.core.revisions.revision import Revision
from halimede_operator.core.rollout.refused_pods import is_room_made, old_pods
from halimede_operator.core.rollout.revision_choice import Choice, choose
from halimede_operator.core.rollout.strategy import Strategy, strategy_at_rest, strategy_of
from halimede_operator.core.scaling.idle import WAKE, asleep, falls_asleep, wakes
from halimede_operator.core.scaling.replicas import IS_OURS, Replicas, held, present_of
from halimede_operator.core.scaling.scalers import KINDS as SCALER_KINDS
from halimede_operator.core.scaling.scalers import without_second
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.spec.types import RolloutPolicy, Workload
from halimede_operator.core.subject import Subject


def decide(subject: Subject, devices: Devices, now: str) -> Decided:
    """Decide on the changes of one object's children. now: UTC time as `reading.moment_at` writes it."""
    snapshot, spec, members = subject.snapshot, subject.spec, subject.members
    if spec is None or members is None:
        return Decided()
    if (taken := name_collision(snapshot)) is not None:
        return Decided((taken,))
    workload = spec.workload
    placement = devices.placement if workload.accelerator.is_wanted else None
    if workload.accelerator.is_wanted and placement is None:
        return Decided(unplaced=devices.unplaced)
    metadata = snapshot.object["metadata"]
    origin = {INPUTS: inputs_of(snapshot.object, snapshot.members), PLACEMENT: placement.written() if placement else ""}
    made_from = {**origin, GENERATION: str(metadata["generation"])}
    annotations = {name: text for name, text in made_from.items() if text}

    def revision_with(platform: Platform) -> Revision:
        return build(snapshot.key, spec, members, platform, placement, annotations)

    choice = choose(subject, origin, revision_with, now)
    replicas = subject.replicas(workload)
    existing = subject.deployment
    kept = strategy_at_rest(workload, existing)
    wanted = _children(subject, workload, choice, replicas, kept)
    deployment = _deployment_of(wanted)
    over_quota = any(is_room_made(text, old_pods(snapshot.pods, deployment)) for text in snapshot.refused_pods)
    strategy = strategy_of(subject, workload, deployment, now, room=devices.room, over_quota=over_quota)
    if strategy.policy is not kept:
        wanted = _children(subject, workload, choice, replicas, strategy.policy)
        deployment = _deployment_of(wanted)
    # What exists of an unavailable kind is not known, so it is not compared.
    unavailable = [child for child in wanted if child["kind"] in snapshot.unavailable]
    available = [child for child in wanted if child["kind"] not in snapshot.unavailable]
    changes = diff(available, (*snapshot.children, *subject.name_holders), metadata["uid"], snapshot.replica_sets)
    ordered = _in_order(changes, existing, replicas, deployment)
    if any(child["kind"] == "ResourceClaimTemplate" for child in unavailable):
        # New pods would wait for their claims forever.
        ordered = tuple(each for each in ordered if not _is_of_deployment(each))
    asleep_or_awake, told = _asleep_or_awake(subject, workload, now)
    return Decided(
        (*ordered, *asleep_or_awake),
        choice.revision.name,
        choice.rolled_back,
        choice.waiting,
        (*_events(snapshot, choice), *told),
        strategy=strategy,
        placement=placement_of(deployment),
        failures=tuple(_unavailable(child, snapshot) for child in unavailable),
    )


def strategy_now(subject: Subject, decided: Decided, now: str) -> Strategy | None:
    """How old pods are being replaced now. subject: after the changes were made."""
    deployment = subject.deployment
    if subject.spec is None or decided.strategy is None or deployment is None:
        return None
    found = strategy_of(subject, subject.spec.workload, deployment, now)
    # The decision knows why it is this one.
    return decided.strategy if found.reason and found.policy is decided.strategy.policy else found


def _children(
    subject: Subject, workload: Workload, choice: Choice, replicas: Replicas, policy: RolloutPolicy
) -> tuple[Object, ...]:
    snapshot = subject.snapshot
    made = desired(
        snapshot.key,
        snapshot.object["metadata"]["uid"],
        workload,
        subject.platform,
        choice.revision,
        policy,
        replicas,
        choice.rolled_back,
        hpa_may_be_zero=not snapshot.no_zero,
    )
    made = without_second(made, snapshot)
    return without_blocking(made, snapshot.children) if snapshot.is_owner_unknown else made


def _unavailable(child: Object, snapshot: Snapshot) -> ApplyFailure:
    return ApplyFailure(reference_of(child), Meaning.UNAVAILABLE, snapshot.unavailable[child["kind"]])


def _in_order(
    changes: Sequence[Apply | Delete | Conflict], existing: Object | None, replicas: Replicas, deployment: Object
) -> tuple[Change, ...]:
    """The changes in their order: first the deletion of unwanted scalers. If replicas are held, that comes before the
    Deployment is applied without replicas."""
    first = [change for change in changes if isinstance(change, Delete) and change.kind in SCALER_KINDS]
    rest: list[Change] = [change for change in changes if change not in first]
    if replicas.held is not None and existing is not None:
        indexes = [i for i, change in enumerate(rest) if isinstance(change, Apply) and change.object == deployment]
        index = indexes[0] if indexes else 0
        # `kubectl rollout undo` may have brought back the annotation that says that it was applied already.
        apply = [] if indexes else [Apply(deployment)]
        rest[index:index] = [Hold(held(existing, replicas.held)), *apply]
    return (*first, *rest)


def _asleep_or_awake(subject: Subject, workload: Workload, now: str) -> tuple[tuple[Hold, ...], tuple[EventDraft, ...]]:
    """The change that sets the Deployment to 0 replicas or wakes it again, if one is due, with its event."""
    snapshot, existing, scaling = subject.snapshot, subject.deployment, workload.autoscaling
    if existing is None or scaling is None or workload.suspend or existing.get(IS_OURS):
        return (), ()
    present = present_of(existing)
    if falls_asleep(scaling, snapshot.idle, present, now) and snapshot.idle is not None:
        text = f"idle since {snapshot.idle.since}: the Deployment is set to 0 replicas"
        return (Hold(held(existing, 0, asleep(snapshot.object))),), (EventDraft("Normal", "FellAsleep", text),)
    if present == 0 and wakes(scaling, snapshot.object, existing):
        text = f"the annotation {WAKE} has a new value: the Deployment gets {scaling.min_replicas} replicas"
        return (Hold(held(existing, scaling.min_replicas)),), (EventDraft("Normal", "WokenUp", text),)
    return (), ()


def _deployment_of(children: Sequence[Object]) -> Object:
    (deployment,) = (child for child in children if child["kind"] == "Deployment")
    return deployment


def _is_of_deployment(change: Change) -> bool:
    return isinstance(change, Hold) or (isinstance(change, Apply) and bool(change.object["kind"] == "Deployment"))


def _events(snapshot: Snapshot, choice: Choice) -> tuple[EventDraft, ...]:
    if not choice.undone:
        return ()
    kind, name = snapshot.key.kind, snapshot.key.name
    text = (
        f"the Deployment was set back to revision {choice.undone}, and the operator has restored revision "
        f"{choice.revision.name}: change the spec of the {kind} instead, with kubectl edit {kind.lower()}/{name}, or "
        "kubectl apply of the earlier manifest"
    )
    return (EventDraft("Warning", "RolloutUndone", text),)
