"""Parsed specs: simple ones to change a field of, and strategies for all valid ones."""

from collections.abc import Mapping
from dataclasses import replace
from string import ascii_letters, ascii_lowercase, digits
from typing import Any

from hypothesis import strategies as st

from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.types import (
    Accelerator,
    AcceleratorType,
    Autoscaling,
    CaBundle,
    Cache,
    CacheMedium,
    DeviceClaim,
    DeviceRequest,
    EnsembleSpec,
    EnsembleTensor,
    GpuFilter,
    Image,
    Key,
    Kind,
    Model,
    ModelSpec,
    Preset,
    Provider,
    Scheduling,
    Serving,
    Spec,
    Step,
    TopologySpread,
    Workload,
)
from halimede_spec.fetch_plan import FORMATS
from halimede_spec.uri import SCHEMES
from support.examples import words

UID = "0d5e7a64-6c5b-4f0c-9b1c-2f4f5d9f0a11"
PLATFORM = Platform(
    server_image="registry.example/halimede:1",
    gpu_server_image="registry.example/halimede:1-gpu",
    image_pull_secrets=("platform-registry",),
    schemes=frozenset(SCHEMES),
    file_roots=("/srv/models",),
    s3_endpoint="https://store.example",
)


def model_key(name: str = "bert") -> Key:
    return Key(Kind.INFERENCE_MODEL, "prod", name)


def ensemble_key(name: str = "search") -> Key:
    return Key(Kind.MODEL_ENSEMBLE, "prod", name)


def model(name: str = "bert", **fields: Any) -> Model:
    plain = Model(name, f"s3://models/{name}", None, None, None, None, {})
    return replace(plain, **fields)


def workload(**fields: Any) -> Workload:
    return replace(Workload(), **fields)


PLAIN = Workload()


def model_spec(name: str = "bert", *, workload: Workload = PLAIN, **fields: Any) -> ModelSpec:
    return ModelSpec(model(name, **fields), workload)


def tensor(
    name: str, source: str | None = None, data_type: str = "FP32", shape: tuple[int, ...] = (-1,)
) -> EnsembleTensor:
    return EnsembleTensor(name, data_type, shape, source)


def step(name: str, inputs: Mapping[str, str], outputs: Mapping[str, str], **fields: Any) -> Step:
    return replace(Step(name, fields.pop("model", name), None, inputs, outputs), **fields)


def search_spec(**fields: Any) -> EnsembleSpec:
    """`tok` converts a text to numbers, `pool` reduces them to one vector."""
    plain = EnsembleSpec(
        name="search",
        max_batch_size=8,
        inputs=(tensor("TEXT", data_type="BYTES", shape=(1,)),),
        outputs=(tensor("EMBEDDING", "pool.out"),),
        steps=(
            step("tok", {"text": "request.TEXT"}, {"ids": "ids"}),
            step("pool", {"ids": "tok.ids"}, {"mean": "out"}),
        ),
        workload=Workload(),
    )
    return replace(plain, **fields)


def members_of(*names: str) -> dict[str, ModelSpec]:
    return {name: model_spec(name) for name in names}


# Strategies for every valid spec.

_ALPHANUMERIC = ascii_letters + digits
_LABEL_PARTS = [ascii_lowercase, *[ascii_lowercase + digits + "-"] * 49]
_LABEL = words(_LABEL_PARTS[:22]).map(lambda label: label.rstrip("-"))
OBJECT_NAMES = st.one_of(_LABEL, words(_LABEL_PARTS, 37).map(lambda name: name.rstrip("-")))
_SUBDOMAIN = st.one_of(_LABEL, _LABEL.map(lambda label: f"{label}.{label:0>60}.{label}"))
_TENSOR_NAMES = words([ascii_letters + "_", *[_ALPHANUMERIC + "_"] * 12])
# No two dots follow each other.
_MODEL_NAMES = words([_ALPHANUMERIC, *[_ALPHANUMERIC + "_.-", _ALPHANUMERIC] * 20])
_DATA_TYPES = st.sampled_from(["BOOL", "INT64", "FP16", "FP32", "BF16", "BYTES"])
_QUANTITIES = {
    "cpu": (["0.1", "100m", 1, "1.5"], ["2", "2500m", 4, "1e1"]),
    "memory": (["64Mi", "0.5Gi", "67108864", "500M"], ["1024Mi", "8Gi", "1e10", "1.5Gi"]),
    "ephemeral-storage": (["1Gi"], ["2Gi"]),
}


@st.composite
def _resources(draw: st.DrawFn) -> dict[str, Any]:
    parts: dict[str, Any] = {"requests": {}, "limits": {}}
    for name, (least, most) in _QUANTITIES.items():
        if draw(st.booleans()):
            parts["requests"][name] = draw(st.sampled_from(least))
        if draw(st.booleans()):
            parts["limits"][name] = draw(st.sampled_from(most))
    return {part: amounts for part, amounts in parts.items() if amounts or draw(st.booleans())}


_TOLERATIONS = st.sampled_from(
    [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "search", "effect": "NoExecute", "tolerationSeconds": 0},
        {"operator": "Exists"},
        {"key": "old", "value": "", "operator": "Equal"},
    ]
)
_AFFINITIES = st.sampled_from(
    [
        {},
        {"podAntiAffinity": {}},
        {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}
                    ]
                },
                "preferredDuringSchedulingIgnoredDuringExecution": [],
            }
        },
        {
            "podAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 5, "podAffinityTerm": {"labelSelector": {}, "topologyKey": "kubernetes.io/hostname"}}
                ]
            }
        },
    ]
)
_SCHEDULING = st.builds(
    Scheduling,
    node_selector=st.dictionaries(_LABEL, st.one_of(_LABEL, st.just("")), max_size=2),
    tolerations=st.lists(_TOLERATIONS, max_size=3).map(tuple),
    affinity=_AFFINITIES,
    topology_spread=st.sampled_from(TopologySpread),
    priority_class_name=st.none() | _LABEL,
    runtime_class_name=st.none() | _LABEL,
    scheduler_name=st.none() | _LABEL,
)


@st.composite
def _serving(draw: st.DrawFn) -> Serving:
    http, grpc = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    ports = draw(st.lists(st.integers(1, 65535), min_size=3, max_size=3, unique=True))
    largest = draw(st.none() | st.sampled_from([1024, 64 << 20, 2**31 - 1]))
    return Serving(http, grpc, *ports, max_message_bytes=largest, drain_seconds=draw(st.integers(0, 3600)))


_CACHES = st.one_of(
    st.builds(
        Cache, st.sampled_from([CacheMedium.EMPTY_DIR, CacheMedium.HOST_PATH]), size_limit=st.none() | st.just("0.5Gi")
    ),
    st.builds(
        Cache,
        st.just(CacheMedium.PVC),
        claim=_SUBDOMAIN,
        sub_path=st.none() | st.just("a/b"),
        size_limit=st.none() | st.sampled_from(["50Gi", "1000M"]),
    ),
)
_GPUS = st.builds(
    GpuFilter,
    products=st.sampled_from([(), ("NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3")]),
    min_memory_mib=st.none() | st.just(40960),
    min_capability=st.sampled_from([None, (8, 0), (8, 6)]),
)
_ACCELERATORS = st.one_of(
    st.just(Accelerator()),
    st.builds(Accelerator, st.just(AcceleratorType.GPU), st.integers(1, 8), gpu=_GPUS),
    st.builds(
        Accelerator,
        st.just(AcceleratorType.MIG),
        st.integers(1, 4),
        process_per_device=st.booleans(),
        mig_profile=st.sampled_from(["1g.10gb", "1g.10gb+me"]),
        gpu=_GPUS,
    ),
    st.builds(Accelerator, st.just(AcceleratorType.MIG), mig_min_memory_mib=st.just(9216), allow_whole=st.booleans()),
    st.builds(Accelerator, st.just(AcceleratorType.SHARED), gpu=_GPUS),
    st.builds(
        Accelerator,
        st.just(AcceleratorType.DRA),
        claim=st.builds(
            DeviceClaim,
            st.just("gpu.nvidia.com"),
            st.lists(st.sampled_from(["true", "device.driver == 'x'"]), max_size=3).map(tuple),
            st.integers(1, 4),
            st.sampled_from([(), (DeviceRequest("nic", "rdma.example.com", ("true", "false"), 2),)]),
        ),
    ),
)
_VARIABLES = st.sampled_from(
    [
        {"name": "EMPTY", "value": ""},
        {"name": "PLAIN", "value": "$(POD_IP):1"},
        {"name": "POD_NAME", "value": "mine"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token", "optional": False}}},
        {"name": "FIELD", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "AMOUNT", "valueFrom": {"resourceFieldRef": {"containerName": "server", "resource": "limits.cpu"}}},
    ]
)
_OVERLAYS = st.sampled_from(
    [
        {},
        {"metadata": {"labels": {"team": "search", "empty": ""}, "annotations": {"note": "a\nb", "empty": ""}}},
        {"spec": {"hostNetwork": False, "dnsPolicy": "Default", "tolerations": [{"key": "x", "operator": "Exists"}]}},
        {
            "spec": {
                "securityContext": {"fsGroup": 1234, "supplementalGroups": []},
                "schedulerName": "",
                "nodeSelector": {},
            }
        },
        {"spec": {"terminationGracePeriodSeconds": 900.0, "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["db"]}]}},
        {
            "spec": {
                "containers": [
                    {
                        "name": "server",
                        "env": [{"name": "EXTRA", "value": "1"}],
                        "volumeMounts": [{"name": "extra", "mountPath": "/extra", "readOnly": False}],
                        "startupProbe": {"failureThreshold": 10, "initialDelaySeconds": 0},
                    },
                    {"name": "proxy", "image": "proxy:1", "ports": [{"containerPort": 9000}], "tty": False},
                ],
                "initContainers": [{"name": "first", "image": "tool:1", "restartPolicy": "Always"}],
                "volumes": [
                    {
                        "name": "extra",
                        "projected": {
                            "sources": [
                                {"serviceAccountToken": {"path": "token", "audience": "store"}},
                                {
                                    "downwardAPI": {
                                        "items": [{"path": "ip", "fieldRef": {"fieldPath": "metadata.name"}}]
                                    }
                                },
                            ]
                        },
                    }
                ],
            }
        },
        {"spec": {"enableServiceLinks": True, "containers": [{"name": "server", "lifecycle": {}}]}},
        {
            "spec": {
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 2,
                        "topologyKey": "topology.kubernetes.io/zone",
                        "whenUnsatisfiable": "ScheduleAnyway",
                        "labelSelector": {"matchLabels": {"team": ""}},
                    }
                ]
            }
        },
    ]
)
_PEERS = st.sampled_from(
    [
        {"podSelector": {}},
        {"namespaceSelector": {"matchLabels": {"team": "search"}}, "podSelector": {"matchLabels": {"app": ""}}},
        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
    ]
)
_METRIC = {"metric": {"name": "mine", "selector": {"matchLabels": {"team": ""}}}}
_AUTOSCALING = st.sampled_from(
    [
        None,
        None,
        Autoscaling(max_replicas=4),
        Autoscaling(max_replicas=4, min_replicas=2, preset=Preset.CONCURRENCY, target="0.5k"),
        Autoscaling(
            max_replicas=4,
            preset=None,
            metrics=(
                {"type": "External", "external": {**_METRIC, "target": {"type": "Value", "value": 1}}},
                {
                    "type": "Resource",
                    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
                },
            ),
            behavior={"scaleUp": {"stabilizationWindowSeconds": 0, "selectPolicy": "Disabled"}},
        ),
        Autoscaling(max_replicas=4, provider=Provider.EXTERNAL, preset=None),
    ]
)
_WORKLOADS = st.builds(
    Workload,
    autoscaling=_AUTOSCALING,
    replicas=st.integers(0, 5),
    suspend=st.booleans(),
    accelerator=_ACCELERATORS,
    resources=_resources(),
    scheduling=_SCHEDULING,
    serving=_serving(),
    cache=_CACHES,
    image=st.builds(
        Image,
        reference=st.none() | st.just("registry.example/mine@sha256:" + "0" * 64),
        pull_policy=st.none() | st.sampled_from(["Always", "IfNotPresent", "Never"]),
        pull_secrets=st.lists(st.sampled_from(["mine", "platform-registry"]), max_size=2).map(tuple),
    ),
    env=st.lists(_VARIABLES, max_size=3, unique_by=lambda each: str(each["name"])).map(tuple),
    service_account_name=st.none() | _LABEL,
    pod_template=_OVERLAYS,
    max_unavailable=st.sampled_from([None, 0, 1, "25%"]),
    network_policy=st.booleans(),
    allow_from=st.lists(_PEERS, max_size=2).map(tuple),
)
_CONFIGS = st.sampled_from(
    [
        {},
        {"maxBatchSize": 8, "dynamicBatching": {"maxQueueDelayMicroseconds": 5000}},
        {"versionPolicy": {"all": {}}},
        {"versionPolicy": {"specific": {"versions": [1, 3]}}},
        {"instanceGroup": [{"kind": "KIND_CPU", "count": 2}], "parameters": {"k": {"stringValue": "v"}}},
    ]
)


@st.composite
def _models(draw: st.DrawFn, name: str) -> Model:
    uri = draw(
        st.sampled_from(
            [
                f"s3://models/{name}/",
                "https://web.example/m.onnx",
                "pvc://claim/a/b",
                "pvc://another.claim",
                "file:///srv/models/a:b",
            ]
        )
    )
    return Model(
        name=name,
        uri=uri,
        digest=draw(st.none() | st.just("sha256:" + "a" * 64)),
        format=draw(st.none() | st.sampled_from(sorted(FORMATS))),
        credentials_secret=draw(st.none() | _SUBDOMAIN),
        ca_bundle=draw(st.none() | st.builds(CaBundle, _SUBDOMAIN, st.sampled_from(["ca.crt", "root.pem"]))),
        config=draw(_CONFIGS),
    )


@st.composite
def model_specs(draw: st.DrawFn) -> ModelSpec:
    name = draw(_MODEL_NAMES)
    return ModelSpec(draw(_models(name)), draw(_WORKLOADS))


@st.composite
def ensembles(draw: st.DrawFn) -> tuple[EnsembleSpec, dict[str, ModelSpec]]:
    """An ensemble that the server can run, with its members."""
    inputs = draw(st.lists(_TENSOR_NAMES.map("I{}".format), min_size=1, max_size=3, unique=True))
    sources = [f"request.{name}" for name in inputs]
    unread = set(sources)
    steps: list[Step] = []
    count = draw(st.integers(1, 4))
    for i in range(count):
        last = i == count - 1
        takes = sorted(unread) if last and unread else draw(st.lists(st.sampled_from(sources), min_size=1, max_size=3))
        unread -= set(takes)
        locals_ = draw(st.lists(_TENSOR_NAMES, min_size=1, max_size=2, unique=True))
        when = draw(
            st.none() | st.sampled_from(takes).map(lambda source: f"`{source}`.present and not parameters.fast")
        )
        steps.append(
            Step(
                name=f"step-{i}",
                model=f"member-{draw(st.integers(0, count - 1))}",
                version=draw(st.none() | st.sampled_from([1, 2])),
                inputs={f"IN{j}": source for j, source in enumerate(takes)},
                outputs={f"OUT{j}": local for j, local in enumerate(locals_)},
                when=when,
            )
        )
        sources += [f"step-{i}.{local}" for local in locals_]
    read = {source for each in steps for source in each.inputs.values()}
    wanted: list[str] = []
    for each in steps:
        made = [f"{each.name}.{local}" for local in each.outputs.values()]
        if draw(st.booleans()):
            wanted += made
        elif not read.intersection(made):
            wanted.append(made[0])
    names = draw(st.lists(_TENSOR_NAMES, min_size=len(wanted), max_size=len(wanted), unique=True))
    outputs = [(f"O_{name}", source) for name, source in zip(names, wanted, strict=True)]
    spec = EnsembleSpec(
        name=draw(_LABEL),
        max_batch_size=draw(st.integers(0, 16)),
        inputs=tuple(EnsembleTensor(name, draw(_DATA_TYPES), (-1, 3)) for name in inputs),
        outputs=tuple(EnsembleTensor(name, draw(_DATA_TYPES), (1,), source) for name, source in outputs),
        steps=tuple(steps),
        workload=draw(_WORKLOADS),
    )
    used = sorted({each.model for each in steps})
    return spec, {name: ModelSpec(draw(_models(f"{name}-served")), Workload()) for name in used}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Key, Spec, dict[str, ModelSpec]]:
    """Arguments of `desired`: any valid spec with any name."""
    name = draw(OBJECT_NAMES)
    if draw(st.booleans()):
        return model_key(name), draw(model_specs()), {}
    spec, members = draw(ensembles())
    return ensemble_key(name), spec, members
