"""Errors of the API server, classified by how to handle them."""

import datetime
import email.utils
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from halimede_operator.core.api_errors import Cause, Meaning, meaning_of

RETRY_AFTER_MAX_S = 600.0


@dataclass(slots=True, eq=False)
class ApiError(Exception):
    """The API server answered with an error, or did not answer (status 0)."""

    verb: str
    path: str
    status: int
    reason: str
    message: str
    retry_after_s: float | None = None
    causes: tuple[Cause, ...] = ()

    def __str__(self) -> str:
        return f"{self.verb} {self.path}: {self.status or 'no answer'} {self.reason}: {self.message}"

    @property
    def meaning(self) -> Meaning:
        return meaning_of(self.status, self.message, self.causes)

    @property
    def is_conflict(self) -> bool:
        return self.meaning is Meaning.CONFLICT

    @property
    def is_refusal(self) -> bool:
        return self.meaning.is_refusal


def error_of(verb: str, path: str, status: int, headers: Mapping[str, str], data: bytes) -> ApiError:
    """The error for an answer. data: a Status as JSON, or any text of a proxy in between."""
    now = datetime.datetime.now(datetime.UTC)
    retry_after_s = retry_after(headers.get("Retry-After"), now)
    try:
        answer = orjson.loads(data)
        details = answer.get("details") or {}
        reason, message = str(answer.get("reason") or "Unknown"), str(answer.get("message") or "")
        causes = tuple(
            Cause(str(cause.get("reason")), str(cause.get("field") or "")) for cause in details.get("causes") or ()
        )
    except (orjson.JSONDecodeError, AttributeError):
        reason, message, causes = "Unknown", data[:256].decode(errors="replace"), ()
    return ApiError(verb, path, status, reason, message, retry_after_s, causes)


def retry_after(value: str | None, now: datetime.datetime) -> float | None:
    """Seconds to wait, from a Retry-After header that holds seconds (a fraction is allowed) or a date.

    At most RETRY_AFTER_MAX_S. None without a header, or if it cannot be parsed.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (date.replace(tzinfo=date.tzinfo or datetime.UTC) - now).total_seconds()
    if seconds != seconds:  # noqa: PLR0124 - nan
        return None
    return min(max(seconds, 0.0), RETRY_AFTER_MAX_S)
