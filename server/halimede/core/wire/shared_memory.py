"""Errors about shared memory of clients, over both protocols."""

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip


def unknown_region(kind: str, region: str) -> InferenceError:
    """The error for the status of a region that was never registered; `kind` is "system" or "cuda"."""
    return InferenceError(ErrorCode.NOT_FOUND, f"Unable to find {kind} shared memory region: '{clip(region)}'")
