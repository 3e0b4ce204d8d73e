"""Common parts of all RPC handlers: error statuses, and an end to waits when the server drains."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc  # type: ignore[import-untyped]  # grpcio ships no types

from halimede.core.observe.access_lines import Access, AccessLog, Protocol, access_kind
from halimede.core.types import ApiCategory, ErrorCode, InferenceError
from halimede.core.wire.control_size import MAX_CONTROL_BYTES, control_too_large
from halimede.core.wire.grpc_infer import status_message
from halimede.core.wire.grpc_inflate import Inflating, is_compressed
from halimede.core.wire.protocol import ProtoClass, ProtoMessage, parse
from halimede.core.wire.status_map import GRPC_STATUS
from halimede.frontends.grpc.access import CATEGORIES
from halimede.frontends.grpc.messages import MessageTooLarge

# grpcio ships no types: a servicer context, and a method handler of its handler table.
Context = Any
MethodHandler = Any

_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}
_STATUS = {code: _BY_NUMBER[number] for code, number in GRPC_STATUS.items()}
log = logging.getLogger(__name__)


RECEIVE_SECS = 5.0
"""How long draining waits for requests whose transfer has begun; a client may never send the rest."""


class Drain:
    """Ends waits that depend only on the client, so that an idle stream does not delay the exit."""

    def __init__(self) -> None:
        self.started = False
        self._scopes: set[asyncio.Timeout] = set()
        self._receiving: set[asyncio.Task[Any] | None] = set()
        self._has_stopped_receiving = False

    def start(self) -> None:
        """Make every open scope raise TimeoutError, and every later one at its first wait. May be called again."""
        if self.started:
            return
        self.started = True
        for scope in self._scopes:
            scope.reschedule(0)
        asyncio.get_running_loop().call_later(RECEIVE_SECS, self._stop_receiving)

    def _stop_receiving(self) -> None:
        self._has_stopped_receiving = True
        for task in self._receiving:
            if task is not None:
                task.cancel()

    async def receive(self, context: Context) -> bytes:
        """The message of a call that has one. INVALID_ARG if the call ends without one, UNAVAILABLE if draining cannot
        wait for it.

        grpc's own handlers of unary calls leave a call without a message unanswered, so that the client waits forever.
        Therefore these calls have handlers of streams, which are equal on the wire; this method reads the message.
        """
        task = asyncio.current_task()
        self._receiving.add(task)
        try:
            raw = await context.read()
        except asyncio.CancelledError:
            if not self._has_stopped_receiving:
                raise
            raise shutting_down() from None
        finally:
            self._receiving.discard(task)
        if raw is grpc.aio.EOF:
            raise InferenceError(ErrorCode.INVALID_ARG, "the call ended before a whole request came")
        return bytes(raw)

    @asynccontextmanager
    async def scope(self) -> AsyncIterator[None]:
        """Once draining has started, waits inside the scope raise TimeoutError.

        Writes must be outside: grpc cannot end a call whose first write was cancelled, and its client waits forever.
        """
        async with asyncio.timeout_at(0 if self.started else None) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)


async def abort(context: Context, error: InferenceError) -> NoReturn:
    """End the call with the error's status, by an exception that grpc catches."""
    # The caller keeps the error, and its traceback would keep the caller's frame with the received message alive.
    error.__traceback__ = None
    status = grpc.StatusCode.RESOURCE_EXHAUSTED if isinstance(error, MessageTooLarge) else _STATUS[error.code]
    await context.abort(status, status_message(error.message))
    raise AssertionError("grpc's abort returned")


async def write(context: Context, message: bytes) -> None:
    """Send one message of a stream."""
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        # The client disconnected during the write; grpc is about to cancel the call, which is not a fault to report.
        raise asyncio.CancelledError from None


def shutting_down() -> InferenceError:
    """The error of calls that draining cuts short."""
    return InferenceError(ErrorCode.UNAVAILABLE, "GRPC server is shutting down and has stopped accepting new requests.")


def internal_error(what: str) -> InferenceError:
    """The error for an unexpected exception: the log has its details, the client does not get them."""
    return InferenceError(ErrorCode.INTERNAL, f"{what} failed by an internal error; the server's log has the cause")


def parse_small(name: str, request: ProtoClass, raw: bytes) -> ProtoMessage:
    """Parse the message of a call other than inference; INVALID_ARG if parsing would block the loop for long."""
    if len(raw) > MAX_CONTROL_BYTES:
        raise control_too_large(name, len(raw))
    if is_compressed(raw):
        inflating = Inflating(raw)
        if not inflating.advance(MAX_CONTROL_BYTES):
            raise control_too_large(name, f"more than {MAX_CONTROL_BYTES}")
        return parse(request, inflating.content)
    return parse(request, raw)


@dataclass(slots=True)
class LoggedCall:
    """A call's data for the access log, except its status; filled in as it becomes known.

    `found` means that an inference's model was found. Only then do the call's failures have a rate limit per model.
    """

    access_log: AccessLog | None
    method: str
    began_at: float
    model: str = ""
    version: str = ""
    request_id: str = ""
    found: bool = False

    def note(self, context: Context, status: int, error: str = "") -> None:
        """Report to the access log that the call, or one request of its stream, has ended."""
        log = self.access_log
        if log is None or not (status or log.successes):
            return
        kind = access_kind(Protocol.GRPC, status, self.model if self.found else "")
        if log.admits(kind):
            name = self.method.rpartition("/")[2]
            seconds = monotonic() - self.began_at
            about = (self.model, self.version, self.request_id)
            log.note(Access(kind, name, "", seconds, _client(context), *about, error))


Behaviour = Callable[[LoggedCall, Context], Awaitable[bytes | None]]
"""Serves one call; its result is sent as the last message."""


def answered_once(method: str, behaviour: Behaviour, access_log: AccessLog | None) -> MethodHandler:
    """The handler of a method that sends one response message."""
    return grpc.stream_unary_rpc_method_handler(_noted(method, behaviour, access_log))


def answered_in_parts(method: str, behaviour: Behaviour, access_log: AccessLog | None) -> MethodHandler:
    """The handler of a method that writes its messages itself."""
    return grpc.stream_stream_rpc_method_handler(_noted(method, behaviour, access_log))


def refused(method: str, status: grpc.StatusCode, text: str, access_log: AccessLog | None) -> MethodHandler:
    """A handler that refuses every call."""

    async def refuse(_call: LoggedCall, context: Context) -> None:
        await context.abort(status, text)

    return answered_in_parts(method, refuse, access_log)


_ENDED_BY_GRPC = "grpc ended the call: its message was larger than --grpc-max-input-size, or the client left"


def _noted(
    method: str, behaviour: Behaviour, access_log: AccessLog | None
) -> Callable[[object, Context], Awaitable[bytes | None]]:
    is_probe = CATEGORIES.get(method) is ApiCategory.HEALTH

    async def handle(_requests: object, context: Context) -> bytes | None:
        call = LoggedCall(access_log, method, monotonic())
        try:
            answer = await behaviour(call, context)
        except grpc.aio.AbortError:
            call.note(context, context.code().value[0], context.details())
            raise
        except grpc.aio.InternalError:
            # grpc ended the call before the handler did; the status that it sent is unknown here.
            call.note(context, grpc.StatusCode.CANCELLED.value[0], _ENDED_BY_GRPC)
            raise
        except asyncio.CancelledError:
            if not is_probe:
                call.note(context, *_end_of_cancelled(context))
            raise
        # Probes repeat at intervals, so their success is not logged.
        if not is_probe:
            call.note(context, 0)
        return answer

    return handle


def _end_of_cancelled(context: Context) -> tuple[int, str]:
    left = context.time_remaining()
    if left is not None and left <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "the client's deadline came before the answer"
    return grpc.StatusCode.CANCELLED.value[0], "the call was cancelled before the whole answer was sent"


def _client(context: Context) -> str:
    """`ipv6:%5B::1%5D:5000` as `[::1]:5000`; "" for a unix socket, whose peer has no address, and for a call that grpc
    ended."""
    kind, _, address = context.peer().partition(":")
    return unquote(address) if kind in {"ipv4", "ipv6"} else str(kind) or "unknown"


def unary(
    method: str,
    request: ProtoClass,
    answer: Callable[[ProtoMessage], Awaitable[ProtoMessage]],
    drain: Drain,
    access_log: AccessLog | None,
) -> MethodHandler:
    """The handler of a unary RPC with one request and one response; `answer` raises InferenceError to refuse."""
    name = method.rpartition("/")[2]

    async def handle(call: LoggedCall, context: Context) -> bytes:
        try:
            question = parse_small(name, request, await drain.receive(context))
            _note_model(call, question)
            message = await answer(question)
            return bytes(message.SerializeToString())
        except InferenceError as error:
            failure = error
        except Exception:
            log.exception("%s failed", name)
            failure = internal_error(name)
        return await abort(context, failure)

    return answered_once(method, handle, access_log)


def _note_model(call: LoggedCall, question: ProtoMessage) -> None:
    """Record the model of a control call; requests name it in one of two fields."""
    fields = question.DESCRIPTOR.fields_by_name
    if "model_name" in fields:
        call.model = question.model_name
    elif "version" in fields:
        call.model, call.version = question.name, question.version
