"""`kubectl describe` of healthy objects is short: statuses of the operator's core in a real API server, without pods."""

import json
from dataclasses import replace

import pytest

from cluster.access import Cluster
from halimede_operator.core.placement.choice import Placement
from halimede_operator.core.revisions.history import Entry, Outcome
from halimede_operator.core.snapshot import PodDevice, PodDevices, Snapshot
from halimede_operator.core.spec.types import Accelerator, AcceleratorType, Autoscaling, Spec, Workload
from support.custom_resources import Json, changed, ensemble, model
from support.described import check_is_short
from support.operator_pods import FETCHED_MODEL, READY, deployment, index, serving, snapshot
from support.operator_specs import ensemble_key, model_key, model_spec, search_spec
from support.operator_status import LATER, NOW, status_for

pytestmark = pytest.mark.usefixtures("alone")
MIB = 1 << 20
PODS = ("bert-1-a", "bert-1-b", "bert-1-c")
SLICES = Workload(
    replicas=3,
    accelerator=Accelerator(AcceleratorType.MIG, mig_profile="1g.10gb"),
    autoscaling=Autoscaling(max_replicas=8),
)
METRIC = {"metric": {"name": "halimede_queue_requests"}}
HPA = {
    "apiVersion": "autoscaling/v2",
    "kind": "HorizontalPodAutoscaler",
    "metadata": {"name": "bert", "namespace": "prod"},
    "spec": {"metrics": [{"type": "Pods", "pods": {**METRIC, "target": {"averageValue": "4"}}}]},
    "status": {
        "conditions": [{"type": "ScalingActive", "status": "True", "reason": "ValidMetricFound", "message": ""}],
        "currentReplicas": 1,
        "desiredReplicas": 3,
        "currentMetrics": [{"type": "Pods", "pods": {**METRIC, "current": {"averageValue": "11"}}}],
        "lastScaleTime": NOW,
    },
}


def autoscaled() -> Snapshot:
    """Three pods with a slice each, scaled by an HPA, after the fifth change of the spec."""
    device = PodDevice("MIG-6c5d2f3e-8a1b-5c7d-9e0f-1a2b3c4d5e6f", "1g.10gb", 9856 * MIB, 0, 6000 * MIB)
    answer = replace(READY, devices=PodDevices((device,), 900 * MIB))
    before = [Entry(f"{number}02f369e", number, Outcome.SUPERSEDED) for number in (5, 4, 3, 2, 1)]
    found = snapshot(
        model_key(),
        *(serving(name) for name in PODS),
        child=deployment(3, placement=Placement("nvidia.com/mig-1g.10gb", "1g.10gb")),
        indexes=dict.fromkeys(PODS, answer),
        status={"revisions": [each.as_text() for each in before]},
    )
    return replace(found, children=(*found.children, HPA))


def of_three_steps() -> Snapshot:
    pod = serving("search-1-a")
    fetched = {"models": [FETCHED_MODEL | {"name": name} for name in ("tok", "pool", "rank")]}
    pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["message"] = json.dumps(fetched)
    served = ("search", "tok", "pool", "rank")
    return snapshot(
        ensemble_key(),
        pod,
        child=deployment(),
        indexes={"search-1-a": index(*((name, "1", "READY", "") for name in served))},
        members={name: {"metadata": {"name": name, "generation": 1}, "spec": {}} for name in served[1:]},
    )


HEALTHY: dict[str, tuple[Json, Snapshot, Spec]] = {
    "im/bert": (model(), snapshot(model_key(), serving("bert-1-a"), child=deployment()), model_spec()),
    "im/scaled": (changed(model(), {"metadata.name": "scaled"}), autoscaled(), model_spec(workload=SLICES)),
    "mens/search": (ensemble(), of_three_steps(), search_spec()),
}


@pytest.mark.parametrize("target", HEALTHY)
def test_describe_of_a_healthy_object_has_60_lines(target: str, cluster: Cluster, namespace: str) -> None:
    document, found, spec = HEALTHY[target]
    kubectl = (f"--namespace={namespace}",)
    text = json.dumps(changed(document, {"metadata.namespace": namespace}))
    made = json.loads(cluster.kubectl("create", *kubectl, "-f", "-", "-ojson", given=text))
    status = status_for(found, spec, now=LATER, revision="aaaa")
    patch = json.dumps({"status": {**status, "operator": "halimede/halimede"}})
    cluster.kubectl("patch", *kubectl, target, "--subresource=status", "--type=merge", "--patch", patch)
    identity = {"name": made["metadata"]["name"], "namespace": namespace, "uid": made["metadata"]["uid"]}
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": "serves."},
        "involvedObject": {"apiVersion": made["apiVersion"], "kind": made["kind"], **identity},
        "type": "Normal",
        "reason": "Serving",
        "message": status["conditions"][0]["message"],
    }
    cluster.kubectl("create", *kubectl, "-f", "-", given=json.dumps(event))

    check_is_short(cluster.kubectl("describe", *kubectl, target))
