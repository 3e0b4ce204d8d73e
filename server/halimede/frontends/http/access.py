"""What the access log is told of an exchange that ended."""

import orjson

from halimede.core.observe.access_lines import Access, Protocol
from halimede.core.types import ApiCategory
from halimede.frontends.http.framing import Head
from halimede.frontends.http.routes import Action, path_of, resolve

CLIENT_LEFT = 499
"""The status of a request whose connection ended before its answer: no client sees it. The number is nginx's."""

_ANSWERS_OF_HEALTH = {200, 400, 503}
# The statuses by which an inference ends before its model is known.
_BEFORE_THE_MODEL = {403, 404, 405}
_INFERENCES = {action for action in Action if action.category is ApiCategory.INFERENCE}


def access_of(
    protocol: Protocol,
    head: Head | None,
    status: int,
    duration_s: float | None,
    client: str,
    *,
    version: str = "",
    request_id: str = "",
    error: str = "",
) -> Access | None:
    """The record of a request; None for the answer of a probe, be it yes or no, which is asked again and again."""
    if head is None:
        return Access(protocol, "", "", status, duration_s, client, error=error)
    # A query is left out: clients put tokens there.
    access = Access(
        protocol,
        head.method.decode("latin-1"),
        path_of(head.target).decode("latin-1"),
        status,
        duration_s,
        client,
        version=version,
        request_id=request_id,
        error=error,
    )
    route = resolve(head.target) if protocol is Protocol.HTTP else None
    if route is None:
        return access
    if route.action.category is ApiCategory.HEALTH and status in _ANSWERS_OF_HEALTH:
        return None
    access.model, access.version = route.model, version or route.version
    access.found = route.action in _INFERENCES and status not in _BEFORE_THE_MODEL
    return access


def error_of(body: bytes) -> str:
    """The text of an answer that is an error, alone or as an event; "" for any other body."""
    try:
        document = orjson.loads(body.removeprefix(b"data: "))
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
