"""Fixtures: one cluster for all tests of this folder, and a namespace for each test."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.access import Cluster
from cluster.faults import Faults
from cluster.given import REGISTRY, GivenCluster
from cluster.gpus import Gpus
from cluster.installed import NAMESPACE, OPERATOR_IMAGE, SERVER_IMAGE, Platform, Tenant, provide_images
from cluster.metrics import SERVED, ClusterPrometheus, PlayedMetrics
from cluster.operators import Site, no_other_operator, start_fork
from cluster.own import OwnCluster
from cluster.programs import check_machine
from cluster.spaces import eventually
from support.custom_resources import CRDS
from support.image import Unavailable
from support.models import add_scaled
from support.phases import shown

HERE = Path(__file__).parent
TEST_LIMIT_S = 300
NUMBERS = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    positions = [number for number, item in enumerate(items) if item.path.is_relative_to(HERE)]
    ours = [items[number] for number in positions]
    for item in ours:
        if item.get_closest_marker("timeout") is None:
            # Without fixtures: the first start on a machine builds Kubernetes.
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S, func_only=True))
    # First those for which the operator that helm installs would have to stand aside.
    for number, item in zip(positions, sorted(ours, key=needs_platform), strict=True):
        items[number] = item


def needs_platform(item: pytest.Item) -> bool:
    return "platform" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Our own cluster with one node, or the one that the environment names."""
    try:
        with shown(request.config):
            if os.environ.get(REGISTRY):
                found: Cluster = GivenCluster.find()
            else:
                check_machine()
                images = (SERVER_IMAGE, OPERATOR_IMAGE) if any(map(needs_platform, request.session.items)) else ()
                if images:
                    provide_images()
                found = OwnCluster.start(nodes=1, images=images)
    except Unavailable as reason:
        if os.environ.get("CI"):
            pytest.fail(f"nothing is tested on Kubernetes: {reason}")
        with shown(request.config):
            print(f"\nNOTHING IS TESTED ON KUBERNETES: {reason}")
        pytest.skip(str(reason))
    yield found
    found.stop()


@pytest.fixture(scope="session")
def second_node(cluster: Cluster) -> None:
    """A second node of our own cluster, which costs processor time until the end of the run."""
    if isinstance(cluster, OwnCluster):
        cluster.add_node()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace. After the test none of its pods runs, and its other objects are deleted soon."""
    name = f"test-{os.getpid()}-{next(NUMBERS)}"
    cluster.make_namespace(name)
    yield name
    cluster.end_namespace(name)


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


@pytest.fixture(scope="session")
def crds(cluster: Cluster) -> Iterator[None]:
    """The CRDs; if helm has not installed them, with the marks by which it takes them over.

    They stay until our own cluster ends. For half a minute after CRDs were made the API server refuses children of
    their objects.
    """
    there = cluster.kubectl("get", "customresourcedefinitions", "--output=name")
    missing = [crd for crd in CRDS.values() if crd["metadata"]["name"] not in there]
    marks = {
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"meta.helm.sh/release-name": "halimede", "meta.helm.sh/release-namespace": NAMESPACE},
    }
    for crd in missing:
        document = {**crd, "metadata": {**crd["metadata"], **marks}}
        cluster.kubectl("apply", "--server-side", "--filename=-", given=json.dumps(document))

    def served() -> bool:
        known = cluster.kubectl("api-resources", "--api-group=halimede.dev", "--output=name", "--cached=false")
        return all(crd["metadata"]["name"] in known for crd in CRDS.values())

    eventually(served, "both kinds")
    yield
    if missing and not isinstance(cluster, OwnCluster):
        cluster.kubectl("delete", "customresourcedefinitions", *(crd["metadata"]["name"] for crd in missing))


@pytest.fixture(scope="module")
def alone(cluster: Cluster, crds: None) -> Iterator[None]:
    """While the tests of a file run, no operator works except those that they start."""
    if not isinstance(cluster, OwnCluster):
        pytest.skip("in a given cluster nobody's operator is sent away")
    with no_other_operator(cluster):
        yield


@pytest.fixture
def site(own: OwnCluster, alone: None, namespace: str, tmp_path: Path) -> Iterator[Site]:
    """A namespace for operators that run on this machine."""
    site = Site(own, start_fork, namespace, tmp_path)
    site.allow("operator", "second")
    yield site
    site.stop_all()


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
