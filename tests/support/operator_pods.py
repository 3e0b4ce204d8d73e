"""Pods, ReplicaSets and Deployments as Kubernetes 1.36 writes them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from halimede_operator.core.labels import PLACEMENT
from halimede_operator.core.placement.choice import Placement
from halimede_operator.core.snapshot import Object, PodIndex, ServedVersion, Snapshot
from halimede_operator.core.spec.types import Key

IMAGE = "registry.example/halimede:1"
BEGINNING = "1970-01-01T00:00:00Z"
NEW, OLD = "7f9c66d5b8", "6d8b5f4c77"
DIGEST = "sha256:" + "ab" * 32
FETCHED_MODEL = {"name": "bert", "digest": DIGEST, "size_bytes": 438, "files": 2, "fetched_at": "2026-11-22T09:00:04Z"}
FETCHED = json.dumps({"models": [{**FETCHED_MODEL, "cached": False}]})


DEADLINE = 601
"""The second in which a Deployment that was created in second 1 reports ProgressDeadlineExceeded."""


def second(number: int) -> str:
    return f"2026-11-22T09:{number // 60:02}:{number % 60:02}Z"


def waiting(reason: str = "PodInitializing", message: str = "") -> Object:
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def running(since: int) -> Object:
    return {"running": {"startedAt": second(since)}}


def ended(code: int, message: str = "", *, reason: str = "", started: int = 5, finished: int = 6) -> Object:
    words = reason or ("Completed" if code == 0 else "Error")
    return {
        "terminated": {
            "containerID": f"containerd://{finished:064x}",
            "exitCode": code,
            "reason": words,
            "startedAt": BEGINNING if words == "StartError" else second(started),
            "finishedAt": second(finished),
            **({"message": message} if message else {}),
        }
    }


def back_off(pod: str, container: str = "server", pause: str = "20s") -> Object:
    text = (
        f"back-off {pause} restarting failed container={container} pod={pod}_prod(e4abafca-dcd2-40ab-89c7-9094cef9bf5e)"
    )
    return waiting("CrashLoopBackOff", text)


def container(
    name: str, state: Object, last: Object | None = None, *, is_ready: bool = False, restarts: int = 0
) -> Object:
    return {
        "name": name,
        "image": IMAGE,
        "state": state,
        "lastState": last or {},
        "ready": is_ready,
        "started": is_ready,
        "restartCount": restarts,
    }


def _condition(type_: str, is_true: bool, since: int, reason: str = "", message: str = "") -> Object:
    texts = {key: text for key, text in (("reason", reason), ("message", message)) if text}
    return {"type": type_, "status": str(is_true), "lastTransitionTime": second(since), **texts}


def pod(
    name: str = "bert-7f9c66d5b8-aaaaa",
    *,
    template: str = NEW,
    fetch: Object | None = None,
    server: Object | None = None,
    ready_since: int | None = None,
    unready_since: int | None = None,
    created: int = 0,
    node: str = "node-1",
    has_sandbox: bool = True,
    volumes: Sequence[Object] = (),
) -> Object:
    """A pod with a node. `fetch` and `server` are container statuses."""
    fetch = fetch or container("fetch", waiting())
    server = server or container("server", waiting())
    has_fetched = fetch["state"].get("terminated", {}).get("exitCode") == 0
    is_ready = ready_since is not None
    why = "" if is_ready else "ContainersNotReady"
    changed = ready_since if ready_since is not None else created if unready_since is None else unready_since
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "prod",
            "uid": f"uid-{name}",
            "generation": 1,
            "creationTimestamp": second(created),
            "labels": {"halimede.dev/model": "bert", "pod-template-hash": template},
        },
        "spec": {
            "nodeName": node,
            "initContainers": [{"name": "fetch", "image": IMAGE}],
            "containers": [{"name": "server", "image": IMAGE}],
            "volumes": [{"name": "models", "emptyDir": {}}, *volumes],
        },
        "status": {
            "phase": "Running" if has_fetched and not server["state"].get("waiting") else "Pending",
            "startTime": second(created),
            "conditions": [
                _condition("PodReadyToStartContainers", has_sandbox, created + 1),
                _condition("Initialized", has_fetched, created, "" if has_fetched else "ContainersNotInitialized"),
                _condition("Ready", is_ready, changed, why),
                _condition("ContainersReady", is_ready, changed, why),
                _condition("PodScheduled", True, created),
            ],
            "initContainerStatuses": [fetch],
            "containerStatuses": [server],
        },
    }


def fetching(name: str = "bert-7f9c66d5b8-aaaaa", last: Object | None = None, **where: Any) -> Object:
    return pod(name, fetch=container("fetch", running(2), last), **where)


def fetch_failed(code: int, message: str = "", name: str = "bert-7f9c66d5b8-aaaaa", **where: Any) -> Object:
    return pod(name, fetch=container("fetch", ended(code, message)), **where)


def fetched(message: str = FETCHED, finished: int = 4) -> Object:
    return container("fetch", ended(0, message, started=2, finished=finished), is_ready=True)


def loading(name: str = "bert-7f9c66d5b8-aaaaa", last: Object | None = None, **where: Any) -> Object:
    return pod(name, fetch=fetched(), server=container("server", running(5), last), **where)


def serving(name: str = "bert-7f9c66d5b8-aaaaa", last: Object | None = None, since: int = 8, **where: Any) -> Object:
    server = container("server", running(since - 3), last, is_ready=True)
    return pod(name, fetch=fetched(), server=server, ready_since=since, **where)


def stopped(state: Object, name: str = "bert-7f9c66d5b8-aaaaa", last: Object | None = None, **where: Any) -> Object:
    """A pod whose server container is not running."""
    return pod(name, fetch=fetched(), server=container("server", state, last), **where)


def lost_readiness(name: str = "bert-7f9c66d5b8-aaaaa", **where: Any) -> Object:
    """Its readiness probe fails after it was ready."""
    server = {**container("server", running(5)), "started": True}
    return pod(name, fetch=fetched(), server=server, unready_since=60, **where)


def unscheduled(message: str, name: str = "bert-7f9c66d5b8-aaaaa", **where: Any) -> Object:
    made = pod(name, **where)
    del made["spec"]["nodeName"]
    conditions = [_condition("PodScheduled", False, 1, "Unschedulable", message)]
    return {**made, "status": {"phase": "Pending", "conditions": conditions}}


def rejected(reason: str, message: str, name: str = "bert-7f9c66d5b8-aaaaa", **where: Any) -> Object:
    """A pod that the kubelet rejected or evicted, which has ended."""
    made = pod(name, **where)
    return {**made, "status": {"phase": "Failed", "reason": reason, "message": message, "startTime": second(3)}}


def node_lost(name: str = "bert-7f9c66d5b8-aaaaa", **where: Any) -> Object:
    """The node controller marks the pod as not ready; the containers have the kubelet's last statuses."""
    made = serving(name, **where)
    made["status"]["conditions"][2] |= {"status": "False", "lastTransitionTime": second(90)}
    return made


def leaving(pod_: Object) -> Object:
    return {**pod_, "metadata": {**pod_["metadata"], "deletionTimestamp": second(100)}}


def deployment(
    replicas: int = 1,
    *,
    generation: int = 1,
    seen: int | None = None,
    progress: str = "NewReplicaSetAvailable",
    template: str = NEW,
    is_paused: bool = False,
    placement: Placement | None = None,
) -> Object:
    is_late = progress == "ProgressDeadlineExceeded"
    since = DEADLINE if is_late else 1
    what = "has timed out progressing." if is_late else "is progressing."
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "bert",
            "namespace": "prod",
            "generation": generation,
            **({"annotations": {PLACEMENT: placement.written()}} if placement is not None else {}),
        },
        "spec": {
            "replicas": replicas,
            "progressDeadlineSeconds": 600,
            "template": {
                "metadata": {"labels": {"halimede.dev/revision": template}},
                "spec": {"containers": [{"name": "server", "image": IMAGE}]},
            },
            **({"paused": True} if is_paused else {}),
        },
        "status": {
            "observedGeneration": generation if seen is None else seen,
            "conditions": [
                _condition("Progressing", not is_late, since, progress, f'ReplicaSet "bert-{NEW}" {what}'),
            ],
        },
    }


def replica_set(template: str = NEW, revision: int = 1) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": f"bert-{template}",
            "namespace": "prod",
            "labels": {"pod-template-hash": template, "halimede.dev/revision": template},
            "annotations": {"deployment.kubernetes.io/revision": str(revision)},
        },
    }


def index(*entries: tuple[str, str, str, str]) -> PodIndex:
    return PodIndex(tuple(ServedVersion(*entry) for entry in entries))


READY = index(("bert", "1", "READY", ""))


def snapshot(
    key: Key,
    *pods: Object,
    generation: int = 1,
    status: Object | None = None,
    child: Object | None = None,
    replica_sets: Sequence[Object] = (),
    indexes: Mapping[str, PodIndex] | None = None,
    **fields: Any,
) -> Snapshot:
    """Every ready pod has an index with version 1 of `bert`, unless `indexes` has another one under the pod's name.
    child: the Deployment, which gets the object's name."""
    asked = {
        p["metadata"]["name"]: READY
        for p in pods
        if "containerStatuses" in p["status"] and p["status"]["containerStatuses"][0]["ready"]
    }
    asked |= indexes or {}
    return Snapshot(
        key=key,
        object={
            "apiVersion": "halimede.dev/v1alpha1",
            "kind": str(key.kind),
            "metadata": {"name": key.name, "namespace": key.namespace, "uid": "uid-owner", "generation": generation},
            "spec": {},
            **({"status": status} if status is not None else {}),
        },
        members=fields.pop("members", {}),
        children=() if child is None else ({**child, "metadata": {**child["metadata"], "name": key.name}},),
        replica_sets=tuple(replica_sets) or (replica_set(),),
        pods=pods,
        indexes={f"uid-{name}": index_of_pod for name, index_of_pod in asked.items()},
        **fields,
    )
