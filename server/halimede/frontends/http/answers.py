"""What the handlers of inference requests have in common: errors as answers, and what is too long for one step."""

from halimede.core.config.model_view import ModelView
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse, ParameterValue
from halimede.core.wire.forwarding import Forwarding
from halimede.core.wire.http_control import error_json
from halimede.core.wire.status_map import HTTP_STATUS
from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.framing import Head
from halimede.frontends.http.outbox import JSON, RETRY_LATER

IN_STEPS_ABOVE = 64 << 10
"""JSON of more bytes than this is read, and tensors of more bytes are written as JSON, in steps."""

Parameters = dict[str, ParameterValue]


def respond_error(exchange: Exchange, error: InferenceError, fields: bytes = b"") -> None:
    """Answer with an error's status and text."""
    exchange.respond(HTTP_STATUS[error.code], JSON + fields, (error_json(error.message),))


def respond_infer_error(exchange: Exchange, error: InferenceError) -> None:
    """As `respond_error`, to a client that may try again."""
    respond_error(exchange, error, retry_fields(error))


def retry_fields(error: InferenceError) -> bytes:
    """The header line `Retry-After`, if a later try may succeed."""
    return RETRY_LATER if error.code is ErrorCode.UNAVAILABLE else b""


def is_decoupled(view: ModelView) -> bool:
    """Whether a request to the model may have any number of answers."""
    policy = view.config.model_transaction_policy
    return policy is not None and policy.decoupled


def size_of(response: InferenceResponse) -> int:
    """Bytes of its outputs."""
    return sum(len(output.data) for output in response.outputs)


def forwarded(forwarding: Forwarding, head: Head) -> Parameters:
    """The parameters that a request's headers bring."""
    sent = ((name.decode("latin-1"), _text(value)) for name, value in head.sent_headers.items())
    return forwarding.parameters(sent)


def add_forwarded(request: InferenceRequest, parameters: Parameters) -> None:
    """Add the parameters from headers to a request; those of its body take precedence."""
    request.parameters = {**parameters, **request.parameters}


def _text(value: bytes) -> str:
    """A header's value: UTF-8, which clients send, else ISO 8859-1, as the older standard says."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
