"""AutoscalingActive, `status.autoscaling`, and the numbers of replicas that are reported while others set them."""

from dataclasses import replace
from typing import Any

import pytest

from halimede_operator.core.snapshot import Idle
from halimede_operator.core.spec.types import Autoscaling, Provider, ScaleToZero, Workload, ZeroBy
from support.operator_pods import deployment, serving, snapshot
from support.operator_specs import model_key, model_spec
from support.operator_status import LATER, NOW, message, status_for

SCALING = Autoscaling(max_replicas=8)


def spec(scaling: Autoscaling | None = SCALING, **fields: Any) -> Any:
    return model_spec(workload=Workload(replicas=3, autoscaling=scaling, **fields))


def hpa(*conditions: tuple[str, str, str, str], kind: str = "HorizontalPodAutoscaler", **status: Any) -> Any:
    listed = [
        {"type": type_, "status": state, "reason": reason, "message": text} for type_, state, reason, text in conditions
    ]
    metric = {"metric": {"name": "halimede_queue_requests"}}
    target = {"type": "AverageValue", "averageValue": "4"}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": kind,
        "metadata": {"name": "bert", "namespace": "prod"},
        "spec": {"metrics": [{"type": "Pods", "pods": {**metric, "target": target}}]},
        "status": {"conditions": listed, **status},
    }


WORKS = ("ScalingActive", "True", "ValidMetricFound", "it computed a replica count")


def seen(*scalers: Any, replicas: int = 2, **fields: Any) -> Any:
    pods = (serving("bert-1-a"), serving("bert-1-b"))[:replicas]
    found = snapshot(model_key(), *pods, child=deployment(replicas), **fields)
    return replace(found, children=(*found.children, *scalers))


def active(status: Any) -> tuple[str, str]:
    found = [each for each in status["conditions"] if each["type"] == "AutoscalingActive"]
    return (found[0]["status"], found[0]["reason"]) if found else ("", "")


def test_present_number_is_the_desired_one():
    status = status_for(seen(hpa(WORKS)), spec())
    assert status["desiredReplicas"] == 2
    assert message(status) == "2/2 replicas serving version 1"
    assert active(status) == ("True", "Scaling")
    text = "HorizontalPodAutoscaler bert scales from 1 to 8 replicas; spec.replicas is not applied"
    assert message(status, "AutoscalingActive") == text


def test_without_autoscaling_there_is_no_condition():
    status = status_for(seen(), spec(None))
    assert active(status) == ("", "")
    assert "autoscaling" not in status


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        (("ScalingActive", "False", "FailedGetPodsMetric", "no metrics"), "FailedGetPodsMetric"),
        (("ScalingActive", "False", "AmbiguousSelector", "two of them"), "AmbiguousSelector"),
        (("AbleToScale", "False", "FailedGetScale", "forbidden"), "FailedGetScale"),
    ],
)
def test_problem_of_the_hpa_is_quoted(condition, reason):
    status = status_for(seen(hpa(WORKS, condition) if condition[0] != "ScalingActive" else hpa(condition)), spec())
    assert active(status) == ("False", reason)
    assert message(status, "AutoscalingActive") == f"HorizontalPodAutoscaler bert, {condition[0]}: {condition[3]}"


def test_metric_without_a_value_is_named_while_the_hpa_decides_by_the_others():
    """The controller reports it by an event only: ScalingActive stays True."""
    made = hpa(WORKS, desiredReplicas=2, currentMetrics=[*current("4"), {"type": ""}])
    made["spec"]["metrics"].append({"type": "Pods", "pods": {"metric": {"name": "halimede_instance_busy_ratio"}}})
    status = status_for(seen(made), spec())
    assert active(status) == ("True", "Scaling")
    assert message(status, "AutoscalingActive") == (
        "HorizontalPodAutoscaler bert scales from 1 to 8 replicas; spec.replicas is not applied; it gets no value of "
        "halimede_instance_busy_ratio and decides by its other metrics: `kubectl describe hpa bert` has the cause"
    )
    for known in ([*current("4"), *current("1")], [], current("4")):
        made["status"]["currentMetrics"] = known
        assert "no value" not in message(status_for(seen(made), spec()), "AutoscalingActive"), known


def test_limit_is_told_only_if_more_are_needed():
    few = ("ScalingLimited", "True", "TooFewReplicas", "less than the minimum")
    many = ("ScalingLimited", "True", "TooManyReplicas", "more than the maximum")
    assert "minimum" not in message(status_for(seen(hpa(WORKS, few)), spec()), "AutoscalingActive")
    assert message(status_for(seen(hpa(WORKS, many)), spec()), "AutoscalingActive").endswith(
        "; more are needed: more than the maximum"
    )


@pytest.mark.parametrize(
    ("scalers", "wanted", "fields", "state"),
    [
        ((), spec(), {}, ("False", "NoScaler")),
        ((hpa(),), spec(), {}, ("Unknown", "Starting")),
        ((hpa(WORKS),), spec(None), {}, ("False", "HandingOver")),
        ((hpa(kind="ScaledObject"),), spec(), {}, ("False", "HandingOver")),
        ((hpa(WORKS),), spec(replace(SCALING, provider=Provider.KEDA)), {}, ("False", "HandingOver")),
        ((), spec(replace(SCALING, provider=Provider.EXTERNAL)), {}, ("Unknown", "External")),
        ((), spec(suspend=True), {}, ("False", "Suspended")),
        ((hpa(WORKS),), spec(), {"replicas": 0}, ("False", "ScaledToZero")),
        ((), spec(replace(SCALING, provider=Provider.KEDA)), {"unavailable": {"ScaledObject": "no KEDA"}},
         ("False", "FeatureUnavailable")),
    ],
)  # fmt: skip
def test_why_nothing_is_scaled(scalers, wanted, fields, state):
    assert active(status_for(seen(*scalers, **fields), wanted)) == state


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ((), ("Unknown", "Starting")),
        ((("Ready", "False", "ScaledObjectCheckFailed", "no such trigger"),), ("False", "ScaledObjectCheckFailed")),
        ((("Ready", "True", "", ""), ("Fallback", "True", "FallbackExists", "")), ("False", "Fallback")),
    ],
)
def test_scaled_object_tells_what_is_wrong(conditions, state):
    made = hpa(*conditions, kind="ScaledObject")
    assert active(status_for(seen(made), spec(replace(SCALING, provider=Provider.KEDA)))) == state


def test_scaled_object_with_the_hpa_of_keda_scales():
    made = hpa(("Ready", "True", "", ""), kind="ScaledObject")
    found = replace(seen(made), keda_hpa=hpa(WORKS, desiredReplicas=2))
    status = status_for(found, spec(replace(SCALING, provider=Provider.KEDA)))
    assert active(status) == ("True", "Scaling")
    assert status["autoscaling"] == {
        "desiredReplicas": 2,
        "lastDecision": "2",
    }


def current(value: str) -> Any:
    return [
        {"type": "Pods", "pods": {"metric": {"name": "halimede_queue_requests"}, "current": {"averageValue": value}}}
    ]


def test_decision_has_the_values_that_it_was_made_from():
    first = status_for(seen(hpa(WORKS, desiredReplicas=2, currentMetrics=current("7"))), spec())
    assert first["autoscaling"]["lastDecision"] == "2: halimede_queue_requests 7 of 4"
    same = hpa(WORKS, desiredReplicas=2, currentMetrics=current("3900m"))
    assert status_for(seen(same, status=first), spec(), now=LATER)["autoscaling"] == first["autoscaling"]
    more = hpa(WORKS, desiredReplicas=5, currentMetrics=current("9500m"), lastScaleTime="2026-11-22T09:59:00Z")
    assert status_for(seen(more, status=first), spec(), now=LATER)["autoscaling"] == {
        "desiredReplicas": 5,
        "lastDecision": "2 -> 5: halimede_queue_requests 9.5 of 4",
        "lastScaleTime": "2026-11-22T09:59:00Z",
    }


@pytest.mark.parametrize(("current_replicas", "told"), [(1, "1 -> 3"), (3, "3"), (None, "3")])
def test_first_decision_names_the_replicas_before_it(current_replicas: int | None, told: str):
    made = hpa(WORKS, desiredReplicas=3, currentReplicas=current_replicas, currentMetrics=current("11"))
    status = status_for(seen(made), spec())
    assert status["autoscaling"]["lastDecision"] == f"{told}: halimede_queue_requests 11 of 4"


@pytest.mark.parametrize(("known", "told"), [(1, "1 -> 3"), (3, "3")])
def test_first_decision_that_is_over_names_the_known_replicas_before(known: int, told: str):
    """The HPA has decided again, and then has 3 of 3, before its first decision was seen."""
    made = hpa(WORKS, desiredReplicas=3, currentReplicas=3, currentMetrics=current("4"))
    status = status_for(seen(made, status={"desiredReplicas": known}), spec())
    assert status["autoscaling"]["lastDecision"] == f"{told}: halimede_queue_requests 4 of 4"


def test_an_hpa_that_never_had_a_value_has_decided_nothing():
    no_value = ("ScalingActive", "False", "FailedGetPodsMetric", "no value")
    status = status_for(seen(hpa(no_value, desiredReplicas=0, currentReplicas=1)), spec())
    assert "autoscaling" not in status
    asleep = status_for(seen(hpa(no_value, desiredReplicas=0, currentReplicas=0)), spec())
    assert asleep["autoscaling"]["desiredReplicas"] == 0


def test_how_to_wake_is_told():
    by_operator = replace(SCALING, scale_to_zero=ScaleToZero(600))
    by_hand = "kubectl scale deployment/bert --replicas=1"
    status = status_for(seen(hpa(WORKS), replicas=0), spec(by_operator))
    for type_ in ("Ready", "AutoscalingActive"):
        assert by_hand in message(status, type_)
        assert "halimede.dev/wake" in message(status, type_)
    by_hpa = replace(SCALING, min_replicas=0, scale_to_zero=ScaleToZero(600, ZeroBy.HPA))
    status = status_for(seen(hpa(WORKS), replicas=0), spec(by_hpa))
    assert active(status) == ("True", "Scaling")
    assert "halimede.dev/wake" not in message(status)


def test_long_idleness_is_in_the_status():
    found = replace(seen(hpa(WORKS)), idle=Idle("2026-11-22T09:54:00Z", "x"))
    status = status_for(found, spec(replace(SCALING, scale_to_zero=ScaleToZero(600))), now=NOW)
    assert status["autoscaling"]["idle"] == {"since": "2026-11-22T09:54:00Z", "of": "x"}


def test_startup_of_a_known_pod_stays():
    first = status_for(seen(), spec(None))
    again = snapshot(model_key(), serving("bert-1-a"), serving("bert-1-b", since=50), child=deployment(2), status=first)
    assert status_for(again, spec(None), now=LATER)["startup"] == first["startup"]
    gone = snapshot(model_key(), child=deployment(2), status=first)
    assert status_for(gone, spec(None), now=LATER)["startup"] == first["startup"]
