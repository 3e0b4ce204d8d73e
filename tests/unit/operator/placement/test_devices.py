"""Devices that pods hold, and shortages of their nodes."""

from collections import Counter

import pytest

from halimede_operator.core.placement.devices import held_devices, shortages
from halimede_operator.core.snapshot import Object, Shortage

HALF, SEVENTH = "nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb"


def pod(node: str, phase: str = "Running", **limits: object) -> Object:
    containers = [{"name": "server", "resources": {"limits": limits}}]
    return {"spec": {"nodeName": node, "containers": containers}, "status": {"phase": phase}}


def node(offered: dict[str, str] | None = None, **counted: object) -> Object:
    return {"status": {"capacity": counted, "allocatable": counted if offered is None else offered}}


def test_devices_are_held_by_pods_on_a_node_until_they_are_over():
    pods = [
        pod("a", **{HALF: "1", "cpu": "2"}),
        pod("a", **{HALF: "1", SEVENTH: 2}),
        pod("a", "Failed", **{HALF: "1"}),
        pod("b", **{SEVENTH: "1"}),
        pod("", "Pending", **{HALF: "1"}),
        pod("c", cpu="2"),
    ]
    assert held_devices(pods) == {"a": Counter({HALF: 2, SEVENTH: 2}), "b": Counter({SEVENTH: 1})}


@pytest.mark.parametrize("broken", [{}, {"spec": 1}, {"spec": {"nodeName": "a", "containers": [{"resources": []}]}}])
def test_malformed_pods_hold_no_devices(broken: Object):
    assert held_devices([broken]) == {}


def test_a_resource_with_fewer_devices_than_held_is_a_shortage():
    held = Counter({HALF: 2, SEVENTH: 1})
    assert shortages(node(**{HALF: "2", SEVENTH: "7"}), held) == ()
    assert shortages(node(**{HALF: "1", SEVENTH: "1"}), held) == (Shortage(HALF, 1, 2),)
    assert shortages(node(**{SEVENTH: "0"}), held) == (Shortage(SEVENTH, 0, 1), Shortage(HALF, 0, 2))
    assert shortages({"status": None}, Counter()) == ()


def test_a_broken_device_is_no_shortage():
    assert shortages(node({HALF: "1"}, **{HALF: "2"}), Counter({HALF: 2})) == ()


def test_a_withdrawn_resource_is_a_shortage_but_an_absent_plugin_is_not():
    """A kubelet counts both for five minutes."""
    gone = node({HALF: "0", SEVENTH: "7"}, **{HALF: "2", SEVENTH: "7"})
    away = node({HALF: "0", SEVENTH: "0"}, **{HALF: "2", SEVENTH: "7"})
    assert shortages(gone, Counter({HALF: 1})) == (Shortage(HALF, 0, 1),)
    assert shortages(away, Counter({HALF: 1})) == ()
