"""Datatypes under numpy's, Triton's and the configuration's names, and BYTES tensors in wire layout."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.core.types import DataType
from halimede.core.types.tensor import join_bytes, split_bytes

_NUMPY_TYPES: dict[DataType, type] = {
    DataType.BOOL: np.bool_,
    DataType.UINT8: np.uint8,
    DataType.UINT16: np.uint16,
    DataType.UINT32: np.uint32,
    DataType.UINT64: np.uint64,
    DataType.INT8: np.int8,
    DataType.INT16: np.int16,
    DataType.INT32: np.int32,
    DataType.INT64: np.int64,
    DataType.FP16: np.float16,
    DataType.FP32: np.float32,
    DataType.FP64: np.float64,
    DataType.BYTES: np.object_,
}

TRITON_STRING_TO_NUMPY: dict[str, type] = {
    datatype.config_name: bool if datatype is DataType.BOOL else numpy_type
    for datatype, numpy_type in _NUMPY_TYPES.items()
}

_BY_NUMBER = {datatype.number: numpy_type for datatype, numpy_type in _NUMPY_TYPES.items()}

_BY_DTYPE: dict[Any, DataType] = {np.dtype(numpy_type): datatype for datatype, numpy_type in _NUMPY_TYPES.items()}
# `long` and `long long` are equal dtypes with different hashes.
_BY_DTYPE[np.dtype(np.longlong)] = DataType.INT64
_BY_DTYPE[np.dtype(np.ulonglong)] = DataType.UINT64

native_datatype = _BY_DTYPE.get
"""The datatype whose elements have this dtype in native byte order, or None."""


def datatype_of(dtype: "np.dtype[Any]") -> DataType | None:
    """The datatype that can carry arrays of this dtype, if any."""
    if dtype.kind in "SU":
        return DataType.BYTES
    return native_datatype(dtype.newbyteorder("="))


def triton_to_numpy_type(data_type: int) -> type | None:
    """By the protocol's number; None if numpy has no such type."""
    return _BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The protocol's number for a numpy type or dtype; None for a type without one."""
    is_type = isinstance(data_type, type) and issubclass(data_type, np.generic)
    if not is_type and not isinstance(data_type, np.dtype):
        return None
    dtype = np.dtype(data_type)
    datatype = datatype_of(dtype) if dtype.isnative and dtype.kind != "U" else None
    return None if datatype is None else datatype.number


def triton_string_to_numpy(triton_type_string: str) -> type:
    """By the configuration's name, `TYPE_FP32`. KeyError if numpy has no such type."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def joined(array: NDArray[Any]) -> bytes:
    """The elements in wire layout: bytes unchanged, everything else as the UTF-8 of its text."""
    elements = array.reshape(-1).tolist()
    return join_bytes(element if isinstance(element, (bytes, str)) else _encoded(element) for element in elements)


def _encoded(element: Any) -> bytes | str:
    return bytes(element) if isinstance(element, (bytearray, memoryview)) else str(element)


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> Any:
    """BYTES elements in wire layout; an empty tuple if there are none, None for an array of another type."""
    if input_tensor.size == 0:
        return ()
    return joined(input_tensor) if input_tensor.dtype.kind in "OS" else None


def deserialize_bytes_tensor(encoded_tensor: Any) -> NDArray[np.object_]:
    """The elements of a wire layout as a one-dimensional object array of `bytes`. ValueError if it is broken."""
    elements = split_bytes(memoryview(encoded_tensor).cast("B"))
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array
