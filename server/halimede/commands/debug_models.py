"""The other models that a model calls under `halimede debug`: a server without ports, on a thread of its own.

It starts with the first call, and loads a model when it is first called, each model in the way in which it is served.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine
from queue import SimpleQueue
from typing import Any, TypeVar

import uvloop

from halimede.backends.service_calls import IsModelReady, LoadModel, ServiceCall, ServiceResult, UnloadModel
from halimede.core.types import InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.caller import Caller
from halimede.processes.output import log as prints_log
from halimede.runtime.core_server import CoreServer
from halimede.serving_core import ServingCore, make_core
from halimede.settings import Settings

T = TypeVar("T")

CLOSE_SECS = 5.0


class OtherModels:
    """The models of the repository, for the model `own` of it. Any thread may call."""

    def __init__(self, settings: Settings, own: str) -> None:
        """Raises InferenceError if the device list cannot be read."""
        self._owner = f"{own}#debug"
        self._unloaded: set[str] = set()
        """Names that the model has unloaded: a call does not load them again."""
        # What other models print is shown, as in a server.
        prints_log.setLevel(logging.INFO)
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="other-models", daemon=True).start()
        self._core = self._run(_started(settings))
        self._server = self._core.server

    def infer(self, request: InferenceRequest) -> "OtherCall":
        """See `hosting.Host`."""
        call = OtherCall(self._loop, self._server)
        asyncio.run_coroutine_threadsafe(self._infer(request, call), self._loop)
        return call

    def call(self, call: ServiceCall[ServiceResult]) -> ServiceResult:
        """Load, unload or check a model. InferenceError."""
        return self._run(self._perform(call))

    def close(self) -> None:
        """Unload all models, and end their processes."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _infer(self, request: InferenceRequest, call: "OtherCall") -> None:
        try:
            await self._load(request.model_name)
        except InferenceError as error:
            call.on_response(InferenceResponse(request.model_name, "", request.id, error=error))
        else:
            call.ticket = self._server.infer(request, call.on_response, Caller(1))

    async def _perform(self, call: ServiceCall[ServiceResult]) -> ServiceResult:
        match call:
            case LoadModel(model_name):
                self._unloaded.discard(model_name)
            case UnloadModel(model_name):
                self._unloaded.add(model_name)
            case IsModelReady(model_name):
                try:
                    await self._load(model_name)
                except InferenceError:
                    return False
        return await self._server.lifecycle.services.call(self._owner, call)

    async def _load(self, name: str) -> None:
        record = self._server.lifecycle.records.get(name)
        if name not in self._unloaded and (record is None or not record.serving):
            await self._server.load_model(name, {}, for_model=True)

    async def _close(self) -> None:
        await self._core.close(CLOSE_SECS)
        # What a model that does not end has left.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _started(settings: Settings) -> ServingCore:
    core = make_core(settings)
    await core.start()
    return core


class OtherCall:
    """Implements `hosting.Call`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: CoreServer) -> None:
        self.ticket = 0
        self._loop = loop
        self._server = server
        self._answers: SimpleQueue[InferenceResponse] = SimpleQueue()
        self._has_ended = False

    def on_response(self, response: InferenceResponse) -> None:
        """Called on the loop's thread, the only one that may free memory of other models' answers. So they are copied,
        to memory that the model may write to, as in a worker."""
        for tensor in response.outputs:
            tensor.data = memoryview(bytearray(tensor.data))
        self._answers.put(response)

    def receive(self) -> InferenceResponse | None:
        if self._has_ended:
            return None
        response = self._answers.get()
        self._has_ended = response.final
        if not response.final:
            self._loop.call_soon_threadsafe(self._server.acknowledge, self.ticket)
        return response

    async def receive_async(self) -> InferenceResponse | None:
        return await asyncio.to_thread(self.receive)

    def cancel(self, *, reads_on: bool = False) -> None:
        self._loop.call_soon_threadsafe(lambda: self._server.cancel(self.ticket, reads_on=reads_on))
