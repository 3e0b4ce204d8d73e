from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from halimede.core.inventory import Inventory
from halimede.core.types import Device, DeviceKind, ErrorCode, InferenceError
from halimede.runtime.devices import nvml_devices, read_inventory
from support.refusals import error_of

GPU, MIG = DeviceKind.GPU, DeviceKind.MIG


class NvmlError(Exception):
    pass


@dataclass
class Handle:
    uuid: str
    name: str
    memory: int | None
    mig: bool | None = None
    slices: list["Handle | None"] = field(default_factory=list)


class Nvml:
    """The part of pynvml that is used, over a list of GPUs, None for one that has failed. `mig` None is a GPU that knows
    no MIG, `memory` None one without memory of its own."""

    NVMLError = NvmlError

    def __init__(self, *gpus: Handle | None) -> None:
        self._gpus = gpus

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if self._gpus[index] is None:
            raise NvmlError("GPU is lost")
        return self._gpus[index]

    def nvmlDeviceGetCudaComputeCapability(self, handle):  # noqa: N802
        return [9, 0]

    def nvmlDeviceGetMigMode(self, handle):  # noqa: N802
        if handle.mig is None:
            raise NvmlError("Not Supported")
        return [int(handle.mig), int(handle.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):  # noqa: N802
        return len(handle.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):  # noqa: N802
        if handle.slices[index] is None:
            raise NvmlError("Not Found")
        return handle.slices[index]

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        if handle.mig or handle.memory is None:
            raise NvmlError("Insufficient Permissions")
        return SimpleNamespace(total=handle.memory)

    def nvmlDeviceGetAttributes(self, handle):  # noqa: N802
        return SimpleNamespace(gpuInstanceSliceCount=1, computeInstanceSliceCount=1, memorySizeMB=4864)

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return handle.uuid

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return handle.name


BIG = Handle("GPU-aa", "H200", 140)
SLICED = Handle("GPU-bb", "A100", 40, True, [None, Handle("MIG-1", "1g", 5), None, Handle("MIG-2", "2g", 10)])
SMALL = Handle("GPU-cc", "T4", 16, False)


def device(kind: DeviceKind, index: int, handle: Handle) -> Device:
    return Device(kind, index, handle.uuid, handle.name, handle.memory, (9, 0))


def test_a_gpu_that_has_failed_does_not_hide_the_others(caplog: pytest.LogCaptureFixture):
    found = nvml_devices(Nvml(BIG, None, SMALL), None)
    assert found == (device(GPU, 0, BIG), device(GPU, 1, SMALL))
    assert "GPU 1 of the driver is not used: GPU is lost" in caplog.text
    # The numbers of CUDA_VISIBLE_DEVICES are the driver's.
    assert nvml_devices(Nvml(BIG, None, SMALL), "2") == (device(GPU, 0, SMALL),)


def test_a_gpu_without_memory_of_its_own_is_used():
    assert [each.memory_bytes for each in nvml_devices(Nvml(Handle("GPU-dd", "GB10", None)), None)] == [0]


def test_whole_gpus_and_the_slices_of_sliced_ones_are_listed():
    assert nvml_devices(Nvml(BIG, SLICED, SMALL), None) == (
        device(GPU, 0, BIG),
        device(MIG, 1, SLICED.slices[1]),
        device(MIG, 2, SLICED.slices[3]),
        device(GPU, 3, SMALL),
    )


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("2,0", ["GPU-cc", "GPU-aa"]),
        ("GPU-c", ["GPU-cc"]),
        ("MIG-2", ["MIG-2"]),
        (" 0 , 0", ["GPU-aa"]),
        ("0,7,2", ["GPU-aa"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_only_devices_visible_to_cuda_are_listed_by_its_numbers(visible, uuids):
    devices = nvml_devices(Nvml(BIG, SLICED, SMALL), visible)
    assert [(each.index, each.uuid) for each in devices] == list(enumerate(uuids))


def test_list_file_replaces_the_driver(tmp_path):
    file = tmp_path / "devices.json"
    file.write_text('[{"kind": "MIG", "index": 3, "uuid": "MIG-7", "compute_capability": "8.0"}]')
    assert read_inventory(file) == Inventory((Device(MIG, 3, "MIG-7", "", 0, (8, 0)),))


def test_missing_list_file_is_named(tmp_path):
    file = tmp_path / "none.json"
    assert error_of(read_inventory, file) == InferenceError(
        ErrorCode.INVALID_ARG, f"the device list '{file}' cannot be read: No such file or directory"
    )


def test_asking_the_driver_works_with_and_without_one():
    devices = read_inventory(None).devices
    assert [each.index for each in devices] == list(range(len(devices)))


LISTED = """[
    {"kind": "GPU", "index": 0, "uuid": "GPU-old", "compute_capability": "5.2"},
    {"kind": "GPU", "index": 1, "uuid": "GPU-least", "compute_capability": "6.0"},
    {"kind": "GPU", "index": 2, "uuid": "GPU-unknown"},
    {"kind": "MIG", "index": 3, "uuid": "MIG-new", "compute_capability": "10.0"}
]"""


def test_devices_below_the_minimum_capability_are_skipped_and_named(tmp_path, caplog):
    """Those that stay keep their indexes: a configuration's `gpus` names the same devices as before."""
    path = tmp_path / "devices.json"
    path.write_text(LISTED)
    inventory = read_inventory(path, (6, 0))
    assert [(device.index, device.uuid) for device in inventory.devices] == [
        (1, "GPU-least"),
        (2, "GPU-unknown"),
        (3, "MIG-new"),
    ]
    assert caplog.messages == ["device 0 (GPU-old) is not used: its compute capability 5.2 is below the minimum 6.0"]
