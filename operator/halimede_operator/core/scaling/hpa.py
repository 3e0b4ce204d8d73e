"""Reads a HorizontalPodAutoscaler: what it decided, and why."""

from typing import Any

from halimede_operator.core.reading import at, clean, condition, decimal, moment_at, name_at, objects_at
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.quantities import quantity

_SHOWN_METRICS = 4


def decision_of(hpa: Object) -> Any:
    """The parts of an HPA that a reconcile uses, without the values of metrics. Equal if nothing was decided and if the
    same metrics have a value.

    Any: JSON, only to be compared.
    """
    metadata, status = hpa["metadata"], hpa.get("status") or {}
    parts = {name: part for name, part in metadata.items() if name != "resourceVersion"}
    decided = [status.get(name) for name in ("conditions", "desiredReplicas", "lastScaleTime")]
    return [parts, hpa.get("spec"), decided, list(without_value(hpa))]


def desired_replicas(hpa: Object | None) -> int | None:
    """What the HPA decided; None before its first decision."""
    active, desired = condition(hpa, "ScalingActive"), decimal(at(hpa, "status", "desiredReplicas"))
    # 0 is also what the field has before there was a value of any metric.
    is_undecided = not active or (desired == 0 and active.get("status") == "False" and bool(current_replicas(hpa)))
    return None if is_undecided else desired


def current_replicas(hpa: Object | None) -> int | None:
    """The replicas from which the HPA made its last decision."""
    return decimal(at(hpa, "status", "currentReplicas"))


def last_scaled(hpa: Object | None) -> str | None:
    return moment_at(at(hpa, "status"), "lastScaleTime")


def without_value(hpa: Object | None) -> tuple[str, ...]:
    """The metrics that the controller got no value of in its last decision, which it made by the others.

    Its condition ScalingActive stays True then, unless the others want fewer replicas. In `currentMetrics` it leaves an
    empty entry at the place of such a metric; without any entries it did not ask for metrics.
    """
    metrics, current = objects_at(hpa, "spec", "metrics"), objects_at(hpa, "status", "currentMetrics")
    if len(metrics) != len(current):
        return ()
    return tuple(_name(metric) for metric, found in zip(metrics, current, strict=True) if _part(found) is None)


def metrics_text(hpa: Object | None) -> str:
    """The values that the last decision was made from, with their targets; "" if there are none."""
    targets = {_name(metric): _value(metric, "target") for metric in objects_at(hpa, "spec", "metrics")}
    current = [(_name(metric), _value(metric, "current")) for metric in objects_at(hpa, "status", "currentMetrics")]
    known = [f"{name} {value} of {targets[name]}" for name, value in current if value and targets.get(name)]
    return clean(", ".join(known[:_SHOWN_METRICS]), 512)


def _part(metric: object) -> object:
    kind = name_at(metric, "type")
    return at(metric, kind[:1].lower() + kind[1:]) if kind else None


def _name(metric: object) -> str:
    part = _part(metric)
    return name_at(part, "metric", "name") or name_at(part, "name")


def _value(metric: object, key: str) -> str:
    part = at(_part(metric), key)
    for name in ("averageValue", "value"):
        amount = quantity(at(part, name))
        if amount is not None:
            return f"{float(amount):.4g}"
    share = decimal(at(part, "averageUtilization"))
    return "" if share is None else f"{share}%"
