"""Devices, and the placement of model instances on them."""

from dataclasses import dataclass
from enum import Enum


class DeviceKind(Enum):
    GPU = "GPU"
    MIG = "MIG"


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator that a process can open: a whole GPU, or a MIG slice of one.

    `index` is its number in `instance_group.gpus`; `uuid` is its name in `CUDA_VISIBLE_DEVICES`.
    """

    kind: DeviceKind
    index: int
    uuid: str
    name: str = ""
    memory_bytes: int = 0
    compute_capability: tuple[int, int] = (0, 0)


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
