"""Turns a snapshot into the changes to make to the children: parse, desired, diff."""

from collections.abc import Sequence
from dataclasses import dataclass

from halimede_operator.core.api.ensemble import MAX_STEPS
from halimede_operator.core.api.parse import parse
from halimede_operator.core.api.spec import EnsembleSpec, Kind, ModelSpec, Problem, Spec
from halimede_operator.core.desired import desired, member_problems
from halimede_operator.core.diff import Apply, Conflict, Delete, diff
from halimede_operator.core.name_collisions import name_collision
from halimede_operator.core.platform import Platform
from halimede_operator.core.pod_settings import with_kept_settings
from halimede_operator.core.reading import objects_at, text_at
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
    waiting_settings: str = ""
    """The changed settings of the platform that only the object's next pods will have, as a text; "" if there are
    none."""

    @property
    def has_unchecked_parts(self) -> bool:
        """Whether parts of the pod template can be checked only by the API server."""
        return self.spec is not None and self.spec.workload.has_unchecked_parts


def member_names(ensemble: Object) -> frozenset[str]:
    """Names of the InferenceModels that a ModelEnsemble uses, also if its spec is invalid."""
    steps = objects_at(ensemble, "spec", "steps")[:MAX_STEPS]
    return frozenset(name for step in steps if (name := text_at(step, "modelRef", "name")))


def plan(snapshot: Snapshot, platform: Platform, name_holders: Sequence[Object] = ()) -> Plan:
    """Plan the changes of one object's children. Pure: no I/O.

    name_holders: objects of other owners that have the names of children to create.
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
    uid = snapshot.object["metadata"]["uid"]
    wanted, waiting_settings = with_kept_settings(
        lambda settings: desired(snapshot.key, uid, spec, members, settings),
        platform,
        snapshot.children,
        snapshot.pods,
    )
    changes = diff(wanted, (*snapshot.children, *name_holders), uid, snapshot.replica_sets)
    return Plan(changes, spec, (), waiting_settings)
