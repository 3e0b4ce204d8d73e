"""`spec.podTemplate`: what it may change in pods, and what it may not."""

from typing import Any

import pytest

from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import Kind, Problem
from support.custom_resources import Json, changed, ensemble, model

PLATFORM = Platform(server_image="server", gpu_server_image="gpu-server")


def problems_of(template: Json) -> list[tuple[str, str]]:
    _, problems = parse(Kind.INFERENCE_MODEL, model(podTemplate=template), PLATFORM)
    return [(problem.path.removeprefix("spec.podTemplate."), problem.message) for problem in problems]


@pytest.mark.parametrize(
    "template",
    [
        {"metadata": {"labels": {"team": "search", "example.com/tier": ""}}},
        {"metadata": {"annotations": {"example.com/notes": "any text: at all\n"}}},
        {
            "spec": {
                "automountServiceAccountToken": False,
                "volumes": [{"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}],
            }
        },
        {"spec": {"hostNetwork": False, "restartPolicy": "Always", "dnsPolicy": "None", "hostAliases": []}},
        {"spec": {"securityContext": {"runAsUser": 1000, "fsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"}}}},
        {"spec": {"volumes": [{"name": "scratch", "emptyDir": {}}, {"name": "ca", "configMap": {"name": "ca"}}]}},
        {
            "spec": {
                "containers": [
                    {
                        "name": "server",
                        "env": [{"name": "LEVEL", "value": "1"}],
                        "securityContext": {"capabilities": {"drop": ["ALL"]}, "privileged": False},
                        "ports": [{"name": "debug", "containerPort": 9999}],
                    },
                    {
                        "name": "log",
                        "image": "example.com/log:1",
                        "livenessProbe": {"httpGet": {"path": "/", "port": 80, "host": ""}},
                        "env": [{"name": "LEVEL", "value": "1"}],
                        "resources": {"limits": {"memory": "1Gi", "example.com/fuse": 1}},
                    },
                ],
                "initContainers": [{"name": "fetch", "resources": {"limits": {"memory": "2Gi"}}}],
            }
        },
    ],
)
def test_allowed_overlays_are_kept(template: Json) -> None:
    spec, problems = parse(Kind.INFERENCE_MODEL, model(podTemplate=template), PLATFORM)
    assert problems == ()
    assert spec is not None
    assert spec.workload.pod_template == template


def container(**fields: Any) -> Json:
    return {"spec": {"containers": [{"name": "server", **fields}]}}


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"metadata": {"labels": {"halimede.dev/model": "other"}}}, "metadata.labels[halimede.dev/model]"),
        ({"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}, "metadata.labels[app.kubernetes.io/name]"),
        ({"metadata": {"labels": {"pod-template-hash": "x"}}}, "metadata.labels[pod-template-hash]"),
        ({"metadata": {"labels": {"team": "a b"}}}, "metadata.labels[team]"),
        ({"metadata": {"labels": {"a b": "team"}}}, "metadata.labels[a b]"),
        ({"metadata": {"annotations": {"a b": "team"}}}, "metadata.annotations[a b]"),
        ({"metadata": {"annotations": {"x.halimede.dev/hash": "1"}}}, "metadata.annotations[x.halimede.dev/hash]"),
        (
            {"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/server": "unconfined"}}},
            "metadata.annotations[container.apparmor.security.beta.kubernetes.io/server]",
        ),
        ({"spec": {"hostNetwork": True}}, "spec.hostNetwork"),
        ({"spec": {"hostPID": True}}, "spec.hostPID"),
        ({"spec": {"hostIPC": True}}, "spec.hostIPC"),
        ({"spec": {"hostIPC": 0}}, "spec.hostIPC"),
        ({"spec": {"automountServiceAccountToken": True}}, "spec.automountServiceAccountToken"),
        ({"spec": {"resourceClaims": [{"name": "gpu"}]}}, "spec.resourceClaims"),
        ({"spec": {"nodeName": "node-1"}}, "spec.nodeName"),
        ({"spec": {"serviceAccountName": "admin"}}, "spec.serviceAccountName"),
        ({"spec": {"serviceAccount": "admin"}}, "spec.serviceAccount"),
        ({"spec": {"ephemeralContainers": []}}, "spec.ephemeralContainers"),
        ({"spec": {"restartPolicy": "Never"}}, "spec.restartPolicy"),
        ({"spec": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}}, "spec.volumes[0].hostPath"),
        ({"spec": {"volumes": [{"name": "nfs", "nfs": {}}]}}, "spec.volumes[0].nfs"),
        ({"spec": {"volumes": "root"}}, "spec.volumes"),
        (
            {"spec": {"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Qx"}}]}},
            "spec.volumes[0].emptyDir.sizeLimit",
        ),
        ({"spec": {"terminationGracePeriodSeconds": 1.5}}, "spec.terminationGracePeriodSeconds"),
        ({"spec": {"terminationGracePeriodSeconds": 10**25}}, "spec.terminationGracePeriodSeconds"),
        ({"spec": {"securityContext": {"runAsUser": 0}}}, "spec.securityContext.runAsUser"),
        ({"spec": {"securityContext": {"runAsNonRoot": False}}}, "spec.securityContext.runAsNonRoot"),
        ({"spec": {"securityContext": {"sysctls": [{}]}}}, "spec.securityContext.sysctls"),
        ({"spec": {"securityContext": {"seLinuxOptions": {}}}}, "spec.securityContext.seLinuxOptions"),
        (
            {"spec": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}},
            "spec.securityContext.seccompProfile.type",
        ),
        ({"spec": {"securityContext": None}}, "spec.securityContext"),
        ({"spec": {"containers": [{"name": "server", "securityContext": None}]}}, "spec.containers[0].securityContext"),
        ({"spec": {"$patch": "replace"}}, "spec.$patch"),
        ({"spec": {"containers": [{"name": "server", "$patch": "delete"}]}}, "spec.containers[0].$patch"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers[0].name"),
        ({"spec": {"containers": ["server"]}}, "spec.containers[0]"),
        ({"spec": {"containers": {"server": {}}}}, "spec.containers"),
        ({"spec": {"containers": [{"name": "a"}, {"name": "a"}]}}, "spec.containers[1].name"),
        (
            {"spec": {"containers": [{"name": "log", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}},
            "spec.containers[0].resources.limits[nvidia.com/gpu]",
        ),
        (
            {"spec": {"initContainers": [{"name": "fetch", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}},
            "spec.initContainers[0].resources.limits[nvidia.com/gpu]",
        ),
        (
            {"spec": {"initContainers": [{"name": "a", "startupProbe": {"httpGet": {"host": "localhost"}}}]}},
            "spec.initContainers[0].startupProbe.httpGet.host",
        ),
        ({"spec": {"initContainers": [{"name": "fetch", "command": ["sh"]}]}}, "spec.initContainers[0].command"),
        ({"spec": {"initContainers": [{"name": "fetch", "args": []}]}}, "spec.initContainers[0].args"),
        (
            {"spec": {"initContainers": [{"name": "fetch", "restartPolicy": "Always"}]}},
            "spec.initContainers[0].restartPolicy",
        ),
    ],
)
def test_forbidden_overlays_are_refused(template: Json, path: str) -> None:
    assert [where for where, _ in problems_of(template)] == [path]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"resources": {"limits": {"memory": "12Mib"}}}, "resources.limits[memory]"),
        ({"securityContext": {"privileged": True}}, "securityContext.privileged"),
        ({"securityContext": {"privileged": "true"}}, "securityContext.privileged"),
        ({"securityContext": {"allowPrivilegeEscalation": True}}, "securityContext.allowPrivilegeEscalation"),
        ({"securityContext": {"procMount": "Unmasked"}}, "securityContext.procMount"),
        ({"securityContext": {"runAsUser": 0}}, "securityContext.runAsUser"),
        ({"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}, "securityContext.capabilities.add"),
        ({"securityContext": {"capabilities": {"drop": []}}}, "securityContext.capabilities.drop"),
        ({"resources": {"limits": {"cpu": "1", "nvidia.com/gpu": 1}}}, "resources.limits[nvidia.com/gpu]"),
        ({"resources": {"requests": {"nvidia.com/mig-1g.10gb": 1}}}, "resources.requests[nvidia.com/mig-1g.10gb]"),
        ({"resources": {"limits": {"example.com/fpga": 1}}}, "resources.limits[example.com/fpga]"),
        ({"resources": {"claims": [{"name": "gpu"}]}}, "resources.claims"),
        ({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}, "env[0].name"),
        ({"ports": [{"name": "http", "containerPort": 80}]}, "ports[0].name"),
        ({"ports": [{"containerPort": 8001}]}, "ports[0].containerPort"),
        ({"ports": [{"containerPort": 9999, "hostPort": 9999}]}, "ports[0].hostPort"),
        (
            {"livenessProbe": {"httpGet": {"path": "/", "port": 80, "host": "169.254.169.254"}}},
            "livenessProbe.httpGet.host",
        ),
        ({"readinessProbe": {"tcpSocket": {"port": 80, "host": "10.0.0.1"}}}, "readinessProbe.tcpSocket.host"),
        ({"lifecycle": {"postStart": {"httpGet": {"host": "10.0.0.1"}}}}, "lifecycle.postStart.httpGet.host"),
        ({"lifecycle": {"preStop": {"tcpSocket": {"host": "10.0.0.1"}}}}, "lifecycle.preStop.tcpSocket.host"),
        ({"args": ["--log-verbose=1"]}, "args"),
        ({"command": ["tritonserver"]}, "command"),
    ],
)
def test_forbidden_fields_of_the_server_are_refused(fields: Json, path: str) -> None:
    assert [where for where, _ in problems_of(container(**fields))] == [f"spec.containers[0].{path}"]


def test_flags_have_a_place_of_their_own() -> None:
    ((_, message),) = problems_of(container(args=["--log-verbose=1"]))
    assert message == "must not be set here, because it would replace the operator's flags: use spec.serving.args"
    added = {"spec": {"containers": [{"name": "log", "image": "log", "command": ["sh"], "args": ["-c", "true"]}]}}
    assert problems_of(added) == []


def test_the_bounds_hold_for_added_containers_and_for_ensembles() -> None:
    hostile = {
        "spec": {
            "containers": [{"name": "log", "image": "x", "securityContext": {"privileged": True}}],
            "initContainers": [{"name": "prepare", "image": "x", "securityContext": {"runAsUser": 0}}],
        }
    }
    _, problems = parse(Kind.MODEL_ENSEMBLE, ensemble(podTemplate=hostile), PLATFORM)
    assert [problem.path for problem in problems] == [
        "spec.podTemplate.spec.initContainers[0].securityContext.runAsUser",
        "spec.podTemplate.spec.containers[0].securityContext.privileged",
    ]


def test_ports_of_the_spec_are_the_servers_wherever_they_are() -> None:
    resource = changed(
        model(),
        {"spec.serving": {"ports": {"http": 9000}}, "spec.podTemplate": container(ports=[{"containerPort": 9000}])},
    )
    _, problems = parse(Kind.INFERENCE_MODEL, resource, PLATFORM)
    assert [problem.message for problem in problems] == ["must not be 9000: spec.serving.ports has it"]


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ("podTemplate", "spec.podTemplate.spec"),
        ("scheduling", "spec.scheduling.affinity.podAffinity"),
    ],
)
def test_a_deep_overlay_is_refused_at_any_depth(part: str, path: str) -> None:
    def model_nested(depth: int) -> Json:
        deep = {"podTemplate": {"spec": nested(depth)}, "scheduling": {"affinity": {"podAffinity": nested(depth)}}}
        object_ = model()
        object_["spec"][part] = deep[part]
        return object_

    assert parse(Kind.INFERENCE_MODEL, model_nested(32), PLATFORM)[1] == ()
    for depth in (33, 50_000):
        assert parse(Kind.INFERENCE_MODEL, model_nested(depth), PLATFORM) == (
            None,
            (Problem(path, "must not have more than 32 objects and lists within one another"),),
        )


def test_an_overlay_with_too_many_values_is_refused() -> None:
    def problems_with(values: int) -> list[tuple[str, str]]:
        return problems_of({"spec": {"hostAliases": [{} for _ in range(values - 1)]}})

    assert problems_with(8192) == []
    assert problems_with(50_000) == [("spec", "must not have more than 8192 values in all, got 50000")]


def test_a_long_list_or_map_is_refused_and_its_rest_is_not_read() -> None:
    variables = [1] * 5000
    annotations = {f"{n}": 1 for n in range(5000)}
    _, problems = parse(
        Kind.INFERENCE_MODEL, model(env=variables, podTemplate={"metadata": {"annotations": annotations}}), PLATFORM
    )
    messages = {problem.path: problem.message for problem in problems}
    assert messages["spec.env"] == "must have at most 1024 entries, got 5000"
    assert messages["spec.podTemplate.metadata.annotations"] == "must have at most 1024 entries, got 5000"
    assert len(problems) == 2 + 2 * 1024
