"""Objects for tests of autoscaling without an operator: Deployments on simulated nodes, and their autoscalers."""

from collections.abc import Sequence
from typing import Any

from cluster.fake_nodes import MARK

Object = dict[str, Any]


def fake_deployment(name: str, replicas: int, cpu: str = "1") -> Object:
    """Its pods run on simulated nodes, as soon as they are scheduled."""
    template = {
        "metadata": {"labels": {"app": name}},
        "spec": {
            "nodeSelector": {MARK: "fake"},
            "tolerations": [{"key": MARK, "operator": "Exists"}],
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": "none", "resources": {"requests": {"cpu": cpu}}}],
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template},
    }


def autoscaler(name: str, metrics: Sequence[Object], **spec: Any) -> Object:
    """For the Deployment of this name."""
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name},
        "spec": {"scaleTargetRef": target, "metrics": list(metrics), **spec},
    }


def pods_metric(name: str, average: str) -> Object:
    target = {"type": "AverageValue", "averageValue": average}
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": target}}


def object_metric(name: str, kind: str, described: str, average: str) -> Object:
    """Of an object of halimede.dev."""
    return {
        "type": "Object",
        "object": {
            "metric": {"name": name},
            "describedObject": {"apiVersion": "halimede.dev/v1alpha1", "kind": kind, "name": described},
            "target": {"type": "AverageValue", "averageValue": average},
        },
    }
