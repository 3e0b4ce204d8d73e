"""Real KEDA scales a model by the ScaledObject that the operator makes."""

from collections.abc import Iterator

import pytest

from cluster.control import ADDRESS
from cluster.installed import Platform, Tenant
from cluster.keda_programs import Keda
from cluster.metrics import PROMETHEUS_PORT, SERVED, ClusterPrometheus
from cluster.models import START_LIMIT_S, apply
from cluster.scaling import History, PlayedPods, played_model
from cluster.spaces import eventually

NAME = "played"
POLLED_S = 180.0
"""KEDA asks every 15 seconds, and the operator looks every minute whether there is a KEDA."""

pytestmark = [pytest.mark.keda, pytest.mark.usefixtures("second_node"), pytest.mark.timeout(900, func_only=True)]


@pytest.fixture(scope="module")
def keda(platform: Platform, metrics: ClusterPrometheus) -> Iterator[Keda]:
    platform.upgrade(*SERVED, "--set=rbac.keda=true")
    keda = Keda(platform.cluster)
    keda.start()
    yield keda
    keda.stop()
    platform.upgrade(*SERVED)


def test_keda_scales_up_and_to_zero_and_back(tenant: Tenant, keda: Keda, scaled: str) -> None:
    pods = PlayedPods(tenant, NAME)

    def has(count: int) -> None:
        eventually(lambda: len(pods.running()) == count, f"{count} pods", POLLED_S)

    scaling = {
        "provider": "KEDA",
        "maxReplicas": 4,
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 5}},
        "scaleToZero": {"idleFor": "20s", "zeroBy": "KEDA"},
        "prometheus": {"serverAddress": f"http://{ADDRESS}:{PROMETHEUS_PORT}"},
    }
    apply(tenant, played_model(NAME, scaled, scaling))
    eventually(pods.running, "the first pod", START_LIMIT_S)
    busy = {"queue": 11, "executing": 1, "busy": 1.0}
    pods.show_all(**busy)
    with History(tenant, NAME) as history:
        has(3)
        assert tenant.names("hpa") == {f"horizontalpodautoscaler.autoscaling/{NAME}"}, "KEDA's, and no second one"
        pods.show_all(queue=0, executing=0, busy=0)
        has(0)
        # Without pods there is no metric, so somebody has to start one.
        tenant.kubectl("scale", f"deployment/{NAME}", "--replicas=1")
        eventually(pods.running, "a pod again", POLLED_S)
        pods.show_all(**busy)
        has(3)
        counts = history.values
        assert counts[counts.index(0) :] == [0, 1, 3], counts
