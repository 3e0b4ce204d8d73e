"""Pods with a ResourceClaim: the template of the claim, and how the pod uses it."""

from dataclasses import replace

import pytest

from halimede_operator.core.children.diff import Delete, diff
from halimede_operator.core.placement.choice import Placement, read_placement
from halimede_operator.core.placement.explain import claim_text
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Accelerator, AcceleratorType, DeviceClaim, DeviceRequest
from support.operator_children import children_of, pod_of, server_of
from support.operator_specs import UID, model_spec, workload
from support.operator_store import stored

SMALL, LARGE = (f"device.attributes['gpu.nvidia.com'].profile == '{profile}'" for profile in ("1g.10gb", "2g.20gb"))
CLAIM = DeviceClaim("mig.nvidia.com", (SMALL,))


def children(claim: DeviceClaim = CLAIM) -> dict[str, Object]:
    accelerator = Accelerator(AcceleratorType.DRA, claim.count, claim=claim)
    return children_of(model_spec(workload=workload(accelerator=accelerator)))


def requests(claim: DeviceClaim) -> Object:
    [request] = children(claim)["ResourceClaimTemplate"]["spec"]["spec"]["devices"]["requests"]
    return dict(request)


def devices(*selectors: str, count: int = 1) -> Object:
    made = {"deviceClassName": "mig.nvidia.com", "allocationMode": "ExactCount", "count": count}
    cel = [{"cel": {"expression": selector}} for selector in selectors]
    return {**made, "selectors": cel} if cel else made


def test_the_pod_has_a_claim_and_no_resource() -> None:
    made = children()
    template = made["ResourceClaimTemplate"]["metadata"]["name"]
    pod = pod_of(model_spec(workload=workload(accelerator=Accelerator(AcceleratorType.DRA, claim=CLAIM))))
    assert pod["resourceClaims"] == [{"name": "accelerator", "resourceClaimTemplateName": template}]
    assert server_of(pod)["resources"] == {"claims": [{"name": "accelerator"}]}
    assert "affinity" not in pod
    assert pod["tolerations"][-1]["key"] == "nvidia.com/gpu"


def test_one_selector_is_exactly_one_request() -> None:
    assert requests(CLAIM) == {"name": "device", "exactly": devices(SMALL)}
    assert requests(DeviceClaim("mig.nvidia.com")) == {"name": "device", "exactly": devices()}


def test_several_selectors_are_alternatives_in_their_order() -> None:
    assert requests(DeviceClaim("mig.nvidia.com", (SMALL, LARGE), 2)) == {
        "name": "device",
        "firstAvailable": [
            {"name": "device-0", **devices(SMALL, count=2)},
            {"name": "device-1", **devices(LARGE, count=2)},
        ],
    }


NIC = DeviceRequest("nic", "rdma.example.com", (SMALL, LARGE), 2)


def test_a_claim_may_have_several_requests() -> None:
    made = children(replace(CLAIM, additional=(NIC,)))["ResourceClaimTemplate"]["spec"]["spec"]["devices"]["requests"]
    cards = {"deviceClassName": "rdma.example.com"}
    assert made == [
        {"name": "device", "exactly": devices(SMALL)},
        {
            "name": "nic",
            "firstAvailable": [
                {"name": "nic-0", **devices(SMALL, count=2), **cards},
                {"name": "nic-1", **devices(LARGE, count=2), **cards},
            ],
        },
    ]
    both = replace(CLAIM, additional=(NIC,))
    assert claim_text(both) == (
        "need 1x device of class mig.nvidia.com that its selector matches and 2x device of class rdma.example.com that "
        "one of its 2 selectors matches; kubectl get resourceclaims -A lists what is taken"
    )
    assert Placement("", claim=both).title == "device of class mig.nvidia.com and device of class rdma.example.com"


def test_another_claim_is_another_template_and_another_pod_template() -> None:
    claims = [CLAIM, replace(CLAIM, selectors=(LARGE,)), replace(CLAIM, count=2), replace(CLAIM, device_class="gpu")]
    made = [children(claim) for claim in claims]
    assert len({each["ResourceClaimTemplate"]["metadata"]["name"] for each in made}) == len(claims)
    assert len({each["ConfigMap"]["metadata"]["name"] for each in made}) == len(claims)


def test_a_template_stays_as_long_as_a_replica_set_names_it() -> None:
    before, now = children(), children(replace(CLAIM, selectors=(LARGE,)))
    old = before["ResourceClaimTemplate"]
    standing = [stored(child) for child in (*now.values(), old)]
    replica_set = {"kind": "ReplicaSet", "spec": before["Deployment"]["spec"]}
    assert diff(list(now.values()), standing, UID, [replica_set]) == ()
    [pruned] = diff(list(now.values()), standing, UID, [])
    assert isinstance(pruned, Delete)
    assert (pruned.kind, pruned.name) == ("ResourceClaimTemplate", old["metadata"]["name"])


@pytest.mark.parametrize("claim", [CLAIM, DeviceClaim("gpu"), DeviceClaim("gpu", (SMALL, LARGE), 64, (NIC, NIC))])
def test_the_annotation_keeps_the_claim(claim: DeviceClaim) -> None:
    placement = Placement("", claim=claim)
    assert read_placement(placement.written()) == placement


@pytest.mark.parametrize(
    "text",
    [
        '{"claim": {}}',
        '{"claim": {"class": "gpu", "selectors": {}, "count": 1}}',
        '{"claim": {"class": "gpu", "selectors": [], "count": 0}}',
        '{"claim": {"class": 7, "selectors": [], "count": 1}}',
        '{"claim": []}',
    ],
)
def test_a_malformed_annotation_is_no_claim(text: str) -> None:
    assert read_placement(text) is None
