"""POST …/generate and …/generate_stream: JSON objects by the model's own names, with one answer or events."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from halimede.core.config.model_view import ModelView
from halimede.core.types import Buffer, InferenceError, InferenceRequest, InferenceResponse, invalid
from halimede.core.wire.forwarding import Forwarding
from halimede.core.wire.generate import (
    LOAD_FORMATS,
    NOT_ONE_RESPONSE,
    decode_generate,
    decode_generate_steps,
    encode_generate_steps,
    load_metrics,
)
from halimede.core.wire.steps import run
from halimede.facade.server import Server
from halimede.frontends.finding import find_model
from halimede.frontends.http.answers import (
    IN_STEPS_ABOVE,
    Parameters,
    add_forwarded,
    forwarded,
    respond_infer_error,
    size_of,
)
from halimede.frontends.http.compression import IDENTITY
from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.outbox import JSON
from halimede.frontends.http.sse import EventCall
from halimede.frontends.steps import StepQueue


class GenerateHandler:
    """Serves both for complete requests."""

    def __init__(
        self,
        server: Server,
        steps: StepQueue,
        *,
        forward: Forwarding | None = None,
        spawn: Callable[[Exchange, Coroutine[Any, Any, None]], None],
    ) -> None:
        """`spawn` runs a coroutine for an exchange."""
        self.server = server
        self.steps = steps
        self._spawn = spawn
        self._forward = forward

    def handle(self, exchange: Exchange, model: str, version: str, *, streams: bool) -> None:
        """Start an inference; it answers the exchange, now or later, once or as events."""
        begin, on_error = partial(self._begin, exchange, version, streams), partial(respond_infer_error, exchange)
        find_model(self.server, exchange, model, version, begin, on_error)

    def _begin(self, exchange: Exchange, version: str, streams: bool, view: ModelView) -> None:
        """Decode and start the inference. InferenceError."""
        exchange.model = view.name
        coding = exchange.head.headers.get(b"content-encoding", b"").strip().lower()
        if coding not in {b"", IDENTITY.encode()}:
            raise invalid(f"Unsupported content-encoding, only '{IDENTITY}' is supported.")
        parameters = {} if self._forward is None else forwarded(self._forward, exchange.head)
        infer = partial(self._infer, exchange, view, parameters, streams)
        if len(exchange.body) > IN_STEPS_ABOVE:
            steps = decode_generate_steps(view, exchange.body, version)
            self.steps.run(exchange, steps, infer, partial(respond_infer_error, exchange))
        else:
            infer(decode_generate(view, exchange.body, version))

    def _infer(
        self, exchange: Exchange, view: ModelView, parameters: Parameters, streams: bool, request: InferenceRequest
    ) -> None:
        if parameters:
            add_forwarded(request, parameters)
        if not streams:
            _SoleCall(self, exchange, view).start(request)
            return
        EventCall(
            self.server,
            self.steps,
            exchange,
            encode_generate_steps,
            is_decoupled=view.config.is_decoupled,
            sends_errors=True,
            find_fields=partial(self.find_load_fields, exchange, view.name),
        ).start(request)

    def find_load_fields(self, exchange: Exchange, model: str, use: Callable[[bytes], None]) -> None:
        """Call `use` with the header line that has the KV cache metrics for a load balancer, now or later. It is empty
        unless the request asks for them and the model reports them."""
        form = exchange.head.headers.get(b"endpoint-load-metrics-format", b"")
        if form in LOAD_FORMATS:
            self._spawn(exchange, self._ask_load(form, model, use))
        else:
            use(b"")

    async def _ask_load(self, form: bytes, model: str, use: Callable[[bytes], None]) -> None:
        try:
            cache = await self.server.kv_cache(model)
        except InferenceError:
            cache = None  # The answer is more than its metrics.
        use(b"" if cache is None else b"endpoint-load-metrics: %b\r\n" % load_metrics(form, cache))


class _SoleCall:
    """One inference that must have exactly one answer, also of a decoupled model."""

    __slots__ = ("answer", "exchange", "handler", "is_over", "ticket", "view")

    def __init__(self, handler: GenerateHandler, exchange: Exchange, view: ModelView) -> None:
        self.handler = handler
        self.exchange = exchange
        self.view = view
        self.ticket = 0
        self.answer: InferenceResponse | None = None
        self.is_over = False

    def start(self, request: InferenceRequest) -> None:
        self.exchange.request_id = request.id
        self.ticket = self.handler.server.infer(request, self.take_response)
        if not self.is_over:
            self.exchange.on_gone = self.cancel

    def cancel(self) -> None:
        self.is_over = True
        self.handler.server.cancel(self.ticket)

    def take_response(self, response: InferenceResponse) -> None:
        """Keep the answer until the request has ended without another one."""
        if self.is_over:
            return
        self.exchange.version = response.model_version
        if not response.final:
            self.handler.server.acknowledge(self.ticket)
        # An empty answer is the answer of a model that is not decoupled, and the end of a decoupled model's answers.
        is_end = response.final and response.is_empty and (self.view.config.is_decoupled or self.answer is not None)
        if response.error is not None:
            self._fail(response.error, response.final)
        elif is_end and self.answer is not None:
            self._respond(self.answer)
        elif is_end or self.answer is not None:
            self._fail(NOT_ONE_RESPONSE, response.final)
        elif response.final:
            self._respond(response)
        else:
            self.answer = response

    def _fail(self, error: InferenceError, is_final: bool) -> None:
        self.is_over = True
        self.answer = self.exchange.on_gone = None
        respond_infer_error(self.exchange, error)
        if not is_final:
            # Later: the server is delivering an answer now.
            asyncio.get_running_loop().call_soon(self.cancel)

    def _respond(self, response: InferenceResponse) -> None:
        self.is_over = True
        self.exchange.on_gone = None
        on_error = partial(respond_infer_error, self.exchange)
        try:
            steps = encode_generate_steps(response)
            if size_of(response) > IN_STEPS_ABOVE:
                self.handler.steps.run(self.exchange, steps, self._send, on_error)
                return
            self._send(run(steps))
        except InferenceError as error:
            on_error(error)
        except Exception as error:  # noqa: BLE001 -- it must fail this request, not the batch that it was part of
            self.exchange.break_off(error)

    def _send(self, body: list[Buffer]) -> None:
        exchange = self.exchange
        self.handler.find_load_fields(
            exchange, self.view.name, lambda fields: exchange.respond(200, JSON + fields, body)
        )
