"""Calls of one small request and one response, answered by a coroutine, or from what is known of a model."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from halimede.core.config.model_view import ModelView
from halimede.core.wire.grpc_coding import encode_steps
from halimede.core.wire.grpc_messages import Message
from halimede.core.wire.protocol import ProtoClass, ProtoMessage
from halimede.core.wire.steps import run
from halimede.facade.server import Server
from halimede.frontends.finding import find_model
from halimede.frontends.grpc.call import Call
from halimede.frontends.grpc.opening import fail_without_message, parse_small

Answer = Callable[[ProtoMessage], Awaitable[ProtoMessage]]
"""Answers one request; raises InferenceError to refuse it."""


@dataclass(slots=True)
class UnaryMethod:
    """One RPC. `handle` gets each call with its request."""

    request: ProtoClass
    handle: Callable[[Call, ProtoMessage], None]

    def begin(self, call: Call) -> None:
        """Begin a call."""
        call.on_message = partial(self._take, call)
        call.on_half_closed = partial(fail_without_message, call)

    def _take(self, call: Call, message: Message) -> None:
        call.on_message = call.on_half_closed = None
        request = parse_small(call, self.request, message)
        _note_model(call, request)
        self.handle(call, request)


def by_task(answer: Answer, tasks: set[asyncio.Task[Any]]) -> Callable[[Call, ProtoMessage], None]:
    """Answers calls by a coroutine. The tasks are in `tasks` until they end; a client that leaves does not end them."""

    async def work(call: Call, request: ProtoMessage) -> None:
        try:
            _respond(call, await answer(request))
        except Exception as error:  # noqa: BLE001 -- whatever it was, the client gets an answer
            call.break_off(error)

    def handle(call: Call, request: ProtoMessage) -> None:
        task = asyncio.get_running_loop().create_task(work(call, request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return handle


def from_view(encode: Callable[[ModelView], ProtoMessage], server: Server) -> Callable[[Call, ProtoMessage], None]:
    """Answers calls from the view of the model that they name."""

    def handle(call: Call, request: ProtoMessage) -> None:
        find_model(server, call, request.name, request.version, lambda view: _respond(call, encode(view)), call.fail)

    return handle


def _respond(call: Call, response: ProtoMessage) -> None:
    answer = response.SerializeToString()
    if call.compresses:
        parts, is_compressed = run(encode_steps((answer,), call.encoding))
        call.answer(parts, sum(map(len, parts)), is_compressed=is_compressed)
    else:
        call.answer((answer,), len(answer))


def _note_model(call: Call, request: ProtoMessage) -> None:
    """Record the model of a control call; requests name it in one of two fields."""
    fields = request.DESCRIPTOR.fields_by_name
    if "model_name" in fields:
        call.noted.model = request.model_name
    elif "version" in fields:
        call.noted.model, call.noted.version = request.name, request.version
