import json
from dataclasses import replace
from typing import Any

import pytest

from halimede_operator.core.spec.types import (
    Accelerator,
    AcceleratorType,
    CaBundle,
    Cache,
    CacheMedium,
    Image,
    ModelSpec,
    Scheduling,
    Serving,
    TopologySpread,
    Workload,
)
from support.operator_children import Object, children_of, fetch_of, named, pod_of, server_of, template_of
from support.operator_specs import PLATFORM, model_spec, workload

GPU = Accelerator(AcceleratorType.GPU, 2)
MIG = Accelerator(AcceleratorType.MIG, mig_profile="1g.10gb+me")
FETCH_COMMAND = ["halimede", "fetch", "--init-container", "--plan", "/etc/halimede/plan.json", "--into", "/models"]
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def of_pod(name: str, path: str) -> Object:
    """A variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def probe(path: str, *, period: int, timeout: int, failures: int) -> Object:
    get = {"path": f"/v2/health/{path}", "port": "http"}
    return {"httpGet": get, "periodSeconds": period, "timeoutSeconds": timeout, "failureThreshold": failures}


def pod(**fields: Any) -> Object:
    return pod_of(model_spec(workload=workload(**fields)))


def test_the_pod_of_a_minimal_spec() -> None:
    children = children_of(model_spec())

    assert template_of(children)["spec"] == {
        "serviceAccountName": "bert",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "imagePullSecrets": [{"name": "platform-registry"}],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 40,
        "initContainers": [
            {
                "name": "fetch",
                "image": "registry.example/halimede:1",
                "imagePullPolicy": "IfNotPresent",
                "command": FETCH_COMMAND,
                "resources": {},
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": {**RESTRICTED, "readOnlyRootFilesystem": True},
                "volumeMounts": [
                    {"name": "models", "mountPath": "/models"},
                    {"name": "config", "mountPath": "/etc/halimede", "readOnly": True},
                    {"name": "tmp", "mountPath": "/tmp"},
                ],
            }
        ],
        "containers": [
            {
                "name": "server",
                "image": "registry.example/halimede:1",
                "imagePullPolicy": "IfNotPresent",
                "command": ["halimede", "serve"],
                "args": [
                    "--model-repository=/models",
                    "--http-port=8000",
                    "--grpc-port=8001",
                    "--metrics-port=8002",
                    "--drain-delay=5",
                    "--exit-timeout-secs=25",
                    "--log-format=json",
                ],
                "env": [
                    of_pod("POD_NAME", "metadata.name"),
                    of_pod("POD_NAMESPACE", "metadata.namespace"),
                    of_pod("POD_IP", "status.podIP"),
                    of_pod("NODE_NAME", "spec.nodeName"),
                ],
                "resources": {},
                "ports": [
                    {"name": "grpc", "containerPort": 8001, "protocol": "TCP"},
                    {"name": "http", "containerPort": 8000, "protocol": "TCP"},
                    {"name": "metrics", "containerPort": 8002, "protocol": "TCP"},
                ],
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": {**RESTRICTED, "readOnlyRootFilesystem": True},
                "volumeMounts": [
                    {"name": "models", "mountPath": "/models", "readOnly": True},
                    {"name": "config", "mountPath": "/etc/halimede", "readOnly": True},
                    {"name": "tmp", "mountPath": "/tmp"},
                    {"name": "shm", "mountPath": "/dev/shm"},
                ],
                "startupProbe": probe("ready", period=1, timeout=5, failures=600),
                "readinessProbe": probe("ready", period=2, timeout=2, failures=3),
                "livenessProbe": probe("live", period=10, timeout=5, failures=6),
            }
        ],
        "volumes": [
            {"name": "models", "emptyDir": {}},
            {
                "name": "config",
                "configMap": {
                    "name": children["ConfigMap"]["metadata"]["name"],
                    # The ConfigMap has the template too.
                    "items": [{"key": "plan.json", "path": "plan.json"}],
                },
            },
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        ],
    }


def test_the_pods_labels_match_the_selectors() -> None:
    template = template_of(children_of(model_spec()))

    labels = dict(template["metadata"]["labels"])
    assert len(labels.pop("halimede.dev/revision")) == 8
    assert labels == {
        "app.kubernetes.io/name": "inference-server",
        "app.kubernetes.io/instance": "bert",
        "app.kubernetes.io/component": "predictor",
        "app.kubernetes.io/managed-by": "halimede-operator",
        "app.kubernetes.io/part-of": "halimede",
        "halimede.dev/model": "bert",
        "halimede.dev/track": "stable",
    }


def test_a_different_template_has_a_different_revision() -> None:
    def revision(**fields: Any) -> str:
        labels = template_of(children_of(model_spec(workload=workload(**fields))))["metadata"]["labels"]
        return str(labels["halimede.dev/revision"])

    assert revision() == revision(replicas=7, suspend=True)
    assert revision() != revision(image=Image("other:1"))
    assert revision() != revision(pod_template={"metadata": {"annotations": {"a": "b"}}})


@pytest.mark.parametrize(
    ("accelerator", "limits"),
    [(GPU, {"cpu": "2", "nvidia.com/gpu": "2"}), (MIG, {"cpu": "2", "nvidia.com/mig-1g.10gb.me": "1"})],
)
def test_only_the_server_container_requests_devices(accelerator: Accelerator, limits: dict[str, str]) -> None:
    made = pod(accelerator=accelerator, resources={"limits": {"cpu": "2"}, "requests": {"cpu": "1"}})

    assert server_of(made)["resources"] == {"limits": limits, "requests": {"cpu": "1"}}
    assert fetch_of(made)["resources"] == {"limits": {"cpu": "2"}, "requests": {"cpu": "1"}}
    assert {container["image"] for container in (fetch_of(made), server_of(made))} == {
        "registry.example/halimede:1-gpu"
    }
    assert made["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert {"name": "CUDA_MODULE_LOADING", "value": "LAZY"} in server_of(made)["env"]


def test_the_fetcher_requests_only_ordinary_resources() -> None:
    amounts = {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi", "example.com/fpga": "1", "hugepages-2Mi": "2Mi"}

    made = pod(resources={"limits": amounts})

    assert fetch_of(made)["resources"] == {"limits": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi"}}
    assert server_of(made)["resources"] == {"limits": amounts}


def test_scheduling_settings_are_passed_to_the_pod() -> None:
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}]}}
    own = (
        {"key": "team", "operator": "Exists"},
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    )

    made = pod(
        accelerator=GPU,
        scheduling=Scheduling(
            node_selector={"disk": "fast"},
            tolerations=own,
            affinity=affinity,
            priority_class_name="high",
            runtime_class_name="nvidia",
            scheduler_name="other",
        ),
    )

    assert made["nodeSelector"] == {"disk": "fast"}
    assert made["tolerations"] == list(own)
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    [term] = made["affinity"]["nodeAffinity"].pop(required)["nodeSelectorTerms"]
    assert term["matchExpressions"][0] == {"key": "nvidia.com/gpu.slices.gi", "operator": "DoesNotExist"}
    assert made["affinity"] == affinity
    assert (made["priorityClassName"], made["runtimeClassName"], made["schedulerName"]) == ("high", "nvidia", "other")


@pytest.mark.parametrize(
    ("preset", "topology_key"),
    [(TopologySpread.NODE, "kubernetes.io/hostname"), (TopologySpread.ZONE, "topology.kubernetes.io/zone")],
)
def test_pods_of_one_revision_are_spread(preset: TopologySpread, topology_key: str) -> None:
    assert pod(scheduling=Scheduling(topology_spread=preset))["topologySpreadConstraints"] == [
        {
            "maxSkew": 1,
            "topologyKey": topology_key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"halimede.dev/model": "bert"}},
            "matchLabelKeys": ["pod-template-hash"],
        }
    ]


def test_a_protocol_that_is_not_served_has_no_port() -> None:
    without_grpc = server_of(pod(serving=Serving(grpc=False, max_message_bytes=1 << 20)))
    assert "--allow-grpc=false" in without_grpc["args"]
    assert not any(argument.startswith("--grpc") for argument in without_grpc["args"])
    assert [port["name"] for port in without_grpc["ports"]] == ["http", "metrics"]

    # Probes and the operator ask over HTTP: it is taken from the Services alone.
    without_http = server_of(pod(serving=Serving(http=False)))
    assert without_http == server_of(pod())


def test_serving_settings_become_server_arguments() -> None:
    made = pod(serving=Serving(True, True, 9000, 9001, 9002, max_message_bytes=1 << 20, drain_seconds=60))

    assert server_of(made)["args"] == [
        "--model-repository=/models",
        "--http-port=9000",
        "--grpc-port=9001",
        "--metrics-port=9002",
        "--drain-delay=5",
        "--exit-timeout-secs=60",
        "--log-format=json",
        "--http-max-input-size=1048576",
        "--grpc-max-input-size=1048576",
    ]
    assert made["terminationGracePeriodSeconds"] == 75


def test_variables_of_the_object_override_ours_in_both_containers() -> None:
    given = ({"name": "HTTPS_PROXY", "value": "http://proxy"}, {"name": "POD_IP", "value": "mine"})

    made = pod(env=given)

    assert fetch_of(made)["env"] == list(given)
    assert [variable["name"] for variable in server_of(made)["env"]] == [
        *("POD_NAME", "POD_NAMESPACE", "NODE_NAME"),
        *("HTTPS_PROXY", "POD_IP"),
    ]
    assert named(server_of(made)["env"], "POD_IP") == given[1]


def test_images_and_accounts_of_the_object_override_the_platforms() -> None:
    made = pod(
        image=Image("mine:1", "Always", ("mine", "platform-registry")),
        accelerator=GPU,
        service_account_name="with-identity",
    )

    for container in (fetch_of(made), server_of(made)):
        assert (container["image"], container["imagePullPolicy"]) == ("mine:1", "Always")
    assert made["imagePullSecrets"] == [{"name": "platform-registry"}, {"name": "mine"}]
    assert made["serviceAccountName"] == "with-identity"


def cache_of(made: Object) -> tuple[Object, list[Object]]:
    """The volume, and its mounts in the fetcher and in the server."""
    return named(made["volumes"], "cache"), [
        named(c["volumeMounts"], "cache") for c in (fetch_of(made), server_of(made))
    ]


def test_without_a_cache_the_models_folder_has_the_limit() -> None:
    made = pod(cache=Cache(size_limit="50Gi"))

    assert named(made["volumes"], "models") == {"name": "models", "emptyDir": {"sizeLimit": "50Gi"}}
    assert [volume["name"] for volume in made["volumes"]] == ["models", "config", "tmp", "shm"]


def test_a_cache_on_the_node_must_exist() -> None:
    made = pod(cache=Cache(CacheMedium.HOST_PATH, size_limit="50Gi"))

    assert cache_of(made) == (
        {"name": "cache", "hostPath": {"path": "/var/lib/halimede/cache", "type": "Directory"}},
        [{"name": "cache", "mountPath": "/cache"}, {"name": "cache", "mountPath": "/cache", "readOnly": True}],
    )
    assert named(made["volumes"], "models") == {"name": "models", "emptyDir": {}}
    assert "fsGroup" not in made["securityContext"]


def test_a_cache_on_a_claim_sets_fs_group() -> None:
    made = pod(cache=Cache(CacheMedium.PVC, "shared", "models/cache"))

    mount = {"name": "cache", "mountPath": "/cache", "subPath": "models/cache"}
    assert cache_of(made) == (
        {"name": "cache", "persistentVolumeClaim": {"claimName": "shared"}},
        [mount, {**mount, "readOnly": True}],
    )
    assert made["securityContext"]["fsGroup"] == 65532
    assert made["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_the_fetch_plan_has_the_cache() -> None:
    def cache_in_plan(cache: Cache) -> Any:
        plan = children_of(model_spec(workload=workload(cache=cache)))["ConfigMap"]["data"]["plan.json"]
        return json.loads(plan).get("cache")

    assert cache_in_plan(Cache(size_limit="1Gi")) is None
    assert cache_in_plan(Cache(CacheMedium.HOST_PATH)) == {"path": "/cache"}
    assert cache_in_plan(Cache(CacheMedium.PVC, "shared", size_limit="0.5Gi")) == {
        "path": "/cache",
        "size_limit_bytes": 512 << 20,
    }


def test_secrets_are_mounted_only_in_the_fetcher() -> None:
    made = pod_of(model_spec(credentials_secret="store-keys", ca_bundle=CaBundle("corp.ca", "root.pem")))

    bundle = made["volumes"][-1]["name"]
    assert made["volumes"][-2:] == [
        {"name": "credentials-store-keys", "secret": {"secretName": "store-keys", "defaultMode": 0o444}},
        {"name": bundle, "configMap": {"name": "corp.ca", "defaultMode": 0o444}},
    ]
    ours = [
        {"name": "credentials-store-keys", "mountPath": "/run/halimede/credentials/store-keys", "readOnly": True},
        {"name": bundle, "mountPath": "/run/halimede/ca/corp.ca", "readOnly": True},
    ]
    assert fetch_of(made)["volumeMounts"][-2:] == ours
    assert server_of(made)["volumeMounts"] == server_of(pod())["volumeMounts"]


@pytest.mark.parametrize(
    ("spec", "is_mounted"),
    [
        (model_spec(), True),
        (model_spec(uri="gs://models/bert"), False),
        (model_spec(uri="pvc://models/bert"), False),
        (model_spec(credentials_secret="models-s3"), False),
    ],
)
def test_the_platforms_s3_secret_is_for_s3_models_without_credentials(spec: ModelSpec, is_mounted: bool) -> None:
    made = pod_of(spec, platform=replace(PLATFORM, s3_secret="models-s3"))

    optional = {"secretName": "models-s3", "defaultMode": 0o444, "optional": True}
    volume = {"name": "s3-credentials", "secret": optional}
    mount = {"name": "s3-credentials", "mountPath": "/run/halimede/s3", "readOnly": True}
    assert (volume in made["volumes"], mount in fetch_of(made)["volumeMounts"]) == (is_mounted, is_mounted)
    assert mount not in server_of(made)["volumeMounts"]


@pytest.mark.parametrize(
    ("uri", "volume", "mount"),
    [
        (
            "pvc://models/bert/1",
            {"name": "claim-models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
            "/run/halimede/claims/models",
        ),
        (
            "file:///srv/models/bert/",
            {"name": "node-522be551", "hostPath": {"path": "/srv/models/bert"}},
            "/run/halimede/node/522be551",
        ),
    ],
)
def test_claims_and_node_folders_are_read_only_in_both_containers(uri: str, volume: Object, mount: str) -> None:
    children = children_of(model_spec(uri=uri))

    made = template_of(children)["spec"]
    assert made["volumes"][-1] == volume
    mounts = [named(c["volumeMounts"], volume["name"]) for c in (fetch_of(made), server_of(made))]
    assert mounts == [{"name": volume["name"], "mountPath": mount, "readOnly": True}] * 2
    assert json.loads(children["ConfigMap"]["data"]["plan.json"])["models"][0]["mount"] == mount


def test_the_overlay_wins_except_over_selector_labels() -> None:
    overlay = {
        "metadata": {"labels": {"team": "search", "halimede.dev/model": "mine"}},
        "spec": {
            "terminationGracePeriodSeconds": 900,
            "containers": [{"name": "server", "image": "mine:1", "workingDir": "/tmp"}],
            "initContainers": [{"name": "later", "image": "tool:1"}],
        },
    }

    template = template_of(children_of(model_spec(workload=workload(pod_template=overlay))))

    assert template["metadata"]["labels"]["team"] == "search"
    assert template["metadata"]["labels"]["halimede.dev/model"] == "bert"
    assert template["spec"]["terminationGracePeriodSeconds"] == 900
    assert (server_of(template["spec"])["image"], server_of(template["spec"])["workingDir"]) == ("mine:1", "/tmp")
    assert [container["name"] for container in template["spec"]["initContainers"]] == ["fetch", "later"]


def test_added_containers_get_what_the_restricted_profile_requires() -> None:
    overlay = {
        "spec": {
            "containers": [{"name": "log", "securityContext": {"runAsUser": 1000, "capabilities": {}}}],
            "initContainers": [{"name": "first"}],
        }
    }

    pod = template_of(children_of(model_spec(workload=workload(pod_template=overlay))))["spec"]

    assert named(pod["initContainers"], "first")["securityContext"] == RESTRICTED
    assert named(pod["containers"], "log")["securityContext"] == {"runAsUser": 1000, **RESTRICTED}
    assert server_of(pod)["securityContext"] == {"readOnlyRootFilesystem": True, **RESTRICTED}


def test_the_platform_sets_tolerations_for_lost_nodes() -> None:
    platform = replace(PLATFORM, node_lost_toleration_seconds=0)
    short = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}

    assert template_of(children_of(model_spec(), platform=platform))["spec"]["tolerations"] == [
        {"key": "node.kubernetes.io/not-ready", **short},
        {"key": "node.kubernetes.io/unreachable", **short},
    ]
    assert "tolerations" not in template_of(children_of(model_spec()))["spec"]


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({"key": "node.kubernetes.io/unreachable", "operator": "Exists"}, ["node.kubernetes.io/not-ready"]),
        ({"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}, ["node.kubernetes.io/unreachable"]),
        ({"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}, []),
        (
            {"operator": "Exists", "effect": "NoSchedule"},
            ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"],
        ),
    ],
)
def test_an_objects_own_toleration_for_lost_nodes_replaces_ours(given: Object, added: list[str]) -> None:
    platform = replace(PLATFORM, node_lost_toleration_seconds=30)
    overlaid = workload(pod_template={"spec": {"tolerations": [given]}})
    scheduled = workload(scheduling=Scheduling(tolerations=(given,)))

    for made in (overlaid, scheduled):
        tolerations = template_of(children_of(model_spec(workload=made), platform=platform))["spec"]["tolerations"]
        assert given in tolerations
        assert [each["key"] for each in tolerations if each != given] == added


def test_platform_settings_are_in_the_pod() -> None:
    platform = replace(
        PLATFORM,
        server_image="other:2",
        image_pull_policy="Never",
        gpu_image_pull_policy="Always",
        image_pull_secrets=(),
        cache_host_path="/mnt/cache",
        s3_region="eu",
    )

    children = children_of(model_spec(workload=Workload(cache=Cache(CacheMedium.HOST_PATH))), platform=platform)

    made = template_of(children)["spec"]
    assert (server_of(made)["image"], server_of(made)["imagePullPolicy"]) == ("other:2", "Never")
    assert "imagePullSecrets" not in made
    gpu = workload(accelerator=Accelerator(AcceleratorType.GPU))
    of_gpu = server_of(template_of(children_of(model_spec(workload=gpu), platform=platform))["spec"])
    assert (of_gpu["image"], of_gpu["imagePullPolicy"]) == ("registry.example/halimede:1-gpu", "Always")
    assert named(made["volumes"], "cache")["hostPath"]["path"] == "/mnt/cache"
    stores = json.loads(children["ConfigMap"]["data"]["plan.json"])["stores"]
    assert stores == {"s3": {"endpoint": "https://store.example", "region": "eu"}}
