"""Calls of a model to other models, and their results.

| call | result |
|---|---|
| `exec()` | a response, possibly with an error |
| `exec(decoupled=True)` | an iterator over responses, the last of which may be empty |
| `async_exec()` | a future of the same; the request is sent before the future is awaited |

Outputs are views of the memory in which they arrived, so a model can pass them on without a copy.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from halimede.backends.hosting import Call
from halimede.backends.python.utils.errors import TritonModelException
from halimede.backends.python.utils.response import InferenceResponse, response_of
from halimede.backends.python.utils.session import current
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest
from halimede.core.types import InferenceResponse as CoreResponse

_UNKNOWN = "Request for unknown model: "
"""How the server's texts for a model that cannot be called begin, also for one that is loading."""

_AT_END = "Iteration is done for the responses."


class ResponseIterator:
    """The responses of a model, as they arrive. It keeps them: a second iteration begins at the first response.

    Dropping the iterator before its end cancels the call. `async for` waits without blocking the event loop.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__", "_at", "_call", "_kept", "_lock", "_model")

    def __init__(self, call: Call, model: str) -> None:
        self._call: Call | None = call
        self._model = model
        # Threads may share an iterator, and then wait for one another.
        self._lock = threading.Lock()
        self._kept: list[InferenceResponse] = []
        self._at = 0

    def __iter__(self) -> Iterator[InferenceResponse]:
        with self._lock:
            self._rewind()
        return self

    def __next__(self) -> InferenceResponse:
        with self._lock:
            response = self._next_kept()
            if response is None and self._call is not None:
                self._keep(self._call.receive())
                response = self._next_kept()
        if response is None:
            raise StopIteration(_AT_END)
        return response

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        self._rewind()
        return self

    async def __anext__(self) -> InferenceResponse:
        response = self._next_kept()
        if response is None:
            await self._wait_for_another()
            response = self._next_kept()
        if response is None:
            raise StopAsyncIteration(_AT_END)
        return response

    def cancel(self) -> None:
        """Stop the call; responses that the model still sends can be iterated to the end."""
        if (call := self._call) is not None:
            call.cancel(reads_on=True)

    async def _wait_for_another(self) -> None:
        if self._call is not None:
            self._keep(await self._call.receive_async())

    def _rewind(self) -> None:
        # Before the end, every iteration continues at the current response.
        if self._call is None and self._at == len(self._kept):
            self._at = 0

    def _next_kept(self) -> InferenceResponse | None:
        if self._at == len(self._kept):
            return None
        self._at += 1
        return self._kept[self._at - 1]

    def _keep(self, received: CoreResponse | None) -> None:
        if received is None or received.final:
            self._call = None
        if received is not None:
            self._kept.append(_response_of(received, self._model))


def infer(request: InferenceRequest, decoupled: bool) -> InferenceResponse | ResponseIterator:
    """Call a model, and wait if one response is wanted. TritonModelException if the caller is not loaded."""
    call = _start(request)
    if decoupled:
        return ResponseIterator(call, request.model_name)
    return _only(call.receive(), request.model_name)


def infer_async(request: InferenceRequest, decoupled: bool) -> "asyncio.Future[InferenceResponse | ResponseIterator]":
    """As `infer`, without blocking the running loop; cancelling the future cancels the call. RuntimeError."""
    loop = asyncio.get_running_loop()
    call = _start(request)
    # No other reference to the task is needed: while it waits, the call that will wake it refers to it.
    task = loop.create_task(_answer(call, request.model_name, decoupled))
    # As a callback and not in the coroutine: a task that is cancelled before its first step never runs.
    task.add_done_callback(lambda ended: call.cancel() if ended.cancelled() else None)
    return task


async def _answer(call: Call, model: str, decoupled: bool) -> InferenceResponse | ResponseIterator:
    if not decoupled:
        return _only(await call.receive_async(), model)
    responses = ResponseIterator(call, model)
    # Plain `for` blocks the loop: wait for the first response, often the slowest, without blocking.
    await responses._wait_for_another()
    return responses


def _start(request: InferenceRequest) -> Call:
    session = current()
    if not session.serves:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    try:
        return session.host.infer(request)
    except InferenceError as error:
        return _Refused(CoreResponse(request.model_name, "", request.id, error=error))


class _Refused:
    """A call that could not be sent; implements `hosting.Call`."""

    def __init__(self, response: CoreResponse) -> None:
        self._response: CoreResponse | None = response

    def receive(self) -> CoreResponse | None:
        response, self._response = self._response, None
        return response

    async def receive_async(self) -> CoreResponse | None:
        return self.receive()

    def cancel(self, *, reads_on: bool = False) -> None:
        """No effect: the call is already over."""


def _only(received: CoreResponse | None, model: str) -> InferenceResponse:
    if received is None:
        raise RuntimeError("a call for one answer has ended without it")
    return response_of(received) if received.error is None else _response_of(received, model)


def _response_of(received: CoreResponse, model: str) -> InferenceResponse:
    error = received.error
    if error is None:
        return response_of(received)
    text = error.message
    if _is_not_ready(error):
        reason = text.removeprefix(f"model '{model}' is not ready: ")
        text = f"Failed for execute the inference request. Model '{model}' is not ready. {reason}"
    elif received.model_version:
        return response_of(received)
    return response_of(replace(received, error=InferenceError(error.code, _prefixed(text, model))))


def _is_not_ready(error: InferenceError) -> bool:
    """Whether the called model is known and not ready. A full queue or a stop of the server have the same code."""
    text = error.message
    return error.code is ErrorCode.UNAVAILABLE and (text.startswith(_UNKNOWN) or " is not ready: " in text)


def _prefixed(text: str, model: str) -> str:
    """The text for an error of the call itself, not of the called model."""
    return f"Model {model} - Error when running inference: {text}"
