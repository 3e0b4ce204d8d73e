"""From what was seen to what is to be done about the children: parse, desired, diff."""

from collections.abc import Sequence
from dataclasses import dataclass

from halimede_operator.core.api.parse import parse
from halimede_operator.core.api.spec import EnsembleSpec, Kind, ModelSpec, Problem, Spec
from halimede_operator.core.desired import desired
from halimede_operator.core.diff import Apply, Conflict, Delete, diff
from halimede_operator.core.platform import Platform
from halimede_operator.core.snapshot import Object, Snapshot


@dataclass(frozen=True, slots=True)
class Plan:
    changes: tuple[Apply | Delete | Conflict, ...]
    """In the order in which they are made; none where the spec has problems or a member is missing: what runs goes on
    running."""
    spec: Spec | None
    problems: tuple[Problem, ...]


def member_names(ensemble: Object) -> frozenset[str]:
    """The InferenceModels that a ModelEnsemble names, read without judging its spec."""
    steps = (ensemble.get("spec") or {}).get("steps") or []
    return frozenset(name for step in steps if (name := (step.get("modelRef") or {}).get("name")))


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
    uid = snapshot.object["metadata"]["uid"]
    wanted = desired(snapshot.key, uid, spec, members, platform)
    return Plan(diff(wanted, (*snapshot.children, *strangers), uid, snapshot.replica_sets), spec, ())
