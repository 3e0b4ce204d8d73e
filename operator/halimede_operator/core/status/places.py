"""Where the pods are: their nodes and devices."""

from collections.abc import Sequence

from halimede_operator.core.api.spec import Json
from halimede_operator.core.labels import PLACEMENT
from halimede_operator.core.placement.choice import WHOLE, read_placement
from halimede_operator.core.placement.inventory import shown_profile
from halimede_operator.core.pods.claims import MAX_ALLOCATED
from halimede_operator.core.pods.view import PodView
from halimede_operator.core.reading import at, clean, name_at, objects_at, text_at
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.status.observed import Observed

MAX_PLACEMENTS = 64
MAX_DEVICES = 16
"""Of a pod."""
MAX_PODS_NAMED = 4
MAX_DEVICES_NAMED = 2
"""Of a pod, in a text."""


def old_placements(observed: Observed) -> dict[str, Json]:
    """The entries of the old status by pod."""
    return {text_at(each, "pod"): each for each in objects_at(observed.old, "placements")[:MAX_PLACEMENTS]}


def allocated_devices(snapshot: Snapshot, name: str, old: object) -> list[str]:
    """The devices of the pod's ResourceClaim; those of the old status if it was not read now."""
    known = at(old, "allocated")
    kept = known if isinstance(known, list) else []
    return list(
        snapshot.allocated.get(name) or [clean(each, 512) for each in kept[:MAX_ALLOCATED] if isinstance(each, str)]
    )


def reported_devices(pod: PodView, old: object) -> list[Object]:
    """The devices that the pod reports; until it does, those of the old status, as its devices never change."""
    if pod.index is not None and pod.index.devices is not None:
        known = [(device.uuid, device.profile) for device in pod.index.devices.devices]
    else:
        known = [(name_at(device, "uuid"), name_at(device, "profile")) for device in objects_at(old, "devices")]
    return [
        {"uuid": uuid, "profile": profile} if profile else {"uuid": uuid}
        for uuid, profile in known[:MAX_DEVICES]
        if uuid
    ]


def places_text(observed: Observed) -> str:
    """`gpu-1 (1g.10gb MIG-6c5d…), gpu-2 (1g.10gb MIG-77aa…)`: the nodes of the newest template's pods, with their
    devices. Until a pod reports its device, only the kind is known."""
    placement = read_placement(text_at(observed.deployment, "metadata", "annotations", PLACEMENT))
    kind = ""
    if placement is not None and placement.resource:
        kind = shown_profile(placement.profile) or ("GPU" if placement.resource == WHOLE else placement.resource)
    old = old_placements(observed)
    places = set[str]()
    for pod in observed.newest:
        reported = reported_devices(pod, old.get(pod.name))
        devices = [f"{each.get('profile', kind)} {each['uuid']}".strip() for each in reported]
        devices = devices or allocated_devices(observed.snapshot, pod.name, old.get(pod.name))
        has = _some(devices, MAX_DEVICES_NAMED) or kind
        places.add(f"{pod.node} ({has})" if has else pod.node)
    return _some(sorted(filter(None, places)), MAX_PODS_NAMED)


def _some(texts: Sequence[str], most: int) -> str:
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return ", ".join([*texts[:most], *more])
