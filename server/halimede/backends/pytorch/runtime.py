"""The torch module, its settings for a worker process, and its datatypes."""

import importlib.util
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from halimede.backends.extras import install_extra
from halimede.backends.pytorch.options import TorchOptions
from halimede.core.types import DataType, unsupported

DTYPES = {
    DataType.BOOL: "bool",
    DataType.UINT8: "uint8",
    DataType.UINT16: "uint16",
    DataType.UINT32: "uint32",
    DataType.UINT64: "uint64",
    DataType.INT8: "int8",
    DataType.INT16: "int16",
    DataType.INT32: "int32",
    DataType.INT64: "int64",
    DataType.FP16: "float16",
    DataType.FP32: "float32",
    DataType.FP64: "float64",
    DataType.BF16: "bfloat16",
}
"""PyTorch's name by datatype. BYTES are lists of strings; other types of PyTorch have no wire datatype."""

STORAGES = {
    "BoolStorage": DataType.BOOL,
    "ByteStorage": DataType.UINT8,
    "CharStorage": DataType.INT8,
    "ShortStorage": DataType.INT16,
    "IntStorage": DataType.INT32,
    "LongStorage": DataType.INT64,
    "HalfStorage": DataType.FP16,
    "FloatStorage": DataType.FP32,
    "DoubleStorage": DataType.FP64,
    "BFloat16Storage": DataType.BF16,
}
"""Datatype by the class of a tensor's memory in an archive."""


@cache
def runtime() -> Any:  # Any: torch's own types would make mypy read all of torch
    """The torch module; UNSUPPORTED if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise unsupported(f"torch cannot be imported ({error}); {install_extra('torch')}") from error
    with warnings.catch_warnings():
        # The warning comes once per process, and then never again: inputs are read-only arrays, and a model that may
        # write to them gets copies of those that are used again.
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(b"\0", np.uint8))
    return torch


def export_runtime() -> None:
    """Import what programs of torch.export need beside the torch module, which takes as long again."""
    runtime()
    importlib.import_module("torch.export._unlift")


def has_gpu_build() -> bool:
    """Whether the installed torch can use a GPU. Found without importing it, which takes seconds."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    libraries = Path(spec.origin).parent / "lib"
    return any((libraries / name).exists() for name in ("libtorch_cuda.so", "libtorch_hip.so"))


@cache
def datatype_of(dtype: Any) -> DataType | None:  # Any: a torch.dtype
    """The wire datatype; None for one that no request or answer can carry."""
    return next((datatype for datatype, name in DTYPES.items() if dtype is getattr(runtime(), name)), None)


def configure(options: TorchOptions, intra: int, inter: int) -> None:
    """Settings of this process."""
    torch = runtime()
    if torch.get_num_threads() != intra:
        torch.set_num_threads(intra)
    if torch.get_num_interop_threads() != inter:
        # It can be set once, before the first parallel work.
        torch.set_num_interop_threads(inter)
    torch.backends.cudnn.enabled = options.cudnn
    if options.jit_executor is not None:
        torch._C._jit_set_profiling_executor(options.jit_executor)
    if options.jit_profiling is not None:
        torch._C._jit_set_profiling_mode(options.jit_profiling)
    if options.tensor_fuser is not None:
        torch._C._jit_set_texpr_fuser_enabled(options.tensor_fuser)
    if not options.optimized_execution:
        torch._C._set_graph_executor_optimize(False)


def omp_limit() -> int | None:
    """The number of threads in OMP_NUM_THREADS, which the server sets for its processes unless its user has."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isascii() and text.isdecimal() and int(text[:6]) > 0 else None
