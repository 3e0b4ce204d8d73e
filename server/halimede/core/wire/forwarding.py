"""Headers that become request parameters (`--http-header-forward-pattern`, `--grpc-header-forward-pattern`).

A pattern is a regular expression that must match a header's whole name. Headers that carry secrets (`Authorization` and
those of restricted APIs) are forwarded only if the pattern names them in full: one of the alternatives that `|`
separates is the name itself, as in `x-.*|authorization`. A wildcard that happens to match them does not count.
"""

import re
from collections.abc import Iterable

from halimede.core.types import ParameterValue, Restrictions
from halimede.core.types.error import clip, invalid

RESERVED = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
RESERVED_PREFIX = "triton_"

_FLAGS = re.compile(r"\(\?(?=[imsU-])([imsU]*)(?:-([imsU]+))?\)")
"""RE2's flags for all of a pattern. Names have no line ends and are matched whole, so only `i` has an effect."""

_INNERMOST_GROUP = re.compile(r"\([^()]*\)")


def compile_pattern(text: str) -> re.Pattern[str]:
    """The pattern of a flag, which matches in any case unless it begins with `(?-i)`.

    ValueError for an invalid regular expression.
    """
    flags = re.IGNORECASE
    at = 0
    while match := _FLAGS.match(text, at):
        if "i" in match[1]:
            flags = re.IGNORECASE
        if "i" in (match[2] or ""):
            flags = re.NOFLAG
        at = match.end()
    try:
        return re.compile(text[at:], flags)
    except re.error as error:
        raise ValueError(f"Invalid regular expression '{text}': {error}") from None


class Forwarding:
    """Which headers of a request are forwarded."""

    def __init__(self, pattern: re.Pattern[str], restricted: Restrictions) -> None:
        self._pattern = pattern
        secret = {"authorization", *(each.header.lower() for each in restricted.values())}
        self._withheld = secret - _named_in_full(pattern.pattern)

    def parameters(self, headers: Iterable[tuple[str, str]]) -> dict[str, ParameterValue]:
        """The parameters from a request's headers, by the header's name as it was sent.

        INVALID_ARG for a header with the name of one of Triton's own parameters.
        """
        parameters: dict[str, ParameterValue] = {}
        for name, value in headers:
            if self._pattern.fullmatch(name) is None:
                continue
            lowered = name.lower()
            if lowered in self._withheld:
                continue
            if lowered in RESERVED or lowered.startswith(RESERVED_PREFIX):
                raise invalid(f"Header '{clip(name)}' is reserved for Triton usage and cannot be forwarded.")
            parameters[name] = value
        return parameters


def _named_in_full(pattern: str) -> set[str]:
    """The alternatives of a pattern, in lower case. Those inside a group do not count: they may be a part of a name.

    A group, `^` and `$` around the whole pattern change nothing.
    """
    whole = pattern.removeprefix("^").removesuffix("$")
    if group := re.fullmatch(r"\((?:\?:)?([^()]*)\)", whole):
        whole = group[1]
    while whole != (without := _INNERMOST_GROUP.sub("<group>", whole)):
        whole = without
    return {re.sub(r"\\(.)", r"\1", each.removeprefix("^").removesuffix("$")).lower() for each in whole.split("|")}
