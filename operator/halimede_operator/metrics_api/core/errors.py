"""The one error of the metrics API."""

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why a request fails: the name is Kubernetes' reason in a Status, the value the HTTP status."""

    BadRequest = 400
    Unauthorized = 401
    Forbidden = 403
    NotFound = 404
    MethodNotAllowed = 405
    TooManyRequests = 429
    InternalError = 500
    ServiceUnavailable = 503


@dataclass(slots=True, eq=False)
class MetricsError(Exception):
    reason: Reason
    message: str

    def __str__(self) -> str:
        return self.message
