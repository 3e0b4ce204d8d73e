"""The ResourceClaimTemplate: from it Kubernetes makes the ResourceClaim of each pod.

Its spec is immutable, so its name has the hash of the spec. It is kept as long as a ReplicaSet names it.
"""

from collections.abc import Sequence

from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.names import canonical_json, child_name, hash_of
from halimede_operator.core.spec.types import DeviceClaim, DeviceRequest, Json, Key


def claim_template(key: Key, uid: str, claim: DeviceClaim) -> Json:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": metadata(key, uid, claim_template_name(key, claim)),
        "spec": _spec(claim),
    }


def claim_template_name(key: Key, claim: DeviceClaim) -> str:
    return child_name(key.name, hash_of(canonical_json(_spec(claim))))


def _spec(claim: DeviceClaim) -> Json:
    return {"spec": {"devices": {"requests": [_request(each) for each in claim.requests]}}}


def _request(request: DeviceRequest) -> Json:
    if len(request.selectors) <= 1:
        return {"name": request.name, "exactly": _devices(request, request.selectors)}
    # The scheduler takes the first alternative that it can allocate.
    alternatives = [
        {"name": f"{request.name}-{number}", **_devices(request, [selector])}
        for number, selector in enumerate(request.selectors)
    ]
    return {"name": request.name, "firstAvailable": alternatives}


def _devices(request: DeviceRequest, selectors: Sequence[str]) -> Json:
    # With Kubernetes' defaults, because the comparison with the existing object does not know them in lists.
    return {
        "deviceClassName": request.device_class,
        "selectors": [{"cel": {"expression": selector}} for selector in selectors],
        "allocationMode": "ExactCount",
        "count": request.count,
    }
