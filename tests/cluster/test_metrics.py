"""What autoscaling needs of the test cluster: the aggregation layer, the HPA's controller, Prometheus."""

import json

import pytest

from cluster.control import HpaTiming
from cluster.hpa_objects import autoscaler, fake_deployment, object_metric, pods_metric
from cluster.metrics import ClusterPrometheus, PlayedMetrics
from cluster.own import OwnCluster
from cluster.spaces import eventually
from cluster.test_cluster import apply
from support.image import BASE

pytestmark = pytest.mark.large

EXPORTER = """
use IO::Socket::INET;
my $listener = IO::Socket::INET->new(LocalPort => 8002, Listen => 50, ReuseAddr => 1) or die;
while (my $client = $listener->accept()) {
  while (<$client>) { last if /^\\r?$/ }
  print $client "HTTP/1.0 200 OK\\r\\nContent-Type: text/plain\\r\\n\\r\\nhalimede_queue_requests{model=\\"m\\"} 3\\n";
  close $client;
}
"""


def test_hpa_reads_metrics_of_an_aggregated_api(own: OwnCluster, namespace: str, played_metrics: PlayedMetrics) -> None:
    own.fake_nodes.add(1)
    metrics = [pods_metric("load", "4")]
    apply(own, namespace, fake_deployment("target", 1), autoscaler("target", metrics, maxReplicas=5))

    def pods() -> list[str]:
        listed = own.kubectl("get", "pods", f"--namespace={namespace}", "-o", "json")
        return [each["metadata"]["name"] for each in json.loads(listed)["items"]]

    first = eventually(pods, "the pod")[0]
    try:
        # Pods without a value count as 0 when replicas are added.
        played_metrics.play(namespace, {"load": {first: "12"}})
        eventually(lambda: len(pods()) == 3, "three replicas")
        assert {metric for _, metric in played_metrics.asked(namespace)} == {"load"}
    finally:
        own.kubectl("delete", "hpa,deployments", "--all", f"--namespace={namespace}")
        own.fake_nodes.remove()


def test_feature_gate_lets_the_hpa_have_no_replica(own: OwnCluster, namespace: str) -> None:
    metric = object_metric("load", "InferenceModel", "target", "4")
    hpa = autoscaler("target", [metric], maxReplicas=5, minReplicas=0)
    dry = ("apply", "--dry-run=server", f"--namespace={namespace}", "-f", "-")
    with pytest.raises(AssertionError, match="minReplicas"):
        own.kubectl(*dry, given=json.dumps(hpa))
    own.set_autoscaling(HpaTiming(), ["HPAScaleToZero=true"])
    try:
        assert "target" in own.kubectl(*dry, given=json.dumps(hpa))
    finally:
        own.set_autoscaling()


def test_prometheus_scrapes_pods_of_models(own: OwnCluster, namespace: str, prometheus: ClusterPrometheus) -> None:
    container = {
        "name": "main",
        "image": BASE,
        "command": ["perl", "-e", EXPORTER],
        "ports": [{"name": "metrics", "containerPort": 8002}],
    }
    apply(own, namespace, {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "exporter", "labels": {"halimede.dev/model": "served"}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
    })  # fmt: skip
    asked = f'halimede_queue_requests{{namespace="{namespace}",inferencemodel="served",model="m",modelensemble=""}}'
    eventually(lambda: prometheus.query(asked) == {"exporter": 3.0}, "the pod's metric")
