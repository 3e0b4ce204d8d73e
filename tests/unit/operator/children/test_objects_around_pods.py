"""The children other than pods, and when each one exists."""

import json
from dataclasses import replace
from typing import Any

import pytest

from halimede_operator.core.names import canonical_json, hash_of
from halimede_operator.core.spec.types import Rollout, RolloutPolicy, Serving
from support.operator_children import Object, children_of
from support.operator_desired import children_of_spec
from support.operator_specs import (
    PLATFORM,
    UID,
    ensemble_key,
    members_of,
    model_key,
    model_spec,
    search_spec,
    workload,
)

OWNER = {
    "apiVersion": "halimede.dev/v1alpha1",
    "kind": "InferenceModel",
    "name": "bert",
    "uid": UID,
    "controller": True,
    "blockOwnerDeletion": True,
}
SELECTOR = {"halimede.dev/model": "bert"}


def children(**fields: Any) -> dict[str, Object]:
    return children_of(model_spec(workload=workload(**fields)))


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, "ConfigMap ServiceAccount Service Service Deployment"),
        ({"service_account_name": "mine"}, "ConfigMap Service Service Deployment"),
        ({"network_policy": True}, "ConfigMap ServiceAccount Service Service NetworkPolicy Deployment"),
        ({"replicas": 2}, "ConfigMap ServiceAccount Service Service Deployment PodDisruptionBudget"),
        ({"replicas": 2, "suspend": True}, "ConfigMap ServiceAccount Service Service Deployment PodDisruptionBudget"),
        ({"replicas": 2, "max_unavailable": None}, "ConfigMap ServiceAccount Service Service Deployment"),
    ],
)
def test_which_children_are_built_in_which_order(fields: Any, kinds: str) -> None:
    made = children_of_spec(model_key(), UID, model_spec(workload=workload(**fields)), {}, PLATFORM)

    assert " ".join(child["kind"] for child in made) == kinds


def test_every_child_has_labels_owner_and_hash() -> None:
    for child in children(replicas=2, network_policy=True).values():
        metadata = child["metadata"]
        assert metadata["namespace"] == "prod"
        assert metadata["ownerReferences"] == [OWNER]
        assert metadata["labels"] == {
            "app.kubernetes.io/name": "inference-server",
            "app.kubernetes.io/instance": "bert",
            "app.kubernetes.io/component": "predictor",
            "app.kubernetes.io/managed-by": "halimede-operator",
            "app.kubernetes.io/part-of": "halimede",
            "halimede.dev/model": "bert",
            "halimede.dev/track": "stable",
        }
        assert len(metadata["annotations"]["halimede.dev/applied-hash"]) == 16


def test_an_ensembles_children_have_a_label_of_their_own() -> None:
    made = children_of(search_spec(workload=workload(replicas=2)), members_of("tok", "pool"))

    assert {child["metadata"]["labels"]["halimede.dev/ensemble"] for child in made.values()} == {"search"}
    assert not any("halimede.dev/model" in child["metadata"]["labels"] for child in made.values())
    assert made["Service/search"]["spec"]["selector"] == {"halimede.dev/ensemble": "search"}
    assert made["Deployment"]["metadata"]["ownerReferences"][0]["kind"] == "ModelEnsemble"
    assert ensemble_key().name == "search"


def test_the_config_map_is_named_by_its_content() -> None:
    made = children()
    config_map, template = made["ConfigMap"], made["Deployment"]["spec"]["template"]

    plan, stored = (config_map["data"][name] for name in ("plan.json", "pod-template.json"))
    assert config_map["immutable"] is True
    assert config_map["metadata"]["name"] == f"bert-config-{hash_of(canonical_json([plan, stored]))}"
    revision = template["metadata"]["labels"].pop("halimede.dev/revision")
    assert config_map["metadata"]["name"] == f"bert-config-{revision}"
    assert json.loads(stored.replace("<this ConfigMap>", config_map["metadata"]["name"])) == template
    assert json.loads(plan) == {
        "models": [{"name": "bert", "uri": "s3://models/bert"}],
        "stores": {"s3": {"endpoint": "https://store.example"}},
    }


def test_the_account_has_no_token() -> None:
    account = children()["ServiceAccount"]

    assert account["metadata"]["name"] == "bert"
    assert account["automountServiceAccountToken"] is False


def test_the_services() -> None:
    http = {"name": "http", "port": 8000, "targetPort": "http", "protocol": "TCP"}
    grpc = {"name": "grpc", "port": 8001, "targetPort": "grpc", "protocol": "TCP", "appProtocol": "kubernetes.io/h2c"}
    metrics = {"name": "metrics", "port": 8002, "targetPort": "metrics", "protocol": "TCP"}

    assert children()["Service/bert"]["spec"] == {"type": "ClusterIP", "ports": [http, grpc], "selector": SELECTOR}
    assert children()["Service/bert-pods"]["spec"] == {
        "type": "ClusterIP",
        "clusterIP": "None",
        "ports": [http, grpc, metrics],
        "selector": SELECTOR,
    }
    only_grpc = children(serving=Serving(http=False))
    assert only_grpc["Service/bert"]["spec"]["ports"] == [grpc]
    assert only_grpc["Service/bert-pods"]["spec"]["ports"] == [grpc, metrics]
    assert children(serving=Serving(grpc=False))["Service/bert"]["spec"]["ports"] == [http]


def test_the_deployment_around_the_pods() -> None:
    made = children(replicas=3)["Deployment"]

    template = made["spec"].pop("template")
    assert template["metadata"]["labels"].items() >= {**SELECTOR, "halimede.dev/track": "stable"}.items()
    assert len(made["metadata"]["annotations"]["halimede.dev/template-hash"]) == 32
    assert made["spec"] == {
        "replicas": 3,
        "selector": {"matchLabels": {**SELECTOR, "halimede.dev/track": "stable"}},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "revisionHistoryLimit": 2,
        "progressDeadlineSeconds": 600,
    }


@pytest.mark.parametrize(
    ("policy", "strategy"),
    [
        (RolloutPolicy.SURGE, {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}),
        (RolloutPolicy.IN_PLACE, {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}),
        (RolloutPolicy.RECREATE, {"type": "Recreate"}),
    ],
)
def test_a_rollout_policy_becomes_the_strategy_and_rolls_no_pods(policy: RolloutPolicy, strategy: Object) -> None:
    plain, made = (children(rollout=Rollout(each))["Deployment"] for each in (RolloutPolicy.SURGE, policy))

    assert made["spec"]["strategy"] == strategy
    assert made["spec"]["template"] == plain["spec"]["template"]


def test_the_progress_deadline_is_the_startup_probes_too() -> None:
    made = children(rollout=Rollout(progress_seconds=42))["Deployment"]["spec"]

    probe = made["template"]["spec"]["containers"][0]["startupProbe"]
    assert made["progressDeadlineSeconds"] == 42
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (1, 42)


def test_a_rollout_is_paused_by_the_spec_or_left_to_others() -> None:
    assert children(rollout=Rollout(paused=True))["Deployment"]["spec"]["paused"] is True
    assert "paused" not in children()["Deployment"]["spec"]


def test_a_suspended_object_has_zero_replicas() -> None:
    assert children(replicas=3, suspend=True)["Deployment"]["spec"]["replicas"] == 0
    assert children(replicas=0)["Deployment"]["spec"]["replicas"] == 0


@pytest.mark.parametrize("max_unavailable", [1, 0, "25%"])
def test_the_disruption_budget(max_unavailable: int | str) -> None:
    assert children(replicas=2, max_unavailable=max_unavailable)["PodDisruptionBudget"]["spec"] == {
        "maxUnavailable": max_unavailable,
        "selector": {"matchLabels": SELECTOR},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


def test_the_network_policy_admits_operator_collectors_and_named_peers() -> None:
    operator = {
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "halimede"}}}],
        "ports": [{"port": 8000, "protocol": "TCP"}],
    }
    peer = {"podSelector": {}}

    assert children(network_policy=True)["NetworkPolicy"]["spec"] == {
        "podSelector": {"matchLabels": SELECTOR},
        "policyTypes": ["Ingress"],
        "ingress": [operator],
    }
    collector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    platform = replace(PLATFORM, metrics_collectors=(collector,))
    made = children_of(model_spec(workload=workload(network_policy=True)), platform=platform)
    assert made["NetworkPolicy"]["spec"]["ingress"] == [
        operator,
        {"from": [collector], "ports": [{"port": 8002, "protocol": "TCP"}]},
    ]
    only_grpc = children(network_policy=True, allow_from=(peer,), serving=Serving(http=False))
    assert only_grpc["NetworkPolicy"]["spec"]["ingress"] == [
        operator,
        {"from": [peer], "ports": [{"port": 8001, "protocol": "TCP"}, {"port": 8002, "protocol": "TCP"}]},
    ]
