"""Before an update takes old pods away, the API server is asked whether it would admit a new one."""

import dataclasses

import pytest

from halimede_operator.core.process.workqueue import Failure
from halimede_operator.queue import Failed
from support.kube_api import Fault
from support.operator_harness import SPEC, Harness, create_pod, with_harness

TRIAL = "POST /api/v1/namespaces/prod/pods.dryRun=All"
IN_PLACE = {**SPEC, "rollout": {"policy": "InPlace"}}
REFUSED = Fault(
    TRIAL, status=403, reason="Forbidden", message='pods "digits-x7k2p" is forbidden: no PriorityClass with name high'
)


async def serve(harness: Harness, spec: dict[str, object] = IN_PLACE) -> None:
    """The object has a pod of its first revision, and a changed spec."""
    harness.api.put("inferencemodels", "prod", "digits", spec=spec)
    await harness.sync()
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "True"}, node="a")
    await harness.sync()
    change(harness, "1", spec)


def change(harness: Harness, number: str, spec: dict[str, object] = IN_PLACE) -> None:
    spec = {**spec, "env": [{"name": "N", "value": number}], "serving": {"ports": {"http": 9000}}}
    harness.api.put("inferencemodels", "prod", "digits", spec=spec)


def revision(harness: Harness) -> str:
    annotations = harness.api.objects["deployments", "prod", "digits"]["metadata"]["annotations"]
    return str(annotations["halimede.dev/template-hash"])


@pytest.mark.parametrize("policy", ["InPlace", "Recreate"])
@with_harness
async def test_a_refused_new_pod_leaves_all_as_it_is_until_the_repair(harness: Harness, policy: str) -> None:
    await serve(harness, {**SPEC, "rollout": {"policy": policy}})
    service = harness.api.objects["services", "prod", "digits"]["spec"]
    old, refused = revision(harness), dataclasses.replace(REFUSED)
    harness.api.faults.append(refused)
    for tries in (1, 2):
        outcome = await harness.sync()
        assert isinstance(outcome, Failed)
        assert outcome.failure is Failure.PERMANENT
        assert (revision(harness), harness.api.counted(TRIAL)) == (old, tries)
    accepted = harness.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "PodsRefused")
    assert "the pods stay as they are" in accepted["message"]
    assert "no PriorityClass" in accepted["message"]
    assert harness.api.objects["services", "prod", "digits"]["spec"] == service
    assert "RolloutStrategy" not in {each["type"] for each in harness.digits()["status"]["conditions"]}

    harness.api.faults.remove(refused)
    await harness.sync()
    assert (revision(harness) != old, harness.api.counted(TRIAL)) == (True, 3)
    assert harness.condition("RolloutStrategy")["reason"] == policy
    assert harness.condition("Accepted")["status"] == "True"


@with_harness
async def test_a_refused_rollout_that_surges_takes_no_old_pods_away(harness: Harness) -> None:
    await serve(harness, {**SPEC, "rollout": {"policy": "Surge"}})
    await harness.sync()
    refused, begun = dataclasses.replace(REFUSED), revision(harness)
    harness.api.faults.append(refused)
    failure = {"type": "ReplicaFailure", "status": "True", "message": REFUSED.message}
    harness.api.put("replicasets", "prod", "digits-1", status={"conditions": [failure]})
    change(harness, "1")
    for _ in range(2):
        assert isinstance(await harness.sync(), Failed)
        assert (
            harness.api.objects["deployments", "prod", "digits"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 1
        )
    harness.api.faults.remove(refused)
    await harness.sync()
    assert harness.api.objects["deployments", "prod", "digits"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
    assert (revision(harness), harness.api.counted(TRIAL)) == (begun, 3)
    harness.now += 4
    await harness.sync()
    assert harness.api.counted(TRIAL) == 3


@with_harness
async def test_changes_that_are_refused_leave_no_children_behind(harness: Harness) -> None:
    await serve(harness)
    made = harness.api.named("configmaps")
    harness.api.faults.append(REFUSED)
    for count in range(3):
        change(harness, str(count))
        assert isinstance(await harness.sync(), Failed)
        assert harness.api.named("configmaps") == made


@with_harness
async def test_one_dry_run_of_a_pod_is_made_for_each_new_revision(harness: Harness) -> None:
    await serve(harness)
    assert harness.api.counted(TRIAL) == 0
    for count in (1, 2):
        change(harness, str(count))
        for _ in range(3):
            # Also if the second change comes so soon that its rollout is postponed.
            await harness.sync()
        harness.now += 4
        await harness.sync()
        assert harness.api.counted(TRIAL) == count
    assert [name for plural, _, name in harness.api.objects if plural == "pods"] == ["digits-1-x"]


@with_harness
async def test_updates_whose_old_pods_serve_until_the_end_need_no_dry_run(harness: Harness) -> None:
    await serve(harness, {**SPEC, "rollout": {"policy": "Surge"}})
    old = revision(harness)
    await harness.sync()
    assert (revision(harness) != old, harness.api.counted(TRIAL)) == (True, 0)


UNKNOWN = {
    "webhook": (400, 'admission webhook "w.example.com" does not support dry run'),
    "right": (403, 'pods is forbidden: User "operator" cannot create resource "pods" in API group ""'),
    "quota": (403, 'pods "a" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1'),
}


@pytest.mark.parametrize("kind", UNKNOWN)
@with_harness
async def test_updates_go_on_if_the_dry_run_does_not_speak_against_them(harness: Harness, kind: str) -> None:
    await serve(harness)
    old = revision(harness)
    status, message = UNKNOWN[kind]
    harness.api.faults.append(dataclasses.replace(REFUSED, status=status, message=message))
    await harness.sync()
    assert revision(harness) != old


@pytest.mark.parametrize(
    "fields", [{"rollout": {"policy": "InPlace"}}, {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}]
)
@with_harness
async def test_updates_go_on_if_a_webhook_cannot_be_asked_about_deployments(
    harness: Harness, fields: dict[str, object]
) -> None:
    await serve(harness, {**SPEC, **fields})
    old, message = revision(harness), 'admission webhook "w.example.com" does not support dry run'
    harness.api.faults.append(Fault("PATCH .*/deployments/digits.*dryRun=All", status=400, message=message))
    await harness.sync()
    assert (revision(harness) != old, harness.condition("Accepted")["status"]) == (True, "True")
    assert harness.api.counted("PATCH .*/deployments/digits.*dryRun=All") > 0


@with_harness
async def test_an_api_server_that_fails_changes_no_pods(harness: Harness) -> None:
    await serve(harness)
    old = revision(harness)
    harness.api.faults.append(dataclasses.replace(REFUSED, status=503, message="etcdserver: leader changed"))
    outcome = await harness.sync()
    assert isinstance(outcome, Failed)
    assert outcome.failure is Failure.TRANSIENT
    assert revision(harness) == old


@with_harness
async def test_a_missing_service_account_is_made_before_the_dry_run(harness: Harness) -> None:
    """Its absence would be a refusal."""
    await serve(harness)
    harness.api.remove("serviceaccounts", "prod", "digits")
    await harness.sync()
    made = "PATCH /api/v1/namespaces/prod/serviceaccounts/digits"
    of_interest = [each for each in harness.api.requests if each.startswith(made) or "prod/pods?dryRun" in each]
    assert ["serviceaccounts" in each for each in of_interest[-2:]] == [True, False]
