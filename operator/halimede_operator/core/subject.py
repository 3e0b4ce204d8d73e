"""One object as a pass sees it: its spec, parsed once, and its parts in the cluster by their roles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from halimede_operator.core.children.content import member_problems
from halimede_operator.core.children.desired import template_without_devices
from halimede_operator.core.names import child_name
from halimede_operator.core.placement.choice import Demand, Placement, demand_of, need_of, placement_of, read_placement
from halimede_operator.core.platform import Platform
from halimede_operator.core.reading import at, text_at
from halimede_operator.core.revisions.inputs import inputs_of
from halimede_operator.core.revisions.rollback import rolled_back_in
from halimede_operator.core.scaling.replicas import Replicas, replicas_of
from halimede_operator.core.scaling.scalers import scalers_in
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import EnsembleSpec, Kind, ModelSpec, Problem, Spec, Workload


@dataclass(frozen=True)
class Subject:
    """An object of either kind. It has no slots, because its properties are cached."""

    snapshot: Snapshot
    platform: Platform
    spec: Spec | None
    """Its replicas are those of the Deployment if others set them. None if there are problems, of the spec itself or of
    its members."""
    problems: tuple[Problem, ...] = ()
    members: Mapping[str, ModelSpec] | None = field(default_factory=dict)
    """The models of an ensemble by object name, empty for a model; None if one is missing or invalid."""
    name_holders: tuple[Object, ...] = ()
    """Objects that have the names of children to create, also those of other owners."""

    @classmethod
    def of(cls, snapshot: Snapshot, platform: Platform, name_holders: Sequence[Object] = ()) -> "Subject":
        """Parse the spec, and those of an ensemble's members. Does not raise for any content of the object."""
        spec, problems = parse(snapshot.key.kind, snapshot.object, platform)
        members: Mapping[str, ModelSpec] | None = {}
        if isinstance(spec, EnsembleSpec):
            members = _members(spec, snapshot, platform)
            problems = member_problems(spec, members) if members is not None else ()
        if spec is None or problems:
            return cls(snapshot, platform, None, problems)
        subject = cls(snapshot, platform, spec, (), members, tuple(name_holders))
        workload = spec.workload
        if workload.suspend:
            return subject
        counted = replace(workload, replicas=subject.replicas(workload).counted)
        return replace(subject, spec=replace(spec, workload=counted))

    def seen(self, snapshot: Snapshot) -> "Subject":
        """The subject with a newer snapshot of the same generation."""
        return replace(self, snapshot=snapshot)

    @cached_property
    def status(self) -> Any:
        """The observed status, as untrusted JSON."""
        return at(self.snapshot.object, "status")

    @cached_property
    def deployment(self) -> Object | None:
        """The object's Deployment, if it exists."""
        name = child_name(self.snapshot.key.name)
        found = (each for each in self.snapshot.children if text_at(each, "kind") == "Deployment")
        return next((each for each in found if text_at(each, "metadata", "name") == name), None)

    def replicas(self, workload: Workload) -> Replicas:
        """The number of replicas of the Deployment, and which part sets it. `workload` is that of the spec."""
        return replicas_of(workload, self.deployment, bool(scalers_in(self.snapshot)))

    @cached_property
    def placement(self) -> Placement | None:
        """The devices that the Deployment's pods request."""
        return placement_of(self.deployment)

    @property
    def kept_placement(self) -> Placement | None:
        """The devices of the existing pods, if the spec asks for the same."""
        placement = self.placement
        is_kept = placement is not None and self.spec is not None and placement.need == need_of(self.spec.workload)
        return placement if is_kept else None

    @property
    def failed_placement(self) -> Placement | None:
        """The devices that the spec had when it was rolled back; None if it was not.

        They stay the same, so that the spec is recognized as the one that was rolled back.
        """
        record = rolled_back_in(self.deployment)
        if record is None or record.inputs != inputs_of(self.snapshot.object, self.snapshot.members):
            return None
        return read_placement(record.placement)

    @cached_property
    def demand(self) -> Demand | None:
        """What the pods need of nodes with devices; None if the operator does not choose their devices, or if the spec
        has problems."""
        if self.spec is None or self.members is None:
            return None
        accelerator = self.spec.workload.accelerator
        if not accelerator.is_wanted or accelerator.claim is not None:
            return None
        template = template_without_devices(self.snapshot.key, self.spec, self.members, self.platform)
        return demand_of(self.snapshot.key, self.spec.workload, template)


def _members(spec: EnsembleSpec, snapshot: Snapshot, platform: Platform) -> dict[str, ModelSpec] | None:
    members: dict[str, ModelSpec] = {}
    for name in {step.model for step in spec.steps}:
        member = snapshot.members.get(name)
        parsed = parse(Kind.INFERENCE_MODEL, member, platform)[0] if member is not None else None
        if not isinstance(parsed, ModelSpec):
            return None
        members[name] = parsed
    return members
