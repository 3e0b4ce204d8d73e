"""Turns a snapshot into the changes to make to the children: parse, desired, diff."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from halimede_operator.core.api.ensemble import MAX_STEPS
from halimede_operator.core.api.parse import parse
from halimede_operator.core.api.spec import EnsembleSpec, Kind, ModelSpec, Problem, RolloutPolicy, Spec, Workload
from halimede_operator.core.autoscaling.idle import WAKE, asleep, falls_asleep, wakes
from halimede_operator.core.autoscaling.replicas import IS_OURS, Replicas, held, present_of, replicas_of
from halimede_operator.core.autoscaling.scalers import KINDS as SCALER_KINDS
from halimede_operator.core.autoscaling.scalers import scalers_in, without_second
from halimede_operator.core.desired import build, desired, member_problems, template_without_devices
from halimede_operator.core.diff import Apply, Conflict, Delete, Hold, diff
from halimede_operator.core.events import EventDraft
from halimede_operator.core.labels import GENERATION, INPUTS, PLACEMENT, without_blocking
from halimede_operator.core.name_collisions import name_collision
from halimede_operator.core.names import child_name
from halimede_operator.core.placement.choice import Demand, Placement, demand_of, need_of, read_placement
from halimede_operator.core.platform import Platform
from halimede_operator.core.reading import at, objects_at, text_at
from halimede_operator.core.refused_pods import is_room_made, old_pods
from halimede_operator.core.revision_choice import Choice, choose
from halimede_operator.core.revisions.inputs import inputs_of
from halimede_operator.core.revisions.rollback import RolledBack, rolled_back_in
from halimede_operator.core.rollout import Strategy, strategy_at_rest, strategy_of
from halimede_operator.core.snapshot import Object, Snapshot

S = TypeVar("S", ModelSpec, EnsembleSpec)


@dataclass(frozen=True, slots=True)
class Devices:
    """What was decided about an object's devices before the plan."""

    placement: Placement | None = None
    unplaced: str = ""
    """Why there is no placement although the spec wants devices."""
    room: int | None = None
    """How many further pods the free devices allow; None if that was not asked."""


Change = Apply | Delete | Conflict | Hold


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes to make, and what the status needs to know about the spec."""

    changes: tuple[Change, ...]
    """In the order in which they are made. Empty if the spec has problems or a member is missing: what runs goes on
    running."""
    spec: Spec | None
    """None if there are problems, of the spec itself or of its members."""
    problems: tuple[Problem, ...]
    revision: str | None = None
    """The name of the revision that the Deployment should have; None if the plan does not know."""
    rolled_back: RolledBack | None = None
    """What was rolled back, if the Deployment has an earlier revision than that of the spec."""
    waiting: tuple[str, ...] | None = None
    """What changed in the operator that only the object's next pods will have; None if the plan does not know."""
    events: tuple[EventDraft, ...] = ()
    """To post when all changes are made."""
    unplaced: str = ""
    """Why no devices could be chosen; then nothing is changed."""
    strategy: Strategy | None = None
    placement: Placement | None = None
    """The devices of the pods that the Deployment will have."""
    unavailable: tuple[Object, ...] = ()
    """Wanted children of kinds that this cluster does not have. The others are applied."""

    @property
    def has_unchecked_parts(self) -> bool:
        """Whether parts of the pod template can be checked only by the API server."""
        return self.spec is not None and self.spec.workload.has_unchecked_parts


def member_names(ensemble: Object) -> frozenset[str]:
    """Names of the InferenceModels that a ModelEnsemble uses, also if its spec is invalid."""
    steps = objects_at(ensemble, "spec", "steps")[:MAX_STEPS]
    return frozenset(name for step in steps if (name := text_at(step, "modelRef", "name")))


def deployment_in(snapshot: Snapshot) -> Object | None:
    """The object's Deployment, if it exists."""
    name = child_name(snapshot.key.name)
    children = (child for child in snapshot.children if child["kind"] == "Deployment")
    return next((child for child in children if child["metadata"]["name"] == name), None)


def placement_in(deployment: Object | None) -> Placement | None:
    """The devices that a Deployment's pods request."""
    return read_placement(text_at(deployment, "metadata", "annotations", PLACEMENT))


def kept_placement(snapshot: Snapshot, workload: Workload) -> Placement | None:
    """The devices of the existing pods, if the spec asks for the same."""
    placement = placement_in(deployment_in(snapshot))
    return placement if placement is not None and placement.need == need_of(workload) else None


def failed_placement(snapshot: Snapshot) -> Placement | None:
    """The devices that the spec had when it was rolled back; None if it was not.

    They stay the same, so that the spec is recognized as the one that was rolled back.
    """
    record = rolled_back_in(deployment_in(snapshot))
    if record is None or record.inputs != inputs_of(snapshot.object, snapshot.members):
        return None
    return read_placement(record.placement)


def workload_in(snapshot: Snapshot, platform: Platform) -> Workload | None:
    """The pods' settings of the spec; None if it has problems."""
    spec, _ = parse(snapshot.key.kind, snapshot.object, platform)
    return None if spec is None else spec.workload


def demand_in(snapshot: Snapshot, platform: Platform) -> Demand | None:
    """What the object's pods need of nodes with devices; None if the operator does not choose their devices, or if the
    spec has problems."""
    spec, members, problems = _read(snapshot, platform)
    if problems or spec is None or members is None or not spec.workload.accelerator.is_wanted:
        return None
    if spec.workload.accelerator.claim is not None:
        return None
    template = template_without_devices(snapshot.key, spec, members, platform)
    return demand_of(snapshot.key, spec.workload, template)


def plan(
    snapshot: Snapshot,
    platform: Platform,
    now: str,
    name_holders: Sequence[Object] = (),
    devices: Devices = Devices(),
) -> Plan:
    """Plan the changes of one object's children. Pure: no I/O.

    now: UTC time as `reading.moment_at` writes it. name_holders: objects of other owners that have the names of
    children to create.
    """
    spec, members, problems = _read(snapshot, platform)
    if problems or spec is None:
        return Plan((), None, problems)
    if members is None:
        return Plan((), spec, ())
    if (taken := name_collision(snapshot)) is not None:
        return Plan((taken,), spec, ())
    workload = spec.workload
    placement = devices.placement if workload.accelerator.is_wanted else None
    if workload.accelerator.is_wanted and placement is None:
        return Plan((), spec, (), unplaced=devices.unplaced)
    metadata = snapshot.object["metadata"]
    origin = {INPUTS: inputs_of(snapshot.object, snapshot.members), PLACEMENT: placement.written() if placement else ""}
    made_from = {**origin, GENERATION: str(metadata["generation"])}
    annotations = {name: text for name, text in made_from.items() if text}
    replicas = _replicas(snapshot, workload)
    choice = choose(
        snapshot,
        spec,
        origin,
        platform,
        lambda given: build(snapshot.key, spec, members, given, placement, annotations),
        now,
    )

    def children(policy: RolloutPolicy) -> tuple[Object, ...]:
        made = desired(
            snapshot.key,
            metadata["uid"],
            workload,
            platform,
            choice.revision,
            policy,
            replicas,
            choice.rolled_back,
            hpa_may_be_zero=not snapshot.no_zero,
        )
        return without_second(made, snapshot)

    existing = deployment_in(snapshot)
    kept = strategy_at_rest(workload, existing)
    wanted = children(kept)
    deployment = _deployment_of(wanted)
    strategy = strategy_of(
        workload,
        existing,
        deployment,
        snapshot.pods,
        placement_in(deployment),
        devices.room,
        now=now,
        startup=at(snapshot.object, "status", "startup"),
        over_quota=any(is_room_made(text, old_pods(snapshot.pods, deployment)) for text in snapshot.refused_pods),
    )
    if strategy.policy is not kept:
        wanted = children(strategy.policy)
        deployment = _deployment_of(wanted)
    if snapshot.is_owner_unknown:
        wanted = without_blocking(wanted, snapshot.children)
    # What exists of an unavailable kind is not known, so it is not compared.
    unavailable = tuple(child for child in wanted if child["kind"] in snapshot.unavailable)
    wanted = tuple(child for child in wanted if child["kind"] not in snapshot.unavailable)
    changes = diff(wanted, (*snapshot.children, *name_holders), metadata["uid"], snapshot.replica_sets)
    ordered = _in_order(changes, existing, replicas, deployment)
    if any(child["kind"] == "ResourceClaimTemplate" for child in unavailable):
        # New pods would wait for their claims forever.
        ordered = tuple(each for each in ordered if not _is_of_deployment(each))
    asleep_or_awake, told = _asleep_or_awake(snapshot, workload, now)
    return Plan(
        (*ordered, *asleep_or_awake),
        spec,
        (),
        choice.revision.name,
        choice.rolled_back,
        choice.waiting,
        (*_events(snapshot, choice), *told),
        strategy=strategy,
        placement=placement_in(deployment),
        unavailable=unavailable,
    )


def plan_without_requests(snapshot: Snapshot, platform: Platform, now: str) -> Plan:
    """A plan for the status of an object whose reconcile failed: with the devices that the Deployment has."""
    kept = placement_in(deployment_in(snapshot))
    return replace(plan(snapshot, platform, now, devices=Devices(kept)), changes=())


def _in_order(
    changes: Sequence[Apply | Delete | Conflict], existing: Object | None, replicas: Replicas, deployment: Object
) -> tuple[Change, ...]:
    """A scaler that is no longer wanted goes first. The replicas are held before the Deployment is applied without."""
    first = [change for change in changes if isinstance(change, Delete) and change.kind in SCALER_KINDS]
    rest: list[Change] = [change for change in changes if change not in first]
    if replicas.held is not None and existing is not None:
        places = [i for i, change in enumerate(rest) if isinstance(change, Apply) and change.object == deployment]
        place = places[0] if places else 0
        # `kubectl rollout undo` may have brought back the annotation that says that it was applied already.
        apply = [] if places else [Apply(deployment)]
        rest[place:place] = [Hold(held(existing, replicas.held)), *apply]
    return (*first, *rest)


def _asleep_or_awake(
    snapshot: Snapshot, workload: Workload, now: str
) -> tuple[tuple[Hold, ...], tuple[EventDraft, ...]]:
    """The last step of `scaleToZero` by the operator, or the first one back; with what to tell about it."""
    existing, scaling = deployment_in(snapshot), workload.autoscaling
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


def _replicas(snapshot: Snapshot, workload: Workload) -> Replicas:
    return replicas_of(workload, deployment_in(snapshot), bool(scalers_in(snapshot)))


def _counted(spec: S, snapshot: Snapshot) -> S:
    """The spec, with the replicas that the Deployment has if others set them."""
    workload = spec.workload
    if workload.suspend:
        return spec
    return replace(spec, workload=replace(workload, replicas=_replicas(snapshot, workload).counted))


def _resource(deployment: Object) -> str:
    placement = placement_in(deployment)
    return placement.resource if placement is not None else ""


def _deployment_of(children: Sequence[Object]) -> Object:
    (deployment,) = (child for child in children if child["kind"] == "Deployment")
    return deployment


def _is_of_deployment(change: Change) -> bool:
    return isinstance(change, Hold) or (isinstance(change, Apply) and bool(change.object["kind"] == "Deployment"))


def strategy_now(snapshot: Snapshot, planned: Plan, now: str) -> Strategy | None:
    """How old pods are being replaced, after the planned changes were made."""
    deployment = deployment_in(snapshot)
    if planned.spec is None or planned.strategy is None or deployment is None:
        return None
    found = strategy_of(
        planned.spec.workload,
        deployment,
        deployment,
        snapshot.pods,
        placement_in(deployment),
        None,
        now=now,
        startup=at(snapshot.object, "status", "startup"),
    )
    # The plan knows why it is this one.
    return planned.strategy if found.reason and found.policy is planned.strategy.policy else found


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


def _read(
    snapshot: Snapshot, platform: Platform
) -> tuple[Spec | None, Mapping[str, ModelSpec] | None, tuple[Problem, ...]]:
    """The spec, its members (None if one is missing or invalid) and its problems."""
    spec, problems = parse(snapshot.key.kind, snapshot.object, platform)
    if spec is None:
        return None, {}, problems
    if not isinstance(spec, EnsembleSpec):
        return _counted(spec, snapshot), {}, problems
    spec = _counted(spec, snapshot)
    members: dict[str, ModelSpec] = {}
    for name in {step.model for step in spec.steps}:
        member = snapshot.members.get(name)
        parsed = parse(Kind.INFERENCE_MODEL, member, platform)[0] if member is not None else None
        if not isinstance(parsed, ModelSpec):
            return spec, None, ()
        members[name] = parsed
    return spec, members, member_problems(spec, members)
