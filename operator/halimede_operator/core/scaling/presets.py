"""The presets of `spec.autoscaling`: what each one scales on, for an HPA and for KEDA.

The HPA computes a number of replicas for each metric and takes the highest. A preset may have several metrics for that
reason: a queue alone would flap, because it is empty as soon as there is enough capacity, and so would the requests in
flight, which are few then. The busy fraction of the instances keeps the replicas that are needed.

    metric of a pod (Pods)               replicas = ceil(sum over the pods / target)
    sum over the pods (Object, KEDA)     replicas = ceil(sum / target)
    mean over the pods (Object, Value)   replicas = ceil(pods * mean / target)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from halimede_operator.core.spec.types import API_VERSION, Json, Key, Kind, Preset

QUEUE = "halimede_queue_requests"
INFLIGHT = "halimede_inflight_requests"
BUSY = "halimede_instance_busy_ratio"
SEQUENCES = "halimede_sequences_open"

FRESH = "30s"
"""An older sample is no sample."""

NO_LIMIT = "1000000"
"""A target that never asks for a second replica: the metric only says whether the object is in use."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One metric of a preset."""

    metric: str
    """The name in custom.metrics.k8s.io."""
    target: str
    """Of one pod, as a quantity."""


PRESETS: Mapping[Preset, tuple[Goal, ...]] = {
    Preset.QUEUE: (Goal(QUEUE, "4"), Goal(BUSY, "800m")),
    Preset.CONCURRENCY: (Goal(INFLIGHT, "8"), Goal(BUSY, "800m")),
    Preset.GPU: (Goal(BUSY, "700m"),),
}
"""`spec.autoscaling.target` replaces the target of a preset's first metric."""

# Of an object the metrics API serves the sum of a metric over the pods, and of these the mean.
_MEANS = frozenset({BUSY})

IN_USE = (Goal(BUSY, NO_LIMIT), Goal(SEQUENCES, NO_LIMIT))
"""What KEDA needs beside a preset to see whether an object is in use at all: a short request is in few samples of a
queue, but always in the busy fraction; and a sequence is in use between its requests."""

# NaN, infinite and negative values are dropped by the comparisons.
_SAMPLES = "(last_over_time({series}{{{matchers}}}[" + FRESH + "]) >= 0 < +Inf)"
_TOTALS = {
    QUEUE: "sum({halimede_queue_requests})",
    INFLIGHT: "sum({halimede_queue_requests}) + sum({halimede_executing_requests})",
    BUSY: "sum(max by (pod) (avg by (pod, model, version) ({halimede_instance_busy_ratio})))",
    # Only models with sequences have this series. Without any, the other one tells that the pods are there.
    SEQUENCES: "sum({halimede_sequences_open}) or 0 * sum({halimede_queue_requests})",
}
"""The sum over an object's pods, in PromQL. In braces: the samples of a series."""


BEHAVIOR: Json = {
    "scaleUp": {"stabilizationWindowSeconds": 20},
    "scaleDown": {
        "stabilizationWindowSeconds": 300,
        "policies": [{"type": "Percent", "value": 50, "periodSeconds": 60}],
    },
}
"""Of all presets, if the spec has no `behavior`. Up when two decisions in a row want it, so that a queue which a few
requests made by chance adds no pod; then as fast as Kubernetes does it, at most twice as many pods or four more within
15 s. Down more slowly than Kubernetes, because a pod takes long to come back."""


def goals_of(preset: Preset | None, target: str | None) -> tuple[Goal, ...]:
    """The metrics of a preset. target: of the first one; None: the default."""
    if preset is None:
        return ()
    first, *rest = PRESETS[preset]
    return (first if target is None else replace(first, target=target), *rest)


def pod_metric(goal: Goal) -> Json:
    """The goal as a MetricSpec of autoscaling/v2, on the metric of each pod."""
    target = {"type": "AverageValue", "averageValue": goal.target}
    return {"type": "Pods", "pods": {"metric": {"name": goal.metric}, "target": target}}


def object_metric(goal: Goal, key: Key) -> Json:
    """The goal as a MetricSpec of autoscaling/v2, on the metric of the object. It needs no pod, so it works at zero."""
    target = (
        {"type": "Value", "value": goal.target}
        if goal.metric in _MEANS
        else {"type": "AverageValue", "averageValue": goal.target}
    )
    described = {"apiVersion": API_VERSION, "kind": str(key.kind), "name": key.name}
    return {
        "type": "Object",
        "object": {"describedObject": described, "metric": {"name": goal.metric}, "target": target},
    }


def promql(metric: str, key: Key) -> str:
    """The sum of a metric over an object's pods. No result without samples that are new enough."""
    label = {Kind.INFERENCE_MODEL: "inferencemodel", Kind.MODEL_ENSEMBLE: "modelensemble"}[key.kind]
    # Names of objects and namespaces have no character that PromQL needs escaped.
    matchers = f'namespace="{key.namespace}",{label}="{key.name}"'
    text = _TOTALS[metric]
    for series in ("halimede_queue_requests", "halimede_executing_requests", BUSY, SEQUENCES):
        text = text.replace("{" + series + "}", _SAMPLES.format(series=series, matchers=matchers))
    return text
