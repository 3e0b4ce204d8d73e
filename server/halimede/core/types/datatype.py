"""The tensor datatypes, with their names on the wire (`FP32`, `BYTES`) and in configurations (`TYPE_FP32`)."""

from enum import Enum

import numpy as np


class DataType(Enum):
    """A tensor's element type. `number` is the protocol's; `itemsize` is in bytes, 0 for variable sizes (BYTES)."""

    INVALID = (0, 0, "O")
    BOOL = (1, 1, "?")
    UINT8 = (2, 1, "u1")
    UINT16 = (3, 2, "<u2")
    UINT32 = (4, 4, "<u4")
    UINT64 = (5, 8, "<u8")
    INT8 = (6, 1, "i1")
    INT16 = (7, 2, "<i2")
    INT32 = (8, 4, "<i4")
    INT64 = (9, 8, "<i8")
    FP16 = (10, 2, "<f2")
    FP32 = (11, 4, "<f4")
    FP64 = (12, 8, "<f8")
    BYTES = (13, 0, "O")
    # numpy has no bfloat16: its arrays carry the bits as uint16, and the datatype travels beside the array.
    BF16 = (14, 2, "<u2")

    number: int
    itemsize: int
    dtype: "np.dtype[np.generic]"
    config_name: str

    def __init__(self, number: int, itemsize: int, dtype: str) -> None:
        self.number = number
        self.itemsize = itemsize
        self.dtype = np.dtype(dtype)
        self.config_name = "TYPE_STRING" if number == 13 else f"TYPE_{self._name_}"

    def __repr__(self) -> str:
        return self.name

    # Enum's own __hash__ hashes the name, in Python code, and datatypes are dict keys in the path of every request.
    __hash__ = object.__hash__


FROM_WIRE: dict[str, DataType] = {t.name: t for t in DataType if t is not DataType.INVALID}
"""Datatype by its wire name; all other names are invalid."""
