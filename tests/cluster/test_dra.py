"""Devices by Dynamic Resource Allocation: the real scheduler allocates devices of a driver that does not exist.

The nodes are simulated, so pods appear to run when they are scheduled.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from cluster.fake_nodes import MARK
from cluster.operators import Operator, Place
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


def apply(place: Place, name: str, *selectors: str, additional: Iterable[Object] = (), **fields: Any) -> None:
    claim = {"deviceClassName": DRIVER, "selectors": list(selectors), "additionalRequests": list(additional)}
    place.model(
        name,
        suspend=False,
        accelerator={"type": "DRA", "dra": claim},
        scheduling={"nodeSelector": {MARK: "fake"}, "tolerations": [{"key": MARK, "operator": "Exists"}]},
        **fields,
    )


def allocated(place: Place, model: str) -> dict[str, str]:
    """The devices of the model's pods, with the names of the requests that they were allocated for."""
    found = {}
    for claim in place.own.api.get(f"{RESOURCES}/namespaces/{place.namespace}/resourceclaims")["items"]:
        pods = [each["name"] for each in (claim.get("status") or {}).get("reservedFor") or ()]
        if any(pod.startswith(f"{model}-") for pod in pods):
            results = claim["status"]["allocation"]["devices"]["results"]
            found |= {each["device"]: each["request"] for each in results}
    return found


def wait_for(place: Place, operator: Operator, model: str, device: str, request: str) -> None:
    eventually(lambda: allocated(place, model) == {device: request}, f"{device} for {model}", 60, operator.check)


def condition(place: Place, model: str, kind: str) -> Object:
    conditions = (place.get("inferencemodel", model).get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind), {})


def placement(place: Place, model: str) -> str:
    """Where the model's only pod is; "" as long as it has no node."""
    placements = (place.get("inferencemodel", model).get("status") or {}).get("placements") or [""]
    return str(placements[0])


def templates(place: Place) -> set[str]:
    found = place.own.api.get(f"{RESOURCES}/namespaces/{place.namespace}/resourceclaimtemplates")["items"]
    return {each["metadata"]["name"] for each in found}


def test_the_scheduler_allocates_the_first_free_alternative(place: Place, node: str) -> None:
    operator = place.start().ready()
    apply(place, "first", SMALL, LARGE)
    wait_for(place, operator, "first", "small-0", "device/device-0")
    apply(place, "second", SMALL, LARGE)
    wait_for(place, operator, "second", "large-0", "device/device-1")
    ends_with = f" on {node}; allocated: {DRIVER}/{node}/large-0"
    eventually(lambda: placement(place, "second").endswith(ends_with), "second to be placed", 30, operator.check)
    status = place.get("inferencemodel", "second")["status"]
    assert (status["effective"]["deviceClassName"], status["effective"]["nodes"]) == (DRIVER, node)

    # Nothing is left for a third one, until the first one goes.
    apply(place, "third", SMALL, LARGE)
    eventually(
        lambda: condition(place, "third", "Placed").get("reason") == "InsufficientDevices",
        "third to say that no device is free", 30, operator.check,
    )  # fmt: skip
    message = condition(place, "third", "Placed")["message"]
    assert "cannot allocate all claims" in message
    assert f"need 1x device of class {DRIVER} that one of its 2 selectors matches" in message
    place.kubectl("delete", "inferencemodel", "first")
    wait_for(place, operator, "third", "small-0", "device/device-0")

    # Another selector is another template; the one before stays as long as a ReplicaSet names it.
    [before] = [name for name in templates(place) if name.startswith("second-")]
    apply(place, "second", LARGE, rollout={"policy": "InPlace"})
    wait_for(place, operator, "second", "large-0", "device")
    both = {name for name in templates(place) if name.startswith("second-")}
    assert before in both
    assert len(both) == 2
    replica_sets = place.own.api.get(f"/apis/apps/v1/namespaces/{place.namespace}/replicasets")["items"]
    [old] = [each["metadata"]["name"] for each in replica_sets if each["spec"]["replicas"] == 0]
    place.kubectl("delete", "replicaset", old)
    eventually(
        lambda: {name for name in templates(place) if name.startswith("second-")} == both - {before},
        "the template of before to be deleted", 30, operator.check,
    )  # fmt: skip
    made = {name: count for name, count in place.writes().items() if "resourceclaimtemplates 20" in name}
    assert made == {"patch resourceclaimtemplates 201": 4, "delete resourceclaimtemplates 200": 1}
    assert place.refused() == []


def test_a_claim_with_two_requests_gets_both_devices(place: Place, node: str) -> None:
    operator = place.start().ready()
    apply(place, "both", LARGE, additional=[{"name": "extra", "deviceClassName": DRIVER, "selectors": [SMALL]}])
    eventually(
        lambda: allocated(place, "both") == {"large-0": "device", "small-0": "extra"},
        "both devices",
        60,
        operator.check,
    )
    ends_with = f" on {node}; allocated: {DRIVER}/{node}/large-0, {DRIVER}/{node}/small-0"
    eventually(lambda: placement(place, "both").endswith(ends_with), "both devices to be named", 30, operator.check)


def test_a_selector_that_is_no_cel_changes_nothing_and_is_reported(place: Place, node: str) -> None:
    operator = place.start().ready()
    apply(place, "twice", SMALL)
    wait_for(place, operator, "twice", "small-0", "device")
    deployment = place.get("deployment", "twice")
    apply(place, "twice", "device.attributes[")
    eventually(
        lambda: condition(place, "twice", "Accepted").get("reason") == "ApplyRefused",
        "the mistake to be reported", 30, operator.check,
    )  # fmt: skip
    assert "selectors" in condition(place, "twice", "Accepted")["message"]
    assert place.get("deployment", "twice")["metadata"]["generation"] == deployment["metadata"]["generation"]
