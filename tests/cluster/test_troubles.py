"""Faults around models, on real pods: how the objects report them, and that nothing else is affected."""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.control import ADDRESS
from cluster.faults import Faults
from cluster.gpus import Gpus, Layout
from cluster.installed import NAMESPACE, S3_SECRET, STORE_PORT, Platform, Tenant
from cluster.spaces import eventually, python
from support.models import add_scaled

SECONDS_TO_TELL = 10.0
"""Within which an object says what its pod says."""
SECONDS_TO_RECOVER = 30.0
"""Within which a model is ready after its store is: the pause between tries and the start of the server."""
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


@pytest.fixture
def troubled(platform: Platform) -> Iterator["TroubledStores"]:
    """One that never answers, and one that answers 500."""
    stores = TroubledStores(platform, {"silent": 9002, "error": 9003})
    yield stores
    stores.stop()


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


def test_every_failing_model_reports_its_cause(
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
            ("its limit is 128Mi", "spec.resources.limits.memory"),
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


def test_an_unreachable_store_is_reported_and_its_return_noticed(
    platform: Platform, tenant: Tenant, scaled: str, troubled: "TroubledStores", tmp_path: Path
) -> None:
    """Beside it a model of a bucket's private part, for which the namespace has the platform's Secret."""
    apply(tenant, _holding("Secret", S3_SECRET, stringData={"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": TOKEN}))
    add_scaled(tmp_path, "private", 3)
    private = platform.store.put("private", tmp_path / "private", is_public=False)
    servers = {
        "unknown": "http://store.invalid:9000",
        "refused": f"http://{ADDRESS}:9004",
        "silent": f"http://{ADDRESS}:9002",
        "error": f"http://{ADDRESS}:9003",
    }
    causes = {
        "unknown": f"the store {servers['unknown']} cannot be reached: its name is not known",
        "refused": f"the store {servers['refused']} cannot be reached: connection refused",
        "silent": f"the store {servers['silent']} cannot be reached: no answer in time",
        "error": f"the store {servers['error']} answers with an error (500)",
    }
    apply(tenant, model("private", private), *(model(each, _at(server, scaled)) for each, server in servers.items()))
    told_after: dict[str, float] = {}

    def all_told() -> bool:
        now = datetime.now(UTC)
        said = ready(tenant)
        for pod in tenant.get("pods")["items"]:
            name = pod["metadata"]["labels"]["halimede.dev/model"]
            message = said.get(name, {}).get("message", "")
            if name in causes and f"unreachable: {_at(servers[name], scaled)}: {causes[name]}, trying again" in message:
                assert said[name]["reason"] == "ModelFetchFailed"
                told_after.setdefault(name, (now - _first_start(pod)).total_seconds())
        return told_after.keys() == causes.keys()

    try:
        eventually(all_told, "all to be told", START_LIMIT_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{json.dumps(ready(tenant), indent=1)}") from None
    tenant.wait_ready("im/private", START_LIMIT_S)
    # What the same program needs here and now to fetch a small model.
    (pod,) = tenant.get("pods", "--selector=halimede.dev/model=private")["items"]
    (fetch,) = pod["status"]["initContainerStatuses"]
    ended = datetime.fromisoformat(fetch["state"]["terminated"]["finishedAt"])
    start_secs = (ended - _first_start(pod)).total_seconds()
    assert {name: secs for name, secs in told_after.items() if secs > SECONDS_TO_TELL + start_secs} == {}
    assert tenant.infer("private", QUESTION) == {"OUT": [3, 6, 9, 12]}

    before = ready(tenant)
    troubled.recover(9002, 9003, 9004)
    for name in ("refused", "silent", "error"):
        tenant.wait_ready(f"im/{name}", SECONDS_TO_RECOVER)
    assert ready(tenant)["unknown"] == before["unknown"]


class TroubledStores:
    """Servers by their ports."""

    def __init__(self, platform: Platform, modes: dict[str, int]) -> None:
        self._space = platform.cluster.control.space
        for mode, port in modes.items():
            self._start(port, mode)

    def recover(self, *ports: int) -> None:
        """Each of the ports leads to the store."""
        for port in ports:
            if program := self._space.programs.pop(f"store-{port}", None):
                program.stop()
            self._start(port, str(STORE_PORT))

    def stop(self) -> None:
        for name in [each for each in self._space.programs if each.startswith("store-")]:
            self._space.programs.pop(name).stop()

    def _start(self, port: int, mode: str) -> None:
        self._space.start(f"store-{port}", *python("troubled_store", ADDRESS, port, mode))


def _at(server: str, uri: str) -> str:
    """The same model location on another server."""
    return uri.replace("s3://", f"s3://{server}/")


def _first_start(pod: Object) -> datetime:
    """When the fetch container first ran."""
    (fetch,) = pod["status"]["initContainerStatuses"]
    first = fetch["lastState"].get("terminated") or fetch["state"].get("terminated") or fetch["state"]["running"]
    return datetime.fromisoformat(first["startedAt"])


def test_missing_objects_of_a_pod_are_reported_until_they_exist(
    platform: Platform, tenant: Tenant, scaled: str
) -> None:
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


def test_lost_devices_and_nodes_are_reported_and_replaced(
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


def test_a_namespace_being_deleted_is_left_alone(platform: Platform, tenant: Tenant, scaled: str) -> None:
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
    """Namespace and resource of all writes of the operator."""
    return [
        (event["objectRef"].get("namespace", ""), event["objectRef"]["resource"])
        for event in platform.cluster.audit_events()
        if event["user"]["username"] == OPERATOR and event["verb"] in ("create", "update", "patch", "delete")
    ]
