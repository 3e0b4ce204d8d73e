"""`Tensor`: a numpy array and a tensor in wire layout over the same memory."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.python.utils import dlpack
from halimede.backends.python.utils.arguments import text_of
from halimede.backends.python.utils.datatypes import datatype_of, joined, native_datatype
from halimede.backends.python.utils.errors import TritonModelException
from halimede.core.types import DataType
from halimede.core.types import Tensor as CoreTensor

_ndarray = np.ndarray
# Looking up a member of an Enum is as slow as calling a small method.
_BYTES = DataType.BYTES
_BF16 = DataType.BF16


class Tensor:
    """A named array. Its memory is the array's own if that is contiguous and little-endian, else a copy."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__", "_array", "_core")

    def __init__(self, name: str, numpy_array: NDArray[Any], /) -> None:
        if type(name) is not str:
            name = text_of(name, "Tensor", "name")
        if type(numpy_array) is not _ndarray:
            if not isinstance(numpy_array, _ndarray):
                raise TypeError(f"Tensor(): 'numpy_array' must be numpy.ndarray, not {type(numpy_array).__name__}")
            if isinstance(numpy_array, np.ma.MaskedArray):
                raise TypeError(f"Tensor(): '{name}' has a mask, which no tensor can carry; fill it first")
            numpy_array = np.asarray(numpy_array)
        # Values are checked after the types of all arguments, as in Triton.
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        datatype = native_datatype(numpy_array.dtype)
        if datatype is None or datatype is _BYTES or not numpy_array.flags.c_contiguous:
            self._core, numpy_array = _converted(name, numpy_array)
            self._array: NDArray[Any] | None = numpy_array
            return
        # A view of an empty array cannot be cast.
        data = numpy_array.data.cast("B") if numpy_array.size else b""
        self._core = CoreTensor(name, datatype, numpy_array.shape, data)
        self._array = numpy_array

    def name(self) -> str:
        return self._core.name

    def as_numpy(self) -> NDArray[Any]:
        """The elements: for BYTES an object array of `bytes`, else a view, which is writable if the memory is."""
        array = self._array
        if array is None:
            core = self._core
            datatype = core.datatype
            if datatype is _BYTES or datatype is _BF16:
                array = self._array = _unlike_numpy(core)
            else:
                array = self._array = _ndarray(core.shape, datatype.dtype, core.data)
        return array

    def triton_dtype(self) -> int:
        """The protocol's number of the datatype."""
        return self._core.datatype.number

    def shape(self) -> list[int]:
        return list(self._core.shape)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule over the same memory, or over a copy if the memory is read-only."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any, /) -> "Tensor":
        """A tensor over the memory of a DLPack capsule, or of an object that makes one; CUDA memory is copied."""
        name = text_of(name, "from_dlpack", "name")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        datatype, array = dlpack.take(tensor)
        data = array.data.cast("B") if array.size else b""
        return tensor_of(CoreTensor(name, datatype, array.shape, data))

    def __dlpack__(self, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        # Streams do not apply to host memory, and every consumer accepts an unversioned capsule.
        del stream, max_version
        core = self._core
        if core.datatype is DataType.BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        if dl_device is not None and tuple(dl_device) != dlpack.CPU:
            raise BufferError(f"tensor '{core.name}' is in the host's memory, not on the device {tuple(dl_device)}")
        return dlpack.export(core.datatype, core.shape, bytearray(core.data) if copy else core.data, self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU


_new = Tensor.__new__


def tensor_of(core: CoreTensor) -> Tensor:
    """A received tensor; its array is made on access."""
    tensor: Tensor = _new(Tensor)
    tensor._core = core
    tensor._array = None
    return tensor


def _unlike_numpy(core: CoreTensor) -> NDArray[Any]:
    """The elements of a datatype that numpy does not have."""
    if core.datatype is _BYTES:
        return core.array()
    raise TritonModelException(
        "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
    )


def _converted(name: str, array: NDArray[Any]) -> tuple[CoreTensor, NDArray[Any]]:
    datatype = datatype_of(array.dtype)
    if datatype is None:
        raise TritonModelException(f"NumPy dtype is not supported. Tensor '{name}' has {array.dtype}.")
    if datatype is DataType.BYTES:
        try:
            return CoreTensor(name, datatype, array.shape, joined(array)), array
        except UnicodeEncodeError as error:
            raise TritonModelException(f"Tensor '{name}' has text that UTF-8 cannot hold: {error.reason}") from None
    # Not ascontiguousarray, which adds a dimension to a scalar.
    array = np.array(array, dtype=datatype.dtype, order="C")
    return CoreTensor(name, datatype, array.shape, array.data.cast("B") if array.size else b""), array
