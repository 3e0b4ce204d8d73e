"""Devices that a node had when its pods came, and has no more: a card that was partitioned anew under them.

A kubelet says of a device that is gone that it is well, and lets the pod run. What it does say is how many of a kind
its node has (`capacity`), broken ones among them. Where pods of ours hold more, one of theirs is gone; which one,
nobody tells.

Of a resource that the device plugin offers no more, the kubelet counts the devices for five minutes on, as if the
plugin were about to come back. None of them can be had meanwhile (`allocatable`). Where others can, the plugin is
there.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from halimede_operator.core.reading import at, decimal, name_at, objects_at, text_at
from halimede_operator.core.snapshot import Object, Shortage

PREFIX = "nvidia.com/"

Held = Mapping[str, Counter[str]]
"""Devices by resource, by the node's name."""


def held_devices(pods: Iterable[Object]) -> Held:
    """By pods that have a node, until they are over."""
    found: dict[str, Counter[str]] = {}
    for pod in pods:
        node = name_at(pod, "spec", "nodeName")
        if node and text_at(pod, "status", "phase") not in {"Failed", "Succeeded"}:
            for container in objects_at(pod, "spec", "containers"):
                for resource, count in _devices(at(container, "resources", "limits")):
                    found.setdefault(node, Counter())[resource] += count
    return found


def shortages(node: Object, held: Counter[str]) -> tuple[Shortage, ...]:
    """The resources of which pods hold more than the node has."""
    offered = dict(_devices(at(node, "status", "allocatable")))
    counted = dict(_devices(at(node, "status", "capacity")))
    has = {resource: count for resource, count in counted.items() if resource in offered or not offered}
    return tuple(
        Shortage(resource, has.get(resource, 0), count)
        for resource, count in sorted(held.items())
        if count > has.get(resource, 0)
    )


def _devices(quantities: object) -> Iterable[tuple[str, int]]:
    if isinstance(quantities, Mapping):
        for name, quantity in quantities.items():
            if isinstance(name, str) and name.startswith(PREFIX) and (count := decimal(quantity)):
                yield name, count
