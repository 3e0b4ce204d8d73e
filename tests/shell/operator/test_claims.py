"""Objects with accelerator type DRA: their ResourceClaimTemplates over time, and what their status says."""

from typing import Any

from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.core.status.events import LASTING_S
from halimede_operator.queue import Done
from support.custom_resources import ensemble
from support.operator_harness import SPEC, Harness, create_pod, with_harness

WAITS = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes are available: 2 cannot allocate all claims.",
    "lastTransitionTime": "2029-12-31T23:59:50Z",
}


def accelerator(*profiles: str) -> dict[str, Any]:
    selectors = [f"device.attributes['gpu.nvidia.com'].profile == '{profile}'" for profile in profiles]
    return {"type": "DRA", "dra": {"deviceClassName": "mig.nvidia.com", "selectors": selectors}}


def put(harness: Harness, *profiles: str) -> None:
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "accelerator": accelerator(*profiles)})


def used(harness: Harness) -> str:
    [claim] = harness.api.objects["deployments", "prod", "digits"]["spec"]["template"]["spec"]["resourceClaims"]
    return str(claim["resourceClaimTemplateName"])


@with_harness
async def test_a_template_lives_as_long_as_pods_may_need_it(harness: Harness):
    api = harness.api
    put(harness, "1g.10gb")
    assert await harness.sync() == Done()
    first = used(harness)
    assert api.named("resourceclaimtemplates") == {first}
    create_pod(harness, "digits-1-a", {"type": "PodScheduled", "status": "True"})
    assert await harness.sync() == Done()
    writes = api.writes()
    assert await harness.sync() == Done()
    assert api.writes() == writes, "nothing changes"
    assert api.counted("GET /api/v1/(nodes|pods)") == 0, "the operator chooses no devices"

    put(harness, "2g.20gb")
    harness.now += 10
    await harness.sync()
    second = used(harness)
    assert second != first
    assert api.named("resourceclaimtemplates") == {first, second}
    api.remove("replicasets", "prod", "digits-1")
    await harness.sync()
    assert api.named("resourceclaimtemplates") == {second}


@with_harness
async def test_a_pod_that_gets_no_device_is_explained(harness: Harness):
    put(harness, "1g.10gb", "2g.20gb")
    await harness.sync()
    create_pod(harness, "digits-1-a", WAITS)
    assert isinstance(await harness.sync(), Done)
    placed = harness.condition("Placed")
    assert (placed["status"], placed["reason"]) == ("False", "InsufficientDevices")
    assert placed["message"] == (
        "pod digits-1-a: need 1x device of class mig.nvidia.com that one of its 2 selectors matches; "
        "kubectl get resourceclaims -A lists what is taken; 0/2 nodes are available: 2 cannot allocate all claims."
    )
    assert harness.digits()["status"]["effective"]["deviceClassName"] == "mig.nvidia.com"
    assert harness.digits()["status"]["phase"] == "Scheduling"


@with_harness
async def test_an_ensemble_has_a_template_too(harness: Harness):
    for name in ("tokenizer", "bert", "pooler"):
        harness.api.put("inferencemodels", "prod", name, spec=SPEC)
    spec = ensemble(accelerator=accelerator("1g.10gb"))["spec"]
    harness.api.put("modelensembles", "prod", "search", spec=spec)
    assert await harness.sync(Key(Kind.MODEL_ENSEMBLE, "prod", "search")) == Done()
    [template] = harness.api.named("resourceclaimtemplates")
    assert template.startswith("search-")


@with_harness
async def test_without_the_kind_the_pods_stay_and_the_status_says_why(harness: Harness):
    put(harness, "1g.10gb")
    await harness.sync()
    before = harness.api.objects["deployments", "prod", "digits"]["spec"]
    why = "the cluster does not serve ResourceClaimTemplate of resource.k8s.io/v1"
    harness.cache.set_unavailable({"ResourceClaimTemplate": why})
    put(harness, "2g.20gb")
    harness.now += 10
    assert await harness.sync() == Done(again_in=LASTING_S)
    assert harness.api.objects["deployments", "prod", "digits"]["spec"] == before
    accepted = harness.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "FeatureUnavailable")
    assert why in accepted["message"]
    harness.cache.set_unavailable({})
    harness.now += 10
    assert await harness.sync() == Done()
    assert harness.condition("Accepted")["status"] == "True"
    assert used(harness) in harness.api.named("resourceclaimtemplates")


@with_harness
async def test_the_status_names_the_allocated_devices_and_reads_each_claim_once(harness: Harness):
    api = harness.api
    put(harness, "1g.10gb")
    await harness.sync()
    create_pod(harness, "digits-1-a", {"type": "PodScheduled", "status": "True"}, node="gpu-1")
    claims = [{"name": "accelerator", "resourceClaimName": "digits-1-a-accelerator-x"}]
    pod = api.objects["pods", "prod", "digits-1-a"]
    api.put("pods", "prod", "digits-1-a", status={**pod["status"], "resourceClaimStatuses": claims})
    await harness.sync()
    assert "allocated" not in harness.digits()["status"]["placements"][0], "the claim cannot be read"
    device = {"request": "device", "driver": "gpu.nvidia.com", "pool": "gpu-1", "device": "gpu-0-mig-19-0"}
    allocation = {"devices": {"results": [device]}}
    api.put("resourceclaims", "prod", "digits-1-a-accelerator-x", status={"allocation": allocation})
    for _ in range(3):
        await harness.sync()
        [placement] = harness.digits()["status"]["placements"]
        assert placement == "digits-1-a on gpu-1; allocated: gpu.nvidia.com/gpu-1/gpu-0-mig-19-0"
    assert api.counted("GET .*/resourceclaims/") == 2
