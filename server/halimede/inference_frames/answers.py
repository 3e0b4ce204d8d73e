"""Sends the answers of inferences to a process, in order; large ones are copied on a thread."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from halimede.channel.segments import Block
from halimede.channel.server_end.channel import Channel
from halimede.channel.server_end.memory import COPIED_ON_LOOP_BYTES, Memory
from halimede.channel.server_end.tasks import Tasks
from halimede.core.types import Buffer, InferenceError, InferenceResponse, internal, shortage_of, unavailable
from halimede.inference_frames.calls import encode_call_answer

log = logging.getLogger(__name__)


class AnswerSender:
    """CALL_ANSWER frames to one process. `send` is called on the event loop's thread."""

    def __init__(self, channel: Channel, memory: Memory, tasks: Tasks, whose: str) -> None:
        """`whose` names the process in log lines and errors."""
        self._channel = channel
        self._memory = memory
        self._tasks = tasks
        self._whose = whose
        self._delayed: deque[tuple[int, InferenceResponse]] = deque()
        """Answers that wait, in order, for a large one that is being copied."""

    @property
    def is_delayed(self) -> bool:
        """Whether answers wait for a large one."""
        return bool(self._delayed)

    def close(self) -> None:
        """Drop what waits: the process has ended."""
        self._delayed.clear()

    def send(self, number: int, response: InferenceResponse) -> None:
        """Send an answer to the inference of this number."""
        memory = self._memory
        size = 0
        for tensor in response.outputs:
            size += len(tensor.data)
        if self._delayed or (
            size > COPIED_ON_LOOP_BYTES and memory.bytes_to_copy(response.outputs) > COPIED_ON_LOOP_BYTES
        ):
            self._delayed.append((number, response))
            if len(self._delayed) == 1:
                self._tasks.run(self._send_delayed())
            return
        frame, blocks = self._encode(number, response)
        if blocks:
            memory.copy(memory.take_copies())
            memory.retain(blocks)
        self._channel.send(frame)

    async def _send_delayed(self) -> None:
        """Send the delayed answers; large ones are copied on a thread."""
        memory = self._memory
        while self._delayed:
            number, response = self._delayed[0]
            size_bytes = memory.bytes_to_copy(response.outputs)
            if size_bytes > COPIED_ON_LOOP_BYTES:
                try:
                    await memory.make_room(size_bytes)
                except InferenceError as error:
                    response = self._failed(response, error)
            frame, blocks = self._encode(number, response)
            try:
                if copies := memory.take_copies():
                    await asyncio.to_thread(memory.copy, copies)
            except Exception as error:  # noqa: BLE001  the inference must be answered
                memory.take_back(blocks)
                frame, blocks = self._encode(number, self._failed(response, error))
            self._delayed.popleft()
            memory.retain(blocks)
            self._channel.send(frame)

    def _encode(self, number: int, response: InferenceResponse) -> tuple[Buffer, Sequence[Block]]:
        """The frame and its blocks; an error's frame if the answer cannot be sent."""
        memory = self._memory
        most = memory.max_unsent_bytes
        if self._channel.unsent_bytes > most and response.error is None:
            text = f"more than {most} bytes wait for {self._whose} to read them"
            response = self._failed(response, unavailable(text))
        try:
            frame = encode_call_answer(number, response, memory.store)
        except Exception as error:
            log.error("%s: an answer could not be sent", self._whose, exc_info=error)
            memory.take_back(memory.take_stored())
            memory.take_copies()
            frame = encode_call_answer(number, self._failed(response, error), memory.store)
        return frame, memory.take_stored()

    def _failed(self, response: InferenceResponse, error: Exception) -> InferenceResponse:
        """The error that replaces an answer that cannot be sent."""
        if not isinstance(error, InferenceError):
            text = f"the answer could not be sent to {self._whose}: {error}"
            error = shortage_of(error) or internal(text)
        return InferenceResponse(response.model_name, response.model_version, error=error, final=response.final)
