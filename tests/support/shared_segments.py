"""Connections to the real code of workers that share segments."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halimede.backends.hosting import Answer, HostedRequest, Reply
from halimede.channel.frames import FIRST_SHARED
from halimede.channel.segments import Lease
from halimede.channel.server_end.memory import ARENA_BYTES
from halimede.core.types import Buffer, InferenceRequest, Tensor
from halimede.workers.worker import BatchItem
from support.channel import (
    LIMIT_S,
    HonestWorker,
    Script,
    Stage,
    leaving_nothing,
    one_of_several,
    tensor,
)
from support.loops import in_a_loop

MIB = 1 << 20
SIZE = 2 * MIB


def is_shared(data: Buffer) -> bool:
    """Whether these bytes, in a worker, are memory of another worker."""
    return isinstance(data, memoryview) and isinstance(data.obj, Lease) and data.obj.block[0] >= FIRST_SHARED


def number_of(request: HostedRequest) -> int:
    return int.from_bytes(bytes(request.request.inputs[0].data[:4]), "little")


def make(size: int = SIZE) -> Callable[[Sequence[HostedRequest]], list[Reply]]:
    """A model that answers a number with new bytes that contain it, and 0 with no bytes."""

    def run(requests: Sequence[HostedRequest]) -> list[Reply]:
        numbers = [number_of(one) for one in requests]
        return [Answer([tensor("out", size, number)] if number else []) for number in numbers]

    return run


@dataclass
class Reader:
    """A model that reads its inputs, and records whether they were correct and whether they were shared."""

    keeps: bool = False
    writes: bool = False
    passes_on: bool = False
    right: list[bool] = field(default_factory=list)
    shared: list[bool] = field(default_factory=list)
    kept: list[np.ndarray[Any, Any]] = field(default_factory=list)

    def __call__(self, requests: Sequence[HostedRequest]) -> list[Reply]:
        return [self._answer(one) for one in requests]

    def _answer(self, one: HostedRequest) -> Reply:
        expected = bytes(tensor("in", len(one.request.inputs[0].data), number_of(one)).data)
        for each in one.request.inputs:
            seen = np.frombuffer(each.data, np.uint8)
            self.right.append(bytes(seen) == expected)
            self.shared.append(is_shared(each.data))
            if self.keeps:
                self.kept.append(seen)
        if self.writes:
            # In sequence, so that a write that is visible in the other input is noticed.
            for each in one.request.inputs:
                np.frombuffer(each.data, np.uint8)[:] += 1
        if not self.passes_on:
            return Answer([])
        return Answer([Tensor("out", each.datatype, each.shape, each.data) for each in one.request.inputs[:1]])


class Worker:
    """A connection to the worker's real code."""

    def __init__(self, stage: Stage, run: Callable[[Sequence[HostedRequest]], list[Reply]]) -> None:
        self.stage = stage
        self.connection = stage.connection
        self.process = HonestWorker(os.dup(stage.worker_end.fileno()), lambda _: Script(run))
        stage.worker_end.close()

    async def ask(self, key: int, *inputs: Tensor) -> Sequence[Tensor]:
        """The answer to a batch of one request."""
        before = len(self.stage.heard.done)
        self.connection.batches.execute([BatchItem(key, InferenceRequest("m", inputs=list(inputs)), 1, False)], 0)
        await self.stage.until(lambda: len(self.stage.heard.done) > before, "the batch")
        _, done = self.stage.heard.done.pop()
        [reply] = done.replies
        assert isinstance(reply, Answer), reply
        return reply.outputs

    async def answer(self, key: int, name: str = "in") -> Tensor:
        """The worker's output for a number, as an input of another worker."""
        [output] = await self.ask(key, tensor("in", 8, key))
        return Tensor(name, output.datatype, output.shape, output.data)

    def blocks(self) -> int:
        """The number of used blocks in its arena."""
        return self.process.memory.outbound.blocks.blocks

    async def check_blocks(self, count: int) -> None:
        """Wait until this number of blocks is in use. The worker learns of freed blocks with the next frame that it receives."""
        for _ in range(1000):
            await self.ask(0, tensor("in", 8))
            if self.blocks() == count:
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"{self.blocks()} blocks are in use, not {count}")

    async def end(self) -> None:
        self.connection.close()
        await asyncio.to_thread(self.process.join, LIMIT_S)
        assert self.process.failure is None
        assert not self.process.is_alive()


@asynccontextmanager
async def worker(
    run: Callable[[Sequence[HostedRequest]], list[Reply]], arena_bytes: int = ARENA_BYTES
) -> AsyncIterator[Worker]:
    async with one_of_several(arena_bytes) as stage:
        each = Worker(stage, run)
        try:
            yield each
            assert stage.lost == []
        finally:
            await each.end()
            del each.process.memory, each.process.channel, each.process.host, each.connection


async def warm_up(owner: Worker, reader: Reader, reader_worker: Worker, at_once: int = 4) -> None:
    """Send inputs until `at_once` of them are shared: the first are copied, and each segment must be mapped first."""
    for _ in range(50):
        answers = [await owner.answer(key) for key in range(1, 1 + at_once)]
        for key, answer in enumerate(answers, 1):
            await reader_worker.ask(key, answer)
        reader.kept.clear()
        if all(reader.shared[-at_once:]):
            del answers, answer
            await reader_worker.ask(0, tensor("in", 8))
            reader.kept.clear()
            await owner.check_blocks(0)
            return
    raise AssertionError("nothing was shared")


def play(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, and that leaves nothing."""

    @functools.wraps(scenario)
    async def run(**fixtures: object) -> None:
        async with leaving_nothing():
            await scenario(**fixtures)

    return in_a_loop(run)
