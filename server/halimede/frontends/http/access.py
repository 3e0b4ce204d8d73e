"""Records of HTTP exchanges for the access log."""

from collections.abc import Sequence

import orjson

from halimede.core.observe.access_lines import Access, AccessLog, Protocol, access_kind
from halimede.core.observe.log_lines import LineKind
from halimede.core.types import ApiCategory, Buffer
from halimede.frontends.http.framing import Head
from halimede.frontends.http.routes import Route, path_of, resolve
from halimede.frontends.peer import client_of

CLIENT_LEFT = 499
"""The status of a request whose connection ended before its answer, as in nginx. No client sees it."""

_ANSWERS_OF_HEALTH = {200, 400, 503}
_NO_STATUS = 1000


class RequestLog:
    """One listener's requests on their way to the access log.

    Answers with status `noted_from` and above are logged: none without a log.
    """

    def __init__(self, protocol: Protocol, log: AccessLog | None) -> None:
        self.noted_from = _NO_STATUS if log is None else 0 if log.successes else 400
        self._protocol = protocol
        self._log = log

    def note(
        self,
        head: Head | None,
        status: int,
        duration_s: float | None,
        peer: object,
        *,
        model: str = "",
        version: str = "",
        request_id: str = "",
        failure: str = "",
        chunks: Sequence[Buffer] = (),
    ) -> None:
        """Report a request that ended; `head` is None if it could not be read.

        `model` is the model that served it. The error is `failure`, or in the answer's `chunks`.
        """
        log = self._log
        if log is None:
            return
        kind = kind_of(self._protocol, head, status, model, fails_late=status < 400 and bool(failure))
        if kind is None or not log.admits(kind):
            return
        error = failure or (error_of(chunks) if status >= 400 else "")
        client = client_of(peer)
        access = access_of(
            kind, self._protocol, head, duration_s, client, version=version, request_id=request_id, error=error
        )
        log.note(access)


def kind_of(
    protocol: Protocol, head: Head | None, status: int, model: str = "", *, fails_late: bool = False
) -> LineKind | None:
    """The kind of a request's line; None for probes, which repeat, with any answer.

    `model` is the model that served the request, "" for none.
    """
    route = _route(protocol, head)
    if route is not None and route.action.category is ApiCategory.HEALTH and status in _ANSWERS_OF_HEALTH:
        return None
    return access_kind(protocol, status, model, fails_late=fails_late)


def access_of(
    kind: LineKind,
    protocol: Protocol,
    head: Head | None,
    duration_s: float | None,
    client: str,
    *,
    version: str = "",
    request_id: str = "",
    error: str = "",
) -> Access:
    """The record of a request; `head` is None if it could not be read."""
    method = target = b""
    if head is not None:
        method, target = head.method, head.target
    route = _route(protocol, head)
    return Access(
        kind,
        method.decode("latin-1"),
        # Without the query: clients put tokens there.
        path_of(target).decode("latin-1"),
        duration_s,
        client,
        model="" if route is None else route.model,
        version=version or ("" if route is None else route.version),
        request_id=request_id,
        error=error,
    )


def _route(protocol: Protocol, head: Head | None) -> Route | None:
    return None if head is None or protocol is not Protocol.HTTP else resolve(head.target)


def error_of(chunks: Sequence[Buffer]) -> str:
    """The text of an answer that is an error, alone or as an event; "" for any other body."""
    try:
        document = orjson.loads(b"".join(chunks).removeprefix(b"data: "))
    except orjson.JSONDecodeError:
        return ""
    text = document.get("error", "") if isinstance(document, dict) else ""
    return text if isinstance(text, str) else ""
