"""The inventory of accelerators: from a list file, or else from NVIDIA's management library (NVML).

Indexes count the usable devices from 0. `instance_group.gpus` refers to them. For whole GPUs they equal CUDA's own
numbers if CUDA_DEVICE_ORDER is PCI_BUS_ID. A GPU in MIG mode is not usable itself; its slices are listed instead. In a
container NVML lists only the container's devices, and of a GPU in MIG mode only its slices.
"""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from halimede.core.inventory import MAX_LIST_BYTES, Inventory, parse_device_list, profile_in_name, profile_of_sizes
from halimede.core.types import Device, DeviceKind, invalid

log = logging.getLogger(__name__)


def read_inventory(device_list: Path | None, min_capability: tuple[int, int] = (0, 0)) -> Inventory:
    """The devices of the list file if one is given, else those of the driver; none without a driver.

    Devices below `min_capability` are left out, and the others keep their indexes, which are CUDA's.
    """
    found = (
        _list_devices(device_list)
        if device_list is not None
        else _driver_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    )
    for device in found:
        if not _is_capable(device, min_capability):
            log.warning(
                "device %d (%s) is not used: its compute capability %d.%d is below the minimum %d.%d",
                *(device.index, device.uuid, *device.compute_capability, *min_capability),
            )
    return Inventory(tuple(device for device in found if _is_capable(device, min_capability)))


def _is_capable(device: Device, least: tuple[int, int]) -> bool:
    # A list file may leave out the compute capability.
    return device.compute_capability == (0, 0) or device.compute_capability >= least


def _list_devices(device_list: Path) -> tuple[Device, ...]:
    try:
        with device_list.open("rb") as file:
            text = file.read(MAX_LIST_BYTES + 1)
    except OSError as error:
        raise invalid(f"the device list '{device_list}' cannot be read: {error.strerror}") from error
    return parse_device_list(text).devices


def nvml_devices(nvml: Any, visible: str | None) -> tuple[Device, ...]:  # Any: pynvml has no types
    """The devices of an initialised NVML, reduced to those in `visible` (CUDA_VISIBLE_DEVICES) if it is set."""
    found: list[tuple[int, Device]] = []
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            found += [(number, device) for device in _of_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(number))]
        except nvml.NVMLError as error:
            # NVML counts GPUs that have failed, and those that this container may not use.
            log.warning("GPU %d of the driver is not used: %s", number, error)
    chosen = [device for _, device in found] if visible is None else _visible(found, visible)
    return tuple(replace(device, index=index) for index, device in enumerate(chosen))


def _of_gpu(nvml: Any, gpu: Any) -> list[Device]:
    """The GPU, or its slices."""
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(gpu))
    if not _mig_enabled(nvml, gpu):
        return [_device(nvml, DeviceKind.GPU, gpu, capability)]
    parts = [(part, _device(nvml, DeviceKind.MIG, part, capability)) for part in _slices(nvml, gpu)]
    return [replace(device, profile=_profile(nvml, gpu, part, device.name)) for part, device in parts]


def _driver_devices(visible: str | None) -> tuple[Device, ...]:
    # Imported here, because only a server asks a driver.
    import pynvml as nvml  # type: ignore[import-untyped]  # the package has no types

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()  # no driver: a server without GPUs
    try:
        return nvml_devices(nvml, visible)
    except nvml.NVMLError as error:
        log.warning("no GPU is used: the driver cannot list its devices: %s", error)
        return ()
    finally:
        nvml.nvmlShutdown()


def _mig_enabled(nvml: Any, gpu: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(gpu)
    except nvml.NVMLError:
        return False  # a GPU without MIG support
    return bool(current)


def _slices(nvml: Any, gpu: Any) -> list[Any]:
    handles: list[Any] = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            handles.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
        except nvml.NVMLError:
            continue  # no slice at this index
    return handles


def _profile(nvml: Any, gpu: Any, part: Any, name: str) -> str:
    """The profile of a slice: from its name, or from its sizes with drivers whose names do not have it."""
    if profile := profile_in_name(name):
        return profile
    try:
        sizes = nvml.nvmlDeviceGetAttributes(part)
        # A container that has slices alone may not be allowed to read this.
        gpu_bytes = int(nvml.nvmlDeviceGetMemoryInfo(gpu).total)
    except nvml.NVMLError:
        return ""
    return profile_of_sizes(sizes.gpuInstanceSliceCount, sizes.computeInstanceSliceCount, sizes.memorySizeMB, gpu_bytes)


def _device(nvml: Any, kind: DeviceKind, handle: Any, capability: tuple[int, ...]) -> Device:
    major, minor = capability
    try:
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        memory = 0  # a GPU that shares the memory of the machine
    return Device(kind, 0, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), memory, (major, minor))


def _visible(found: list[tuple[int, Device]], text: str) -> list[Device]:
    """CUDA's rule: GPU numbers and UUIDs or their prefixes, in order; the first one without a match ends the list."""
    chosen: list[Device] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.isdecimal():
            fitting = [device for number, device in found if number == int(entry)]
        else:
            fitting = [device for _, device in found if entry and device.uuid.startswith(entry)]
        if not fitting:
            break
        chosen += [device for device in fitting if device not in chosen]
    return chosen
