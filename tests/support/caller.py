"""A model in a worker that requests inferences, and the server's end of its channel."""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from halimede.backends.hosting import Call, Host, HostedRequest, Reply
from halimede.core.types import InferenceRequest, InferenceResponse, Tensor
from support.channel import (
    ARENA_BYTES,
    LIMIT_S,
    Asked,
    HonestWorker,
    Script,
    Stage,
    item,
    stage,
    tensor,
)

KIB, MIB = 1 << 10, 1 << 20


class Caller:
    """A model with code from the test, and its host."""

    def __init__(self, each: Stage, worker: HonestWorker) -> None:
        self.stage = each
        self.worker = worker
        self.heard = each.heard

    async def executed(self, *sizes: int, key: int = 1, slot: int = 0) -> list[Reply]:
        """Execute one request completely and return its replies."""
        before = len(self.heard.done)
        self.stage.connection.batches.execute([item(key, *(sizes or (10,)))], slot)
        await self.stage.until(lambda: len(self.heard.done) > before, "the batch")
        return self.heard.done[-1][1].replies

    async def until(self, condition: Callable[[], object], what: str) -> None:
        await self.stage.until(lambda: self.worker.failure or condition(), what)
        if self.worker.failure is not None:
            raise self.worker.failure

    async def nothing_is_held(self) -> None:
        """Wait until all memory is free again on both sides, as the worker has reported."""
        self.heard.asked.clear()
        self.heard.done.clear()
        gc.collect()

        async def is_so() -> bool:
            # The server reads the freed blocks only when it needs a block.
            await self.executed(20 * KIB)
            self.heard.done.clear()
            return " 0 blocks" in repr(self.stage.connection) and not self.worker.memory.outbound.blocks.blocks

        for _ in range(100):
            if await is_so():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{self.stage.connection!r}, {self.worker.memory.outbound.blocks!r}")


Execute = Callable[[Host, Sequence[HostedRequest]], Any]


@asynccontextmanager
async def calling(
    execute: Execute,
    *,
    on_ask: Callable[[Asked], None] | None = None,
    is_async: bool = False,
    decoupled: bool = False,
    arena: int = ARENA_BYTES,
) -> AsyncIterator[Caller]:
    """Start a worker that runs this code for each batch, and check that it ends normally."""
    async with stage(arena) as each:
        each.heard.on_ask = on_ask
        worker = HonestWorker(
            os.dup(each.worker_end.fileno()),
            lambda host: Script(lambda requests: execute(host, requests), is_async),
            decoupled,
        )
        each.worker_end.close()
        caller = Caller(each, worker)
        try:
            yield caller
            assert each.lost == []
            await asyncio.wait_for(each.connection.stop(), LIMIT_S)
        finally:
            each.connection.close()
            await asyncio.to_thread(worker.join, LIMIT_S)
        assert worker.failure is None
        assert not worker.is_alive()
        each.heard.done.clear()
        each.heard.asked.clear()
        del worker.memory, worker.channel, worker.host, caller.worker


def doubled(asked: Asked) -> None:
    """Answer at once; each output is its input repeated twice."""
    asked.answer(
        *(Tensor(f"2{x.name}", x.datatype, (2 * len(x.data),), bytes(x.data) * 2) for x in asked.request.inputs)
    )


def ask(host: Host, *sizes: int, first: int = 0, **fields: Any) -> Call:
    inputs = [tensor(f"x{at}", size, first) for at, size in enumerate(sizes)]
    return host.infer(InferenceRequest("other", inputs=inputs, **fields))


def received(call: Call) -> InferenceResponse:
    response = call.receive()
    assert response is not None
    if response.error is not None:
        raise response.error
    return response


def on_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work` on this many threads, wait for all, and raise the first failure."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a call did not return"
    if failures:
        raise failures[0]
