"""Successive reconciles against an API server with injected faults. There are no kubelets and no controllers, so no pods."""

import copy
import json

import pytest

from halimede_operator.api_server.decoding import decode
from halimede_operator.cluster.kinds import MODELS
from halimede_operator.core.process.workqueue import Failure
from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.core.status.events import LASTING_S
from halimede_operator.queue import Done, Failed, Gone
from halimede_operator.reconcile.changes import ROLLOUT_SPACING_S
from halimede_operator.reconcile.reconciler import (
    UNPLACED_AGAIN_S,
)
from support.kube_api import Fault, deep
from support.operator_harness import (
    DIGITS,
    SPEC,
    Harness,
    create_pod,
    create_unscheduled_pod,
    second_operator,
    with_harness,
)

DEEP = '{"a":' * 9_000 + "1" + "}" * 9_000


@with_harness
async def test_a_new_model_gets_children_and_a_status_then_no_more_writes(harness: Harness):
    assert await harness.sync() == Done()
    written = harness.api.writes()
    assert written == {
        "PATCH configmaps": 1,
        "PATCH serviceaccounts": 1,
        "PATCH services": 2,
        "PATCH deployments": 1,
        "PATCH inferencemodels": 1,
    }
    # What we wrote is known without a watch.
    assert await harness.reconcile(DIGITS) == Done()
    assert await harness.sync() == Done()
    assert harness.api.writes() == written


@with_harness
async def test_an_edited_or_deleted_child_is_restored(harness: Harness):
    """O-44."""
    await harness.sync()
    whole = harness.children()
    deployment = harness.api.objects["deployments", "prod", "digits"]
    harness.api.put("deployments", "prod", "digits", spec={**deployment["spec"], "replicas": 7})
    harness.api.remove("services", "prod", "digits")
    await harness.sync()
    assert harness.children() == whole


@with_harness
async def test_a_deleted_object_gets_no_children_from_an_old_cache(harness: Harness):
    harness.relist()
    harness.api.remove("inferencemodels", "prod", "digits")
    assert await harness.reconcile(DIGITS) == Done()
    assert (harness.api.writes(), await harness.reconcile(DIGITS)) == ({}, Gone())


@with_harness
async def test_a_recreated_object_gets_no_children_of_the_old_one(harness: Harness):
    harness.relist()
    harness.api.remove("inferencemodels", "prod", "digits")
    new = harness.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "s3://models/other"}})
    outcome = await harness.reconcile(DIGITS)
    assert (isinstance(outcome, Failed) and outcome.failure, harness.api.writes()) == (Failure.CONFLICT, {})
    # And the next time it is the new one, without any news.
    assert await harness.reconcile(DIGITS) == Done()
    deployment = harness.api.objects["deployments", "prod", "digits"]
    assert deployment["metadata"]["ownerReferences"][0]["uid"] == new["metadata"]["uid"]


@with_harness
async def test_a_spec_changed_before_the_first_write_is_planned_anew(harness: Harness):
    harness.relist()
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "replicas": 3})
    outcome = await harness.reconcile(DIGITS)
    assert (isinstance(outcome, Failed) and outcome.failure, harness.api.writes()) == (Failure.CONFLICT, {})
    await harness.reconcile(DIGITS)
    assert harness.api.objects["deployments", "prod", "digits"]["spec"]["replicas"] == 3


@with_harness
async def test_a_spec_changed_during_writes_is_not_reported_as_done(harness: Harness):
    def edit() -> None:
        harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "replicas": 3})
        harness.relist()

    harness.api.faults.append(Fault("PATCH .*/serviceaccounts/", times=1, then=edit))
    outcome = await harness.sync()
    assert isinstance(outcome, Failed)
    assert (outcome.failure, "status" in harness.digits()) == (Failure.CONFLICT, False)
    assert await harness.reconcile(DIGITS) == Done()
    assert harness.digits()["status"]["observedGeneration"] == 2


@with_harness
async def test_an_object_being_deleted_is_left_to_the_garbage_collector(harness: Harness):
    """O-40."""
    harness.api.put("inferencemodels", "prod", "digits", metadata={"deletionTimestamp": "2030-01-01T00:00:00Z"})
    assert (await harness.sync(), harness.api.writes()) == (Done(), {})


@pytest.mark.parametrize("times", [1, 5])
@with_harness
async def test_a_conflicting_status_is_written_again_from_current_state(harness: Harness, times: int):
    """O-06."""
    harness.api.faults.append(Fault("PATCH .*/status", status=409, reason="Conflict", times=times))
    failures = [await harness.sync() for _ in range(times)]
    assert [outcome.failure for outcome in failures if isinstance(outcome, Failed)] == [Failure.CONFLICT] * times
    assert await harness.reconcile(DIGITS) == Done()
    assert harness.digits()["status"]["observedGeneration"] == 1


@with_harness
async def test_an_unseen_status_is_not_overwritten(harness: Harness):
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "accelerator": {"type": "GPU"}})
    await harness.sync()
    create_unscheduled_pod(harness)
    harness.relist()
    harness.api.put("inferencemodels", "prod", "digits", status={"phase": "of somebody else"})
    outcome = await harness.reconcile(DIGITS)
    assert isinstance(outcome, Failed)
    assert (outcome.failure, harness.digits()["status"]) == (Failure.CONFLICT, {"phase": "of somebody else"})
    assert await harness.reconcile(DIGITS) == Done(again_in=UNPLACED_AGAIN_S)
    assert harness.digits()["status"]["phase"] == "Scheduling"


@with_harness
async def test_a_hundred_quick_edits_make_few_rollouts_and_the_last_one_wins(harness: Harness):
    """O-43."""
    await harness.sync()
    for n in range(100):
        harness.now += 0.1
        harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "env": [{"name": "N", "value": str(n)}]})
        await harness.sync()
    harness.now += 10
    assert await harness.sync() == Done()
    assert harness.api.writes()["PATCH deployments"] <= 6
    assert harness.api.writes()["PATCH configmaps"] <= 6
    container = harness.api.objects["deployments", "prod", "digits"]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "N", "value": "99"} in container["env"]
    assert harness.digits()["status"]["observedGeneration"] == harness.digits()["metadata"]["generation"]


@with_harness
async def test_rollout_undo_is_undone_with_one_event(harness: Harness):
    def replica_set(name: str) -> None:
        """As the Deployment's controller makes it."""
        deployment = harness.api.objects["deployments", "prod", "digits"]
        template, metadata = deployment["spec"]["template"], deployment["metadata"]
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "digits", "uid": metadata["uid"]}
        about = {
            "labels": template["metadata"]["labels"],
            "annotations": metadata["annotations"],
            "ownerReferences": [{**owner, "controller": True}],
        }
        harness.api.put("replicasets", "prod", name, spec={"template": template}, metadata=about)

    await harness.sync()
    replica_set("digits-1")
    older = copy.deepcopy(harness.api.objects["deployments", "prod", "digits"])
    harness.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "s3://models/other"}})
    await harness.sync()
    replica_set("digits-2")
    whole = harness.children()

    annotations = {"annotations": older["metadata"]["annotations"]}
    harness.api.put("deployments", "prod", "digits", spec=older["spec"], metadata=annotations)
    harness.now += ROLLOUT_SPACING_S - 1
    assert await harness.sync() == Done(again_in=ROLLOUT_SPACING_S)
    harness.now += 1
    for _ in range(2):
        assert await harness.sync() == Done()

    assert harness.children() == whole
    events = [value for (plural, _, _), value in harness.api.objects.items() if plural == "events"]
    assert [each["type"] for each in events if each["reason"] == "RolloutUndone"] == ["Warning"]


@with_harness
async def test_a_postponed_rollout_is_reported_as_progressing(harness: Harness):
    await harness.sync()
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "True"})
    for number in range(2):
        harness.now += 1
        harness.api.put("deployments", "prod", "digits", status={"observedGeneration": number + 1})
        harness.api.put(
            "inferencemodels", "prod", "digits", spec={**SPEC, "env": [{"name": "N", "value": str(number)}]}
        )
        outcome = await harness.sync()
    assert outcome == Done(again_in=ROLLOUT_SPACING_S)
    assert harness.digits()["status"]["observedGeneration"] == 3
    assert (harness.condition("Progressing")["reason"], harness.condition("Ready")["reason"]) == (
        "Applying",
        "Progressing",
    )


@with_harness
async def test_a_spec_that_is_too_deep_is_reported_in_its_status(harness: Harness):
    await harness.sync()
    whole = harness.children()
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "podTemplate": {"spec": {"x": deep(9_000)}}})
    harness.cache.put(MODELS, decode(json.dumps(harness.digits()).replace('"@deep 9000@"', DEEP).encode()))
    assert await harness.reconcile(DIGITS) == Done(again_in=LASTING_S)
    assert "within one another" in harness.condition("Accepted")["message"]
    # The answer to that write was read too.
    written = harness.api.writes()
    again = Done(again_in=LASTING_S)
    assert (await harness.reconcile(DIGITS), harness.api.writes(), harness.children()) == (again, written, whole)


@with_harness
async def test_an_invalid_spec_changes_no_child(harness: Harness):
    await harness.sync()
    whole = harness.children()
    harness.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "file:///etc"}})
    assert await harness.sync() == Done(again_in=LASTING_S)
    assert harness.children() == whole
    assert harness.condition("Ready")["status"] == "False"


@with_harness
async def test_a_failure_is_an_event_and_a_failed_post_is_no_error(harness: Harness):
    harness.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "file:///etc"}})
    assert await harness.sync() == Done(again_in=LASTING_S)
    harness.now += LASTING_S
    assert await harness.sync() == Done()
    (event,) = [value for (plural, _, _), value in harness.api.objects.items() if plural == "events"]
    assert (event["type"], event["involvedObject"]["uid"]) == ("Warning", harness.digits()["metadata"]["uid"])
    assert event["message"] in harness.condition("Ready")["message"]

    harness.api.faults.append(Fault("POST .*/events", status=403, reason="Forbidden"))
    harness.api.put("inferencemodels", "prod", "other", spec={"model": {"uri": "file:///etc"}})
    other = Key(Kind.INFERENCE_MODEL, "prod", "other")
    assert await harness.sync(other) == Done(again_in=LASTING_S)
    harness.now += LASTING_S
    assert await harness.sync(other) == Done()


@with_harness
async def test_a_delete_names_the_uid_and_version_that_were_read(harness: Harness):
    """O-21."""
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "networkPolicy": {"enabled": True}})
    await harness.sync()
    harness.api.put("inferencemodels", "prod", "digits", spec=SPEC)

    def keep() -> None:
        harness.api.put("networkpolicies", "prod", "digits", metadata={"ownerReferences": [], "labels": {}})

    harness.api.faults.append(Fault("DELETE .*/networkpolicies/", times=1, then=keep))
    outcome = await harness.sync()
    assert isinstance(outcome, Failed)
    assert (outcome.failure, harness.api.named("networkpolicies")) == (Failure.CONFLICT, {"digits"})


@with_harness
async def test_an_ensemble_is_not_built_from_an_old_member(harness: Harness):
    """O-21."""
    key = Key(Kind.MODEL_ENSEMBLE, "prod", "chain")
    step = {"name": "a", "modelRef": {"name": "digits"}, "inputs": {"X": "request.X"}, "outputs": {"Y": "y"}}
    tensor = {"dataType": "FP32", "shape": [1]}
    spec = {
        "inputs": [{"name": "X", **tensor}], "outputs": [{"name": "Y", "from": "a.y", **tensor}], "steps": [step],
    }  # fmt: skip
    harness.api.put("modelensembles", "prod", "chain", spec=spec)
    assert await harness.sync(key) == Done()
    old = harness.api.version
    harness.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "s3://models/newer"}})
    harness.now += ROLLOUT_SPACING_S
    assert [await harness.sync(key), await harness.sync(key)] == [Done(), Done()]
    whole = harness.children()
    async with second_operator(harness) as other:
        other.relist({"inferencemodels": old})
        outcome = await other.reconcile(key)
        assert isinstance(outcome, Failed)
        assert (outcome.failure, harness.children()) == (Failure.CONFLICT, whole)
        assert await other.reconcile(key) == Done()
        # And of one that is gone.
        old = harness.api.version
        harness.api.remove("inferencemodels", "prod", "digits")
        harness.api.put("modelensembles", "prod", "chain", spec={**spec, "replicas": 2})
        other.relist({"inferencemodels": old})
        outcome = await other.reconcile(key)
        assert isinstance(outcome, Failed)
        assert (outcome.failure, harness.children()) == (Failure.CONFLICT, whole)


@pytest.mark.parametrize("is_done", [False, True])
@with_harness
async def test_the_next_operator_completes_writes_cut_off_at_any_point(harness: Harness, is_done: bool):
    """O-20. The connection breaks at the k-th write, which is made or not, and a new operator continues."""
    more = {**SPEC, "replicas": 2, "networkPolicy": {"enabled": True}}

    async def make_changes() -> None:
        for spec in (SPEC, more):
            harness.api.put("inferencemodels", "prod", "digits", spec=spec)
            for _ in range(2):
                async with second_operator(harness) as other:
                    await other.sync()

    await make_changes()
    whole, writes = harness.children(), harness.api.writes().total()
    for k in range(writes):
        for where in list(harness.api.objects):
            harness.api.remove(*where)
        fault = Fault("^(PATCH|POST|DELETE)", drop=not is_done, lose=is_done, after=k, times=1)
        harness.api.faults[:] = [fault]
        await make_changes()
        assert fault.times == 0
        async with second_operator(harness) as other:
            await other.sync()
        assert harness.children() == whole, f"at write {k}"
