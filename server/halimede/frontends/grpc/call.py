"""What every RPC handler needs: its answer to an error, and an end to waiting when the server drains."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc  # type: ignore[import-untyped]  # grpcio ships no types

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.wire.grpc_infer import status_message
from halimede.core.wire.protocol import ProtoClass, ProtoMessage, parse
from halimede.core.wire.status_map import GRPC_STATUS

# grpcio ships no types: a servicer context, and a method handler as its handler table takes it.
Context = Any
MethodHandler = Any

_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}
_STATUS = {code: _BY_NUMBER[number] for code, number in GRPC_STATUS.items()}
log = logging.getLogger(__name__)


class Drain:
    """Ends the waits that only the client would end, so that an idle stream does not hold up the exit."""

    def __init__(self) -> None:
        self.started = False
        self._scopes: set[asyncio.Timeout] = set()

    def start(self) -> None:
        """Every open scope raises TimeoutError, and every later one at its first wait."""
        self.started = True
        for scope in self._scopes:
            scope.reschedule(0)

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


def unary(request: ProtoClass, name: str, answer: Callable[[ProtoMessage], Awaitable[ProtoMessage]]) -> MethodHandler:
    """The handler of a unary RPC that is one question and one answer; `answer` raises InferenceError to refuse."""

    async def handle(raw: bytes, context: Context) -> bytes:
        try:
            message = await answer(parse(request, raw))
            return bytes(message.SerializeToString())
        except InferenceError as error:
            failure = error
        except Exception:
            log.exception("%s failed", name)
            failure = internal_error(name)
        return await abort(context, failure)

    return grpc.unary_unary_rpc_method_handler(handle)
