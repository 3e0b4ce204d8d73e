"""Several inferences at a time: threads and loops that wait for them, limits, cancellation."""

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from halimede.backends.hosting import Answer, Host, HostedRequest, Reply
from halimede.backends.service_calls import MetricValue, UnloadModel
from halimede.channel.process_end.channel import ServerGoneError
from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.frames.kinds import MAX_CALLS
from support.caller import KIB, ask, calling, doubled, on_threads, received
from support.channel import (
    LIMIT_S,
    Asked,
    HonestWorker,
    Script,
    item,
    stage,
    tensor,
)
from support.loops import in_a_loop


@in_a_loop
async def test_concurrent_threads_get_the_answers_to_their_own_calls():
    def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        def work(number: int) -> None:
            for turn in range(20):
                size = 20 * KIB if turn % 5 == 0 else 40
                sent = bytes(tensor("x", size, number).data)
                assert received(ask(host, size, first=number)).outputs[0].data == sent * 2

        on_threads(12, work)
        return [Answer([])]

    async with calling(execute, on_ask=doubled) as caller:
        assert await caller.executed() == [Answer([])]


@pytest.mark.parametrize("method", ["infer", "call"])
@in_a_loop
async def test_calls_above_the_limit_wait_for_others_to_end(method: str):
    """The server answers no call before the maximum number is in flight."""
    count = MAX_CALLS + 60

    def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        def work(number: int) -> None:
            if method == "infer":
                assert received(ask(host, 40, first=number)).outputs[0].data == bytes(tensor("", 40, number).data) * 2
            else:
                assert host.call(MetricValue(number)) == number

        on_threads(count, work)
        return [Answer([])]

    async with calling(execute) as caller:
        heard = caller.heard
        heard.hold_calls = asyncio.Event()
        caller.stage.connection.batches.execute([item(1, 10)], 0)
        seen = heard.asked if method == "infer" else heard.calls
        await caller.until(lambda: len(seen) == MAX_CALLS, "all that may be")
        await asyncio.sleep(0.05)  # further calls would end the worker
        assert len(seen) == MAX_CALLS
        heard.hold_calls.set()
        heard.on_ask = doubled
        for asked in heard.asked[:MAX_CALLS]:
            doubled(asked)
        await caller.until(lambda: heard.done, "the batch")
        assert heard.done[0][1].replies == [Answer([])]


@in_a_loop
async def test_a_loop_makes_any_number_of_calls_without_blocking():
    turns = []

    async def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        async def tick() -> None:
            while True:
                turns.append(time.monotonic())
                await asyncio.sleep(0)

        async def one(number: int) -> None:
            call = ask(host, 40, first=number)
            response = await call.receive_async()
            assert response is not None
            assert response.outputs[0].data == bytes(tensor("", 40, number).data) * 2
            assert await call.receive_async() is None

        ticking = asyncio.ensure_future(tick())
        await asyncio.gather(*(one(number) for number in range(3 * MAX_CALLS)))
        ticking.cancel()
        return [Answer([])]

    async with calling(execute, is_async=True) as caller:
        caller.stage.connection.batches.execute([item(1, 10)], 0)
        await caller.until(lambda: len(caller.heard.asked) == MAX_CALLS, "all that may be")
        before = len(turns)
        await caller.until(lambda: len(turns) > before + 100, "the loop, which goes on")
        caller.heard.on_ask = doubled
        for asked in caller.heard.asked[:MAX_CALLS]:
            doubled(asked)
        await caller.until(lambda: caller.heard.done, "the batch")
        assert caller.heard.done[0][1].replies == [Answer([])]


@in_a_loop
async def test_a_cancelled_wait_to_send_wakes_another_call():
    async def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        calls = [ask(host, 10) for _ in range(MAX_CALLS)]
        waiting = [asyncio.ensure_future(ask(host, 10).receive_async()) for _ in range(20)]
        await asyncio.sleep(0)
        host.call(UnloadModel("told", unload_dependents=False))
        for task in waiting[:10]:
            task.cancel()
        for call in calls:
            assert (await call.receive_async()) is not None
        assert None not in await asyncio.gather(*waiting[10:])
        return [Answer([])]

    async with calling(execute, is_async=True) as caller:
        caller.heard.hold_calls = asyncio.Event()
        caller.stage.connection.batches.execute([item(1, 10)], 0)
        await caller.until(lambda: caller.heard.calls, "that all are made")
        caller.heard.on_ask = doubled
        for asked in list(caller.heard.asked):
            doubled(asked)
        caller.heard.hold_calls.set()
        await caller.until(lambda: caller.heard.done, "the batch")
        assert caller.heard.done[0][1].replies == [Answer([])]
        assert len(caller.heard.asked) == MAX_CALLS + 10


@in_a_loop
async def test_other_event_loops_may_wait_for_answers():
    """A model that is not asynchronous runs its own loop, on the main thread or on another."""

    def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        async def one(number: int) -> None:
            for _ in range(5):
                response = await ask(host, 40, first=number).receive_async()
                assert response is not None
                assert response.outputs[0].data == bytes(tensor("", 40, number).data) * 2

        async def several() -> None:
            await asyncio.gather(*map(one, range(5)))

        asyncio.run(several())
        on_threads(4, lambda number: asyncio.run(several()) if number else asyncio.run(one(9)))
        return [Answer([])]

    async with calling(execute, on_ask=doubled) as caller:
        assert await caller.executed() == [Answer([])]


@in_a_loop
async def test_answers_of_a_decoupled_model_are_acknowledged_as_they_are_received():
    got = []
    go_on = threading.Event()

    def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        call = ask(host, 10)
        for response in iter(call.receive, None):
            got.append((len(response.outputs), response.final))
            if len(got) == 5:
                go_on.wait(LIMIT_S)
        assert call.receive() is None
        return [Answer([])]

    async with calling(execute) as caller:
        caller.stage.connection.batches.execute([item(1, 10)], 0)
        await caller.until(lambda: caller.heard.asked, "the call")
        [asked] = caller.heard.asked
        for number in range(30):
            asked.answer(tensor("y", 30 * KIB if number % 2 else 10), final=False)

        def acknowledged() -> int:
            assert {ticket for ticket, _ in caller.heard.taken} <= {asked.ticket}
            return sum(count for _, count in caller.heard.taken)

        await caller.until(lambda: len(got) == 5, "five of them")
        assert acknowledged() <= 5
        go_on.set()
        await caller.until(lambda: acknowledged() == 30, "all of them")
        asked.answer()
        await caller.until(lambda: caller.heard.done, "the batch")
        assert got == [(1, False)] * 30 + [(0, True)]


@in_a_loop
async def test_threads_may_share_the_answers_of_one_call():
    """Each thread gets some answers, every answer is acknowledged once, and all threads get the end."""
    got: list[int] = []

    def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        call = ask(host, 10)

        def work(_: int) -> None:
            for response in iter(call.receive, None):
                got.extend(int(output.shape[0]) for output in response.outputs)

        on_threads(4, work)
        return [Answer([])]

    async with calling(execute) as caller:
        heard = caller.heard
        caller.stage.connection.batches.execute([item(1, 10)], 0)
        await caller.until(lambda: heard.asked, "the call")
        for size in range(1, 1001):
            await caller.until(lambda s=size: s - sum(count for _, count in heard.taken) < 32, "room")  # type: ignore[misc]
            heard.asked[0].answer(tensor("y", size), final=False)
        heard.asked[0].answer()
        await caller.until(lambda: heard.done, "the batch")
        assert sorted(got) == list(range(1, 1001))


@in_a_loop
async def test_a_cancelled_call_still_gets_its_final_answer():
    def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        call = ask(host, 10)
        call.cancel()
        with pytest.raises(InferenceError, match="request was cancelled"):
            received(call)
        call.cancel()
        assert call.receive() is None
        return [Answer([])]

    async with calling(execute) as caller:
        caller.stage.connection.batches.execute([item(1, 10)], 0)
        await caller.until(lambda: caller.heard.uncalled, "the cancellation")
        [asked] = caller.heard.asked
        assert caller.heard.uncalled == [asked.ticket]
        asked.answer(error=InferenceError(ErrorCode.CANCELLED, "request was cancelled"))
        await caller.until(lambda: caller.heard.done, "the batch")
        assert caller.heard.done[0][1].replies == [Answer([])]
        assert caller.heard.uncalled == [asked.ticket]


@in_a_loop
async def test_a_call_that_was_not_sent_can_be_cancelled():
    def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        calls = [ask(host, 10) for _ in range(MAX_CALLS + 1)]
        calls[-1].cancel()
        with pytest.raises(InferenceError, match="request was cancelled"):
            received(calls[-1])
        assert calls[-1].receive() is None
        host.call(UnloadModel("told", unload_dependents=False))
        for call in calls[:-1]:
            received(call)
        return [Answer([])]

    async with calling(execute) as caller:
        caller.stage.connection.batches.execute([item(1, 10)], 0)
        await caller.until(lambda: caller.heard.calls, "that all are made")
        for asked in caller.heard.asked:
            doubled(asked)
        await caller.until(lambda: caller.heard.done, "the batch")
        assert (len(caller.heard.asked), caller.heard.uncalled) == (MAX_CALLS, [])


@in_a_loop
async def test_a_dropped_call_is_cancelled_and_frees_its_memory():
    def execute(host: Host, requests: Sequence[HostedRequest]) -> list[Reply]:
        if requests[0].key == 7:
            ask(host, 10)
            call = ask(host, 10)
            call.receive()
            del call
            received(ask(host, 10, id="whole"))
        return [Answer([])]

    def answer(asked: Asked) -> None:
        asked.answer(tensor("y", 100 * KIB), final=asked.request.id == "whole")

    async with calling(execute, on_ask=answer) as caller:
        await caller.executed(key=7)
        first, second, _ = caller.heard.asked
        await caller.until(lambda: len(caller.heard.uncalled) == 2, "both to be cancelled")
        assert caller.heard.uncalled == [first.ticket, second.ticket]
        for asked in (first, second):
            asked.answer(tensor("y", 100 * KIB), final=False)
            asked.answer(error=InferenceError(ErrorCode.CANCELLED, "request was cancelled"))
        await caller.nothing_is_held()


@in_a_loop
async def test_requests_cancelled_while_the_loop_is_blocked_do_not_run():
    executed: list[int] = []

    async def execute(host: Host, requests: Sequence[HostedRequest]) -> list[Reply]:
        executed.append(requests[0].key)
        if requests[0].key == 1:
            received(ask(host, 10))
        return [Answer([])]

    async with calling(execute, is_async=True) as caller:
        batches, heard = caller.stage.connection.batches, caller.heard
        batches.execute([item(1, 10)], 0)
        await caller.until(lambda: heard.asked, "the call, for which the loop blocks")
        for key in (2, 3):
            batches.execute([item(key, 10)], key)
        batches.cancel(2)
        heard.asked[0].answer()
        await caller.until(lambda: len(heard.done) == 3, "the end of all")
        replies = {batch.slot: done.replies for batch, done in heard.done}
        assert replies[2] == [InferenceError(ErrorCode.CANCELLED, "request was cancelled")]
        assert (replies[3], executed) == ([Answer([])], [1, 3])


@pytest.mark.parametrize("is_async", [False, True], ids=["on threads", "on the loop"])
@in_a_loop
async def test_calls_raise_when_the_server_closes_the_channel(is_async: bool):
    ends: list[BaseException] = []

    def wait(host: Host) -> None:
        try:
            ask(host, 10).receive()
        except ServerGoneError as error:
            ends.append(error)

    async def wait_on_loop(host: Host) -> list[Reply]:
        results = await asyncio.gather(*(ask(host, 10).receive_async() for _ in range(5)), return_exceptions=True)
        ends.extend(each for each in results if isinstance(each, ServerGoneError))
        return [Answer([])]

    def execute(host: Host, _: Sequence[HostedRequest]) -> Any:
        if is_async:
            return wait_on_loop(host)
        on_threads(5, lambda _: wait(host))
        return [Answer([])]

    async with stage() as each:
        worker = HonestWorker(
            os.dup(each.worker_end.fileno()),
            lambda host: Script(lambda requests: execute(host, requests), is_async),
        )
        each.worker_end.close()
        each.connection.batches.execute([item(1, 10)], 0)
        await each.until(lambda: len(each.heard.asked) == 5, "the calls")
        each.connection.close()
        await asyncio.to_thread(worker.join, LIMIT_S)
        assert not worker.is_alive()
        assert worker.failure is None
        assert len(ends) == 5
        assert sorted(each.heard.uncalled) == [asked.ticket for asked in each.heard.asked]
        each.heard.asked.clear()
        del worker.memory, worker.channel, worker.host
