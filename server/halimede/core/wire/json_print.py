"""Print tensors as flat JSON arrays, in steps of at most a few milliseconds each."""

import codecs
from itertools import chain
from math import isnan
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from halimede.core.types import DataType, Tensor
from halimede.core.types.error import clip, internal, invalid
from halimede.core.types.tensor import Buffer
from halimede.core.wire.raw_tensor import elements
from halimede.core.wire.steps import Steps

PRINT_ELEMENTS = 32 << 10
"""Maximum count of numbers printed in one step."""

LONG_STRING_BYTES = 32 << 10
"""Strings are printed in batches of about this size, and a longer one in parts of this size."""


def print_steps(tensor: Tensor) -> Steps[list[Buffer]]:
    """The elements of an output as one flat JSON array, in chunks.

    Floats are printed as doubles, with the tokens NaN, Infinity and -Infinity as in Triton. INVALID_ARG if a BYTES
    element is not UTF-8, which JSON cannot represent.
    """
    if tensor.datatype is DataType.BYTES:
        return (yield from _print_strings_steps(tensor))
    flat = np.frombuffer(tensor.data, tensor.datatype.dtype)
    if flat.size <= PRINT_ELEMENTS:
        return [_print_numbers(flat)]
    chunks: list[Buffer] = []
    for at in range(0, flat.size, PRINT_ELEMENTS):
        chunks += (b",", memoryview(_print_numbers(flat[at : at + PRINT_ELEMENTS]))[1:-1])
        yield 0
    chunks[0] = b"["
    chunks.append(b"]")
    return chunks


def _print_numbers(numbers: NDArray[Any]) -> bytes:
    # Tensors may begin at any offset of a request body, but the printer reads only aligned memory.
    if numbers.dtype.kind != "f":
        return orjson.dumps(np.require(numbers, requirements="A"), option=orjson.OPT_SERIALIZE_NUMPY)
    # Casting a signaling NaN gives a warning.
    with np.errstate(invalid="ignore"):
        doubles = numbers.astype(np.float64)
    text = orjson.dumps(doubles, option=orjson.OPT_SERIALIZE_NUMPY)
    strange = numbers[~np.isfinite(numbers)]
    if not strange.size:
        return text
    # The printer writes null for each of these.
    pieces = text.split(b"null")
    tokens = [b"NaN" if isnan(value) else b"Infinity" if value > 0 else b"-Infinity" for value in strange.tolist()]
    return b"".join(chain.from_iterable(zip(pieces, tokens, strict=False))) + pieces[-1]


def _print_strings_steps(tensor: Tensor) -> Steps[list[Buffer]]:
    chunks: list[Buffer] = []
    batch: list[str] = []
    batch_bytes = 0
    try:
        for element in elements(tensor.data):
            if len(element) <= LONG_STRING_BYTES:
                batch.append(str(element, "utf-8"))
                batch_bytes += len(element) + 8
            if batch and (batch_bytes > LONG_STRING_BYTES or len(element) > LONG_STRING_BYTES):
                chunks += (b",", memoryview(orjson.dumps(batch))[1:-1])
                batch, batch_bytes = [], 0
                yield 0
            if len(element) > LONG_STRING_BYTES:
                chunks.append(b',"')
                decoder = codecs.getincrementaldecoder("utf-8")()
                for at in range(0, len(element), LONG_STRING_BYTES):
                    part = decoder.decode(element[at : at + LONG_STRING_BYTES], at + LONG_STRING_BYTES >= len(element))
                    chunks.append(memoryview(orjson.dumps(part))[1:-1])
                    yield 0
                chunks.append(b'"')
    except UnicodeDecodeError:
        raise invalid(
            f"output '{clip(tensor.name)}' has an element that is not UTF-8 and cannot be sent via JSON,"
            " ask for it as binary data"
        ) from None
    except ValueError as error:
        raise internal(f"output '{clip(tensor.name)}' is broken: {error}") from None
    if batch:
        chunks += (b",", memoryview(orjson.dumps(batch))[1:-1])
    if not chunks:
        return [b"[]"]
    chunks[0] = b"[" if chunks[0] == b"," else b'["'
    chunks.append(b"]")
    return chunks
