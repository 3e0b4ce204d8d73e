"""Which devices pods hold, and of which their node has fewer."""

from collections import Counter

import pytest

from halimede_operator.core.devices import held_devices, shortages
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
def test_what_is_no_pod_holds_nothing(broken: Object):
    assert held_devices([broken]) == {}


def test_what_a_node_has_fewer_of_is_short():
    held = Counter({HALF: 2, SEVENTH: 1})
    assert shortages(node(**{HALF: "2", SEVENTH: "7"}), held) == ()
    assert shortages(node(**{HALF: "1", SEVENTH: "1"}), held) == (Shortage(HALF, 1, 2),)
    assert shortages(node(**{SEVENTH: "0"}), held) == (Shortage(SEVENTH, 0, 1), Shortage(HALF, 0, 2))
    assert shortages({"status": None}, Counter()) == ()


def test_a_device_that_is_broken_is_there():
    assert shortages(node({HALF: "1"}, **{HALF: "2"}), Counter({HALF: 2})) == ()


def test_what_a_plugin_offers_no_more_is_gone_and_a_plugin_that_is_away_comes_back():
    """A kubelet counts both for five minutes."""
    gone = node({HALF: "0", SEVENTH: "7"}, **{HALF: "2", SEVENTH: "7"})
    away = node({HALF: "0", SEVENTH: "0"}, **{HALF: "2", SEVENTH: "7"})
    assert shortages(gone, Counter({HALF: 1})) == (Shortage(HALF, 0, 1),)
    assert shortages(away, Counter({HALF: 1})) == ()
