"""The pod template: `fetch` makes a model repository of what the plan names, `server` serves it.

It passes the `restricted` Pod Security profile, except with a cache or a model on the node's own disk (`hostPath`).
There is no user id in it, so that a platform may give one; the images name a user that is not root. A group for
volumes is set only with a claim as cache, whose files would be root's otherwise: everything else is readable and
emptyDirs are writable to any user.
"""

from typing import Any

from halimede_operator.core.api.spec import CacheMedium, Json, Key, TopologySpread, Workload
from halimede_operator.core.children.config_map import CACHE, PLAN_FILE
from halimede_operator.core.children.source import Source, each_once
from halimede_operator.core.labels import REVISION_LABEL, labels_of, selector_of
from halimede_operator.core.names import canonical_json, hash_of
from halimede_operator.core.objects import canonical
from halimede_operator.core.overlay import overlay
from halimede_operator.core.platform import Platform

FETCH = "fetch"
SERVER = "server"

CONFIG = "/etc/halimede"
MODELS = "/models"

DRAIN_DELAY_SECONDS = 5
"""How long the server takes requests on after SIGTERM, while endpoints and balancers learn of its end."""
EXIT_SECONDS = 10
"""What the kubelet waits beyond delay and drain, before it kills."""
SHARED_MEMORY = "1Gi"
GROUP_OF_CACHE = 65532
"""The images' own."""

STARTUP_PERIOD_SECONDS = 5
STARTUP_FAILURES = 360
"""Half an hour to load: a server whose model cannot be loaded ends by itself, so that this only ends what hangs."""

_TOPOLOGY_KEYS = {TopologySpread.NODE: "kubernetes.io/hostname", TopologySpread.ZONE: "topology.kubernetes.io/zone"}
_ORDINARY = ("cpu", "memory", "ephemeral-storage")


def pod_template(
    key: Key, workload: Workload, platform: Platform, sources: tuple[Source, ...], config_map: str, account: str
) -> Json:
    """With `spec.podTemplate` laid over it, in canonical form, and a label for its revision."""
    ours = {
        "metadata": {"labels": labels_of(key)},
        "spec": {
            "serviceAccountName": account,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "imagePullSecrets": [
                {"name": name} for name in dict.fromkeys((*platform.image_pull_secrets, *workload.image.pull_secrets))
            ],
            "securityContext": _pod_security(workload),
            "terminationGracePeriodSeconds": DRAIN_DELAY_SECONDS + workload.serving.drain_seconds + EXIT_SECONDS,
            **_scheduling(key, workload),
            "initContainers": [_fetch(workload, platform, sources)],
            "containers": [_server(workload, platform, sources)],
            "volumes": _volumes(workload, platform, sources, config_map),
        },
    }
    template: dict[str, Any] = canonical(overlay(ours, workload.pod_template))
    # Selectors find the pods by these, whatever lies over them.
    template["metadata"]["labels"].update(labels_of(key))
    template["metadata"]["labels"][REVISION_LABEL] = hash_of(canonical_json(template))
    return template


def _pod_security(workload: Workload) -> Json:
    context: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if workload.cache.medium is CacheMedium.PVC:
        context |= {"fsGroup": GROUP_OF_CACHE, "fsGroupChangePolicy": "OnRootMismatch"}
    return context


def _scheduling(key: Key, workload: Workload) -> Json:
    wanted = workload.scheduling
    tolerations = list(wanted.tolerations)
    if workload.accelerator.resource_name is not None:
        # The taint of nodes with GPUs is called so whatever the devices' own resource is.
        toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        tolerations += [toleration] if toleration not in tolerations else []
    spread = []
    if (topology_key := _TOPOLOGY_KEYS.get(wanted.topology_spread)) is not None:
        spread.append(
            {
                "maxSkew": 1,
                "topologyKey": topology_key,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector_of(key)},
                # Pods of the revision before, which are about to go, do not count.
                "matchLabelKeys": ["pod-template-hash"],
            }
        )
    return {
        "nodeSelector": wanted.node_selector,
        "tolerations": tolerations,
        "affinity": wanted.affinity or None,
        "topologySpreadConstraints": spread,
        "priorityClassName": wanted.priority_class_name,
        "runtimeClassName": wanted.runtime_class_name,
        "schedulerName": wanted.scheduler_name,
    }


def _fetch(workload: Workload, platform: Platform, sources: tuple[Source, ...]) -> Json:
    mounts = [*_common_mounts(sources), *each_once(tuple(each for source in sources for each in source.fetch_mounts))]
    return {
        **_container(FETCH, workload, platform),
        "command": ["halimede", "fetch", "--plan", f"{CONFIG}/{PLAN_FILE}", "--into", MODELS],
        "env": list(workload.env),
        # What the server has, so that a pod in a namespace with a quota, or of the class Guaranteed, stays one: a pod
        # needs the larger of the two, not both.
        "resources": {
            part: {name: amount for name, amount in amounts.items() if name in _ORDINARY}
            for part, amounts in workload.resources.items()
        },
        "volumeMounts": [{"name": "models", "mountPath": MODELS}, *_cache_mount(workload), *mounts],
    }


def _server(workload: Workload, platform: Platform, sources: tuple[Source, ...]) -> Json:
    serving = workload.serving
    ports = {"http": serving.http_port, "metrics": serving.metrics_port}
    if serving.grpc:
        ports["grpc"] = serving.grpc_port
    cache = [{**mount, "readOnly": True} for mount in _cache_mount(workload)]
    mounts = [{"name": "models", "mountPath": MODELS, "readOnly": True}, *cache, *_common_mounts(sources)]
    return {
        **_container(SERVER, workload, platform),
        "command": ["halimede", "serve"],
        "args": _arguments(workload),
        "env": _environment(workload),
        "resources": _resources(workload),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in sorted(ports.items())],
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - the pod's own
        "startupProbe": {
            **_probe("/v2/health/ready"),
            "periodSeconds": STARTUP_PERIOD_SECONDS,
            "timeoutSeconds": 5,
            "failureThreshold": STARTUP_FAILURES,
        },
        "readinessProbe": {
            **_probe("/v2/health/ready"),
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        # Not readiness: a server that drains, or has a model that does not load, is to live.
        "livenessProbe": {
            **_probe("/v2/health/live"),
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }


def _container(name: str, workload: Workload, platform: Platform) -> Json:
    default = platform.server_image if workload.accelerator.resource_name is None else platform.gpu_server_image
    return {
        "name": name,
        "image": workload.image.reference or default,
        "imagePullPolicy": workload.image.pull_policy or platform.image_pull_policy,
        # The root cause, for the status: what the process writes there, or its last lines.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _arguments(workload: Workload) -> list[str]:
    """HTTP is always served, for probes and for the operator; `protocols` takes it from the Services."""
    serving = workload.serving
    arguments = [
        f"--model-repository={MODELS}",
        f"--http-port={serving.http_port}",
        f"--grpc-port={serving.grpc_port}" if serving.grpc else "--allow-grpc=false",
        f"--metrics-port={serving.metrics_port}",
        f"--drain-delay={DRAIN_DELAY_SECONDS}",
        f"--exit-timeout-secs={serving.drain_seconds}",
        "--log-format=json",
    ]
    if (largest := serving.max_message_bytes) is not None:
        arguments.append(f"--http-max-input-size={largest}")
        if serving.grpc:
            arguments.append(f"--grpc-max-input-size={largest}")
    return arguments


def _environment(workload: Workload) -> list[Json]:
    fields = {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_IP": "status.podIP",
        "NODE_NAME": "spec.nodeName",
    }
    ours: list[Json] = [
        {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
        for name, path in fields.items()
    ]
    if workload.accelerator.resource_name is not None:
        # Code that no request needs stays out of the device's memory.
        ours.append({"name": "CUDA_MODULE_LOADING", "value": "LAZY"})
    given = {variable["name"] for variable in workload.env}
    return [*(variable for variable in ours if variable["name"] not in given), *workload.env]


def _resources(workload: Workload) -> Json:
    """The device stands in the limits: Kubernetes makes the request equal."""
    device = workload.accelerator.resource_name
    if device is None:
        return workload.resources
    limits = {**workload.resources.get("limits", {}), device: str(workload.accelerator.count)}
    return {**workload.resources, "limits": limits}


def _probe(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "http"}}


def _common_mounts(sources: tuple[Source, ...]) -> list[Json]:
    return [
        {"name": "config", "mountPath": CONFIG, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
        *each_once(tuple(each for source in sources for each in source.mounts)),
    ]


def _cache_mount(workload: Workload) -> list[Json]:
    cache = workload.cache
    if cache.medium is CacheMedium.EMPTY_DIR:
        return []
    return [{"name": "cache", "mountPath": CACHE, "subPath": cache.sub_path}]


def _volumes(workload: Workload, platform: Platform, sources: tuple[Source, ...], config_map: str) -> list[Json]:
    cache = workload.cache
    # Without a cache the models themselves lie here, else links into it.
    models = {"sizeLimit": cache.size_limit} if cache.medium is CacheMedium.EMPTY_DIR else {}
    volumes: list[Json] = [
        {"name": "models", "emptyDir": models},
        {"name": "config", "configMap": {"name": config_map}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
    ]
    match cache.medium:
        case CacheMedium.HOST_PATH:
            # Never made by the kubelet, which would make it root's: a folder that is missing or not ours is told.
            volumes.append({"name": "cache", "hostPath": {"path": platform.cache_host_path, "type": "Directory"}})
        case CacheMedium.PVC:
            volumes.append({"name": "cache", "persistentVolumeClaim": {"claimName": cache.claim}})
        case CacheMedium.EMPTY_DIR:
            pass
    return [*volumes, *each_once(tuple(each for source in sources for each in source.volumes))]
