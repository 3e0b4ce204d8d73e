"""Turns a snapshot into the changes to make to the children: parse, desired, diff."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halimede_operator.core.api.ensemble import MAX_STEPS
from halimede_operator.core.api.parse import parse
from halimede_operator.core.api.spec import EnsembleSpec, Kind, ModelSpec, Problem, RolloutPolicy, Spec, Workload
from halimede_operator.core.desired import desired, member_problems, template_without_devices
from halimede_operator.core.diff import Apply, Conflict, Delete, diff
from halimede_operator.core.labels import PLACEMENT
from halimede_operator.core.name_collisions import name_collision
from halimede_operator.core.names import child_name
from halimede_operator.core.placement.choice import Demand, Placement, demand_of, read_placement
from halimede_operator.core.platform import Platform
from halimede_operator.core.pod_settings import with_kept_settings
from halimede_operator.core.reading import objects_at, text_at
from halimede_operator.core.rollout import Strategy, strategy_at_rest, strategy_of
from halimede_operator.core.snapshot import Object, Snapshot


@dataclass(frozen=True, slots=True)
class Devices:
    """What was decided about an object's devices before the plan."""

    placement: Placement | None = None
    unplaced: str = ""
    """Why there is no placement although the spec wants devices."""
    room: int | None = None
    """How many further pods the free devices allow; None if that was not asked."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes to make, and what the status needs to know about the spec."""

    changes: tuple[Apply | Delete | Conflict, ...]
    """In the order in which they are made. Empty if the spec has problems or a member is missing: what runs goes on
    running."""
    spec: Spec | None
    """None if there are problems, of the spec itself or of its members."""
    problems: tuple[Problem, ...]
    waiting_settings: str = ""
    """The changed settings of the platform that only the object's next pods will have, as a text; "" if there are
    none."""
    unplaced: str = ""
    """Why no devices could be chosen; then nothing is changed."""
    strategy: Strategy | None = None

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


def placement_in(snapshot: Snapshot) -> Placement | None:
    """The devices that the existing Deployment's pods request."""
    return read_placement(text_at(deployment_in(snapshot), "metadata", "annotations", PLACEMENT))


def workload_in(snapshot: Snapshot, platform: Platform) -> Workload | None:
    """The pods' settings of the spec; None if it has problems."""
    spec, _ = parse(snapshot.key.kind, snapshot.object, platform)
    return None if spec is None else spec.workload


def demand_in(snapshot: Snapshot, platform: Platform) -> Demand | None:
    """What the object's pods need of nodes with devices; None if they need no devices, or if the spec has problems."""
    spec, members, problems = _read(snapshot, platform)
    if problems or spec is None or members is None or not spec.workload.accelerator.is_wanted:
        return None
    template = template_without_devices(snapshot.key, spec, members, platform)
    return demand_of(snapshot.key, spec.workload, template)


def plan(
    snapshot: Snapshot, platform: Platform, name_holders: Sequence[Object] = (), devices: Devices = Devices()
) -> Plan:
    """Plan the changes of one object's children. Pure: no I/O.

    name_holders: objects of other owners that have the names of children to create.
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
    uid = snapshot.object["metadata"]["uid"]

    def children(policy: RolloutPolicy) -> tuple[tuple[Object, ...], str]:
        return with_kept_settings(
            lambda settings: desired(snapshot.key, uid, spec, members, settings, placement, policy),
            platform,
            snapshot.children,
            snapshot.pods,
        )

    existing = deployment_in(snapshot)
    kept = strategy_at_rest(workload, existing)
    wanted, waiting_settings = children(kept)
    (deployment,) = (child for child in wanted if child["kind"] == "Deployment")
    resource = placement.resource if placement is not None else ""
    strategy = strategy_of(workload, existing, deployment, snapshot.pods, resource, devices.room)
    if strategy.policy is not kept:
        wanted, waiting_settings = children(strategy.policy)
    changes = diff(wanted, (*snapshot.children, *name_holders), uid, snapshot.replica_sets)
    return Plan(changes, spec, (), waiting_settings, strategy=strategy)


def strategy_now(snapshot: Snapshot, planned: Plan) -> Strategy | None:
    """How old pods are being replaced, after the planned changes were made."""
    deployment = deployment_in(snapshot)
    if planned.spec is None or planned.strategy is None or deployment is None:
        return None
    placement = placement_in(snapshot)
    resource = placement.resource if placement is not None else ""
    now = strategy_of(planned.spec.workload, deployment, deployment, snapshot.pods, resource, None)
    # The plan knows why it is this one.
    return planned.strategy if now.reason and now.policy is planned.strategy.policy else now


def _read(
    snapshot: Snapshot, platform: Platform
) -> tuple[Spec | None, Mapping[str, ModelSpec] | None, tuple[Problem, ...]]:
    """The spec, its members (None if one is missing or invalid) and its problems."""
    spec, problems = parse(snapshot.key.kind, snapshot.object, platform)
    if not isinstance(spec, EnsembleSpec):
        return spec, {}, problems
    members: dict[str, ModelSpec] = {}
    for name in {step.model for step in spec.steps}:
        member = snapshot.members.get(name)
        parsed = parse(Kind.INFERENCE_MODEL, member, platform)[0] if member is not None else None
        if not isinstance(parsed, ModelSpec):
            return spec, None, ()
        members[name] = parsed
    return spec, members, member_problems(spec, members)
