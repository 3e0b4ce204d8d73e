"""`spec.rollout` where the only device is taken: each policy, a change of it during an update, and a pause."""

import json
import time

import pytest

from cluster.gpus import Gpus, Layout
from cluster.installed import Tenant
from cluster.models import QUESTION, START_LIMIT_S, Object, apply, model
from cluster.spaces import eventually

pytestmark = pytest.mark.large

RELIST_S = 11.0
"""By then the operator reads the devices of all pods again: those of an earlier test are gone."""


def test_updates_in_place_take_the_device_of_the_old_pod(tenant: Tenant, gpus: Gpus, scaled: str) -> None:
    gpus.install("node-1", Layout([["4g.40gb"]]))
    accelerator = {"type": "MIG", "mig": {"profile": "4g.40gb"}}

    def update(number: int, **rollout: object) -> None:
        """Apply the model with another environment, which needs new pods."""
        env = [{"name": "NUMBER", "value": str(number)}]
        apply(tenant, model("only", scaled, accelerator=accelerator, env=env, rollout=rollout))

    update(1)
    tenant.wait_ready("im/only", START_LIMIT_S)
    first = tenant.names("pods")

    # The new pod has no device, and the old one serves.
    update(2, policy="Surge")
    tenant.wait_for_reason("im/only", "InsufficientDevices")
    assert tenant.condition("im/only", "Available")["status"] == "True"
    assert tenant.infer("only", QUESTION) == {"OUT": [2, 4, 6, 8]}
    assert set(first) < set(tenant.names("pods"))

    update(2, policy="InPlace")
    tenant.wait_ready("im/only", START_LIMIT_S)
    assert [numbers(pod) for pod in tenant.get("pods")["items"]] == [["2"]]

    update(3, policy="InPlace", paused=True)
    message = tenant.wait_for_reason("im/only", "RolloutPaused")
    assert message.startswith("spec.rollout.paused is true")
    assert [numbers(pod) for pod in tenant.get("pods")["items"]] == [["2"]]

    # The strategy changes its type, and the pause ends.
    update(3, policy="Recreate")
    eventually(lambda: served(tenant) == ["3"], "the new pod", START_LIMIT_S)
    assert json.loads(tenant.kubectl("get", "deployment/only", "-o", "jsonpath={.spec.strategy}")) == {
        "type": "Recreate"
    }
    assert tenant.infer("only", QUESTION) == {"OUT": [2, 4, 6, 8]}


def test_a_refused_successor_leaves_the_serving_pod_alone(tenant: Tenant, gpus: Gpus, scaled: str) -> None:
    """A second device is free, and the new pod's PriorityClass does not exist yet."""
    gpus.install("node-1", Layout([["4g.40gb"], ["4g.40gb"]]))
    accelerator = {"type": "MIG", "mig": {"profile": "4g.40gb"}}
    apply(tenant, model("only", scaled, accelerator=accelerator))
    tenant.wait_ready("im/only", START_LIMIT_S)
    first = tenant.names("pods")
    time.sleep(RELIST_S)

    priority = f"{tenant.namespace}-high"
    apply(tenant, model("only", scaled, accelerator=accelerator, scheduling={"priorityClassName": priority}))
    assert f"no PriorityClass with name {priority}" in tenant.wait_for_reason("im/only", "PodsRefused")
    time.sleep(5)  # longer than a decision about the strategy takes
    assert (tenant.names("pods"), tenant.condition("im/only", "RolloutStrategy")["reason"]) == (first, "Surge")
    assert tenant.infer("only", QUESTION) == {"OUT": [2, 4, 6, 8]}

    value = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": priority}, "value": 1}
    apply(tenant, value)
    tenant.wait_ready("im/only", START_LIMIT_S)
    eventually(lambda: first.isdisjoint(tenant.names("pods")), "the old pod to go", START_LIMIT_S)
    tenant.kubectl("delete", "priorityclass", priority)


def served(tenant: Tenant) -> list[str]:
    """The environments of the pods, once the object is ready."""
    is_ready = tenant.condition("im/only", "Ready").get("status") == "True"
    return [number for pod in tenant.get("pods")["items"] for number in numbers(pod)] if is_ready else []


def numbers(pod: Object) -> list[str]:
    [server] = [each for each in pod["spec"]["containers"] if each["name"] == "server"]
    return [each["value"] for each in server["env"] if each["name"] == "NUMBER"]
