"""Devices by Dynamic Resource Allocation: the real scheduler allocates devices of a driver that does not exist.

The nodes are simulated, so pods appear to run when they are scheduled.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from cluster.fake_nodes import MARK
from cluster.operators import Operator, Site
from cluster.own import OwnCluster
from cluster.spaces import eventually

pytestmark = pytest.mark.large

DRIVER = "devices.halimede.test"
RESOURCES = "/apis/resource.k8s.io/v1"
SMALL, LARGE = (f"device.attributes['{DRIVER}'].profile == '{profile}'" for profile in ("1g.10gb", "2g.20gb"))
Object = dict[str, Any]


@pytest.fixture
def node(own: OwnCluster) -> Iterator[str]:
    """A node with a small and a large device."""
    own.fake_nodes.add(1)
    [name] = own.kubectl("get", "nodes", f"--selector={MARK}=fake", "--output=name").split()
    name = name.removeprefix("node/")
    own.api.create(f"{RESOURCES}/deviceclasses", {
        "metadata": {"name": DRIVER},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]},
    })  # fmt: skip
    devices = [
        {"name": device, "attributes": {"profile": {"string": profile}}}
        for device, profile in (("large-0", "2g.20gb"), ("small-0", "1g.10gb"))
    ]
    pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
    own.api.create(f"{RESOURCES}/resourceslices", {
        "metadata": {"name": name},
        "spec": {"driver": DRIVER, "nodeName": name, "pool": pool, "devices": devices},
    })  # fmt: skip
    yield name
    own.api.send("DELETE", f"{RESOURCES}/resourceslices/{name}")
    own.api.send("DELETE", f"{RESOURCES}/deviceclasses/{DRIVER}")
    own.fake_nodes.remove()


def apply(site: Site, name: str, *selectors: str, additional: Iterable[Object] = (), **fields: Any) -> None:
    claim = {"deviceClassName": DRIVER, "selectors": list(selectors), "additionalRequests": list(additional)}
    site.model(
        name,
        suspend=False,
        accelerator={"type": "DRA", "dra": claim},
        scheduling={"nodeSelector": {MARK: "fake"}, "tolerations": [{"key": MARK, "operator": "Exists"}]},
        **fields,
    )


def allocated(site: Site, model: str) -> dict[str, str]:
    """The devices of the model's pods, with the names of the requests that they were allocated for."""
    found = {}
    for claim in site.own.api.get(f"{RESOURCES}/namespaces/{site.namespace}/resourceclaims")["items"]:
        pods = [each["name"] for each in (claim.get("status") or {}).get("reservedFor") or ()]
        if any(pod.startswith(f"{model}-") for pod in pods):
            results = claim["status"]["allocation"]["devices"]["results"]
            found |= {each["device"]: each["request"] for each in results}
    return found


def wait_for(site: Site, operator: Operator, model: str, device: str, request: str) -> None:
    eventually(lambda: allocated(site, model) == {device: request}, f"{device} for {model}", 60, operator.check)


def condition(site: Site, model: str, kind: str) -> Object:
    conditions = (site.get("inferencemodel", model).get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind), {})


def placement(site: Site, model: str) -> str:
    """Where the model's only pod is; "" as long as it has no node."""
    placements = (site.get("inferencemodel", model).get("status") or {}).get("placements") or [""]
    return str(placements[0])


def templates(site: Site) -> set[str]:
    found = site.own.api.get(f"{RESOURCES}/namespaces/{site.namespace}/resourceclaimtemplates")["items"]
    return {each["metadata"]["name"] for each in found}


def test_the_scheduler_allocates_the_first_free_alternative(site: Site, node: str) -> None:
    operator = site.start().ready()
    apply(site, "first", SMALL, LARGE)
    wait_for(site, operator, "first", "small-0", "device/device-0")
    apply(site, "second", SMALL, LARGE)
    wait_for(site, operator, "second", "large-0", "device/device-1")
    ends_with = f" on {node}; allocated: {DRIVER}/{node}/large-0"
    eventually(lambda: placement(site, "second").endswith(ends_with), "second to be placed", 30, operator.check)
    status = site.get("inferencemodel", "second")["status"]
    assert (status["effective"]["deviceClassName"], status["effective"]["nodes"]) == (DRIVER, node)

    # Nothing is left for a third one, until the first one goes.
    apply(site, "third", SMALL, LARGE)
    eventually(
        lambda: condition(site, "third", "Placed").get("reason") == "InsufficientDevices",
        "third to say that no device is free", 30, operator.check,
    )  # fmt: skip
    message = condition(site, "third", "Placed")["message"]
    assert "cannot allocate all claims" in message
    assert f"need 1x device of class {DRIVER} that one of its 2 selectors matches" in message
    site.kubectl("delete", "inferencemodel", "first")
    wait_for(site, operator, "third", "small-0", "device/device-0")

    # Another selector is another template; the one before stays as long as a ReplicaSet names it.
    [before] = [name for name in templates(site) if name.startswith("second-")]
    apply(site, "second", LARGE, rollout={"policy": "InPlace"})
    wait_for(site, operator, "second", "large-0", "device")
    both = {name for name in templates(site) if name.startswith("second-")}
    assert before in both
    assert len(both) == 2
    replica_sets = site.own.api.get(f"/apis/apps/v1/namespaces/{site.namespace}/replicasets")["items"]
    [old] = [each["metadata"]["name"] for each in replica_sets if each["spec"]["replicas"] == 0]
    site.kubectl("delete", "replicaset", old)
    eventually(
        lambda: {name for name in templates(site) if name.startswith("second-")} == both - {before},
        "the template of before to be deleted", 30, operator.check,
    )  # fmt: skip
    made = {name: count for name, count in site.writes().items() if "resourceclaimtemplates 20" in name}
    assert made == {"patch resourceclaimtemplates 201": 4, "delete resourceclaimtemplates 200": 1}
    assert site.refused() == []


def test_a_claim_with_two_requests_gets_both_devices(site: Site, node: str) -> None:
    operator = site.start().ready()
    apply(site, "both", LARGE, additional=[{"name": "extra", "deviceClassName": DRIVER, "selectors": [SMALL]}])
    eventually(
        lambda: allocated(site, "both") == {"large-0": "device", "small-0": "extra"},
        "both devices",
        60,
        operator.check,
    )
    ends_with = f" on {node}; allocated: {DRIVER}/{node}/large-0, {DRIVER}/{node}/small-0"
    eventually(lambda: placement(site, "both").endswith(ends_with), "both devices to be named", 30, operator.check)


def test_a_selector_that_is_no_cel_changes_nothing_and_is_reported(site: Site, node: str) -> None:
    operator = site.start().ready()
    apply(site, "twice", SMALL)
    wait_for(site, operator, "twice", "small-0", "device")
    deployment = site.get("deployment", "twice")
    apply(site, "twice", "device.attributes[")
    eventually(
        lambda: condition(site, "twice", "Accepted").get("reason") == "ApplyRefused",
        "the mistake to be reported", 30, operator.check,
    )  # fmt: skip
    assert "selectors" in condition(site, "twice", "Accepted")["message"]
    assert site.get("deployment", "twice")["metadata"]["generation"] == deployment["metadata"]["generation"]
