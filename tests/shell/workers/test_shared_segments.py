"""Segments that workers share: the server's end with the real code of workers, or with a test that plays a worker."""

import asyncio
import gc
from collections.abc import Sequence

import numpy as np
import pytest

from halimede.backends.hosting import HostedRequest, Reply
from halimede.channel.server_end.memory import COPIED_ON_LOOP_BYTES
from halimede.channel.server_end.shared_segments import MIN_SHARED_BYTES
from halimede.core.types import Tensor
from support.channel import (
    mappings,
    tensor,
)
from support.shared_segments import MIB, SIZE, Reader, make, play, warm_up, worker


@pytest.mark.parametrize("size", [MIN_SHARED_BYTES, MIN_SHARED_BYTES + 4097, COPIED_ON_LOOP_BYTES + 4])
@play
async def test_a_worker_reads_the_answer_of_another_in_place(size: int):
    reader = Reader()
    async with worker(make(size)) as owner, worker(reader) as reader_worker:
        await warm_up(owner, reader, reader_worker)
        segments = repr(reader_worker.connection)
        for key in range(100, 130):
            await reader_worker.ask(key, await owner.answer(key))
        assert all(reader.right)
        assert all(reader.shared[-30:])
        assert repr(reader_worker.connection) == segments, "no more memory of its own"
        await owner.check_blocks(0)


@play
async def test_small_tensors_are_copied():
    reader = Reader()
    async with worker(make(MIN_SHARED_BYTES - 1)) as owner, worker(reader) as reader_worker:
        for key in range(1, 11):
            await reader_worker.ask(key, await owner.answer(key))
        assert (all(reader.right), any(reader.shared)) == (True, False)
        assert reader_worker.process.memory.shared.sizes() == {}


@play
async def test_a_tensor_that_a_model_keeps_does_not_change():
    reader = Reader(keeps=True)
    async with worker(make()) as owner, worker(reader) as reader_worker:
        await warm_up(owner, reader, reader_worker)
        reader.shared.clear()
        for key in range(100, 120):
            await reader_worker.ask(key, await owner.answer(key))
            await owner.answer(999)
        # Except for the first tensors of new segments.
        assert sum(reader.shared) > 10
        for key, kept in zip(range(100, 120), reader.kept, strict=True):
            assert bytes(kept) == bytes(tensor("in", SIZE, key).data)
        del kept
        await owner.check_blocks(sum(reader.shared))
        reader.kept.clear()
        await reader_worker.ask(0, tensor("in", 8))
        await owner.check_blocks(0)


@play
async def test_the_last_of_several_readers_frees_the_block():
    one, two = Reader(), Reader(keeps=True)
    async with worker(make()) as owner, worker(one) as first, worker(two) as second:
        for key in range(1, 11):
            answer = await owner.answer(key)
            await asyncio.gather(first.ask(key, answer), second.ask(key, answer))
            del answer
        assert all(one.right + two.right)
        assert any(one.shared)
        assert any(two.shared)
        await owner.check_blocks(sum(two.shared))
        two.kept.clear()
        await second.ask(0, tensor("in", 8))
        await owner.check_blocks(0)


@pytest.mark.parametrize("writes", [False, True])
@play
async def test_the_same_bytes_twice_are_two_inputs(writes: bool):
    reader, writer = Reader(), Reader()
    async with worker(make()) as owner, worker(writer) as reader_worker, worker(reader) as other:
        await warm_up(owner, writer, reader_worker, 1)
        writer.shared.clear()
        writer.writes = writes
        answer = await owner.answer(7)
        await reader_worker.ask(7, answer, Tensor("b", answer.datatype, answer.shape, answer.data))
        assert writer.shared == [True, False]
        assert all(writer.right)
        await other.ask(7, answer)
        assert all(reader.right)


@play
async def test_a_model_that_writes_to_its_inputs_gets_only_copies():
    reader, writer = Reader(), Reader(writes=True, passes_on=True)
    async with worker(make()) as owner, worker(writer) as first, worker(reader) as second:
        for key in range(1, 21):
            answer = await owner.answer(key)
            [changed] = await first.ask(key, answer)
            expected = np.frombuffer(tensor("in", SIZE, key).data, np.uint8) + np.uint8(1)
            assert bytes(changed.data) == expected.tobytes()
            assert bytes(answer.data) == bytes(tensor("in", SIZE, key).data)
            await second.ask(key, answer)
            del answer, changed
        assert all(writer.right + reader.right)
        assert 0 < sum(writer.shared) <= 3
        assert any(reader.shared)
        await first.ask(0, tensor("in", 8))
        assert first.process.memory.shared.sizes() == {}, "unused segments are unmapped"


@play
async def test_an_input_that_is_also_the_output_is_never_copied():
    """From a worker through two others and back to itself."""
    through, again = Reader(passes_on=True), Reader(passes_on=True)
    async with worker(make()) as owner, worker(through) as one, worker(again) as two:
        for key in range(1, 11):
            [passed] = await one.ask(key, await owner.answer(key))
            [back] = await two.ask(key, Tensor("in", passed.datatype, passed.shape, passed.data))
            assert bytes(back.data) == bytes(tensor("in", SIZE, key).data)
            assert not isinstance(back.data, bytes)
            del passed, back
        assert any(through.shared)
        assert any(again.shared)
        assert one.process.memory.outbound.blocks.size_bytes == 0
        await owner.check_blocks(0)


@play
async def test_a_worker_may_read_its_own_answer():
    reader = Reader(passes_on=True)
    makes = make()

    def run(requests: Sequence[HostedRequest]) -> list[Reply]:
        return makes(requests) if len(requests[0].request.inputs[0].data) == 8 else reader(requests)

    async with worker(run) as each:
        await warm_up(each, reader, each)
        for key in range(100, 110):
            [back] = await each.ask(key, await each.answer(key))
            assert bytes(back.data) == bytes(tensor("in", SIZE, key).data)
            del back
        assert all(reader.right)
        assert all(reader.shared[-10:])


@pytest.mark.parametrize("keeps", [False, True])
@play
async def test_an_input_is_shared_once_its_model_cannot_write_to_it(keeps: bool):
    passing, reader = Reader(passes_on=True, keeps=keeps), Reader()
    async with worker(passing) as owner, worker(reader) as reader_worker:
        for key in range(1, 5):
            [passed] = await owner.ask(key, tensor("in", SIZE, key))
            if keeps:
                passing.kept[-1][:4] = 99
                assert bytes(passed.data[:4]) == b"\x63\x63\x63\x63", "its memory is the model's still"
                passing.kept[-1][:4] = np.frombuffer(tensor("in", 4, key).data, np.uint8)
            await reader_worker.ask(key, Tensor("in", passed.datatype, passed.shape, passed.data))
            del passed
        assert all(reader.right)
        assert any(reader.shared) is not keeps
        passing.kept.clear()


@play
async def test_the_end_of_a_reader_frees_its_blocks():
    """In sequence, twice the limit of shared bytes can be shared."""
    async with worker(make(), arena_bytes=16 * MIB) as owner:
        for _ in range(3):
            reader = Reader(keeps=True)
            async with worker(reader) as reader_worker:
                await warm_up(owner, reader, reader_worker, 3)
                reader.shared.clear()
                for key in range(1, 6):
                    await reader_worker.ask(key, await owner.answer(key))
                await owner.check_blocks(sum(reader.shared))
                assert sum(reader.shared) >= 3
            reader.kept.clear()
            await owner.check_blocks(0)


@play
async def test_shared_bytes_outlive_their_owner():
    reader = Reader(keeps=True)
    async with worker(reader) as reader_worker:
        async with worker(make()) as owner:
            await warm_up(owner, reader, reader_worker)
            answer = await owner.answer(100)
            await reader_worker.ask(100, answer)
            queued = await owner.answer(101)
            del answer, owner
        gc.collect()
        # Answers of the owner are shared even after its end.
        await reader_worker.ask(101, queued)
        del queued
        assert reader.shared[-2:] == [True, True]
        for key, kept in zip((100, 101), reader.kept, strict=True):
            assert bytes(kept) == bytes(tensor("in", SIZE, key).data)
        del kept
        assert len(reader_worker.process.memory.shared.sizes()) > 0
        reader.kept.clear()
        await reader_worker.ask(0, tensor("in", 8))
        gc.collect()
        await reader_worker.stage.until(
            lambda: reader_worker.process.memory.shared.sizes() == {},
            "the reader to unmap the segments of the owner",
        )


@pytest.mark.parametrize("owners", [10, pytest.param(30, marks=pytest.mark.large)])
@play
async def test_owners_may_come_and_go(owners: int):
    reader = Reader()
    async with worker(reader) as reader_worker:
        most = 0
        for _ in range(owners):
            async with worker(make()) as owner:
                await warm_up(owner, reader, reader_worker)
                most = max(most, len(reader_worker.process.memory.shared.sizes()))
            del owner
            gc.collect()
        assert most <= 6
        assert all(reader.right)
        await reader_worker.stage.until(
            lambda: reader_worker.process.memory.shared.sizes() == {}, "the last segment to be unmapped"
        )
        own = 2 * len(reader_worker.process.memory.inbound.sizes())
        await reader_worker.stage.until(
            lambda: mappings() == own, "all but its requests' to be unmapped, on both sides"
        )


@play
async def test_at_most_half_of_an_arena_is_shared():
    reader = Reader(keeps=True)
    # Here the server's limit is smaller than the worker's.
    async with worker(make(), arena_bytes=16 * MIB) as owner, worker(reader) as reader_worker:
        for key in range(1, 21):
            await reader_worker.ask(key, await owner.answer(key))
        assert all(reader.right)
        assert sum(reader.shared) == 8 * MIB // SIZE
        assert owner.blocks() <= 8 * MIB // SIZE + 1
        for key, kept in enumerate(reader.kept, 1):
            assert bytes(kept) == bytes(tensor("in", SIZE, key).data)
        del kept
        reader.kept.clear()
        await reader_worker.ask(0, tensor("in", 8))
        reader.kept.clear()
        await owner.check_blocks(0)
        await reader_worker.ask(50, await owner.answer(50))
        assert reader.shared[-1], "there is room again"
        reader.kept.clear()
