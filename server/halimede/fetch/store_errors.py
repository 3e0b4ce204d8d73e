"""The meaning of a store's errors: which fetch to retry, to begin again or to end, and the reason for people."""

import re
from dataclasses import dataclass
from enum import Enum

from halimede.fetch.errors import ChangedError, FetchError, TransientError
from halimede_spec.fetch_exit import OF_CA_BUNDLE, FetchExit


class OnError(Enum):
    FAIL = "fail"
    RETRY = "retry"
    START_ANEW = "start anew"


@dataclass(frozen=True, slots=True)
class Classified:
    """What to do about a response; `code` is the exit code if the action is to fail, `reason` is a text for users."""

    action: OnError
    code: FetchExit
    reason: str


_EXPIRED = (OnError.FAIL, FetchExit.AUTH, "the credentials have expired")
_REFUSED = (OnError.FAIL, FetchExit.AUTH, "access was denied")
_ELSEWHERE = (OnError.FAIL, FetchExit.NOT_FOUND, "it is elsewhere; try another region or endpoint")
_MISSING = (OnError.FAIL, FetchExit.NOT_FOUND, "it does not exist")
_BUSY = (OnError.RETRY, FetchExit.UNREACHABLE, "{store} answers with an error")

_BY_CODE = {
    # S3, and stores that implement its API.
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"), _EXPIRED),
    **dict.fromkeys(("AccessDenied", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"), _REFUSED),
    **dict.fromkeys(("AuthorizationHeaderMalformed", "IllegalLocationConstraintException"), _ELSEWHERE),
    "PermanentRedirect": _ELSEWHERE,
    **dict.fromkeys(("InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown"), _BUSY),
    # Google.
    **dict.fromkeys(("AuthenticationRequired", "InvalidSecurity"), _REFUSED),
    # Azure.
    **dict.fromkeys(("AuthenticationFailed", "InvalidAuthenticationInfo"), _REFUSED),
    **dict.fromkeys(("AuthorizationFailure", "NoAuthenticationInformation"), _REFUSED),
    **dict.fromkeys(("OperationTimedOut", "ServerBusy"), _BUSY),
}
"""The meaning of a store's error code. It takes precedence over the status: S3 uses 400 for many errors."""

_BY_STATUS = {
    **dict.fromkeys((301, 307, 308), _ELSEWHERE),
    **dict.fromkeys((401, 403, 407), _REFUSED),
    **dict.fromkeys((404, 410), _MISSING),
    412: (OnError.START_ANEW, FetchExit.UNREACHABLE, "it changes while it is fetched"),
    **dict.fromkeys((408, 425, 429), _BUSY),
}
_STATUS = re.compile(r"status code: (\d{3})")
_SERVER = re.compile(r"\b(?:GET|HEAD|POST|PUT) (https?://[\w.:\[\]-]{1,300})(?=[/?\s])")
"""Scheme, host and port of the requested address, but not the rest, which may contain a signature."""
_SAID = re.compile(r"status code: \d{3} ([^\n]{1,300})")
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


def classify_status(status: int, code: str = "", store: str = "the store") -> Classified:
    """Classify an HTTP status, together with the store's error code if there is one. `store` names the server."""
    refused = (OnError.FAIL, FetchExit.UNREACHABLE, "{store} refuses the request")
    action, end, words = _BY_CODE.get(code) or _BY_STATUS.get(status) or (_BUSY if status >= 500 else refused)
    return Classified(action, end, f"{words.format(store=store)} ({f'{status} {code}'.strip()})")


def classify_text(kind: str, text: str, endpoint: str = "") -> Classified:
    """Classify an error of the object store library: `kind` is its class, `text` its full text. `endpoint` is the
    store's configured address, if any, because the text may not contain it.

    The text may contain addresses with signatures, so only known words from it go into the reason.
    """
    named = server_in(text) or endpoint
    server = f" {named}" if named else ""
    if any(each in text for each in _IDENTITY):
        if any(each in text for each in _TRANSPORT):
            reason = f"the service{server} that gives credentials cannot be reached{_cause(text)}"
            return Classified(OnError.RETRY, FetchExit.AUTH, reason)
        return Classified(OnError.FAIL, FetchExit.AUTH, f"no credentials are available: {_first_line(text)}")
    if status := _STATUS.search(text):
        return classify_status(int(status[1]), code_in(text), f"the store{server}")
    match kind:
        case "FileNotFoundError" | "NotFoundError":
            return classify_status(404)
        case "PermissionDeniedError" | "UnauthenticatedError":
            return classify_status(403)
        case "PreconditionError":
            return classify_status(412)
        case _:
            pass
    if any(each in text for each in _TRANSPORT):
        return Classified(OnError.RETRY, FetchExit.UNREACHABLE, f"the store{server} cannot be reached{_cause(text)}")
    return Classified(
        OnError.FAIL, FetchExit.UNREACHABLE, f"the request to the store failed ({kind}): {_first_line(text)}"
    )


UNTRUSTED = f"its certificate is not trusted; a private authority's goes into a {OF_CA_BUNDLE}"
OTHER_NAME = "its certificate is for another name"
_CAUSES = {
    "dns error": "its name is not known",
    "Connection refused": "connection refused",
    "ConnectionRefused": "connection refused",
    "NotValidForName": OTHER_NAME,
    "certificate": UNTRUSTED,
    "UnknownIssuer": UNTRUSTED,
    "InvalidContentType": "it does not speak TLS",
    "TimedOut": "no answer in time",
    "timed out": "no answer in time",
    "Connection reset": "the connection was cut",
    "ConnectionReset": "the connection was cut",
    "IncompleteMessage": "the connection was cut",
    "TunnelUnsuccessful": "the proxy refuses to connect to it",
    "ProxyAuthRequired": "the proxy requires a user and a password",
    "UnexpectedEof": "the connection was cut",
}


def _cause(text: str) -> str:
    return next((f": {words}" for sign, words in _CAUSES.items() if sign in text), "")


def server_in(text: str) -> str:
    """Scheme, host and port of the address that an error of the object store library names; "" without one."""
    return found[1] if (found := _SERVER.search(text)) else ""


def said_by_proxy(text: str) -> str:
    """What a proxy answered instead of the store, as `: text`; "" for the XML of a store, or nothing."""
    found = _SAID.search(text)
    return f": {found[1].rstrip(': ')}" if found and "<" not in found[1] else ""


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:300]


def code_in(body: str) -> str:
    """The store's error code in the body of a response, in the XML of S3, Google and Azure; "" for no code."""
    found = _CODE.search(body)
    return found[1] if found else ""


def raise_classified(classified: Classified, where: str, by: str = "") -> None:
    """Raise the error for a failed response; `where` names what failed, `by` what was between."""
    match classified.action:
        case OnError.RETRY:
            raise TransientError(f"{classified.reason}{by}")
        case OnError.START_ANEW:
            raise ChangedError
        case OnError.FAIL:
            raise FetchError(classified.code, f"{where}: {classified.reason}{by}")
