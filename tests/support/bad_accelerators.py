"""Values of `spec.accelerator` that are refused, with the path and a part of the message."""

from collections.abc import Mapping
from typing import Any

BAD_ACCELERATORS: dict[str, tuple[Mapping[str, Any], str, str]] = {
    "accelerator-none": ({"spec.accelerator": {}}, "spec.accelerator.type", "Required value"),
    "accelerator-kind": (
        {"spec.accelerator": {"type": "TPU"}},
        "spec.accelerator.type",
        'supported values: "None", "GPU", "MIG", "Shared", "DRA"',
    ),
    "accelerator-count": (
        {"spec.accelerator": {"type": "GPU", "count": 0}},
        "spec.accelerator.count",
        "greater than or equal to 1",
    ),
    "accelerator-idle": (
        {"spec.accelerator": {"type": "None", "count": 2}},
        "spec.accelerator",
        "need an accelerator, got type None",
    ),
    "mig-none": ({"spec.accelerator": {"type": "MIG"}}, "spec.accelerator", "type MIG needs mig"),
    "mig-nothing": ({"spec.accelerator": {"type": "MIG", "mig": {}}}, "spec.accelerator.mig", "either profile"),
    "mig-both": (
        {"spec.accelerator": {"type": "MIG", "mig": {"profile": "1g.10gb", "minMemory": "9Gi"}}},
        "spec.accelerator.mig",
        "either profile",
    ),
    "mig-whole": (
        {"spec.accelerator": {"type": "MIG", "mig": {"profile": "1g.10gb", "allowWhole": True}}},
        "spec.accelerator.mig",
        "allowWhole needs minMemory",
    ),
    "mig-memory": (
        {"spec.accelerator": {"type": "MIG", "mig": {"minMemory": "0"}}},
        "spec.accelerator.mig.minMemory",
        "must be a quantity above 0",
    ),
    "mig-gpu": (
        {"spec.accelerator": {"type": "GPU", "mig": {"profile": "1g.10gb"}}},
        "spec.accelerator",
        "no other type may have it",
    ),
    "mig-profile": (
        {"spec.accelerator": {"type": "MIG", "mig": {"profile": "10gb"}}},
        "spec.accelerator.mig.profile",
        "must be a MIG profile such as 1g.10gb",
    ),
    "mig-two": (
        {"spec.accelerator": {"type": "MIG", "count": 2, "mig": {"profile": "1g.10gb"}}},
        "spec.accelerator",
        "needs processPerDevice",
    ),
    "shared-two": (
        {"spec.accelerator": {"type": "Shared", "count": 2}},
        "spec.accelerator",
        "count must be 1 with type Shared",
    ),
    "shared-gpu": (
        {"spec.accelerator": {"type": "GPU", "shared": {"resourceName": "nvidia.com/gpu.shared"}}},
        "spec.accelerator",
        "shared needs type Shared",
    ),
    "shared-name": (
        {"spec.accelerator": {"type": "Shared", "shared": {"resourceName": "amd.com/gpu"}}},
        "spec.accelerator.shared.resourceName",
        "must be a resource such as nvidia.com/gpu.shared",
    ),
    "shared-long": (
        {"spec.accelerator": {"type": "Shared", "shared": {"resourceName": f"nvidia.com/{'g' * 47}"}}},
        "spec.accelerator.shared.resourceName",
        "may not be more than 57",
    ),
    "dra-nothing": ({"spec.accelerator": {"type": "DRA"}}, "spec.accelerator", "type DRA needs dra"),
    "dra-class": (
        {"spec.accelerator": {"type": "DRA", "dra": {"selectors": ["true"]}}},
        "spec.accelerator.dra.deviceClassName",
        "Required value",
    ),
    "dra-class-name": (
        {"spec.accelerator": {"type": "DRA", "dra": {"deviceClassName": "MIG"}}},
        "spec.accelerator.dra.deviceClassName",
        "must be a name of lower case letters",
    ),
    "dra-nine": (
        {"spec.accelerator": {"type": "DRA", "dra": {"deviceClassName": "gpu", "selectors": ["true"] * 9}}},
        "spec.accelerator.dra.selectors",
        "must have at most 8 items",
    ),
    "dra-empty": (
        {"spec.accelerator": {"type": "DRA", "dra": {"deviceClassName": "gpu", "selectors": [""]}}},
        "spec.accelerator.dra.selectors[0]",
        "should be at least 1 chars long",
    ),
    "dra-request-name": (
        {
            "spec.accelerator": {
                "type": "DRA",
                "dra": {
                    "deviceClassName": "gpu",
                    "additionalRequests": [
                        {"name": "Nic", "deviceClassName": "rdma"},
                    ],
                },
            }
        },
        "spec.accelerator.dra.additionalRequests[0].name",
        "must be of lower case letters, digits and '-'",
    ),
    "dra-request-device": (
        {
            "spec.accelerator": {
                "type": "DRA",
                "dra": {
                    "deviceClassName": "gpu",
                    "additionalRequests": [
                        {"name": "device", "deviceClassName": "rdma"},
                    ],
                },
            }
        },
        "spec.accelerator.dra.additionalRequests[0].name",
        "must not be 'device'",
    ),
    "dra-request-twice": (
        {
            "spec.accelerator": {
                "type": "DRA",
                "dra": {
                    "deviceClassName": "gpu",
                    "additionalRequests": [
                        {"name": "nic", "deviceClassName": "rdma"},
                        {"name": "nic", "deviceClassName": "rdma"},
                    ],
                },
            }
        },
        "spec.accelerator.dra.additionalRequests[1]",
        "uplicate",
    ),
    "dra-request-class": (
        {
            "spec.accelerator": {
                "type": "DRA",
                "dra": {
                    "deviceClassName": "gpu",
                    "additionalRequests": [
                        {"name": "nic"},
                    ],
                },
            }
        },
        "spec.accelerator.dra.additionalRequests[0].deviceClassName",
        "Required value",
    ),
    "dra-four-requests": (
        {
            "spec.accelerator": {
                "type": "DRA",
                "dra": {
                    "deviceClassName": "gpu",
                    "additionalRequests": [{"name": f"n{number}", "deviceClassName": "rdma"} for number in range(4)],
                },
            }
        },
        "spec.accelerator.dra.additionalRequests",
        "must have at most 3",
    ),
    "dra-gpu": (
        {"spec.accelerator": {"type": "GPU", "dra": {"deviceClassName": "gpu"}}},
        "spec.accelerator",
        "no other type may have it",
    ),
    "dra-mig": (
        {"spec.accelerator": {"type": "DRA", "dra": {"deviceClassName": "gpu"}, "mig": {"profile": "1g.10gb"}}},
        "spec.accelerator",
        "no other type may have it",
    ),
    "dra-shared": (
        {"spec.accelerator": {"type": "DRA", "dra": {"deviceClassName": "gpu"}, "shared": {}}},
        "spec.accelerator",
        "shared needs type Shared",
    ),
    "dra-memory": (
        {"spec.accelerator": {"type": "DRA", "dra": {"deviceClassName": "gpu"}, "gpu": {"minMemory": "9Gi"}}},
        "spec.accelerator",
        "kube-scheduler chooses the devices",
    ),
    "dra-move": (
        {"spec.accelerator": {"type": "DRA", "dra": {"deviceClassName": "gpu"}, "moveAfter": "1m"}},
        "spec.accelerator",
        "kube-scheduler chooses the devices",
    ),
    "gpu-product": (
        {"spec.accelerator": {"type": "GPU", "gpu": {"products": ["NVIDIA H100"]}}},
        "spec.accelerator.gpu.products[0]",
        "must be the value of a label",
    ),
    "gpu-products-none": (
        {"spec.accelerator": {"type": "GPU", "gpu": {"products": []}}},
        "spec.accelerator.gpu.products",
        "should have at least 1 items",
    ),
    "gpu-memory": (
        {"spec.accelerator": {"type": "GPU", "gpu": {"minMemory": "40 GB"}}},
        "spec.accelerator.gpu.minMemory",
        "must be a quantity above 0",
    ),
    "gpu-capability": (
        {"spec.accelerator": {"type": "GPU", "gpu": {"minComputeCapability": "eight"}}},
        "spec.accelerator.gpu.minComputeCapability",
        "must be a compute capability",
    ),
    "move-after": (
        {"spec.accelerator": {"type": "GPU", "moveAfter": "1s"}},
        "spec.accelerator.moveAfter",
        "must be at least 10s",
    ),
}
