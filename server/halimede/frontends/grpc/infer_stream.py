"""ModelStreamInfer: a stream of requests in, a stream of responses out.

Responses of decoupled models are sent as they arrive, all others in the order of their requests. A failed request gets
a message with its error and the stream continues, unless the call's metadata asks for the real status: then the first
error ends the stream. However it ends, requests that are still executing are cancelled.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

from halimede.core.config.check_request import RequestChecker
from halimede.core.config.model_view import ModelView
from halimede.core.types import Buffer, InferenceError, InferenceResponse
from halimede.core.wire.grpc_coding import encode_steps
from halimede.core.wire.grpc_messages import Message
from halimede.core.wire.grpc_request import InferCall, InferMessage
from halimede.core.wire.grpc_response import encode_empty_final, encode_stream_error, encode_stream_infer
from halimede.core.wire.status_map import GRPC_STATUS
from halimede.core.wire.steps import run
from halimede.frontends.finding import find_model
from halimede.frontends.grpc.call import Call, Holding, Noted, crashed, shutting_down
from halimede.frontends.grpc.infer import IN_STEPS_ABOVE, InferContext, add_forwarded
from halimede.frontends.stream_session import StreamAnswer, StreamedRequest, StreamLimits, StreamSession

MAX_UNANSWERED = 256
"""Maximum number of unanswered requests plus unsent responses of one stream; at the limit it is not read further."""

MAX_UNSENT_BYTES = 16 << 20
"""Maximum size of unsent responses of one stream; at the limit no more requests are read."""

MAX_STREAMED_BYTES = 256 << 20
"""Maximum size of unsent responses of one stream when a decoupled model adds to them: above it the stream is ended.
Each model waits for its client long before, but a stream may have many requests, with some responses ahead for each."""


@dataclass(slots=True)
class _Answer:
    """A message to send, or the error to end the stream with. `held` is given back when the message is sent."""

    parts: list[Buffer]
    error: InferenceError | None = None
    held: Holding | None = None


@dataclass(slots=True, eq=False)
class _Request:
    """One request of a stream. `error` is its first one, for the access log. `held` is given back when it ends."""

    noted: Noted
    slot: StreamedRequest[_Answer]
    held: Holding
    error: InferenceError | None = None


class InferStreams:
    """The method ModelStreamInfer."""

    def __init__(self, context: InferContext, max_held_bytes: int, max_unanswered: int = MAX_UNANSWERED) -> None:
        """A stream with more than `max_held_bytes` of requests in progress is not read further."""
        self._context = context
        self._max_held_bytes = max_held_bytes
        self._limits = StreamLimits(max_unanswered, MAX_UNSENT_BYTES, MAX_STREAMED_BYTES)

    def begin(self, call: Call) -> None:
        _InferStream(self._context, call, self._limits, self._max_held_bytes)


class _InferStream:
    """One call of ModelStreamInfer. The call has its callbacks until it ends."""

    def __init__(self, context: InferContext, call: Call, limits: StreamLimits, max_held_bytes: int) -> None:
        self._context = context
        self._call = call
        self._max_held_bytes = max_held_bytes
        self._forwarded = context.forwarded(call)
        self._session: StreamSession[_Answer] = StreamSession(context.server, limits)
        self._errors_end_it = ("triton_grpc_error", "true") in call.head.metadata
        self._reading: Holding | None = None
        """A message is opened or decoded in steps."""
        self._sending: Holding | None = None
        """A message is compressed in steps."""
        self._is_read = False
        self._farewell: InferenceError | None = None
        call.on_message = self._take
        call.on_half_closed = self._on_half_closed
        call.on_room = self._go_on
        call.on_drain = self._drain
        call.on_gone = self._leave

    # Requests.

    def _take(self, message: Message) -> None:
        self._reading = held = Holding(self._call, message.take_held())
        self._context.open(self._call, held, message, partial(self._read, held), self._end)
        if self._reading is not None:
            self._call.pause()

    def _read(self, held: Holding, content: Buffer) -> None:
        context = self._context
        try:
            message = context.reader.read(content)
        except InferenceError as error:
            self._end(error)
            return
        name, version = message.model_name, message.model_version
        noted = Noted(monotonic(), name, version, message.id)
        begin, on_error = partial(self._begin, noted, held, message), partial(self._refuse, noted, held, False)
        find_model(context.server, held, name, version, begin, on_error)

    def _begin(self, noted: Noted, held: Holding, message: InferMessage, view: ModelView) -> None:
        context = self._context
        noted.found = True
        decoupled = view.config.is_decoupled
        on_error = partial(self._refuse, noted, held, decoupled)
        if message.in_steps:
            accept = partial(self._accept, noted, held, view)
            context.steps.run(held, message.decode_steps(RequestChecker(view.config)), accept, on_error)
            return
        try:
            decoded = message.decode()
        except InferenceError as error:
            on_error(error)
        else:
            self._accept(noted, held, view, decoded)

    def _accept(self, noted: Noted, held: Holding, view: ModelView, decoded: InferCall) -> None:
        request = self._open(noted, held, view.config.is_decoupled)
        if self._forwarded:
            add_forwarded(decoded.request, self._forwarded)
        ticket = self._context.server.infer(decoded.request, partial(self._on_response, request, view, decoded))
        self._session.started(request.slot, ticket)
        self._acknowledge()
        self._has_read()

    def _refuse(self, noted: Noted, held: Holding, decoupled: bool, error: InferenceError) -> None:
        request = self._open(noted, held, decoupled)
        self._put(request, self._failure(request, error), is_final=True)
        self._has_read()

    def _open(self, noted: Noted, held: Holding, decoupled: bool) -> _Request:
        return _Request(noted, self._session.open(is_ordered=not decoupled), held)

    def _has_read(self) -> None:
        """A message is accepted: the next one may come unless too many are unanswered."""
        self._reading = None
        if self._is_full:
            self._call.pause()
        else:
            self._call.resume()

    @property
    def _is_full(self) -> bool:
        # A message that waits counts too. Without a request in progress nothing else would begin it.
        session = self._session
        return session.is_full or (self._call.held_bytes > self._max_held_bytes and not session.is_idle)

    def _on_half_closed(self) -> None:
        self._is_read = True
        self._end_if_idle()

    def _drain(self) -> None:
        """Requests that were read are still answered."""
        self._call.on_message = None
        self._farewell = shutting_down()
        self._is_read = True
        self._end_if_idle()

    # Responses.

    def _on_response(self, request: _Request, view: ModelView, call: InferCall, response: InferenceResponse) -> None:
        if not self._call.is_open:
            if response.final:
                self._session.finished(request.slot)
            return
        try:
            self._put(request, self._encode(request, view, call, response), is_final=response.final)
        except InferenceError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 -- it must fail this call, not the batch that it was part of
            self._end(crashed("ModelStreamInfer", error))

    def _encode(
        self, request: _Request, view: ModelView, call: InferCall, response: InferenceResponse
    ) -> _Answer | None:
        executed_by = response.model_name if response.model_version else ""
        request.noted.version = response.model_version or request.noted.version
        if response.error is not None:
            return self._failure(request, response.error, executed_by, response.final)
        try:
            if not request.slot.is_ordered and response.final and response.is_empty:
                return _Answer(encode_empty_final(response)) if call.wants_empty_final else None
            return _Answer(encode_stream_infer(response, view, call.destinations))
        except InferenceError as error:
            return self._failure(request, error, executed_by, response.final)
        except Exception as error:  # noqa: BLE001 -- the stream continues
            return self._failure(request, crashed("ModelStreamInfer", error), executed_by, response.final)

    def _failure(self, request: _Request, error: InferenceError, executed_by: str = "", final: bool = True) -> _Answer:
        request.error = request.error or error
        if self._errors_end_it:
            return _Answer([], error)
        return _Answer(encode_stream_error(request.noted.request_id, error, executed_by, final=final))

    def _put(self, request: _Request, answer: _Answer | None, *, is_final: bool) -> None:
        """Queue an answer (None: no message). CANCELLED where the client has left too much unread."""
        slot, session = request.slot, self._session
        if is_final:
            self._note(request)
        if answer is not None:
            answer.held = request.held if is_final else None
            session.put(slot, answer, sum(map(len, answer.parts)), is_final=is_final)
        elif is_final:
            request.held.release()
            session.put_end(slot)
        self._go_on()

    def _note(self, request: _Request) -> None:
        error = request.error
        status, text = (0, "") if error is None else (GRPC_STATUS[error.code], error.message)
        self._call.note(request.noted, status, text)

    def _go_on(self) -> None:
        """Send what waits while there is room, then read on."""
        session, call = self._session, self._call
        while session.unsent and call.is_open and call.has_room and self._sending is None:
            answer = session.take()
            if answer.content.error is not None:
                self._end(answer.content.error)
                return
            if not call.compresses:
                self._send(answer, answer.content.parts, is_compressed=False)
            elif answer.size_bytes <= IN_STEPS_ABOVE:
                parts, is_compressed = run(encode_steps(answer.content.parts, call.encoding))
                self._send(answer, parts, is_compressed=is_compressed)
            else:
                self._sending = held = Holding(call)
                steps = encode_steps(answer.content.parts, call.encoding)
                self._context.steps.run(held, steps, partial(self._compressed, answer, held), self._end)
        if not call.is_open:
            return
        call.wait(session.unsent_bytes)
        self._acknowledge()
        if not self._is_full and self._reading is None:
            call.resume()
        self._end_if_idle()

    def _acknowledge(self) -> None:
        if self._session.unacknowledged and self._call.has_room:
            self._session.acknowledge()

    def _compressed(self, answer: StreamAnswer[_Answer], held: Holding, message: tuple[Sequence[Buffer], bool]) -> None:
        self._sending = None
        self._send(answer, *message)
        held.release()
        self._go_on()

    def _send(self, answer: StreamAnswer[_Answer], parts: Sequence[Buffer], is_compressed: bool) -> None:
        call = self._call
        call.send(parts, sum(map(len, parts)), is_compressed=is_compressed)
        if answer.content.held is not None:
            answer.content.held.release()
        self._session.sent(answer, has_room=call.has_room)

    # The end.

    def _end_if_idle(self) -> None:
        is_working = self._reading is not None or self._sending is not None
        if self._is_read and not is_working and self._session.is_idle:
            self._end(self._farewell)

    def _end(self, error: InferenceError | None) -> None:
        if not self._call.is_open:
            return
        self._session.end()
        self._leave_steps()
        # Not at once, because the server may be delivering an answer now; but before the client sees the end.
        asyncio.get_running_loop().call_soon(self._session.cancel)
        if error is None:
            self._call.finish()
        else:
            self._call.fail(error)

    def _leave(self) -> None:
        """The client has left."""
        self._session.end()
        self._leave_steps()
        self._session.cancel()

    def _leave_steps(self) -> None:
        """Steps that wait for a permit are dropped."""
        for held in (self._reading, self._sending):
            if held is not None:
                held.leave()
