"""Children whose names other objects have."""

from copy import deepcopy

from halimede_operator.cluster.kinds import MODELS
from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.queue import Done
from halimede_operator.reconcile.reconciler import (
    CONFLICT_AGAIN_S,
)
from support.kube_api import Fault
from support.operator_harness import DIGITS, SPEC, Harness, create_pod, second_operator, with_harness


@with_harness
async def test_another_owners_object_is_not_taken_over(harness: Harness):
    theirs = harness.api.put("services", "prod", "digits", spec={"selector": {"app": "theirs"}})
    assert await harness.sync() == Done(again_in=CONFLICT_AGAIN_S)
    assert harness.api.objects["services", "prod", "digits"] == theirs
    assert "digits" in harness.api.named("deployments"), "the others are made"
    assert any("digits" in condition["message"] and "Service" in condition["message"] for condition in harness.digits()["status"]["conditions"])  # fmt: skip


@with_harness
async def test_a_taken_name_stays_in_the_status_while_a_rollout_begins(harness: Harness):
    recreate = {**SPEC, "rollout": {"policy": "Recreate"}}
    harness.api.put("services", "prod", "digits", spec={"selector": {"app": "theirs"}})
    harness.api.put("inferencemodels", "prod", "digits", spec=recreate)
    await harness.sync()
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "True"}, node="a")
    harness.now += 10
    changed = {**recreate, "env": [{"name": "N", "value": "1"}]}
    harness.api.put("inferencemodels", "prod", "digits", spec=changed)
    told: list[str] = []
    harness.api.faults.append(
        Fault("PATCH .*/deployments/digits", then=lambda: told.append(harness.condition("Accepted")["reason"]))
    )
    await harness.sync()
    assert harness.condition("RolloutStrategy")["reason"] == "Recreate"
    assert set(told) == {"Conflict"}


@with_harness
async def test_a_taken_name_costs_one_request_per_check(harness: Harness):
    harness.relist()
    # No watch tells of it: it has no label of ours.
    harness.api.put("services", "prod", "digits", spec={})
    assert await harness.reconcile(DIGITS) == Done(again_in=CONFLICT_AGAIN_S)
    before = list(harness.api.requests)
    for _ in range(3):
        assert await harness.reconcile(DIGITS) == Done(again_in=CONFLICT_AGAIN_S)
    assert harness.api.requests[len(before) :] == ["GET /api/v1/namespaces/prod/services/digits"] * 3

    harness.api.remove("services", "prod", "digits")
    assert await harness.reconcile(DIGITS) == Done()
    assert harness.condition("Accepted")["status"] == "True"
    assert harness.children().keys() >= {("services", "prod", "digits")}


@with_harness
async def test_of_two_objects_with_one_child_name_the_older_gets_it(harness: Harness):
    younger = Key(Kind.INFERENCE_MODEL, "prod", "digits-pods")
    harness.api.put("inferencemodels", "prod", "digits", metadata={"creationTimestamp": "2030-01-01T00:00:00Z"})
    harness.api.put(
        "inferencemodels", "prod", "digits-pods", spec=SPEC, metadata={"creationTimestamp": "2030-01-01T00:00:01Z"}
    )
    assert await harness.sync(younger) == Done(again_in=CONFLICT_AGAIN_S)
    assert harness.children() == {}
    status = harness.api.objects["inferencemodels", "prod", "digits-pods"]["status"]
    accepted = next(each for each in status["conditions"] if each["type"] == "Accepted")
    assert (accepted["reason"], accepted["message"]) == (
        "Conflict",
        "Service digits-pods exists and belongs to InferenceModel digits; rename this object, or delete what is in its way",
    )
    assert await harness.sync() == Done()
    whole = harness.children()
    assert await harness.sync(younger) == Done(again_in=CONFLICT_AGAIN_S)
    assert harness.children() == whole

    harness.api.remove("inferencemodels", "prod", "digits")
    for plural, namespace, name in whole:
        harness.api.remove(plural, namespace, name)
    assert await harness.sync(younger) == Done()
    assert len(harness.children()) == len(whole)


@with_harness
async def test_an_object_created_meanwhile_by_others_is_not_taken_over(harness: Harness):
    come = Fault("PATCH .*/configmaps", times=1, then=lambda: harness.api.put("services", "prod", "digits", spec={}))
    harness.api.faults.append(come)
    assert await harness.sync() == Done(again_in=CONFLICT_AGAIN_S)
    assert harness.api.objects["services", "prod", "digits"]["spec"] == {}
    assert "digits" in harness.api.named("deployments"), "the others are made"


@with_harness
async def test_a_taken_name_is_found_while_another_child_is_deleted(harness: Harness):
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "replicas": 2})
    await harness.sync()
    theirs = harness.api.put("networkpolicies", "prod", "digits", spec={})
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "networkPolicy": {"enabled": True}})
    assert await harness.sync() == Done(again_in=CONFLICT_AGAIN_S)
    assert harness.api.objects["networkpolicies", "prod", "digits"] == theirs
    assert harness.api.named("poddisruptionbudgets") == set()


@with_harness
async def test_without_taken_names_only_the_model_is_read(harness: Harness):
    assert await harness.sync() == Done()
    assert [request for request in harness.api.requests if request.startswith("GET")] == [f"GET {MODELS.path('prod', 'digits')}"]  # fmt: skip


@with_harness
async def test_our_child_that_the_watch_has_not_reported_is_kept(harness: Harness):
    await harness.sync()
    before = deepcopy(harness.api.objects)
    async with second_operator(harness) as other:
        other.cache.put(MODELS, harness.digits())
        assert await other.reconcile(DIGITS) == Done()
    assert harness.api.objects == before
