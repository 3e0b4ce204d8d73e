"""The chart: rendered objects, and their agreement with manifests and CRDs."""

import base64
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from halimede_operator.metrics_api.core.rules import Rules, parse_rules
from halimede_operator.metrics_api.settings import parse as parse_metrics_api
from halimede_operator.metrics_api.tls import Tls
from halimede_operator.settings import parse
from support.chart import CHART, DIGEST, METRICS_API, MONITORED, WITHOUT_CRDS, generate, named, with_values
from support.custom_resources import model
from support.image import REPOSITORY_ROOT
from support.operator_golden import children_of

GOLDEN = Path(__file__).parent / "chart"

# The fixture builds helm in the first run.
pytestmark = pytest.mark.timeout(1800)


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


@pytest.mark.parametrize("values", sorted(path.stem for path in GOLDEN.glob("*.values.yaml")))
def test_rendered_objects_of_values(helm: str, values: str) -> None:
    name = values.removesuffix(".values")
    made = generate.rendered(helm, "--set", "crds.install=false", "--values", str(GOLDEN / f"{name}.values.yaml"))
    assert made == list(yaml.load_all((GOLDEN / f"{name}.golden.yaml").read_text(), yaml.CSafeLoader))


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
    made = with_values(helm, tmp_path, METRICS_API)
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
    made = with_values(helm, tmp_path, values)
    budgets = {name: each["spec"] for (kind, _, name), each in made.items() if kind == "PodDisruptionBudget"}
    assert budgets.keys() == wanted
    for each in made.values():
        if each["kind"] == "Deployment" and each["metadata"]["name"] in budgets:
            budget = budgets[each["metadata"]["name"]]
            assert budget["selector"] == each["spec"]["selector"]
            assert budget["maxUnavailable"] < each["spec"]["replicas"]


def test_several_replicas_are_spread_over_nodes_and_zones(helm: str, tmp_path: Path) -> None:
    metrics_api = {**METRICS_API["metricsApi"], "replicas": 3}
    made = with_values(helm, tmp_path, {**METRICS_API, "operator": {"replicas": 2}, "metricsApi": metrics_api})
    for name in ("halimede", "halimede-metrics-api"):
        spec = made["Deployment", "halimede", name]["spec"]
        node, zone = spec["template"]["spec"]["topologySpreadConstraints"]
        assert (node["topologyKey"], zone["topologyKey"]) == ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
        assert node["labelSelector"] == zone["labelSelector"] == spec["selector"]
        # A cluster of one node, or of one zone, must have them all.
        assert {node["whenUnsatisfiable"], zone["whenUnsatisfiable"]} == {"ScheduleAnyway"}
    alone = with_values(helm, tmp_path, METRICS_API)["Deployment", "halimede", "halimede"]
    assert "topologySpreadConstraints" not in alone["spec"]["template"]["spec"]


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
    made = with_values(helm, tmp_path, {**METRICS_API, **MONITORED})
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
