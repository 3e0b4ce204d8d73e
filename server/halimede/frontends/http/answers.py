"""Shared by the handlers of inference requests: errors as answers, headers as parameters, and the size of one step."""

from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse, ParameterValue
from halimede.core.wire.forwarding import Forwarding
from halimede.core.wire.http_control import error_json
from halimede.core.wire.status_map import HTTP_STATUS
from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.framing import Head
from halimede.frontends.http.outbox import JSON, RETRY_LATER

IN_STEPS_ABOVE = 64 << 10
"""Larger JSON is read in steps, and larger tensors are written as JSON in steps."""

Parameters = dict[str, ParameterValue]


def respond_error(exchange: Exchange, error: InferenceError, fields: bytes = b"") -> None:
    """Answer with an error's status and text."""
    exchange.respond(HTTP_STATUS[error.code], JSON + fields, (error_json(error.message),))


def respond_infer_error(exchange: Exchange, error: InferenceError) -> None:
    """Like `respond_error`, for a request that the client may retry."""
    respond_error(exchange, error, retry_fields(error))


def retry_fields(error: InferenceError) -> bytes:
    """The header line that asks the client to retry; "" for an error that a retry does not help."""
    return RETRY_LATER if error.code is ErrorCode.UNAVAILABLE else b""


def size_of(response: InferenceResponse) -> int:
    """The size of its outputs in bytes."""
    return sum(len(output.data) for output in response.outputs)


def forwarded(forwarding: Forwarding, head: Head) -> Parameters:
    """The request parameters in its headers."""
    sent = ((name.decode("latin-1"), _text(value)) for name, value in head.sent_headers.items())
    return forwarding.parameters(sent)


def add_forwarded(request: InferenceRequest, parameters: Parameters) -> None:
    """Add the parameters of the headers to a request. Parameters of the body take precedence."""
    request.parameters = {**parameters, **request.parameters}


def _text(value: bytes) -> str:
    """A header's value as text: UTF-8, which clients send, else Latin-1, which the standard once required."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
