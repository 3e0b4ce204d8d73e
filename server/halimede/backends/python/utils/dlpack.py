"""DLPack import and export, including bfloat16, which numpy does not support.

numpy makes and consumes the capsules, so that their names, deleters and lifetimes are managed in C: a deleter in Python
would be called at times when Python code must not run. Types that numpy cannot express are patched in the capsule's
struct, or read from it: bfloat16 passes through numpy as uint16, booleans (which old releases refuse) as uint8.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.python.utils.errors import TritonModelException
from halimede.core.types import DataType

CPU = (1, 0)
_CUDA = 2
_CUDA_ON_HOST = frozenset({3, 13})
"""Memory pinned by CUDA, and memory managed by CUDA: the host reads it, and kernels may still write it."""


class _DLTensor(ctypes.Structure):
    """The start of what an unversioned capsule points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6

_DATATYPES = {
    (_BOOL, 8): DataType.BOOL,
    (_UINT, 8): DataType.UINT8,
    (_UINT, 16): DataType.UINT16,
    (_UINT, 32): DataType.UINT32,
    (_UINT, 64): DataType.UINT64,
    (_INT, 8): DataType.INT8,
    (_INT, 16): DataType.INT16,
    (_INT, 32): DataType.INT32,
    (_INT, 64): DataType.INT64,
    (_FLOAT, 16): DataType.FP16,
    (_FLOAT, 32): DataType.FP32,
    (_FLOAT, 64): DataType.FP64,
    (_BFLOAT, 16): DataType.BF16,
}

_CARRIERS: "dict[DataType, np.dtype[Any]]" = {DataType.BF16: np.dtype("<u2"), DataType.BOOL: np.dtype("u1")}
"""The types that numpy uses instead of those that it lacks."""

_CODES = {DataType.BF16: _BFLOAT, DataType.BOOL: _BOOL}

_NAME = b"dltensor"
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_Capsule = type(np.empty(1).__dlpack__())


class _Carrier:
    """Wraps a capsule in the interface that `numpy.from_dlpack` requires."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class _Owned(np.ndarray[Any, Any]):
    """An array that keeps its `owner` alive. A capsule, and its consumer, hold only the array."""

    owner: Any


def export(datatype: DataType, shape: tuple[int, ...], data: Any, owner: Any) -> Any:
    """A capsule over `data`; it keeps `data` and `owner` alive. Read-only memory is copied first."""
    array = _Owned(shape, _CARRIERS.get(datatype, datatype.dtype), data)
    # DLPack cannot express that memory is read-only.
    array = array if array.flags.writeable else array.copy()
    array.owner = owner
    capsule = array.__dlpack__()
    if datatype in _CODES:
        _described(capsule).code = _CODES[datatype]
    return capsule


def take(source: Any) -> tuple[DataType, NDArray[Any]]:
    """Datatype and elements of a capsule, or of an object that makes one; bfloat16 as uint16, booleans as uint8.

    Shares the source's memory and keeps it alive; data on a CUDA device is copied. TritonModelException.
    """
    capsule = _capsule_of(source)
    tensor = _described(capsule)
    datatype = _DATATYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if datatype is None:
        raise TritonModelException(
            f"DLPack dtype code {tensor.code} with {tensor.bits} bits and {tensor.lanes} lanes is not supported."
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and not _is_contiguous(shape, tensor.strides[: tensor.ndim]):
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    carrier = _CARRIERS.get(datatype, datatype.dtype)
    if tensor.device_type == _CUDA:
        copied: NDArray[Any] = np.empty(shape, carrier)
        if copied.nbytes:
            with _synchronized(tensor.device_id) as call:
                source = ctypes.c_uint64(tensor.data + tensor.byte_offset)
                call("cuMemcpyDtoH_v2", ctypes.c_void_p(copied.ctypes.data), source, ctypes.c_size_t(copied.nbytes))
        return datatype, copied
    if tensor.device_type in _CUDA_ON_HOST:
        with _synchronized(tensor.device_id):
            pass
    elif tensor.device_type != CPU[0]:
        raise TritonModelException(
            f"DLPack tensor is on a device of type {tensor.device_type}; only CPU and CUDA are supported."
        )
    if datatype in _CARRIERS:
        tensor.code = _UINT
    return datatype, np.from_dlpack(_Carrier(capsule, (tensor.device_type, tensor.device_id)))


def _capsule_of(source: Any) -> Any:
    if isinstance(source, _Capsule):
        return source
    if not (hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__")):
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and"
            " `__dlpack_device__` attributes"
        )
    # 1 is CUDA's legacy default stream, which orders the copy to the host.
    return source.__dlpack__(stream=1) if source.__dlpack_device__()[0] == _CUDA else source.__dlpack__()


def _described(capsule: Any) -> _DLTensor:
    if not _is_valid(capsule, _NAME):
        raise TritonModelException("DLPack capsule was used before, or is not of the unversioned kind `dltensor`.")
    return _DLTensor.from_address(_get_pointer(capsule, _NAME))


def _is_contiguous(shape: tuple[int, ...], strides: list[int]) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


@contextmanager
def _synchronized(device_id: int) -> Iterator[Callable[..., None]]:
    """Within, the device has ended its work; yields what calls functions of CUDA's driver. TritonModelException.

    By the driver's own library, because the process may have no other CUDA library. A raw capsule does not state which
    stream fills the memory.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TritonModelException(f"DLPack tensor is on a CUDA device, and the driver is not there: {error}") from None

    def call(function: str, *arguments: Any) -> None:
        status = getattr(cuda, function)(*arguments)
        if status:
            # Its text says whether the context is lost: a copy gets the errors of the kernels before it.
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(status, ctypes.byref(text))
            cause = (text.value or b"unknown error").decode(errors="replace")
            raise TritonModelException(
                f"DLPack tensor cannot be copied from its CUDA device: {function} gave {status} ({cause})"
            )

    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), device_id)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxPushCurrent_v2", context)
        try:
            call("cuCtxSynchronize")
            yield call
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)
