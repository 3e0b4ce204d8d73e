"""Pods in a namespace that enforces the `restricted` profile, in a real API server."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from cluster.access import Cluster
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import Kind
from support.custom_resources import model
from support.image import REPOSITORY_ROOT
from support.operator_children import pod_of
from support.operator_specs import PLATFORM

Json = dict[str, Any]

EXAMPLES = sorted((REPOSITORY_ROOT / "manifests" / "examples").glob("inferencemodel*.yaml"))
NODES_FOLDER = ["inferencemodel-cache"]
"""Examples with a folder of the node, which the profile forbids."""
OVERLAYS = 160
SEED = 20261128
CONTEXTS: tuple[Json, ...] = (
    {},
    {"privileged": False},
    {"privileged": True},
    {"allowPrivilegeEscalation": True},
    {"allowPrivilegeEscalation": False},
    {"capabilities": {}},
    {"capabilities": {"drop": ["ALL", "NET_RAW"]}},
    {"capabilities": {"drop": ["NET_RAW"]}},
    {"capabilities": {"add": ["NET_ADMIN"]}},
    {"runAsUser": 0},
    {"runAsUser": 1000, "runAsGroup": 0},
    {"runAsNonRoot": False},
    {"runAsNonRoot": True},
    {"procMount": "Unmasked"},
    {"readOnlyRootFilesystem": True},
    {"seccompProfile": {"type": "Unconfined"}},
    {"seccompProfile": {"type": "RuntimeDefault"}},
    {"appArmorProfile": {"type": "Unconfined"}},
    {"seLinuxOptions": {"type": "spc_t"}},
)
CALLS: tuple[Json, ...] = (
    {},
    {"livenessProbe": {"httpGet": {"path": "/", "port": 80}}},
    {"livenessProbe": {"httpGet": {"path": "/", "port": 80, "host": "10.0.0.1"}}},
    {"readinessProbe": {"tcpSocket": {"port": 80, "host": "10.0.0.1"}}},
    {"lifecycle": {"postStart": {"httpGet": {"path": "/", "port": 80, "host": "10.0.0.1"}}}},
    {"lifecycle": {"preStop": {"tcpSocket": {"port": 80, "host": "10.0.0.1"}}}},
    {"lifecycle": {"preStop": {"exec": {"command": ["true"]}}}},
)
VOLUMES: tuple[Json, ...] = (
    {"emptyDir": {}},
    {"hostPath": {"path": "/"}},
    {"nfs": {"server": "10.0.0.1", "path": "/"}},
    {"configMap": {"name": "a"}},
    {"secret": {"secretName": "a"}},
    {"image": {"reference": "example.com/files:1"}},
    {"csi": {"driver": "example.com"}},
    {"persistentVolumeClaim": {"claimName": "a"}},
    {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
    {
        "ephemeral": {
            "volumeClaimTemplate": {
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
            }
        }
    },
)
PODS: tuple[Json, ...] = (
    {"hostNetwork": True},
    {"hostPID": True},
    {"hostUsers": False},
    {"shareProcessNamespace": True},
    {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
    {"securityContext": {"fsGroup": 1000}},
)


def overlays() -> Iterator[Json]:
    """Overlays of two containers of our own, two added ones and a volume; about a third is allowed."""
    draws = random.Random(SEED)

    def container(name: str) -> Json:
        context = draws.choice(CONTEXTS) if draws.random() < 0.15 else {}
        calls = draws.choice(CALLS) if draws.random() < 0.15 and name != "fetch" else {}
        image = {} if name in ("server", "fetch") else {"image": "example.com/tool:1"}
        restart = {"restartPolicy": "Always"} if name == "first" else {}
        port = {"ports": [{"containerPort": 9000, "hostPort": 9000}]} if draws.random() < 0.02 else {}
        return {"name": name, **image, **restart, **calls, **port, **({"securityContext": context} if context else {})}

    for _ in range(OVERLAYS):
        pod = draws.choice(PODS) if draws.random() < 0.4 else {}
        security = draws.choice(CONTEXTS) if draws.random() < 0.1 else {}
        yield {
            **pod,
            **({"securityContext": security} if security and "securityContext" not in pod else {}),
            "containers": [container("server"), container("proxy")],
            "initContainers": [container("fetch"), container("first")],
            "volumes": [{"name": "extra", **draws.choice(VOLUMES)}],
        }


@pytest.fixture
def restricted(cluster: Cluster, namespace: str) -> str:
    """A namespace that enforces the profile."""
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    return namespace


@pytest.fixture
def pods(cluster: Cluster) -> Iterator[client.CoreV1Api]:
    with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
        yield client.CoreV1Api(connection)


def refusal(pods: client.CoreV1Api, namespace: str, spec: Json) -> str:
    """What the API server says against a pod; "" for nothing."""
    body = {"metadata": {"name": "pod"}, "spec": spec}
    try:
        pods.create_namespaced_pod(namespace, body, dry_run="All", field_validation="Strict")
    except client.ApiException as error:
        return str(json.loads(error.body or "")["message"])
    return ""


def pod_for(resource: Json) -> Json | None:
    """The pod of a model, without what must exist in the cluster; None if the operator refuses the model."""
    spec, _ = parse(Kind.INFERENCE_MODEL, resource, PLATFORM)
    if spec is None:
        return None
    left_out = ("serviceAccountName", "priorityClassName", "runtimeClassName")
    return {name: value for name, value in pod_of(spec).items() if name not in left_out}


def test_pods_of_all_overlays_satisfy_the_restricted_profile(pods: client.CoreV1Api, restricted: str) -> None:
    assert "violates PodSecurity" in refusal(pods, restricted, {"containers": [{"name": "a", "image": "a"}]})
    examples = {path.stem: pod_for(yaml.safe_load(path.read_text())) for path in EXAMPLES}
    assert examples["inferencemodel-pod-template"] is not None
    refused = {name: text for name, pod in examples.items() if pod and (text := refusal(pods, restricted, pod))}
    assert list(refused) == NODES_FOLDER, refused
    assert all('restricted volume types (volume "cache"' in text for text in refused.values())

    made = [pod_for(model(podTemplate={"spec": each})) for each in overlays()]
    accepted = [pod for pod in made if pod is not None]
    assert OVERLAYS / 4 < len(accepted) < OVERLAYS
    texts = [refusal(pods, restricted, pod) for pod in accepted]
    assert [text for text in texts if text] == []


def test_the_models_may_be_on_a_volume_of_another_kind(pods: client.CoreV1Api, restricted: str) -> None:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "9Gi"}}}
    volume = {"name": "models", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
    overlay = {"securityContext": {"fsGroup": 65532}, "volumes": [volume]}
    pod = pod_for(model(podTemplate={"spec": overlay}))
    assert pod is not None
    assert refusal(pods, restricted, pod) == ""
