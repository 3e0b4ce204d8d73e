"""Calls of a model's code to other models: the worker's own code on a thread, and a server that the test plays."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from halimede.backends.hosting import Answer, Host, HostedRequest, Reply
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.workers.frames.kinds import MAX_CALLS
from support.caller import KIB, MIB, ask, calling, doubled, on_threads, received
from support.channel import (
    ARENA_BYTES,
    Asked,
    item,
    tensor,
)
from support.loops import in_a_loop


@pytest.mark.parametrize("size", [0, 64, 16 * KIB, 16 * KIB + 1, 600 * KIB, 5 * MIB, 20 * MIB])
@pytest.mark.parametrize("arena", [ARENA_BYTES, 0], ids=["shared memory", "frames"])
@in_a_loop
async def test_tensors_of_any_size_are_sent_and_returned(size: int, arena: int):
    def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        for first in range(3):
            sent = bytes(tensor("x", size, first).data)
            response = received(ask(host, size, 5, first=first, id="a", parameters={"k": 1}))
            assert (response.model_name, response.model_version, response.id) == ("other", "3", "a")
            assert [(each.name, each.shape) for each in response.outputs] == [("2x0", (2 * size,)), ("2x1", (10,))]
            assert response.outputs[0].data == sent * 2
        return [Answer([])]

    async with calling(execute, on_ask=doubled, arena=arena) as caller:
        assert await caller.executed() == [Answer([])]
        assert [asked.request.parameters for asked in caller.heard.asked] == [{"k": 1}] * 3
        caller.heard.asked.clear()
        caller.heard.on_ask = doubled


@in_a_loop
async def test_memory_is_given_back_with_the_last_array():
    kept: list[InferenceResponse] = []

    def execute(host: Host, requests: Sequence[HostedRequest]) -> list[Reply]:
        if requests[0].key == 7:
            kept.extend(received(ask(host, 100 * KIB)) for _ in range(10))
        return [Answer([])]

    async with calling(execute, on_ask=doubled) as caller:
        await caller.executed(key=7)
        assert " 10 blocks" in repr(caller.stage.connection)
        assert all(len(response.outputs[0].data) == 200 * KIB for response in kept)
        kept.clear()
        await caller.nothing_is_held()


@in_a_loop
async def test_received_tensors_are_sent_back_without_a_copy():
    """A request's own input, and the answer of one call as the input of the next."""

    def execute(host: Host, requests: Sequence[HostedRequest]) -> list[Reply]:
        inputs = requests[0].request.inputs
        if len(inputs[0].data) < 50 * KIB:
            return [Answer([])]
        first = received(host.infer(InferenceRequest("other", inputs=list(inputs))))
        received(host.infer(InferenceRequest("other", inputs=first.outputs)))
        return [Answer([])]

    async with calling(execute, on_ask=doubled) as caller:
        await caller.executed(100 * KIB)
        assert not caller.worker.memory.outbound.map.sizes(), "nothing was put into the worker's own memory"
        first, second = (asked.request.inputs[0] for asked in caller.heard.asked)
        assert (first.data, second.data) == (
            tensor("", 100 * KIB, 1).data,
            bytes(tensor("", 100 * KIB, 1).data) * 2,
        )
        del first, second
        await caller.nothing_is_held()


@in_a_loop
async def test_the_arena_grows_after_large_requests():
    def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        while not ask_large(host):
            pass
        return [Answer([])]

    def ask_large(host: Host) -> bool:
        received(ask(host, 100 * KIB))
        return bool(memory[0].outbound.map.sizes())

    memory: list[Any] = []
    async with calling(execute, on_ask=lambda asked: asked.answer()) as caller:
        memory.append(caller.worker.memory)
        await caller.executed()
        memory.clear()


@in_a_loop
async def test_answers_of_all_sizes_keep_their_order():
    sizes = [9 * MIB, 10, 100 * KIB, 12 * MIB, 0, 50]

    def execute(host: Host, requests: Sequence[HostedRequest]) -> list[Reply]:
        if requests[0].key == 7:
            call = ask(host, 10)
            got = [len(response.outputs[0].data) for response in iter(call.receive, None)]
            assert got == sizes, got
        return [Answer([])]

    def answer(asked: Asked) -> None:
        for at, size in enumerate(sizes):
            asked.answer(tensor("y", size), final=at == len(sizes) - 1)

    async with calling(execute, on_ask=answer) as caller:
        assert await caller.executed(key=7) == [Answer([])]
        await caller.nothing_is_held()


@in_a_loop
async def test_a_call_has_the_batch_that_makes_it():
    here: dict[int, asyncio.Event] = {}

    async def execute(host: Host, requests: Sequence[HostedRequest]) -> list[Reply]:
        key = requests[0].key
        await ask(host, 10, id=f"{key} itself").receive_async()
        await asyncio.gather(*(ask(host, 10, id=f"{key} task").receive_async() for _ in range(2)))
        await asyncio.to_thread(lambda: ask(host, 10, id=f"{key} thread with context").receive())
        if key == 1:
            thread = threading.Thread(target=lambda: ask(host, 10, id="thread").receive())
            thread.start()
            await asyncio.to_thread(thread.join)
        event = here[key] = asyncio.Event()
        await event.wait()
        return [Answer([])]

    async with calling(execute, on_ask=doubled, is_async=True) as caller:
        for key in (1, 2):
            caller.stage.connection.batches.execute([item(key, 10)], key)
        await caller.until(lambda: len(here) == 2, "both batches")
        asked = {(each.request.id, each.batch, each.items and each.items[0].key) for each in caller.heard.asked}
        whats = ("itself", "task", "thread with context")
        assert asked == {(f"{key} {what}", key, key) for key in (1, 2) for what in whats} | {("thread", 0, None)}
        for event in here.values():
            caller.worker.channel._loop.call_soon_threadsafe(event.set)  # type: ignore[union-attr]
        await caller.until(lambda: len(caller.heard.done) == 2, "their ends")


@in_a_loop
async def test_calls_of_other_threads_belong_to_the_only_batch():
    def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        received(ask(host, 10))
        on_threads(1, lambda _: received(ask(host, 10)) and None)
        return [Answer([])]

    async with calling(execute, on_ask=doubled) as caller:
        await caller.executed(key=7)
        assert [(each.batch, each.items and each.items[0].key) for each in caller.heard.asked] == [(1, 7), (1, 7)]


@in_a_loop
async def test_unsendable_calls_raise_in_the_caller_and_do_not_count():
    def execute(host: Host, _: Sequence[HostedRequest]) -> list[Reply]:
        for _ in range(MAX_CALLS + 1):
            with pytest.raises(InferenceError, match="a request for model 'other' cannot be sent: ") as caught:
                ask(host, 10, priority=-1)
            assert caught.value.code is ErrorCode.INVALID_ARG
        received(ask(host, 10))
        # A call that waits to be sent gets its error when its answer is received.
        calls = [ask(host, 10) for _ in range(MAX_CALLS)]
        wrong = ask(host, 10, priority=-1)
        for call in calls:
            received(call)
        with pytest.raises(InferenceError, match="cannot be sent"):
            received(wrong)
        return [Answer([])]

    async with calling(execute, on_ask=doubled) as caller:
        assert await caller.executed() == [Answer([])]
