"""ModelInfer: one request, one response. The usual call has no task, no future and no step of its own."""

from collections.abc import Callable
from functools import partial

from halimede.core.config.check_request import RequestChecker
from halimede.core.config.model_view import ModelView
from halimede.core.types import (
    Buffer,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    ParameterValue,
    internal,
    invalid,
    unsupported,
)
from halimede.core.wire.destinations import ALL_BINARY, Destinations
from halimede.core.wire.forwarding import Forwarding
from halimede.core.wire.grpc_coding import encode_steps
from halimede.core.wire.grpc_messages import Message
from halimede.core.wire.grpc_reader import InferReader
from halimede.core.wire.grpc_request import InferCall, InferMessage
from halimede.core.wire.grpc_response import encode_infer, encode_infer_steps
from halimede.core.wire.steps import Steps
from halimede.facade.lookup import ModelLookup
from halimede.facade.server import Server
from halimede.frontends.finding import wait_for_model
from halimede.frontends.grpc.call import Call, Holding
from halimede.frontends.grpc.opening import open_steps
from halimede.frontends.steps import StepQueue

IN_STEPS_ABOVE = 256 << 10
"""Answers with more bytes are classified, or compressed, in steps."""

Parameters = dict[str, ParameterValue]


class InferContext:
    """What the two inference methods share: the server, and how requests are read."""

    def __init__(self, server: Server, forward: Forwarding | None = None) -> None:
        self.server = server
        self.reader = InferReader()
        self.steps = StepQueue()
        self._forward = forward

    def forwarded(self, call: Call) -> Parameters | None:
        """The parameters from a call's metadata. INVALID_ARG for a name that Triton reserves."""
        return None if self._forward is None else self._forward.parameters(call.head.metadata)

    def open(
        self,
        call: Call,
        client: Call | Holding,
        message: Message,
        on_content: Callable[[Buffer], None],
        on_error: Callable[[InferenceError], None],
    ) -> bool:
        """Pass on the content of a message; at once, and returns True, if it is small or not compressed.

        `client` counts what is inflated.
        """
        if not message.is_compressed:
            on_content(message.content)
            return True
        steps = open_steps(call, message)
        try:
            client.count(next(steps))
        except StopIteration as done:
            on_content(done.value)
            return True
        except InferenceError as error:
            on_error(error)
            return True
        self.steps.run(client, steps, on_content, on_error)
        return False

    def begin_unary(self, call: Call) -> None:
        """Begin a call of ModelInfer."""
        _UnaryInfer(self, call)


class _UnaryInfer:
    """One call of ModelInfer. The call has its callbacks until it ends."""

    __slots__ = ("_call", "_context", "_destinations", "_early", "_forwarded", "_ticket", "_view")

    def __init__(self, context: InferContext, call: Call) -> None:
        self._context = context
        self._call = call
        self._forwarded = context.forwarded(call)
        self._ticket = 0
        self._early = 0
        self._view: ModelView
        self._destinations: Destinations
        call.on_message = self._take
        call.on_half_closed = self._fail_without_message

    def _fail_without_message(self) -> None:
        raise invalid("the call ended before a whole request came")

    def _take(self, message: Message) -> None:
        # The client may send no second message; if it does, it is not read.
        self._call.on_message = self._call.on_half_closed = None
        message.held_bytes = 0  # The call gives them back at its end.
        self._context.open(self._call, self._call, message, self._read, self._call.fail)

    def _read(self, content: Buffer) -> None:
        call, context = self._call, self._context
        try:
            message = context.reader.read(content)
            noted = call.noted
            noted.model, noted.version, noted.request_id = message.model_name, message.model_version, message.id
            view = context.server.model(message.model_name, message.model_version)
            if isinstance(view, ModelLookup):
                wait_for_model(view, call, partial(self._begin, message), call.fail)
            else:
                self._begin(message, view)
        except InferenceError as error:
            call.fail(error)

    def _begin(self, message: InferMessage, view: ModelView) -> None:
        """Decode and start the inference. InferenceError."""
        call, context = self._call, self._context
        self._view = view
        call.noted.found = True
        if view.config.is_decoupled:
            raise unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        if message.in_steps:
            context.steps.run(call, message.decode_steps(RequestChecker(view.config)), self._infer, call.fail)
        else:
            self._infer(message.decode())

    def _infer(self, decoded: InferCall) -> None:
        request = decoded.request
        self._destinations = decoded.destinations
        if self._forwarded:
            add_forwarded(request, self._forwarded)
        call = self._call
        self._ticket = self._context.server.infer(request, self._take_response)
        if call.is_open:
            call.on_gone = self._cancel

    def _cancel(self) -> None:
        self._context.server.cancel(self._ticket)

    def _take_response(self, response: InferenceResponse) -> None:
        """Answer with the final response. The call drops it if the client has left."""
        if not response.final:
            # The model was reloaded as a decoupled one meanwhile; the call fails when the final one comes.
            self._early += 1
            self._context.server.acknowledge(self._ticket)
            return
        call = self._call
        if response.model_version:
            call.noted.version = response.model_version
        try:
            if self._early:
                raise internal("expected a single response, got more")
            if response.error is not None:
                call.fail(response.error)
                return
            is_small = self._destinations is ALL_BINARY or size_of(response) <= IN_STEPS_ABOVE
            if is_small and not call.compresses:
                parts = encode_infer(response, self._view, self._destinations)
                call.answer(parts, len(parts[0]) if len(parts) == 1 else sum(map(len, parts)))
                return
            call.on_gone = None  # The inference has ended: there is nothing to cancel.
            self._context.steps.run(call, self._encode(response), lambda _: None, call.fail)
        except InferenceError as error:
            call.fail(error)
        except Exception as error:  # noqa: BLE001 -- it must fail this call, not the batch that it was part of
            call.break_off(error)

    def _encode(self, response: InferenceResponse) -> Steps[None]:
        parts = yield from encode_infer_steps(response, self._view, self._destinations)
        if self._call.compresses:
            coded, is_compressed = yield from encode_steps(parts, self._call.encoding)
            self._call.answer(coded, sum(map(len, coded)), is_compressed=is_compressed)
        else:
            self._call.answer(parts, sum(map(len, parts)))


def add_forwarded(request: InferenceRequest, forwarded: Parameters) -> None:
    """Add parameters from metadata. Those of the message take precedence."""
    request.parameters = {**forwarded, **request.parameters}


def size_of(response: InferenceResponse) -> int:
    return sum([len(output.data) for output in response.outputs])
