"""Tensors in shared memory that clients registered, over both protocols.

The parameters of an input or output describe a slice of a region. Both codecs read them by `read_region`, and both find
the memory of a slice by `resolve`. Regions cannot be registered yet, so that `resolve` refuses every slice.
"""

from collections.abc import Mapping
from typing import NoReturn

from halimede.core.types import ErrorCode, InferenceError, RegionSlice
from halimede.core.types.error import clip, invalid, unsupported

REGION = "shared_memory_region"
BYTE_SIZE = "shared_memory_byte_size"
OFFSET = "shared_memory_offset"
REGION_PARAMETERS = (REGION, BYTE_SIZE, OFFSET)


def read_region(kind: str, name: str, parameters: Mapping[str, object]) -> RegionSlice:
    """The slice that the parameters of a tensor describe; they have at least one of REGION_PARAMETERS.

    `kind` is "input" or "output". A size or offset that is left out is 0, as in Triton. INVALID_ARG for a value of the
    wrong kind, UNSUPPORTED for a size or offset without a region.
    """
    if REGION not in parameters:
        raise _not_available(kind, name, BYTE_SIZE if BYTE_SIZE in parameters else OFFSET)
    region = parameters[REGION]
    if not isinstance(region, str):
        raise _wrong_kind(kind, name, REGION, "a string")
    byte_size = _unsigned(kind, name, BYTE_SIZE, parameters.get(BYTE_SIZE, 0))
    return RegionSlice(region, byte_size, _unsigned(kind, name, OFFSET, parameters.get(OFFSET, 0)))


def resolve(kind: str, name: str, _region: RegionSlice) -> NoReturn:
    """Find the memory of a slice, for the input to read or the output to write. Raises UNSUPPORTED."""
    raise _not_available(kind, name, REGION)


def unknown_region(kind: str, region: str) -> InferenceError:
    """The error for the status of a region that was never registered; `kind` is "system" or "cuda"."""
    return InferenceError(ErrorCode.NOT_FOUND, f"Unable to find {kind} shared memory region: '{clip(region)}'")


def _unsigned(kind: str, name: str, key: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise _wrong_kind(kind, name, key, "an unsigned integer")
    return value


def _not_available(kind: str, name: str, key: str) -> InferenceError:
    return unsupported(
        f"parameter '{key}' of {kind} '{clip(name)}': shared memory is not available yet,"
        " tensors must be sent in the message"
    )


def _wrong_kind(kind: str, name: str, key: str, expected: str) -> InferenceError:
    return invalid(f"parameter '{key}' of {kind} '{clip(name)}' must be {expected}")
