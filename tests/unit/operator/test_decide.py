"""What is decided about an object."""

from dataclasses import replace
from typing import Any

from halimede_operator.core.api_errors import Meaning
from halimede_operator.core.children.diff import Apply, Conflict, Hold
from halimede_operator.core.decide import decide
from halimede_operator.core.decided import ApplyFailure, Decided
from halimede_operator.core.placement.choice import Devices, Placement
from halimede_operator.core.platform import Platform
from halimede_operator.core.scaling.replicas import IS_OURS
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.spec.ensemble import member_names
from halimede_operator.core.spec.types import DeviceClaim, EnsembleSpec, Key, Kind
from halimede_operator.core.subject import Subject
from support.operator_rollouts import STEPS

PLATFORM = Platform(server_image="server:1", gpu_server_image="gpu:1")
NOW = "2026-11-23T08:00:00Z"
NO_DEVICES = Devices()
DIGITS = Key(Kind.INFERENCE_MODEL, "prod", "digits")
CHAIN = Key(Kind.MODEL_ENSEMBLE, "prod", "chain")
GOOD = {"model": {"uri": "s3://models/digits"}}
BAD = {"model": {"uri": "ftp://models/digits"}}


def thing(key: Key, spec: dict[str, Any]) -> Object:
    metadata = {"namespace": key.namespace, "name": key.name, "uid": f"uid of {key.name}", "generation": 1}
    return {"apiVersion": "halimede.dev/v1alpha1", "kind": str(key.kind), "metadata": metadata, "spec": spec}


def seen(key: Key, spec: dict[str, Any], children: tuple[Object, ...] = (), **members: Object) -> Snapshot:
    return Snapshot(key, thing(key, spec), members, children, (), (), {})


def decided(snapshot: Snapshot, devices: Devices = NO_DEVICES) -> Decided:
    return decide(Subject.of(snapshot, PLATFORM), devices, NOW)


def kinds(found: Decided) -> list[tuple[str, str]]:
    return [
        (type(change).__name__, change.object["kind"])
        for change in found.changes
        if isinstance(change, Apply | Conflict)
    ]


def applied(found: Decided) -> list[Object]:
    return [change.object for change in found.changes if isinstance(change, Apply)]


def test_a_new_model_gets_all_its_children():
    wanted = ["ConfigMap", "ServiceAccount", "Service", "Service", "Deployment"]
    assert kinds(decided(seen(DIGITS, GOOD))) == [("Apply", kind) for kind in wanted]


def test_a_spec_with_problems_changes_nothing():
    children = tuple(applied(decided(seen(DIGITS, GOOD))))
    subject = Subject.of(seen(DIGITS, BAD, children), PLATFORM)
    assert (subject.spec, decide(subject, NO_DEVICES, NOW)) == (None, Decided())
    assert [problem.path for problem in subject.problems] == ["spec.model.uri"]


def test_an_ensemble_is_decided_from_its_members():
    subject = Subject.of(seen(CHAIN, STEPS, digits=thing(DIGITS, GOOD)), PLATFORM)
    assert isinstance(subject.spec, EnsembleSpec)
    assert ("Apply", "Deployment") in kinds(decide(subject, NO_DEVICES, NOW))


def test_ensemble_with_missing_or_invalid_member_changes_nothing():
    for members in ({}, {"digits": thing(DIGITS, BAD)}):
        subject = Subject.of(seen(CHAIN, STEPS, **members), PLATFORM)
        assert (isinstance(subject.spec, EnsembleSpec), subject.members, subject.problems) == (True, None, ())
        assert (decide(subject, NO_DEVICES, NOW), subject.demand) == (Decided(), None)


def test_ensemble_with_equal_served_names_has_a_problem_and_no_changes():
    member = thing(DIGITS, {"model": {**GOOD["model"], "name": "chain"}})
    subject = Subject.of(seen(CHAIN, STEPS, digits=member), PLATFORM)
    assert (subject.spec, decide(subject, NO_DEVICES, NOW)) == (None, Decided())
    assert [problem.path for problem in subject.problems] == ["spec.steps[0].modelRef.name"]


def test_a_name_taken_by_another_owner_is_a_conflict_for_that_child_only():
    stranger = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"namespace": "prod", "name": "digits", "uid": "x"},
    }
    found = decide(Subject.of(seen(DIGITS, GOOD), PLATFORM, [stranger]), NO_DEVICES, NOW)
    assert [conflict.object["kind"] for conflict in found.conflicts] == ["ServiceAccount"]
    assert [kind for _, kind in kinds(found)] == ["ConfigMap", "ServiceAccount", "Service", "Service", "Deployment"]


def test_member_names_are_read_from_invalid_objects_too():
    assert member_names(thing(CHAIN, STEPS)) == {"digits"}
    for spec in (
        {},
        {"steps": None},
        {"steps": [{}]},
        {"steps": [{"modelRef": None}, {"modelRef": {"name": "a"}}]},
        {"steps": [[], "x", {"modelRef": []}]},
        {"steps": "a"},
    ):
        assert member_names(thing(CHAIN, spec)) <= {"a"}


def test_without_the_kind_of_its_claims_the_deployment_stays_as_it_is():
    """Its new pods would wait for their claims forever. All other children are applied."""
    claim = {"type": "DRA", "dra": {"deviceClassName": "gpu.nvidia.com"}}
    dra = {**GOOD, "accelerator": claim, "networkPolicy": {"enabled": True}}
    devices = Devices(Placement("", claim=DeviceClaim("gpu.nvidia.com")))
    snapshot = replace(seen(DIGITS, dra), unavailable={"ResourceClaimTemplate": "it is missing"})
    found = decided(snapshot, devices)
    (failure,) = found.failures
    assert failure == ApplyFailure(failure.object_ref, Meaning.UNAVAILABLE, "it is missing")
    assert failure.object_ref.startswith("ResourceClaimTemplate prod/digits")
    wanted = ["ConfigMap", "ServiceAccount", "Service", "Service", "NetworkPolicy"]
    assert kinds(found) == [("Apply", kind) for kind in wanted]
    found = decided(seen(DIGITS, dra), devices)
    assert found.failures == ()
    wanted = ["ConfigMap", "ServiceAccount", "ResourceClaimTemplate", *wanted[2:], "Deployment"]
    assert kinds(found) == [("Apply", kind) for kind in wanted]


def test_an_unknown_owner_is_not_blocked_while_replicas_are_handed_over():
    """The Deployment of a new model begins with minReplicas, and in the next reconcile its number is held."""
    scaled = {**GOOD, "autoscaling": {"minReplicas": 2, "maxReplicas": 4}}
    new = replace(seen(DIGITS, scaled), is_owner_unknown=True)
    made = applied(decided(new))
    for child in made:
        child["metadata"] |= {"uid": child["metadata"]["name"], "resourceVersion": "1"}
        child[IS_OURS] = True
    found = decided(replace(new, children=tuple(made)))
    assert [change.object["kind"] for change in found.changes if isinstance(change, Hold)] == ["Deployment"]
    assert kinds(found) == [("Apply", "Deployment")]
    owners = [owner for each in applied(found) for owner in each["metadata"]["ownerReferences"]]
    assert not any("blockOwnerDeletion" in owner for owner in owners)
