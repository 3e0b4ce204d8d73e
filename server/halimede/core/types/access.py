"""Restricted APIs: which calls need a header with a shared secret, as in Triton.

The comparison takes the same time wherever the values differ.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class ApiCategory(Enum):
    """What `--http-restricted-api` and `--grpc-restricted-protocol` can restrict, by Triton's names."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


@dataclass(frozen=True, slots=True)
class Secret:
    """A header, its name in lower case, and the value that it must have."""

    header: str
    value: str = field(repr=False)

    def is_given(self, value: bytes | str | None) -> bool:
        """Whether a request's value of the header is the right one; None when it has no such header."""
        if value is None:
            return False
        given = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self.value.encode("utf-8", "surrogateescape"))


Restrictions = Mapping[ApiCategory, Secret]
"""Categories that are not in it are open."""
