"""Devices and nodes that are lost under running pods."""

import time

import pytest

from cluster.faults import Faults
from cluster.gpus import Gpus, Layout
from cluster.installed import NAMESPACE, Platform, Tenant
from cluster.models import (
    QUESTION,
    SECONDS_TO_REPORT,
    START_LIMIT_S,
    Object,
    apply,
    model,
)
from cluster.spaces import eventually

pytestmark = [pytest.mark.large, pytest.mark.usefixtures("second_node")]

HALF = "nvidia.com/mig-3g.40gb"


def test_lost_devices_and_nodes_are_reported_and_replaced(
    platform: Platform, tenant: Tenant, gpus: Gpus, faults: Faults, scaled: str
) -> None:
    """O-63, O-64."""
    # The node that is lost must not be the operator's own.
    where = ("get", "pods", "--selector=app.kubernetes.io/name=halimede-operator", f"--namespace={NAMESPACE}")
    home = platform.cluster.kubectl(*where, "-o", "jsonpath={.items[0].spec.nodeName}")
    lost = "node-2" if home == "node-1" else "node-1"
    halves = Layout([["3g.40gb", "3g.40gb"]])
    gpus.install(home, halves)
    accelerator = {"type": "MIG", "mig": {"profile": "3g.40gb"}}
    apply(
        tenant,
        model("slice", scaled, accelerator=accelerator),
        model("moves", scaled, scheduling=preferring(lost)),
    )
    tenant.wait_ready("im/slice", START_LIMIT_S)
    tenant.wait_ready("im/moves", START_LIMIT_S)
    assert nodes_of(tenant, "moves") == [lost]
    pods = tenant.names("pods")

    faults.cut_off(lost)
    # The device plugin restarts.
    gpus.remove(home)
    gpus.install(home, halves)
    # A device breaks under a server that keeps running.
    for device in gpus.devices(home, HALF):
        gpus.mark(home, device, healthy=False)
    begun = time.monotonic()
    eventually(
        lambda: tenant.condition("im/slice", "Degraded").get("reason") == "DeviceUnhealthy", "the device to be reported"
    )
    assert time.monotonic() < begun + SECONDS_TO_REPORT
    assert (tenant.names("pods"), tenant.condition("im/slice")["status"]) == (pods, "True")

    for device in gpus.devices(home, HALF):
        gpus.mark(home, device, healthy=True)
    eventually(lambda: tenant.condition("im/slice", "Degraded") == {}, "the report to end")

    # The card is partitioned anew under its pods. Kubernetes lets them run, so they must be deleted.
    gpus.repartition(home, Layout([["1g.10gb", "1g.10gb"]]))
    begun = time.monotonic()
    eventually(
        lambda: tenant.condition("im/slice", "Degraded").get("reason") == "DeviceLost", "the device to be reported"
    )
    assert time.monotonic() < begun + SECONDS_TO_REPORT
    assert (tenant.names("pods"), tenant.condition("im/slice")["status"]) == (pods, "True")
    tenant.kubectl("delete", "pod", "--selector=halimede.dev/model=slice", "--wait=false")
    tenant.wait_for_reason("im/slice", "InsufficientDevices")
    free = f"need 1x 3g.40gb; 2x 1g.10gb free on node {home}, which is of another kind"
    eventually(lambda: free in tenant.condition("im/slice")["message"], "the free devices to be named")

    message = tenant.wait_for_reason("im/moves", "NodeLost")
    assert f"its node {lost} does not answer" in message
    gpus.repartition(home, halves)
    tenant.wait_ready("im/moves", START_LIMIT_S)
    tenant.wait_ready("im/slice", START_LIMIT_S)
    assert nodes_of(tenant, "moves") == [home]
    for name in ("moves", "slice"):
        assert tenant.infer(name, QUESTION) == {"OUT": [2, 4, 6, 8]}
    faults.rejoin(lost)
    eventually(lambda: len(tenant.names("pods")) == 2, "the pod on the lost node to be deleted")


def preferring(node: str) -> Object:
    """Scheduling that prefers a node, and leaves it after it was unreachable for 8 s."""
    expressions = [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]
    term = {"weight": 100, "preference": {"matchExpressions": expressions}}
    toleration = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 8}
    return {
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}},
        "tolerations": [{"key": "node.kubernetes.io/unreachable", **toleration}],
    }


def nodes_of(tenant: Tenant, name: str) -> list[str]:
    return [each.partition(" on ")[2] for each in tenant.get(f"im/{name}")["status"]["placements"]]
