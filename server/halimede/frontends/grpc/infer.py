"""The inference RPCs, ModelInfer and ModelStreamInfer."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import grpc  # type: ignore[import-untyped]  # grpcio ships no types

from halimede.core.config.model_view import ModelView
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse, ParameterValue
from halimede.core.wire.destinations import ALL_BINARY, Destinations
from halimede.core.wire.forwarding import Forwarding
from halimede.core.wire.grpc_infer import (
    InferCall,
    decode_infer,
    encode_empty_final,
    encode_infer,
    encode_stream_error,
    encode_stream_infer,
)
from halimede.core.wire.protocol import ProtoMessage
from halimede.core.wire.status_map import GRPC_STATUS
from halimede.frontends.grpc.call import Context, Drain, LoggedCall, abort, internal_error, shutting_down, write
from halimede.frontends.grpc.messages import MAX_ON_LOOP_BYTES, Messages
from halimede.frontends.stream_session import StreamedRequest, StreamLimits, StreamSession
from halimede.runtime.server import Server

MAX_UNANSWERED = 256
"""Maximum number of unanswered requests plus unsent responses of one stream; at the limit it is not read further."""

MAX_UNSENT_BYTES = 128 << 20
"""Maximum size of unsent responses of one stream; at the limit no more requests are read."""

MAX_STREAMED_BYTES = 2 * MAX_UNSENT_BYTES
"""Maximum size of unsent responses of one stream when a decoupled model adds to them: above it the stream is ended.
Each model waits for its client long before, but a stream may have many requests, with some responses ahead for each."""

MAX_TYPED_ON_LOOP_BYTES = 256 << 10
"""As MAX_ON_LOOP_BYTES, for typed contents and classes: each element is converted as an object."""

Parameters = dict[str, ParameterValue]

log = logging.getLogger(__name__)


async def _decode(message: ProtoMessage, size_bytes: int) -> InferCall:
    if size_bytes > (MAX_ON_LOOP_BYTES if message.raw_input_contents else MAX_TYPED_ON_LOOP_BYTES):
        return await asyncio.to_thread(decode_infer, message)
    return decode_infer(message)


def _encode(response: InferenceResponse, view: ModelView, destinations: Destinations) -> bytes:
    return bytes(encode_infer(response, view, destinations).SerializeToString())


class InferService:
    """The handlers of the two inference RPCs over one server."""

    def __init__(
        self,
        server: Server,
        drain: Drain,
        max_message_bytes: int,
        forward: Forwarding | None = None,
        max_response_pool_size: int = MAX_UNANSWERED,
    ) -> None:
        self._server = server
        self._drain = drain
        self._messages = Messages(max_message_bytes)
        self._forward = forward
        self._max_unanswered = max_response_pool_size

    async def model_infer(self, call: LoggedCall, context: Context) -> bytes:
        """One ModelInferRequest in, one ModelInferResponse out."""
        try:
            return await self._infer(call, await self._drain.receive(context), self._forwarded(context), context)
        except InferenceError as error:
            failure = error
        except Exception:
            log.exception("ModelInfer failed")
            failure = internal_error("ModelInfer")
        return await abort(context, failure)

    def _forwarded(self, context: Context) -> Parameters:
        return {} if self._forward is None else _from_metadata(self._forward, context)

    async def _infer(self, noted: LoggedCall, raw: bytes, forwarded: Parameters, context: Context) -> bytes:
        server = self._server
        view, call = await self._read(noted, raw, context)
        # The request refers to what it needs of the message; keeping a large one would double its memory.
        del raw
        if forwarded:
            _add_forwarded(call.request, forwarded)
        answer: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()
        ticket = server.infer(call.request, partial(_resolve, answer))
        try:
            response = await answer
        except asyncio.CancelledError:
            server.cancel(ticket)
            raise
        if not response.final:
            # The model has become decoupled since the lookup.
            server.cancel(ticket)
            raise InferenceError(ErrorCode.INTERNAL, "expected a single response, got more")
        noted.version = response.model_version or noted.version
        if response.error is not None:
            raise response.error
        if sum([len(output.data) for output in response.outputs]) > (
            MAX_ON_LOOP_BYTES if call.destinations is ALL_BINARY else MAX_TYPED_ON_LOOP_BYTES
        ):
            async with self._messages.large:
                return await asyncio.to_thread(_encode, response, view, call.destinations)
        return _encode(response, view, call.destinations)

    async def _read(self, noted: LoggedCall, raw: bytes, context: Context) -> tuple[ModelView, InferCall]:
        async with self._messages.open(raw) as opened:
            message = opened.message
            noted.model, noted.version, noted.request_id = message.model_name, message.model_version, message.id
            view = self._server.model(message.model_name, message.model_version)
            noted.found = True
            if _is_decoupled(view):
                raise InferenceError(
                    ErrorCode.UNSUPPORTED, "ModelInfer RPC doesn't support models with decoupled transaction policy"
                )
            call = await _decode(message, opened.size_bytes)
        if opened.held_bytes:
            # The call is done when its response is sent.
            context.add_done_callback(partial(self._release, opened.held_bytes))
        return view, call

    def _release(self, held_bytes: int, _context: Context) -> None:
        self._messages.release(held_bytes)

    async def model_stream_infer(self, call: LoggedCall, context: Context) -> None:
        """A stream of ModelInferRequest in, a stream of ModelStreamInferResponse out."""
        try:
            forwarded = self._forwarded(context)
            stream = _InferStream(
                self._server, self._drain, call, context, self._messages, forwarded, self._max_unanswered
            )
            await stream.run()
            return
        except InferenceError as error:
            failure = error
        except Exception:
            log.exception("ModelStreamInfer failed")
            failure = internal_error("ModelStreamInfer")
        await abort(context, failure)


@dataclass(slots=True, eq=False)
class _Request:
    """One request of a stream. `error` is its first one, for the access log."""

    request_id: str
    noted: LoggedCall
    slot: "StreamedRequest[bytes | InferenceError]"
    error: InferenceError | None = None


class _InferStream:
    """One ModelStreamInfer call; its answers are messages, or the error to end the stream with.

    Responses of decoupled models are sent as they arrive, all others in the order of their requests. A failed request
    gets a message with its error and the stream continues, unless the call's metadata asks for the real status: then
    the first error ends the stream. However it ends, requests that are still executing are cancelled. All state changes
    on the loop between awaits.
    """

    def __init__(
        self,
        server: Server,
        drain: Drain,
        call: LoggedCall,
        context: Context,
        messages: Messages,
        forwarded: Parameters,
        max_unanswered: int,
    ) -> None:
        self._server = server
        self._drain = drain
        self._call = call
        self._context = context
        self._messages = messages
        self._forwarded = forwarded
        self._session: StreamSession[bytes | InferenceError] = StreamSession(
            server, StreamLimits(max_unanswered, MAX_UNSENT_BYTES, MAX_STREAMED_BYTES)
        )
        self._errors_end_it = ("triton_grpc_error", "true") in tuple(context.invocation_metadata() or ())
        self._outcome: asyncio.Future[InferenceError | None] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._held_bytes = 0
        self._is_read = False
        self._farewell: InferenceError | None = None

    async def run(self) -> None:
        """Return when the client has closed its side and all requests are answered; raise the stream's final error."""
        reading = asyncio.create_task(self._ending_on_error(self._read()))
        writing = asyncio.create_task(self._ending_on_error(self._write()))
        try:
            await asyncio.wait((self._outcome,))
            self._stop()
            reading.cancel()
            # A write that has begun must end before the status can be sent, even if the client reads slowly.
            await asyncio.wait((reading, writing))
            if (error := self._outcome.result()) is not None:
                raise error
        finally:
            self._stop()
            reading.cancel()
            writing.cancel()
            await asyncio.wait((reading, writing))
            self._release(self._held_bytes)

    def _stop(self) -> None:
        """Stop reading, executing and sending. May be called again."""
        self._outcome.cancel()
        self._session.end()
        self._session.cancel()
        self._changed.set()

    def _release(self, held_bytes: int) -> None:
        if held_bytes:
            self._held_bytes -= held_bytes
            self._messages.release(held_bytes)

    async def _ending_on_error(self, part: Coroutine[Any, Any, None]) -> None:
        try:
            await part
        except InferenceError as error:
            self._end(error)
        except Exception:
            log.exception("ModelStreamInfer failed")
            self._end(internal_error("ModelStreamInfer"))

    async def _read(self) -> None:
        try:
            async with self._drain.scope():
                while True:
                    while self._session.is_full:
                        self._room.clear()
                        await self._room.wait()
                    raw = await self._context.read()
                    if raw is grpc.aio.EOF:
                        break
                    await self._accept(raw)
                    # Release it now: it may be large, and the next one may arrive much later.
                    del raw
        except TimeoutError:
            # Draining: requests that were read are still answered.
            self._farewell = shutting_down()
        self._is_read = True
        self._changed.set()

    async def _write(self) -> None:
        session = self._session
        while True:
            while session.unsent:
                answer = session.take()
                if isinstance(answer.content, InferenceError):
                    raise answer.content
                await write(self._context, answer.content)
                if answer.is_final:
                    self._release(answer.slot.held_bytes)
                session.sent(answer, has_room=True)
                self._room.set()
            if self._outcome.done() or (self._is_read and session.is_idle):
                break
            self._changed.clear()
            await self._changed.wait()
        self._end(self._farewell)

    def _end(self, error: InferenceError | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(error)

    async def _accept(self, raw: bytes) -> None:
        noted: LoggedCall | None = None
        is_decoupled = False
        try:
            async with self._messages.open(raw) as opened:
                message = opened.message
                noted = self._noted(message)
                view = self._server.model(message.model_name, message.model_version)
                noted.found = True
                is_decoupled = _is_decoupled(view)
                call = await _decode(message, opened.size_bytes)
        except InferenceError as error:
            if noted is None:
                # The message could not be parsed, and ends the stream.
                raise
            request = self._open(noted, is_decoupled)
            self._put(request, self._failure(request, error), is_final=True)
            return
        request = self._open(noted, is_decoupled)
        request.slot.held_bytes = opened.held_bytes
        self._held_bytes += opened.held_bytes
        if self._forwarded:
            _add_forwarded(call.request, self._forwarded)
        ticket = self._server.infer(call.request, partial(self._on_response, request, view, call))
        self._session.started(request.slot, ticket)

    def _noted(self, message: ProtoMessage) -> LoggedCall:
        call = self._call
        return LoggedCall(
            call.access_log, call.method, monotonic(), message.model_name, message.model_version, message.id
        )

    def _open(self, noted: LoggedCall, is_decoupled: bool) -> _Request:
        return _Request(noted.request_id, noted, self._session.open(is_ordered=not is_decoupled))

    def _on_response(self, request: _Request, view: ModelView, call: InferCall, response: InferenceResponse) -> None:
        if self._outcome.done():
            if response.final:
                self._session.finished(request.slot)
            return
        try:
            self._put(request, self._encode(request, view, call, response), response.final)
        except InferenceError as error:
            self._end(error)

    def _encode(
        self, request: _Request, view: ModelView, call: InferCall, response: InferenceResponse
    ) -> bytes | InferenceError | None:
        executed_by = response.model_name if response.model_version else ""
        request.noted.version = response.model_version or request.noted.version
        if response.error is not None:
            return self._failure(request, response.error, executed_by, response.final)
        try:
            if not request.slot.is_ordered and response.final and response.is_empty:
                return _raw(encode_empty_final(response)) if call.wants_empty_final else None
            return _raw(encode_stream_infer(response, view, call.destinations))
        except InferenceError as error:
            return self._failure(request, error, executed_by, response.final)
        except Exception:
            log.exception("ModelStreamInfer could not encode a response of '%s'", view.name)
            return self._failure(request, internal_error("ModelStreamInfer"), executed_by, response.final)

    def _failure(
        self, request: _Request, error: InferenceError, executed_by: str = "", final: bool = True
    ) -> bytes | InferenceError:
        request.error = request.error or error
        if self._errors_end_it:
            return error
        return _raw(encode_stream_error(request.request_id, error, executed_by, final=final))

    def _put(self, request: _Request, content: bytes | InferenceError | None, is_final: bool) -> None:
        """Queue an answer (None: no message). CANCELLED where the client has left too much unread."""
        slot = request.slot
        if is_final:
            self._note(request)
        if content is not None:
            size = len(content) if isinstance(content, bytes) else 0
            self._session.put(slot, content, size, is_final=is_final)
        elif is_final:
            self._release(slot.held_bytes)
            self._session.put_end(slot)
        self._changed.set()
        self._room.set()

    def _note(self, request: _Request) -> None:
        error = request.error
        status, text = (0, "") if error is None else (GRPC_STATUS[error.code], error.message)
        request.noted.note(self._context, status, text)


def _resolve(answer: "asyncio.Future[InferenceResponse]", response: InferenceResponse) -> None:
    # After a cancel the real response still arrives, and is dropped.
    if not answer.done():
        answer.set_result(response)


def _from_metadata(forwarding: Forwarding, context: Context) -> Parameters:
    # Parameters are text, so binary values are skipped.
    texts = [(name, value) for name, value in context.invocation_metadata() if isinstance(value, str)]
    return forwarding.parameters(texts)


def _add_forwarded(request: InferenceRequest, forwarded: Parameters) -> None:
    # Parameters in the message take precedence over metadata of the same name.
    request.parameters = {**forwarded, **request.parameters}


def _is_decoupled(view: ModelView) -> bool:
    policy = view.config.model_transaction_policy
    return policy is not None and policy.decoupled


def _raw(message: ProtoMessage) -> bytes:
    return bytes(message.SerializeToString())
