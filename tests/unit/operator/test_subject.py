"""An object, parsed once, with its parts in the cluster."""

from dataclasses import replace
from typing import Any

from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.subject import Subject
from support.operator_pods import deployment, snapshot
from support.operator_specs import PLATFORM, model_key

SPEC: dict[str, Any] = {"model": {"uri": "s3://models/bert"}, "replicas": 2}
SCALED = {**SPEC, "autoscaling": {"minReplicas": 1, "maxReplicas": 9}}


def seen(spec: Object, *children: Object) -> Snapshot:
    found = snapshot(model_key())
    return replace(found, object={**found.object, "spec": spec}, children=children)


def replicas(spec: Object, *children: Object) -> int | None:
    subject = Subject.of(seen(spec, *children), PLATFORM)
    return subject.spec.workload.replicas if subject.spec is not None else None


def test_replicas_are_those_of_the_deployment_if_others_set_them():
    assert replicas(SPEC, deployment(5)) == 2
    assert replicas(SCALED, deployment(5)) == 5
    assert replicas(SCALED) == 1
    assert replicas({**SCALED, "suspend": True}, deployment(5)) == 2


def test_the_deployment_is_the_one_of_the_objects_name():
    other, own = deployment(5), deployment(3)
    other["metadata"]["name"] = "a-copy-by-hand"
    assert Subject.of(seen(SPEC, other, own), PLATFORM).deployment == own
    assert Subject.of(seen(SPEC, other), PLATFORM).deployment is None


def test_a_newer_snapshot_has_other_children_and_the_same_spec():
    before = Subject.of(seen(SCALED, deployment(5)), PLATFORM)
    assert before.deployment is not None
    after = before.seen(seen(SCALED))
    assert (after.spec, after.deployment) == (before.spec, None)


def test_the_demand_is_made_once():
    """It needs the whole pod template."""
    subject = Subject.of(seen({**SPEC, "accelerator": {"type": "GPU"}}), PLATFORM)
    assert subject.demand is not None
    assert subject.demand is subject.demand
