"""Memory of a real GPU in a python model's output. Skipped where there is no driver."""

import ctypes

import numpy as np
import pytest

from halimede.backends.python.utils import dlpack
from halimede.backends.python.utils.tensor import Tensor


@pytest.fixture
def cuda():
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("no CUDA driver here")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        pytest.skip("no CUDA device here")
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    yield driver
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    driver.cuDevicePrimaryCtxRelease_v2(device)


class OnDevice:
    """A capsule of numpy's whose description says that its memory is the GPU's."""

    def __init__(self, like: np.ndarray, address: int) -> None:
        self.like, self.address = like, address

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, stream: int) -> object:
        capsule = self.like.__dlpack__()
        described = dlpack._described(capsule)
        described.device_type, described.device_id, described.data = 2, 0, self.address
        return capsule


def test_what_a_gpu_holds_is_copied_to_the_host(cuda):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    address = ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(array.nbytes)) == 0
    try:
        host = ctypes.c_void_p(array.ctypes.data)
        assert cuda.cuMemcpyHtoD_v2(address, host, ctypes.c_size_t(array.nbytes)) == 0
        tensor = Tensor.from_dlpack("OUT", OnDevice(np.zeros_like(array), address.value))
    finally:
        cuda.cuMemFree_v2(address)
    assert tensor.as_numpy().tolist() == array.tolist()
