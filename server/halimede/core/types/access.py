"""Restricted APIs: calls that need a header with a shared secret, as in Triton.

Secrets are compared in constant time.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class ApiCategory(Enum):
    """API categories that `--http-restricted-api` and `--grpc-restricted-protocol` can restrict, by Triton's names."""

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
    """A header that requests must have: its name in lower case, and its required value."""

    header: str
    value: str = field(repr=False)

    def is_given(self, value: bytes | str | None) -> bool:
        """Whether this value of the header is correct; `value` is None if the request has no such header."""
        if value is None:
            return False
        given = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self.value.encode("utf-8", "surrogateescape"))


Restrictions = Mapping[ApiCategory, Secret]
"""The secret of each restricted category; all other categories are open."""
