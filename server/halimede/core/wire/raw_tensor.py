"""Sizes and framing of tensors in wire layout. Declared sizes are Python ints; nothing is allocated from them."""

from collections.abc import Iterator
from math import prod

from halimede.core.config.check_request import MAX_TENSOR_BYTES
from halimede.core.types import DataType
from halimede.core.types.error import clip, invalid
from halimede.core.types.tensor import Buffer

LENGTH_BYTES = 4
"""Bytes of the length before each BYTES element."""


def element_count(name: str, datatype: DataType, shape: tuple[int, ...], model: str) -> int:
    """The number of elements of input `name`, whose shape has no negatives; INVALID_ARG if it is not addressable."""
    limit = MAX_TENSOR_BYTES // datatype.dtype.itemsize
    addressed = 1
    for dim in shape:
        # numpy refuses such shapes even if a zero dimension makes them empty.
        addressed *= dim or 1
        # The product of a hostile shape may be a huge number, so multiplication stops at the limit.
        if addressed > limit:
            raise invalid(
                f"input '{clip(name)}' has too many elements for model '{clip(model)}', got shape {shape_text(shape)},"
                f" a tensor has at most {MAX_TENSOR_BYTES} bytes"
            )
    return 0 if 0 in shape else addressed


def byte_size(datatype: DataType, shape: tuple[int, ...]) -> int:
    """The exact size of a tensor in bytes; for BYTES the minimum size of its elements."""
    return prod(shape) * (datatype.itemsize or LENGTH_BYTES)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as errors print it, cut like all client data."""
    # Join only what can be printed: each dimension takes two characters or more.
    return clip(f"[{','.join(map(str, shape[:129]))}]")


def take(tail: memoryview, at: int, size: int, name: str, model: str) -> memoryview:
    """`size` bytes of the binary part from `at` on, as a view, for input `name`; INVALID_ARG if fewer are left."""
    end = at + size
    if end > len(tail):
        raise invalid(
            f"unexpected size for input '{clip(name)}', expecting {end - len(tail)} additional bytes"
            f" for model '{clip(model)}'"
        )
    return tail[at:end]


def elements(data: Buffer) -> Iterator[memoryview]:
    """The elements of a BYTES tensor one by one, as views. ValueError if the layout is broken."""
    view = memoryview(data)
    at, end = 0, len(view)
    while at < end:
        start = at + LENGTH_BYTES
        stop = start + int.from_bytes(view[at:start], "little")
        if stop > end:
            raise ValueError(f"an element at byte {at} ends at byte {stop} of {end}")
        yield view[start:stop]
        at = stop
