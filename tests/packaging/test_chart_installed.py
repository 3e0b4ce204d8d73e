"""The chart on a real API server: its notes, and manifests in the place of a release."""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.programs import provide_programs
from cluster.spaces import eventually
from support.api_server import ApiServer, api_server
from support.image import REPOSITORY_ROOT, Unavailable, run
from support.phases import shown

# The fixture builds Kubernetes' programs in the first run.
pytestmark = [pytest.mark.large, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    try:
        with shown(request.config):
            programs = provide_programs()
    except Unavailable as why:
        pytest.skip(str(why))
    with api_server(programs, tmp_path_factory.mktemp("api-server")) as server:
        server.kubectl("create", "namespace", "halimede")
        yield server


def notes(server: ApiServer, *arguments: str) -> str:
    """What `helm install` would say."""
    output = run(
        *(server.programs / "helm", "install", "halimede", REPOSITORY_ROOT / "helm" / "halimede"),
        *("--dry-run=server", "--namespace=halimede", f"--kubeconfig={server.kubeconfig}", "--set=crds.install=false"),
        *arguments,
    )
    return output.partition("NOTES:")[2]


def node(name: str, resource: str = "", product: str = "") -> dict[str, Any]:
    labels = {"nvidia.com/gpu.product": product} if product else {}
    status = {"capacity": {resource: "1"}, "allocatable": {resource: "1"}} if resource else {}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}


def test_notes_say_what_is_in_the_cluster(server: ApiServer) -> None:
    assert "GPUs:" not in notes(server), "there is no node"
    server.apply(node("plain"))
    found = notes(server)
    assert "None of the 1 nodes has any" in found
    assert "The cluster has no PodMonitors" in found
    assert "The cluster has no Gateway API" in found
    assert "helm test halimede --namespace halimede" in found
    server.kubectl("create", "--filename=-", given=node("bare", "nvidia.com/gpu"))
    server.kubectl("create", "--filename=-", given=node("good", "nvidia.com/gpu", "NVIDIA-H100"))
    found = notes(server, "--set=monitoring.podMonitor=Never,prometheus.url=http://prometheus:9090")
    assert "1 of 3 nodes have the labels of GPU Feature Discovery: NVIDIA-H100" in found
    assert "1 nodes have GPUs without these labels, such as bare" in found
    assert "come from this release, out of http://prometheus:9090" in found
    assert "monitoring.podMonitor is Never" in found

    names = {"plural": "httproutes", "singular": "httproute", "kind": "HTTPRoute"}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
    spec = {"group": "gateway.networking.k8s.io", "names": names, "scope": "Namespaced", "versions": [version]}
    metadata = {
        "name": "httproutes.gateway.networking.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
    }
    crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": metadata}
    server.apply({**crd, "spec": spec})
    server.kubectl("wait", "--for=condition=Established", f"crd/{metadata['name']}", "--timeout=30s")
    eventually(lambda: "The cluster has the Gateway API" in notes(server), "the kind in discovery")
    assert "GPUs:" not in notes(server, "--set=watchNamespaces={prod}"), "such a user may not list nodes"


def test_the_manifests_can_take_the_place_of_a_release(server: ApiServer) -> None:
    helm = (server.programs / "helm", f"--kubeconfig={server.kubeconfig}", "--namespace=halimede")
    chart = REPOSITORY_ROOT / "helm" / "halimede"
    run(*helm, "install", "halimede", chart, "--set=operator.image.repository=registry/op,metricsApi.enabled=Never")
    apply = ("apply", "--server-side", f"--kustomize={REPOSITORY_ROOT / 'manifests' / 'base'}")
    image = ("get", "deployment/halimede", "--namespace=halimede", "--output=jsonpath={..image}")
    with pytest.raises(AssertionError, match=r'1 conflict: conflict with "helm" .*containers.name="operator".*\.image'):
        server.kubectl(*apply)

    server.kubectl(*apply, "--force-conflicts")
    assert server.kubectl(*image) == "halimede-operator:0.1.0"
    # Until its record is deleted, helm can take everything back.
    run(*helm, "upgrade", "halimede", chart, "--reuse-values")
    assert server.kubectl(*image) == "registry/op:0.1.0"
    server.kubectl(*apply, "--force-conflicts")
    server.kubectl("delete", "secret", "--namespace=halimede", "--selector=owner=helm,name=halimede")

    assert "halimede" not in run(*helm, "list", "--short")
    server.kubectl(*apply)
