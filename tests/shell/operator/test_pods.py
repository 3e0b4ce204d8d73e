"""What a reconcile reads about pods that do not start: nodes, devices and events."""

import asyncio
import datetime

import pytest

from halimede_operator.cluster.inventory import FORBIDDEN_S
from halimede_operator.core.pods.refreshes import REFRESH_S, REFRESHED_FOR_S
from halimede_operator.core.pods.served_versions import INDEX_LIMIT_S
from halimede_operator.core.process.workqueue import Failure
from halimede_operator.core.reading import moment_of
from halimede_operator.core.rollout.refused_pods import TRY_AGAIN_S
from halimede_operator.queue import Done, Failed
from halimede_operator.reconcile.observer import MAX_PODS_ASKED
from halimede_operator.reconcile.reconciler import (
    DEADLINE_AGAIN_S,
    EVENTS_AFTER_S,
    UNPLACED_AGAIN_S,
)
from support.kube_api import Fault
from support.operator_harness import DIGITS, SPEC, Harness, create_pod, create_unscheduled_pod, with_harness


@with_harness
async def test_a_deployment_past_its_deadline_is_reconciled_again(harness: Harness):
    await harness.sync()
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    harness.api.put("deployments", "prod", "digits", status={"conditions": [late]})
    assert await harness.sync() == Done(again_in=DEADLINE_AGAIN_S)

    # The pod waited for its node: its own deadline is later.
    bound = (harness.today - datetime.timedelta(seconds=580)).isoformat()
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "True", "lastTransitionTime": bound})
    assert await harness.sync() == Done(again_in=21)
    harness.today += datetime.timedelta(seconds=21)
    assert await harness.sync() == Done(again_in=DEADLINE_AGAIN_S)


GPU = {**SPEC, "accelerator": {"type": "GPU"}}


@with_harness
async def test_nodes_are_read_for_pods_without_devices_and_not_too_often(harness: Harness):
    harness.api.put("inferencemodels", "prod", "digits", spec=GPU)
    await harness.sync()
    assert harness.api.counted("GET /api/v1/nodes") == 1
    create_unscheduled_pod(harness)
    for _ in range(3):
        assert await harness.sync() == Done(again_in=UNPLACED_AGAIN_S)
    assert harness.api.counted("GET /api/v1/nodes") == 1
    harness.now += 10
    await harness.sync()
    assert harness.api.counted("GET /api/v1/nodes") == 2
    assert "no node has devices" in harness.condition("Placed")["message"]


@with_harness
async def test_a_reconcile_works_without_the_right_to_read_nodes(harness: Harness):
    harness.api.put("inferencemodels", "prod", "digits", spec=GPU)
    harness.api.faults.append(Fault("GET /api/v1/nodes", status=403, reason="Forbidden"))
    await harness.sync()
    create_unscheduled_pod(harness)
    for _ in range(3):
        assert await harness.sync() == Done(again_in=UNPLACED_AGAIN_S)
        harness.now += FORBIDDEN_S / 3
    assert harness.api.counted("GET /api/v1/nodes") == 1
    assert "may not read nodes" in harness.condition("Placed")["message"]

    # The right is granted.
    harness.api.faults.clear()
    await harness.sync()
    assert "no node has devices" in harness.condition("Placed")["message"]


@with_harness
async def test_lost_devices_are_reported(harness: Harness):
    """O-63."""
    resource = "nvidia.com/mig-1g.10gb"
    accelerator = {"type": "MIG", "mig": {"profile": "1g.10gb"}}
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "accelerator": accelerator})
    await harness.sync()
    # Nodes have no namespace.
    harness.api.put("nodes", None, "node-1", status={"capacity": {resource: "0"}})  # type: ignore[arg-type]
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "True"}, node="node-1")
    await harness.sync()
    harness.woken.clear()
    looking = asyncio.create_task(harness.nodes.run())
    await harness.api.until(lambda: harness.woken == [DIGITS])
    await harness.sync()
    assert harness.digits()["status"]["lastFailure"]["reason"] == "DeviceLost"

    harness.api.remove("inferencemodels", "prod", "digits")
    await harness.sync()
    await harness.api.until(lambda: harness.api.counted("GET /api/v1/nodes/") > 0)
    before = harness.api.counted("GET /api/v1/nodes/")
    await asyncio.sleep(0.2)  # twenty times its period
    assert harness.api.counted("GET /api/v1/nodes/") <= before + 1
    looking.cancel()
    await asyncio.wait({looking})


@with_harness
async def test_events_of_a_pod_without_volumes_are_read_ever_more_rarely(harness: Harness):
    await harness.sync()
    begun = harness.today
    uid = _waiting_pod(harness, begun)
    _failed_mount(harness, "it", uid, 'configmap "corp-ca" not found')
    _failed_mount(harness, "another", "uid-of-another", 'secret "other" not found')
    asked = "GET /api/v1/namespaces/prod/events"
    assert (await harness.sync(), harness.api.counted(asked)) == (Done(again_in=EVENTS_AFTER_S), 0)
    assert harness.condition("ModelFetched")["reason"] == "Fetching"
    waits = {}
    for age_s in (3, 60, 3600):
        harness.today = begun + datetime.timedelta(seconds=age_s)
        outcome = await harness.sync()
        assert isinstance(outcome, Done)
        waits[age_s] = outcome.again_in
        assert harness.condition("ModelFetched")["reason"] == "ConfigMapMissing"
    assert waits == {3: EVENTS_AFTER_S, 60: 15, 3600: 60}
    assert harness.api.counted(asked) == 3

    _waiting_pod(harness, begun, does=False)
    assert (await harness.sync(), harness.api.counted(asked)) == (Done(), 3)
    assert harness.condition("ModelFetched")["reason"] == "Fetching"


@pytest.mark.parametrize(("status", "reason"), [(403, "Fetching"), (503, None)])
@with_harness
async def test_a_reconcile_works_without_the_right_to_read_events(harness: Harness, status: int, reason: str | None):
    """Without the right, the status lacks this part; while there is no answer, the status stays as it is."""
    await harness.sync()
    _waiting_pod(harness, harness.today - datetime.timedelta(seconds=10))
    harness.api.faults.append(Fault("GET .*/events", status=status))
    before = harness.digits()["status"]
    outcome = await harness.sync()
    if reason is None:
        assert isinstance(outcome, Failed)
        assert (outcome.failure, harness.digits()["status"]) == (Failure.TRANSIENT, before)
    else:
        assert harness.condition("ModelFetched")["reason"] == reason


@with_harness
async def test_events_are_read_for_a_few_of_many_waiting_pods(harness: Harness):
    await harness.sync()
    for number in range(20):
        _waiting_pod(harness, harness.today - datetime.timedelta(seconds=10), f"digits-1-{number:02}")
    await harness.sync()
    assert harness.api.counted("GET .*/events") == MAX_PODS_ASKED


def _failed_mount(harness: Harness, name: str, uid: str, message: str) -> None:
    harness.api.put(
        "events", "prod", name, involvedObject={"uid": uid}, reason="FailedMount", type="Warning", message=message,
        lastTimestamp="2030-01-01T00:00:01Z",
    )  # fmt: skip


def _waiting_pod(harness: Harness, since: datetime.datetime, name: str = "digits-1-x", does: bool = True) -> str:
    """Create a pod that waits for its volumes; return its uid."""
    at = since.strftime("%Y-%m-%dT%H:%M:%SZ")
    has_sandbox = {"type": "PodReadyToStartContainers", "status": str(not does), "lastTransitionTime": at}
    return create_pod(harness, name, {"type": "PodScheduled", "status": "True"}, has_sandbox)


@with_harness
async def test_a_newly_ready_pod_is_looked_at_again_when_its_index_is_due(harness: Harness):
    await harness.sync()
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": moment_of(harness.today)}
    create_pod(harness, "digits-1-x", ready, node="node-1")
    assert await harness.sync() == Done(again_in=INDEX_LIMIT_S)
    harness.today += datetime.timedelta(seconds=INDEX_LIMIT_S)
    assert await harness.sync() == Done()


def _pod_with_claim(harness: Harness) -> None:
    """Create a pod that gets no node because of its claim `models`."""
    text = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "False", "message": text})
    known = harness.api.objects["pods", "prod", "digits-1-x"]["spec"]
    volumes = [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]
    harness.api.put("pods", "prod", "digits-1-x", spec={**known, "volumes": volumes})


@with_harness
async def test_the_claims_of_a_pod_without_a_node_are_read(harness: Harness):
    await harness.sync()
    _pod_with_claim(harness)
    assert await harness.sync() == Done(again_in=UNPLACED_AGAIN_S)
    assert harness.condition("Placed")["reason"] == "ClaimMissing"
    claim = harness.api.put("persistentvolumeclaims", "prod", "models", spec={"storageClassName": "fast"})
    harness.api.put(
        "events", "prod", "it", involvedObject={"uid": claim["metadata"]["uid"]}, reason="ProvisioningFailed",
        type="Warning", message="no space left",
    )  # fmt: skip
    await harness.sync()
    assert harness.condition("Placed")["reason"] == "ClaimUnbound"
    assert "models (StorageClass fast) is not bound: no space left" in harness.condition("Placed")["message"]


@with_harness
async def test_a_reconcile_works_without_the_right_to_read_claims(harness: Harness):
    await harness.sync()
    _pod_with_claim(harness)
    harness.api.faults.append(Fault("GET .*/persistentvolumeclaims/", status=403))
    assert await harness.sync() == Done(again_in=UNPLACED_AGAIN_S)
    assert harness.condition("Placed")["reason"] == "Unschedulable"


@with_harness
async def test_events_of_a_pod_without_a_resource_claim_are_read(harness: Harness):
    await harness.sync()
    uid = create_pod(harness, "digits-1-x")
    known = harness.api.objects["pods", "prod", "digits-1-x"]
    created = {"creationTimestamp": moment_of(harness.today - datetime.timedelta(seconds=EVENTS_AFTER_S))}
    spec = {**known["spec"], "resourceClaims": [{"name": "accelerator"}]}
    harness.api.put("pods", "prod", "digits-1-x", spec=spec, metadata=created)
    harness.api.put(
        "events", "prod", "it", involvedObject={"uid": uid}, reason="FailedResourceClaimCreation", type="Warning",
        message="exceeded quota",
    )  # fmt: skip
    await harness.sync()
    assert harness.condition("Placed")["reason"] == "DevicePreparationFailed"


def _refused_pods(harness: Harness, since: datetime.datetime) -> None:
    """Create a ReplicaSet that may not create its pod since then."""
    deployment = harness.api.objects["deployments", "prod", "digits"]
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "digits", "controller": True}
    labels = deployment["metadata"]["labels"]
    metadata = {"labels": labels, "ownerReferences": [{**owner, "uid": deployment["metadata"]["uid"]}]}
    text = 'pods "digits-1-" is forbidden: no PriorityClass with name high was found'
    failure = {"type": "ReplicaFailure", "status": "True", "message": text, "lastTransitionTime": moment_of(since)}
    template = deployment["spec"]["template"]
    status = {"conditions": [failure]}
    harness.api.put("replicasets", "prod", "digits-1", spec={"template": template}, metadata=metadata, status=status)


@with_harness
async def test_the_controller_of_refused_pods_is_made_to_try_again(harness: Harness):
    await harness.sync()
    _refused_pods(harness, harness.today)
    for tries in (0, 1, 1, 2):
        assert await harness.sync() == Done(again_in=TRY_AGAIN_S)
        assert harness.api.counted("PATCH .*/replicasets/") == tries
        harness.today += datetime.timedelta(seconds=TRY_AGAIN_S if tries != 1 else TRY_AGAIN_S / 2)
    assert harness.condition("Placed")["reason"] == "PodsRefused"


@pytest.mark.parametrize("status", [403, 404])
@with_harness
async def test_refused_pods_are_reported_without_the_right_to_try_again(harness: Harness, status: int):
    await harness.sync()
    _refused_pods(harness, harness.today - datetime.timedelta(seconds=TRY_AGAIN_S))
    harness.api.faults.append(Fault("PATCH .*/replicasets/", status=status))
    assert await harness.sync() == Done(again_in=TRY_AGAIN_S)
    assert harness.condition("Placed")["reason"] == "PodsRefused"


@pytest.mark.parametrize("status", [None, 403, 404])
@with_harness
async def test_the_kubelet_of_a_denied_fetch_is_made_to_read_secrets_again(harness: Harness, status: int | None):
    await harness.sync()
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "True"}, node="a")
    ended = {"exitCode": 10, "message": "access was denied", "finishedAt": moment_of(harness.today)}
    fetch = {"name": "fetch", "state": {"running": {}}, "lastState": {"terminated": ended}}
    harness.api.put("pods", "prod", "digits-1-x", status={"initContainerStatuses": [fetch]})
    if status is not None:
        harness.api.faults.append(Fault("PATCH .*/pods/", status=status))
    for tries in (0, 1, 1, 2):
        assert await harness.sync() == Done(again_in=REFRESH_S)
        if status is None:
            assert harness.api.counted("PATCH .*/pods/") == tries
        harness.today += datetime.timedelta(seconds=REFRESH_S if tries != 1 else REFRESH_S / 2)
    assert harness.condition("ModelFetched")["reason"] == "ModelFetchFailed"

    harness.today += datetime.timedelta(seconds=REFRESHED_FOR_S)
    before = harness.api.counted("PATCH .*/pods/")
    assert await harness.sync() == Done()
    assert harness.api.counted("PATCH .*/pods/") == before
