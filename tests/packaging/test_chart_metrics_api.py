"""The chart's metrics API against a real API server: what `lookup` decides, the rights, and the way through aggregation."""

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.pki import Authority, write_kubeconfig
from cluster.programs import provide_programs
from halimede_operator.metrics_api.core.requests import ROOT
from support.api_server import ApiServer, api_server
from support.image import REPOSITORY_ROOT, Unavailable, run
from support.metrics_api import SERVICE, PlayedPrometheus, http_server, metrics_api_process
from support.phases import shown

# The fixture builds Kubernetes' programs in the first run.
pytestmark = [pytest.mark.large, pytest.mark.timeout(1800)]

API_SERVICE = "v1beta2.custom.metrics.k8s.io"
HPA = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    try:
        with shown(request.config):
            programs = provide_programs()
    except Unavailable as why:
        pytest.skip(str(why))
    with api_server(programs, tmp_path_factory.mktemp("api-server")) as server:
        for namespace in (SERVICE[0], "monitoring", "prod"):
            server.kubectl("create", "namespace", namespace)
        yield server


def rendered(server: ApiServer, *arguments: str) -> dict[str, dict[str, Any]]:
    """The release's objects of the metrics API as helm would install them in this cluster, by kind and name."""
    output = run(
        *(server.programs / "helm", "template", "halimede", REPOSITORY_ROOT / "helm" / "halimede"),
        *("--dry-run=server", "--namespace=halimede", f"--kubeconfig={server.kubeconfig}", "--set=crds.install=false"),
        "--kube-version=1.36.0",
        *arguments,
    )
    objects = [each for each in yaml.safe_load_all(output) if each]
    return {
        f"{each['kind']}/{each['metadata']['name']}": each for each in objects if "metrics" in each["metadata"]["name"]
    }


def prometheus_of(objects: dict[str, dict[str, Any]]) -> str | None:
    """The address of Prometheus that the release's metrics API asks; None without a metrics API."""
    if f"APIService/{API_SERVICE}" not in objects:
        assert not objects
        return None
    pod = objects["Deployment/halimede-metrics-api"]["spec"]["template"]["spec"]
    flags = [argument.partition("=") for argument in pod["containers"][0]["args"]]
    return {name: value for name, _, value in flags}["--prometheus-url"]


def service(name: str, namespace: str, port_name: str, **labels: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    ports = [{"name": port_name, "port": 9090}]
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}}


def api_service(version: str, namespace: str, name: str) -> dict[str, Any]:
    spec = {
        "group": "custom.metrics.k8s.io",
        "version": version,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "insecureSkipTLSVerify": True,
        "service": {"namespace": namespace, "name": name},
    }
    metadata = {"name": f"{version}.custom.metrics.k8s.io"}
    return {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": metadata, "spec": spec}


def test_auto_needs_one_prometheus_and_no_other_server(server: ApiServer) -> None:
    def found(*arguments: str) -> str | None:
        return prometheus_of(rendered(server, *arguments))

    assert found() is None, "there is no Prometheus"
    assert found("--set=prometheus.url=http://other:9090") == "http://other:9090"
    server.apply(service("prom-server", "monitoring", "http", **{"app.kubernetes.io/name": "prometheus"}))
    assert found() == "http://prom-server.monitoring.svc:9090"
    server.apply(service("prometheus-operated", "monitoring", "web"))
    assert found() == "http://prometheus-operated.monitoring.svc:9090"
    server.apply(service("prometheus-operated", "prod", "web"))
    assert found() is None, "there are two"
    server.kubectl("delete", "service", "prometheus-operated", "--namespace=prod")
    assert found("--set=watchNamespaces={prod}") is None
    assert found("--set=metricsApi.enabled=Never") is None
    server.apply(api_service("v1beta1", "monitoring", "prometheus-adapter"))
    assert found() is None, "an earlier version of the API belongs to another server"
    server.kubectl("delete", "apiservice", "v1beta1.custom.metrics.k8s.io")
    server.apply(api_service("v1beta2", *SERVICE))
    assert found() == "http://prometheus-operated.monitoring.svc:9090", "the release has the API already"
    server.kubectl("delete", "apiservice", API_SERVICE)


def test_the_hpa_controller_gets_values_through_the_api_server(server: ApiServer, tmp_path: Path) -> None:
    """With the chart's certificate and with the rights that it gives, to the process and to the controller."""
    objects = rendered(server, "--set=metricsApi.enabled=Always,prometheus.url=http://prometheus:9090")
    for each in objects.values():
        server.apply(each)
    again = rendered(server, "--set=metricsApi.enabled=Always,prometheus.url=http://prometheus:9090")
    secret = objects["Secret/halimede-metrics-api-tls"]["data"]
    assert again["Secret/halimede-metrics-api-tls"]["data"] == secret, "the certificate is kept"
    for name in ("crt", "key"):
        (tmp_path / f"serving.{name}").write_bytes(base64.b64decode(secret[f"tls.{name}"]))
    metadata = {"name": "digits-0", "namespace": "prod", "labels": {"halimede.dev/model": "digits"}}
    containers = [{"name": "server", "image": "server"}]
    server.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}})
    token = server.kubectl("create", "token", SERVICE[1], f"--namespace={SERVICE[0]}").strip()
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", server.url, server.authority.certificate, token)
    prometheus = PlayedPrometheus()
    with (
        http_server(prometheus.respond) as url,
        metrics_api_process(kubeconfig, url, tmp_path, Authority("unused")) as api,
    ):
        # To a process of this machine instead of a pod.
        server.kubectl("delete", "service", SERVICE[1], f"--namespace={SERVICE[0]}")
        spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": api.port}]}
        named = {"name": SERVICE[1], "namespace": SERVICE[0]}
        server.apply({"apiVersion": "v1", "kind": "Service", "metadata": named, "spec": spec})
        port = json.dumps({"spec": {"service": {"port": api.port}}})
        server.kubectl("patch", "apiservice", API_SERVICE, "--type=merge", f"--patch={port}")
        server.kubectl("wait", "--for=condition=Available", f"apiservice/{API_SERVICE}", "--timeout=60s")
        path = f"{ROOT}/namespaces/prod/pods/*/halimede_queue_requests?labelSelector=halimede.dev/model%3Ddigits"
        answer = json.loads(until_routed(server, f"--as={HPA}", "get", f"--raw={path}"))
        assert [(each["describedObject"]["name"], each["value"]) for each in answer["items"]] == [("digits-0", "3")]
        with pytest.raises(AssertionError, match='User "eve" cannot get resource "pods/halimede_queue_requests"'):
            server.kubectl("--as=eve", "get", f"--raw={path}")
        with pytest.raises(AssertionError, match="no metric 'heat'; there are halimede_inflight_requests"):
            server.kubectl("get", f"--raw={ROOT}/namespaces/prod/pods/digits-0/heat")
        for kind in ("pods", "inferencemodels.halimede.dev"):
            assert f'"{kind}/halimede_queue_requests"' in server.kubectl("get", f"--raw={ROOT}")
        assert "WARNING" not in api.log.read_text()


def until_routed(server: ApiServer, *arguments: str) -> str:
    """The output of kubectl, when the API server's proxy has heard of the changed Service."""
    give_up_at = time.monotonic() + 60
    while True:
        try:
            return server.kubectl(*arguments)
        except AssertionError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.2)
