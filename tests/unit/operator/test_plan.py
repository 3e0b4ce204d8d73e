"""The plan for a snapshot."""

from dataclasses import replace
from typing import Any

from halimede_operator.core.api.spec import DeviceClaim, EnsembleSpec, Key, Kind, ModelSpec
from halimede_operator.core.autoscaling.replicas import IS_OURS
from halimede_operator.core.diff import Apply, Conflict, Hold
from halimede_operator.core.placement.choice import Placement
from halimede_operator.core.plan import Devices, Plan, member_names, plan
from halimede_operator.core.platform import Platform
from halimede_operator.core.snapshot import Object, Snapshot

PLATFORM = Platform(server_image="server:1", gpu_server_image="gpu:1")
NOW = "2026-11-23T08:00:00Z"
DIGITS = Key(Kind.INFERENCE_MODEL, "prod", "digits")
CHAIN = Key(Kind.MODEL_ENSEMBLE, "prod", "chain")
GOOD = {"model": {"uri": "s3://models/digits"}}
BAD = {"model": {"uri": "ftp://models/digits"}}
STEPS = {
    "inputs": [{"name": "image", "dataType": "FP32", "shape": [-1]}],
    "outputs": [{"name": "label", "dataType": "INT64", "shape": [1], "from": "read.label"}],
    "steps": [
        {"name": "read", "modelRef": {"name": "digits"}, "inputs": {"x": "request.image"}, "outputs": {"y": "label"}}
    ],
}


def thing(key: Key, spec: dict[str, Any]) -> Object:
    metadata = {"namespace": key.namespace, "name": key.name, "uid": f"uid of {key.name}", "generation": 1}
    return {"apiVersion": "halimede.dev/v1alpha1", "kind": str(key.kind), "metadata": metadata, "spec": spec}


def seen(key: Key, spec: dict[str, Any], children: tuple[Object, ...] = (), **members: Object) -> Snapshot:
    return Snapshot(key, thing(key, spec), members, children, (), (), {})


def kinds(planned: Plan) -> list[tuple[str, str]]:
    return [
        (type(change).__name__, change.object["kind"])
        for change in planned.changes
        if isinstance(change, Apply | Conflict)
    ]


def test_a_new_model_gets_all_its_children():
    planned = plan(seen(DIGITS, GOOD), PLATFORM, NOW)
    assert (isinstance(planned.spec, ModelSpec), planned.problems) == (True, ())
    wanted = ["ConfigMap", "ServiceAccount", "Service", "Service", "Deployment"]
    assert kinds(planned) == [("Apply", kind) for kind in wanted]


def test_a_spec_with_problems_changes_nothing():
    children = tuple(
        change.object for change in plan(seen(DIGITS, GOOD), PLATFORM, NOW).changes if isinstance(change, Apply)
    )
    planned = plan(seen(DIGITS, BAD, children), PLATFORM, NOW)
    assert (planned.changes, planned.spec) == ((), None)
    assert [problem.path for problem in planned.problems] == ["spec.model.uri"]


def test_an_ensemble_is_planned_from_its_members():
    planned = plan(seen(CHAIN, STEPS, digits=thing(DIGITS, GOOD)), PLATFORM, NOW)
    assert isinstance(planned.spec, EnsembleSpec)
    assert ("Apply", "Deployment") in kinds(planned)


def test_ensemble_with_missing_or_invalid_member_changes_nothing():
    for members in ({}, {"digits": thing(DIGITS, BAD)}):
        planned = plan(seen(CHAIN, STEPS, **members), PLATFORM, NOW)
        assert (planned.changes, isinstance(planned.spec, EnsembleSpec), planned.problems) == ((), True, ())


def test_ensemble_with_equal_served_names_has_a_problem_and_no_changes():
    member = thing(DIGITS, {"model": {**GOOD["model"], "name": "chain"}})
    planned = plan(seen(CHAIN, STEPS, digits=member), PLATFORM, NOW)
    assert (planned.changes, planned.spec) == ((), None)
    assert [problem.path for problem in planned.problems] == ["spec.steps[0].modelRef.name"]


def test_a_name_taken_by_another_owner_is_a_conflict_for_that_child_only():
    stranger = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"namespace": "prod", "name": "digits", "uid": "x"},
    }
    planned = plan(seen(DIGITS, GOOD), PLATFORM, NOW, [stranger])
    assert ("Conflict", "ServiceAccount") in kinds(planned)
    assert [kind for _, kind in kinds(planned)] == ["ConfigMap", "ServiceAccount", "Service", "Service", "Deployment"]


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
    planned = plan(snapshot, PLATFORM, NOW, devices=devices)
    assert [child["kind"] for child in planned.unavailable] == ["ResourceClaimTemplate"]
    wanted = ["ConfigMap", "ServiceAccount", "Service", "Service", "NetworkPolicy"]
    assert kinds(planned) == [("Apply", kind) for kind in wanted]
    planned = plan(seen(DIGITS, dra), PLATFORM, NOW, devices=devices)
    assert planned.unavailable == ()
    wanted = ["ConfigMap", "ServiceAccount", "ResourceClaimTemplate", *wanted[2:], "Deployment"]
    assert kinds(planned) == [("Apply", kind) for kind in wanted]


def test_an_unknown_owner_is_not_blocked_while_replicas_are_handed_over():
    """The Deployment of a new model begins with minReplicas, and in the next reconcile its number is held."""
    scaled = {**GOOD, "autoscaling": {"minReplicas": 2, "maxReplicas": 4}}
    new = replace(seen(DIGITS, scaled), is_owner_unknown=True)
    made = [change.object for change in plan(new, PLATFORM, NOW).changes if isinstance(change, Apply)]
    for child in made:
        child["metadata"] |= {"uid": child["metadata"]["name"], "resourceVersion": "1"}
        child[IS_OURS] = True
    planned = plan(replace(new, children=tuple(made)), PLATFORM, NOW)
    assert [change.object["kind"] for change in planned.changes if isinstance(change, Hold)] == ["Deployment"]
    assert kinds(planned) == [("Apply", "Deployment")]
    applied = [change.object for change in planned.changes if isinstance(change, Apply)]
    assert not any("blockOwnerDeletion" in owner for each in applied for owner in each["metadata"]["ownerReferences"])
