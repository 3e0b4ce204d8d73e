"""Errors of CUDA: which of them a process survives."""

import ctypes
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from halimede.backends.python.utils.errors import is_device_lost
from support.played_driver import cuda_library
from support.probe import provided

ILLEGAL = "CUDA error: an illegal memory access was encountered"
OF_CUBLAS = "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"
OF_PYTORCH = """CUDA error: {}
Search for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/cuda-runtime-api/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
RELAUNCHED = "terminated and relaunched"


def cuda_folder() -> Path:
    """The installed CUDA."""
    spec = find_spec("nvidia.cu13") if find_spec("nvidia") else None
    if spec is None:
        pytest.skip("CUDA's libraries are not installed here")
    (folder,) = map(Path, spec.submodule_search_locations or ())
    return folder


def errors_in(header: str, prefix: str) -> list[tuple[str, int, bool]]:
    """The name and number of each error, and whether its manual says that the process has to end."""
    text = (cuda_folder() / "include" / header).read_text()
    found = re.findall(rf"/\*\*((?:(?!\*/).)*)\*/\s*({prefix}\w+)\s*=\s*(\d+)", text, re.DOTALL)
    return [(name, int(number), RELAUNCHED in re.sub(r"[\s*]+", " ", manual)) for manual, name, number in found]


def texts_of_runtime() -> dict[str, bool]:
    """By text."""
    (library,) = cuda_folder().glob("lib/libcudart.so.*")
    text_of = ctypes.CDLL(str(library)).cudaGetErrorString
    text_of.restype = ctypes.c_char_p
    return {text_of(number).decode(): is_fatal for _, number, is_fatal in errors_in("driver_types.h", "cudaError")}


def test_the_errors_that_end_a_process_are_those_of_cudas_manual() -> None:
    by_manual = {text for text, is_fatal in texts_of_runtime().items() if is_fatal}
    assert "an illegal memory access was encountered" in by_manual
    # The manual is silent on the first two, after which memory cannot be trusted, and no longer returns the third.
    by_manual |= {"uncorrectable ECC error encountered", "uncorrectable NVLink error detected during the execution"}
    by_manual.add("unspecified launch failure in prior launch")
    assert {text for text in texts_of_runtime() if is_device_lost(RuntimeError(f"CUDA error: {text}"))} == by_manual


def test_names_of_the_drivers_errors_are_those_of_its_manual() -> None:
    names = errors_in("cuda.h", "CUDA_ERROR_")
    by_manual = {name for name, _, is_fatal in names if is_fatal}
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in by_manual
    # As above, and a failed assertion, of which the manual says only that no allocation is valid.
    by_manual |= {"CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_NVLINK_UNCORRECTABLE", "CUDA_ERROR_ASSERT"}
    assert {name for name, *_ in names if is_device_lost(RuntimeError(f"cuLaunch results in {name}"))} == by_manual


@pytest.mark.parametrize(("what", "lost"), [("out of memory", False), ("device-side assert triggered", True)])
def test_the_hints_after_each_error_of_pytorch_are_no_fault(what: str, lost: bool) -> None:
    assert is_device_lost(RuntimeError(OF_PYTORCH.format(what))) is lost


class PlayedTorch:
    """PyTorch's view of a device whose context has an error, or none. It counts the waits."""

    def __init__(self, error: str = "", *, is_used: bool = True) -> None:
        self._error, self._is_used = error, is_used
        self.waits = 0

    @property
    def cuda(self) -> SimpleNamespace:
        return SimpleNamespace(is_initialized=lambda: self._is_used, synchronize=self._synchronize)

    def _synchronize(self) -> None:
        self.waits += 1
        if self._error:
            raise RuntimeError(self._error)


@pytest.mark.parametrize(
    ("error", "torch", "lost"),
    [
        (OF_CUBLAS, PlayedTorch(ILLEGAL), True),
        (OF_CUBLAS, PlayedTorch(), False),
        (OF_CUBLAS, PlayedTorch(ILLEGAL, is_used=False), False),
        (OF_CUBLAS, PlayedTorch("CUDA error: out of memory"), False),
        (OF_CUBLAS, object(), False),
        (OF_CUBLAS, None, False),
        (ILLEGAL, None, True),
    ],
)
def test_the_error_of_a_library_may_hide_that_the_context_is_lost(
    monkeypatch: pytest.MonkeyPatch, error: str, torch: object, lost: bool
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert is_device_lost(RuntimeError(error)) is lost


def test_an_error_of_a_models_own_code_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = PlayedTorch(ILLEGAL)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert not is_device_lost(ValueError("no such label"))
    assert torch.waits == 0


ON_DEVICE, MANAGED = "2", "13"
COPY = """
import sys
import numpy as np
from halimede.backends.python.utils import dlpack
from halimede.backends.python.utils.errors import TritonModelException, is_device_lost
from halimede.backends.python.utils.tensor import Tensor

class OnDevice:
    def __dlpack_device__(self):
        return (KIND, 0)

    def __dlpack__(self, stream=None):
        capsule = ARRAY.__dlpack__()
        dlpack._described(capsule).device_type = KIND
        return capsule

ARRAY, KIND = np.arange(3.0), int(sys.argv[1])
try:
    print(Tensor.from_dlpack("X", OnDevice()).as_numpy().tolist())
except TritonModelException as error:
    print(is_device_lost(error), error)
"""


@pytest.mark.parametrize(
    ("kind", "error", "printed"),
    [
        (ON_DEVICE, "0", "[0.0, 1.0, 2.0]"),
        (
            ON_DEVICE,
            "700",
            "True DLPack tensor cannot be copied from its CUDA device: cuCtxSynchronize gave 700 "
            "(an illegal memory access was encountered)",
        ),
        (
            MANAGED,
            "2",
            "False DLPack tensor cannot be copied from its CUDA device: cuCtxSynchronize gave 2 (another error)",
        ),
    ],
)
def test_what_a_device_writes_is_read_when_its_kernels_have_ended(
    request: pytest.FixtureRequest, kind: str, error: str, printed: str
) -> None:
    library = provided(request.config, cuda_library)
    environment = os.environ | {"LD_LIBRARY_PATH": str(library.parent), "PLAYED_CUDA_ERROR": error}
    assert subprocess.check_output([sys.executable, "-c", COPY, kind], env=environment, text=True).strip() == printed
