"""`status.placements`: where each pod is, and on which devices, as one line a pod."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from halimede_operator.core.reading import clean, texts_at

MAX_PLACES = 64
_MAX_CHARACTERS = 8 * 1024
_TEXT = re.compile(r"(\S{1,253}) on (\S{1,253})(?:: (.+?))?(?:; allocated: (.+))?")


@dataclass(frozen=True, slots=True)
class Place:
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


def read_places(status: object) -> Iterator[Place]:
    """The places in a status. Malformed ones are left out, because any user may have written them."""
    for text in texts_at(status, "placements")[:MAX_PLACES]:
        if (found := _TEXT.fullmatch(clean(text, _MAX_CHARACTERS))) is not None:
            yield Place(found[1], found[2], _listed(found[3]), _listed(found[4]))


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()
