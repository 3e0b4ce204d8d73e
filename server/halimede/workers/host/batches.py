"""Receives batches, executes them and sends their answers.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from enum import IntEnum

from halimede.backends.hosting import RESCHEDULED, BatchReply, Rescheduled, Runner, WorkerSpec
from halimede.channel.frames import ChannelFrame, encode_frame
from halimede.channel.json_frames import encode_blocks
from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.memory import Memory
from halimede.channel.process_end.reader import ServerGoneError
from halimede.channel.segments import Block
from halimede.core.spin import SpinPolicy
from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.claim import Claim
from halimede.workers.frames.answers import encode_done
from halimede.workers.frames.batches import ExecuteFrame, batch_number, decode_execute
from halimede.workers.frames.kinds import EXECUTE_NEXT, FORGET, WorkerFrame
from halimede.workers.host.calls import batch_of_task
from halimede.workers.host.worker_host import WorkerHost

CANCELLED = InferenceError(ErrorCode.CANCELLED, "request was cancelled")


class BatchRunner:
    """Receives batches, executes them and sends their answers."""

    def __init__(
        self,
        channel: Channel,
        memory: Memory,
        host: WorkerHost,
        runner: Runner,
        spec: WorkerSpec,
        outputs: Sequence[str],
        spin: SpinPolicy,
        claim: Claim,
    ) -> None:
        self._claim = claim
        self._channel = channel
        self._memory = memory
        self._host = host
        self._requests = host.requests
        self._spin = spin
        self._runner = runner
        channel.handle(WorkerFrame.FORGET, self._on_forget)
        self._ends_at_once = spec.decoupled and not runner.ends_late
        self._positions = {name: position for position, name in enumerate(outputs)}
        self._blocks: list[Block] = []
        """The blocks of the batch that is being decoded or answered."""
        self._unused: list[Block] = []
        self._last_size = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped: asyncio.Event = asyncio.Event()
        self._executing = 0
        """The tasks that execute batches on the loop."""
        self._next: deque[tuple[IntEnum, memoryview]] = deque()
        """Batches that begin when no other one runs on the loop."""

    def run(self) -> None:
        """Execute one batch after the other until STOP."""
        channel = self._channel
        answered_ns = 0
        while True:
            if self._memory.inbound.released:
                self._host.give_back()
            kind, body = channel.receive()
            if kind is WorkerFrame.EXECUTE or (kind in EXECUTE_NEXT and self._is_claimed(kind, body)):
                gap_ns = time.monotonic_ns() - answered_ns
                self._execute(body)
                answered_ns = time.monotonic_ns()
                channel.spins = self._spin.is_worth(gap_ns, self._last_size)
            elif kind is WorkerFrame.ASK_READY:
                self._send_ready(asyncio.run(self._runner.is_ready()))
            elif kind is ChannelFrame.STOP:
                self._close()
                return
            # An idle process must not keep the last batch alive.
            del body

    async def run_on_loop(self) -> None:
        """The same for a runner whose batches are coroutines."""
        loop = asyncio.get_running_loop()
        self._channel.read_on_loop(loop, self._on_work)
        self._on_work()
        await self._stopped.wait()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._close()

    def _on_work(self) -> None:
        while (work := self._channel.received()) is not None:
            kind, body = work
            if kind is ChannelFrame.STOP:
                self._stopped.set()
                return
            if kind in EXECUTE_NEXT:
                self._next.append((kind, body))
                if not self._executing:
                    self._begin_next()
            elif kind is WorkerFrame.EXECUTE:
                self._begin(body)
            else:
                self._run(self._ask_ready())

    def _begin(self, body: memoryview) -> None:
        self._executing += 1
        self._run(self._execute_async(body)).add_done_callback(self._end)

    def _end(self, _: "asyncio.Task[None]") -> None:
        self._executing -= 1
        if not self._executing:
            self._begin_next()

    def _begin_next(self) -> None:
        """Begin the batch that waited for the one before it, if there is one and the server has not taken it back."""
        while self._next:
            kind, body = self._next.popleft()
            if self._is_claimed(kind, body):
                self._begin(body)
                return

    def _is_claimed(self, kind: IntEnum, body: memoryview) -> bool:
        """Whether this process has the batch of an EXECUTE_NEXT, or the server has taken it back."""
        return self._claim.try_take(EXECUTE_NEXT.index(kind), batch_number(body))

    def _run(self, job: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._done_with)
        return task

    def _done_with(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(task.exception(), ServerGoneError):
            self._stopped.set()

    def _on_forget(self, body: memoryview) -> None:
        self._runner.forget(*FORGET.unpack(body))

    async def _ask_ready(self) -> None:
        self._send_ready(await self._runner.is_ready())

    def _send_ready(self, is_ready: bool) -> None:
        self._channel.send(encode_frame(WorkerFrame.READY, bytes((is_ready,))))

    def _close(self) -> None:
        self._runner.close()
        self._host.give_back()
        self._channel.send(encode_frame(WorkerFrame.STOPPED))

    def _decode(self, body: memoryview, blocks: list[Block]) -> tuple[ExecuteFrame, int]:
        """The batch, and the time when its execution begins."""
        self._blocks = blocks
        self._claim.begin(batch_number(body))
        execute = decode_execute(body, len(self._positions), self._locate)
        begun = time.monotonic_ns()
        self._requests.add(execute.items, begun)
        return execute, begun

    def _locate(self, segment: int, offset: int, size_bytes: int) -> memoryview:
        self._blocks.append((segment, offset))
        return self._memory.view(segment, offset, size_bytes)

    def _execute(self, body: memoryview) -> None:
        received = time.monotonic_ns()
        blocks: list[Block] = []
        execute, begun = self._decode(body, blocks)
        host = self._host
        self._last_size = len(execute.items)
        batch_of_task.set(execute.batch)
        failed = False
        try:
            replies = self._runner.execute(execute.items)
        except InferenceError as error:
            replies, failed = [error.with_traceback(None) for _ in execute.items], True
        ended = time.monotonic_ns()
        self._answer(execute, replies, failed, (received, begun, ended), blocks)
        if host.ending:
            self._end_if_asked()

    def _end_if_asked(self) -> None:
        if self._host.ending:
            raise SystemExit(self._host.ending)

    async def _execute_async(self, body: memoryview) -> None:
        received = time.monotonic_ns()
        blocks: list[Block] = []
        execute, begun = self._decode(body, blocks)
        batch_of_task.set(execute.batch)
        items = list(execute.items)
        requests = self._requests
        if requests.cancelled_early and all(requests.open[item.key].cancelled for item in items):
            # No client waits for this batch. For example, the model called itself, and the call was cancelled.
            unwanted: list[BatchReply] = [CANCELLED for _ in items]
            self._answer(execute, unwanted, True, (received, begun, begun), blocks)
            return
        if self._ends_at_once:
            # The instance is free for the next batch at once: the answers are sent one by one.
            nothing: list[BatchReply] = [None for _ in execute.items]
            self._answer(execute, nothing, False, (received, begun, begun), blocks)
        failed = False
        replies: list[BatchReply]
        try:
            replies = await self._runner.execute_async(items)
        except InferenceError as error:
            replies, failed = [error.with_traceback(None) for _ in items], True
        if self._ends_at_once:
            for item, reply in zip(items, replies, strict=True):
                if reply is not None and not isinstance(reply, Rescheduled):
                    self._host.respond(item, reply, True)
        else:
            items.clear()
            self._answer(execute, replies, failed, (received, begun, time.monotonic_ns()), blocks)
        self._end_if_asked()

    def _answer(
        self,
        execute: ExecuteFrame,
        replies: list[BatchReply],
        failed: bool,
        times: tuple[int, int, int],
        blocks: list[Block],
    ) -> None:
        memory, channel = self._memory, self._channel
        opened = self._requests.open
        for item, reply in zip(execute.items, replies, strict=True):
            if reply is RESCHEDULED:
                self._requests.keep(item)
            elif reply is not None:
                opened.pop(item.key, None)
        # After this, only the model refers to the memory of the requests and the replies.
        del item, reply
        execute.items.clear()
        self._blocks = blocks
        with memory.reporting:
            done = encode_done(execute.batch, replies, failed, times, self._positions, memory.store, self._remains)
            if not self._unused:
                channel.send(done)
                return
            # Afterwards, because an answer may lie in one of them.
            channel.send([done, encode_blocks(ChannelFrame.UNUSED, self._unused)])
            self._unused = []

    def _remains(self) -> tuple[int, Sequence[Block]]:
        """See `frames.answers.Remains`, for the batch that is being answered."""
        memory = self._memory
        if memory.inbound.released:
            self._unused = memory.unused()
        return memory.take_wanted(), memory.retain(self._blocks) if self._blocks else ()
