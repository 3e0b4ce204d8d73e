"""Values of `spec.autoscaling` that the schema in the API server refuses, as does the operator's own parsing.

Each has the path below it and a part of the message.
"""

from collections.abc import Mapping
from typing import Any

from support.custom_resources import BY_KEDA, BY_METRICS, changed

BAD_AUTOSCALING: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "autoscaling-no-most": ({}, ".maxReplicas", "Required value"),
    "autoscaling-none": ({"maxReplicas": 0}, ".maxReplicas", "greater than or"),
    "autoscaling-bounds": ({"minReplicas": 5, "maxReplicas": 4}, "", "must not be above maxReplicas"),
    "autoscaling-zero": ({"minReplicas": 0, "maxReplicas": 4}, "", "must be at least 1 without scaleToZero"),
    "autoscaling-zero-by-operator": (
        {"minReplicas": 0, "maxReplicas": 4, "scaleToZero": {"idleFor": "1m"}},
        "",
        "must be at least 1 without scaleToZero",
    ),
    "autoscaling-provider": ({"provider": "VPA", "maxReplicas": 4}, ".provider", "supported values"),
    "autoscaling-preset": ({"preset": "cpu", "maxReplicas": 4}, ".preset", "supported values"),
    "autoscaling-target": ({"target": "0", "maxReplicas": 4}, ".target", "must be a quantity above 0"),
    "autoscaling-target-text": ({"target": "four", "maxReplicas": 4}, ".target", "must be a quantity above 0"),
    "autoscaling-two-ways": ({**BY_METRICS, "preset": "queue"}, "", "metrics must not be set together with preset"),
    "autoscaling-two-targets": ({**BY_METRICS, "target": "3"}, "", "metrics must not be set together with preset"),
    "autoscaling-metric-type": (
        {"maxReplicas": 4, "metrics": [{"type": "Pods", "object": {}}]},
        ".metrics[0]",
        "must have the field of its type",
    ),
    "autoscaling-no-metrics": ({"maxReplicas": 4, "metrics": []}, ".metrics", "at least 1 items"),
    "autoscaling-external": (
        {"provider": "External", "maxReplicas": 4, "preset": "gpu"},
        "",
        "provider External takes no preset",
    ),
    "autoscaling-keda-metrics": ({**BY_METRICS, "provider": "KEDA"}, "", "provider KEDA takes a preset"),
    "autoscaling-prometheus": (
        {"maxReplicas": 4, "prometheus": {"authenticationRef": "prom-auth"}},
        "",
        "prometheus needs provider KEDA",
    ),
    "autoscaling-prometheus-url": (
        {**BY_KEDA, "prometheus": {"serverAddress": "http://me:secret@prometheus"}},
        ".prometheus.serverAddress",
        "must be a URL",
    ),
    "autoscaling-authentication": (
        changed(BY_KEDA, {"prometheus.authenticationRef": "A b"}),
        ".prometheus.authenticationRef",
        "must be a name of lower case letters",
    ),
    "autoscaling-idle": (
        {"maxReplicas": 4, "scaleToZero": {"idleFor": "5s"}},
        ".scaleToZero.idleFor",
        "from 10s to 24h",
    ),
    "autoscaling-idle-none": (
        {"maxReplicas": 4, "scaleToZero": {"zeroBy": "Operator"}},
        ".scaleToZero.idleFor",
        "Required value",
    ),
    "autoscaling-zero-by-keda": (
        {"maxReplicas": 4, "scaleToZero": {"idleFor": "1m", "zeroBy": "KEDA"}},
        "",
        "must be KEDA with provider KEDA",
    ),
    "autoscaling-keda-zero-by-operator": (
        changed(BY_KEDA, {"scaleToZero": {"idleFor": "1m"}}),
        "",
        "must be KEDA with provider KEDA",
    ),
    "autoscaling-zero-by-hpa-of-pods": (
        {"maxReplicas": 4, "metrics": [BY_METRICS["metrics"][0]], "scaleToZero": {"idleFor": "1m", "zeroBy": "HPA"}},
        "",
        "one of type Object or External",
    ),
}
