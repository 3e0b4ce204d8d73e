"""The access log: the line for a finished request, and which lines share a rate limit.

A line has no header, query or body of the request, because each of them may hold a secret. Texts chosen by a client or
a model (path, names, id, error) are cut here, and quoted where the line is rendered.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from halimede.core.observe.log_lines import MAX_FIELD_BYTES, LineKind, LogLine, Severity, clip

MAX_ROUTE_BYTES = 512
MAX_ERROR_BYTES = 1 << 10


class Protocol(Enum):
    HTTP = "http"
    GRPC = "grpc"
    METRICS = "metrics"


@dataclass(slots=True)
class Access:
    """One finished request.

    `kind` has the protocol and the status. `method` is the HTTP method or the name of an RPC, `route` a path, "" for
    gRPC. `duration_s` is None if not even the head of the request could be read. `model` and `version` are those that
    the client requested, or those that the server chose.
    """

    kind: LineKind
    method: str
    route: str
    duration_s: float | None
    client: str
    model: str = ""
    version: str = ""
    request_id: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class AccessLog:
    """Where a front end reports failed requests, and with `successes` all requests.

    `admits` is called first, once for each request: at overload most lines are dropped, and cost nothing more.
    """

    admits: Callable[[LineKind], bool]
    note: Callable[[Access], None]
    successes: bool = False


_GRPC_NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
_GRPC_FAULTS_OF_SERVER = {
    _GRPC_NAMES.index(name) for name in ("UNKNOWN", "RESOURCE_EXHAUSTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
}


def access_kind(protocol: Protocol, status: int, model: str = "", *, fails_late: bool = False) -> LineKind:
    """The kind of a line: lines of the same protocol, status and model share a rate limit.

    `status` is a status code of the protocol. `model` is a model that the server found, else "": a client must not get
    a limit of its own for each name that it invents. `fails_late` means that a streamed response failed after its
    status was sent. The kind's file and line are protocol and status, so that the count of dropped lines has both.
    """
    is_fault = status in _GRPC_FAULTS_OF_SERVER if protocol is Protocol.GRPC else status >= 500 or fails_late
    # A fault of the server or of a model is a warning; a client's mistake is information.
    return LineKind(Severity.WARNING if is_fault else Severity.INFO, protocol.value, status, model)


def access_line(access: Access, time_us: int, process: int) -> LogLine:
    """The log line of a request."""
    kind = access.kind
    model, version = clip(access.model, MAX_FIELD_BYTES), clip(access.version, MAX_FIELD_BYTES)
    request_id, error = clip(access.request_id, MAX_FIELD_BYTES), clip(access.error, MAX_ERROR_BYTES)
    method, route = clip(access.method, MAX_FIELD_BYTES), clip(access.route, MAX_ROUTE_BYTES)
    fields: dict[str, str | float] = {"protocol": kind.file, "method": method}
    if route:
        fields["route"] = route
    fields["status"] = _status(kind)
    if access.duration_s is not None:
        fields["duration_ms"] = round(access.duration_s * 1e3, 3)
    fields["client"] = access.client
    if error:
        fields["error"] = error
    text = _text(fields, model, version, request_id)
    return LogLine(
        time_us,
        kind.severity,
        process,
        kind.file,
        kind.line,
        text,
        request_id=request_id,
        model=model,
        version=version,
        fields=fields,
    )


def _text(fields: Mapping[str, str | float], model: str, version: str, request_id: str) -> str:
    call = " ".join(str(fields[name]) for name in ("method", "route") if fields.get(name))
    text = f"{call or 'request'}: {fields['status']}"
    if "duration_ms" in fields:
        text += f" after {fields['duration_ms']:.3f} ms"
    text += f", client {fields['client']}"
    if model:
        text += f", model '{model}'"
    if version:
        text += f" version {version}"
    if request_id:
        text += f", id '{request_id}'"
    if "error" in fields:
        text += f": {fields['error']}"
    return text


def _status(kind: LineKind) -> str:
    is_named = kind.file == Protocol.GRPC.value and kind.line < len(_GRPC_NAMES)
    return _GRPC_NAMES[kind.line] if is_named else str(kind.line)
