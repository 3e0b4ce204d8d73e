"""A tensor as it is transferred: name, datatype, shape and its bytes in wire layout.

Wire layout is little-endian and row-major; a BYTES tensor is the concatenation, in row-major order, of a 4-byte
little-endian length and the bytes of each element. HTTP binary data, gRPC raw contents, shared memory and the worker
channel all use this layout, so a tensor is never converted on the way; models get numpy views of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.core.types.datatype import DataType

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes. A memoryview here is always one-dimensional with format "B", so that len() is a byte count."""


def shape_text(shape: Sequence[int]) -> str:
    """The shape as messages show it."""
    return f"[{','.join(map(str, shape))}]"


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """`byte_size` bytes from `offset` on of the shared memory that a client registered under the name `region`."""

    region: str
    byte_size: int = 0
    offset: int = 0


@dataclass(slots=True)
class Tensor:
    """`data` is in host memory and in wire layout, with the length that datatype and shape give (BYTES: that
    its elements give).
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    data: Buffer

    def array(self) -> NDArray[Any]:
        """The elements as a numpy array of `shape`: a view of `data`, for BYTES a new object array of `bytes`."""
        if self.datatype is DataType.BYTES:
            elements = np.empty(self.shape, dtype=object)
            elements.reshape(-1)[:] = split_bytes(self.data)
            return elements
        return np.frombuffer(self.data, dtype=self.datatype.dtype).reshape(self.shape)

    def __repr__(self) -> str:
        return f"<Tensor {self.name} {self.datatype.name}{list(self.shape)}>"


def tensor_from_array(name: str, datatype: DataType, array: NDArray[Any]) -> Tensor:
    """A tensor over the array's own memory if that is contiguous and little-endian, else over a copy.

    The array's dtype must be the datatype's own; object arrays (BYTES) hold `bytes` or `str` (UTF-8).
    """
    if datatype is DataType.BYTES:
        return Tensor(name, datatype, array.shape, join_bytes(array.reshape(-1)))
    contiguous = np.ascontiguousarray(array, dtype=datatype.dtype)
    # An empty array has no bytes to view; ascontiguousarray makes a scalar one-dimensional, so the shape is kept.
    data: Buffer = contiguous.reshape(-1).view(np.uint8).data if contiguous.size else b""
    return Tensor(name, datatype, array.shape, data)


_LONG_COPY_BYTES = 256 << 10


def concatenate(parts: Sequence[Buffer]) -> Buffer:
    """All parts' bytes, copied into one buffer."""
    if sum(map(len, parts)) < _LONG_COPY_BYTES:
        return b"".join(parts)
    # numpy copies without the interpreter lock, bytes.join with it: 64 MiB would stop the event loop for 30 ms.
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts]).data


_JOINED_AT_ONCE = 64 << 10
"""Maximum number of parts per join: joining, and freeing, more in one call blocks other threads for milliseconds."""


def join_bytes(elements: Iterable[bytes | str]) -> bytes:
    """BYTES elements in wire layout."""
    joined: list[bytes] = []
    parts: list[bytes] = []
    for element in elements:
        raw = element.encode() if isinstance(element, str) else bytes(element)
        parts.append(len(raw).to_bytes(4, "little"))
        parts.append(raw)
        if len(parts) >= _JOINED_AT_ONCE:
            joined.append(b"".join(parts))
            parts.clear()
    joined.append(b"".join(parts))
    return b"".join(joined)


def split_bytes(data: Buffer) -> list[bytes]:
    """The elements of a BYTES tensor. The layout was checked on arrival; ValueError if it is broken anyway."""
    view = memoryview(data)
    elements: list[bytes] = []
    at, end = 0, len(view)
    while at < end:
        start = at + 4
        stop = start + int.from_bytes(view[at:start], "little")
        if stop > end:
            raise ValueError(f"element {len(elements)} ends at byte {stop} of {end}")
        elements.append(bytes(view[start:stop]))
        at = stop
    return elements
