"""What the model's code asks of the server beside inferences: JSON both ways."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.frames.control import decode_json, error_json, json_body
from halimede.workers.frames.kinds import CALL, MAX_CALLS, RESULT, FrameError, Kind, encode_frame
from halimede.workers.server.channel import Channel
from halimede.workers.server.tasks import Tasks

log = logging.getLogger(__name__)


class ServiceOwner(Protocol):
    """Does what is asked for."""

    async def on_call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """The model asks for something; JSON both ways. InferenceError."""


class ServiceCalls:
    """At most MAX_CALLS of them at a time, each in a task of its own."""

    def __init__(self, channel: Channel, tasks: Tasks, model: str, owner: ServiceOwner) -> None:
        self._channel = channel
        self._tasks = tasks
        self._model = model
        self._owner = owner
        self._running = 0
        channel.handle(Kind.CALL, self._on_call)

    def _on_call(self, body: memoryview) -> None:
        if len(body) < CALL.size:
            raise FrameError("a call without a number")
        (number,) = CALL.unpack_from(body)
        match decode_json(body[CALL.size :]):
            case [str(method), dict(arguments)]:
                if self._running >= MAX_CALLS:
                    raise FrameError(f"more than {MAX_CALLS} calls at a time")
                self._running += 1
                self._tasks.run(self._answer(number, method, arguments))
            case _:
                raise FrameError("a call that is none")

    async def _answer(self, number: int, method: str, arguments: Mapping[str, Any]) -> None:
        try:
            went_well, value = True, await self._owner.on_call(method, arguments)
        except InferenceError as error:
            went_well, value = False, error_json(error)
        except Exception as error:
            log.error("model '%s': call '%s' failed", self._model, method[:100], exc_info=error)
            went_well, value = False, error_json(InferenceError(ErrorCode.INTERNAL, "the server failed at it"))
        finally:
            self._running -= 1
        self._channel.send(encode_frame(Kind.RESULT, RESULT.pack(number, went_well) + json_body(value)))
