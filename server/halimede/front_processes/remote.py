"""`runtime.server.Server` in a front-end process: everything goes over the channel to the core."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from halimede.core.config.model_view import ModelView
from halimede.core.types import (
    Buffer,
    DeviceReport,
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    ModelIndexEntry,
    ServerMetadata,
    shortage_of,
)
from halimede.core.types.caller import Caller
from halimede.core.types.kv_cache import KvCache
from halimede.core.types.statistics import ModelStatistics
from halimede.front_processes.page import Page
from halimede.front_processes.questions import KnownModels, Questions
from halimede.runtime.server import LoadParameter, OnResponse
from halimede.workers.child.channel import Channel
from halimede.workers.child.memory import Memory
from halimede.workers.child.reader import ServerGoneError
from halimede.workers.frames.calls import decode_call_answer
from halimede.workers.frames.groups import decode_answers, encode_infers
from halimede.workers.frames.json_frames import encode_blocks
from halimede.workers.frames.kinds import CALL, TAKEN, FrameKind, encode_frame
from halimede.workers.server.memory import COPIED_ON_LOOP_BYTES

UNUSED_S = 0.05
"""How soon the core learns that memory of answers is free, if no other request tells it before."""

_MAX_NUMBER = (1 << 32) - 1


class RemoteServer:
    """Implements `runtime.server.Server`. All methods are called on the event loop's thread."""

    def __init__(
        self, channel: Channel, memory: Memory, page: Page, metadata: ServerMetadata, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._channel = channel
        self._memory = memory
        self._metadata = metadata
        self._loop = loop
        self._next = 1
        self._waiting: dict[int, OnResponse] = {}
        """By the number of each inference in flight."""
        self._requests: list[tuple[int, InferenceRequest]] = []
        self._frames: list[bytes] = []
        """What is sent at the end of this turn of the loop: requests, then frames about earlier ones."""
        self._is_flushing = False
        self._copying: dict[int, list[bytes]] = {}
        """Large requests that are copied on a thread, with the frames that must follow them."""
        self._copies: set[asyncio.Task[None]] = set()
        self._questions = Questions(channel, loop)
        self._models = KnownModels(self._questions, page)
        self._reporting: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<RemoteServer in_flight={len(self._waiting)}>"

    # What the core is asked.

    def metadata(self) -> ServerMetadata:
        return self._metadata

    def is_live(self) -> bool:
        # The core is asked, so that a liveness probe fails when the core hangs.
        return bool(self._questions.ask_now("is_live"))

    def is_ready(self) -> bool:
        return bool(self._questions.ask_now("is_ready"))

    def is_draining(self) -> bool:
        return bool(self._questions.ask_now("is_draining"))

    def model(self, name: str, version: str = "") -> ModelView:
        return self._models.find(name, version)

    async def is_model_ready(self, name: str, version: str = "") -> bool:
        return bool(await self._questions.ask("is_model_ready", name, version))

    def kv_cache(self, model: str) -> KvCache | None:
        cache: KvCache | None = self._questions.ask_now("kv_cache", model)
        return cache

    async def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        statistics: Sequence[ModelStatistics] = await self._questions.ask("statistics", name, version)
        return statistics

    async def repository_index(self, ready_only: bool) -> Sequence[ModelIndexEntry]:
        index: Sequence[ModelIndexEntry] = await self._questions.ask("repository_index", ready_only)
        return index

    async def devices(self) -> DeviceReport:
        report: DeviceReport = await self._questions.ask("devices")
        return report

    async def load_model(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        await self._questions.ask("load_model", name, dict(parameters))

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        await self._questions.ask("unload_model", name, unload_dependents)

    # Inferences.

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller | None = None) -> int:  # noqa: ARG002  a client has none
        number = self._next
        while number in self._waiting:
            number = number % _MAX_NUMBER + 1
        self._next = number % _MAX_NUMBER + 1
        self._waiting[number] = on_response
        size = 0
        for tensor in request.inputs:
            size += len(tensor.data)
        if size > COPIED_ON_LOOP_BYTES:
            self._copy_later(number, request)
        else:
            self._requests.append((number, request))
            if not self._is_flushing:
                self._flush_soon()
        return number

    def cancel(self, ticket: int) -> None:
        self._send_about(ticket, encode_frame(FrameKind.CANCEL_CALL, CALL.pack(ticket)))

    def acknowledge(self, ticket: int, responses: int = 1) -> None:
        self._send_about(ticket, encode_frame(FrameKind.TAKEN, TAKEN.pack(ticket, responses)))

    def _send_about(self, number: int, frame: bytes) -> None:
        if number not in self._waiting:
            return
        if (later := self._copying.get(number)) is not None:
            later.append(frame)
            return
        self._frames.append(frame)
        if not self._is_flushing:
            self._flush_soon()

    def _flush_soon(self) -> None:
        self._is_flushing = True
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        requests, self._requests = self._requests, []
        frames, self._frames = self._frames, []
        if requests:
            _send(self._channel, self._encode(requests))
        if frames:
            _send(self._channel, b"".join(frames))
        self._report_unused()

    def _encode(self, requests: Sequence[tuple[int, InferenceRequest]]) -> Any:
        return encode_infers(requests, self._memory.place, self._memory.take_wanted, self._fail)

    def _fail(self, number: int, error: Exception) -> None:
        """A request cannot be sent."""
        failed = shortage_of(error) or InferenceError(ErrorCode.INVALID_ARG, str(error))
        self._loop.call_soon_threadsafe(partial(self._take, number, InferenceResponse("", "", error=failed)))

    def _copy_later(self, number: int, request: InferenceRequest) -> None:
        self._copying[number] = []
        task = self._loop.create_task(self._copy(number, request))
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)

    async def _copy(self, number: int, request: InferenceRequest) -> None:
        """Send a large request, whose bytes are copied on a thread."""
        try:
            frame = await asyncio.to_thread(self._encode, [(number, request)])
        except Exception as error:  # noqa: BLE001  the request must be answered
            self._fail(number, error)
            del self._copying[number]
            return
        _send(self._channel, [frame, *self._copying.pop(number)])

    def on_answers(self, body: memoryview) -> None:
        """An ANSWERS frame."""
        for number, response in decode_answers(body, self._memory.view_retained):
            self._take(number, response)
        self._report_unused_soon()

    def on_answer(self, body: memoryview) -> None:
        """A CALL_ANSWER frame."""
        self._take(*decode_call_answer(body, self._memory.view_retained))
        self._report_unused_soon()

    def _take(self, number: int, response: InferenceResponse) -> None:
        waiting = self._waiting
        on_response = waiting.pop(number, None) if response.final else waiting.get(number)
        if on_response is not None:
            on_response(response)

    # Memory.

    def _report_unused(self) -> None:
        memory = self._memory
        if not memory.inbound.released:
            return
        with memory.reporting:
            unused = memory.unused()
            if unused:
                _send(self._channel, encode_blocks(FrameKind.UNUSED, unused))

    def _report_unused_soon(self) -> None:
        if self._reporting is None and self._memory.has_retained:
            self._reporting = self._loop.call_later(UNUSED_S, self._report_later)

    def _report_later(self) -> None:
        self._reporting = None
        self._report_unused()
        self._report_unused_soon()


def _send(channel: Channel, message: "Buffer | list[Buffer]") -> None:
    """Send frames, unless the core has ended: the process then reads that next, and ends too."""
    with suppress(ServerGoneError):
        channel.send(message)
