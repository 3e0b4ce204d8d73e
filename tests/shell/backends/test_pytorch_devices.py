"""PyTorch and CUDA, as far as no GPU is needed: errors of a device, and what happens before processes are forked."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from halimede.backends.api import LostInstanceError
from halimede.backends.pytorch.instance import TorchInstance
from halimede.backends.pytorch.loading import Bound
from halimede.backends.pytorch.options import TorchOptions
from halimede.backends.pytorch.runtime import has_gpu_build
from halimede.backends.pytorch.script import cause_of
from support.played_driver import cuda_library
from support.probe import provided
from support.torch_models import CONTEXT, FP32, config, refused

NETWORK = config({"x": (FP32, 8)}, {"y": (FP32, 3)})
X = np.zeros((2, 8), np.float32)


class Broken:
    """A program whose device has failed."""

    is_writing = is_stateful = False

    def call(self, values):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_lost_device_asks_for_a_new_process():
    instance = TorchInstance("m_0", NETWORK, Bound(Broken(), {"y": 0}, torch.device("cpu")), TorchOptions())
    error = refused(lambda: instance.run({"x": X}, ["y"], CONTEXT))
    instance.close()
    assert isinstance(error, LostInstanceError)


HINTS = """
Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
IN_SCRIPT = """The following operation failed in the TorchScript interpreter.
Traceback of TorchScript, serialized code (most recent call last):
  File "code/__torch__/model.py", line 7, in forward
RuntimeError: """


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("CUDA error: device-side assert triggered", "RuntimeError: CUDA error: device-side assert triggered"),
        (f"{IN_SCRIPT}CUDA error: invalid argument", "RuntimeError: CUDA error: invalid argument"),
    ],
)
def test_the_cause_is_an_error_of_cuda_and_not_pytorchs_hints(text, cause):
    assert cause_of(RuntimeError(text + HINTS)) == cause


class Full:
    """A program whose device has no memory left."""

    is_writing = is_stateful = False

    def __init__(self, error: Exception) -> None:
        self.error = error

    def call(self, values):
        raise self.error


@pytest.mark.parametrize(
    ("error", "is_emptied"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError("The following operation failed in the TorchScript interpreter.\nCUDA out of memory. Tried"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("out of range"), False),
    ],
)
def test_memory_that_pytorch_keeps_is_freed_when_a_device_has_no_more(monkeypatch, error, is_emptied):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    instance = TorchInstance("m_0", NETWORK, Bound(Full(error), {"y": 0}, torch.device("cpu")), TorchOptions())
    message = refused(lambda: instance.run({"x": X}, ["y"], CONTEXT)).message
    instance.close()
    assert str(error).splitlines()[-1] in message
    assert emptied == [True] * is_emptied


START = "the CUDA runtime starts"
IMPORTS = """
import sys, warnings
from halimede.backends.pytorch.runtime import export_runtime, runtime
export_runtime()
print("all is imported", file=sys.stderr, flush=True)
warnings.simplefilter("ignore")
runtime().cuda.is_available()
"""


# A fork of a process that has opened CUDA cannot use it.
@pytest.mark.large
@pytest.mark.skipif(not has_gpu_build(), reason="the PyTorch here has no CUDA")
def test_the_import_of_pytorch_does_not_open_cuda(request: pytest.FixtureRequest) -> None:
    library = provided(request.config, cuda_library)
    environment = os.environ | {"LD_LIBRARY_PATH": str(library.parent)}
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["all is imported", START]
