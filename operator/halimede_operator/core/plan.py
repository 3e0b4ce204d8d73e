"""Turns a snapshot into the changes to make to the children: parse, desired, diff."""

from collections.abc import Sequence
from dataclasses import dataclass

from halimede_operator.core.api.ensemble import MAX_STEPS
from halimede_operator.core.api.parse import parse
from halimede_operator.core.api.spec import EnsembleSpec, Kind, ModelSpec, Problem, Spec
from halimede_operator.core.desired import build, desired, member_problems
from halimede_operator.core.diff import Apply, Conflict, Delete, diff
from halimede_operator.core.events import EventDraft
from halimede_operator.core.labels import GENERATION, INPUTS
from halimede_operator.core.name_collisions import name_collision
from halimede_operator.core.platform import Platform
from halimede_operator.core.reading import objects_at, text_at
from halimede_operator.core.revision_choice import Choice, choose
from halimede_operator.core.revisions.inputs import inputs_of
from halimede_operator.core.revisions.rollback import RolledBack
from halimede_operator.core.snapshot import Object, Snapshot


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes to make, and what the status needs to know about the spec."""

    changes: tuple[Apply | Delete | Conflict, ...]
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

    @property
    def has_unchecked_parts(self) -> bool:
        """Whether parts of the pod template can be checked only by the API server."""
        return self.spec is not None and self.spec.workload.has_unchecked_parts


def member_names(ensemble: Object) -> frozenset[str]:
    """Names of the InferenceModels that a ModelEnsemble uses, also if its spec is invalid."""
    steps = objects_at(ensemble, "spec", "steps")[:MAX_STEPS]
    return frozenset(name for step in steps if (name := text_at(step, "modelRef", "name")))


def plan(snapshot: Snapshot, platform: Platform, now: str, name_holders: Sequence[Object] = ()) -> Plan:
    """Plan the changes of one object's children. Pure: no I/O.

    now: UTC time as `reading.moment_at` writes it. name_holders: objects of other owners that have the names of
    children to create.
    """
    spec, problems = parse(snapshot.key.kind, snapshot.object, platform)
    if spec is None:
        return Plan((), None, problems)
    members: dict[str, ModelSpec] = {}
    if isinstance(spec, EnsembleSpec):
        for name in {step.model for step in spec.steps}:
            member = snapshot.members.get(name)
            parsed = parse(Kind.INFERENCE_MODEL, member, platform)[0] if member is not None else None
            if not isinstance(parsed, ModelSpec):
                return Plan((), spec, ())
            members[name] = parsed
        if problems := member_problems(spec, members):
            return Plan((), None, problems)
    if (taken := name_collision(snapshot)) is not None:
        return Plan((taken,), spec, ())
    metadata = snapshot.object["metadata"]
    origin = {INPUTS: inputs_of(snapshot.object, snapshot.members)}
    annotations = {**origin, GENERATION: str(metadata["generation"])}
    choice = choose(
        snapshot, spec, origin, platform, lambda given: build(snapshot.key, spec, members, given, annotations), now
    )
    uid = metadata["uid"]
    wanted = desired(snapshot.key, uid, spec.workload, platform, choice.revision, choice.rolled_back)
    changes = diff(wanted, (*snapshot.children, *name_holders), uid, snapshot.replica_sets)
    return Plan(changes, spec, (), choice.revision.name, choice.rolled_back, choice.waiting, _events(snapshot, choice))


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
