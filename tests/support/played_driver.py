"""NVIDIA's driver libraries without GPUs: a real `libnvidia-ml.so.1` whose devices a test writes and changes, and a
`libcuda.so.1` whose device is the host's memory."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.image import install_programs
from support.probe import built

LIBRARY = "libnvidia-ml.so.1"
DEVICES_FILE = "devices.txt"
MIB = 1 << 20
CUDA_LIBRARY = "libcuda.so.1"


@dataclass
class PlayedGpu:
    uuid: str
    total_mib: int
    used_mib: int = 0
    name: str = "NVIDIA H100 80GB HBM3"
    mig: str = "-"
    """The MIG mode: `1`, `0`, or `-` for a GPU without MIG."""
    capability: str = "9.0"

    def __str__(self) -> str:
        return f"gpu {self.uuid} {self.capability} {self.mig} {self.total_mib} {self.used_mib} {self.name}"


@dataclass
class PlayedSlice:
    """A slice of the GPU before it."""

    uuid: str
    total_mib: int
    used_mib: int = 0
    name: str = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    gpu_slices: int = 1
    compute_slices: int = 1

    def __str__(self) -> str:
        sizes = f"{self.gpu_slices} {self.compute_slices} {self.total_mib} {self.used_mib}"
        return f"mig {self.uuid} {sizes} {self.name}"


class PlayedDriver:
    """A driver for processes with `environment`. Its devices are those of the last `show`."""

    def __init__(self, folder: Path, *devices: PlayedGpu | PlayedSlice) -> None:
        self._file = folder / DEVICES_FILE
        self.show(*devices)
        self.environment = {"LD_LIBRARY_PATH": str(library().parent), "PLAYED_DEVICES": str(self._file)}

    def show(self, *devices: PlayedGpu | PlayedSlice) -> None:
        """Change the devices."""
        write_devices(self._file, devices)


def library() -> Path:
    """The compiled library. Unavailable without a compiler that is there or can be installed."""
    return _compiled("nvml", LIBRARY)


def cuda_library() -> Path:
    """CUDA's driver library over a device that does not exist. Unavailable as above."""
    return _compiled("cuda", CUDA_LIBRARY)


def _compiled(name: str, library: str) -> Path:
    install_programs({"cc": "build-essential"})
    command = ["cc", "-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-Wl,-soname,{library}"]
    return built(name, [*command, "-o", f"{{out}}/{library}", f"{name}.c"], needs="cc") / library


def write_devices(file: Path, devices: Sequence[PlayedGpu | PlayedSlice]) -> None:
    """Change the devices. A process reads either all old lines or all new ones."""
    new = file.with_suffix(".new")
    new.write_text("".join(f"{device}\n" for device in devices))
    os.replace(new, file)


def two_slices(*used_mib: int) -> Sequence[PlayedGpu | PlayedSlice]:
    """A GPU in MIG mode with two slices, whose memory in use is given."""
    gpu = PlayedGpu("GPU-0", 81559, mig="1")
    parts = [PlayedSlice(f"MIG-{number}", 9856, used) for number, used in enumerate(used_mib)]
    return [gpu, *parts]
