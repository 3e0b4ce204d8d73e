"""What goes wrong around models, on real pods: what the objects say of it, and that nothing else suffers."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.control import ADDRESS
from cluster.faults import Faults
from cluster.gpus import Gpus, Layout
from cluster.installed import NAMESPACE, Platform, Tenant
from cluster.spaces import eventually, python
from support.models import add_scaled

SECONDS_TO_TELL = 10.0
"""Within which an object says what its pod says."""
START_LIMIT_S = 120.0
KINDS = "deployments,services,configmaps,serviceaccounts,poddisruptionbudgets,replicasets,pods"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:halimede"
REFUSING_PORT = 9001
HALF = "nvidia.com/mig-3g.40gb"
TOKEN = "what-nobody-is-to-see"
QUESTION = {"IN": ("FP32", [1, 4], [1, 2, 3, 4])}

Object = dict[str, Any]


@pytest.fixture
def scaled(platform: Platform, tmp_path: Path) -> str:
    """The URI of a model that doubles four numbers."""
    add_scaled(tmp_path, "twice", 2)
    return platform.store.put("twice", tmp_path / "twice")


@pytest.fixture
def tainted(platform: Platform) -> Iterator[str]:
    """A node that takes no more pods."""
    platform.cluster.kubectl("taint", "node", "node-2", "dedicated=others:NoSchedule")
    yield "node-2"
    platform.cluster.kubectl("taint", "node", "node-2", "dedicated-")


@pytest.fixture
def refusing(platform: Platform) -> Iterator[str]:
    """The URL of a store that lets nobody in."""
    space = platform.cluster.control.space
    program = space.start("refusing", *python("refusing_store", ADDRESS, REFUSING_PORT))
    yield f"http://{ADDRESS}:{REFUSING_PORT}"
    program.check()
    space.programs.pop("refusing").stop()


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
    """The server's container does something else."""
    container = {"name": "server", "command": ["python", "-IS", "-c", code], "args": [], "startupProbe": {}}
    return {"spec": {"containers": [container]}}


def written(platform: Platform, namespace: str) -> list[tuple[str, str, int]]:
    """What the operator has written in a namespace, but statuses and events: verb, resource, HTTP's answer."""
    return [
        (event["verb"], event["objectRef"]["resource"], event["responseStatus"]["code"])
        for event in platform.cluster.audit_events()
        if event["user"]["username"] == OPERATOR
        and event["verb"] in ("create", "update", "patch", "delete")
        and event["objectRef"].get("namespace") == namespace
        and event["objectRef"].get("subresource") != "status"
        and event["objectRef"]["resource"] != "events"
    ]


def in_trouble(pod: Object) -> bool:
    """The scheduler or the kubelet says so."""
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


def of_volumes(tenant: Tenant) -> set[str]:
    """The uids of pods of which a kubelet has said that it cannot mount something."""
    return {
        each["involvedObject"]["uid"] for each in tenant.get("events", "--field-selector=reason=FailedMount")["items"]
    }


def ready(tenant: Tenant) -> dict[str, Object]:
    """The condition of all models of the namespace."""
    found = tenant.get("inferencemodels")["items"]
    conditions = ((each, each.get("status", {}).get("conditions", ())) for each in found)
    return {
        each["metadata"]["name"]: next((c for c in listed if c["type"] == "Ready"), {}) for each, listed in conditions
    }


def test_every_model_says_what_is_wrong_with_it(
    platform: Platform, tenant: Tenant, scaled: str, tainted: str, refusing: str
) -> None:
    """O-40, O-60, O-61, O-62, O-65, O-86."""
    tenant.apply(json.dumps(model("serves", scaled)))
    keys = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": TOKEN, "AWS_SESSION_TOKEN": TOKEN}
    keys["AWS_ENDPOINT_URL"] = refusing
    quota = {"hard": {"requests.nvidia.com/mig-1g.10gb": "0"}}
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""}
    apply(
        tenant,
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": keys},
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": quota},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "unbound"}, "spec": claim},
    )
    tenant.wait_ready("im/serves", START_LIMIT_S)
    (old,) = tenant.names("pods")

    nowhere = {"reference": "localhost/nowhere:1"}
    memory = {"requests": {"memory": "128Mi"}, "limits": {"memory": "128Mi"}}
    on_tainted = {"nodeSelector": {"kubernetes.io/hostname": tainted}}
    denied = {"uri": "s3://models/denied", "credentials": {"secretRef": {"name": "keys"}}}
    absent = {"uri": scaled, "credentials": {"secretRef": {"name": "absent"}}}
    troubles: dict[str, tuple[Object, str, tuple[str, ...]]] = {
        "serves": (
            {"model": {"uri": scaled}, "image": nowhere},
            "ImagePullFailed",
            ("localhost/nowhere:1", "1 of the spec before"),
        ),
        "crashes": (
            {"model": {"uri": scaled}, "podTemplate": running("import sys; print('last words'); sys.exit(3)")},
            "CrashLoop",
            ("exited with code 3", "last words"),
        ),
        "greedy": (
            {"model": {"uri": scaled}, "podTemplate": running("bytearray(1 << 30)"), "resources": memory},
            "OutOfMemory",
            ("code 137", "spec.resources"),
        ),
        "tainted": ({"model": {"uri": scaled}, "scheduling": on_tainted}, "Unschedulable", ("untolerated taint",)),
        "gpu": (
            {"model": {"uri": scaled}, "accelerator": {"type": "GPU"}},
            "InsufficientDevices",
            ("nvidia.com/gpu", "The nodes have no such devices at all"),
        ),
        "quota": (
            {"model": {"uri": scaled}, "accelerator": {"type": "MIG", "mig": {"profile": "1g.10gb"}}},
            "QuotaExceeded",
            ("requests.nvidia.com/mig-1g.10gb",),
        ),
        "claim": ({"model": {"uri": "pvc://nowhere/twice"}}, "Unschedulable", ('"nowhere" not found',)),
        "unbound": ({"model": {"uri": "pvc://unbound/twice"}}, "Unschedulable", ("unbound",)),
        "denied": ({"model": denied}, "ModelFetchFailed", ("not allowed", "s3://models/denied", "403")),
        "other": (
            {"model": {"uri": scaled, "digest": f"sha256:{'0' * 64}"}},
            "ModelFetchFailed",
            ("digest mismatch", scaled),
        ),
        "secret": ({"model": absent}, "SecretMissing", ('secret "absent" not found',)),
    }  # fmt: skip
    apply(tenant, *({**model(name, ""), "spec": spec} for name, (spec, _, _) in troubles.items()))

    said: dict[str, Object] = {}
    pods_said: dict[str, float] = {}
    objects_said: dict[str, float] = {}

    def all_told() -> bool:
        troubled = of_volumes(tenant)
        for pod in tenant.get("pods")["items"]:
            if in_trouble(pod) or pod["metadata"]["uid"] in troubled:
                pods_said.setdefault(pod["metadata"]["labels"]["halimede.dev/model"], time.monotonic())
        said.update(ready(tenant))
        for name, (_, reason, words) in troubles.items():
            condition = said.get(name, {})
            if condition.get("reason") == reason and all(word in condition["message"] for word in words):
                objects_said.setdefault(name, time.monotonic())
        return objects_said.keys() == troubles.keys()

    try:
        eventually(all_told, "all to be told", START_LIMIT_S)
    except AssertionError as error:
        missing = {name: condition for name, condition in said.items() if name not in objects_said}
        raise AssertionError(f"{error}\n{json.dumps(missing, indent=1)}") from None
    # Whose object told before its pod was looked at is missing; of these no pod tells anything.
    assert pods_said.keys().isdisjoint({"quota"})
    late = {
        name: objects_said[name] - at for name, at in pods_said.items() if objects_said[name] > at + SECONDS_TO_TELL
    }
    assert late == {}

    # What served goes on.
    assert tenant.infer("serves", QUESTION) == {"OUT": [2, 4, 6, 8]}
    for kind in ("Available", "Degraded"):
        assert tenant.condition("im/serves", kind)["status"] == "True"
    # All that an author sees of what is secret is its name.
    assert TOKEN not in tenant.kubectl("get", "im,pods,events,configmaps", "-o", "yaml")

    # While pods are tried again and again, nothing new is told and nothing is made.
    pods, made = tenant.names("pods"), written(platform, tenant.namespace)
    tried = restarts(tenant, "crashes")
    eventually(lambda: restarts(tenant, "crashes") > tried, "another try", START_LIMIT_S)
    assert ready(tenant) == said
    assert (tenant.names("pods"), written(platform, tenant.namespace)) == (pods, made)

    tenant.apply(json.dumps(model("serves", scaled)))
    tenant.wait_ready("im/serves")
    assert old in tenant.names("pods")

    tenant.kubectl("delete", "im", "--all", "--timeout=60s")
    left = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
    eventually(lambda: tenant.names(KINDS) == left, "nothing to be left", START_LIMIT_S)


def test_what_a_pod_needs_and_is_not_there_is_told_until_it_is(platform: Platform, tenant: Tenant, scaled: str) -> None:
    """O-61."""
    credentials = {"secretRef": {"name": "keys"}, "caBundle": {"configMapName": "authorities", "key": "ca.crt"}}
    secret_key, map_key = {"name": "words", "key": "A"}, {"name": "settings", "key": "A"}
    # A kubelet looks for no volume that no container mounts.
    server = {"name": "server", "volumeMounts": [{"name": "license", "mountPath": "/run/license"}]}
    mounted = {"volumes": [{"name": "license", "secret": {"secretName": "license"}}], "containers": [server]}
    troubles: dict[str, tuple[Object, str, str]] = {
        "credentials": (
            {"model": {"uri": scaled, "credentials": {"secretRef": {"name": "keys"}}}},
            "SecretMissing",
            'secret "keys" not found',
        ),
        "bundle": (
            {"model": {"uri": scaled, "credentials": {**credentials, "secretRef": {"name": "there"}}}},
            "ConfigMapMissing",
            'configmap "authorities" not found',
        ),
        "variable": (
            {"model": {"uri": scaled}, "env": [{"name": "A", "valueFrom": {"secretKeyRef": secret_key}}]},
            "SecretMissing",
            'secret "words" not found',
        ),
        "setting": (
            {"model": {"uri": scaled}, "env": [{"name": "A", "valueFrom": {"configMapKeyRef": map_key}}]},
            "ConfigMapMissing",
            'configmap "settings" not found',
        ),
        "mounted": (
            {"model": {"uri": scaled}, "podTemplate": {"spec": mounted}},
            "SecretMissing",
            'secret "license" not found',
        ),
    }
    keys = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": TOKEN}
    authority = (platform.cluster.control.pki / "ca.crt").read_text()
    apply(tenant, _holding("Secret", "there", stringData=keys))
    apply(tenant, *({**model(name, ""), "spec": spec} for name, (spec, _, _) in troubles.items()))
    pods_said: dict[str, float] = {}
    objects_said: dict[str, float] = {}

    def all_told() -> bool:
        troubled = of_volumes(tenant)
        for pod in tenant.get("pods")["items"]:
            if in_trouble(pod) or pod["metadata"]["uid"] in troubled:
                pods_said.setdefault(pod["metadata"]["labels"]["halimede.dev/model"], time.monotonic())
        said = ready(tenant)
        for name, (_, reason, words) in troubles.items():
            if said[name].get("reason") == reason and words in said[name]["message"]:
                objects_said.setdefault(name, time.monotonic())
        return objects_said.keys() == troubles.keys()

    try:
        eventually(all_told, "all to be told", START_LIMIT_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{json.dumps(ready(tenant), indent=1)}") from None
    late = {
        name: objects_said[name] - at for name, at in pods_said.items() if objects_said[name] > at + SECONDS_TO_TELL
    }
    assert late == {}
    column = tenant.kubectl("get", "im/mounted")
    assert "SecretMissing" in column

    apply(
        tenant,
        _holding("Secret", "keys", stringData=keys),
        _holding("Secret", "words", stringData={"A": "B"}),
        _holding("Secret", "license", stringData={"A": "B"}),
        _holding("ConfigMap", "authorities", data={"ca.crt": authority}),
        _holding("ConfigMap", "settings", data={"A": "B"}),
    )
    for name in troubles:
        tenant.wait_ready(f"im/{name}", START_LIMIT_S)


def _holding(kind: str, name: str, **data: Object) -> Object:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **data}


def restarts(tenant: Tenant, name: str) -> int:
    (pod,) = tenant.get("pods", f"--selector=halimede.dev/model={name}")["items"]
    return sum(each["restartCount"] for each in pod["status"]["containerStatuses"])


def test_devices_and_a_node_that_go_are_told_and_made_up_for(
    platform: Platform, tenant: Tenant, gpus: Gpus, faults: Faults, scaled: str
) -> None:
    """O-63, O-64."""
    # The operator's own node stays.
    where = ("get", "pods", "--selector=app.kubernetes.io/name=halimede-operator", f"--namespace={NAMESPACE}")
    home = platform.cluster.kubectl(*where, "-o", "jsonpath={.items[0].spec.nodeName}")
    lost = "node-2" if home == "node-1" else "node-1"
    halves = Layout([["3g.40gb", "3g.40gb"]])
    gpus.install(home, halves)
    accelerator = {"type": "MIG", "mig": {"profile": "3g.40gb"}}
    apply(
        tenant,
        model("slice", scaled, accelerator=accelerator),
        model("moves", scaled, scheduling=rather_on(lost)),
    )
    tenant.wait_ready("im/slice", START_LIMIT_S)
    tenant.wait_ready("im/moves", START_LIMIT_S)
    assert nodes_of(tenant, "moves") == [lost]
    pods = tenant.names("pods")

    faults.cut_off(lost)
    # The device plugin ends and starts again.
    gpus.remove(home)
    gpus.install(home, halves)
    # A device breaks, and the server has not noticed.
    for device in gpus.devices(home, HALF):
        gpus.mark(home, device, healthy=False)
    begun = time.monotonic()
    eventually(lambda: tenant.condition("im/slice", "Degraded").get("reason") == "DeviceUnhealthy", "it to be told")
    assert time.monotonic() < begun + SECONDS_TO_TELL
    assert (tenant.names("pods"), tenant.condition("im/slice")["status"]) == (pods, "True")

    for device in gpus.devices(home, HALF):
        gpus.mark(home, device, healthy=True)
    eventually(lambda: tenant.condition("im/slice", "Degraded").get("status") == "False", "it to be over")

    # The card is partitioned anew under its pods, which Kubernetes lets run; they have to go.
    gpus.repartition(home, Layout([["1g.10gb", "1g.10gb"]]))
    begun = time.monotonic()
    eventually(lambda: tenant.condition("im/slice", "Degraded").get("reason") == "DeviceLost", "it to be told")
    assert time.monotonic() < begun + SECONDS_TO_TELL
    assert (tenant.names("pods"), tenant.condition("im/slice")["status"]) == (pods, "True")
    tenant.kubectl("delete", "pod", "--selector=halimede.dev/model=slice", "--wait=false")
    said = tenant.wait_for_reason("im/slice", "InsufficientDevices")
    assert f"No node has {HALF}. The nodes have in all: nvidia.com/mig-1g.10gb (2)" in said

    said = tenant.wait_for_reason("im/moves", "NodeLost")
    assert f"its node {lost} does not answer" in said
    gpus.repartition(home, halves)
    tenant.wait_ready("im/moves", START_LIMIT_S)
    tenant.wait_ready("im/slice", START_LIMIT_S)
    assert nodes_of(tenant, "moves") == [home]
    for name in ("moves", "slice"):
        assert tenant.infer(name, QUESTION) == {"OUT": [2, 4, 6, 8]}
    faults.rejoin(lost)
    eventually(lambda: len(tenant.names("pods")) == 2, "the pod there to go")


def rather_on(node: str) -> Object:
    """There while it is; it is waited for 8 s."""
    expressions = [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]
    term = {"weight": 100, "preference": {"matchExpressions": expressions}}
    patience = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 8}
    return {
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}},
        "tolerations": [{"key": "node.kubernetes.io/unreachable", **patience}],
    }


def nodes_of(tenant: Tenant, name: str) -> list[str]:
    return [each["node"] for each in tenant.get(f"im/{name}")["status"]["placements"]]


def test_a_namespace_that_ends_is_left_alone(platform: Platform, tenant: Tenant, scaled: str) -> None:
    """O-42."""
    names = [f"twice-{n}" for n in range(5)]
    apply(tenant, *(model(name, scaled, replicas=0) for name in names))
    eventually(lambda: all(each.get("reason") == "ScaledToZero" for each in ready(tenant).values()), "them to be there")
    before = written(platform, tenant.namespace)
    held = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "held", "finalizers": ["example.com/held"]}}
    apply(tenant, held)
    tenant.kubectl("delete", "namespace", tenant.namespace, "--wait=false")
    try:
        everything = f"{KINDS},inferencemodels"
        eventually(lambda: tenant.names(everything) == {"configmap/held"}, "all else to go")
        after = written(platform, tenant.namespace)[len(before) :]
        time.sleep(5)  # nothing comes again
        assert written(platform, tenant.namespace)[len(before) :] == after
        assert {code for *_, code in after} <= {403, 404}
        # Each child that goes may be news once, and the namespace's end not yet.
        assert len(after) <= 6 * len(names)
    finally:
        tenant.kubectl("patch", "configmap/held", "--type=merge", '--patch={"metadata":{"finalizers":null}}')


def test_who_writes_models_reaches_nothing_of_others(platform: Platform, tenant: Tenant, scaled: str) -> None:
    """O-88."""
    cluster = platform.cluster
    rights = ("--resource=inferencemodels,modelensembles", "--verb=create,patch,get,list")
    tenant.kubectl("create", "serviceaccount", "author")
    tenant.kubectl("create", "role", "author", *rights)
    tenant.kubectl("create", "rolebinding", "author", "--role=author", f"--serviceaccount={tenant.namespace}:author")
    login = cluster.login(tenant.namespace, "author")
    keys = ("secret", "keys", f"--namespace={NAMESPACE}")
    cluster.kubectl("create", "secret", "generic", *keys[1:], f"--from-literal=TOKEN={TOKEN}")
    before = {namespace for namespace, _ in changed(platform)}

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

    def told() -> dict[str, str]:
        found = {name: condition.get("reason", "") for name, condition in ready(tenant).items()}
        return {
            name: found[name] if name in found else "secretRef" if "secretRef" in refused[name] else refused[name]
            for name in attempts
        }

    try:
        expected = {name: reason for name, (_, reason) in attempts.items()}
        try:
            eventually(lambda: told() == expected, "all to be refused", START_LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{told()}") from None
        # Whose pods may run has no rights at all.
        for account in ("keys", "token"):
            who = f"--as=system:serviceaccount:{tenant.namespace}:{account}"
            for right in (("get", "secrets"), ("list", "inferencemodels"), ("create", "pods")):
                assert may(tenant, *right, who) == "no"
        assert {each["spec"]["serviceAccountName"] for each in tenant.get("pods")["items"]} == {"keys"}
        assert TOKEN not in tenant.kubectl("get", "im,pods,events,configmaps", "-o", "yaml")
        assert {namespace for namespace, _ in changed(platform)} - before == {tenant.namespace}
        # Not even who may write there gives the operator's account away.
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
        # By its exit status too.
        return str(refusal).split("\n")[1]


def changed(platform: Platform) -> list[tuple[str, str]]:
    """Namespace and resource of all that the operator has written."""
    return [
        (event["objectRef"].get("namespace", ""), event["objectRef"]["resource"])
        for event in platform.cluster.audit_events()
        if event["user"]["username"] == OPERATOR and event["verb"] in ("create", "update", "patch", "delete")
    ]
