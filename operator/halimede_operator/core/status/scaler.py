"""The condition AutoscalingActive and `status.autoscaling`: who sets the number of replicas, and what was decided.

An HPA's status changes every 15 s under load. Here nothing changes but with a decision: the values of metrics are those
of the last one, and of the HPA's conditions only those are quoted that say why it does not do what it should.
"""

from halimede_operator.core.names import child_name
from halimede_operator.core.pods.observed import Observed
from halimede_operator.core.reading import at, clean, condition, decimal, moment_at, text_at
from halimede_operator.core.scaling.hpa import (
    current_replicas,
    desired_replicas,
    last_scaled,
    metrics_text,
    without_value,
)
from halimede_operator.core.scaling.idle import idle_json
from halimede_operator.core.scaling.scalers import HPA, SCALED_OBJECT, scaler_in, scalers_in
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.spec.types import Autoscaling, Provider
from halimede_operator.core.status.conditions import FALSE, TRUE, UNKNOWN
from halimede_operator.core.status.rules import ConditionState, how_to_wake

_KINDS = {Provider.HPA: HPA, Provider.KEDA: SCALED_OBJECT}


def scaling_state(observed: Observed) -> ConditionState | None:
    """None if the spec does not ask for autoscaling and no scaler is left."""
    spec, snapshot = observed.subject.spec, observed.subject.snapshot
    if spec is None:
        return None
    scaling, left = spec.workload.autoscaling, scalers_in(snapshot)
    if scaling is None:
        if not left:
            return None
        text = f"{left[0]['kind']} {left[0]['metadata']['name']} is being deleted; spec.replicas is applied after it"
        return ConditionState(FALSE, "HandingOver", text)
    if spec.workload.suspend:
        return ConditionState(FALSE, "Suspended", "spec.suspend is true: there is no scaler")
    bounds = f"from {scaling.min_replicas} to {scaling.max_replicas} replicas; spec.replicas is not applied"
    if scaling.provider is Provider.EXTERNAL:
        text = "others may set the replicas of the Deployment; spec.replicas is not applied"
        return ConditionState(UNKNOWN, "External", text)
    kind, name = _KINDS[scaling.provider], child_name(snapshot.key.name)
    if why := snapshot.unavailable.get(kind):
        return ConditionState(FALSE, "FeatureUnavailable", why)
    made = scaler_in(snapshot)
    others = [each for each in left if each["kind"] != kind and each is not snapshot.keda_hpa]
    if others or (kind == HPA and snapshot.keda_hpa is not None):
        other = (others or left)[0]
        return ConditionState(FALSE, "HandingOver", f"{other['kind']} {other['metadata']['name']} is being deleted")
    if made is None:
        return ConditionState(FALSE, "NoScaler", f"{kind} {name} does not exist yet")
    if observed.desired == 0 and scaling.min_replicas > 0:
        text = f"the Deployment has 0 replicas, so that {kind} {name} does nothing; {how_to_wake(scaling, name)}"
        return ConditionState(FALSE, "ScaledToZero", text)
    if (problem := _problem(made, snapshot.keda_hpa)) is not None:
        return problem
    hpa = _hpa_of(snapshot)
    text = f"{kind} {name} scales {bounds}{_without_value(hpa)}{_limit(hpa)}{_no_zero(scaling, snapshot)}"
    return ConditionState(TRUE, "Scaling", text)


def _problem(made: Object, keda_hpa: Object | None) -> ConditionState | None:
    """What the scaler itself reports to be wrong."""
    name = made["metadata"]["name"]
    if made["kind"] == SCALED_OBJECT:
        ready = condition(made, "Ready")
        if ready.get("status") == FALSE:
            text = f"ScaledObject {name}: {text_at(ready, 'message')}"
            return ConditionState(FALSE, text_at(ready, "reason") or "NotReady", text)
        if condition(made, "Fallback").get("status") == TRUE:
            text = f"ScaledObject {name} has no metrics and uses its fallback: "
            return ConditionState(FALSE, "Fallback", text + text_at(condition(made, "Fallback"), "message"))
        if not ready:
            return ConditionState(UNKNOWN, "Starting", f"ScaledObject {name} was not seen by KEDA yet")
    hpa = made if made["kind"] == HPA else keda_hpa
    for type_ in ("AbleToScale", "ScalingActive"):
        found = condition(hpa, type_)
        if found.get("status") == FALSE:
            text = f"HorizontalPodAutoscaler {name}, {type_}: {text_at(found, 'message')}"
            return ConditionState(FALSE, text_at(found, "reason") or type_, text)
    if not condition(hpa, "ScalingActive"):
        return ConditionState(UNKNOWN, "Starting", f"HorizontalPodAutoscaler {name} has no decision yet")
    return None


def _no_zero(scaling: Autoscaling, snapshot: Snapshot) -> str:
    if scaling.provider is not Provider.HPA or scaling.min_replicas > 0 or not snapshot.no_zero:
        return ""
    return f"; the HPA has 1 as minReplicas, because the API server refuses 0: {snapshot.no_zero}"


def _without_value(hpa: Object | None) -> str:
    names = clean(", ".join(without_value(hpa)), 512)
    if hpa is None or not names:
        return ""
    how = f"kubectl describe hpa {hpa['metadata']['name']}"
    return f"; it gets no value of {names} and decides by its other metrics: `{how}` has the cause"


def _limit(hpa: Object | None) -> str:
    limited = condition(hpa, "ScalingLimited")
    if limited.get("status") != TRUE or limited.get("reason") != "TooManyReplicas":
        return ""
    return f"; more are needed: {text_at(limited, 'message')}"


def _hpa_of(snapshot: Snapshot) -> Object | None:
    made = scaler_in(snapshot)
    return made if made is not None and made["kind"] == HPA else snapshot.keda_hpa


def _origin(observed: Observed, hpa: Object | None, before: int | None) -> int | None:
    """From how many replicas the HPA goes. before: what it wanted before; None if this is its first decision.

    The HPA may have made its next decision before its first one is seen. Then the status knows the replicas before.
    """
    if before is not None:
        return before
    desired, current = desired_replicas(hpa), current_replicas(hpa)
    if current is not None and current != desired:
        return current
    known = decimal(at(observed.subject.status, "desiredReplicas"))
    return desired if known is None else known


def scaling_json(observed: Observed, now: str) -> Object | None:
    """`status.autoscaling`; None without autoscaling."""
    spec = observed.subject.spec
    if spec is None or (scaling := spec.workload.autoscaling) is None:
        return None
    hpa = _hpa_of(observed.subject.snapshot)
    old = at(observed.subject.status, "autoscaling")
    before, desired = decimal(at(old, "desiredReplicas")), desired_replicas(hpa)
    decision = clean(text_at(old, "lastDecision"), 512)
    if desired is not None and desired != before:
        values = metrics_text(hpa)
        change = f"{desired}" if (origin := _origin(observed, hpa, before)) == desired else f"{origin} -> {desired}"
        decision = f"{change}: {values}" if values else change
    found = {
        "desiredReplicas": before if desired is None else desired,
        "lastDecision": decision or None,
        "idle": idle_json(observed.subject.snapshot.idle, scaling, now),
        "lastScaleTime": last_scaled(hpa) or moment_at(old, "lastScaleTime"),
    }
    return {name: value for name, value in found.items() if value is not None} or None
