"""The server's end of a channel, with the worker's own code at the other end or a test that plays it."""

import asyncio
import gc
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from halimede.backends.hosting import Answer, HostedRequest, Reply
from halimede.channel.frames import encode_frame
from halimede.channel.server_end.memory import ARENA_BYTES, COPIED_ON_LOOP_BYTES
from halimede.core.types import ErrorCode, InferenceError, Tensor
from halimede.workers.frames.kinds import METRIC, WorkerFrame
from support.channel import (
    LIMIT_S,
    HonestWorker,
    Script,
    Stage,
    done_frame,
    doubled,
    echo,
    item,
    mappings,
    response_frame,
    stage,
    tensor,
)
from support.loops import in_a_loop
from support.working import working

KIB, MIB = 1 << 10, 1 << 20


async def ended(each: Stage, count: int) -> None:
    await each.until(lambda: len(each.heard.done) >= count, f"{count} batches")


def payload(reply: Reply) -> bytes:
    assert isinstance(reply, Answer), reply
    return bytes(reply.outputs[0].data)


def check_echoes(each: Stage) -> None:
    """The answer of every request is its own input."""
    for batch, done in each.heard.done:
        for one, reply in zip(batch.items, done.replies, strict=True):
            assert isinstance(reply, Answer), reply
            sent, got = (np.frombuffer(t.data, np.uint8) for t in (one.request.inputs[0], reply.outputs[0]))
            assert np.array_equal(sent, got)


@pytest.mark.parametrize("size", [0, 1, 16 * KIB, 16 * KIB + 1, 300 * KIB, COPIED_ON_LOOP_BYTES + 1, 16 * MIB])
@pytest.mark.parametrize("run", [echo, doubled])
@pytest.mark.parametrize("arena_bytes", [0, ARENA_BYTES], ids=["in frames", "in shared memory"])
@in_a_loop
async def test_tensors_of_all_sizes_cross_in_both_directions(
    size: int, run: Callable[[Sequence[HostedRequest]], list[Reply]], arena_bytes: int
):
    async with working(run, arena_bytes) as (each, _):
        for key in (1, 2, 3):
            each.connection.batches.execute([item(key, size)], 0)
            await ended(each, key)
            sent = bytes(tensor("in", size, key).data)
            assert payload(each.heard.done[-1][1].replies[0]) == (sent if run is echo else sent * 2)


@in_a_loop
async def test_64_mib_cross_without_shared_memory():
    """In both directions at the same time, through sockets that hold a small part of the data."""
    async with working(arena_bytes=0) as (each, _):
        for key in (1, 2):
            each.connection.batches.execute([item(key, 64 * MIB)], key)
        await ended(each, 2)
        check_echoes(each)


@in_a_loop
async def test_many_batches_in_flight_get_their_own_answers():
    sizes = np.random.default_rng(1).choice([0, 10, 5 * KIB, 20 * KIB, 200 * KIB, 3 * MIB], size=300)
    async with working() as (each, _):
        for key, size in enumerate(sizes):
            each.connection.batches.execute([item(key, int(size)), item(1000 + key, 7)], key % 4)
            await each.until(lambda: len(each.connection.batches.running) < 8, "room")
        await ended(each, len(sizes))
        check_echoes(each)


@in_a_loop
async def test_all_blocks_are_free_after_the_last_answer_is_dropped():
    async with working() as (each, worker):
        for key in range(20):
            each.connection.batches.execute([item(key, 100 * KIB, 40 * KIB)], 0)
        await each.until(lambda: len(each.heard.done) == 20, "all")
        held = repr(each.connection)
        assert held.count("20 blocks") == 1, held
        each.heard.done.clear()
        gc.collect()
        # Released blocks are reported with the next batch.
        each.connection.batches.execute([item(99, 20 * KIB)], 0)
        await each.until(lambda: each.heard.done, "the last")
        assert " 1 blocks" in repr(each.connection), "its own"
        assert worker.memory.outbound.blocks.blocks == 0


@in_a_loop
async def test_blocks_of_dropped_answers_are_released_to_the_worker():
    async with working(doubled) as (each, worker):
        for key in range(6):
            each.connection.batches.execute([item(key, 100 * KIB)], 0)
            await each.until(lambda key=key: len(each.heard.done) == key + 1, "the batch")
            if not key:
                # The first answer was sent in the frame, because the worker had no segment yet.
                await each.until(lambda: worker.memory.outbound.blocks.size_bytes, "memory for answers")
        assert worker.memory.outbound.blocks.blocks == 5
        each.heard.done.clear()
        gc.collect()
        each.connection.batches.execute([item(9, 1)], 0)
        await each.until(lambda: each.heard.done, "the last")
        assert worker.memory.outbound.blocks.blocks == 0


@in_a_loop
async def test_shared_memory_grows_up_to_its_limit():
    async with working(arena_bytes=4 * MIB) as (each, _):
        for key in range(40):
            each.connection.batches.execute([item(key, 600 * KIB)], key)
        await ended(each, 40)
        check_echoes(each)
        assert mappings() <= 12


@in_a_loop
async def test_a_model_may_keep_inputs_and_send_them_later():
    """A block is in use while the model, or an answer that lies in it, has a view of it."""
    kept: list[Tensor] = []

    def delay(requests: Sequence[HostedRequest]) -> list[Reply]:
        [one] = requests
        reply = [Tensor("out", each.datatype, each.shape, each.data) for each in kept]
        kept[:] = one.request.inputs[:1]
        return [Answer(reply)]

    async with working(delay) as (each, _):
        for key in range(50):
            each.connection.batches.execute([item(key, 50 * KIB)], 0)
            await each.until(lambda key=key: len(each.heard.done) == key + 1, "the batch")
        late = [payload(done.replies[0]) for _, done in each.heard.done[1:]]
        kept.clear()
        each.heard.done.clear()
        assert late == [bytes(tensor("in", 50 * KIB, key).data) for key in range(49)]


@in_a_loop
async def test_threads_may_drop_inputs_at_any_time():
    """A block is reported as retained before it is reported as unused, also by different threads."""
    drop = threading.Semaphore(0)
    kept: list[Any] = []
    over = threading.Event()

    def keep(requests: Sequence[HostedRequest]) -> list[Reply]:
        kept.extend([one.request.inputs[0].data for one in requests])
        drop.release()
        return [Answer([]) for _ in requests]

    async with working(keep) as (each, worker):

        def let_go() -> None:
            while not over.is_set():
                drop.acquire(timeout=0.1)
                if kept:
                    kept.pop()
                worker.host.give_back()

        threads = [threading.Thread(target=let_go) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for key in range(1_500):
                each.connection.batches.execute([item(key, 17 * KIB)], 0)
                if key % 4 == 3:
                    await each.until(lambda: not each.connection.batches.running, "the batches")
            await each.until(lambda: len(each.heard.done) == 1_500 or each.lost, "all")
        finally:
            over.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)
        kept.clear()
        worker.host.give_back()


@in_a_loop
async def test_a_batch_that_cannot_be_encoded_ends_with_an_error(caplog: pytest.LogCaptureFixture):
    # Log records hold the traceback, which holds the memory that `stage` expects to be freed.
    caplog.set_level(logging.CRITICAL)
    async with working() as (each, _):
        broken = item(1, 100 * KIB)
        broken.request.sequence_id = -1
        each.connection.batches.execute([broken], 3)
        each.connection.batches.execute([item(2, 10 * MIB), broken], 4)
        assert len(each.heard.done) == 0, "not while it is handed over"
        await each.until(lambda: len(each.heard.done) == 2, "both")
        each.connection.batches.execute([item(3, 100 * KIB)], 0)
        await each.until(lambda: len(each.heard.done) == 3, "the good one")

        assert [batch.slot for batch, _ in each.heard.done] == [3, 4, 0]
        errors = [done.replies[0] for _, done in each.heard.done[:2] if done.failed]
        assert [error.code for error in errors if isinstance(error, InferenceError)] == [ErrorCode.INTERNAL] * 2
        assert all("could not be sent" in repr(error) for error in errors)
        assert payload(each.heard.done[2][1].replies[0]) == bytes(tensor("in", 100 * KIB, 3).data)
        assert each.connection.batches.running == ()


class Unaffordable(str):
    """A text of a request, which cannot be sent for lack of memory."""

    __slots__ = ()

    def encode(self, *_: Any) -> bytes:
        raise MemoryError


@in_a_loop
async def test_a_batch_that_finds_no_memory_is_unavailable(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)
    async with working() as (each, _):
        each.connection.batches.execute([item(1, 10, id=Unaffordable("a"))], 0)
        await each.until(lambda: each.heard.done, "the end of the batch")
        [error] = each.heard.done[0][1].replies
        assert isinstance(error, InferenceError)
        assert (error.code, error.message) == (
            ErrorCode.UNAVAILABLE,
            "the server has not enough memory for this",
        )


@pytest.mark.parametrize("count", [1, 2])
@in_a_loop
async def test_a_frame_that_finds_no_memory_ends_the_worker(count: int):
    """Alone in the buffer, and one of several."""

    def fail(_: memoryview) -> None:
        raise MemoryError

    async with stage() as each:
        each.connection.channel.handle(WorkerFrame.READY, fail)
        await each.send(encode_frame(WorkerFrame.READY, b"\1") * count)
        assert await each.until_lost() == "the server has not enough memory for what it sent"


@in_a_loop
async def test_a_cancel_during_the_copy_of_a_batch_is_sent_after_it():
    cancelled: list[bool] = []
    seen = threading.Event()
    async with stage() as each:
        host: list[HonestWorker] = []

        def look(requests: Sequence[HostedRequest]) -> list[Reply]:
            while not cancelled and not seen.wait(0.001):
                if host[0].host.is_cancelled(requests[0]):
                    cancelled.append(True)
            return [Answer([])]

        worker = HonestWorker(os.dup(each.worker_end.fileno()), lambda _: Script(look))
        host.append(worker)
        each.worker_end.close()
        one = item(1, 16 * MIB)
        each.connection.batches.execute([one], 0)
        one.cancelled = True
        each.connection.batches.cancel(1)
        await each.until(lambda: each.heard.done or not worker.is_alive(), "the batch")
        assert cancelled == [True]
        seen.set()
        each.connection.close()
        await asyncio.to_thread(worker.join, LIMIT_S)
        del worker.memory, worker.channel, worker.host
        host.clear()


@in_a_loop
async def test_frames_may_arrive_byte_by_byte():
    async with stage() as each:
        each.connection.batches.execute([item(1, 10)], 0)
        batch = (await each.receive_batch()).batch
        stream = b"".join(
            (
                encode_frame(WorkerFrame.METRICS, METRIC.pack(1, 0, 2.5)),
                encode_frame(WorkerFrame.LOG, b"\2hello"),
                bytes(response_frame(1, Answer([tensor("out", 50)]))),
                bytes(done_frame(batch, [Answer([tensor("out", 100)])])),
                encode_frame(WorkerFrame.READY, b"\1"),
            )
        )
        for at in range(len(stream)):
            await each.send(stream[at : at + 1])
            await asyncio.sleep(0)
        await each.until(lambda: each.heard.ready, "the last frame")

        assert each.heard.metrics == [(1, "increment", 2.5)]
        assert [response.key for response in each.heard.responses] == [1]
        assert payload(each.heard.done[0][1].replies[0]) == bytes(tensor("out", 100).data)
        assert each.lost == []


@in_a_loop
async def test_thousands_of_frames_at_once_are_handled_in_turns():
    async with stage() as each:
        await each.send(encode_frame(WorkerFrame.READY, b"\1") * 20_000 + encode_frame(WorkerFrame.READY, b"\0"))
        await each.until(lambda: len(each.heard.ready) == 20_001, "all frames")
        assert each.heard.ready[-1] is False
        assert each.lost == []


@in_a_loop
async def test_frames_before_the_end_of_a_worker_are_handled():
    async with stage() as each:
        each.connection.batches.execute([item(1, 10)], 0)
        batch = (await each.receive_batch()).batch
        await each.send(encode_frame(WorkerFrame.READY, b"\1") * 1_000 + bytes(done_frame(batch, [Answer([])])))
        each.worker_end.close()
        assert await each.until_lost() == "it closed its channel"
        assert len(each.heard.ready) == 1_000
        assert len(each.heard.done) == 1


@in_a_loop
async def test_a_worker_that_ends_at_any_point_is_reported_lost_once():
    for leave_unread in (False, True):
        async with stage() as each:
            each.connection.batches.execute([item(1, 10)], 0)
            if not leave_unread:
                await each.receive_batch()
            await each.send(bytes(done_frame(1, [Answer([tensor("out", 5_000)])]))[:-1_000])
            each.worker_end.close()
            assert await each.until_lost() == "it closed its channel"
            assert len(each.connection.batches.running) == 1
            each.connection.batches.execute([item(2, 10), item(3, 100 * KIB)], 0)
            each.connection.batches.cancel(1)
            each.connection.close()
            await asyncio.sleep(0)


@pytest.mark.parametrize("turns", range(4))
def test_closing_while_a_segment_is_made_leaks_nothing(turns: int):
    """`stage` counts descriptors and mappings."""

    async def main() -> None:
        async with stage() as each:
            each.connection.batches.execute([item(1, 10)], 0)
            batch = (await each.receive_batch()).batch
            await each.send(done_frame(batch, [Answer([])], wanted=64 * MIB))
            await each.until(lambda: each.heard.done, "the batch")
            each.connection.batches.execute([item(1, 32 * MIB)], 0)
            for _ in range(turns):
                await asyncio.sleep(0)
            each.connection.close()
            await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(main())


@pytest.mark.parametrize("before", [0, 30], ids=["at once", "behind more than the socket takes"])
@in_a_loop
async def test_unreceived_segments_of_a_closed_worker_leak_no_descriptor(before: int):
    async with stage() as each:
        for key in range(before):
            each.connection.batches.execute([item(key, 16 * KIB)], key)
        if not before:
            each.worker_end.close()
        each.connection.batches.execute([item(30, 100 * KIB)], 30)
        each.worker_end.close()
        await each.until_lost()


@in_a_loop
async def test_descriptors_that_a_worker_sends_are_dropped():
    async with stage() as each:
        read, write = os.pipe()
        frame = encode_frame(WorkerFrame.READY, b"\1")
        for _ in range(20):
            socket.send_fds(each.worker_end, [frame], [read, write])
        os.close(read)
        os.close(write)
        await each.until(lambda: len(each.heard.ready) == 20, "the frames")


@in_a_loop
async def test_without_free_descriptors_tensors_are_sent_in_frames():
    import resource

    async with working() as (each, _):
        each.connection.batches.execute([item(1, 10)], 0)
        await each.until(lambda: len(each.heard.done) == 1, "the first")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        spare = [os.dup(0)]
        while spare[-1] <= highest:
            spare.append(os.dup(0))
        os.close(spare.pop())
        free_one = spare.pop()
        try:
            for left in (0, 1, 2):
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest + left + 1, hard))
                each.connection.batches.execute([item(left, 100 * KIB)], 0)
                await each.until(lambda left=left: len(each.heard.done) == left + 2, "the batch")
                assert payload(each.heard.done[-1][1].replies[0]) == bytes(tensor("in", 100 * KIB, left).data)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in (*spare, free_one):
                os.close(descriptor)
