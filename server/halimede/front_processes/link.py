"""The core's end of the channel to one front-end process.

A front end is trusted more than a model's process, but what it sends is checked in the same way: it parses what
strangers send. Its inferences are cancelled when it ends.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

from halimede.channel.frames import INLINE_BYTES, ChannelFrame, encode_frame
from halimede.channel.server_end.channel import Channel
from halimede.channel.server_end.memory import Memory
from halimede.channel.server_end.starting import StartAnswer
from halimede.channel.server_end.tasks import Tasks
from halimede.core.accounts import UNBOUNDED, MemoryBounds
from halimede.core.types import InferenceError, InferenceResponse, Tensor
from halimede.facade.server import Server
from halimede.front_processes.asks import AnyQuestion, answer, decode_ask
from halimede.front_processes.frames import FRONT_FRAMES, FrontFrame
from halimede.front_processes.groups import decode_infers, encode_answers, wanted_bytes
from halimede.inference_frames.answers import AnswerSender
from halimede.inference_frames.inferences import Inference, Inferences


class FrontLink:
    """The channel to one process. All methods are called on the event loop's thread."""

    def __init__(
        self,
        channel: socket.socket,
        server: Server,
        on_lost: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
        memory: MemoryBounds = UNBOUNDED,
    ) -> None:
        """`on_lost` gets the reason once it is closed."""
        self._server = server
        self._on_lost = on_lost
        self._loop = loop
        self._tasks = Tasks(loop)
        self._channel = Channel(channel, FRONT_FRAMES, self._on_channel_lost, loop)
        self._memory = Memory(self._channel, self._tasks, loop, bounds=memory)
        self._large = AnswerSender(self._channel, self._memory, self._tasks, "a front-end process")
        self._in_flight = Inferences(self._channel, server.cancel, server.acknowledge, self._answer)
        self._ready: list[tuple[int, InferenceResponse]] = []
        """Answers that are sent together at the end of this turn of the loop."""
        self._started = StartAnswer(self._channel, loop)
        self._drained: asyncio.Future[None] = loop.create_future()
        self._is_closed = False
        handle = self._channel.handle
        handle(FrontFrame.INFERS, self._on_infers)
        handle(FrontFrame.ASK, self._on_ask)
        handle(FrontFrame.DRAINED, self._on_drained)

    def __repr__(self) -> str:
        return f"<FrontLink in_flight={len(self._in_flight)}>"

    async def start(self, order: bytes, descriptors: tuple[int, ...]) -> None:
        """Send the encoded order to start, with descriptors, which are closed here; returns when the process serves.
        InferenceError if it fails; cancelled if it dies."""
        self._channel.send(encode_frame(ChannelFrame.START, order), descriptors)
        await self._started.wait()

    def tell(self, kind: IntEnum) -> None:
        """Send LEAVE, DRAIN or REOPEN."""
        self._channel.send(encode_frame(kind))

    async def drained(self) -> None:
        """Return when the process has no connection left, or has ended."""
        await asyncio.wait((self._drained,))

    def close(self) -> None:
        """Close the channel, which ends the process, and cancel its inferences. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._channel.close()
        self._tasks.cancel()
        self._large.close()
        self._ready.clear()
        self._started.cancel()
        self._drained.cancel()
        self._in_flight.close()
        self._memory.close()

    def _on_channel_lost(self, reason: str) -> None:
        self.close()
        self._on_lost(reason)

    def _on_drained(self, _: memoryview) -> None:
        if not self._drained.done():
            self._drained.set_result(None)

    # Inferences.

    def _on_infers(self, body: memoryview) -> None:
        if wanted := wanted_bytes(body):
            self._memory.grow_outbound(wanted)
        add, infer = self._in_flight.add, self._server.infer
        for number, request in decode_infers(body, self._memory.locate):
            inference = add(number)
            inference.ticket = infer(request, inference.answer)

    def _answer(self, inference: Inference, response: InferenceResponse) -> None:
        """Send an answer with the others of this turn."""
        if response.error is not None and not inference.ticket:
            # The request was not accepted. Answers to others may have the same error, so it is copied.
            error = InferenceError(response.error.code, response.error.message, is_refusal=True)
            response = replace(response, error=error)
        if not self._ready:
            self._loop.call_soon(self._flush)
        self._ready.append((inference.number, response))

    def _flush(self) -> None:
        ready, self._ready = self._ready, []
        small: list[tuple[int, InferenceResponse]] = []
        for each in ready:
            outputs = each[1].outputs
            is_small = len(outputs) == 1 and len(outputs[0].data) <= INLINE_BYTES
            if (is_small or _all_small(outputs)) and not self._large.is_delayed:
                small.append(each)
                continue
            self._send_small(small)
            small = []
            self._large.send(*each)
        self._send_small(small)

    def _send_small(self, answers: Sequence[tuple[int, InferenceResponse]]) -> None:
        if not answers:
            return
        try:
            frame = encode_answers(answers, self._memory.store)
        except Exception:  # noqa: BLE001  one by one, which fails only what cannot be sent
            for each in answers:
                self._large.send(*each)
            return
        self._channel.send(frame)

    # Questions.

    def _on_ask(self, body: memoryview) -> None:
        self._tasks.run(self._answer_ask(*decode_ask(body)))

    async def _answer_ask(self, number: int, question: AnyQuestion, arguments: tuple[Any, ...]) -> None:
        self._channel.send(await answer(self._server, number, question, arguments))


def _all_small(outputs: Sequence[Tensor]) -> bool:
    return all(len(output.data) <= INLINE_BYTES for output in outputs)
