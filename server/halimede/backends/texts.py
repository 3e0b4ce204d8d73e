"""Strings of inputs, for runtimes that take text and no other bytes."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from halimede.backends.api import RefusedRequestsError
from halimede.core.types import InferenceError, invalid


def decode_texts(name: str, array: NDArray[Any], rows: Sequence[int], taker: str) -> list[str]:
    """The elements of a BYTES input as text, of which each request has that many `rows`. `taker` names the runtime.

    RefusedRequestsError for the requests with elements that are not UTF-8; INVALID_ARG if there is one request.
    """
    try:
        return _decoded(array)
    except UnicodeDecodeError as error:
        if len(rows) <= 1:
            raise _no_text(name, error, taker) from error
    errors: dict[int, InferenceError] = {}
    start = 0
    for position, count in enumerate(rows):
        try:
            _decoded(array[start : start + count])
        except UnicodeDecodeError as error:
            errors[position] = _no_text(name, error, taker)
        start += count
    raise RefusedRequestsError(errors)


def _decoded(array: NDArray[Any]) -> list[str]:
    return [element.decode() for element in array.reshape(-1).tolist()]


def _no_text(name: str, error: UnicodeDecodeError, taker: str) -> InferenceError:
    return invalid(
        f"input '{name}': an element is not UTF-8 text ({error.reason} at its byte {error.start}), and {taker} takes "
        "no other strings"
    )
