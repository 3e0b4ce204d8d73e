"""Values of `spec.accelerator` that are refused, with the path below it and a part of the message."""

from collections.abc import Mapping
from typing import Any


def _claim(**dra: Any) -> Mapping[str, Any]:
    return {"type": "DRA", "dra": {"deviceClassName": "gpu", **dra}}


BAD_ACCELERATORS: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "accelerator-none": ({}, ".type", "Required value"),
    "accelerator-kind": ({"type": "TPU"}, ".type", 'supported values: "None", "GPU", "MIG", "Shared", "DRA"'),
    "accelerator-count": ({"type": "GPU", "count": 0}, ".count", "greater than or equal to 1"),
    "accelerator-idle": ({"type": "None", "count": 2}, "", "need an accelerator, got type None"),
    "mig-none": ({"type": "MIG"}, "", "type MIG needs mig"),
    "mig-nothing": ({"type": "MIG", "mig": {}}, ".mig", "either profile"),
    "mig-both": ({"type": "MIG", "mig": {"profile": "1g.10gb", "minMemory": "9Gi"}}, ".mig", "either profile"),
    "mig-whole": (
        {"type": "MIG", "mig": {"profile": "1g.10gb", "allowWhole": True}},
        ".mig",
        "allowWhole needs minMemory",
    ),
    "mig-memory": ({"type": "MIG", "mig": {"minMemory": "0"}}, ".mig.minMemory", "must be a quantity above 0"),
    "mig-gpu": ({"type": "GPU", "mig": {"profile": "1g.10gb"}}, "", "no other type may have it"),
    "mig-profile": (
        {"type": "MIG", "mig": {"profile": "10gb"}},
        ".mig.profile",
        "must be a MIG profile such as 1g.10gb",
    ),
    "mig-two": ({"type": "MIG", "count": 2, "mig": {"profile": "1g.10gb"}}, "", "needs processPerDevice"),
    "shared-two": ({"type": "Shared", "count": 2}, "", "count must be 1 with type Shared"),
    "shared-gpu": (
        {"type": "GPU", "shared": {"resourceName": "nvidia.com/gpu.shared"}},
        "",
        "shared needs type Shared",
    ),
    "shared-name": (
        {"type": "Shared", "shared": {"resourceName": "amd.com/gpu"}},
        ".shared.resourceName",
        "must be a resource such as nvidia.com/gpu.shared",
    ),
    "shared-long": (
        {"type": "Shared", "shared": {"resourceName": f"nvidia.com/{'g' * 47}"}},
        ".shared.resourceName",
        "may not be more than 57",
    ),
    "dra-nothing": ({"type": "DRA"}, "", "type DRA needs dra"),
    "dra-class": ({"type": "DRA", "dra": {"selectors": ["true"]}}, ".dra.deviceClassName", "Required value"),
    "dra-class-name": (
        {"type": "DRA", "dra": {"deviceClassName": "MIG"}},
        ".dra.deviceClassName",
        "must be a name of lower case letters",
    ),
    "dra-nine": (_claim(selectors=["true"] * 9), ".dra.selectors", "must have at most 8 items"),
    "dra-empty": (_claim(selectors=[""]), ".dra.selectors[0]", "should be at least 1 chars long"),
    "dra-request-name": (
        _claim(additionalRequests=[{"name": "Nic", "deviceClassName": "rdma"}]),
        ".dra.additionalRequests[0].name",
        "must be of lower case letters, digits and '-'",
    ),
    "dra-request-device": (
        _claim(additionalRequests=[{"name": "device", "deviceClassName": "rdma"}]),
        ".dra.additionalRequests[0].name",
        "must not be 'device'",
    ),
    "dra-request-twice": (
        _claim(
            additionalRequests=[{"name": "nic", "deviceClassName": "rdma"}, {"name": "nic", "deviceClassName": "rdma"}]
        ),
        ".dra.additionalRequests[1]",
        "uplicate",
    ),
    "dra-request-class": (
        _claim(additionalRequests=[{"name": "nic"}]),
        ".dra.additionalRequests[0].deviceClassName",
        "Required value",
    ),
    "dra-four-requests": (
        _claim(additionalRequests=[{"name": f"n{number}", "deviceClassName": "rdma"} for number in range(4)]),
        ".dra.additionalRequests",
        "must have at most 3",
    ),
    "dra-gpu": ({"type": "GPU", "dra": {"deviceClassName": "gpu"}}, "", "no other type may have it"),
    "dra-mig": (
        {"type": "DRA", "dra": {"deviceClassName": "gpu"}, "mig": {"profile": "1g.10gb"}},
        "",
        "no other type may have it",
    ),
    "dra-shared": ({"type": "DRA", "dra": {"deviceClassName": "gpu"}, "shared": {}}, "", "shared needs type Shared"),
    "dra-memory": (
        {"type": "DRA", "dra": {"deviceClassName": "gpu"}, "gpu": {"minMemory": "9Gi"}},
        "",
        "kube-scheduler chooses the devices",
    ),
    "dra-move": (
        {"type": "DRA", "dra": {"deviceClassName": "gpu"}, "moveAfter": "1m"},
        "",
        "kube-scheduler chooses the devices",
    ),
    "gpu-product": (
        {"type": "GPU", "gpu": {"products": ["NVIDIA H100"]}},
        ".gpu.products[0]",
        "must be the value of a label",
    ),
    "gpu-products-none": ({"type": "GPU", "gpu": {"products": []}}, ".gpu.products", "should have at least 1 items"),
    "gpu-memory": ({"type": "GPU", "gpu": {"minMemory": "40 GB"}}, ".gpu.minMemory", "must be a quantity above 0"),
    "gpu-capability": (
        {"type": "GPU", "gpu": {"minComputeCapability": "eight"}},
        ".gpu.minComputeCapability",
        "must be a compute capability",
    ),
    "move-after": ({"type": "GPU", "moveAfter": "1s"}, ".moveAfter", "must be at least 10s"),
}
