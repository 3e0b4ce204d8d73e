"""What a front-end process sends the core about inferences: the requests of a turn of the loop in one frame, and what
follows them.

While the core does not read, requests wait here as they came, so that they count with their clients alone.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from halimede.channel.frames import ChannelFrame
from halimede.channel.json_frames import encode_blocks
from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.memory import Memory
from halimede.channel.process_end.reader import ServerGoneError
from halimede.channel.server_end.memory import COPIED_ON_LOOP_BYTES
from halimede.core.types import Buffer, InferenceRequest
from halimede.front_processes.groups import encode_infers

UNUSED_S = 0.05
"""How soon the core learns that memory of answers is free, if no other request tells it before."""


class Outgoing:
    """All methods are called on the event loop's thread."""

    def __init__(
        self,
        channel: Channel,
        memory: Memory,
        loop: asyncio.AbstractEventLoop,
        on_error: Callable[[int, Exception], None],
    ) -> None:
        """`on_error` gets the number of each request that cannot be sent, on any thread."""
        self._channel = channel
        self._memory = memory
        self._loop = loop
        self._on_error = on_error
        self._writer = channel.write_on_loop(loop, self._on_room)
        self._requests: list[tuple[int, InferenceRequest]] = []
        self._frames: list[bytes] = []
        """What is sent at the end of this turn of the loop: requests, then frames about earlier ones."""
        self._is_flushing = False
        self._held: OrderedDict[int, InferenceRequest] = OrderedDict()
        """Requests that have come while the core does not read."""
        self._copying: dict[int, list[bytes]] = {}
        """Large requests that are copied on a thread, with the frames that must follow them."""
        self._copies: set[asyncio.Task[None]] = set()
        self._reporting: asyncio.TimerHandle | None = None

    def infer(self, number: int, request: InferenceRequest) -> None:
        """Send a request."""
        if self._writer.is_blocked:
            self._held[number] = request
            return
        size = 0
        for tensor in request.inputs:
            size += len(tensor.data)
        if size > COPIED_ON_LOOP_BYTES:
            self._copy_later(number, request)
        else:
            self._requests.append((number, request))
            if not self._is_flushing:
                self._flush_soon()

    def try_take_back(self, number: int) -> bool:
        """Take back a request that waits for the core to read."""
        return self._held.pop(number, None) is not None

    def send_about(self, number: int, frame: bytes) -> None:
        """Send a frame after the request of this number."""
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
            self._send(self._encode(requests))
        if frames:
            self._send(b"".join(frames))
        self._report_unused()

    def _on_room(self) -> None:
        """The core reads again."""
        while self._held and not self._writer.is_blocked:
            self.infer(*self._held.popitem(last=False))
            self._flush()

    def _encode(self, requests: Sequence[tuple[int, InferenceRequest]]) -> Any:
        return encode_infers(requests, self._memory.store, self._memory.take_wanted, self._on_error)

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
            self._on_error(number, error)
            del self._copying[number]
            return
        self._send([frame, *self._copying.pop(number)])

    def _send(self, message: "Buffer | list[Buffer]") -> None:
        """Send frames, unless the core has ended: the process then reads that next, and ends too."""
        with suppress(ServerGoneError):
            self._channel.send(message)

    # Memory of answers.

    def _report_unused(self) -> None:
        memory = self._memory
        if not memory.inbound.released:
            return
        with memory.reporting:
            unused = memory.unused()
            if unused:
                self._send(encode_blocks(ChannelFrame.UNUSED, unused))

    def report_unused_soon(self) -> None:
        """Tell the core which memory of answers is free, unless a request tells it before."""
        if self._reporting is None and self._memory.has_retained:
            self._reporting = self._loop.call_later(UNUSED_S, self._report_later)

    def _report_later(self) -> None:
        self._reporting = None
        self._report_unused()
        self.report_unused_soon()
