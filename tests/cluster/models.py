"""InferenceModels in tests of a whole cluster: creation, state, and the operator's writes."""

import json
from typing import Any

from cluster.installed import NAMESPACE, Platform, Tenant

SECONDS_TO_REPORT = 10.0
"""Time limit from a pod's failure to the condition of its object."""
START_LIMIT_S = 120.0
KINDS = "deployments,services,configmaps,serviceaccounts,poddisruptionbudgets,replicasets,pods"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:halimede"
TOKEN = "secret-token"
QUESTION = {"IN": ("FP32", [1, 4], [1, 2, 3, 4])}
Object = dict[str, Any]


def model(name: str, uri: str, **fields: Any) -> Object:
    return {
        "apiVersion": "halimede.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": name},
        "spec": {"model": {"uri": uri}, **fields},
    }


def apply(tenant: Tenant, *documents: Object) -> None:
    tenant.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))


def running(code: str) -> Object:
    """A podTemplate whose server container runs this Python code instead of the server: a program of its name, found
    first. A command cannot be set."""
    program = {"path": "halimede", "mode": 0o555, "fieldRef": {"fieldPath": "metadata.annotations['example.com/code']"}}
    container = {
        "name": "server",
        "env": [{"name": "PATH", "value": "/opt/played:/opt/halimede/bin:/usr/local/bin:/usr/bin:/bin"}],
        "volumeMounts": [{"name": "played", "mountPath": "/opt/played"}],
    }
    return {
        "metadata": {"annotations": {"example.com/code": f"#!/opt/halimede/bin/python -IS\n{code}"}},
        "spec": {"containers": [container], "volumes": [{"name": "played", "downwardAPI": {"items": [program]}}]},
    }


def writes_for(platform: Platform, namespace: str) -> list[tuple[str, str, int]]:
    """The operator's writes in a namespace: verb, resource, HTTP status. Without statuses and events, and without what
    wakes others: the controller of refused pods, and the kubelets of pods that lack a Secret."""
    return [
        (event["verb"], event["objectRef"]["resource"], event["responseStatus"]["code"])
        for event in platform.cluster.audit_events(containing=OPERATOR)
        if event["user"]["username"] == OPERATOR
        and event["verb"] in ("create", "update", "patch", "delete")
        and event["objectRef"].get("namespace") == namespace
        and event["objectRef"].get("subresource") != "status"
        and event["objectRef"]["resource"] not in ("events", "pods", "replicasets")
    ]


def reports_a_failure(pod: Object) -> bool:
    """Whether the pod's status has a failure of the scheduler or the kubelet."""
    status = pod.get("status", {})
    if any((c["type"], c["status"]) == ("PodScheduled", "False") for c in status.get("conditions", ())):
        return True
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        ended = (container["state"].get("terminated"), container.get("lastState", {}).get("terminated"))
        if any(each and each["exitCode"] for each in ended):
            return True
        waits_for = container["state"].get("waiting", {}).get("reason")
        if waits_for in ("ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError"):
            return True
    return False


def pods_without_volumes(tenant: Tenant) -> set[str]:
    """The uids of pods that have a kubelet's event FailedMount."""
    return {
        each["involvedObject"]["uid"] for each in tenant.get("events", "--field-selector=reason=FailedMount")["items"]
    }


def ready(tenant: Tenant) -> dict[str, Object]:
    """The condition Ready of each model of the namespace."""
    found = tenant.get("inferencemodels")["items"]
    conditions = ((each, each.get("status", {}).get("conditions", ())) for each in found)
    return {
        each["metadata"]["name"]: next((c for c in listed if c["type"] == "Ready"), {}) for each, listed in conditions
    }


def holding(kind: str, name: str, **data: Object) -> Object:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **data}


def restarts(tenant: Tenant, name: str) -> int:
    (pod,) = tenant.get("pods", f"--selector=halimede.dev/model={name}")["items"]
    return sum(each["restartCount"] for each in pod["status"]["containerStatuses"])


def writes(platform: Platform) -> list[tuple[str, str]]:
    """Namespace and resource of all writes of the operator."""
    return [
        (event["objectRef"].get("namespace", ""), event["objectRef"]["resource"])
        for event in platform.cluster.audit_events(containing=OPERATOR)
        if event["user"]["username"] == OPERATOR and event["verb"] in ("create", "update", "patch", "delete")
    ]
