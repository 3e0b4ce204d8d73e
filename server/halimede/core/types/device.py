"""Devices, and the placement of model instances on them."""

from dataclasses import dataclass, replace
from enum import Enum


class DeviceKind(Enum):
    GPU = "GPU"
    MIG = "MIG"


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator that a process can open: a whole GPU, or a MIG slice of one.

    `index` is its number in `instance_group.gpus`; `uuid` is its name in `CUDA_VISIBLE_DEVICES`. `profile` is that of a
    slice (`1g.10gb`), "" for a whole GPU, or if the driver does not tell it.
    """

    kind: DeviceKind
    index: int
    uuid: str
    name: str = ""
    memory_bytes: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    profile: str = ""

    @property
    def capability_text(self) -> str:
        """The compute capability as configurations have it, "8.9"."""
        major, minor = self.compute_capability
        return f"{major}.{minor}"


@dataclass(frozen=True, slots=True)
class Placement:
    """One model instance to create: `kind` is CPU, GPU or MODEL (AUTO is already resolved), `device` is set for GPU.

    `name` is its name in logs and errors (`digits_0_1`); `ordinal` counts the instances of the model from 0.
    """

    name: str
    ordinal: int
    kind: str
    device: Device | None = None
    profile: tuple[str, ...] = ()
    passive: bool = False

    @property
    def device_name(self) -> str:
        """The UUID of its device; `cpu` or `model` without one."""
        return self.kind.lower() if self.device is None else self.device.uuid


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory in use on a device in bytes, by whatever process: now, before the first load, and at most since then.

    The peak is the highest of the samples, so a short one may be missed.
    """

    used_bytes: int
    before_bytes: int
    peak_bytes: int

    def then(self, used_bytes: int) -> "DeviceMemory":
        """After a further sample."""
        return replace(self, used_bytes=used_bytes, peak_bytes=max(self.peak_bytes, used_bytes))


@dataclass(frozen=True, slots=True)
class PlacedInstances:
    """How many instances of a model version a device has."""

    model: str
    version: str
    count: int


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device that the server uses. `memory` is None if the driver does not report it."""

    device: Device
    memory: DeviceMemory | None = None
    instances: tuple[PlacedInstances, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """All devices of the server, and the peak of its memory outside of devices in bytes; None if it is not known."""

    devices: tuple[DeviceState, ...]
    host_peak_bytes: int | None = None
