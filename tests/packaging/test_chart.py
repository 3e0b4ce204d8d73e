"""The chart: rendered objects, values that its schema refuses, the effect of each value, and agreement with manifests
and CRDs."""

import base64
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from cluster.programs import provide_programs
from halimede_operator.core.metrics_api.rules import Rules, parse_rules
from halimede_operator.metrics_api.settings import parse as parse_metrics_api
from halimede_operator.metrics_api.tls import Tls
from halimede_operator.settings import parse
from support.custom_resources import changed, model
from support.image import REPOSITORY_ROOT, Unavailable
from support.operator_golden import children_of, objects
from support.phases import shown

CHART = REPOSITORY_ROOT / "helm" / "halimede"
GOLDEN = Path(__file__).parent / "chart"

WITHOUT_CRDS = ("--set", "crds.install=false")

# The fixture builds helm in the first run.
pytestmark = pytest.mark.timeout(1800)

specification = importlib.util.spec_from_file_location("generate", REPOSITORY_ROOT / "manifests" / "generate.py")
assert specification is not None
assert specification.loader is not None
generate = importlib.util.module_from_spec(specification)
specification.loader.exec_module(generate)


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest) -> Iterator[Path]:
    try:
        with shown(request.config):
            built = provide_programs()
        yield built
    except Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def helm(programs: Path) -> str:
    return str(programs / "helm")


def test_lint_finds_nothing(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_charts_crds_are_those_in_crds() -> None:
    of = {path.name: path.read_text() for path in (REPOSITORY_ROOT / "crds").glob("*s.yaml")}
    assert len(of) == 2
    assert {path.name: path.read_text() for path in (CHART / "files" / "crds").iterdir()} == of


def test_crds_are_kept_on_uninstall_by_default(helm: str) -> None:
    def policies(*arguments: str) -> list[str | None]:
        crds = [each for each in generate.rendered(helm, *arguments) if each["kind"] == "CustomResourceDefinition"]
        return [each["metadata"].get("annotations", {}).get("helm.sh/resource-policy") for each in crds]

    assert policies() == ["keep", "keep"]
    assert policies("--set", "crds.keep=false") == [None, None]
    assert policies("--set", "crds.install=false") == []


def test_the_manifests_are_the_charts_default(helm: str, programs: Path) -> None:
    assert generate.BASE.read_text() == generate.base(helm), f"run: python manifests/generate.py {helm}"
    kustomized = subprocess.run(
        [programs / "kubectl", "kustomize", REPOSITORY_ROOT / "manifests" / "base"],
        capture_output=True,
        text=True,
        check=True,
    )
    built = {named(each) for each in yaml.load_all(kustomized.stdout, yaml.CSafeLoader)}
    assert built == {named(each) for each in generate.rendered(helm)} | {("Namespace", "", "halimede")}


def named(resource: dict[str, Any]) -> tuple[str, str, str]:
    return resource["kind"], resource["metadata"].get("namespace", ""), resource["metadata"]["name"]


@pytest.mark.parametrize("values", sorted(path.stem for path in GOLDEN.glob("*.values.yaml")))
def test_rendered_objects_of_values(helm: str, values: str) -> None:
    name = values.removesuffix(".values")
    made = generate.rendered(helm, "--set", "crds.install=false", "--values", str(GOLDEN / f"{name}.values.yaml"))
    assert made == list(yaml.load_all((GOLDEN / f"{name}.golden.yaml").read_text(), yaml.CSafeLoader))


METRICS_API: dict[str, Any] = {
    "metricsApi": {"enabled": "Always", "tls": {"secretName": "tls", "caBundle": "Q0E="}},
    "prometheus": {"url": "http://prometheus:9090"},
}
"""With a certificate, because the chart would make another one each time."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"operator": {"replicas": -1}}, "operator/replicas"),
        ({"models": {"schemes": ["ftp"]}}, "models/schemes/0"),
        ({"models": {"schemes": ["file"], "fileRoots": []}}, "models/fileRoots"),
        ({"models": {"fileRoots": ["/srv/models"]}}, "models/fileRoots"),
        ({"models": {"schemes": ["file"], "fileRoots": ["/"]}}, "models/fileRoots/0"),
        ({"server": {"image": {"digest": "latest"}}}, "server/image/digest"),
        ({"server": {"nodeLostTolerationSeconds": -1}}, "server/nodeLostTolerationSeconds"),
        ({"server": {"pullPolicy": "Always"}}, "additional properties 'pullPolicy' not allowed"),
        ({"stores": {"s3": {"endpoint": "minio:9000"}}}, "stores/s3/endpoint"),
        ({"watchNamespaces": ["Prod"]}, "watchNamespaces/0"),
        ({"monitoring": {"podMonitor": "Sometimes"}}, "monitoring/podMonitor"),
        ({"monitoring": {"collectors": [{}]}}, "monitoring/collectors/0"),
        (
            {"monitoring": {"collectors": [{"namespaceSelector": {"matchlabels": {"a": "b"}}}]}},
            "'matchlabels' not allowed",
        ),
        ({"monitoring": {"rules": {"prometheusRule": True}}}, "monitoring/rules/prometheusRule"),
        ({"monitoring": {"dashboards": {"folder": ""}}}, "monitoring/dashboards/folder"),
        ({"prometheus": {"url": "prometheus:9090"}}, "prometheus/url"),
        ({"metricsApi": {"enabled": "Always"}}, "metricsApi.enabled: Always needs prometheus.url"),
        ({"metricsApi": {"enabled": True}}, "metricsApi/enabled"),
        ({**METRICS_API, "watchNamespaces": ["prod"]}, "Always needs cluster-wide rights"),
        (
            {**METRICS_API, "metricsApi": {"enabled": "Always", "tls": {"secretName": "tls"}}},
            "secretName needs metricsApi.tls.caBundle",
        ),
        ({"replicas": 2}, "additional properties 'replicas' not allowed"),
    ],
)
def test_invalid_values_are_refused(helm: str, tmp_path: Path, given: dict[str, Any], message: str) -> None:
    (tmp_path / "values.json").write_text(json.dumps(given))
    with pytest.raises(subprocess.CalledProcessError) as error:
        generate.rendered(helm, "--values", str(tmp_path / "values.json"))
    assert message in error.value.stderr


DIGEST = f"sha256:{'0' * 64}"
MONITORED = {"monitoring": {"podMonitor": "Always"}}
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "operator.image.repository": ("other", {}),
    "operator.image.tag": ("other", {}),
    "operator.image.digest": (DIGEST, {"operator": {"image": {"tag": "1"}}}),
    "operator.image.pullPolicy": ("Always", {}),
    "operator.replicas": (3, {}),
    "operator.resources.requests.cpu": ("1", {}),
    "operator.resources.requests.memory": ("1Gi", {}),
    "operator.resources.limits.memory": ("1Gi", {}),
    "operator.logFormat": ("text", {}),
    "operator.nodeSelector": ({"pool": "system"}, {}),
    "operator.tolerations": ([{"operator": "Exists"}], {}),
    "operator.affinity": ({"podAntiAffinity": {}}, {}),
    "operator.priorityClassName": ("system-cluster-critical", {}),
    "operator.podAnnotations": ({"example.com/team": "serving"}, {}),
    "server.image.repository": ("other", {}),
    "server.image.tag": ("other", {}),
    "server.image.digest": (DIGEST, {"server": {"image": {"tag": "1"}}}),
    "server.image.pullPolicy": ("Always", {}),
    "server.gpuImage.repository": ("other", {}),
    "server.gpuImage.tag": ("other", {}),
    "server.gpuImage.digest": (DIGEST, {"server": {"gpuImage": {"tag": "1"}}}),
    "server.gpuImage.pullPolicy": ("Always", {}),
    "server.nodeLostTolerationSeconds": (0, {}),
    "imagePullSecrets": (["registry"], {}),
    "models.schemes": (["https"], {}),
    "models.fileRoots": (["/mnt"], {"models": {"schemes": ["file"], "fileRoots": ["/srv/models"]}}),
    "models.cacheHostPath": ("/mnt/cache", {}),
    "stores.s3.endpoint": ("https://store.example", {}),
    "stores.s3.region": ("eu-central-1", {}),
    "stores.s3.secretName": ("models-s3", {}),
    "watchNamespaces": (["prod"], {}),
    "crds.install": (False, {}),
    "crds.keep": (False, {}),
    "serviceAccount.name": ("other", {}),
    "serviceAccount.annotations": ({"example.com/role": "models"}, {}),
    "rbac.create": (False, {}),
    "rbac.dra": (False, {}),
    "rbac.keda": (True, {}),
    "podDisruptionBudget.enabled": (False, {"operator": {"replicas": 2}}),
    "monitoring.collectors": ([{"namespaceSelector": {}}], {}),
    "monitoring.podMonitor": ("Always", {}),
    "monitoring.interval": ("1m", MONITORED),
    "monitoring.labels": ({"release": "prometheus"}, MONITORED),
    "monitoring.rules.prometheusRule": ("Always", {}),
    "monitoring.rules.labels": ({"release": "prometheus"}, {"monitoring": {"rules": {"prometheusRule": "Always"}}}),
    "monitoring.rules.configMap": (True, {}),
    "monitoring.dashboards.enabled": (True, {}),
    "monitoring.dashboards.folder": ("Serving", {"monitoring": {"dashboards": {"enabled": True}}}),
    "prometheus.url": ("http://other:9090", METRICS_API),
    "prometheus.tokenSecret.name": ("prometheus", METRICS_API),
    "prometheus.tokenSecret.key": (
        "bearer",
        {**METRICS_API, "prometheus": {"url": "http://p", "tokenSecret": {"name": "p"}}},
    ),
    "prometheus.caConfigMap.name": ("prometheus", METRICS_API),
    "prometheus.caConfigMap.key": (
        "ca",
        {**METRICS_API, "prometheus": {"url": "http://p", "caConfigMap": {"name": "p"}}},
    ),
    "metricsApi.enabled": ("Never", METRICS_API),
    "metricsApi.replicas": (2, METRICS_API),
    "metricsApi.resources.requests.cpu": ("1", METRICS_API),
    "metricsApi.resources.requests.memory": ("1Gi", METRICS_API),
    "metricsApi.resources.limits.memory": ("1Gi", METRICS_API),
    "metricsApi.tls.secretName": ("other", METRICS_API),
    "metricsApi.tls.caBundle": ("QUM=", METRICS_API),
    "metricsApi.apiServiceAnnotations": ({"cert-manager.io/inject-ca-from": "a/b"}, METRICS_API),
    "metricsApi.adapterRulesNamespace": ("monitoring", {}),
}
"""For each value one that is not the default, with other values that it needs."""


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_value_has_a_test() -> None:
    assert sorted(leaves(yaml.load((CHART / "values.yaml").read_text(), yaml.CSafeLoader))) == sorted(CHANGES)


@pytest.mark.large
@pytest.mark.parametrize("name", CHANGES)
def test_each_value_has_an_effect(helm: str, tmp_path: Path, name: str) -> None:
    value, others = CHANGES[name]
    if not name.startswith("crds."):
        # Parsing them takes a second.
        others = {**others, "crds": {"install": False}}
    made = [installed(helm, tmp_path, *given) for given in ([others], [others, nested(name, value)])]
    (before, arguments_before), (after, arguments_after) = made
    if before == after:
        # An argument alone is not an effect; the operator must behave differently.
        assert arguments_before != arguments_after
        effects = models_with(arguments_before), models_with(arguments_after)
        if effects[0] == effects[1]:
            assert words_of(arguments_before) != words_of(arguments_after)


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def installed(helm: str, folder: Path, *values: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The release's objects without the operator's arguments, and the arguments."""
    files = []
    for number, given in enumerate(values):
        (folder / f"{number}.json").write_text(json.dumps(given))
        files.append(f"--values={folder / f'{number}.json'}")
    made = generate.rendered(helm, *files)
    deployment = next(each for each in made if named(each) == ("Deployment", "halimede", "halimede"))
    return made, deployment["spec"]["template"]["spec"]["containers"][0].pop("args")


def models_with(arguments: list[str]) -> dict[str, Any]:
    """The operator's children of many models, or its errors."""
    platform = parse(arguments).platform
    found: dict[str, Any] = {}
    on_the_node = changed(model(), {"spec.model.uri": "file:///srv/models/bert"})
    for name, value in {**objects(), "on the node": on_the_node}.items():
        try:
            found[name] = children_of(value, platform)
        except AssertionError as refusal:
            found[name] = str(refusal)
    return found


def words_of(arguments: list[str]) -> str:
    """The operator's output without a cluster, without timestamps."""
    environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    command = [sys.executable, "-m", "halimede_operator", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    return re.sub(r"[0-9]", "", done.stderr)


def test_a_digest_replaces_the_tag(helm: str) -> None:
    images = {
        f"--set={name}.{part}={value}"
        for name in ("operator.image", "server.image", "server.gpuImage")
        for part, value in (("repository", "registry.example.com/it"), ("tag", "stable"), ("digest", DIGEST))
    }
    (deployment,) = (each for each in generate.rendered(helm, *images, *WITHOUT_CRDS) if each["kind"] == "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    platform = parse(container["args"]).platform
    image = f"registry.example.com/it@{DIGEST}"
    assert [container["image"], platform.server_image, platform.gpu_server_image] == [image] * 3


def test_a_release_for_some_namespaces_has_no_cluster_wide_objects(helm: str) -> None:
    made = generate.rendered(helm, "--set", "crds.install=false", "--set", "watchNamespaces={prod}")
    spaces = {each["metadata"].get("namespace") for each in made}
    assert spaces == {"halimede", "prod"}


def test_a_namespaces_admin_has_the_rights_that_its_operator_gets(helm: str) -> None:
    """For Halimede's kinds: Kubernetes lets users grant only rights that they have."""

    def rights(roles: set[str], *arguments: str) -> set[tuple[str, str]]:
        return {
            (resource, verb)
            for role in generate.rendered(helm, *arguments, *WITHOUT_CRDS)
            if role["kind"] in ("Role", "ClusterRole") and role["metadata"]["name"] in roles
            for rule in role["rules"]
            if "halimede.dev" in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    of_operator = rights({"halimede"}, "--set=watchNamespaces={prod}")
    assert of_operator
    assert of_operator <= rights({"halimede-view", "halimede-edit", "halimede-admin"})


@pytest.mark.parametrize(("kind", "value"), [("PodMonitor", "podMonitor"), ("PrometheusRule", "rules.prometheusRule")])
@pytest.mark.parametrize(
    ("wanted", "is_known", "is_made"),
    [("Auto", True, True), ("Auto", False, False), ("Always", False, True), ("Never", True, False)],
)
def test_a_kind_of_prometheus_must_be_in_the_cluster(
    helm: str, kind: str, value: str, wanted: str, is_known: bool, is_made: bool
) -> None:
    known = ["--api-versions", f"monitoring.coreos.com/v1/{kind}"] if is_known else []
    made = generate.rendered(helm, "--set", f"monitoring.{value}={wanted}", *known, *WITHOUT_CRDS)
    assert (kind in {each["kind"] for each in made}) is is_made


def test_the_rules_are_those_of_their_file(helm: str) -> None:
    made = generate.rendered(
        helm,
        "--set=monitoring.rules.prometheusRule=Always,monitoring.rules.configMap=true",
        "--set=monitoring.rules.labels.release=prometheus",
        *WITHOUT_CRDS,
    )
    text = (CHART / "files" / "alerts.yaml").read_text()
    (rule,) = (each for each in made if each["kind"] == "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == yaml.load(text, yaml.CSafeLoader)
    (file,) = (each for each in made if each["metadata"]["name"] == "halimede-rules")
    assert file["data"] == {"halimede.yaml": text}


def test_the_dashboards_are_those_of_their_files(helm: str) -> None:
    made = generate.rendered(helm, "--set=monitoring.dashboards.enabled=true", *WITHOUT_CRDS)
    boards = [each for each in made if "grafana_dashboard" in each["metadata"].get("labels", {})]
    assert {each["kind"] for each in boards} == {"ConfigMap"}
    for each in boards:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"] == {"grafana_folder": "Halimede"}
    # Grafana takes the name of a file as its own, so that it must differ from those of other charts.
    assert {name: text for each in boards for name, text in each["data"].items()} == {
        f"halimede-{path.name}": path.read_text() for path in (CHART / "files" / "dashboards").iterdir()
    }


def test_the_metrics_api_is_off_without_a_cluster_to_look_into(helm: str) -> None:
    made = {
        named(each) for each in generate.rendered(helm, "--set=prometheus.url=http://prometheus:9090", *WITHOUT_CRDS)
    }
    assert not [name for name in made if "metrics" in name[2]]


def test_the_charts_own_certificate_is_of_its_service_and_its_ca(helm: str, tmp_path: Path) -> None:
    made = generate.rendered(
        helm, "--set=metricsApi.enabled=Always,prometheus.url=http://prometheus:9090", *WITHOUT_CRDS
    )
    (secret,) = (each for each in made if each["kind"] == "Secret")
    (api,) = (each for each in made if each["kind"] == "APIService")
    assert api["spec"]["caBundle"] == secret["data"]["ca.crt"]
    authority, certificate = (
        x509.load_pem_x509_certificate(base64.b64decode(secret["data"][name])) for name in ("ca.crt", "tls.crt")
    )
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    service = api["spec"]["service"]
    assert names.get_values_for_type(x509.DNSName) == [f"{service['name']}.{service['namespace']}.svc"]
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).write_bytes(base64.b64decode(secret["data"][name]))
    Tls(tmp_path / "tls.crt", tmp_path / "tls.key")


def test_the_metrics_apis_flags_are_those_that_it_takes(helm: str, tmp_path: Path) -> None:
    (tmp_path / "values.json").write_text(json.dumps(METRICS_API))
    made = {
        named(each): each for each in generate.rendered(helm, f"--values={tmp_path / 'values.json'}", *WITHOUT_CRDS)
    }
    pod = made["Deployment", "halimede", "halimede-metrics-api"]["spec"]["template"]["spec"]
    settings = parse_metrics_api(pod["containers"][0]["args"][1:])
    assert ("Service", settings.service_namespace and "halimede", settings.service_name) in made
    config = made["ConfigMap", "halimede", "halimede-metrics-api-rules"]["data"][settings.rules.name]
    rules = parse_rules(yaml.safe_load(config))
    assert isinstance(rules, Rules), rules
    assert config == (CHART / "files" / "metrics-rules.yaml").read_text()


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, set()),
        ({"operator": {"replicas": 2}}, {"halimede"}),
        ({"metricsApi": {"replicas": 2}}, set()),
        (METRICS_API, set()),
        ({**METRICS_API, "metricsApi": {**METRICS_API["metricsApi"], "replicas": 2}}, {"halimede-metrics-api"}),
    ],
)
def test_several_replicas_have_a_disruption_budget(
    helm: str, tmp_path: Path, values: dict[str, Any], wanted: set[str]
) -> None:
    (tmp_path / "values.json").write_text(json.dumps(values))
    made = generate.rendered(helm, f"--values={tmp_path / 'values.json'}", *WITHOUT_CRDS)
    budgets = {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "PodDisruptionBudget"}
    assert budgets.keys() == wanted
    for each in made:
        if each["kind"] == "Deployment" and each["metadata"]["name"] in budgets:
            budget = budgets[each["metadata"]["name"]]
            assert budget["selector"] == each["spec"]["selector"]
            assert budget["maxUnavailable"] < each["spec"]["replicas"]


def pod_monitors(helm: str, *arguments: str) -> dict[tuple[str, str], Any]:
    """The spec of each PodMonitor by namespace and name."""
    made = generate.rendered(helm, "--set", "monitoring.podMonitor=Always", *WITHOUT_CRDS, *arguments)
    return {named(each)[1:]: each["spec"] for each in made if each["kind"] == "PodMonitor"}


def test_pod_monitors_find_the_pods_of_all_models(helm: str) -> None:
    made = pod_monitors(helm)
    assert sorted(made) == [("halimede", "halimede"), ("halimede", "halimede-models")]
    of_models = made["halimede", "halimede-models"]
    assert of_models["namespaceSelector"] == {"any": True}
    (endpoint,) = of_models["podMetricsEndpoints"]
    assert target_labels(endpoint["relabelings"], "sourceLabels", "targetLabel") == TARGET_LABELS

    children = children_of(model(), parse(["--server-image", "x"]).platform)
    (template,) = (each["spec"]["template"] for each in children if each["kind"] == "Deployment")
    assert of_models["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = template["spec"]["containers"][0]["ports"]
    assert endpoint["port"] in [port["name"] for port in ports]


def test_the_metrics_api_has_a_pod_monitor_that_finds_its_port(helm: str, tmp_path: Path) -> None:
    (tmp_path / "values.json").write_text(json.dumps({**METRICS_API, **MONITORED}))
    made = {
        named(each): each for each in generate.rendered(helm, f"--values={tmp_path / 'values.json'}", *WITHOUT_CRDS)
    }
    monitor = made["PodMonitor", "halimede", "halimede-metrics-api"]["spec"]
    pod = made["Deployment", "halimede", "halimede-metrics-api"]["spec"]["template"]
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert ports[endpoint["port"]] == parse_metrics_api(pod["spec"]["containers"][0]["args"][1:]).metrics_port


def test_a_release_for_some_namespaces_has_a_pod_monitor_in_each(helm: str) -> None:
    made = pod_monitors(helm, "--set", "watchNamespaces={prod,test}")
    assert sorted(made) == [("halimede", "halimede"), ("prod", "halimede-models"), ("test", "halimede-models")]
    assert "namespaceSelector" not in made["prod", "halimede-models"]


TARGET_LABELS = {
    "__meta_kubernetes_pod_label_halimede_dev_model": "inferencemodel",
    "__meta_kubernetes_pod_label_halimede_dev_ensemble": "modelensemble",
}


def target_labels(relabelings: list[dict[str, Any]], sources: str, target: str) -> dict[str, str]:
    return {source: each[target] for each in relabelings for source in each[sources] if target in each}


def test_the_scrape_configuration_has_the_labels_of_the_pod_monitors(helm: str) -> None:
    jobs = yaml.safe_load((REPOSITORY_ROOT / "manifests" / "prometheus" / "scrape.yaml").read_text())["scrape_configs"]
    of_prometheus_operator = {"__meta_kubernetes_namespace": "namespace", "__meta_kubernetes_pod_name": "pod"}
    container = {"__meta_kubernetes_pod_container_name": "container"}
    monitors = pod_monitors(helm, "--set=prometheus.url=http://prometheus:9090,metricsApi.enabled=Always")
    for job, monitor in zip(jobs, ("halimede-models", "halimede", "halimede-metrics-api"), strict=True):
        found = target_labels(job["relabel_configs"], "source_labels", "target_label")
        assert found == TARGET_LABELS | of_prometheus_operator | container
        selector = job["kubernetes_sd_configs"][0]["selectors"][0]["label"]
        wanted = monitors["halimede", monitor]["selector"]["matchLabels"]
        # The name of the release is not part of the file.
        assert dict(each.split("=") for each in selector.split(",")).items() <= wanted.items()


def test_the_chart_can_be_packaged_with_all_its_files(helm: str, tmp_path: Path) -> None:
    subprocess.run([helm, "package", "--destination", tmp_path, CHART], capture_output=True, check=True)
    (packed,) = tmp_path.iterdir()
    shutil.unpack_archive(packed, tmp_path, "gztar")
    folder = tmp_path / "halimede" / "files"
    assert {path.relative_to(folder) for path in folder.rglob("*")} == {
        path.relative_to(CHART / "files") for path in (CHART / "files").rglob("*")
    }
