"""A system that refuses new threads: work that needs one fails or is delayed, but never hangs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from halimede.backends.hosting import Answer
from halimede.core.types import InferenceError
from support.channel import LIMIT_S, done_frame, item, stage

MIB = 1 << 20


class Threads(ThreadPoolExecutor):
    """The loop's thread pool, which raises Python's error for a refused thread while none is available."""

    there_are_some = False

    def submit(self, *args: Any, **named: Any) -> Future[Any]:
        if not self.there_are_some:
            raise RuntimeError("can't start new thread")
        return super().submit(*args, **named)


def without_threads(scenario: Callable[[Threads], Awaitable[None]]) -> None:
    async def main() -> None:
        threads = Threads()
        asyncio.get_running_loop().set_default_executor(threads)
        await asyncio.wait_for(scenario(threads), LIMIT_S)
        threads.there_are_some = True

    asyncio.run(main())


def test_large_batch_is_sent_in_its_frame_without_a_free_thread() -> None:
    async def scenario(_: Threads) -> None:
        async with stage() as each:
            each.connection.batches.execute([item(1, 16 * MIB)], 0)
            execute = await each.receive_batch()
            assert [each_item.key for each_item in execute.items] == [1]
            assert (each.lost, each.heard.done) == ([], [])

    without_threads(scenario)


def test_large_batch_fails_and_frees_its_memory_without_a_free_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The log record that pytest keeps would hold the traceback, and with it the memory.
    caplog.set_level(logging.CRITICAL, "halimede.workers.connection.batches")

    async def scenario(threads: Threads) -> None:
        async with stage() as each:
            threads.there_are_some = True
            each.connection.batches.execute([item(1, 16 * MIB)], 0)
            await each.receive_batch()
            await each.send(done_frame(1, [Answer([])]))
            await each.until(lambda: each.heard.done, "the end of the first batch")
            threads.there_are_some = False
            each.connection.batches.execute([item(2, 8 * MIB), item(3, 8 * MIB)], 0)
            await each.until(lambda: len(each.heard.done) == 2, "the end of the second batch")
            batch, done = each.heard.done[1]
            assert [type(reply) for reply in done.replies] == [InferenceError, InferenceError]
            assert (batch.number, done.failed, each.lost, each.connection.batches.running) == (2, True, [], ())
            threads.there_are_some = True
            each.connection.batches.execute([item(4, 16 * MIB)], 0)
            execute = await each.receive_batch()
            assert bytes(execute.items[0].request.inputs[0].data) == bytes(item(4, 16 * MIB).request.inputs[0].data)
            del execute

    without_threads(scenario)
