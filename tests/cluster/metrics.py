"""Metrics in a cluster: a real Prometheus that scrapes its pods, and a played API of custom metrics."""

import base64
import json
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.commands import ask
from cluster.control import ADDRESS, PORT
from cluster.own import OwnCluster
from cluster.played_metrics import VERSION
from cluster.spaces import LIMIT_S, eventually, python
from support.prometheus import provide_prometheus

PROMETHEUS_PORT = 9090
TARGETS_PORT = 9091
PLAYED_PORT = 6444
MONITORING = "monitoring"
SERVED = (
    f"--set=prometheus.url=http://prometheus.{MONITORING}.svc:{PROMETHEUS_PORT}",
    "--set=metricsApi.enabled=Always",
)
"""Values with which the chart serves the metrics of this Prometheus."""
API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
OBJECTS = {"inferencemodel": "halimede_dev_model", "modelensemble": "halimede_dev_ensemble"}
"""The target labels by which an object's pods are found, and the pods' own labels that they come from."""


def scrape_config(interval_s: int) -> dict[str, Any]:
    """Scrapes the pods of models and ensembles. In another cluster `kubernetes_sd_configs: [{role: pod}]` finds them."""
    pod = "__meta_kubernetes_pod"
    return {
        "global": {"scrape_interval": f"{interval_s}s", "scrape_timeout": f"{interval_s}s"},
        "scrape_configs": [{
            "job_name": "halimede",
            "http_sd_configs": [{"url": f"http://{ADDRESS}:{TARGETS_PORT}", "refresh_interval": "1s"}],
            "relabel_configs": [
                {
                    "source_labels": [f"{pod}_label_{label}" for label in OBJECTS.values()],
                    "regex": ".*[^;].*",
                    "action": "keep",
                },
                {"source_labels": [f"{pod}_container_port_name"], "regex": "metrics", "action": "keep"},
                {"source_labels": [f"{pod}_phase"], "regex": "Running", "action": "keep"},
                {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
                {"source_labels": [f"{pod}_name"], "target_label": "pod"},
                *(
                    {"source_labels": [f"{pod}_label_{label}"], "regex": "(.+)", "target_label": target}
                    for target, label in OBJECTS.items()
                ),
            ],
        }],
    }  # fmt: skip


class ClusterPrometheus:
    """Runs in the control plane's network; pods reach it by a Service."""

    def __init__(self, cluster: OwnCluster, interval_s: int = 5) -> None:
        self._cluster = cluster
        self._folder = cluster.state / "prometheus"
        self._interval_s = interval_s

    def start(self) -> None:
        """Start it, with the data that it had."""
        program = provide_prometheus() / "prometheus"
        control = self._cluster.control
        self._folder.mkdir(exist_ok=True)
        if "pod-targets" not in control.space.programs:
            api = f"https://{ADDRESS}:{PORT}"
            control.space.start("pod-targets", *python("pod_targets", ADDRESS, TARGETS_PORT, api, control.pki))
        configuration = self._folder / "prometheus.yml"
        configuration.write_text(yaml.safe_dump(scrape_config(self._interval_s), sort_keys=False))
        started = control.space.start(
            "prometheus",
            program,
            f"--config.file={configuration}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={ADDRESS}:{PROMETHEUS_PORT}",
        )
        self._door = self._cluster.forward_address(ADDRESS, PROMETHEUS_PORT)
        eventually(self._is_ready, "Prometheus", check=started.check)
        lead_to_control(self._cluster, MONITORING, "prometheus", PROMETHEUS_PORT)

    def stop(self) -> None:
        """No scrape and no answer until it starts again."""
        self._cluster.control.space.programs["prometheus"].stop()

    def query(self, expression: str) -> dict[str, float]:
        """The values of an instant query by pod; by "" where a value has no such label."""
        address = f"http://{self._door}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
            found = json.load(answer)["data"]["result"]
        return {each["metric"].get("pod", ""): float(each["value"][1]) for each in found}

    def _is_ready(self) -> bool:
        try:
            return self.query("vector(1)") == {"": 1.0}
        except OSError:
            return False


@dataclass
class PlayedMetrics:
    """The API of custom metrics with the values that `play` sets."""

    cluster: OwnCluster

    def start(self) -> None:
        control = self.cluster.control
        name = f"played-metrics.{MONITORING}.svc"
        certificate = control.pki / "played-metrics"
        control.authority.issue(name, "", name, ADDRESS).write(certificate)
        self._socket = self.cluster.state / "played-metrics.sock"
        program = control.space.start(
            "played-metrics",
            *python("played_metrics", ADDRESS, PLAYED_PORT, certificate.with_suffix(".crt"), self._socket),
        )
        eventually(self._socket.exists, "the played metrics", check=program.check)
        lead_to_control(self.cluster, MONITORING, "played-metrics", PLAYED_PORT)
        serve_group(self.cluster, VERSION, MONITORING, "played-metrics", PLAYED_PORT, program.check)

    def stop(self) -> None:
        self.cluster.kubectl("delete", "apiservice", _api_name(VERSION))
        self.cluster.control.space.programs.pop("played-metrics").stop()
        self._socket.unlink()

    def play(self, namespace: str, values: Mapping[str, dict[str, str] | None]) -> None:
        """Replace the namespace's values: by metric the quantities by pod or by `PLURAL.GROUP/NAME`, None: an error."""
        ask(self._socket, {"namespace": namespace, "values": dict(values)})

    def asked(self, namespace: str) -> list[tuple[float, str]]:
        """When somebody asked for which of the namespace's metrics, in seconds since 1970."""
        return [(at, metric) for at, metric in ask(self._socket, {"namespace": namespace})]


def lead_to_control(cluster: OwnCluster, namespace: str, name: str, port: int) -> None:
    """A Service of a program that runs beside the API server."""
    cluster.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    services = f"/api/v1/namespaces/{namespace}/services"
    cluster.api.create(services, {"metadata": {"name": name}, "spec": {"ports": [{"port": port}]}})
    cluster.api.create(f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [ADDRESS]}],
        "ports": [{"port": port, "protocol": "TCP"}],
    })  # fmt: skip


def serve_group(
    cluster: OwnCluster, version: str, namespace: str, service: str, port: int, check: Callable[[], None]
) -> None:
    """Let the API server ask a Service for a version of an API, and wait until it does. check: that of its program."""
    group, _, number = version.partition("/")
    cluster.api.create(API_SERVICES, {
        "metadata": {"name": _api_name(version)},
        "spec": {
            "group": group,
            "version": number,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "caBundle": base64.b64encode(cluster.control.authority.certificate).decode(),
            "service": {"name": service, "namespace": namespace, "port": port},
        },
    })  # fmt: skip

    def is_available() -> bool:
        found = cluster.api.get(f"{API_SERVICES}/{_api_name(version)}").get("status", {}).get("conditions", ())
        return any((each["type"], each["status"]) == ("Available", "True") for each in found)

    eventually(is_available, f"the API server to be served {version}", check=check)


def _api_name(version: str) -> str:
    group, _, number = version.partition("/")
    return f"{number}.{group}"
