"""`facade.server.Server` in a front-end process: everything goes over the channel to the core."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from halimede.channel.frames import encode_frame
from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.memory import Memory
from halimede.core.config.model_view import ModelView
from halimede.core.types import (
    DeviceReport,
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    ModelIndexEntry,
    ServerMetadata,
    invalid,
    shortage_of,
)
from halimede.core.types.caller import Caller
from halimede.core.types.kv_cache import KvCache
from halimede.core.types.statistics import ModelStatistics
from halimede.facade.lookup import ModelLookup
from halimede.facade.server import LoadParameter, OnResponse
from halimede.front_processes import asks
from halimede.front_processes.core_life import CoreLife
from halimede.front_processes.groups import decode_answers
from halimede.front_processes.outgoing import Outgoing
from halimede.front_processes.page import Page
from halimede.front_processes.questions import KnownModels, Questions
from halimede.inference_frames.calls import decode_call_answer
from halimede.inference_frames.kinds import CALL, TAKEN, InferenceFrame

_MAX_NUMBER = (1 << 32) - 1
_CANCELLED = InferenceError(ErrorCode.CANCELLED, "request was cancelled")


class RemoteServer:
    """Implements `facade.server.Server`. All methods are called on the event loop's thread."""

    def __init__(
        self,
        channel: Channel,
        memory: Memory,
        page: Page,
        core_life: CoreLife,
        metadata: ServerMetadata,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._memory = memory
        self._page = page
        self._core_life = core_life
        self._metadata = metadata
        self._loop = loop
        self._next = 1
        self._waiting: dict[int, OnResponse] = {}
        """By the number of each inference in flight."""
        self._outgoing = Outgoing(channel, memory, loop, self._fail)
        self._questions = Questions(channel)
        self._models = KnownModels(self._questions, page)

    def __repr__(self) -> str:
        return f"<RemoteServer in_flight={len(self._waiting)} {self._questions!r} {self._models!r}>"

    # What the page has.

    def is_live(self) -> bool:
        return self._core_life.is_live()

    def is_ready(self) -> bool:
        return self._page.is_ready and self._core_life.is_live()

    def is_draining(self) -> bool:
        return self._page.is_draining

    # What the core is asked.

    def metadata(self) -> ServerMetadata:
        return self._metadata

    def model(self, name: str, version: str = "") -> ModelView | ModelLookup:
        return self._models.find(name, version)

    async def is_model_ready(self, name: str, version: str = "") -> bool:
        return await self._questions.ask(asks.IS_MODEL_READY, name, version)

    async def kv_cache(self, model: str) -> KvCache | None:
        return await self._questions.ask(asks.KV_CACHE, model)

    async def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        return await self._questions.ask(asks.STATISTICS, name, version)

    async def repository_index(self, ready_only: bool) -> Sequence[ModelIndexEntry]:
        return await self._questions.ask(asks.REPOSITORY_INDEX, ready_only)

    async def devices(self) -> DeviceReport:
        return await self._questions.ask(asks.DEVICES)

    async def load_model(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        await self._questions.ask(asks.LOAD_MODEL, name, parameters)

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        await self._questions.ask(asks.UNLOAD_MODEL, name, unload_dependents)

    # Inferences.

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller | None = None) -> int:  # noqa: ARG002  a client has none
        number = self._next
        while number in self._waiting:
            number = number % _MAX_NUMBER + 1
        self._next = number % _MAX_NUMBER + 1
        self._waiting[number] = on_response
        self._outgoing.infer(number, request)
        return number

    def cancel(self, ticket: int) -> None:
        if self._outgoing.try_take_back(ticket):
            self._take(ticket, InferenceResponse("", "", error=_CANCELLED))
        else:
            self._send_about(ticket, encode_frame(InferenceFrame.CANCEL_CALL, CALL.pack(ticket)))

    def acknowledge(self, ticket: int, responses: int = 1) -> None:
        self._send_about(ticket, encode_frame(InferenceFrame.TAKEN, TAKEN.pack(ticket, responses)))

    def _send_about(self, number: int, frame: bytes) -> None:
        if number in self._waiting:
            self._outgoing.send_about(number, frame)

    def _fail(self, number: int, error: Exception) -> None:
        """A request cannot be sent."""
        failed = shortage_of(error) or invalid(str(error))
        self._loop.call_soon_threadsafe(partial(self._take, number, InferenceResponse("", "", error=failed)))

    def on_answers(self, body: memoryview) -> None:
        """An ANSWERS frame."""
        for number, response in decode_answers(body, self._memory.view_retained):
            self._take(number, response)
        self._outgoing.report_unused_soon()

    def on_answer(self, body: memoryview) -> None:
        """A CALL_ANSWER frame."""
        self._take(*decode_call_answer(body, self._memory.view_retained))
        self._outgoing.report_unused_soon()

    def _take(self, number: int, response: InferenceResponse) -> None:
        waiting = self._waiting
        on_response = waiting.pop(number, None) if response.final else waiting.get(number)
        if on_response is not None:
            on_response(response)
