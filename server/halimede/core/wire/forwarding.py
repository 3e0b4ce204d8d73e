"""Headers that become request parameters (`--http-header-forward-pattern`, `--grpc-header-forward-pattern`)."""

import re
from collections.abc import Iterable

from halimede.core.types import ErrorCode, InferenceError, ParameterValue
from halimede.core.types.error import clip

RESERVED = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
RESERVED_PREFIX = "triton_"


def compile_pattern(text: str) -> re.Pattern[str]:
    """The pattern of a flag, which must match a whole name, in any case. ValueError for no regular expression."""
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"Invalid regular expression '{text}': {error}") from None


def forwarded_parameters(pattern: re.Pattern[str], headers: Iterable[tuple[str, str]]) -> dict[str, ParameterValue]:
    """The parameters that a request's headers bring, by the header's name as it was sent.

    INVALID_ARG for a header that would stand for a parameter of Triton's own.
    """
    parameters: dict[str, ParameterValue] = {}
    for name, value in headers:
        if pattern.fullmatch(name) is None:
            continue
        lowered = name.lower()
        if lowered in RESERVED or lowered.startswith(RESERVED_PREFIX):
            raise InferenceError(
                ErrorCode.INVALID_ARG,
                f"Header '{clip(name)}' is reserved for Triton usage and cannot be forwarded.",
            )
        parameters[name] = value
    return parameters
