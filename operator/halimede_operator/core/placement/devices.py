"""Detects devices that disappeared under running pods, for instance because a card was partitioned anew.

A kubelet reports a missing device as healthy and lets the pod run. But it reports how many devices of a resource its
node has (`capacity`, broken ones included). If our pods hold more than that, a device of theirs is gone. Which one is
not reported.

When a device plugin stops offering a resource, the kubelet counts its devices for five more minutes, in case the plugin
comes back. Meanwhile none of them is `allocatable`. If devices of another resource are allocatable, the plugin runs,
and this resource is really gone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from halimede_operator.core.reading import at, decimal, name_at, objects_at, text_at
from halimede_operator.core.snapshot import Object, Shortage

PREFIX = "nvidia.com/"

Held = Mapping[str, Counter[str]]
"""Number of devices by resource, by the node's name."""


def held_devices(pods: Iterable[Object]) -> Held:
    """The devices that pods hold: pods that have a node and have not ended."""
    found: dict[str, Counter[str]] = {}
    for pod in pods:
        node = name_at(pod, "spec", "nodeName")
        if node and text_at(pod, "status", "phase") not in {"Failed", "Succeeded"}:
            for container in objects_at(pod, "spec", "containers"):
                for resource, count in devices_in(at(container, "resources", "limits")):
                    found.setdefault(node, Counter())[resource] += count
    return found


def shortages(node: Object, held: Counter[str]) -> tuple[Shortage, ...]:
    """Resources of which pods hold more devices than the node has. held: devices by resource on this node."""
    advertised = dict(devices_in(at(node, "status", "allocatable")))
    counted = dict(devices_in(at(node, "status", "capacity")))
    has = {resource: count for resource, count in counted.items() if resource in advertised or not advertised}
    return tuple(
        Shortage(resource, has.get(resource, 0), count)
        for resource, count in sorted(held.items())
        if count > has.get(resource, 0)
    )


def devices_in(quantities: object) -> Iterable[tuple[str, int]]:
    """Resources of devices with their counts, in a map of quantities such as `allocatable` or `limits`."""
    if isinstance(quantities, Mapping):
        for name, quantity in quantities.items():
            if isinstance(name, str) and name.startswith(PREFIX) and (count := decimal(quantity)):
                yield name, count
