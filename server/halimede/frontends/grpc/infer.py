"""ModelInfer and ModelStreamInfer."""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import grpc  # type: ignore[import-untyped]  # grpcio ships no types

from halimede.core.config.model_view import ModelView
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse, ParameterValue
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
from halimede.frontends.grpc.call import Call, Context, Drain, abort, internal_error, shutting_down, write
from halimede.frontends.grpc.messages import MAX_ON_LOOP_BYTES, Messages
from halimede.runtime.server import Server

MAX_UNANSWERED = 256
"""Requests of one stream that are being answered and answers that wait to be sent, before no more requests are read."""

MAX_UNSENT_BYTES = 128 << 20
"""Answers of one stream that may wait to be sent before no more requests are read."""

MAX_STREAMED_BYTES = 2 * MAX_UNSENT_BYTES
"""Answers of one stream that may wait to be sent when a decoupled model adds to them: above it the stream is ended. A
model waits for its client long before, but each of many requests has a model that may send some ahead."""

MAX_TYPED_ON_LOOP_BYTES = 256 << 10
"""As MAX_ON_LOOP_BYTES, for typed contents and classes: each element is an object on its way."""

Parameters = dict[str, ParameterValue]

log = logging.getLogger(__name__)


async def _decode(message: ProtoMessage, size_bytes: int) -> InferCall:
    if size_bytes > (MAX_ON_LOOP_BYTES if message.raw_input_contents else MAX_TYPED_ON_LOOP_BYTES):
        return await asyncio.to_thread(decode_infer, message)
    return decode_infer(message)


def _encode(response: InferenceResponse, view: ModelView, classes: dict[str, int]) -> bytes:
    return bytes(encode_infer(response, view, classes).SerializeToString())


class Infer:
    """The two inference RPCs over one server."""

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

    async def model_infer(self, call: Call, context: Context) -> bytes:
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

    async def _infer(self, noted: Call, raw: bytes, forwarded: Parameters, context: Context) -> bytes:
        server = self._server
        view, call = await self._read(noted, raw, context)
        # The request has what it needs of the message; a large one would be held twice while the model runs.
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
            # The model has become decoupled since it was looked up.
            server.cancel(ticket)
            raise InferenceError(ErrorCode.INTERNAL, "expected a single response, got more")
        noted.version = response.model_version or noted.version
        if response.error is not None:
            raise response.error
        if sum([len(output.data) for output in response.outputs]) > (
            MAX_TYPED_ON_LOOP_BYTES if call.classes else MAX_ON_LOOP_BYTES
        ):
            async with self._messages.large:
                return await asyncio.to_thread(_encode, response, view, call.classes)
        return _encode(response, view, call.classes)

    async def _read(self, noted: Call, raw: bytes, context: Context) -> tuple[ModelView, InferCall]:
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
            # The call is done when its answer is sent.
            context.add_done_callback(partial(self._release, opened.held_bytes))
        return view, call

    def _release(self, held_bytes: int, _context: Context) -> None:
        self._messages.release(held_bytes)

    async def model_stream_infer(self, call: Call, context: Context) -> None:
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
class _Slot:
    """One request of a stream. `ready` are its answers that have to wait for those of earlier requests. `error` is the
    first one of them, for the access log."""

    request_id: str
    noted: Call
    error: InferenceError | None = None
    is_decoupled: bool = False
    ticket: int = 0
    ready: "list[_Answer]" = field(default_factory=list)
    is_done: bool = False
    held_bytes: int = 0
    """See `Messages.open`; until its last answer is sent."""


@dataclass(slots=True)
class _Answer:
    """A message to send, or the error to end the stream with.

    Once it is sent it is acknowledged to its request, so that a decoupled model is only so far ahead of what its client
    takes; None for a final answer, after which nobody waits. A final answer releases `held_bytes`.
    """

    content: bytes | InferenceError
    of: _Slot | None
    held_bytes: int = 0


class _InferStream:
    """One ModelStreamInfer call.

    Answers of decoupled models leave as they come, all others in the order of their requests. A failed request is
    answered by a message that says so and the stream goes on, unless the call's metadata asks for the real status: then
    the first error ends the stream. However it ends, what is still being computed is cancelled. All state changes on
    the loop between awaits.
    """

    def __init__(
        self,
        server: Server,
        drain: Drain,
        call: Call,
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
        self._max_unanswered = max_unanswered
        self._errors_end_it = ("triton_grpc_error", "true") in tuple(context.invocation_metadata() or ())
        self._outcome: asyncio.Future[InferenceError | None] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._ordered: deque[_Slot] = deque()
        self._tickets: set[int] = set()
        self._unanswered = 0
        self._unsent: deque[_Answer] = deque()
        self._unsent_bytes = 0
        self._held_bytes = 0
        self._is_read = False
        self._farewell: InferenceError | None = None

    async def run(self) -> None:
        """Return when the client has closed its side and all is answered; raise what the stream is to end with."""
        reading = asyncio.create_task(self._ending_on_error(self._read()))
        writing = asyncio.create_task(self._ending_on_error(self._write()))
        try:
            await asyncio.wait((self._outcome,))
            self._let_go()
            reading.cancel()
            # A write that has begun must end before the status can be sent, however slowly the client reads.
            await asyncio.wait((reading, writing))
            if (error := self._outcome.result()) is not None:
                raise error
        finally:
            self._let_go()
            reading.cancel()
            writing.cancel()
            await asyncio.wait((reading, writing))
            self._release(self._held_bytes)

    def _let_go(self) -> None:
        """Nothing more is read, answered or sent. May be called again."""
        self._outcome.cancel()
        for ticket in tuple(self._tickets):
            self._server.cancel(ticket)
        self._tickets.clear()
        self._ordered.clear()
        self._unsent.clear()
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
                    while self._is_full():
                        self._room.clear()
                        await self._room.wait()
                    raw = await self._context.read()
                    if raw is grpc.aio.EOF:
                        break
                    await self._accept(raw)
                    # The next one may be long in coming, and this one large.
                    del raw
        except TimeoutError:
            # Draining: what was read is still answered.
            self._farewell = shutting_down()
        self._is_read = True
        self._changed.set()

    def _is_full(self) -> bool:
        return self._unanswered + len(self._unsent) >= self._max_unanswered or self._unsent_bytes > MAX_UNSENT_BYTES

    async def _write(self) -> None:
        while True:
            while self._unsent:
                answer = self._unsent.popleft()
                if isinstance(answer.content, InferenceError):
                    raise answer.content
                self._unsent_bytes -= len(answer.content)
                await write(self._context, answer.content)
                self._release(answer.held_bytes)
                if answer.of is not None:
                    self._server.acknowledge(answer.of.ticket)
                self._room.set()
            if self._outcome.done() or (self._is_read and not self._unanswered):
                break
            self._changed.clear()
            await self._changed.wait()
        self._end(self._farewell)

    def _end(self, error: InferenceError | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(error)

    async def _accept(self, raw: bytes) -> None:
        slot: _Slot | None = None
        try:
            async with self._messages.open(raw) as opened:
                message = opened.message
                slot = _Slot(message.id, self._noted(message))
                view = self._server.model(message.model_name, message.model_version)
                slot.noted.found = True
                slot.is_decoupled = _is_decoupled(view)
                call = await _decode(message, opened.size_bytes)
        except InferenceError as error:
            if slot is None:
                # It could not be read at all, and ends the stream.
                raise
            self._admit(slot)
            self._put(slot, self._failure(slot, error), is_final=True)
            return
        slot.held_bytes = opened.held_bytes
        self._held_bytes += opened.held_bytes
        if self._forwarded:
            _add_forwarded(call.request, self._forwarded)
        self._admit(slot)
        slot.ticket = self._server.infer(call.request, partial(self._on_response, slot, view, call))
        if not slot.is_done:
            self._tickets.add(slot.ticket)

    def _noted(self, message: ProtoMessage) -> Call:
        call = self._call
        return Call(call.access_log, call.method, monotonic(), message.model_name, message.model_version, message.id)

    def _admit(self, slot: _Slot) -> None:
        self._unanswered += 1
        if not slot.is_decoupled:
            self._ordered.append(slot)

    def _on_response(self, slot: _Slot, view: ModelView, call: InferCall, response: InferenceResponse) -> None:
        if response.final:
            self._tickets.discard(slot.ticket)
        if not self._outcome.done():
            self._put(slot, self._encode(slot, view, call, response), response.final)

    def _encode(
        self, slot: _Slot, view: ModelView, call: InferCall, response: InferenceResponse
    ) -> bytes | InferenceError | None:
        executed_by = response.model_name if response.model_version else ""
        slot.noted.version = response.model_version or slot.noted.version
        if response.error is not None:
            return self._failure(slot, response.error, executed_by, response.final)
        try:
            if slot.is_decoupled and response.final and response.is_empty:
                return _raw(encode_empty_final(response)) if call.wants_empty_final else None
            return _raw(encode_stream_infer(response, view, call.classes))
        except InferenceError as error:
            return self._failure(slot, error, executed_by, response.final)
        except Exception:
            log.exception("ModelStreamInfer could not encode a response of '%s'", view.name)
            return self._failure(slot, internal_error("ModelStreamInfer"), executed_by, response.final)

    def _failure(
        self, slot: _Slot, error: InferenceError, executed_by: str = "", final: bool = True
    ) -> bytes | InferenceError:
        slot.error = slot.error or error
        if self._errors_end_it:
            return error
        return _raw(encode_stream_error(slot.request_id, error, executed_by, final=final))

    def _put(self, slot: _Slot, answer: bytes | InferenceError | None, is_final: bool) -> None:
        """Queue an answer (None: there is nothing to say), and all that had to wait for it."""
        slot.is_done = is_final
        if is_final:
            self._note(slot)
        if answer is not None:
            slot.ready.append(_Answer(answer, None if is_final else slot, slot.held_bytes if is_final else 0))
        elif is_final:
            self._release(slot.held_bytes)
        if slot.is_decoupled:
            self._flush(slot)
        while self._ordered:
            head = self._ordered[0]
            self._flush(head)
            if not head.is_done:
                break
            self._ordered.popleft()
        self._changed.set()
        self._room.set()

    def _note(self, slot: _Slot) -> None:
        error = slot.error
        status, text = (0, "") if error is None else (GRPC_STATUS[error.code], error.message)
        slot.noted.note(self._context, status, text)

    def _flush(self, slot: _Slot) -> None:
        for answer in slot.ready:
            if slot.is_decoupled and self._unsent_bytes > MAX_STREAMED_BYTES:
                message = f"the client left {MAX_STREAMED_BYTES >> 20} MiB of responses unread on this stream"
                self._end(InferenceError(ErrorCode.CANCELLED, message))
                return
            self._unsent.append(answer)
            if isinstance(answer.content, bytes):
                self._unsent_bytes += len(answer.content)
        slot.ready.clear()
        if slot.is_done:
            self._unanswered -= 1


def _resolve(answer: "asyncio.Future[InferenceResponse]", response: InferenceResponse) -> None:
    # After a cancel the real answer still comes, to nobody.
    if not answer.done():
        answer.set_result(response)


def _from_metadata(forwarding: Forwarding, context: Context) -> Parameters:
    # Binary values are no text, and a parameter is one.
    texts = [(name, value) for name, value in context.invocation_metadata() if isinstance(value, str)]
    return forwarding.parameters(texts)


def _add_forwarded(request: InferenceRequest, forwarded: Parameters) -> None:
    # What the message says goes before what metadata of the same name say.
    request.parameters = {**forwarded, **request.parameters}


def _is_decoupled(view: ModelView) -> bool:
    policy = view.config.model_transaction_policy
    return policy is not None and policy.decoupled


def _raw(message: ProtoMessage) -> bytes:
    return bytes(message.SerializeToString())
