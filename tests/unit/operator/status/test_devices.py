"""Devices that are missing, broken or gone."""

from halimede_operator.core.api.spec import Workload
from halimede_operator.core.snapshot import Shortage
from halimede_operator.core.status import status_of
from support.operator_pods import (
    deployment,
    ended,
    gpu_node,
    serving,
    snapshot,
    stopped,
    unscheduled,
)
from support.operator_specs import model_key, model_spec
from support.operator_status import NAME, NO_GPU, NOW, ready_state


def test_insufficient_devices_lists_what_the_nodes_have():
    nodes = (gpu_node("a", gpu="2", mig_1g_10gb="7"), gpu_node("b", gpu="4", mig_3g_40gb="0"))
    seen = snapshot(model_key(), unscheduled(NO_GPU), child=deployment(), nodes=nodes)
    status = status_of(seen, model_spec(), (), (), (), NOW)

    hint = "No node has nvidia.com/mig-1g.5gb. The nodes have in all: nvidia.com/gpu (6), nvidia.com/mig-1g.10gb (7)"
    assert ready_state(status) == ("False", "InsufficientDevices", f"0/1 replicas serving: pod {NAME}: {NO_GPU} {hint}")
    assert status["phase"] == "Scheduling"


def test_devices_that_others_hold_are_counted():
    message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    seen = snapshot(model_key(), unscheduled(message), child=deployment(), nodes=(gpu_node("a", gpu="2"),))
    status = status_of(seen, model_spec(), (), (), (), NOW)

    assert (
        ready_state(status)[2]
        == f"0/1 replicas serving: pod {NAME}: {message} The nodes have in all: nvidia.com/gpu (2)"
    )


def test_nodes_without_devices_are_reported():
    seen = snapshot(model_key(), unscheduled(NO_GPU), child=deployment(), nodes=(gpu_node("a"),))
    status = status_of(seen, model_spec(), (), (), (), NOW)

    assert ready_state(status)[2].endswith("No node has nvidia.com/mig-1g.5gb. The nodes have no such devices at all")


def test_an_unhealthy_device_is_reported_before_its_effects():
    dead = stopped(ended(1, "CUDA error"))
    dead["status"]["containerStatuses"][0]["allocatedResourcesStatus"] = [
        {
            "name": "nvidia.com/gpu",
            "resources": [{"resourceID": "GPU-1", "health": "Unhealthy"}, {"resourceID": "GPU-2", "health": "Healthy"}],
        }
    ]
    status = status_of(snapshot(model_key(), dead, child=deployment()), model_spec(), (), (), (), NOW)

    message = f"pod {NAME}: container server: device GPU-1 (nvidia.com/gpu) is unhealthy"
    assert ready_state(status) == ("False", "DeviceUnhealthy", f"0/1 replicas serving: {message}")


def test_a_device_that_breaks_under_a_serving_pod_is_reported():
    """O-63."""
    pods = [serving(), serving("bert-7f9c66d5b8-bbbbb")]
    pods[1]["status"]["containerStatuses"][0]["allocatedResourcesStatus"] = [
        {"name": "nvidia.com/gpu", "resources": [{"resourceID": "GPU-1", "health": "Unhealthy"}]}
    ]
    spec = model_spec(workload=Workload(replicas=2))
    status = status_of(snapshot(model_key(), *pods, child=deployment(2)), spec, (), (), (), NOW)

    assert (ready_state(status)[:2], status["phase"]) == (("True", "Serving"), "Degraded")
    degraded = next(c for c in status["conditions"] if c["type"] == "Degraded")
    message = "pod bert-7f9c66d5b8-bbbbb: container server: device GPU-1 (nvidia.com/gpu) is unhealthy"
    assert (degraded["status"], degraded["reason"], degraded["message"]) == ("True", "DeviceUnhealthy", message)


def test_a_device_that_disappears_under_a_serving_pod_is_reported():
    """O-63."""
    pods = [serving(), serving("bert-7f9c66d5b8-bbbbb", node="node-2"), serving("bert-7f9c66d5b8-ccccc")]
    for each in pods[:2]:
        each["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/mig-3g.40gb": "1"}}
    spec = model_spec(workload=Workload(replicas=3))
    messages = {}
    for has in (0, 1):
        short = {"node-1": (Shortage("nvidia.com/mig-3g.40gb", has, 2), Shortage("nvidia.com/gpu", 0, 1))}
        seen = snapshot(model_key(), *pods, child=deployment(3), shortages=short)
        status = status_of(seen, spec, (), (), (), NOW)
        assert ready_state(status)[:2] == ("True", "Serving")
        degraded = next(c for c in status["conditions"] if c["type"] == "Degraded")
        assert (degraded["status"], degraded["reason"]) == ("True", "DeviceLost")
        messages[has] = degraded["message"]

    assert messages == {
        0: f"pod {NAME}: node node-1 has 0 nvidia.com/mig-3g.40gb, and pods hold 2: the pod's is gone",
        1: f"pod {NAME}: node node-1 has 1 nvidia.com/mig-3g.40gb, and pods hold 2: one that a pod of ours has is gone",
    }
