"""Performs requests of a process other than inferences: those of the model's code, and for the states it keeps."""

import logging
from typing import Protocol

from halimede.backends.service_calls import ServiceCall, ServiceResult, TakeState
from halimede.channel.frames import FrameError
from halimede.channel.server_end.channel import Channel
from halimede.channel.server_end.tasks import Tasks
from halimede.core.types import InferenceError, internal, shortage_of
from halimede.workers.connection.states import States
from halimede.workers.frames.kinds import MAX_CALLS, WorkerFrame
from halimede.workers.frames.services import decode_service_call, encode_service_result

log = logging.getLogger(__name__)


class ServiceOwner(Protocol):
    """Performs the calls."""

    async def on_call(self, call: ServiceCall[ServiceResult]) -> ServiceResult:
        """Perform a call; each class declares its result. InferenceError."""


class ServiceCalls:
    """The calls of one worker: at most MAX_CALLS at a time, each in a task of its own."""

    def __init__(self, channel: Channel, tasks: Tasks, model: str, owner: ServiceOwner, states: States) -> None:
        self._channel = channel
        self._tasks = tasks
        self._model = model
        self._owner = owner
        self._states = states
        self._running = 0
        channel.handle(WorkerFrame.SERVICE_CALL, self._on_call)

    def _on_call(self, body: memoryview) -> None:
        number, call = decode_service_call(body)
        if isinstance(call, TakeState):
            # At once: the worker waits in an execution.
            self._channel.send(encode_service_result(number, self._states.try_take(call.size_bytes)))
            return
        if self._running >= MAX_CALLS:
            raise FrameError(f"more than {MAX_CALLS} calls at a time")
        self._running += 1
        self._tasks.run(self._answer(number, call))

    async def _answer(self, number: int, call: ServiceCall[ServiceResult]) -> None:
        result: ServiceResult | InferenceError
        try:
            result = await self._owner.on_call(call)
        except InferenceError as error:
            result = error
        except Exception as error:
            log.error("model '%s': call '%s' failed", self._model, call.NAME, exc_info=error)
            failed = internal("the server failed to perform the call")
            result = shortage_of(error) or failed
        finally:
            self._running -= 1
        self._channel.send(encode_service_result(number, result))
