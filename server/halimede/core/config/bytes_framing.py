"""The elements of BYTES tensors in a request: a length of four bytes before each one."""

import struct

import numpy as np

from halimede.core.types.tensor import Buffer

# Below this number of elements a loop is faster than the set-up of numpy.
_MIN_VECTOR_ELEMENTS = 16

_LENGTH = struct.Struct("<I").unpack_from


def framing_problem(data: Buffer, expected: int, name: str, model: str) -> str | None:
    """The problem of a BYTES tensor of `expected` elements; None for a valid one. The elements are not copied."""
    size = len(data)
    if expected >= _MIN_VECTOR_ELEMENTS and has_equal_lengths(data, expected):
        return None
    at = 0
    try:
        # The loop only steps to the next element, as a tensor may have millions; the final offset shows validity.
        for _ in range(expected):
            at += 4 + _LENGTH(data, at)[0]
    except struct.error:
        at = -1
    return None if at == size else _explain_framing(data, expected, name, model)


def has_equal_lengths(data: Buffer, expected: int) -> bool:
    """Whether all elements have one length, as digests or images often do: compared in one vector operation."""
    stride, rest = divmod(len(data), expected)
    if rest or stride < 4:
        return False
    lengths = np.ndarray((expected,), np.dtype("<u4"), data, strides=(stride,))
    return bool((lengths == stride - 4).all())


def _explain_framing(data: Buffer, expected: int, name: str, model: str) -> str:
    """The first error in a BYTES tensor that is known to be invalid."""
    size = len(data)
    at = count = 0
    while at < size:
        if size - at < 4:
            return (
                f"incomplete string length indicator for inference input '{name}' for model '{model}', expecting 4 "
                f"bytes but only {size - at} bytes available. Please make sure the string length indicator is in one "
                "buffer."
            )
        if count == expected:
            return (
                f"unexpected number of string elements {count + 1} for inference input '{name}' for model '{model}', "
                f"expecting {expected}"
            )
        length = _LENGTH(data, at)[0]
        at += 4
        if length > size - at:
            return (
                f"incomplete string data for inference input '{name}', expecting string of length {length} but only "
                f"{size - at} bytes available"
            )
        at += length
        count += 1
    return f"expected {expected} string elements for inference input '{name}' for model '{model}', got {count}"
