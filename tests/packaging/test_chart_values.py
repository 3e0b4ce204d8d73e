"""The chart's values: those that its schema refuses, and the effect of each."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from halimede_operator.settings import parse
from support.chart import CHART, DIGEST, METRICS_API, MONITORED, generate, named
from support.custom_resources import changed, model
from support.operator_golden import children_of, objects

# The fixture builds helm in the first run.
pytestmark = pytest.mark.timeout(1800)


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
    "models.maxReplicas": (1, {}),
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
