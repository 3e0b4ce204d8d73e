"""The HPA and the ScaledObject of a spec."""

from typing import Any

import pytest

from halimede_operator.core.children.autoscaler import scaler
from halimede_operator.core.children.diff import diff
from halimede_operator.core.scaling.presets import BEHAVIOR
from halimede_operator.core.spec.types import Autoscaling, Preset, Provider, ScaleToZero, Workload, ZeroBy
from support.operator_children import children_of
from support.operator_specs import UID, model_key, model_spec
from support.operator_store import stored

TARGET = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "bert"}


def spec_of(**fields: Any) -> Any:
    made = scaler(model_key(), UID, Autoscaling(**{"max_replicas": 8, **fields}))
    assert made is not None
    return made["spec"]


def keda(**fields: Any) -> Any:
    return spec_of(provider=Provider.KEDA, prometheus_address="http://prometheus:9090", **fields)


def test_hpa_of_a_preset():
    made = spec_of(preset=Preset.GPU, target="600m", min_replicas=2)
    assert made == {
        "scaleTargetRef": TARGET,
        "minReplicas": 2,
        "maxReplicas": 8,
        "metrics": [
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": "halimede_instance_busy_ratio"},
                    "target": {"type": "AverageValue", "averageValue": "600m"},
                },
            }
        ],
        "behavior": BEHAVIOR,
    }


def test_metrics_and_behavior_are_passed_on():
    metric = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization"}}}
    behavior = {"scaleUp": {"selectPolicy": "Min"}}
    made = spec_of(preset=None, metrics=(metric,), behavior=behavior)
    assert (made["metrics"], made["behavior"]) == ([metric], behavior)
    assert "behavior" not in spec_of(preset=None, metrics=(metric,)), "of metrics of one's own it is Kubernetes'"


def test_zero_by_the_hpa_needs_metrics_without_pods():
    zero = ScaleToZero(900, ZeroBy.HPA)
    made = spec_of(min_replicas=0, scale_to_zero=zero)
    assert made["minReplicas"] == 0
    assert {metric["type"] for metric in made["metrics"]} == {"Object"}
    assert made["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 900
    refused = scaler(
        model_key(), UID, Autoscaling(max_replicas=8, min_replicas=0, scale_to_zero=zero), may_be_zero=False
    )
    assert refused is not None
    assert refused["spec"]["minReplicas"] == 1


def test_scaled_object_of_a_preset():
    made = keda(prometheus_authentication="prom-auth")
    assert (made["minReplicaCount"], made["maxReplicaCount"]) == (1, 8)
    assert made["fallback"] == {"failureThreshold": 3, "replicas": 1, "behavior": "currentReplicasIfHigher"}
    assert made["advanced"] == {
        "restoreToOriginalReplicaCount": False,
        "horizontalPodAutoscalerConfig": {"name": "bert", "behavior": BEHAVIOR},
    }
    assert [trigger["name"] for trigger in made["triggers"]] == [
        "halimede_queue_requests",
        "halimede_instance_busy_ratio",
    ]
    for trigger in made["triggers"]:
        assert trigger["authenticationRef"] == {"name": "prom-auth"}
        assert trigger["metadata"]["serverAddress"] == "http://prometheus:9090"
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        assert 'namespace="prod",inferencemodel="bert"' in trigger["metadata"]["query"]


@pytest.mark.parametrize(
    ("target", "threshold"), [("4", "4"), ("700m", "0.7"), ("1.50", "1.5"), ("2k", "2000"), ("1e3", "1000")]
)
def test_thresholds_of_keda_are_numbers_without_units(target, threshold):
    first, busy = keda(target=target)["triggers"]
    assert (first["metadata"]["threshold"], busy["metadata"]["threshold"]) == (threshold, "0.8")


def test_keda_takes_the_last_pod_only_from_an_unused_object():
    made = keda(preset=Preset.CONCURRENCY, min_replicas=0, scale_to_zero=ScaleToZero(600, ZeroBy.KEDA))
    assert (made["minReplicaCount"], made["cooldownPeriod"]) == (0, 600)
    # Without pods there are no samples: a fallback would start some.
    assert "fallback" not in made
    assert [trigger["name"] for trigger in made["triggers"]] == [
        "halimede_inflight_requests",
        "halimede_instance_busy_ratio",
        "halimede_sequences_open",
    ]
    several = keda(min_replicas=3, scale_to_zero=ScaleToZero(600, ZeroBy.KEDA))
    assert (several["minReplicaCount"], several["idleReplicaCount"]) == (3, 0)


def children(**fields: Any) -> dict[str, Any]:
    return dict(children_of(model_spec(workload=Workload(**fields))))


def test_budget_follows_max_replicas():
    assert "PodDisruptionBudget" in children(autoscaling=Autoscaling(max_replicas=2))
    assert "PodDisruptionBudget" not in children(autoscaling=Autoscaling(max_replicas=1), replicas=3)


def test_operator_may_read_the_metrics_of_pods_that_it_may_set_to_zero():
    def ports(scaling: Autoscaling) -> list[int]:
        made = children(network_policy=True, autoscaling=scaling)["NetworkPolicy"]
        return [port["port"] for port in made["spec"]["ingress"][0]["ports"]]

    assert ports(Autoscaling(max_replicas=2)) == [8000]
    assert ports(Autoscaling(max_replicas=2, scale_to_zero=ScaleToZero(600))) == [8000, 8002]


def test_suspended_object_has_no_scaler():
    assert "HorizontalPodAutoscaler" not in children(suspend=True, autoscaling=Autoscaling(max_replicas=2))


def test_quantities_in_another_notation_are_no_change():
    scaling = Autoscaling(max_replicas=4, target="0.5", preset=Preset.GPU)
    hpa = children(autoscaling=scaling)["HorizontalPodAutoscaler"]
    returned = stored(hpa)
    returned["spec"]["metrics"][0]["pods"]["target"]["averageValue"] = "500m"
    returned["spec"]["behavior"]["scaleUp"]["selectPolicy"] = "Max"
    assert diff([hpa], [returned], UID) == ()
    returned["spec"]["metrics"][0]["pods"]["target"]["averageValue"] = "600m"
    assert len(diff([hpa], [returned], UID)) == 1
