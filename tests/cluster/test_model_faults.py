"""Faults of models, on real pods: objects report them, and other objects are not affected."""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cluster.control import ADDRESS
from cluster.installed import S3_SECRET, STORE_PORT, Platform, Tenant
from cluster.models import (
    KINDS,
    QUESTION,
    SECONDS_TO_REPORT,
    START_LIMIT_S,
    TOKEN,
    Object,
    apply,
    holding,
    model,
    pods_without_volumes,
    ready,
    reports_a_failure,
    restarts,
    running,
    writes_for,
)
from cluster.spaces import eventually, python
from support.models import add_scaled

pytestmark = [pytest.mark.large, pytest.mark.usefixtures("second_node")]

SECONDS_TO_RECOVER = 30.0
"""Time limit from the recovery of a store to a ready model: the pause between attempts and the start of the server."""
REFUSING_PORT = 9001


@pytest.fixture
def tainted(platform: Platform) -> Iterator[str]:
    """A node with a taint, so that no more pods are scheduled to it."""
    platform.cluster.kubectl("taint", "node", "node-2", "dedicated=others:NoSchedule")
    yield "node-2"
    platform.cluster.kubectl("taint", "node", "node-2", "dedicated-")


@pytest.fixture
def refusing(platform: Platform) -> Iterator[str]:
    """The URL of a store that denies every request."""
    space = platform.cluster.control.space
    program = space.start("refusing", *python("refusing_store", ADDRESS, REFUSING_PORT))
    yield f"http://{ADDRESS}:{REFUSING_PORT}"
    program.check()
    space.programs.pop("refusing").stop()


@pytest.fixture
def troubled(platform: Platform) -> Iterator["TroubledStores"]:
    """A store that never answers, and one that answers 500."""
    stores = TroubledStores(platform, {"silent": 9002, "error": 9003})
    yield stores
    stores.stop()


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
    cases: dict[str, tuple[Object, str, tuple[str, ...]]] = {
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
            ("need 1x GPU", "no node has devices"),
        ),
        "quota": (
            {"model": {"uri": scaled}, "accelerator": {"type": "MIG", "mig": {"profile": "1g.10gb"}}},
            "QuotaExceeded",
            ("requests.nvidia.com/mig-1g.10gb",),
        ),
        "claim": (
            {"model": {"uri": "pvc://nowhere/twice"}},
            "ClaimMissing",
            ("PersistentVolumeClaim nowhere does not exist",),
        ),
        "unbound": (
            {"model": {"uri": "pvc://unbound/twice"}},
            "ClaimUnbound",
            ("PersistentVolumeClaim unbound (without a StorageClass) is not bound: no persistent volumes available",),
        ),
        "denied": ({"model": denied}, "ModelFetchFailed", ("not allowed", "s3://models/denied", "403")),
        "other": (
            {"model": {"uri": scaled, "digest": f"sha256:{'0' * 64}"}},
            "ModelFetchFailed",
            ("digest mismatch", scaled),
        ),
        "secret": ({"model": absent}, "SecretMissing", ('secret "absent" not found',)),
        # What the operator cannot check is the server's to refuse.
        "flag": (
            {"model": {"uri": scaled}, "serving": {"args": ["--trusted-proxies=nobody"]}},
            "CrashLoop",
            ("--trusted-proxies", "Got nobody"),
        ),
        "config": (
            {"model": {"uri": scaled, "config": {"dynamicBatching": {"preferredBatchSize": [4096]}}}},
            "ModelLoadFailed",
            ("preferred",),
        ),
    }  # fmt: skip
    apply(tenant, *({**model(name, ""), "spec": spec} for name, (spec, _, _) in cases.items()))

    conditions: dict[str, Object] = {}
    pods_reported_at: dict[str, float] = {}
    objects_reported_at: dict[str, float] = {}

    def all_reported() -> bool:
        without_volumes = pods_without_volumes(tenant)
        for pod in tenant.get("pods")["items"]:
            if reports_a_failure(pod) or pod["metadata"]["uid"] in without_volumes:
                pods_reported_at.setdefault(pod["metadata"]["labels"]["halimede.dev/model"], time.monotonic())
        conditions.update(ready(tenant))
        for name, (_, reason, words) in cases.items():
            condition = conditions.get(name, {})
            if condition.get("reason") == reason and all(word in condition["message"] for word in words):
                objects_reported_at.setdefault(name, time.monotonic())
        return objects_reported_at.keys() == cases.keys()

    try:
        eventually(all_reported, "all causes to be reported", START_LIMIT_S)
    except AssertionError as error:
        missing = {name: condition for name, condition in conditions.items() if name not in objects_reported_at}
        raise AssertionError(f"{error}\n{json.dumps(missing, indent=1)}") from None
    # A model whose object was read with its cause before its pod was read has no time. No pod reports a quota.
    assert pods_reported_at.keys().isdisjoint({"quota"})
    late = {
        name: objects_reported_at[name] - at
        for name, at in pods_reported_at.items()
        if objects_reported_at[name] > at + SECONDS_TO_REPORT
    }
    assert late == {}

    # The pod that served still serves.
    assert tenant.infer("serves", QUESTION) == {"OUT": [2, 4, 6, 8]}
    for kind in ("Available", "Degraded"):
        assert tenant.condition("im/serves", kind)["status"] == "True"
    # Of a Secret, an author sees only its name.
    assert TOKEN not in tenant.kubectl("get", "im,pods,events,configmaps", "-o", "yaml")

    # While a pod is restarted repeatedly, the conditions stay the same and the operator writes nothing.
    pods, made, told = tenant.names("pods"), writes_for(platform, tenant.namespace), ready(tenant)
    tried = restarts(tenant, "crashes")
    eventually(lambda: restarts(tenant, "crashes") > tried, "another try", START_LIMIT_S)
    assert ready(tenant) == told
    assert (tenant.names("pods"), writes_for(platform, tenant.namespace)) == (pods, made)

    tenant.apply(json.dumps(model("serves", scaled)))
    tenant.wait_ready("im/serves")
    assert old in tenant.names("pods")

    tenant.kubectl("delete", "im", "--all", "--timeout=60s")
    left = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
    eventually(lambda: tenant.names(KINDS) == left, "nothing to be left", START_LIMIT_S)


def test_an_unreachable_store_is_reported_and_its_return_noticed(
    platform: Platform, tenant: Tenant, scaled: str, troubled: "TroubledStores", tmp_path: Path
) -> None:
    """Another model is in a private bucket, for which the namespace has the platform's Secret."""
    apply(tenant, holding("Secret", S3_SECRET, stringData={"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": TOKEN}))
    add_scaled(tmp_path, "private", 3)
    private = platform.store.put("private", tmp_path / "private", is_public=False)
    servers = {
        "unknown": "http://store.invalid:9000",
        "refused": f"http://{ADDRESS}:9004",
        "silent": f"http://{ADDRESS}:9002",
        "error": f"http://{ADDRESS}:9003",
        "tls": f"https://{ADDRESS}:9003",
    }
    causes = {
        "unknown": f"the store {servers['unknown']} cannot be reached: its name is not known",
        "refused": f"the store {servers['refused']} cannot be reached: connection refused",
        "silent": f"the store {servers['silent']} cannot be reached: no answer in time",
        "error": f"the store {servers['error']} answers with an error (500)",
        "tls": f"the store {servers['tls']} cannot be reached: it does not speak TLS",
    }
    apply(tenant, model("private", private), *(model(each, _at(server, scaled)) for each, server in servers.items()))
    reported_after: dict[str, float] = {}

    def all_reported() -> bool:
        now = datetime.now(UTC)
        conditions = ready(tenant)
        for pod in tenant.get("pods")["items"]:
            name = pod["metadata"]["labels"]["halimede.dev/model"]
            message = conditions.get(name, {}).get("message", "")
            if name in causes and f"unreachable: {_at(servers[name], scaled)}: {causes[name]}, trying again" in message:
                assert conditions[name]["reason"] == "ModelFetchFailed"
                reported_after.setdefault(name, (now - _first_start(pod)).total_seconds())
        return reported_after.keys() == causes.keys()

    try:
        eventually(all_reported, "all causes to be reported", START_LIMIT_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{json.dumps(ready(tenant), indent=1)}") from None
    tenant.wait_ready("im/private", START_LIMIT_S)
    # How long the fetch container takes for a small model on this machine.
    (pod,) = tenant.get("pods", "--selector=halimede.dev/model=private")["items"]
    (fetch,) = pod["status"]["initContainerStatuses"]
    ended = datetime.fromisoformat(fetch["state"]["terminated"]["finishedAt"])
    start_secs = (ended - _first_start(pod)).total_seconds()
    assert {name: secs for name, secs in reported_after.items() if secs > SECONDS_TO_REPORT + start_secs} == {}
    assert tenant.infer("private", QUESTION) == {"OUT": [3, 6, 9, 12]}

    before = ready(tenant)
    troubled.recover(9002, 9003, 9004)
    for name in ("refused", "silent", "error"):
        tenant.wait_ready(f"im/{name}", SECONDS_TO_RECOVER)
    assert ready(tenant)["unknown"] == before["unknown"]


class TroubledStores:
    """Programs that play stores with failures, by port."""

    def __init__(self, platform: Platform, modes: dict[str, int]) -> None:
        self._space = platform.cluster.control.space
        for mode, port in modes.items():
            self._start(port, mode)

    def recover(self, *ports: int) -> None:
        """Let each of these ports lead to the real store."""
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
    # Kubelets ignore volumes that no container mounts.
    server = {"name": "server", "volumeMounts": [{"name": "license", "mountPath": "/run/license"}]}
    mounted = {"volumes": [{"name": "license", "secret": {"secretName": "license"}}], "containers": [server]}
    cases: dict[str, tuple[Object, str, str]] = {
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
    apply(tenant, holding("Secret", "there", stringData=keys))
    apply(tenant, *({**model(name, ""), "spec": spec} for name, (spec, _, _) in cases.items()))
    pods_reported_at: dict[str, float] = {}
    objects_reported_at: dict[str, float] = {}

    def all_reported() -> bool:
        without_volumes = pods_without_volumes(tenant)
        for pod in tenant.get("pods")["items"]:
            if reports_a_failure(pod) or pod["metadata"]["uid"] in without_volumes:
                pods_reported_at.setdefault(pod["metadata"]["labels"]["halimede.dev/model"], time.monotonic())
        conditions = ready(tenant)
        for name, (_, reason, words) in cases.items():
            if conditions[name].get("reason") == reason and words in conditions[name]["message"]:
                objects_reported_at.setdefault(name, time.monotonic())
        return objects_reported_at.keys() == cases.keys()

    try:
        eventually(all_reported, "all causes to be reported", START_LIMIT_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{json.dumps(ready(tenant), indent=1)}") from None
    late = {
        name: objects_reported_at[name] - at
        for name, at in pods_reported_at.items()
        if objects_reported_at[name] > at + SECONDS_TO_REPORT
    }
    assert late == {}
    column = tenant.kubectl("get", "im/mounted")
    assert "SecretMissing" in column

    apply(
        tenant,
        holding("Secret", "keys", stringData=keys),
        holding("Secret", "words", stringData={"A": "B"}),
        holding("Secret", "license", stringData={"A": "B"}),
        holding("ConfigMap", "authorities", data={"ca.crt": authority}),
        holding("ConfigMap", "settings", data={"A": "B"}),
    )
    for name in cases:
        tenant.wait_ready(f"im/{name}", START_LIMIT_S)
