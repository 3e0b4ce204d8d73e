"""POST …/infer: decode, pass to the server, encode, answer. Small requests in plain calls, large ones in steps."""

from collections.abc import Callable, Sequence
from functools import partial

from halimede.core.config.check_request import RequestChecker
from halimede.core.config.model_view import ModelView
from halimede.core.types import Buffer, InferenceError, InferenceResponse, internal, unsupported
from halimede.core.wire.destinations import Destinations
from halimede.core.wire.forwarding import Forwarding
from halimede.core.wire.http_request import (
    EMPTY_FINAL,
    DecodedInfer,
    InferDecoder,
    decode_infer_steps,
    parse_header_length,
    reserved_parameter,
)
from halimede.core.wire.http_response import encode_infer, encode_infer_steps
from halimede.core.wire.sse import accepts_events, encode_event_steps, json_only
from halimede.core.wire.steps import Steps
from halimede.facade.lookup import ModelLookup
from halimede.facade.server import Server
from halimede.frontends.finding import wait_for_model
from halimede.frontends.http.answers import (
    IN_STEPS_ABOVE,
    Parameters,
    add_forwarded,
    forwarded,
    respond_error,
    respond_infer_error,
)
from halimede.frontends.http.compression import CODINGS, IDENTITY, choose_coding, decompress_steps, encode_steps
from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.outbox import JSON
from halimede.frontends.http.sse import EventCall
from halimede.frontends.steps import StepQueue

_NO_CODING = ("", IDENTITY)
_SUPPORTED_CODINGS = b"Accept-Encoding: gzip, deflate\r\n"


class InferHandler:
    """Serves inference for complete requests."""

    def __init__(
        self, server: Server, steps: StepQueue, *, max_input_size: int, forward: Forwarding | None = None
    ) -> None:
        self.server = server
        self.steps = steps
        self._max_input_size = max_input_size
        self._forward = forward
        self._decoders: dict[tuple[str, str], InferDecoder] = {}

    def handle(self, exchange: Exchange, model: str, version: str) -> None:
        """Start an inference; it answers the exchange, now or later."""
        try:
            view = self.server.model(model, version)
            if isinstance(view, ModelLookup):
                begin = partial(self._begin, exchange, model, version)
                wait_for_model(view, exchange, begin, partial(respond_infer_error, exchange))
            else:
                self._begin(exchange, model, version, view)
        except InferenceError as error:
            respond_infer_error(exchange, error)

    def _begin(self, exchange: Exchange, model: str, version: str, view: ModelView) -> None:
        """Decode and start the inference. InferenceError; the order, which decides which of several errors a client
        sees, is Triton's."""
        exchange.model = model
        headers = exchange.head.headers
        accept = headers.get(b"accept")
        streams = accept is not None and b"event" in accept.lower() and accepts_events(accept.decode("latin-1"))
        policy = view.config.model_transaction_policy
        if policy is not None and policy.decoupled and not streams:
            raise unsupported(
                "HTTP end point doesn't support models with decoupled transaction policy; use generate_stream, or"
                " send the header 'Accept: text/event-stream'"
            )
        parameters = None if self._forward is None else forwarded(self._forward, exchange.head)
        infer = self._stream if streams else self._infer
        length = headers.get(b"inference-header-content-length")
        coding = headers.get(b"content-encoding")
        if coding is not None and (name := coding.strip().lower().decode("latin-1")) not in _NO_CODING:
            self._decode_in_steps(exchange, view, infer, parameters, version, name, length)
            return
        body = exchange.body
        header_length = _header_length(length, body)
        if (len(body) if header_length is None else header_length) > IN_STEPS_ABOVE:
            self._decode_in_steps(exchange, view, infer, parameters, version, IDENTITY, length)
            return
        decoder = self._decoders.get((model, version))
        if decoder is None or decoder.view is not view:
            decoder = self._new_decoder(view, version)
        infer(exchange, view, parameters, decoder.decode(body, header_length))

    def _decode_in_steps(
        self,
        exchange: Exchange,
        view: ModelView,
        infer: Callable[[Exchange, ModelView, Parameters | None, DecodedInfer], None],
        parameters: Parameters | None,
        version: str,
        coding: str,
        length: bytes | None,
    ) -> None:
        if coding not in CODINGS:
            error = unsupported("Unsupported compression type")
            respond_error(exchange, error, _SUPPORTED_CODINGS)
            return
        self.steps.run(
            exchange,
            self._decode_steps(exchange.body, view, version, coding, length),
            partial(infer, exchange, view, parameters),
            partial(respond_infer_error, exchange),
        )

    def _decode_steps(
        self, body: Buffer, view: ModelView, version: str, coding: str, length: bytes | None
    ) -> Steps[DecodedInfer]:
        if coding != IDENTITY:
            body = yield from decompress_steps(body, coding, self._max_input_size)
        checker = RequestChecker(view.config)
        return (yield from decode_infer_steps(view, body, _header_length(length, body), version, checker))

    def _new_decoder(self, view: ModelView, version: str) -> InferDecoder:
        """The decoder of the model that this path names now: a reload creates another view. One per path."""
        decoder = self._decoders[view.name, version] = InferDecoder(view, version)
        return decoder

    def _infer(self, exchange: Exchange, view: ModelView, parameters: Parameters | None, decoded: DecodedInfer) -> None:
        request = decoded.request
        if request.parameters and EMPTY_FINAL in request.parameters:
            respond_infer_error(exchange, reserved_parameter())
            return
        if parameters:
            add_forwarded(request, parameters)
        exchange.request_id = request.id
        call = _Call(self, exchange, view, decoded.destinations)
        call.ticket = self.server.infer(request, call.take_response)
        if not call.is_over:
            exchange.on_gone = call.cancel

    def _stream(
        self, exchange: Exchange, view: ModelView, parameters: Parameters | None, decoded: DecodedInfer
    ) -> None:
        """Like `_infer`, for a client that asks for the answers as events."""
        request = decoded.request
        sends_empty_final = bool(request.parameters.pop(EMPTY_FINAL, False))
        if parameters:
            add_forwarded(request, parameters)
        destinations = json_only(decoded.destinations)
        EventCall(
            self.server,
            self.steps,
            exchange,
            lambda response: encode_event_steps(response, destinations, view, marks_final=sends_empty_final),
            is_decoupled=view.config.is_decoupled,
            sends_empty_final=sends_empty_final,
        ).start(request)


def _header_length(text: bytes | None, body: Buffer) -> int | None:
    if text is None:
        return None
    known = _SMALL_NUMBERS.get(text)
    if known is not None and known <= len(body):
        return known
    return parse_header_length(text.decode("latin-1"), len(body))


_SMALL_NUMBERS = {b"%d" % number: number for number in range(1024)}
"""The usual values are looked up, not parsed."""


class _Call:
    """One inference in progress."""

    __slots__ = ("destinations", "early", "exchange", "handler", "is_over", "ticket", "view")

    def __init__(self, handler: InferHandler, exchange: Exchange, view: ModelView, destinations: Destinations) -> None:
        self.handler = handler
        self.exchange = exchange
        self.view = view
        self.destinations = destinations
        self.ticket = 0
        self.early = 0
        self.is_over = False

    def cancel(self) -> None:
        self.handler.server.cancel(self.ticket)

    def take_response(self, response: InferenceResponse) -> None:
        """Answer with the final response. The exchange drops it if the client has disconnected."""
        if not response.final:
            # The model was reloaded as a decoupled one meanwhile; all its answers are sent when the final one comes.
            self.early += 1
            self.handler.server.acknowledge(self.ticket)
            return
        self.is_over = True
        exchange = self.exchange
        exchange.version = response.model_version
        try:
            if self.early:
                raise internal(f"expected a single response, got {self.early + 1}")
            if response.error is not None:
                respond_infer_error(exchange, response.error)
                return
            accepted = exchange.head.headers.get(b"accept-encoding")
            coding = IDENTITY if accepted is None else choose_coding(accepted)
            outputs = response.outputs
            if coding == IDENTITY and (
                (len(outputs) == 1 and len(outputs[0].data) <= IN_STEPS_ABOVE) or self._is_quick(response)
            ):
                encoded = encode_infer(response, self.destinations, self.view)
                self._send(encoded.chunks, encoded.json_length)
                return
            exchange.on_gone = None  # The inference has ended: there is nothing to cancel.
            on_error = partial(respond_infer_error, exchange)
            self.handler.steps.run(exchange, self._encode(response, coding), lambda _: None, on_error)
        except InferenceError as error:
            respond_infer_error(exchange, error)
        except Exception as error:  # noqa: BLE001 -- it must fail this request, not the batch that it was part of
            exchange.break_off(error)

    def _is_quick(self, response: InferenceResponse) -> bool:
        """Whether the answer takes little time to write: numbers in JSON take time, binary tensors do not."""
        size = 0
        for output in response.outputs:
            size += len(output.data)
        if size <= IN_STEPS_ABOVE:
            return True
        destinations = self.destinations
        written = (len(output.data) for output in response.outputs if not destinations.of(output.name).binary)
        return sum(written) <= IN_STEPS_ABOVE

    def _encode(self, response: InferenceResponse, coding: str) -> Steps[None]:
        encoded = yield from encode_infer_steps(response, self.destinations, self.view)
        if coding != IDENTITY:
            chunks = yield from encode_steps(encoded.chunks, coding)
            if chunks is not None:
                self._send(chunks, encoded.json_length, b"Content-Encoding: %b\r\n" % coding.encode())
                return
        self._send(encoded.chunks, encoded.json_length)

    def _send(self, chunks: Sequence[Buffer], json_length: int | None, fields: bytes = b"") -> None:
        if json_length is None:
            fields = JSON + fields
        else:
            fields = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n%b" % (
                json_length,
                fields,
            )
        self.exchange.respond(200, fields, chunks)
