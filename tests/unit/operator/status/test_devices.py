"""Devices that are missing, broken or gone."""

from halimede_operator.core.snapshot import Shortage
from halimede_operator.core.spec.types import Workload
from support.operator_pods import (
    deployment,
    ended,
    serving,
    snapshot,
    stopped,
    unscheduled,
)
from support.operator_specs import model_key, model_spec
from support.operator_status import NAME, NO_GPU, message, ready_state, status_for


def test_a_lack_of_devices_says_which_are_free():
    text = "need 1x 1g.5gb; no device is free"
    seen = snapshot(model_key(), unscheduled(NO_GPU), child=deployment(), free_devices=text)
    status = status_for(seen, model_spec())

    assert ready_state(status) == ("False", "InsufficientDevices", f"0/1 replicas serving: pod {NAME}: {text}")
    assert message(status, "Placed") == f"pod {NAME}: {text}; {NO_GPU}"
    # The scheduler's words are in one condition.
    assert str(status).count("no new claims") == 1
    assert status["phase"] == "Scheduling"


def test_another_lack_is_named_before_the_free_devices():
    scheduler, text = "0/2 nodes are available: 2 Insufficient cpu.", "need 1x 1g.5gb; 2x 1g.5gb free on node a"
    seen = snapshot(model_key(), unscheduled(scheduler), child=deployment(), free_devices=text)
    status = status_for(seen, model_spec())

    assert ready_state(status) == ("False", "Unschedulable", f"0/1 replicas serving: pod {NAME}: {scheduler} {text}")


def test_an_object_without_fitting_devices_says_so():
    text = "need 1x a slice with 40 GiB; no node has devices that fit"
    status = status_for(snapshot(model_key()), model_spec(), unplaced=text)

    assert ready_state(status) == ("False", "InsufficientDevices", f"0/1 replicas serving: {text}")
    placed = next(c for c in status["conditions"] if c["type"] == "Placed")
    assert (placed["status"], placed["reason"], placed["message"]) == ("False", "InsufficientDevices", text)
    assert status["phase"] == "Scheduling"


def test_pods_of_the_spec_before_serve_while_no_device_fits():
    seen = snapshot(model_key(), serving(), child=deployment())
    status = status_for(seen, model_spec(), unplaced="no device fits")

    assert ready_state(status)[:2] == ("False", "InsufficientDevices")
    degraded = next(c for c in status["conditions"] if c["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "InsufficientDevices")
    assert status["phase"] == "Degraded"


def test_an_unhealthy_device_is_reported_before_its_effects():
    dead = stopped(ended(1, "CUDA error"))
    dead["status"]["containerStatuses"][0]["allocatedResourcesStatus"] = [
        {
            "name": "nvidia.com/gpu",
            "resources": [{"resourceID": "GPU-1", "health": "Unhealthy"}, {"resourceID": "GPU-2", "health": "Healthy"}],
        }
    ]
    status = status_for(snapshot(model_key(), dead, child=deployment()), model_spec())

    message = f"pod {NAME}: container server: device GPU-1 (nvidia.com/gpu) is unhealthy"
    assert ready_state(status) == ("False", "DeviceUnhealthy", f"0/1 replicas serving: {message}")


def test_a_device_that_breaks_under_a_serving_pod_is_reported():
    """O-63."""
    pods = [serving(), serving("bert-7f9c66d5b8-bbbbb")]
    pods[1]["status"]["containerStatuses"][0]["allocatedResourcesStatus"] = [
        {"name": "nvidia.com/gpu", "resources": [{"resourceID": "GPU-1", "health": "Unhealthy"}]}
    ]
    spec = model_spec(workload=Workload(replicas=2))
    status = status_for(snapshot(model_key(), *pods, child=deployment(2)), spec)

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
        status = status_for(seen, spec)
        assert ready_state(status)[:2] == ("True", "Serving")
        degraded = next(c for c in status["conditions"] if c["type"] == "Degraded")
        assert (degraded["status"], degraded["reason"]) == ("True", "DeviceLost")
        messages[has] = degraded["message"]

    assert messages == {
        0: f"pod {NAME}: node node-1 has 0 nvidia.com/mig-3g.40gb, and pods hold 2: the pod's is gone",
        1: f"pod {NAME}: node node-1 has 1 nvidia.com/mig-3g.40gb, and pods hold 2: one that a pod of ours has is gone",
    }
