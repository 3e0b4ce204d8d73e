"""What can go wrong with a fetch: the codes that a process ends with, and what a store's answer means."""

import re
from dataclasses import dataclass
from enum import Enum, IntEnum


class Exit(IntEnum):
    """How `halimede fetch` ends. Whoever runs it tells reasons by these numbers, so that they never change."""

    DONE = 0
    BAD_PLAN = 2
    AUTH = 10
    NOT_FOUND = 11
    DIGEST = 12
    NO_SPACE = 13
    NOT_A_MODEL = 14
    UNREACHABLE = 15


class FetchError(Exception):
    """The end of a fetch: the code, and the root cause in words that name what would be right."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class TransientFault(Exception):
    """The store did not do what it may do at another try."""


class ChangedFault(Exception):
    """An object is another one than was listed."""


class Action(Enum):
    FAIL = "fail"
    RETRY = "retry"
    START_ANEW = "start anew"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do about an answer; `code` counts where that is to fail, `reason` is for people."""

    action: Action
    code: Exit
    reason: str


# What S3 and those that speak as it does say with a status of 400, which by itself says nothing.
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_REFUSED = frozenset({"AccessDenied", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"})
_ELSEWHERE = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"})
_BUSY = frozenset({"InternalError", "RequestTimeout", "SlowDown", "ServiceUnavailable", "RequestTimeTooSkewed"})
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_IDENTITY = (
    "token request",
    "credential error",
    "service account",
    "AssumeRole",
    "WebIdentity",
    "instance credentials",
)
_TRANSPORT = ("error sending request", "HTTP error", "request or response body", "error decoding", "timed out")


def judge_status(status: int, code: str = "") -> Verdict:
    """What an HTTP status means, with the store's own word for it where it says one."""
    said = f"{status} {code}".strip()
    if code in _EXPIRED:
        return Verdict(Action.FAIL, Exit.AUTH, f"the credentials have expired ({said})")
    if status in {301, 307, 308} or code in _ELSEWHERE:
        return Verdict(
            Action.FAIL, Exit.NOT_FOUND, f"it is elsewhere ({said}): right may be another region or endpoint"
        )
    if status in {401, 403, 407} or code in _REFUSED:
        return Verdict(Action.FAIL, Exit.AUTH, f"access was denied ({said})")
    if status in {404, 410}:
        return Verdict(Action.FAIL, Exit.NOT_FOUND, f"it is not there ({said})")
    if status == 412:
        return Verdict(Action.START_ANEW, Exit.UNREACHABLE, "it changes while it is fetched")
    if status in {408, 425, 429} or status >= 500 or code in _BUSY:
        return Verdict(Action.RETRY, Exit.UNREACHABLE, f"the store answers with {said}")
    return Verdict(Action.FAIL, Exit.UNREACHABLE, f"the store refuses the request ({said})")


def judge_text(kind: str, text: str) -> Verdict:
    """What an error of the object store library means: `kind` is its class, `text` all that it says.

    The text may hold addresses with signatures in them, so that no part of it but known words goes into the reason.
    """
    if any(each in text for each in _IDENTITY):
        if any(each in text for each in _TRANSPORT):
            return Verdict(Action.RETRY, Exit.AUTH, f"who gives credentials cannot be reached{_cause(text)}")
        return Verdict(Action.FAIL, Exit.AUTH, f"there are no credentials to be had: {_first_line(text)}")
    if status := _STATUS.search(text):
        code = _CODE.search(text)
        return judge_status(int(status[1]), code[1] if code else "")
    match kind:
        case "FileNotFoundError" | "NotFoundError":
            return judge_status(404)
        case "PermissionDeniedError" | "UnauthenticatedError":
            return judge_status(403)
        case "PreconditionError":
            return judge_status(412)
        case _:
            pass
    if any(each in text for each in _TRANSPORT):
        return Verdict(Action.RETRY, Exit.UNREACHABLE, f"the store cannot be reached{_cause(text)}")
    return Verdict(Action.FAIL, Exit.UNREACHABLE, f"the store could not be asked ({kind}): {_first_line(text)}")


_CAUSES = {
    "dns error": "its name is not known",
    "Connection refused": "connection refused",
    "ConnectionRefused": "connection refused",
    "certificate": "its certificate is not trusted; a private authority's goes into a CA bundle",
    "UnknownIssuer": "its certificate is not trusted; a private authority's goes into a CA bundle",
    "TimedOut": "no answer in time",
    "timed out": "no answer in time",
    "Connection reset": "the connection was cut",
    "ConnectionReset": "the connection was cut",
    "IncompleteMessage": "the connection was cut",
    "UnexpectedEof": "the connection was cut",
}


def _cause(text: str) -> str:
    return next((f": {words}" for sign, words in _CAUSES.items() if sign in text), "")


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:300]


FIRST_PAUSE_SECS = 0.25
LONGEST_PAUSE_SECS = 15.0


def pause_secs(failures: int, jitter: float) -> float:
    """How long to wait after that many failures in a row, from 1; `jitter` from 0 to 1 takes up to half of it away."""
    longest: float = min(FIRST_PAUSE_SECS * 2.0 ** min(failures - 1, 16), LONGEST_PAUSE_SECS)
    return longest * (1 - jitter / 2)


def raise_verdict(verdict: Verdict, where: str) -> None:
    """`where`: what a failure is told of."""
    match verdict.action:
        case Action.RETRY:
            raise TransientFault(verdict.reason)
        case Action.START_ANEW:
            raise ChangedFault
        case Action.FAIL:
            raise FetchError(verdict.code, f"{where}: {verdict.reason}")
