"""InferenceModels and ModelEnsembles that are valid, for the schema in the API server and for the operator's own parsing."""

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

Json = dict[str, Any]
CRDS = {
    kind: cast(
        Json, yaml.load((Path(__file__).parents[2] / "crds" / f"{kind.lower()}s.yaml").read_text(), yaml.CSafeLoader)
    )
    for kind in ("InferenceModel", "ModelEnsemble")
}
ABSENT = object()
"""As the value of a change: remove the field."""


def schema_of(kind: str) -> Json:
    return cast(Json, CRDS[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def model(name: str = "bert", **spec: Any) -> Json:
    return _object("InferenceModel", name, {"model": {"uri": "s3://models/bert"}, **spec})


def ensemble(name: str = "search", **spec: Any) -> Json:
    """Three steps, one of them with a condition."""
    parts = {
        "inputs": [{"name": "TEXT", "dataType": "BYTES", "shape": [1]}],
        "outputs": [{"name": "VECTOR", "dataType": "FP32", "shape": [768], "from": "pool.vector"}],
        "steps": [
            {
                "name": "tok",
                "modelRef": {"name": "tokenizer"},
                "inputs": {"text": "request.TEXT"},
                "outputs": {"ids": "ids"},
            },
            {
                "name": "bert",
                "modelRef": {"name": "bert"},
                "inputs": {"ids": "tok.ids"},
                "outputs": {"state": "hidden"},
            },
            {
                "name": "pool",
                "modelRef": {"name": "pooler"},
                "inputs": {"hidden": "bert.hidden"},
                "outputs": {"v": "vector"},
            },
        ],
    }
    return _object("ModelEnsemble", name, {**parts, **spec})


def _object(kind: str, name: str, spec: Json) -> Json:
    metadata = {"name": name, "namespace": "prod"}
    return {"apiVersion": "halimede.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": copy.deepcopy(spec)}


def changed(example: Json, changes: Mapping[str, Any]) -> Json:
    """A copy with changed values at some paths, such as `spec.env[0].name` or `spec.resources.limits[cpu]`."""
    result = copy.deepcopy(example)
    for path, value in changes.items():
        *way, last = parts_of(path)
        place: Any = result
        for part in way:
            place = place.setdefault(part, {}) if isinstance(place, dict) else place[part]
        if value is ABSENT:
            del place[last]
        else:
            place[last] = copy.deepcopy(value)
    return result


def parts_of(path: str) -> list[str | int]:
    parts = re.findall(r"[^.\[\]]+|\[[^\]]*\]", path)
    names = [part[1:-1] if part.startswith("[") else part for part in parts]
    return [
        int(name) if part.startswith("[") and name.isdecimal() else name
        for part, name in zip(parts, names, strict=True)
    ]


WORKLOAD: Json = {
    "replicas": 2,
    "suspend": False,
    "accelerator": {
        "type": "GPU",
        "count": 2,
        "processPerDevice": True,
        "moveAfter": "5m",
        "gpu": {"products": ["NVIDIA-H100-80GB-HBM3"], "minMemory": "40Gi", "minComputeCapability": "8.0"},
    },
    "resources": {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "8Gi"}},
    "scheduling": {
        "nodeSelector": {"example.com/disk": "ssd"},
        "tolerations": [
            {"key": "dedicated", "operator": "Equal", "value": "ml", "effect": "NoExecute", "tolerationSeconds": 30},
            {"operator": "Exists"},
        ],
        "affinity": {
            "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
            "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
        },
        "topologySpread": "Zone",
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "schedulerName": "other",
    },
    "serving": {
        "protocols": ["grpc", "http"],
        "ports": {"http": 9000, "grpc": 9001, "metrics": 9002},
        "maxMessageSize": "64Mi",
        "drainTimeout": "1m30s",
        "args": ["--log-verbose=1"],
    },
    "image": {"reference": "example.com/halimede:1", "pullPolicy": "Always", "pullSecrets": [{"name": "registry"}]},
    "env": [
        {"name": "GREETING", "value": "hello"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "token", "optional": True}}},
        {"name": "LEVEL", "valueFrom": {"configMapKeyRef": {"name": "levels", "key": "level", "optional": True}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ],
    "serviceAccountName": "reader",
    "podTemplate": {
        "metadata": {"labels": {"team": "search"}, "annotations": {"example.com/owner": "someone"}},
        "spec": {"containers": [{"name": "server", "resources": {"limits": {"cpu": "4"}}}]},
    },
    "rollout": {
        "policy": "InPlace",
        "progressDeadline": "1h30m",
        "paused": False,
        "autoRollback": False,
        "rebalance": True,
        "upgradePolicy": "Auto",
    },
    "disruption": {"maxUnavailable": "25%"},
    "networkPolicy": {
        "enabled": True,
        "allowFrom": [
            {
                "podSelector": {
                    "matchLabels": {"app": "client"},
                    "matchExpressions": [{"key": "tier", "operator": "In", "values": ["web"]}],
                },
                "namespaceSelector": {
                    "matchLabels": {"team": "search"},
                    "matchExpressions": [{"key": "tier", "operator": "In", "values": ["web"]}],
                },
            },
            {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
        ],
    },
    "cache": {"medium": "PVC", "pvc": {"claimName": "models", "subPath": "cache"}, "sizeLimit": "50Gi"},
    "autoscaling": {
        "provider": "HPA",
        "preset": "concurrency",
        "target": "6",
        "minReplicas": 2,
        "maxReplicas": 8,
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 60}},
        "scaleToZero": {"idleFor": "10m", "zeroBy": "Operator"},
    },
}
BY_KEDA: Json = {
    "provider": "KEDA",
    "maxReplicas": 4,
    "scaleToZero": {"idleFor": "10m", "zeroBy": "KEDA"},
    "prometheus": {"serverAddress": "http://prometheus.monitoring:9090", "authenticationRef": "prom-auth"},
}
_AVERAGE: Json = {"type": "AverageValue", "averageValue": "10"}
_RESOURCE: Json = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}
BY_METRICS: Json = {
    "maxReplicas": 4,
    "metrics": [
        {"type": "Pods", "pods": {"metric": {"name": "mine"}, "target": _AVERAGE}},
        {
            "type": "Object",
            "object": {
                "describedObject": {"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "name": "main"},
                "metric": {"name": "requests"},
                "target": _AVERAGE,
            },
        },
        {"type": "External", "external": {"metric": {"name": "queue_length"}, "target": _AVERAGE}},
        {"type": "Resource", "resource": _RESOURCE},
        {"type": "ContainerResource", "containerResource": {**_RESOURCE, "container": "server"}},
    ],
}
FULL_MODEL = _object(
    "InferenceModel",
    "full",
    {
        **WORKLOAD,
        "model": {
            "name": "bert",
            "uri": "s3://models/bert",
            "digest": f"sha256:{'0' * 64}",
            "format": "onnx",
            "credentials": {"secretRef": {"name": "store"}, "caBundle": {"configMapName": "ca", "key": "root.pem"}},
            "versionPolicy": {"latest": 2},
            "config": {
                "maxBatchSize": 32,
                "dynamicBatching": {
                    "preferredBatchSize": [8, 16],
                    "maxQueueDelayMicroseconds": 500,
                    "defaultQueuePolicy": {"maxQueueSize": 256, "defaultTimeoutMicroseconds": 2_000_000},
                },
                "instanceGroup": [{"kind": "KIND_GPU", "count": 2}],
                "parameters": {"intra_op_thread_count": {"stringValue": "4"}},
            },
        },
    },
)
FULL_ENSEMBLE = changed(
    ensemble("full-ensemble", **WORKLOAD, maxBatchSize=8, placement={"mode": "Colocate"}),
    {"spec.steps[1].modelRef.version": 3, "spec.steps[2].when": "tok.ids.shape[0] > 1 and not parameters.fast"},
)
FULL = {"InferenceModel": FULL_MODEL, "ModelEnsemble": FULL_ENSEMBLE}
MORE: dict[str, Json] = {
    "InferenceModel": changed(
        FULL_MODEL,
        {
            "metadata.name": "more",
            "spec.accelerator": {"type": "MIG", "count": 1, "mig": {"profile": "1g.10gb"}},
            "spec.disruption": {"disabled": True},
            "spec.autoscaling": BY_KEDA,
            "spec.cache": {"medium": "HostPath"},
            "spec.model.versionPolicy": {"specific": [1, 3]},
        },
    ),
    "ModelEnsemble": changed(
        FULL_ENSEMBLE,
        {
            "metadata.name": "more-ensemble",
            "spec.accelerator": {"type": "MIG", "count": 1, "mig": {"profile": "1g.10gb"}},
            "spec.disruption": {"disabled": True},
            "spec.autoscaling": BY_KEDA,
            "spec.cache": {"medium": "HostPath"},
        },
    ),
}
"""Variants for what the full objects exclude."""
_MODELS: dict[str, Mapping[str, Any]] = {
    "the-simplest": {},
    "a-file-over-https": {"spec.model.uri": "https://example.com/models/bert.onnx?version=2"},
    "a-server-of-its-own": {"spec.model.uri": "s3://https://minio.example.com:9000/models/my bert/"},
    "a-container": {"spec.model.uri": "az://models/bert"},
    "a-storage-account": {"spec.model.uri": "as://shelf/models/bert/"},
    "a-volume": {"spec.model.uri": "pvc://models/bert"},
    "all-versions": {"spec.model.versionPolicy": {"all": {}}},
    "dynamic-batching-as-usual": {"spec.model.config": {"dynamicBatching": {}}},
    "a-model-that-does-not-batch": {"spec.model.config": {"maxBatchSize": 0}},
    "instances-of-both-kinds": {
        "spec.model.config": {
            "instanceGroup": [{"kind": "KIND_CPU"}, {"name": "two", "count": 2}, {"kind": "KIND_AUTO", "count": 1}]
        }
    },
    "no-replicas": {"spec.replicas": 0},
    "autoscaled-in-five-lines": {"spec.autoscaling": {"maxReplicas": 4}},
    "autoscaled-by-keda": {"spec.autoscaling": BY_KEDA},
    "autoscaled-by-metrics": {"spec.autoscaling": BY_METRICS},
    "autoscaled-by-others": {"spec.autoscaling": {"provider": "External", "minReplicas": 2, "maxReplicas": 4}},
    "zero-by-the-hpa": {"spec.autoscaling": {"maxReplicas": 4, "scaleToZero": {"idleFor": "10m", "zeroBy": "HPA"}}},
    "suspended": {"spec.suspend": True},
    "one-gpu": {"spec.accelerator": {"type": "GPU"}},
    "slices-by-memory": {"spec.accelerator": {"type": "MIG", "mig": {"minMemory": "9Gi", "allowWhole": True}}},
    "two-slices": {
        "spec.accelerator": {"type": "MIG", "count": 2, "processPerDevice": True, "mig": {"profile": "1g.10gb"}}
    },
    "a-shared-gpu": {"spec.accelerator": {"type": "Shared", "shared": {"resourceName": "nvidia.com/gpu"}}},
    "any-device-of-a-class": {"spec.accelerator": {"type": "DRA", "dra": {"deviceClassName": "gpu.nvidia.com"}}},
    "a-claim": {
        "spec.accelerator": {
            "type": "DRA",
            "count": 2,
            "processPerDevice": True,
            "dra": {"deviceClassName": "mig.nvidia.com", "selectors": ["device.driver == 'gpu.nvidia.com'"]},
        }
    },
    "a-claim-with-alternatives": {
        "spec.accelerator": {
            "type": "DRA",
            "dra": {
                "deviceClassName": "mig.nvidia.com",
                "selectors": [
                    f"device.attributes['gpu.nvidia.com'].profile == '{profile}'" for profile in ("1g.10gb", "2g.20gb")
                ],
            },
        }
    },
    "a-claim-with-a-network-card": {
        "spec.accelerator": {
            "type": "DRA",
            "dra": {
                "deviceClassName": "gpu.nvidia.com",
                "additionalRequests": [
                    {"name": "nic", "deviceClassName": "rdma.example.com", "selectors": ["true"], "count": 2},
                    {"name": "any-disk", "deviceClassName": "disk.example.com"},
                ],
            },
        }
    },
    "no-accelerator-by-name": {"spec.accelerator": {"type": "None"}},
    "a-slice-with-media-engines": {"spec.accelerator": {"type": "MIG", "mig": {"profile": "1g.10gb+me.all"}}},
    "amounts-as-numbers": {"spec.resources": {"limits": {"cpu": 2}}, "spec.cache": {"sizeLimit": 1000000000}},
    "http-alone": {"spec.serving": {"protocols": ["http"]}},
    "flags-of-each-form": {
        "spec.serving": {
            "args": [
                "--watch",
                "--log-access=all",
                "--http-header-forward-pattern=x-(a|b)",
                "--http-restricted-api=inference:key=value",
            ]
        }
    },
    "ports-exchanged": {"spec.serving": {"ports": {"http": 8001, "grpc": 8000}}},
    "a-large-message": {"spec.serving": {"maxMessageSize": "2047Mi"}},
    "an-hour-to-drain": {"spec.serving": {"drainTimeout": "60m"}},
    "a-budget-in-numbers": {"spec.disruption": {"maxUnavailable": 0}},
    "everybody-of-this-namespace": {"spec.networkPolicy": {"enabled": True, "allowFrom": [{"podSelector": {}}]}},
    "a-closed-one": {"spec.networkPolicy": {"enabled": True}},
    "a-sidecar": {"spec.podTemplate": {"spec": {"containers": [{"name": "log", "image": "example.com/log:1"}]}}},
    "an-empty-variable": {"spec.env": [{"name": "EMPTY", "value": ""}, {"name": "NOTHING"}]},
    "a-name-of-50-characters-and-not-one-more-than-thatx": {},
}
_ENSEMBLES: dict[str, Mapping[str, Any]] = {
    "three-steps": {},
    "steps-in-another-order": {"spec.steps": [*reversed(ensemble()["spec"]["steps"])]},
    "a-condition": {"spec.steps[1].when": "`request.TEXT` != '' or tok.ids.present"},
}
GOOD: dict[str, Json] = {
    **{e["metadata"]["name"]: e for examples in (FULL, MORE) for e in examples.values()},
    **{name[:50]: changed(model(name[:50]), changes) for name, changes in _MODELS.items()},
    **{name: changed(ensemble(name), changes) for name, changes in _ENSEMBLES.items()},
}
