"""Workers that break the rules of the channel: each is lost once, with a readable reason, without effect on the loop,
memory and descriptors. `stage` checks afterwards that nothing is left.
"""

import asyncio
import gc
import json
import struct
import threading
import tracemalloc

import pytest

from halimede.backends.hosting import Answer, Reply
from halimede.backends.service_calls import (
    IsModelReady,
)
from halimede.channel.frames import BLOCK, MAX_BLOCKS, MAX_TEXT_BYTES, ChannelFrame
from halimede.channel.server_end.channel import MAX_UNSENT_FRAMES
from halimede.core.types import DataType, ErrorCode, InferenceError, Tensor
from halimede.inference_frames.calls import decode_call_answer
from halimede.inference_frames.kinds import InferenceFrame
from halimede.workers.frames.kinds import WorkerFrame
from support.channel import Stage, done_frame, mappings, response_frame, stage, tensor
from support.hostile import KIB, MIB, check_reason, executed, infer, raw, send, service, taken, uncalled
from support.loops import in_a_loop


def test_reading_stops_at_the_first_invalid_header():
    """An announced size of 1 GiB reserves no memory before the frame is checked."""
    streams = {
        "garbage": b"\xff" * (256 * MIB),
        "an end of nothing": raw(WorkerFrame.DONE, struct.pack("<IIH", 10, 9, 1), 1 << 30) + bytes(256 * MIB),
    }

    async def main(stream: bytes) -> None:
        async with stage() as each:
            sending = threading.Thread(target=send, args=(each, stream))
            tracemalloc.start()
            try:
                sending.start()
                await each.until_lost()
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            await asyncio.to_thread(sending.join)
            # One `os.write` of the sending thread writes up to 1 MiB.
            assert peak < 4 * MIB

    for stream in streams.values():
        asyncio.run(main(stream))


@in_a_loop
async def test_a_worker_that_calls_and_never_reads_is_ended_early():
    async with stage() as each:
        call = service(IsModelReady("x" * 100, ""))
        tracemalloc.start()
        try:
            for _ in range(MAX_UNSENT_FRAMES // 128 * 2):
                await each.send(call * 128)
                each.heard.calls.clear()
                for _ in range(3):
                    await asyncio.sleep(0)
                if each.lost:
                    break
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert each.lost == [f"it left more than {MAX_UNSENT_FRAMES} frames unread"]
        assert peak < 40 * MIB


@in_a_loop
async def test_frames_that_cross_a_final_answer_are_ignored():
    async with stage() as each:
        await each.send(infer(7, 10))
        await each.until(lambda: each.heard.asked, "the inference")
        each.heard.asked[0].answer(final=False)
        each.heard.asked[0].answer()
        await each.send(taken(7, 1) + uncalled(7) + taken(9, 1) + infer(7, 10))
        await each.until(lambda: len(each.heard.asked) == 2, "the next of that number")
        assert (each.heard.taken, each.heard.uncalled, each.lost) == ([], [], [])


@in_a_loop
async def test_inferences_of_an_ended_worker_are_cancelled():
    async with stage() as each:
        await each.send(infer(1, 10) + infer(2, 10) + infer(3, 10))
        await each.until(lambda: len(each.heard.asked) == 3, "all of them")
        each.heard.asked[1].answer()
        await each.send(raw(77))
        await each.until_lost()
        assert each.heard.uncalled == [1001, 1003]
        for asked in (each.heard.asked[0], each.heard.asked[2]):
            asked.answer(tensor("y", 100 * KIB))
        each.heard.asked.clear()


@in_a_loop
async def test_answers_to_a_worker_that_does_not_read_become_errors():
    """The limit is reduced from 1 GiB for the test."""
    async with stage(arena_bytes=0) as each:
        each.connection.memory.max_unsent_bytes = 4 * MIB
        await each.send(b"".join(infer(at, 10) for at in range(1, 101)))
        await each.until(lambda: len(each.heard.asked) == 100, "all of them")
        tracemalloc.start()
        try:
            for asked in each.heard.asked:
                asked.answer(tensor("y", MIB))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 12 * MIB
        errors = []
        for _ in range(100):
            kind, body = await each.receive()
            assert kind is InferenceFrame.CALL_ANSWER
            _, response = decode_call_answer(body, each.segments.lease)  # type: ignore[arg-type]
            errors.append(response.error)
        assert errors.count(None) < 10
        assert errors[-1] == InferenceError(
            ErrorCode.UNAVAILABLE, f"more than {4 * MIB} bytes wait for the process of model 'm' to read them"
        )
        await each.send(infer(101, 10))
        await each.until(lambda: len(each.heard.asked) == 101, "another")
        each.heard.asked[-1].answer(tensor("y", MIB))
        _, body = await each.receive()
        _, response = decode_call_answer(body, each.segments.lease)  # type: ignore[arg-type]
        assert response.error is None


async def with_memory_for_answers(each: Stage) -> None:
    """Let the worker have its own segment, with number 1."""
    batch = await executed(each, 10)
    await each.send(done_frame(batch, [Answer([])], wanted=100))
    await each.until(lambda: each.heard.done, "the end of the batch")
    each.heard.done.clear()
    await each.until(mappings, "the segment")


@in_a_loop
async def test_a_worker_with_too_many_unreleased_blocks_is_ended():
    """A block is released when its answer is dropped; the list of released blocks is bounded."""
    async with stage() as each:
        await with_memory_for_answers(each)
        response = bytes(response_frame(5, Answer([tensor("out", 100 * KIB)]), store=lambda _: (1, 64)))
        for _ in range(MAX_BLOCKS // 100 * 2):
            await each.send(response * 100)
            each.heard.responses.clear()
            await asyncio.sleep(0)
            if each.lost:
                break
        check_reason(await each.until_lost(), "blocks that it was not given back yet")


@in_a_loop
async def test_overlapping_answers_are_accepted():
    """They only affect the model that sent them."""
    async with stage() as each:
        await with_memory_for_answers(each)
        batch = await executed(each, 10)
        locations = iter([(1, 0), (1, 64)])
        outputs = [tensor("out", 100 * KIB), tensor("text", 100 * KIB)]
        await each.send(done_frame(batch, [Answer(outputs)], store=lambda _: next(locations)))
        await each.until(lambda: each.heard.done, "the end of the batch")
        assert each.lost == []
        each.heard.done.clear()


@in_a_loop
async def test_text_elements_are_copied_before_they_are_read():
    async with stage() as each:
        batch = await executed(each, 100 * KIB)
        text = Tensor("text", DataType.BYTES, (1,), bytes(100 * KIB))
        await each.send(done_frame(batch, [Answer([text])], store=lambda _: (1, 0)))
        await each.until(lambda: each.heard.done, "the end of the batch")
        each.segments.write((1, 0), b"\xff" * KIB)

        [reply] = each.heard.done[0][1].replies
        assert isinstance(reply, Answer)
        assert bytes(reply.outputs[0].data[:8]) == bytes(tensor("in", 8, 1).data)
        each.heard.done.clear()


@in_a_loop
async def test_answers_in_an_inputs_block_keep_the_block():
    async with stage() as each:
        batch = await executed(each, 100 * KIB)
        answer: list[Reply] = [Answer([tensor("out", 100 * KIB), tensor("text", 50 * KIB)])]
        locations = iter([(1, 0), (1, 512)])
        await each.send(done_frame(batch, answer, store=lambda _: next(locations), retained=[(1, 0)]))
        await each.send(response_frame(1, Answer([tensor("out", 90 * KIB)]), store=lambda _: (1, 64)))
        await each.send(raw(ChannelFrame.UNUSED, BLOCK.pack(1, 0)))
        await each.until(lambda: each.heard.responses, "both")
        each.heard.done.clear()
        await executed(each, 20 * KIB)
        assert "2 blocks" in repr(each.connection), "the response's and the new batch's"
        each.heard.responses.clear()
        gc.collect()
        await executed(each, 20 * KIB)
        assert "2 blocks" in repr(each.connection), "of the batches that are executing"
        assert each.lost == []


@in_a_loop
async def test_the_error_of_a_failed_start_is_bounded():
    async with stage() as each:
        await each.send(
            raw(ChannelFrame.FAILED, json.dumps({"code": "NOT_FOUND", "message": "x" * 9_000_000}).encode())
        )
        with pytest.raises(InferenceError) as caught:
            await each.connection.start({})
        assert caught.value == InferenceError(ErrorCode.NOT_FOUND, "x" * MAX_TEXT_BYTES)


@in_a_loop
async def test_an_owner_that_closes_in_a_callback_gets_no_more_events():
    async with stage() as each:
        batch = await executed(each, 10)
        each.heard.on_end = lambda *_: each.connection.close()
        await each.send(bytes(done_frame(batch, [Answer([])])) + raw(WorkerFrame.READY, b"\1") + b"garbage!")
        await each.until(lambda: each.heard.done, "the end of the batch")
        for _ in range(5):
            await asyncio.sleep(0)
        assert each.heard.ready == []
        assert each.lost == []
