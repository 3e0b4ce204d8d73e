"""Records of HTTP exchanges for the access log."""

from collections.abc import Sequence

import orjson

from halimede.core.observe.access_lines import Access, Protocol, access_kind
from halimede.core.observe.log_lines import LineKind
from halimede.core.types import ApiCategory, Buffer
from halimede.frontends.http.framing import Head
from halimede.frontends.http.routes import Route, path_of, resolve

CLIENT_LEFT = 499
"""The status of a request whose connection ended before its answer: no client sees it. The number is nginx's."""

_ANSWERS_OF_HEALTH = {200, 400, 503}


def kind_of(
    protocol: Protocol, head: Head | None, status: int, model: str = "", *, fails_late: bool = False
) -> LineKind | None:
    """The kind of a request's line; None for the answers of probes, positive or negative: probes repeat for ever.

    `model` is the model that was found for the request, "" for none.
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
    """The record of a request; `head` is None where none could be read."""
    method = target = b""
    if head is not None:
        method, target = head.method, head.target
    route = _route(protocol, head)
    return Access(
        kind,
        method.decode("latin-1"),
        # A query is left out: clients put tokens there.
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


def client_of(peer: object) -> str:
    """A peer's address as the log has it; a unix socket's peer has none."""
    match peer:
        case (str(host), int(port), *_):
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "unix"
