import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count

import pytest

from halimede_operator.core.process.workqueue import Failure
from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.queue import Done, Failed, Gone, Metered, Outcome, Queue


def key(name: str) -> Key:
    return Key(Kind.INFERENCE_MODEL, "prod", name)


async def serving(
    queue: Queue, work: Callable[[Key], Awaitable[Outcome]], scenario: Callable[[], Awaitable[None]]
) -> None:
    running = asyncio.create_task(queue.run(work))
    async with asyncio.timeout(20):
        await scenario()
        await queue.stop(within_s=5)
        await running


def test_keys_run_in_parallel_up_to_the_number_of_workers_each_alone():
    async def whole() -> None:
        queue = Queue(workers=3)
        now, most, twice = set[Key](), 0, False
        done = asyncio.Event()
        count = 0

        async def work(name: Key) -> Outcome:
            nonlocal most, twice, count
            twice = twice or name in now
            now.add(name)
            most = max(most, len(now))
            queue.add(name)
            await asyncio.sleep(0.01)
            now.discard(name)
            count += 1
            if count == 20:
                done.set()
            return Done()

        async def scenario() -> None:
            for n in range(8):
                queue.add(key(str(n)))
            await done.wait()

        await serving(queue, work, scenario)
        assert (most, twice) == (3, False)

    asyncio.run(whole())


def test_failed_keys_are_retried_and_gone_keys_are_not():
    async def whole() -> None:
        queue = Queue()
        runs: list[str] = []
        done = asyncio.Event()

        async def work(name: Key) -> Outcome:
            runs.append(name.name)
            match name.name, runs.count(name.name):
                case "gone", _:
                    return Gone()
                case "conflict", 1:
                    return Failed(Failure.CONFLICT, "409")
                case "breaks", 1:
                    raise KeyError("a bug")
                case "asked to wait", 1:
                    return Failed(Failure.CONFLICT, "429", retry_after_s=0.5)
            if {"conflict", "breaks", "asked to wait"} == {name for name in runs if runs.count(name) == 2}:
                done.set()
            return Done()

        async def scenario() -> None:
            for name in ("gone", "conflict", "breaks", "asked to wait"):
                queue.add(key(name))
            await done.wait()

        await serving(queue, work, scenario)
        assert runs.count("gone") == 1
        assert runs.index("breaks", runs.index("breaks") + 1) > runs.index("conflict", runs.index("conflict") + 1)

    asyncio.run(whole())


def test_stop_waits_for_running_work_and_starts_none():
    async def whole() -> None:
        queue = Queue(workers=1)
        begun, finished = asyncio.Event(), list[str]()

        async def work(name: Key) -> Outcome:
            begun.set()
            await asyncio.sleep(0.2)
            finished.append(name.name)
            return Done()

        async def scenario() -> None:
            queue.add(key("first"))
            queue.add(key("second"))
            await begun.wait()

        await serving(queue, work, scenario)
        assert finished == ["first"]

    asyncio.run(whole())


def test_stop_cancels_work_that_takes_too_long():
    async def whole() -> None:
        queue = Queue()
        begun = asyncio.Event()

        async def work(_name: Key) -> Outcome:
            begun.set()
            await asyncio.Event().wait()
            return Done()

        running = asyncio.create_task(queue.run(work))
        queue.add(key("slow"))
        await begun.wait()
        async with asyncio.timeout(10):
            await queue.stop(within_s=0.1)
            await running

    asyncio.run(whole())


def test_a_refusal_that_is_retried_is_logged_once(caplog: pytest.LogCaptureFixture):
    async def whole() -> None:
        clock = count(0.0, 60.0)
        queue = Queue(lambda: next(clock))
        answers = iter(["no right", "no right", "no quota", "no quota"])

        async def work(name: Key) -> Outcome:
            why = next(answers, None)
            if why is None:
                ended.set()
                return Gone()
            return Failed(Failure.PERMANENT, why)

        ended = asyncio.Event()

        async def scenario() -> None:
            queue.add(key("a"))
            await ended.wait()

        with caplog.at_level(logging.INFO):
            await serving(queue, work, scenario)

    asyncio.run(whole())
    assert [record.args[-1] for record in caplog.records if isinstance(record.args, tuple)] == ["no right", "no quota"]


def test_work_that_takes_cpu_is_metered_and_cancelled_like_other_work():
    async def whole() -> None:
        cleaned, is_waiting = [], asyncio.Event()

        async def work() -> Outcome:
            for _ in range(3):
                begun = time.thread_time()
                while time.thread_time() < begun + 0.01:
                    pass
                await asyncio.sleep(0.02)
            try:
                is_waiting.set()
                await asyncio.Event().wait()
            finally:
                cleaned.append(True)
            return Done()

        metered = Metered(work())
        task = asyncio.ensure_future(metered)
        await is_waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert metered.used_s >= 0.03
        assert cleaned == [True]

    asyncio.run(whole())


def test_a_flood_of_one_namespace_delays_no_other_namespace():
    async def whole() -> None:
        queue = Queue(workers=4, most_of_namespace=3)
        order = list[str]()
        edited, hold = asyncio.Event(), asyncio.Event()

        async def work(name: Key) -> Outcome:
            order.append(name.namespace)
            if name.namespace == "calm":
                edited.set()
            else:
                await hold.wait()
            return Done()

        async def scenario() -> None:
            for n in range(50):
                queue.add(Key(Kind.INFERENCE_MODEL, "flood", str(n)))
            await asyncio.sleep(0)
            queue.add(Key(Kind.INFERENCE_MODEL, "calm", "edit"))
            # All that the flood may have is taken, and stands still.
            await edited.wait()
            assert order[-1] == "calm"
            assert 1 <= order.count("flood") <= 3
            hold.set()

        await serving(queue, work, scenario)

    asyncio.run(whole())


def test_a_namespace_with_large_objects_has_fewer_workers():
    async def whole() -> None:
        queue = Queue(extra_cost_s=lambda key: 0.05 if key.namespace == "large" else 0.0)
        now, most = Counter[str](), Counter[str]()
        done = asyncio.Event()
        left = 40

        async def work(name: Key) -> Outcome:
            nonlocal left
            now[name.namespace] += 1
            most[name.namespace] = max(most[name.namespace], now[name.namespace])
            await asyncio.sleep(0.001)
            now[name.namespace] -= 1
            left -= 1
            if left == 0:
                done.set()
            return Done()

        async def scenario() -> None:
            for n in range(20):
                for namespace in ("large", "small"):
                    queue.add(Key(Kind.INFERENCE_MODEL, namespace, str(n)))
            await done.wait()

        await serving(queue, work, scenario)
        # A new namespace begins with two.
        assert most["large"] <= 2 < most["small"]

    asyncio.run(whole())
