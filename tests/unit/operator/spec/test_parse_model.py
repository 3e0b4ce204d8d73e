"""Parsing of InferenceModels into specs."""

from typing import Any

import pytest

from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import (
    Accelerator,
    AcceleratorType,
    Autoscaling,
    CaBundle,
    Cache,
    CacheMedium,
    GpuFilter,
    Image,
    Kind,
    Model,
    ModelSpec,
    Preset,
    Problem,
    Rollout,
    RolloutPolicy,
    ScaleToZero,
    Scheduling,
    Serving,
    TopologySpread,
    UpgradePolicy,
    Workload,
)
from support.custom_resources import ABSENT, FULL_MODEL, Json, changed, model

PLATFORM = Platform(server_image="server", gpu_server_image="gpu-server")


def spec_of(example: Json, platform: Platform = PLATFORM) -> ModelSpec:
    spec, problems = parse(Kind.INFERENCE_MODEL, example, platform)
    assert problems == ()
    assert isinstance(spec, ModelSpec)
    return spec


def problems_of(example: Json, platform: Platform = PLATFORM) -> list[tuple[str, str]]:
    spec, problems = parse(Kind.INFERENCE_MODEL, example, platform)
    assert spec is None
    return [(problem.path, problem.message) for problem in problems]


def test_a_minimal_model_gets_all_defaults() -> None:
    nothing_changed = Model(
        name="bert",
        uri="s3://models/bert",
        digest=None,
        format=None,
        credentials_secret=None,
        ca_bundle=None,
        config={},
    )
    assert spec_of(model()) == ModelSpec(nothing_changed, Workload())


def test_every_field_of_a_model_is_parsed() -> None:
    spec = FULL_MODEL["spec"]
    assert spec_of(FULL_MODEL) == ModelSpec(
        model=Model(
            name="bert",
            uri="s3://models/bert",
            digest=f"sha256:{'0' * 64}",
            format="onnx",
            credentials_secret="store",
            ca_bundle=CaBundle("ca", "root.pem"),
            config={
                "versionPolicy": {"latest": {"numVersions": 2}},
                **spec["model"]["config"],
            },
        ),
        workload=Workload(
            replicas=2,
            suspend=False,
            accelerator=Accelerator(
                AcceleratorType.GPU,
                2,
                process_per_device=True,
                move_after_seconds=300,
                gpu=GpuFilter(("NVIDIA-H100-80GB-HBM3",), 40960, (8, 0)),
            ),
            resources=spec["resources"],
            scheduling=Scheduling(
                node_selector={"example.com/disk": "ssd"},
                tolerations=tuple(spec["scheduling"]["tolerations"]),
                affinity=spec["scheduling"]["affinity"],
                topology_spread=TopologySpread.ZONE,
                priority_class_name="high",
                runtime_class_name="nvidia",
                scheduler_name="other",
            ),
            serving=Serving(
                http=True,
                grpc=True,
                http_port=9000,
                grpc_port=9001,
                metrics_port=9002,
                max_message_bytes=64 * 1024**2,
                drain_seconds=90,
                arguments=("--log-verbose=1",),
            ),
            cache=Cache(CacheMedium.PVC, "models", "cache", "50Gi"),
            image=Image("example.com/halimede:1", "Always", ("registry",)),
            env=tuple(spec["env"]),
            service_account_name="reader",
            pod_template=spec["podTemplate"],
            rollout=Rollout(RolloutPolicy.IN_PLACE, 5400, False, False, UpgradePolicy.AUTO, rebalance=True),
            max_unavailable="25%",
            autoscaling=Autoscaling(
                max_replicas=8,
                min_replicas=2,
                preset=Preset.CONCURRENCY,
                target="6",
                behavior={"scaleDown": {"stabilizationWindowSeconds": 60}},
                scale_to_zero=ScaleToZero(600),
            ),
            network_policy=True,
            allow_from=tuple(spec["networkPolicy"]["allowFrom"]),
        ),
    )


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        ({"latest": 3}, {"latest": {"numVersions": 3}}),
        ({"all": {}}, {"all": {}}),
        ({"specific": [1, 3]}, {"specific": {"versions": [1, 3]}}),
    ],
)
def test_a_version_policy(policy: Json, config: Json) -> None:
    spec = spec_of(changed(model(), {"spec.model.versionPolicy": policy}))
    assert spec.model.config == {"versionPolicy": config}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("spec.replicas", True, "must be a whole number of at least 0, got true"),
        ("spec.replicas", 8.0, "must be a whole number of at least 0, got 8.0"),
        ("spec.model.uri", {}, "must be a text, got an object"),
        ("spec.env", {}, "must be a list, got an object"),
        ("spec.scheduling", ["x"], "must be an object, got a list"),
        ("spec.suspend", "true", "must be true or false, got 'true'"),
        ("spec.scheduling.topologySpread", "z" * 99, f"must be one of None, Node, Zone, got '{'z' * 60}'..."),
        ("spec.accelerator.count", 65, "must be a whole number from 1 to 64, got 65"),
        ("metadata.name", "Bert", None),
    ],
)
def test_a_problem_has_the_path_and_the_value(path: str, value: Any, message: str | None) -> None:
    base = changed(model(), {"spec.accelerator": {"type": "GPU"}})
    found = problems_of(changed(base, {path: value}))
    assert [where for where, _ in found] == [path]
    if message is not None:
        assert found[0][1] == message


def test_all_problems_are_reported_at_once_with_their_paths() -> None:
    broken = changed(
        model(),
        {
            "spec.model.uri": "ftp://models/bert",
            "spec.model.format": "caffe",
            "spec.model.config": {"instanceGroup": [{"count": 1}, {"count": "many"}]},
            "spec.replicas": -1,
            "spec.resources": {"requests": {"cpu": "two"}},
            "spec.env": [{"name": "A", "value": "1"}, {"value": "2"}],
        },
    )
    assert [path for path, _ in problems_of(broken)] == [
        "spec.replicas",
        "spec.resources.requests[cpu]",
        "spec.env[1].name",
        "spec.model.uri",
        "spec.model.format",
        "spec.model.config.instanceGroup[1].count",
    ]


def test_parse_returns_either_a_spec_or_problems() -> None:
    assert parse(Kind.INFERENCE_MODEL, {}, PLATFORM) == (
        None,
        (
            Problem("metadata.name", "is required: the object's name"),
            Problem("spec", "is required: what to serve"),
            Problem("spec.model.uri", "is required: where the model's files are, for instance s3://models/bert"),
        ),
    )


def test_null_means_absent_and_unknown_fields_are_ignored() -> None:
    resource = changed(model(), {"spec.replicas": None, "spec.model.name": None, "spec.routing": {"ingress": "KEDA"}})
    assert spec_of(resource) == spec_of(model())


def test_only_schemes_allowed_by_the_platform_are_accepted() -> None:
    restricted = Platform(server_image="s", gpu_server_image="g", schemes=frozenset({"s3", "pvc"}))
    assert problems_of(changed(model(), {"spec.model.uri": "https://example.com/bert"}), restricted) == [
        ("spec.model.uri", "must have a scheme that is allowed here (pvc, s3), got 'https://example.com/bert'")
    ]
    assert spec_of(changed(model(), {"spec.model.uri": "pvc://models/bert"}), restricted)


@pytest.mark.parametrize(
    ("uri", "is_allowed"),
    [
        ("file:///srv/models/bert", True),
        ("file:///data", True),
        ("file:///srv/models2/bert", False),
        ("file:///srv/models/../../etc", False),
        ("file:///etc/shadow", False),
        ("file:///", False),
    ],
)
def test_file_uris_must_be_below_an_allowed_folder(uri: str, is_allowed: bool) -> None:
    platform = Platform("s", "g", schemes=frozenset({"file"}), file_roots=("/srv/models", "/data"))
    _, problems = parse(Kind.INFERENCE_MODEL, changed(model(), {"spec.model.uri": uri}), platform)
    assert (problems == ()) is is_allowed


def test_file_uris_are_refused_by_default() -> None:
    ((path, message),) = problems_of(changed(model(), {"spec.model.uri": "file:///srv/models/bert"}))
    assert path == "spec.model.uri"
    assert message.startswith("must have a scheme that is allowed here (as, az, azure, gs, http, https, pvc, s3)")
    no_roots = Platform("s", "g", schemes=frozenset({"file"}))
    ((_, message),) = problems_of(changed(model(), {"spec.model.uri": "file:///srv/models/bert"}), no_roots)
    assert message == "must be within a folder that is allowed here (none), got 'file:///srv/models/bert'"


def test_service_accounts_are_refused_in_the_operators_namespace() -> None:
    resource = changed(model(), {"spec.serviceAccountName": "halimede-operator"})
    assert spec_of(resource).workload.service_account_name == "halimede-operator"
    assert problems_of(changed(resource, {"metadata.namespace": PLATFORM.operator_namespace})) == [
        (
            "spec.serviceAccountName",
            "must not be set in namespace halimede, where the operator's own ServiceAccount is",
        )
    ]


@pytest.mark.parametrize(
    ("changes", "workload"),
    [
        ({"spec.accelerator": {"type": "GPU"}}, Workload(accelerator=Accelerator(AcceleratorType.GPU, 1))),
        (
            {"spec.accelerator": {"type": "MIG", "mig": {"minMemory": "9.0001Gi", "allowWhole": True}}},
            Workload(accelerator=Accelerator(AcceleratorType.MIG, mig_min_memory_mib=9217, allow_whole=True)),
        ),
        (
            {"spec.accelerator": {"type": "Shared", "shared": {"resourceName": "nvidia.com/gpu"}}},
            Workload(accelerator=Accelerator(AcceleratorType.SHARED, shared_resource="nvidia.com/gpu")),
        ),
        (
            {"spec.accelerator": {"type": "MIG", "mig": {"profile": "1g.10gb+me"}}},
            Workload(accelerator=Accelerator(AcceleratorType.MIG, mig_profile="1g.10gb+me")),
        ),
        ({"spec.disruption": {"disabled": True}}, Workload(max_unavailable=None)),
        ({"spec.disruption": {"maxUnavailable": 0}}, Workload(max_unavailable=0)),
        ({"spec.serving": {"protocols": ["grpc"]}}, Workload(serving=Serving(http=False))),
        ({"spec.serving": {"drainTimeout": "1500ms"}}, Workload(serving=Serving(drain_seconds=2))),
        ({"spec.serving": {"drainTimeout": "0s"}}, Workload(serving=Serving(drain_seconds=0))),
        (
            {"spec.rollout": {"policy": "Recreate", "progressDeadline": "10500ms", "paused": True}},
            Workload(rollout=Rollout(RolloutPolicy.RECREATE, 11, paused=True)),
        ),
        ({"spec.serving": {"maxMessageSize": 2048}}, Workload(serving=Serving(max_message_bytes=2048))),
        ({"spec.cache": {"medium": "HostPath"}}, Workload(cache=Cache(CacheMedium.HOST_PATH))),
        ({"spec.cache": {"sizeLimit": 1000}}, Workload(cache=Cache(size_limit="1000"))),
        ({"spec.replicas": 0, "spec.suspend": True}, Workload(replicas=0, suspend=True)),
        ({"spec.networkPolicy": {"enabled": True}}, Workload(network_policy=True)),
        (
            {"spec.resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": 0.5}}},
            Workload(resources={"requests": {"cpu": "500m"}, "limits": {"cpu": 0.5}}),
        ),
        ({"spec.env": [{"name": "A"}]}, Workload(env=({"name": "A"},))),
        ({"spec.podTemplate": {"metadata": {"labels": {}}, "spec": {}}}, Workload()),
    ],
)
def test_pod_settings_become_the_workload(changes: Json, workload: Workload) -> None:
    assert spec_of(changed(model(), changes)).workload == workload


def metric(**target: Any) -> Json:
    pods = {"metric": {"name": "queue"}, "target": {"type": "AverageValue", **target}}
    return {"maxReplicas": 2, "metrics": [{"type": "Pods", "pods": pods}]}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"spec.networkPolicy": {"allowFrom": [{"podSelector": {}}]}}, "spec.networkPolicy.allowFrom"),
        ({"spec.networkPolicy": {"enabled": True, "allowFrom": ["all"]}}, "spec.networkPolicy.allowFrom[0]"),
        ({"spec.env": ["A=1"]}, "spec.env[0]"),
        ({"spec.image": {"pullSecrets": ["registry"]}}, "spec.image.pullSecrets[0]"),
        ({"spec.env": [{"name": "A", "valueFrom": {"fieldRef": {}}}]}, "spec.env[0].valueFrom.fieldRef.fieldPath"),
        ({"spec.scheduling": {"nodeSelector": {"disk": "a b"}}}, "spec.scheduling.nodeSelector[disk]"),
        ({"spec.scheduling": {"nodeSelector": {"a b": "disk"}}}, "spec.scheduling.nodeSelector[a b]"),
        ({"spec.model.versionPolicy": {"latest": 1, "specific": [1]}}, "spec.model.versionPolicy"),
        ({"spec.model.versionPolicy": {"specific": [2, 2]}}, "spec.model.versionPolicy.specific[1]"),
        ({"spec.autoscaling": metric(averageValue="4 GB")}, "spec.autoscaling.metrics[0].pods.target.averageValue"),
        ({"spec.autoscaling": metric(value=[])}, "spec.autoscaling.metrics[0].pods.target.value"),
        (
            {"spec.autoscaling": {"maxReplicas": 2, "behavior": {"scaleUp": {"tolerance": "some"}}}},
            "spec.autoscaling.behavior.scaleUp.tolerance",
        ),
    ],
)
def test_problems_that_the_schema_does_not_find_are_reported(changes: Json, path: str) -> None:
    assert path in [where for where, _ in problems_of(changed(model(), changes))]


@pytest.mark.parametrize(
    ("block", "hole", "is_good"),
    [
        ("10.0.0.0/8", "10.1.0.0/16", True),
        ("2001:db8::/32", "2001:db8:1::/48", True),
        ("10.0.0.0/8", "10.0.0.0/8", False),
        ("10.0.0.0/8", "10.0.0.0/7", False),
        ("10.0.0.0/8", "11.0.0.0/16", False),
        ("10.0.0.0/8", "2001:db8::/32", False),
        ("10.0.0.0/8", "10.1.0.0/255.255.0.0", False),
        ("10.0.0.0/8", "10.1.0.0", False),
        ("10.0.0.0/33", "10.1.0.0/16", False),
    ],
)
def test_blocks_of_addresses(block: str, hole: str, is_good: bool) -> None:
    peer = {"ipBlock": {"cidr": block, "except": [hole]}}
    resource = changed(model(), {"spec.networkPolicy": {"enabled": True, "allowFrom": [peer]}})
    _, problems = parse(Kind.INFERENCE_MODEL, resource, PLATFORM)
    assert (problems == ()) is is_good


def test_a_model_without_spec_model_has_a_problem() -> None:
    assert problems_of(changed(model(), {"spec.model": ABSENT})) == [
        ("spec.model.uri", "is required: where the model's files are, for instance s3://models/bert")
    ]


@pytest.mark.parametrize("path", ["spec.replicas", "spec.cache.sizeLimit", "spec.resources.limits[cpu]"])
def test_a_number_with_too_many_digits_is_a_problem(path: str) -> None:
    ((where, message),) = problems_of(changed(model(), {path: 10**5000}))
    assert where == path
    assert message.endswith("got a number that is too large")


def test_replicas_are_limited_by_the_platform() -> None:
    platform = Platform("server:1", "gpu:1", max_replicas=20)
    assert spec_of(changed(model(), {"spec.replicas": 20}), platform).workload.replicas == 20
    text = "must be at most 20, which is --max-replicas of the operator (models.maxReplicas of the chart), got 1000"
    assert problems_of(changed(model(), {"spec.replicas": 1000}), platform) == [("spec.replicas", text)]
    scaled = changed(model(), {"spec.autoscaling": {"maxReplicas": 1000}})
    assert problems_of(scaled, platform) == [("spec.autoscaling.maxReplicas", text)]


def test_a_password_in_a_uri_is_not_in_the_message() -> None:
    ((_, message),) = problems_of(changed(model(), {"spec.model.uri": "https://me:secret@example.com/bert.onnx"}))
    assert message.startswith("must not carry a user or a password")
    assert "secret@" not in message


@pytest.mark.parametrize(
    "path",
    [
        "spec.scheduling.tolerations",
        "spec.image.pullSecrets",
        "spec.env",
        "spec.model.config.instanceGroup",
        "spec.podTemplate.spec.containers",
    ],
)
def test_list_entries_that_are_no_objects_are_refused(path: str) -> None:
    assert problems_of(changed(model(), {path: ["x", []]})) == [
        (f"{path}[0]", "must be an object, got 'x'"),
        (f"{path}[1]", "must be an object, got a list"),
    ]
