"""What every RPC handler needs: its answer to an error, and an end to waiting when the server drains."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc  # type: ignore[import-untyped]  # grpcio ships no types

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.wire.control_size import MAX_CONTROL_BYTES, control_too_large
from halimede.core.wire.grpc_infer import status_message
from halimede.core.wire.protocol import ProtoClass, ProtoMessage, parse
from halimede.core.wire.status_map import GRPC_STATUS

# grpcio ships no types: a servicer context, and a method handler as its handler table takes it.
Context = Any
MethodHandler = Any

_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}
_STATUS = {code: _BY_NUMBER[number] for code, number in GRPC_STATUS.items()}
log = logging.getLogger(__name__)


RECEIVE_SECS = 5.0
"""How long draining waits for requests that are on their way; a client may never send the rest of its own."""


class Drain:
    """Ends the waits that only the client would end, so that an idle stream does not hold up the exit."""

    def __init__(self) -> None:
        self.started = False
        self._scopes: set[asyncio.Timeout] = set()
        self._receiving: set[asyncio.Task[Any] | None] = set()
        self._has_given_up = False

    def start(self) -> None:
        """Every open scope raises TimeoutError, and every later one at its first wait. May be called again."""
        if self.started:
            return
        self.started = True
        for scope in self._scopes:
            scope.reschedule(0)
        asyncio.get_running_loop().call_later(RECEIVE_SECS, self._give_up)

    def _give_up(self) -> None:
        self._has_given_up = True
        for task in self._receiving:
            if task is not None:
                task.cancel()

    async def receive(self, context: Context) -> bytes:
        """The message of a call that has one. INVALID_ARG when the call ends without one, UNAVAILABLE when draining
        cannot wait for it.

        grpc's own handlers of unary calls leave a call without a message unanswered, and the client waiting, for ever.
        So ours are those of streams, which are the same on the wire, and read by this.
        """
        task = asyncio.current_task()
        self._receiving.add(task)
        try:
            raw = await context.read()
        except asyncio.CancelledError:
            if not self._has_given_up:
                raise
            raise shutting_down() from None
        finally:
            self._receiving.discard(task)
        if raw is grpc.aio.EOF:
            raise InferenceError(ErrorCode.INVALID_ARG, "the call ended before a whole request came")
        return bytes(raw)

    @asynccontextmanager
    async def scope(self) -> AsyncIterator[None]:
        """Waits inside raise TimeoutError out of the scope once draining has started."""
        async with asyncio.timeout_at(0 if self.started else None) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)


async def abort(context: Context, error: InferenceError) -> NoReturn:
    """End the call with the error's status, by an exception that grpc catches."""
    await context.abort(_STATUS[error.code], status_message(error.message))
    raise AssertionError("grpc's abort returned")


async def write(context: Context, message: bytes) -> None:
    """Send one message of a stream."""
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        # The client went while this was on its way; grpc is about to cancel the call, which is no fault to report.
        raise asyncio.CancelledError from None


def shutting_down() -> InferenceError:
    """How calls end that draining cuts short."""
    return InferenceError(ErrorCode.UNAVAILABLE, "GRPC server is shutting down and has stopped accepting new requests.")


def internal_error(what: str) -> InferenceError:
    """The answer to an exception that nobody foresaw: the log has it, the client does not."""
    return InferenceError(ErrorCode.INTERNAL, f"{what} failed by an internal error; the server's log has the cause")


def parse_small(name: str, request: ProtoClass, raw: bytes) -> ProtoMessage:
    """The message of a call that is no inference; INVALID_ARG for one that would take the loop long to parse."""
    if len(raw) > MAX_CONTROL_BYTES:
        raise control_too_large(name, len(raw))
    return parse(request, raw)


def unary(
    request: ProtoClass, name: str, answer: Callable[[ProtoMessage], Awaitable[ProtoMessage]], drain: Drain
) -> MethodHandler:
    """The handler of a unary RPC that is one question and one answer; `answer` raises InferenceError to refuse."""

    async def handle(_requests: object, context: Context) -> bytes:
        try:
            message = await answer(parse_small(name, request, await drain.receive(context)))
            return bytes(message.SerializeToString())
        except InferenceError as error:
            failure = error
        except Exception:
            log.exception("%s failed", name)
            failure = internal_error(name)
        return await abort(context, failure)

    return grpc.stream_unary_rpc_method_handler(handle)
