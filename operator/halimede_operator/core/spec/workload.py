"""Parses the settings of pods that both kinds have, into a `Workload`."""

import math
import re
from fractions import Fraction
from typing import Any

from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.arguments import read_arguments
from halimede_operator.core.spec.autoscaling import read_autoscaling, read_replicas
from halimede_operator.core.spec.field import (
    DNS_NAME,
    INT32_MAX,
    INT64_MAX,
    LABEL_NAME,
    LABEL_VALUE,
    Field,
    Rule,
    shown,
    without_none,
)
from halimede_operator.core.spec.peers import is_label, read_peer
from halimede_operator.core.spec.pod_template import NO_DEVICE_VARIABLE, NVIDIA_DEVICES, PORT_NAMES, read_overlay
from halimede_operator.core.spec.types import (
    DEVICE_REQUEST,
    Accelerator,
    AcceleratorType,
    Cache,
    CacheMedium,
    DeviceClaim,
    DeviceRequest,
    GpuFilter,
    Image,
    Json,
    Rollout,
    RolloutPolicy,
    Scheduling,
    Serving,
    TopologySpread,
    UpgradePolicy,
    Workload,
)

_MIG_PROFILE = Rule(
    re.compile(r"[0-9]+g\.[0-9]+gb(\+[a-z]+(\.[a-z]+)*|-[a-z]+)?", re.ASCII),
    "must be a MIG profile such as 1g.10gb, 3g.40gb or 1g.10gb+me",
    32,
)
_IMAGE = Rule(
    re.compile(r"[A-Za-z0-9][-A-Za-z0-9._/:@+]*", re.ASCII),
    "must be an image such as registry.example.com/halimede:1.0",
    512,
)
_VARIABLE = Rule(
    re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*", re.ASCII),
    "must be of letters, digits, '_', '-' and '.', and not start with a digit",
    256,
)
_PERCENT = re.compile(r"(100|[0-9]{1,2})%", re.ASCII)
_SHARED_RESOURCE = Rule(
    # Its nodes have labels that end with .sharing-strategy after its name; a label has at most 63 characters.
    re.compile(r"nvidia\.com/[A-Za-z0-9]([-A-Za-z0-9_.]{0,44}[A-Za-z0-9])?", re.ASCII),
    "must be a resource such as nvidia.com/gpu.shared",
    57,
)
_COMPUTE_CAPABILITY = Rule(
    re.compile(r"[0-9]{1,2}\.[0-9]{1,2}", re.ASCII), 'must be a compute capability such as "8.0"', 5
)
_REQUEST_NAME = Rule(
    re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII),
    "must be of lower case letters, digits and '-', and begin and end with no '-'",
    60,
)
_MAX_ADDITIONAL_REQUESTS = 3
_MAX_GPUS = 64
_MAX_PRODUCTS = 16
_MAX_SELECTORS = 8
"""Kubernetes' limit of alternatives in one request."""
_MAX_SELECTOR_CHARACTERS = 2048
"""Kubernetes allows 10 KiB. The operator keeps them in an annotation of each ReplicaSet."""
_MAX_DEVICE_BYTES = 1 << 44


def read_workload(spec: Field, namespace: str, platform: Platform) -> Workload:
    serving = _serving(spec.section("serving"))
    account = spec.get("serviceAccountName")
    service_account_name = account.text(None, DNS_NAME)
    if service_account_name is not None and namespace == platform.operator_namespace:
        account.refuse(f"must not be set in namespace {namespace}, where the operator's own ServiceAccount is")
    network = spec.section("networkPolicy")
    network_policy = network.get("enabled").boolean(False)
    allow_from = tuple(read_peer(peer) for peer in network.get("allowFrom").objects())
    if allow_from and not network_policy:
        network.get("allowFrom").refuse("needs spec.networkPolicy.enabled: true")
    return Workload(
        replicas=read_replicas(spec.get("replicas"), 0, platform),
        suspend=spec.get("suspend").boolean(False),
        accelerator=_accelerator(spec.section("accelerator")),
        resources=_resources(spec.section("resources")),
        scheduling=_scheduling(spec.section("scheduling")),
        serving=serving,
        cache=_cache(spec.section("cache")),
        image=_image(spec.section("image")),
        rollout=_rollout(spec.section("rollout")),
        env=tuple(_variable(variable) for variable in spec.get("env").objects("name")),
        service_account_name=service_account_name,
        pod_template=read_overlay(
            spec.section("podTemplate"), (serving.http_port, serving.grpc_port, serving.metrics_port)
        ),
        max_unavailable=_max_unavailable(spec.section("disruption")),
        network_policy=network_policy,
        allow_from=allow_from,
        autoscaling=read_autoscaling(spec.section("autoscaling"), platform),
    )


def _accelerator(field: Field) -> Accelerator:
    kind = field.get("type")
    if field.given:
        kind.required("None, GPU, MIG, Shared or DRA")
    wanted = kind.member(AcceleratorType.NONE)
    mig, gpu, shared = field.section("mig"), field.section("gpu"), field.section("shared")
    count = field.get("count").integer(1, 1, _MAX_GPUS)
    process_per_device = field.get("processPerDevice").boolean(False)
    profile, min_memory = mig.get("profile"), mig.get("minMemory")
    if wanted is AcceleratorType.MIG:
        if profile.given == min_memory.given:
            mig.refuse("must have either profile, for instance 1g.10gb, or minMemory, for instance 9Gi")
        if count != 1 and not process_per_device:
            field.get("count").refuse(
                f"must be 1 with type MIG without processPerDevice: a process can use one MIG device, got {count}"
            )
    elif mig.given and kind.given:
        mig.refuse(f"needs type MIG, got {wanted}")
    if mig.get("allowWhole").boolean(False) and not min_memory.given:
        mig.get("allowWhole").refuse("needs minMemory")
    if wanted is AcceleratorType.SHARED and count != 1:
        field.get("count").refuse(f"must be 1 with type Shared, got {count}")
    elif shared.given and wanted is not AcceleratorType.SHARED and kind.given:
        shared.refuse(f"needs type Shared, got {wanted}")
    if wanted is AcceleratorType.NONE and kind.given:
        for name in ("count", "processPerDevice", "gpu", "moveAfter"):
            if field.get(name).given:
                field.get(name).refuse("needs an accelerator, got type None")
    claim = _device_claim(field.section("dra"), count)
    if wanted is AcceleratorType.DRA:
        for name in ("gpu", "moveAfter"):
            if field.get(name).given:
                field.get(name).refuse(
                    "must not be set with type DRA: kube-scheduler chooses the devices by dra.selectors"
                )
        if claim is None:
            field.get("dra").required("the device class, for instance {deviceClassName: mig.nvidia.com}")
    elif claim is not None and kind.given:
        field.get("dra").refuse(f"needs type DRA, got {wanted}")
    move_after = field.get("moveAfter").microseconds("24h")
    if move_after is not None and move_after < 10_000_000:
        field.get("moveAfter").refuse(f"must be at least 10s, got {shown(field.get('moveAfter').value)}")
    return Accelerator(
        type=wanted,
        count=count,
        process_per_device=process_per_device,
        move_after_seconds=(
            Accelerator().move_after_seconds if move_after is None else math.ceil(move_after / 1_000_000)
        ),
        mig_profile=profile.text(None, _MIG_PROFILE),
        mig_min_memory_mib=_mebibytes(min_memory),
        allow_whole=mig.get("allowWhole").boolean(False),
        gpu=_gpu_filter(gpu),
        shared_resource=shared.get("resourceName").text(Accelerator().shared_resource, _SHARED_RESOURCE),
        claim=claim,
    )


def _device_claim(field: Field, count: int) -> DeviceClaim | None:
    if not field.given:
        return None
    additional = []
    for each in field.get("additionalRequests").objects("name", most=_MAX_ADDITIONAL_REQUESTS):
        name = each.get("name").required("a name for these devices, for instance nic").text("", _REQUEST_NAME)
        if name == DEVICE_REQUEST:
            each.get("name").refuse("must not be 'device', which is the request of the accelerator itself")
        additional.append(DeviceRequest(name, *_class_and_selectors(each), each.get("count").integer(1, 1, _MAX_GPUS)))
    return DeviceClaim(*_class_and_selectors(field), count, tuple(additional))


def _class_and_selectors(field: Field) -> tuple[str, tuple[str, ...]]:
    device_class = field.get("deviceClassName").required("the DeviceClass, for instance mig.nvidia.com")
    selectors = field.get("selectors").items(most=_MAX_SELECTORS)
    texts = tuple(selector.text("", max_length=_MAX_SELECTOR_CHARACTERS) for selector in selectors)
    return device_class.text("", DNS_NAME), texts


def _gpu_filter(field: Field) -> GpuFilter:
    capability = field.get("minComputeCapability").text(None, _COMPUTE_CAPABILITY)
    major, _, minor = (capability or "").partition(".")
    return GpuFilter(
        products=tuple(
            dict.fromkeys(
                product.text("", LABEL_VALUE) for product in field.get("products").items(least=1, most=_MAX_PRODUCTS)
            )
        ),
        min_memory_mib=_mebibytes(field.get("minMemory")),
        min_capability=None if capability is None else (int(major), int(minor)),
    )


def _mebibytes(field: Field) -> int | None:
    """A quantity of memory in MiB, rounded up."""
    amount = field.quantity("a quantity such as 9Gi")
    if amount is None:
        return None
    if not 0 < amount <= _MAX_DEVICE_BYTES:
        field.refuse(f"must be above 0 and at most 16Ti, got {shown(field.value)}")
    return math.ceil(amount / (1 << 20))


def _resources(field: Field) -> Json:
    limits = _amounts(field.section("limits"))
    requests = _amounts(field.section("requests"))
    for name, amount in requests.items():
        if name in limits and amount > limits[name]:
            request, limit = field.get("requests").value[name], field.get("limits").value[name]
            field.get("requests").entries()[name].refuse(
                f"must not be above the limit, which is {shown(limit)}, got {shown(request)}"
            )
    # As the user wrote them: values that are passed on are not changed.
    parts = {name: field.get(name).json() for name in ("requests", "limits")}
    return {name: dict(part) for name, part in parts.items() if part}


def _amounts(field: Field) -> dict[str, Fraction]:
    amounts = {}
    for name, entry in field.entries().items():
        if name.startswith("nvidia.com/"):
            entry.refuse("must not be a resource of nvidia.com; use spec.accelerator")
        amount = entry.quantity("a quantity such as 500m or 8Gi")
        if amount is not None and amount < 0:
            entry.refuse(f"must not be negative, got {shown(entry.value)}")
        elif amount is not None:
            amounts[name] = amount
    return amounts


def _scheduling(field: Field) -> Scheduling:
    affinity = field.section("affinity")
    return Scheduling(
        node_selector={
            key: value.text("", LABEL_VALUE, empty=True)
            for key, value in field.section("nodeSelector").entries().items()
            if is_label(key, value)
        },
        tolerations=tuple(_toleration(toleration) for toleration in field.get("tolerations").objects()),
        affinity={
            name: affinity.free_section(name).json()
            for name in ("nodeAffinity", "podAffinity", "podAntiAffinity")
            if affinity.get(name).given
        },
        topology_spread=field.get("topologySpread").member(TopologySpread.NONE),
        priority_class_name=field.get("priorityClassName").text(None, DNS_NAME),
        runtime_class_name=field.get("runtimeClassName").text(None, DNS_NAME),
        scheduler_name=field.get("schedulerName").text(None, DNS_NAME),
    )


def _toleration(field: Field) -> Json:
    operator = field.get("operator").choice(None, "Equal", "Exists")
    key = field.get("key").text(None, LABEL_NAME)
    value = field.get("value").text(None, LABEL_VALUE, empty=True)
    effect = field.get("effect").choice(None, "NoSchedule", "PreferNoSchedule", "NoExecute")
    seconds = field.get("tolerationSeconds").integer(None, -INT64_MAX, INT64_MAX)
    if key is None and operator != "Exists":
        field.get("operator").refuse("must be Exists if there is no key")
    if operator == "Exists" and value:
        field.get("value").refuse("must not be set with operator Exists")
    if seconds is not None and effect != "NoExecute":
        field.get("tolerationSeconds").refuse("needs effect NoExecute")
    return without_none(key=key, operator=operator, value=value, effect=effect, tolerationSeconds=seconds)


def _serving(field: Field) -> Serving:
    protocols = [entry.choice("http", "http", "grpc") for entry in field.get("protocols").items(least=1)]
    ports = field.section("ports")
    http = ports.get("http").integer(8000, 1024, 65535)
    grpc = ports.get("grpc").integer(8001, 1024, 65535)
    metrics = ports.get("metrics").integer(8002, 1024, 65535)
    if len({http, grpc, metrics}) < len(PORT_NAMES):
        ports.refuse(f"must be three different ports, got http {http}, grpc {grpc}, metrics {metrics}")
    size = field.get("maxMessageSize").quantity("a quantity such as 64Mi")
    if size is not None and not 1024 <= size <= INT32_MAX:
        field.get("maxMessageSize").refuse(
            f"must be from 1Ki to 2147483647 (just below 2Gi), got {shown(field.get('maxMessageSize').value)}"
        )
    drain = field.get("drainTimeout").microseconds("1h")
    return Serving(
        http="http" in protocols or not protocols,
        grpc="grpc" in protocols or not protocols,
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
        max_message_bytes=None if size is None else math.ceil(size),
        drain_seconds=Serving().drain_seconds if drain is None else math.ceil(drain / 1_000_000),
        arguments=read_arguments(field.get("args")),
    )


def _cache(field: Field) -> Cache:
    medium = field.get("medium").member(CacheMedium.EMPTY_DIR)
    pvc = field.section("pvc")
    claim = pvc.get("claimName").text(None, DNS_NAME)
    sub_path = pvc.get("subPath").text(None)
    if sub_path is not None and (sub_path.startswith("/") or ".." in sub_path.split("/")):
        pvc.get("subPath").refuse(
            f"must be a path within the volume, without a leading '/' and without '..', got {shown(sub_path)}"
        )
    if medium is CacheMedium.PVC:
        pvc.get("claimName").required("the PersistentVolumeClaim of the cache")
    elif pvc.given:
        pvc.refuse(f"needs medium PVC, got {medium}")
    limit = field.get("sizeLimit")
    size = limit.quantity("a quantity such as 50Gi")
    if size is not None and size <= 0:
        limit.refuse(f"must be above 0, got {shown(limit.value)}")
    return Cache(medium, claim, sub_path, None if size is None else str(limit.value))


def _image(field: Field) -> Image:
    secrets = field.get("pullSecrets").objects("name")
    return Image(
        reference=field.get("reference").text(None, _IMAGE),
        pull_policy=field.get("pullPolicy").choice(None, "Always", "IfNotPresent", "Never"),
        pull_secrets=tuple(secret.get("name").required("the Secret's name").text("", DNS_NAME) for secret in secrets),
    )


def _rollout(field: Field) -> Rollout:
    deadline = field.get("progressDeadline")
    given = deadline.microseconds("24h")
    if given is not None and given < 10_000_000:
        deadline.refuse(f"must be at least 10s, got {shown(deadline.value)}")
    return Rollout(
        policy=field.get("policy").member(RolloutPolicy.AUTO),
        progress_seconds=Rollout().progress_seconds if given is None else math.ceil(given / 1_000_000),
        paused=field.get("paused").boolean(False),
        auto_rollback=field.get("autoRollback").boolean(True),
        upgrade_policy=field.get("upgradePolicy").member(UpgradePolicy.ON_SPEC_CHANGE),
        rebalance=field.get("rebalance").boolean(False),
    )


def _variable(field: Field) -> Json:
    name = field.get("name").required("the variable's name").text("", _VARIABLE)
    if name == NVIDIA_DEVICES:
        field.get("name").refuse(NO_DEVICE_VARIABLE)
    value = field.get("value").text(None, max_length=32768, empty=True)
    source = field.section("valueFrom")
    if source.given and field.get("value").given:
        source.refuse("must not be set together with a value")
    return without_none(name=name, value=value, valueFrom=_source(source) if source.given else None)


def _source(field: Field) -> Json:
    given = [name for name in ("secretKeyRef", "configMapKeyRef", "fieldRef") if field.get(name).given]
    if len(given) != 1:
        field.refuse(f"must have exactly one of secretKeyRef, configMapKeyRef and fieldRef, got {len(given)}")
    sources: dict[str, Any] = {}
    for name in given:
        source = field.section(name)
        if name == "fieldRef":
            path = source.get("fieldPath").required("the pod's field, for instance status.podIP").text("")
            sources[name] = {"fieldPath": path}
            continue
        optional = source.get("optional")
        sources[name] = without_none(
            name=source.get("name").required("the object that has it").text("", DNS_NAME),
            key=source.get("key").required("the key in it").text("", max_length=253),
            optional=optional.boolean(False) if optional.given else None,
        )
    return sources


def _max_unavailable(field: Field) -> int | str | None:
    disabled = field.get("disabled").boolean(False)
    most = field.get("maxUnavailable")
    if disabled:
        if most.given:
            most.refuse("has no meaning with disabled: true")
        return None
    if not isinstance(most.value, str):
        return most.integer(1, 0)
    if not _PERCENT.fullmatch(most.value):
        most.refuse(f"must be a whole number or a share such as 25%, got {shown(most.value)}")
    return most.value
