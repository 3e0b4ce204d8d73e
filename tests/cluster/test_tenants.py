"""Namespaces and their users: a namespace being deleted, and the rights that authors of models do not have."""

import json
import time
from typing import Any

import pytest

from cluster.installed import NAMESPACE, Platform, Tenant
from cluster.models import (
    KINDS,
    START_LIMIT_S,
    TOKEN,
    Object,
    apply,
    model,
    ready,
    writes,
    writes_for,
)
from cluster.spaces import eventually


@pytest.mark.large
def test_a_namespace_being_deleted_is_left_alone(platform: Platform, tenant: Tenant, scaled: str) -> None:
    """O-42."""
    names = [f"twice-{n}" for n in range(5)]
    apply(tenant, *(model(name, scaled, replicas=0) for name in names))
    eventually(
        lambda: all(each.get("reason") == "ScaledToZero" for each in ready(tenant).values()),
        "all models to have a status",
    )
    before = writes_for(platform, tenant.namespace)
    held = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "held", "finalizers": ["example.com/held"]}}
    apply(tenant, held)
    tenant.kubectl("delete", "namespace", tenant.namespace, "--wait=false")
    try:
        everything = f"{KINDS},inferencemodels"
        eventually(lambda: tenant.names(everything) == {"configmap/held"}, "all other objects to be deleted")
        after = writes_for(platform, tenant.namespace)[len(before) :]
        time.sleep(5)  # nothing comes again
        assert writes_for(platform, tenant.namespace)[len(before) :] == after
        assert {code for *_, code in after} <= {403, 404}
        # The deletion of a child may be seen before that of the namespace, and then causes one attempt to restore it.
        assert len(after) <= 6 * len(names)
    finally:
        tenant.kubectl("patch", "configmap/held", "--type=merge", '--patch={"metadata":{"finalizers":null}}')


def test_authors_of_models_cannot_access_objects_of_others(platform: Platform, tenant: Tenant, scaled: str) -> None:
    """O-88."""
    cluster = platform.cluster
    rights = ("--resource=inferencemodels,modelensembles", "--verb=create,patch,get,list")
    tenant.kubectl("create", "serviceaccount", "author")
    tenant.kubectl("create", "role", "author", *rights)
    tenant.kubectl("create", "rolebinding", "author", "--role=author", f"--serviceaccount={tenant.namespace}:author")
    login = cluster.login(tenant.namespace, "author")
    keys = ("secret", "keys", f"--namespace={NAMESPACE}")
    cluster.kubectl("create", "secret", "generic", *keys[1:], f"--from-literal=TOKEN={TOKEN}")
    before = {namespace for namespace, _ in writes(platform)}

    def write(document: Object, namespace: str = tenant.namespace) -> str:
        try:
            return cluster.kubectl(
                f"--kubeconfig={login}", f"--namespace={namespace}", "apply", "-f", "-", given=json.dumps(document)
            )
        except AssertionError as refusal:
            return str(refusal)

    def secret(name: str) -> Object:
        return {"model": {"uri": "https://example.com/model.onnx", "credentials": {"secretRef": {"name": name}}}}

    def pod(**spec: Any) -> Object:
        return {"model": {"uri": scaled}, "podTemplate": {"spec": spec}}

    claimed = {"model": {"uri": scaled}, "serviceAccountName": "halimede"}
    token = {"serviceAccountToken": {"path": "token"}}
    node = [{"name": "node", "hostPath": {"path": "/var/lib/kubelet"}}]
    attempts: dict[str, tuple[Object, str]] = {
        "path": (secret(f"../{NAMESPACE}/keys"), "secretRef"),
        "elsewhere": (secret(f"{NAMESPACE}/keys"), "secretRef"),
        "files": ({"model": {"uri": "file:///var/lib/kubelet/pods"}}, "InvalidSpec"),
        "node": (pod(volumes=node), "InvalidSpec"),
        "network": (pod(hostNetwork=True), "InvalidSpec"),
        "another": (pod(serviceAccountName="halimede"), "InvalidSpec"),
        "root": (pod(securityContext={"runAsUser": 0}), "InvalidSpec"),
        "keys": (secret("keys"), "SecretMissing"),
        "account": (claimed, "PodsRefused"),
        "token": (
            pod(volumes=[{"name": "token", "projected": {"sources": [token]}}]) | {"replicas": 0},
            "ScaledToZero",
        ),
    }
    refused = {name: write({**model(name, ""), "spec": spec}) for name, (spec, _) in attempts.items()}
    assert "cannot" in write(model("mine", scaled), NAMESPACE)

    def found_reasons() -> dict[str, str]:
        found = {name: condition.get("reason", "") for name, condition in ready(tenant).items()}
        return {
            name: found[name] if name in found else "secretRef" if "secretRef" in refused[name] else refused[name]
            for name in attempts
        }

    try:
        expected = {name: reason for name, (_, reason) in attempts.items()}
        try:
            eventually(lambda: found_reasons() == expected, "all to be refused", START_LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{found_reasons()}") from None
        # The ServiceAccounts of pods that may run have no rights at all.
        for account in ("keys", "token"):
            who = f"--as=system:serviceaccount:{tenant.namespace}:{account}"
            for right in (("get", "secrets"), ("list", "inferencemodels"), ("create", "pods")):
                assert may(tenant, *right, who) == "no"
        assert {each["spec"]["serviceAccountName"] for each in tenant.get("pods")["items"]} == {"keys"}
        assert TOKEN not in tenant.kubectl("get", "im,pods,events,configmaps", "-o", "yaml")
        assert {namespace for namespace, _ in writes(platform)} - before == {tenant.namespace}
        # Users who may create models in the operator's namespace cannot use its ServiceAccount either.
        there = Tenant(cluster, NAMESPACE)
        there.apply(json.dumps({**model("claimed", ""), "spec": {**claimed, "replicas": 0}}))
        assert "operator's own ServiceAccount" in there.wait_for_reason("im/claimed", "InvalidSpec")
    finally:
        cluster.kubectl("delete", *keys)
        cluster.kubectl("delete", "im", "--all", f"--namespace={NAMESPACE}")


def may(tenant: Tenant, *what: str) -> str:
    try:
        return tenant.kubectl("auth", "can-i", *what).strip()
    except AssertionError as refusal:
        # kubectl also reports "no" by its exit status.
        return str(refusal).split("\n")[1]
