"""The pod template: `fetch` builds a model repository from the fetch plan, `server` serves it.

With the containers of `spec.podTemplate` it satisfies the `restricted` Pod Security profile, except with a cache or a
model on the node's own disk (`hostPath`). It sets no user id, so that the platform may choose one; the images name a
user that is not root. It sets a group for volumes only if the cache is a claim, whose files would otherwise belong to
root. All other volumes are readable, and emptyDirs are writable, for any user.
"""

import math
from typing import Any

from halimede_operator.core.children.claim_template import claim_template_name
from halimede_operator.core.children.overlay import overlay
from halimede_operator.core.children.source import Source, each_once
from halimede_operator.core.labels import labels_of, selector_of
from halimede_operator.core.objects import canonical
from halimede_operator.core.placement.choice import Placement, with_terms
from halimede_operator.core.platform import Platform, PodPaths
from halimede_operator.core.reading import objects_at
from halimede_operator.core.revisions.revision import CONFIG_VOLUME, PLAN_FILE, THIS_CONFIG_MAP
from halimede_operator.core.spec.types import CacheMedium, Json, Key, Serving, TopologySpread, Workload

FETCH = "fetch"
SERVER = "server"
CLAIM = "accelerator"
"""The pod's name of its ResourceClaim."""

DRAIN_DELAY_SECONDS = 5
"""How long the server accepts requests after SIGTERM, until endpoints and load balancers have removed it."""
EXIT_SECONDS = 10
"""How long the kubelet waits after delay and drain, before it kills the server."""
SHARED_MEMORY = "1Gi"
LOST_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
GROUP_OF_CACHE = 65532
"""The group of the images' user."""

STARTUP_PERIOD_SECONDS = 1
"""A start is as quick as this allows: a new pod serves only after the probe has seen it."""

_RESTRICTED: Json = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_TOPOLOGY_KEYS = {TopologySpread.NODE: "kubernetes.io/hostname", TopologySpread.ZONE: "topology.kubernetes.io/zone"}
_ORDINARY = ("cpu", "memory", "ephemeral-storage")


def pod_template(
    key: Key,
    workload: Workload,
    platform: Platform,
    sources: tuple[Source, ...],
    account: str,
    placement: Placement | None,
) -> Json:
    """The pod template of a revision in canonical form, merged with `spec.podTemplate`.

    account: name of the ServiceAccount. placement: the devices; None without an accelerator, and to find out which
    devices the pods may have.
    """
    ours = {
        "metadata": {"labels": labels_of(key), "annotations": _scraped(workload.serving)},
        "spec": {
            "serviceAccountName": account,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "imagePullSecrets": [
                {"name": name} for name in dict.fromkeys((*platform.image_pull_secrets, *workload.image.pull_secrets))
            ],
            "securityContext": _pod_security(workload),
            "terminationGracePeriodSeconds": DRAIN_DELAY_SECONDS + workload.serving.drain_seconds + EXIT_SECONDS,
            **_scheduling(key, workload, platform),
            "resourceClaims": _claims(key, placement),
            "initContainers": [_fetch(workload, platform, sources)],
            "containers": [_server(workload, platform, sources, placement)],
            "volumes": _volumes(workload, platform, sources),
        },
    }
    merged = _restricted(overlay(ours, workload.pod_template))
    if placement is not None:
        # After the overlay, whose affinity would replace the conditions of the devices.
        affinity = with_terms(merged["spec"].get("affinity"), placement.terms)
        merged = {**merged, "spec": {**merged["spec"], "affinity": affinity or None}}
    template: dict[str, Any] = canonical(merged)
    # Selectors need these labels, so `spec.podTemplate` cannot change them.
    template["metadata"]["labels"].update(labels_of(key))
    return template


def _restricted(template: Json) -> dict[str, Any]:
    """The template with what the profile requires of each container. Parsing has refused values that it forbids."""
    filled = {
        name: [
            {**each, "securityContext": overlay(_RESTRICTED, each.get("securityContext", {}))}
            for each in objects_at(template, "spec", name)
        ]
        for name in ("initContainers", "containers")
    }
    return {**template, "spec": {**template["spec"], **filled}}


def _scraped(serving: Serving) -> Json:
    """The annotations by which the usual configuration of a Prometheus without PodMonitors finds a pod's metrics."""
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(serving.metrics_port),
        "prometheus.io/path": "/metrics",
    }


def _claims(key: Key, placement: Placement | None) -> list[Json]:
    if placement is None or placement.claim is None:
        return []
    return [{"name": CLAIM, "resourceClaimTemplateName": claim_template_name(key, placement.claim)}]


def _pod_security(workload: Workload) -> Json:
    context: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if workload.cache.medium is CacheMedium.PVC:
        context |= {"fsGroup": GROUP_OF_CACHE, "fsGroupChangePolicy": "OnRootMismatch"}
    return context


def _scheduling(key: Key, workload: Workload, platform: Platform) -> Json:
    wanted = workload.scheduling
    tolerations = list(wanted.tolerations)
    if platform.node_lost_toleration_seconds is not None:
        tolerations += _lost_node_tolerations(workload, platform.node_lost_toleration_seconds)
    if workload.accelerator.is_wanted:
        # The taint of nodes with GPUs has this key for every resource, also for MIG devices.
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
                # Pods of the revision before do not count: they are being replaced.
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


def _lost_node_tolerations(workload: Workload, seconds: int) -> list[Json]:
    """Tolerations for the taints of a lost node, except for taints that the object itself tolerates.

    If there are several tolerations of a taint, Kubernetes uses the shortest one.
    """
    given = [*workload.scheduling.tolerations, *objects_at(workload.pod_template, "spec", "tolerations")]
    return [
        {"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
        for taint in LOST_NODE_TAINTS
        if not any(
            each.get("key") in (taint, None, "") and each.get("effect") in ("NoExecute", None, "") for each in given
        )
    ]


def _fetch(workload: Workload, platform: Platform, sources: tuple[Source, ...]) -> Json:
    paths = platform.paths
    mounts = [*_common_mounts(paths, sources), *each_once(source.fetch_mounts for source in sources)]
    plan = f"{paths.config}/{PLAN_FILE}"
    return {
        **_container(FETCH, workload, platform),
        "command": ["halimede", "fetch", "--init-container", "--plan", plan, "--into", paths.models],
        "env": list(workload.env),
        # The same as the server's, so that the pod passes a quota and can have the QoS class Guaranteed. It costs
        # nothing: a pod needs the larger of the two, not the sum.
        "resources": {
            part: {name: amount for name, amount in amounts.items() if name in _ORDINARY}
            for part, amounts in workload.resources.items()
        },
        "volumeMounts": [{"name": "models", "mountPath": paths.models}, *_cache_mount(paths, workload), *mounts],
    }


def _server(workload: Workload, platform: Platform, sources: tuple[Source, ...], placement: Placement | None) -> Json:
    serving, paths = workload.serving, platform.paths
    ports = {"http": serving.http_port, "metrics": serving.metrics_port}
    if serving.grpc:
        ports["grpc"] = serving.grpc_port
    cache = [{**mount, "readOnly": True} for mount in _cache_mount(paths, workload)]
    mounts = [{"name": "models", "mountPath": paths.models, "readOnly": True}, *cache, *_common_mounts(paths, sources)]
    return {
        **_container(SERVER, workload, platform),
        "command": ["halimede", "serve"],
        "args": _arguments(workload, paths),
        "env": _environment(workload),
        "resources": _resources(workload, placement),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in sorted(ports.items())],
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": paths.shared_memory}],
        "startupProbe": {
            **_probe("/v2/health/ready"),
            "periodSeconds": STARTUP_PERIOD_SECONDS,
            "timeoutSeconds": 5,
            # A server whose model cannot be loaded ends by itself, so this only ends a server that hangs.
            "failureThreshold": math.ceil(workload.rollout.progress_seconds / STARTUP_PERIOD_SECONDS),
        },
        "readinessProbe": {
            **_probe("/v2/health/ready"),
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        # Not the readiness path: a server that drains, or has a model that cannot be loaded, must stay alive.
        "livenessProbe": {
            **_probe("/v2/health/live"),
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }


def _container(name: str, workload: Workload, platform: Platform) -> Json:
    if not workload.accelerator.is_wanted:
        image, pull_policy = platform.server_image, platform.image_pull_policy
    else:
        image, pull_policy = platform.gpu_server_image, platform.gpu_image_pull_policy
    return {
        "name": name,
        "image": workload.image.reference or image,
        "imagePullPolicy": workload.image.pull_policy or pull_policy,
        # The status reads the root cause here: the message that the process writes, or else the end of its log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"readOnlyRootFilesystem": True},
    }


def _arguments(workload: Workload, paths: PodPaths) -> list[str]:
    """The server's arguments. HTTP is always on, for probes and for the operator; `protocols` only removes it from the
    Services."""
    serving = workload.serving
    arguments = [
        f"--model-repository={paths.models}",
        f"--http-port={serving.http_port}",
        f"--grpc-port={serving.grpc_port}" if serving.grpc else "--allow-grpc=false",
        f"--metrics-port={serving.metrics_port}",
        f"--drain-delay={DRAIN_DELAY_SECONDS}",
        f"--exit-timeout-secs={serving.drain_seconds}",
        "--log-format=json",
    ]
    if workload.accelerator.process_per_device:
        arguments.append("--process-per-device=true")
    if (largest := serving.max_message_bytes) is not None:
        arguments.append(f"--http-max-input-size={largest}")
        if serving.grpc:
            arguments.append(f"--grpc-max-input-size={largest}")
    return [*arguments, *serving.arguments]


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
    if workload.accelerator.is_wanted:
        # CUDA code is loaded on first use, which saves memory of the device.
        ours.append({"name": "CUDA_MODULE_LOADING", "value": "LAZY"})
    given = {variable["name"] for variable in workload.env}
    return [*(variable for variable in ours if variable["name"] not in given), *workload.env]


def _resources(workload: Workload, placement: Placement | None) -> Json:
    """The server's resources. Devices are in the limits only: Kubernetes sets an equal request."""
    if placement is None:
        return workload.resources
    if placement.claim is not None:
        return {**workload.resources, "claims": [{"name": CLAIM}]}
    devices = {placement.resource: str(workload.accelerator.count)}
    return {**workload.resources, "limits": {**workload.resources.get("limits", {}), **devices}}


def _probe(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "http"}}


def _common_mounts(paths: PodPaths, sources: tuple[Source, ...]) -> list[Json]:
    return [
        {"name": CONFIG_VOLUME, "mountPath": paths.config, "readOnly": True},
        {"name": "tmp", "mountPath": paths.temporary},
        *each_once(source.mounts for source in sources),
    ]


def _cache_mount(paths: PodPaths, workload: Workload) -> list[Json]:
    cache = workload.cache
    if cache.medium is CacheMedium.EMPTY_DIR:
        return []
    return [{"name": "cache", "mountPath": paths.cache, "subPath": cache.sub_path}]


def _volumes(workload: Workload, platform: Platform, sources: tuple[Source, ...]) -> list[Json]:
    cache = workload.cache
    plan = {"name": THIS_CONFIG_MAP, "items": [{"key": PLAN_FILE, "path": PLAN_FILE}]}
    # This volume holds the models themselves, or with a cache links into it.
    models = {"sizeLimit": cache.size_limit} if cache.medium is CacheMedium.EMPTY_DIR else {}
    volumes: list[Json] = [
        {"name": "models", "emptyDir": models},
        {"name": CONFIG_VOLUME, "configMap": plan},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
    ]
    match cache.medium:
        case CacheMedium.HOST_PATH:
            # Type Directory, so that the kubelet never creates the folder: it would belong to root. A missing folder is
            # reported in the status.
            volumes.append({"name": "cache", "hostPath": {"path": platform.cache_host_path, "type": "Directory"}})
        case CacheMedium.PVC:
            volumes.append({"name": "cache", "persistentVolumeClaim": {"claimName": cache.claim}})
        case CacheMedium.EMPTY_DIR:
            pass
    return [*volumes, *each_once(source.volumes for source in sources)]
