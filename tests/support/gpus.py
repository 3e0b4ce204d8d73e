"""The device of the tests in tests/gpu: a GPU, or a CPU in the dry run of `make gpu`, which shows that the tests run."""

import os
from importlib.util import find_spec

import pytest

from halimede.backends.pytorch.runtime import has_gpu_build
from halimede.core.types import Device, DeviceKind
from halimede.runtime.devices import read_inventory

ON_CPU = os.environ.get("HALIMEDE_GPU_TESTS") == "cpu"
DEVICES = () if ON_CPU else read_inventory(None).devices
GPUS = [device for device in DEVICES if device.kind is DeviceKind.GPU]
GPU: Device | None = GPUS[0] if GPUS else None
"""The first; None in a dry run."""
KIND = "CPU" if ON_CPU else "GPU"
TORCH_DEVICE = "cpu" if ON_CPU else "cuda"

NO_GPU = "no GPU here"
needs_gpu = pytest.mark.skipif(not GPUS, reason=NO_GPU)
needs_gpu_or_slice = pytest.mark.skipif(not DEVICES, reason=NO_GPU)
needs_device = pytest.mark.skipif(not (GPUS or ON_CPU), reason=NO_GPU)
"""For tests that mean something on a CPU too."""
needs_torch = pytest.mark.skipif(
    not (find_spec("torch") if ON_CPU else has_gpu_build()), reason="no PyTorch for this device is installed here"
)


def instance_group(count: int = 1) -> str:
    """In config.pbtxt: instances on the device."""
    gpus = "" if GPU is None else f"gpus: [ {GPU.index} ]"
    return f"instance_group [ {{ kind: KIND_{KIND} count: {count} {gpus} }} ]"
