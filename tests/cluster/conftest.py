"""Fixtures: one cluster for all tests of this folder, and a namespace for each test."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.access import Cluster
from cluster.faults import Faults
from cluster.given import REGISTRY, GivenCluster
from cluster.gpus import Gpus
from cluster.installed import Platform, Tenant, provide_images
from cluster.metrics import SERVED, ClusterPrometheus, PlayedMetrics
from cluster.operators import Place, no_other_operator
from cluster.own import OwnCluster
from cluster.spaces import eventually
from support.custom_resources import CRDS
from support.image import REPOSITORY_ROOT, Unavailable
from support.models import add_scaled
from support.phases import shown

HERE = Path(__file__).parent
TEST_LIMIT_S = 300
NUMBERS = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            # Without fixtures: the first start on a machine builds Kubernetes.
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S, func_only=True))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Our own cluster, or the one that the environment names."""
    try:
        with shown(request.config):
            found = GivenCluster.find() if os.environ.get(REGISTRY) else OwnCluster.start()
    except Unavailable as reason:
        if os.environ.get("CI"):
            pytest.fail(f"nothing is tested on Kubernetes: {reason}")
        with shown(request.config):
            print(f"\nNOTHING IS TESTED ON KUBERNETES: {reason}")
        pytest.skip(str(reason))
    yield found
    found.stop()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace. After the test none of its pods runs, and its other objects are deleted soon."""
    name = f"test-{os.getpid()}-{next(NUMBERS)}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", f"--namespace={name}", "--timeout=60s")
    yield name
    # No controller makes a pod in a namespace that ends.
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    cluster.kubectl("delete", "pods", "--all", "--grace-period=1", f"--namespace={name}", "--timeout=80s")


@pytest.fixture
def gpus(cluster: Cluster) -> Iterator[Gpus]:
    """Simulated GPUs; no node has any before and after the test."""
    if cluster.gpus is None:
        pytest.skip("this cluster's GPUs are not played")
    yield cluster.gpus
    cluster.gpus.reset()


@pytest.fixture
def faults(cluster: Cluster, gpus: Gpus) -> Iterator[Faults]:
    """Faults; everything is repaired after the test, before GPUs are removed."""
    if cluster.faults is None:
        pytest.skip("nothing may be broken in this cluster")
    yield cluster.faults
    cluster.faults.heal()


@pytest.fixture
def own(cluster: Cluster) -> OwnCluster:
    if not isinstance(cluster, OwnCluster):
        pytest.skip("this is about the clusters that are made here")
    return cluster


@pytest.fixture
def played_metrics(own: OwnCluster) -> Iterator[PlayedMetrics]:
    """An API of custom metrics with the test's own values; no other serves them meanwhile."""
    played = PlayedMetrics(own)
    played.start()
    yield played
    played.stop()


@pytest.fixture
def prometheus(own: OwnCluster) -> Iterator[ClusterPrometheus]:
    """Scrapes every second."""
    running = ClusterPrometheus(own, interval_s=1)
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def crds(cluster: Cluster) -> Iterator[None]:
    """The CRDs, installed while the tests of a file run. CRDs that helm installed stay, because helm takes over no others."""
    there = cluster.kubectl("get", "customresourcedefinitions", "--output=name")
    missing = [name for name in (crd["metadata"]["name"] for crd in CRDS.values()) if name not in there]
    for name in missing:
        path = REPOSITORY_ROOT / "crds" / f"{name.partition('.')[0]}.yaml"
        cluster.kubectl("apply", "--server-side", f"--filename={path}")

    def served() -> bool:
        known = cluster.kubectl("api-resources", "--api-group=halimede.dev", "--output=name", "--cached=false")
        return all(crd["metadata"]["name"] in known for crd in CRDS.values())

    eventually(served, "both kinds")
    yield
    if missing:
        cluster.kubectl("delete", "customresourcedefinitions", *missing)


@pytest.fixture(scope="module")
def alone(cluster: Cluster, crds: None) -> Iterator[None]:
    """While the tests of a file run, no operator works except those that they start."""
    if not isinstance(cluster, OwnCluster):
        pytest.skip("in a given cluster nobody's operator is sent away")
    with no_other_operator(cluster):
        yield


@pytest.fixture
def place(own: OwnCluster, alone: None, namespace: str, tmp_path: Path) -> Iterator[Place]:
    """A namespace for operators that run on this machine."""
    place = Place(own, namespace, tmp_path)
    place.allow("operator", "second")
    yield place
    place.stop_all()


@pytest.fixture(scope="session")
def platform(request: pytest.FixtureRequest, cluster: Cluster) -> Platform:
    """The operator as helm installs it, and a store of models, for all tests of a run."""
    if not isinstance(cluster, OwnCluster):
        pytest.skip("our own cluster has the store that these models come from")
    with shown(request.config):
        provide_images()
        return Platform.install(cluster)


@pytest.fixture
def tenant(platform: Platform, namespace: str) -> Tenant:
    """A namespace in which only pods of the `restricted` profile may run."""
    platform.cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    return Tenant(platform.cluster, namespace)


@pytest.fixture
def scaled(platform: Platform, tmp_path: Path) -> str:
    """The URI of a model that doubles four numbers."""
    add_scaled(tmp_path, "twice", 2)
    return platform.store.put("twice", tmp_path / "twice")


@pytest.fixture(scope="module")
def metrics(platform: Platform) -> Iterator[ClusterPrometheus]:
    """A Prometheus that scrapes every second, and the chart's metrics API that asks it."""
    prometheus = ClusterPrometheus(platform.cluster, interval_s=1)
    prometheus.start()
    platform.upgrade(*SERVED)
    platform.cluster.kubectl(
        "wait", "--for=condition=Available", "apiservice/v1beta2.custom.metrics.k8s.io", "--timeout=60s"
    )
    yield prometheus
    platform.upgrade()
    prometheus.stop()
