"""The scaler: a HorizontalPodAutoscaler, or a ScaledObject from which KEDA makes one. Never both.

Both HPAs have the same name, so that there cannot be two of them. KEDA copies the labels of a ScaledObject to its HPA.
"""

from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.names import child_name
from halimede_operator.core.scaling.presets import BEHAVIOR, IN_USE, goals_of, object_metric, pod_metric, promql
from halimede_operator.core.spec.quantities import quantity
from halimede_operator.core.spec.types import Autoscaling, Json, Key, Provider, ZeroBy

POLLING_SECONDS = 15
FALLBACK_AFTER = 3
"""Failures of KEDA's query in a row before the fallback counts."""


def scaler(key: Key, uid: str, scaling: Autoscaling, *, may_be_zero: bool = True) -> Json | None:
    """None with the provider External. may_be_zero: the API server accepts an HPA with 0 as minReplicas."""
    match scaling.provider:
        case Provider.HPA:
            return _hpa(key, uid, scaling, least=0 if may_be_zero else 1)
        case Provider.KEDA:
            return _scaled_object(key, uid, scaling)
        case Provider.EXTERNAL:
            return None


def _target(key: Key) -> Json:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": child_name(key.name)}


def _hpa(key: Key, uid: str, scaling: Autoscaling, least: int) -> Json:
    is_by_hpa = scaling.scale_to_zero is not None and scaling.scale_to_zero.by is ZeroBy.HPA
    behavior = _behavior(scaling)
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(key, uid, child_name(key.name)),
        "spec": {
            "scaleTargetRef": _target(key),
            "minReplicas": max(least, scaling.min_replicas),
            "maxReplicas": scaling.max_replicas,
            "metrics": list(scaling.metrics)
            or [
                object_metric(goal, key) if is_by_hpa else pod_metric(goal)
                for goal in goals_of(scaling.preset, scaling.target)
            ],
            **({"behavior": behavior} if behavior else {}),
        },
    }


def _behavior(scaling: Autoscaling) -> Json:
    given = scaling.behavior or (BEHAVIOR if scaling.preset is not None else {})
    zero = scaling.scale_to_zero
    if zero is None or zero.by is not ZeroBy.HPA:
        return given
    # The highest number that was needed within the window counts: it is above 0 until the object was idle for so long.
    down = {**given.get("scaleDown", {}), "stabilizationWindowSeconds": zero.idle_seconds}
    return {**given, "scaleDown": down}


def _scaled_object(key: Key, uid: str, scaling: Autoscaling) -> Json:
    name = child_name(key.name)
    goals = goals_of(scaling.preset, scaling.target)
    zero = scaling.scale_to_zero
    if zero is not None:
        known = {goal.metric for goal in goals}
        goals += tuple(goal for goal in IN_USE if goal.metric not in known)
    reference = scaling.prometheus_authentication
    triggers = [
        {
            "type": "prometheus",
            "name": goal.metric,
            "metricType": "AverageValue",
            "metadata": {
                "serverAddress": scaling.prometheus_address or "",
                "query": promql(goal.metric, key),
                "threshold": _number(goal.target),
                "activationThreshold": "0",
                # No result is an error, and not 0: then nothing is scaled down.
                "ignoreNullValues": "false",
            },
            **({"authenticationRef": {"name": reference}} if reference is not None else {}),
        }
        for goal in goals
    ]
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(key, uid, name),
        "spec": {
            "scaleTargetRef": _target(key),
            "pollingInterval": POLLING_SECONDS,
            **_bounds(scaling),
            **_fallback(scaling),
            "advanced": {
                "restoreToOriginalReplicaCount": False,
                "horizontalPodAutoscalerConfig": {"name": name, "behavior": scaling.behavior or BEHAVIOR},
            },
            "triggers": triggers,
        },
    }


def _number(target: str) -> str:
    """A quantity as KEDA reads numbers: it knows no units, such as that of 800m."""
    amount = quantity(target)
    if amount is None:
        raise ValueError(f"{target!r} is no quantity")
    return str(amount.numerator if amount.denominator == 1 else float(amount))


def _bounds(scaling: Autoscaling) -> Json:
    bounds = {"minReplicaCount": scaling.min_replicas, "maxReplicaCount": scaling.max_replicas}
    if scaling.scale_to_zero is None:
        return bounds
    cooldown = {"cooldownPeriod": scaling.scale_to_zero.idle_seconds}
    if scaling.min_replicas > 1:
        # In use at least minReplicas, and 0 otherwise.
        return {**bounds, **cooldown, "idleReplicaCount": 0}
    return {**bounds, **cooldown, "minReplicaCount": 0}


def _fallback(scaling: Autoscaling) -> Json:
    if scaling.scale_to_zero is not None:
        # At 0 there are no samples, which is an error too: a fallback would start pods that nobody uses.
        return {}
    replicas = max(1, scaling.min_replicas)
    behavior = "currentReplicasIfHigher"
    return {"fallback": {"failureThreshold": FALLBACK_AFTER, "replicas": replicas, "behavior": behavior}}
