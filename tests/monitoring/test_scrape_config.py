"""The scrape configuration for a Prometheus without its operator, and the queries in the documentation.

Debian's Prometheus is built without the discovery of Kubernetes. So targets with the labels that this discovery sets
take its place.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from halimede_operator.core.pods.fields import SERVER
from support.custom_resources import ensemble, model
from support.image import REPOSITORY_ROOT
from support.operator_golden import children_of
from support.probe import provided
from support.prometheus import provide_prometheus, start_prometheus
from support.server import wait_until

SCRAPE = REPOSITORY_ROOT / "manifests" / "prometheus" / "scrape.yaml"
PAGES = REPOSITORY_ROOT / "docs" / "pages"
DISCOVERY = "kubernetes_sd_configs"
META = "__meta_kubernetes"
Labels = dict[str, str]


def jobs() -> list[dict[str, Any]]:
    found = yaml.safe_load(SCRAPE.read_text())
    assert found.keys() == {"scrape_configs"}
    listed: list[dict[str, Any]] = found["scrape_configs"]
    return listed


def with_targets(targets: list[Labels]) -> dict[str, Any]:
    """The configuration with these targets in place of the discovery, in each job those that its selector finds."""
    made = []
    for job in jobs():
        (discovery,) = job.pop(DISCOVERY)
        (selector,) = discovery["selectors"]
        assert (discovery["role"], selector["role"], selector.keys()) == ("pod", "pod", {"role", "label"})
        wanted = {as_label(name): value for name, value in (each.split("=") for each in selector["label"].split(","))}
        found = [each for each in targets if wanted.items() <= each.items()]
        made.append({**job, "static_configs": [{"targets": ["127.0.0.1:1"], "labels": each} for each in found]})
    return {"scrape_configs": made}


def as_label(name: str) -> str:
    return f"{META}_pod_label_{re.sub(r'[^a-zA-Z0-9]', '_', name)}"


def discovered(name: str, labels: Labels, container: dict[str, Any], phase: str = "Running") -> list[Labels]:
    """What the discovery of Kubernetes has of a pod: a target for each port of a container."""
    of_pod = {f"{META}_namespace": "prod", f"{META}_pod_name": name, f"{META}_pod_phase": phase}
    of_pod |= {as_label(label): value for label, value in labels.items()}
    of_pod[f"{META}_pod_container_name"] = container["name"]
    return [{**of_pod, f"{META}_pod_container_port_name": port["name"]} for port in container["ports"]]


def pod_of(value: dict[str, Any], name: str, **more: str) -> list[Labels]:
    """A pod as the operator makes it."""
    (template,) = (each["spec"]["template"] for each in children_of(value) if each["kind"] == "Deployment")
    (server,) = (each for each in template["spec"]["containers"] if each["name"] == SERVER)
    assert len(server["ports"]) > 1
    return discovered(name, template["metadata"]["labels"], server, **more)


def operator_pod(component: str) -> list[Labels]:
    container = {"name": component, "ports": [{"name": "health"}, {"name": "metrics"}]}
    return discovered(f"halimede-{component}", {"app.kubernetes.io/name": f"halimede-{component}"}, container)


@pytest.fixture(scope="module")
def promtool(request: pytest.FixtureRequest) -> str:
    return str(provided(request.config, provide_prometheus) / "promtool")


def check(promtool: str, what: str, document: object, folder: Path) -> None:
    path = folder / "checked.yaml"
    path.write_text(yaml.safe_dump(document))
    done = subprocess.run([promtool, "check", what, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_wrong(promtool: str, tmp_path: Path) -> None:
    check(promtool, "config", with_targets(pod_of(model(), "bert-1")), tmp_path)


def test_each_pod_is_one_target_with_the_labels_of_its_object(promtool: str, tmp_path: Path) -> None:
    pods = [
        *pod_of(model(), "bert-1"),
        *pod_of(model(), "bert-2", phase="Failed"),
        *pod_of(ensemble(), "search-1"),
        *operator_pod("operator"),
        *operator_pod("metrics-api"),
        *discovered("other-1", {"app.kubernetes.io/name": "other"}, {"name": "other", "ports": [{"name": "metrics"}]}),
    ]
    with start_prometheus(with_targets(pods), tmp_path) as prometheus:

        def active() -> list[Labels]:
            return [each["labels"] for each in prometheus.get("targets")["activeTargets"]]

        wait_until(lambda: len(active()) >= 4, "the targets")
        found = sorted(active(), key=lambda labels: labels["pod"])
    common = {"instance": "127.0.0.1:1", "namespace": "prod"}
    of_models = common | {"job": "halimede-models", "container": "server"}
    # The helper gives both objects the name bert.
    assert found == [
        of_models | {"pod": "bert-1", "inferencemodel": "bert"},
        common | {"pod": "halimede-metrics-api", "job": "halimede-metrics-api", "container": "metrics-api"},
        common | {"pod": "halimede-operator", "job": "halimede-operator", "container": "operator"},
        of_models | {"pod": "search-1", "modelensemble": "bert"},
    ]


def queries() -> Iterator[tuple[str, str]]:
    """Each query in a block of the pages on metrics; the lines after its first one are indented."""
    for page in ("metrics.md", "scaling-metrics.md"):
        for block in re.findall(r"^```text\n(.*?)^```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL):
            for number, query in enumerate(re.split(r"\n(?=\S)", block.strip())):
                yield f"{page} {number}", query


def test_promtool_reads_every_query_of_the_pages(promtool: str, tmp_path: Path) -> None:
    found = dict(queries())
    assert {name.split()[0] for name in found} == {"metrics.md", "scaling-metrics.md"}
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(found.values())]
    check(promtool, "rules", {"groups": [{"name": "pages", "rules": rules}]}, tmp_path)
