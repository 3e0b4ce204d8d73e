"""`status.placements`: where each pod is, and on which devices, as one line a pod that the operator reads back."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halimede_operator.core.placement.choice import WHOLE
from halimede_operator.core.placement.inventory import shown_profile
from halimede_operator.core.pods.observed import Observed
from halimede_operator.core.pods.view import PodView
from halimede_operator.core.reading import clean, texts_at
from halimede_operator.core.snapshot import Snapshot

MAX_PLACEMENTS = 64
MAX_DEVICES = 16
"""Of a pod."""
MAX_PODS_NAMED = 4
MAX_DEVICES_NAMED = 2
"""Of a pod, in a text."""
_MAX_CHARACTERS = 8 * 1024
_TEXT = re.compile(r"(\S{1,253}) on (\S{1,253})(?:: (.+?))?(?:; allocated: (.+))?")


@dataclass(frozen=True, slots=True)
class PodPlacement:
    """A pod with a node."""

    pod: str
    node: str
    devices: tuple[str, ...] = ()
    """The UUIDs of those that its server uses, each with the profile before it if it is a slice."""
    allocated: tuple[str, ...] = ()
    """The devices of its ResourceClaim, as driver/pool/device."""

    def as_text(self) -> str:
        """`bert-1-a on node-1: 1g.10gb MIG-6c5d…; allocated: gpu.nvidia.com/node-1/gpu-0`."""
        devices = f": {', '.join(self.devices)}" if self.devices else ""
        allocated = f"; allocated: {', '.join(self.allocated)}" if self.allocated else ""
        return clean(f"{self.pod} on {self.node}{devices}{allocated}", _MAX_CHARACTERS)


def read_placements(status: object) -> Iterator[PodPlacement]:
    """The placements in a status. Malformed ones are left out, because any user may have written them."""
    for text in texts_at(status, "placements")[:MAX_PLACEMENTS]:
        if (found := _TEXT.fullmatch(clean(text, _MAX_CHARACTERS))) is not None:
            yield PodPlacement(found[1], found[2], _listed(found[3]), _listed(found[4]))


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()


def old_placements(observed: Observed) -> dict[str, PodPlacement]:
    """The entries of the old status by pod."""
    return {each.pod: each for each in read_placements(observed.subject.status)}


def placement_of(pod: PodView, snapshot: Snapshot, old: PodPlacement | None) -> PodPlacement:
    """Where the pod is, with its devices. What is not known now is taken from the old status, as it never changes."""
    known = old or PodPlacement(pod.name, pod.node)
    devices = known.devices
    if pod.index is not None and pod.index.devices is not None:
        reported = pod.index.devices.devices
        devices = tuple(f"{device.profile} {device.uuid}".strip() for device in reported if device.uuid)
    return PodPlacement(
        pod.name, pod.node, devices[:MAX_DEVICES], tuple(snapshot.allocated.get(pod.name) or known.allocated)
    )


def placements_text(observed: Observed) -> str:
    """`gpu-1 (1g.10gb MIG-6c5d…), gpu-2 (1g.10gb MIG-77aa…)`: the nodes of the newest template's pods, with their
    devices. Until a pod reports its device, only the kind is known."""
    placement = observed.subject.placement
    kind = ""
    if placement is not None and placement.resource:
        kind = shown_profile(placement.profile) or ("GPU" if placement.resource == WHOLE else placement.resource)
    old = old_placements(observed)
    placements = set[str]()
    for pod in observed.newest:
        pod_placement = placement_of(pod, observed.subject.snapshot, old.get(pod.name))
        devices = [each if " " in each else f"{kind} {each}".strip() for each in pod_placement.devices]
        has = _some(devices or pod_placement.allocated, MAX_DEVICES_NAMED) or kind
        placements.add(f"{pod.node} ({has})" if has else pod.node)
    return _some(sorted(filter(None, placements)), MAX_PODS_NAMED)


def _some(texts: Sequence[str], most: int) -> str:
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return ", ".join([*texts[:most], *more])
