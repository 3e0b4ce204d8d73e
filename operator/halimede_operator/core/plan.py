"""From what was seen to what is to be done about the children: parse, desired, diff."""

from collections.abc import Sequence
from dataclasses import dataclass

from halimede_operator.core.api.ensemble import MAX_STEPS
from halimede_operator.core.api.parse import parse
from halimede_operator.core.api.spec import EnsembleSpec, Kind, ModelSpec, Problem, Spec
from halimede_operator.core.desired import desired, member_problems
from halimede_operator.core.diff import Apply, Conflict, Delete, diff
from halimede_operator.core.platform import Platform
from halimede_operator.core.reading import objects_at, text_at
from halimede_operator.core.snapshot import Object, Snapshot


@dataclass(frozen=True, slots=True)
class Plan:
    changes: tuple[Apply | Delete | Conflict, ...]
    """In the order in which they are made; none where the spec has problems or a member is missing: what runs goes on
    running."""
    spec: Spec | None
    """None where there are problems, of the spec by itself or with its members'."""
    problems: tuple[Problem, ...]


def member_names(ensemble: Object) -> frozenset[str]:
    """The InferenceModels that a ModelEnsemble names, read without judging its spec."""
    steps = objects_at(ensemble, "spec", "steps")[:MAX_STEPS]
    return frozenset(name for step in steps if (name := text_at(step, "modelRef", "name")))


def plan(snapshot: Snapshot, platform: Platform, strangers: Sequence[Object] = ()) -> Plan:
    """strangers: objects of other owners that have the names of children that are to be made."""
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
    uid = snapshot.object["metadata"]["uid"]
    wanted = desired(snapshot.key, uid, spec, members, platform)
    return Plan(diff(wanted, (*snapshot.children, *strangers), uid, snapshot.replica_sets), spec, ())
