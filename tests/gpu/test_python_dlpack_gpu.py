"""Memory of a real GPU in python models: in outputs, and in requests from one model to another."""

import ctypes
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halimede.backends.python.utils import dlpack
from halimede.backends.python.utils.tensor import Tensor
from support.gpus import ON_CPU, TORCH_DEVICE, instance_group, needs_device, needs_gpu, needs_torch
from support.served import add_python, infer
from support.server import start_server

pytestmark = needs_device


@pytest.fixture
def cuda() -> Iterator[Any]:
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    assert driver.cuInit(0) == 0
    assert driver.cuDeviceGet(ctypes.byref(device), 0) == 0
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


@needs_gpu
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


# The kernels before the copy take milliseconds: what is read too early is not yet the result.
TWICE = {
    "numpy": """
def twice(tensor):
    return tensor.as_numpy() * np.float32(2)

def is_there(y):
    return True

def as_capsule(y):
    return y.__dlpack__()
""",
    "torch": f"""
import torch
import torch.utils.dlpack

def twice(tensor):
    if {ON_CPU}:
        return slow(tensor)
    with torch.cuda.stream(torch.cuda.Stream()):
        return slow(tensor)

def slow(tensor):
    x = torch.from_dlpack(tensor).to("{TORCH_DEVICE}")
    large = torch.zeros(2048, 2048, device=x.device)
    for _ in range({1 if ON_CPU else 100}):
        large = large @ large
    return x * 2 + large[0, 0]

def is_there(y):
    return y.device.type == "{TORCH_DEVICE}"

def as_capsule(y):
    return torch.utils.dlpack.to_dlpack(y)
""",
    "cupy": """
import cupy

def twice(tensor):
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.asarray(tensor.as_numpy())
        large = cupy.zeros((2048, 2048), cupy.float32)
        for _ in range(100):
            large = large @ large
        return x * 2 + large[0, 0]

def is_there(y):
    return isinstance(y, cupy.ndarray)

def as_capsule(y):
    return y.toDlpack() if hasattr(y, "toDlpack") else y.__dlpack__()
""",
}
"""By library: `twice` computes on its device and returns a tensor there, on a GPU from a stream that is not the default."""

CALLS = """
answers = []
for request in requests:
    y = twice(pb_utils.get_input_tensor_by_name(request, "IN"))
    assert is_there(y)
    for made in (y, as_capsule(y)):
        given = pb_utils.Tensor.from_dlpack("IN", made)
        call = pb_utils.InferenceRequest(model_name="inner", inputs=[given], requested_output_names=["OUT"])
        response = call.exec()
        assert not response.has_error(), response.error().message()
    again = twice(response.output_tensors()[0])
    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", again)]))
return answers
"""
PLUS_ONE = """
answers = []
for request in requests:
    x = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x + 1)]))
return answers
"""


@pytest.mark.parametrize(
    "library", ["numpy", pytest.param("torch", marks=needs_torch), pytest.param("cupy", marks=needs_gpu)]
)
def test_gpu_tensors_pass_through_calls_of_other_models(tmp_path: Path, library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed here")
    repository = tmp_path / "models"
    add_python(repository, "inner", PLUS_ONE)
    add_python(repository, "outer", CALLS, head=TWICE[library])
    config = repository / "outer" / "config.pbtxt"
    config.write_text(config.read_text().replace("instance_group [ { kind: KIND_CPU count: 1 } ]", instance_group()))
    server = start_server(tmp_path, ["--model-repository", repository])
    try:
        assert instance_group() in config.read_text()
        for number in range(5):
            assert infer(server, "outer", number, 0.5) == (200, [4 * number + 2, 4.0])
    finally:
        server.kill()
