"""Values of `spec.autoscaling` that the schema in the API server refuses, as does the operator's own parsing."""

from collections.abc import Mapping
from typing import Any

from support.custom_resources import BY_KEDA, BY_METRICS, changed

BAD_AUTOSCALING: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "autoscaling-no-most": ({"spec.autoscaling": {}}, "spec.autoscaling.maxReplicas", "Required value"),
    "autoscaling-none": ({"spec.autoscaling": {"maxReplicas": 0}}, "spec.autoscaling.maxReplicas", "greater than or"),
    "autoscaling-bounds": (
        {"spec.autoscaling": {"minReplicas": 5, "maxReplicas": 4}},
        "spec.autoscaling",
        "must not be above maxReplicas",
    ),
    "autoscaling-zero": (
        {"spec.autoscaling": {"minReplicas": 0, "maxReplicas": 4}},
        "spec.autoscaling",
        "must be at least 1 without scaleToZero",
    ),
    "autoscaling-zero-by-operator": (
        {"spec.autoscaling": {"minReplicas": 0, "maxReplicas": 4, "scaleToZero": {"idleFor": "1m"}}},
        "spec.autoscaling",
        "must be at least 1 without scaleToZero",
    ),
    "autoscaling-provider": (
        {"spec.autoscaling": {"provider": "VPA", "maxReplicas": 4}},
        "spec.autoscaling.provider",
        "supported values",
    ),
    "autoscaling-preset": (
        {"spec.autoscaling": {"preset": "cpu", "maxReplicas": 4}},
        "spec.autoscaling.preset",
        "supported values",
    ),
    "autoscaling-target": (
        {"spec.autoscaling": {"target": "0", "maxReplicas": 4}},
        "spec.autoscaling.target",
        "must be a quantity above 0",
    ),
    "autoscaling-target-text": (
        {"spec.autoscaling": {"target": "four", "maxReplicas": 4}},
        "spec.autoscaling.target",
        "must be a quantity above 0",
    ),
    "autoscaling-two-ways": (
        {"spec.autoscaling": {**BY_METRICS, "preset": "queue"}},
        "spec.autoscaling",
        "metrics must not be set together with preset",
    ),
    "autoscaling-two-targets": (
        {"spec.autoscaling": {**BY_METRICS, "target": "3"}},
        "spec.autoscaling",
        "metrics must not be set together with preset",
    ),
    "autoscaling-metric-type": (
        {"spec.autoscaling": {"maxReplicas": 4, "metrics": [{"type": "Pods", "object": {}}]}},
        "spec.autoscaling.metrics[0]",
        "must have the field of its type",
    ),
    "autoscaling-no-metrics": (
        {"spec.autoscaling": {"maxReplicas": 4, "metrics": []}},
        "spec.autoscaling.metrics",
        "at least 1 items",
    ),
    "autoscaling-external": (
        {"spec.autoscaling": {"provider": "External", "maxReplicas": 4, "preset": "gpu"}},
        "spec.autoscaling",
        "provider External takes no preset",
    ),
    "autoscaling-keda-metrics": (
        {"spec.autoscaling": {**BY_METRICS, "provider": "KEDA"}},
        "spec.autoscaling",
        "provider KEDA takes a preset",
    ),
    "autoscaling-prometheus": (
        {"spec.autoscaling": {"maxReplicas": 4, "prometheus": {"authenticationRef": "prom-auth"}}},
        "spec.autoscaling",
        "prometheus needs provider KEDA",
    ),
    "autoscaling-prometheus-url": (
        {"spec.autoscaling": {**BY_KEDA, "prometheus": {"serverAddress": "http://me:secret@prometheus"}}},
        "spec.autoscaling.prometheus.serverAddress",
        "must be a URL",
    ),
    "autoscaling-authentication": (
        {"spec.autoscaling": changed(BY_KEDA, {"prometheus.authenticationRef": "A b"})},
        "spec.autoscaling.prometheus.authenticationRef",
        "must be a name of lower case letters",
    ),
    "autoscaling-idle": (
        {"spec.autoscaling": {"maxReplicas": 4, "scaleToZero": {"idleFor": "5s"}}},
        "spec.autoscaling.scaleToZero.idleFor",
        "from 10s to 24h",
    ),
    "autoscaling-idle-none": (
        {"spec.autoscaling": {"maxReplicas": 4, "scaleToZero": {"zeroBy": "Operator"}}},
        "spec.autoscaling.scaleToZero.idleFor",
        "Required value",
    ),
    "autoscaling-zero-by-keda": (
        {"spec.autoscaling": {"maxReplicas": 4, "scaleToZero": {"idleFor": "1m", "zeroBy": "KEDA"}}},
        "spec.autoscaling",
        "must be KEDA with provider KEDA",
    ),
    "autoscaling-keda-zero-by-operator": (
        {"spec.autoscaling": changed(BY_KEDA, {"scaleToZero": {"idleFor": "1m"}})},
        "spec.autoscaling",
        "must be KEDA with provider KEDA",
    ),
    "autoscaling-zero-by-hpa-of-pods": (
        {
            "spec.autoscaling": {
                "maxReplicas": 4,
                "metrics": [BY_METRICS["metrics"][0]],
                "scaleToZero": {"idleFor": "1m", "zeroBy": "HPA"},
            }
        },
        "spec.autoscaling",
        "one of type Object or External",
    ),
}
