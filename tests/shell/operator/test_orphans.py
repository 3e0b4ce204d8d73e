"""Children that `kubectl delete --cascade=orphan` left, and a new object of their owner's name."""

from copy import deepcopy

from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.queue import Done
from halimede_operator.reconcile.reconciler import CONFLICT_AGAIN_S
from support.operator_harness import DIGITS, SPEC, Harness, with_harness

ENSEMBLE = Key(Kind.MODEL_ENSEMBLE, "prod", "digits")
SCALED = {**SPEC, "networkPolicy": {"enabled": True}, "autoscaling": {"minReplicas": 2, "maxReplicas": 6}}
CHAIN = {
    "inputs": [{"name": "IN", "dataType": "FP32", "shape": [1]}],
    "outputs": [{"name": "OUT", "dataType": "FP32", "shape": [1], "from": "one.y"}],
    "steps": [{"name": "one", "modelRef": {"name": "part"}, "inputs": {"x": "request.IN"}, "outputs": {"y": "y"}}],
}


def delete_alone(harness: Harness) -> None:
    """As `kubectl delete --cascade=orphan` does."""
    harness.api.remove("inferencemodels", "prod", "digits")
    for plural, namespace, name in list(harness.api.objects):
        if plural not in ("inferencemodels", "modelensembles"):
            harness.api.put(plural, namespace, name, metadata={"ownerReferences": []})


@with_harness
async def test_orphans_are_taken_over_or_deleted(harness: Harness):
    harness.api.put("inferencemodels", "prod", "digits", spec=SCALED)
    await harness.sync()
    assert {"horizontalpodautoscalers", "poddisruptionbudgets", "networkpolicies"} <= {
        plural for plural, _, _ in harness.api.objects
    }
    delete_alone(harness)
    copied = deepcopy(harness.api.objects["deployments", "prod", "digits"])
    labels = {"labels": copied["metadata"]["labels"]}
    copy = harness.api.put("deployments", "prod", "digits-copy", spec=copied["spec"], metadata=labels)
    harness.api.put("inferencemodels", "prod", "digits", spec=SPEC)

    harness.now += 60
    await harness.sync()
    assert await harness.sync() == Done()

    left = {plural for plural, _, _ in harness.api.objects}
    assert not left & {"horizontalpodautoscalers", "poddisruptionbudgets", "networkpolicies"}
    deployment = harness.api.objects["deployments", "prod", "digits"]
    assert deployment["metadata"]["ownerReferences"][0]["uid"] == harness.digits()["metadata"]["uid"]
    assert deployment["spec"]["replicas"] == 1
    assert harness.api.objects["deployments", "prod", "digits-copy"] == copy, "not a name of ours"
    assert harness.condition("Accepted")["status"] == "True"


@with_harness
async def test_orphans_go_to_the_kind_that_left_them(harness: Harness):
    """Of a model and an ensemble of one name, and although the ensemble is older."""
    await harness.sync()
    delete_alone(harness)
    harness.api.put("inferencemodels", "prod", "part", spec=SPEC)
    older = {"creationTimestamp": "2030-01-01T00:00:00Z"}
    harness.api.put("modelensembles", "prod", "digits", spec=CHAIN, metadata=older)
    younger = {"creationTimestamp": "2030-01-01T00:00:01Z"}
    harness.api.put("inferencemodels", "prod", "digits", spec=SPEC, metadata=younger)

    assert await harness.sync(ENSEMBLE) == Done(again_in=CONFLICT_AGAIN_S)
    await harness.sync()
    assert await harness.sync() == Done()

    assert harness.condition("Accepted")["status"] == "True"
    conditions = harness.api.objects["modelensembles", "prod", "digits"]["status"]["conditions"]
    accepted = next(each for each in conditions if each["type"] == "Accepted")
    assert accepted["message"].startswith("Service digits exists and belongs to InferenceModel digits")


@with_harness
async def test_an_orphan_of_another_kind_is_reported_as_it_is(harness: Harness):
    await harness.sync()
    delete_alone(harness)
    harness.api.put("inferencemodels", "prod", "part", spec=SPEC)
    harness.api.put("modelensembles", "prod", "digits", spec=CHAIN)

    assert await harness.sync(ENSEMBLE) == Done(again_in=CONFLICT_AGAIN_S)

    conditions = harness.api.objects["modelensembles", "prod", "digits"]["status"]["conditions"]
    accepted = next(each for each in conditions if each["type"] == "Accepted")
    assert "Deployment digits exists and belongs to nobody, with the labels of InferenceModel digits" in accepted["message"]  # fmt: skip


@with_harness
async def test_orphans_of_a_deleted_object_stay(harness: Harness):
    await harness.sync()
    delete_alone(harness)
    before = deepcopy(harness.api.objects)
    await harness.sync(DIGITS)
    assert harness.api.objects == before
