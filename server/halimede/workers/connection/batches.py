"""Sends batches to one worker process and receives their ends and answers."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from halimede.channel.frames import HEADER, FrameError, encode_frame
from halimede.channel.segments import Block
from halimede.channel.server_end.channel import Channel
from halimede.channel.server_end.memory import COPIED_ON_LOOP_BYTES, Memory
from halimede.channel.server_end.tasks import Tasks
from halimede.core.types import Buffer, InferenceError, internal, shortage_of
from halimede.workers.claim import Claim
from halimede.workers.frames.answers import Done, Response, batch_of, check_length, decode_done, decode_response
from halimede.workers.frames.batches import encode_execute
from halimede.workers.frames.kinds import CREDIT, DONE, EXECUTE, EXECUTE_NEXT, KEY, WorkerFrame
from halimede.workers.worker import BatchItem

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SentBatch:
    """A batch that a worker has, and the blocks that its tensors lie in."""

    number: int
    slot: int
    items: list[BatchItem]
    blocks: Sequence[Block] = ()
    copied: asyncio.Event | None = None
    """Set when a batch that is copied off the loop has been sent, or will not be."""
    token: int | None = None
    """The token of a batch that was sent while its slot ran another one."""
    is_sent: bool = False
    is_taken_back: bool = False


class BatchOwner(Protocol):
    """Gets the ends of batches, and answers outside of them."""

    def on_done(self, batch: SentBatch, done: Done) -> None:
        """A batch has ended."""

    def on_response(self, response: Response) -> None:
        """An answer before or after the end of its batch."""


class SentBatches:
    """The batches of one worker, by number. All methods are called on the event loop's thread."""

    def __init__(
        self,
        channel: Channel,
        memory: Memory,
        tasks: Tasks,
        model: str,
        outputs: Sequence[str],
        claim: Claim,
        owner: BatchOwner,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._claim = claim
        self._channel = channel
        self._memory = memory
        self._tasks = tasks
        self._model = model
        self._outputs = tuple(outputs)
        self._owner = owner
        self._loop = loop
        self._running: dict[int, SentBatch] = {}
        self._next = 1
        channel.handle(WorkerFrame.DONE, self._on_done, self._check_partial)
        channel.handle(WorkerFrame.RESPONSE, self._on_response, self._check_partial)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def running(self) -> Sequence[SentBatch]:
        """The batches that the worker has not ended."""
        return tuple(self._running.values())

    def get(self, number: int) -> SentBatch | None:
        return self._running.get(number)

    def unread(self) -> Sequence[SentBatch]:
        """Batches that the worker has not begun. Called when its process has ended."""
        return [
            batch for batch in self._running.values() if not (batch.is_sent and self._claim.has_begun(batch.number))
        ]

    def close(self) -> None:
        """The worker is lost."""
        self._claim.close()

    def take_back(self, slot: int) -> SentBatch | None:
        """Take back the last batch of the slot, which ran another one; None if it has begun."""
        batch = next((batch for batch in reversed(self._running.values()) if batch.slot == slot), None)
        if batch is None or batch.token is None:
            return None
        if not batch.is_sent:
            batch.is_taken_back = True
        elif self._claim.try_take(batch.token, batch.number):
            self._memory.take_back(batch.blocks)
        else:
            return None
        del self._running[batch.number]
        return batch

    def execute(self, items: list[BatchItem], slot: int, *, is_next: bool = False) -> int:
        """Send a batch and return its number. Large tensors are copied after the return. `is_next`: the slot runs
        another one."""
        number = self._next
        # Never 0, which is no token.
        self._next = number + 1 & 0xFFFFFFFF or 1
        before, token = None, None
        if is_next:
            others = [each for each in self._running.values() if each.slot == slot]
            before = next((each.copied for each in others if not each.is_sent), None)
            # The token of the batch before may not be taken yet.
            token = 0 if not others or others[-1].token is None else 1 - others[-1].token
        batch = self._running[number] = SentBatch(number, slot, items, token=token)
        memory = self._memory
        size = 0
        for item in items:
            for tensor in item.request.inputs:
                size += len(tensor.data)
        if size > COPIED_ON_LOOP_BYTES:
            size = sum(memory.bytes_to_copy(item.request.inputs) for item in items)
        if size <= COPIED_ON_LOOP_BYTES and before is None:
            try:
                frame = self._encode(batch)
            except Exception as error:  # noqa: BLE001  the batch must end
                self._refuse(batch, error)
                return number
            if batch.blocks:
                memory.copy(memory.take_copies())
            self._send(batch, frame)
        else:
            batch.copied = asyncio.Event()
            self._tasks.run(self._execute_large(batch, size, before))
        return number

    async def _execute_large(self, batch: SentBatch, size_bytes: int, before: asyncio.Event | None) -> None:
        """Send a batch whose tensors are copied on a thread, or that follows such a batch."""
        try:
            await self._copy_and_send(batch, size_bytes, before)
        finally:
            if batch.copied is not None:
                batch.copied.set()

    async def _copy_and_send(self, batch: SentBatch, size_bytes: int, before: asyncio.Event | None) -> None:
        memory = self._memory
        copies: list[tuple[Block, Buffer]] = []
        try:
            await memory.make_room(size_bytes)
            frame = self._encode(batch)
            if copies := memory.take_copies():
                await asyncio.to_thread(memory.copy, copies)
        except Exception as error:  # noqa: BLE001  the batch must end
            # A thread pool that cannot grow raises, but may still copy later: the blocks are free from now on.
            copies.clear()
            self._refuse(batch, error)
            return
        if before is not None:
            await before.wait()
        if batch.is_taken_back:
            memory.take_back(batch.blocks)
            return
        self._send(batch, frame)

    def _encode(self, batch: SentBatch) -> Buffer:
        memory = self._memory
        try:
            kind = EXECUTE if batch.token is None else EXECUTE_NEXT[batch.token]
            return encode_execute(batch.number, batch.items, memory.store, kind)
        except BaseException:
            memory.take_copies()
            raise
        finally:
            batch.blocks = memory.take_stored()

    def _send(self, batch: SentBatch, frame: Buffer) -> None:
        channel = self._channel
        if channel.is_closed or channel.left_unread:
            return
        if batch.token is not None:
            self._claim.publish(batch.token, batch.number)
        channel.send(frame)
        batch.is_sent = not channel.left_unread

    def _refuse(self, batch: SentBatch, error: Exception) -> None:
        """End a batch that cannot be sent."""
        if isinstance(error, InferenceError):
            failure = error
        else:
            log.error("model '%s': a batch could not be sent to its process", self._model, exc_info=error)
            text = f"the batch could not be sent to the model's process: {error}"
            failure = shortage_of(error) or internal(text)
        self._memory.take_back(batch.blocks)
        if batch.is_taken_back:
            return
        del self._running[batch.number]
        done = Done(batch.number, [failure for _ in batch.items], True, (0, 0, 0), 0, [])
        self._loop.call_soon(self._owner.on_done, batch, done)

    def cancel(self, key: int) -> None:
        self._channel.send(encode_frame(WorkerFrame.CANCEL, KEY.pack(key)))

    def ask_cancel(self, key: int) -> None:
        self._channel.send(encode_frame(WorkerFrame.ASK_CANCEL, KEY.pack(key)))

    def acknowledge(self, key: int, responses: int) -> None:
        self._channel.send(encode_frame(WorkerFrame.CREDIT, CREDIT.pack(key, responses)))

    def _check_partial(self, kind: int, length: int, part: memoryview) -> bool:
        """See `channel.CheckPartial`."""
        if len(part) < HEADER.size * 2:
            return False
        if kind == DONE:
            self._ending(*batch_of(part))
        return check_length(kind, length, part, self._outputs)

    def _ending(self, number: int, count: int) -> SentBatch:
        """The batch that a DONE frame ends with `count` replies. FrameError."""
        batch = self._running.get(number)
        if batch is None or not batch.is_sent or count != len(batch.items):
            raise FrameError(f"an end of batch {number} with {count} answers, which it was not asked for")
        return batch

    def _on_done(self, body: memoryview) -> None:
        memory = self._memory
        batch = self._ending(*batch_of(body))
        done = decode_done(body, self._outputs, memory.locate)
        del self._running[done.batch]
        if batch.blocks or done.retained:
            memory.take_back(batch.blocks, done.retained)
        if done.wanted_bytes:
            memory.grow_outbound(done.wanted_bytes)
        self._owner.on_done(batch, done)

    def _on_response(self, body: memoryview) -> None:
        self._owner.on_response(decode_response(body, self._outputs, self._memory.locate))
