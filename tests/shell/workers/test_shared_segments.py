"""Segments that workers share: the server's end with the real code of workers, or with a test that plays a worker."""

import asyncio
import gc
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from halimede.backends.hosting import Answer, HostedRequest, Reply
from halimede.core.types import Buffer, DataType, InferenceRequest, Tensor
from halimede.workers.frames.batches import decode_execute
from halimede.workers.frames.kinds import FIRST_SHARED, MAPPED, SEGMENT, SHARED, UNMAP, Kind, encode_frame
from halimede.workers.segments import Lease, SegmentMap, make_segment
from halimede.workers.server.memory import ARENA_BYTES, COPIED_ON_LOOP_BYTES
from halimede.workers.server.shared_segments import MAX_SEGMENTS, MIN_SHARED_BYTES, SharedSegments
from halimede.workers.worker import BatchItem
from support.channel import (
    LIMIT_S,
    HonestWorker,
    Script,
    Stage,
    done_frame,
    item,
    leaving_nothing,
    mappings,
    one_of_several,
    tensor,
)

MIB = 1 << 20
SIZE = 2 * MIB


def is_shared(data: Buffer) -> bool:
    """Whether these bytes, seen in a worker, are memory of another worker."""
    return isinstance(data, memoryview) and isinstance(data.obj, Lease) and data.obj.block[0] >= FIRST_SHARED


def number_of(request: HostedRequest) -> int:
    return int.from_bytes(bytes(request.request.inputs[0].data[:4]), "little")


def make(size: int = SIZE) -> Callable[[Sequence[HostedRequest]], list[Reply]]:
    """A model that answers a number with new bytes that contain it, and 0 with nothing."""

    def run(requests: Sequence[HostedRequest]) -> list[Reply]:
        numbers = [number_of(one) for one in requests]
        return [Answer([tensor("out", size, number)] if number else []) for number in numbers]

    return run


@dataclass
class Reader:
    """A model that reads its inputs, and notes whether they were right and whether they were shared."""

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
            # One after the other, so that a write that the other input sees is noticed.
            for each in one.request.inputs:
                np.frombuffer(each.data, np.uint8)[:] += 1
        if not self.passes_on:
            return Answer([])
        return Answer([Tensor("out", each.datatype, each.shape, each.data) for each in one.request.inputs[:1]])


class Worker:
    """A connection with the worker's own code at its end."""

    def __init__(self, stage: Stage, run: Callable[[Sequence[HostedRequest]], list[Reply]]) -> None:
        self.stage = stage
        self.connection = stage.connection
        self.process = HonestWorker(os.dup(stage.theirs.fileno()), lambda _: Script(run))
        stage.theirs.close()

    async def ask(self, key: int, *inputs: Tensor) -> Sequence[Tensor]:
        """Its answer to a batch of one."""
        before = len(self.stage.heard.done)
        self.connection.batches.execute([BatchItem(key, InferenceRequest("m", inputs=list(inputs)), 1, False)], 0)
        await self.stage.until(lambda: len(self.stage.heard.done) > before, "the batch")
        _, done = self.stage.heard.done.pop()
        [reply] = done.replies
        assert isinstance(reply, Answer), reply
        return reply.outputs

    async def answer(self, key: int, name: str = "in") -> Tensor:
        """What it makes of a number, to be an input."""
        [output] = await self.ask(key, tensor("in", 8, key))
        return Tensor(name, output.datatype, output.shape, output.data)

    def blocks(self) -> int:
        """In its own arena."""
        return self.process.memory.outbound.blocks.blocks

    async def check_blocks(self, count: int) -> None:
        """So many are in use, at the latest when all has been said. It is told what is not with what it is sent next."""
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
    """Send inputs until `at_once` of them are shared: the first ones are copies, and each segment must be mapped."""
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


def play(story: Callable[[], Any]) -> None:
    async def main() -> None:
        async with leaving_nothing():
            await story()

    asyncio.run(main())


@pytest.mark.parametrize("size", [MIN_SHARED_BYTES, MIN_SHARED_BYTES + 4097, COPIED_ON_LOOP_BYTES + 4])
def test_a_worker_reads_the_answer_of_another_in_place(size: int):
    async def story() -> None:
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

    play(story)


def test_small_tensors_are_copied():
    async def story() -> None:
        reader = Reader()
        async with worker(make(MIN_SHARED_BYTES - 1)) as owner, worker(reader) as reader_worker:
            for key in range(1, 11):
                await reader_worker.ask(key, await owner.answer(key))
            assert (all(reader.right), any(reader.shared)) == (True, False)
            assert reader_worker.process.memory.shared.sizes() == {}

    play(story)


def test_a_tensor_that_a_model_keeps_does_not_change():
    async def story() -> None:
        reader = Reader(keeps=True)
        async with worker(make()) as owner, worker(reader) as reader_worker:
            await warm_up(owner, reader, reader_worker)
            reader.shared.clear()
            for key in range(100, 120):
                await reader_worker.ask(key, await owner.answer(key))
                await owner.answer(999)
            # But for the first ones of new segments.
            assert sum(reader.shared) > 10
            for key, kept in zip(range(100, 120), reader.kept, strict=True):
                assert bytes(kept) == bytes(tensor("in", SIZE, key).data)
            del kept
            await owner.check_blocks(sum(reader.shared))
            reader.kept.clear()
            await reader_worker.ask(0, tensor("in", 8))
            await owner.check_blocks(0)

    play(story)


def test_the_last_of_several_readers_frees_the_block():
    async def story() -> None:
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

    play(story)


@pytest.mark.parametrize("writes", [False, True])
def test_the_same_bytes_twice_are_two_inputs(writes: bool):
    async def story() -> None:
        reader, writer = Reader(), Reader(writes=writes)
        async with worker(make()) as owner, worker(writer) as reader_worker, worker(reader) as other:
            await warm_up(owner, writer, reader_worker, 1)
            writer.shared.clear()
            answer = await owner.answer(7)
            await reader_worker.ask(7, answer, Tensor("b", answer.datatype, answer.shape, answer.data))
            assert writer.shared == [True, False]
            assert all(writer.right)
            await other.ask(7, answer)
            assert all(reader.right)

    play(story)


def test_a_model_that_writes_to_its_inputs_gets_only_copies():
    async def story() -> None:
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
            assert first.process.memory.shared.sizes() == {}, "what nobody uses is not kept"

    play(story)


def test_an_input_that_is_the_output_is_never_copied():
    """From a worker through two others and back to itself."""

    async def story() -> None:
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

    play(story)


def test_a_worker_may_read_its_own_answer():
    async def story() -> None:
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

    play(story)


@pytest.mark.parametrize("keeps", [False, True])
def test_an_input_is_shared_once_its_model_cannot_write_to_it(keeps: bool):
    async def story() -> None:
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

    play(story)


def test_the_death_of_a_reader_frees_its_blocks():
    """Twice as many bytes as may be shared at a time are shared one after the other."""

    async def story() -> None:
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

    play(story)


def test_shared_bytes_outlive_their_owner():
    async def story() -> None:
        reader = Reader(keeps=True)
        async with worker(reader) as reader_worker:
            async with worker(make()) as owner:
                await warm_up(owner, reader, reader_worker)
                answer = await owner.answer(100)
                await reader_worker.ask(100, answer)
                queued = await owner.answer(101)
                del answer, owner
            gc.collect()
            # What the owner answered before its end is shared after it.
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

    play(story)


def test_owners_may_come_and_go():
    async def story() -> None:
        reader = Reader()
        async with worker(reader) as reader_worker:
            most = 0
            for _ in range(30):
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

    play(story)


def test_at_most_half_of_an_arena_is_shared():
    async def story() -> None:
        reader = Reader(keeps=True)
        # The bound of the server is smaller here than that of the worker.
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

    play(story)


class Home:
    """Segments of a worker that is not there."""

    def __init__(self, count: int = 1, size: int = SIZE) -> None:
        self.map = SegmentMap(shareable_bytes=1 << 40)
        for number in range(1, count + 1):
            descriptor = make_segment(size)
            assert descriptor is not None
            self.map.map(number, descriptor)

    def tensor(self, number: int = 1, offset: int = 0, size: int = SIZE, name: str = "in") -> Tensor:
        data = self.map.lease((number, offset), offset, size)
        return Tensor(name, DataType.UINT8, (size,), data)


class Played:
    """A reader that the test plays."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.connection = stage.connection
        self.numbers: list[int] = []

    def send(self, *inputs: Tensor, key: int = 1) -> int:
        return self.connection.batches.execute(
            [BatchItem(key, InferenceRequest("m", inputs=list(inputs)), 1, False)], 0
        )

    async def hear(self) -> list[tuple[int, int, int]]:
        """Where the inputs of the next batch lie; segments are noted on their way, with nothing said of them."""
        places: list[tuple[int, int, int]] = []

        def locate(segment: int, offset: int, size: int) -> bytes:
            places.append((segment, offset, size))
            return b""

        kind, body = await self.stage.hear()
        assert kind is Kind.EXECUTE, kind
        decode_execute(body, ("in", "b"), (), "m", locate)
        self.numbers = self.stage.shared
        return places

    async def say_mapped(self, number: int, *, is_mapped: bool = True) -> None:
        await self.stage.say(encode_frame(Kind.MAPPED, MAPPED.pack(number, is_mapped)))
        # The server has heard it once it has heard what follows.
        count = len(self.stage.heard.ready)
        await self.stage.say(encode_frame(Kind.READY, b"\1"))
        await self.stage.until(lambda: len(self.stage.heard.ready) > count, "the word to be heard")

    async def end_batch(
        self, batch: int, *outputs: Tensor, retained: Sequence[tuple[int, int]] = (), **more: Any
    ) -> None:
        count = len(self.stage.heard.done)
        await self.stage.say(done_frame(batch, [Answer(list(outputs))], retained=retained, **more))
        await self.stage.until(lambda: len(self.stage.heard.done) > count or self.stage.lost, "the end")


@asynccontextmanager
async def played() -> AsyncIterator[Played]:
    async with one_of_several() as stage:
        yield Played(stage)


async def map_first_segment(each: Played, home: Home) -> int:
    """Have the reader map the first segment of the home; returns its number."""
    batch = each.send(home.tensor())
    await each.hear()
    await each.say_mapped(each.numbers[-1])
    await each.end_batch(batch)
    return each.numbers[-1]


def test_nothing_is_shared_before_the_reader_has_mapped_the_segment():
    async def story() -> None:
        home = Home()
        async with played() as each:
            batches = [each.send(home.tensor()) for _ in range(2)]
            assert [(await each.hear())[0][0] < FIRST_SHARED for _ in batches] == [True, True]
            [number] = each.numbers
            await each.say_mapped(number)
            for batch in batches:
                await each.end_batch(batch)
            batch = each.send(home.tensor())
            assert await each.hear() == [(number, 0, SIZE)]
            assert not home.map.released
            await each.end_batch(batch)
            each.stage.heard.done.clear()
            assert list(home.map.released)[-1] == (1, 0)

    play(story)


def test_copied_tensors_are_not_kept_beyond_their_batch():
    async def story() -> None:
        home = Home()
        async with played() as each:
            batch = each.send(home.tensor(size=MIN_SHARED_BYTES - 1))
            await each.hear()
            await each.end_batch(batch)
            each.stage.heard.done.clear()
            assert list(home.map.released) == [(1, 0)]

    play(story)


def test_no_room_is_made_for_shared_tensors():
    size = 4 * COPIED_ON_LOOP_BYTES

    async def story() -> None:
        home = Home(size=size)
        async with played() as each:
            batch = each.send(home.tensor(size=MIN_SHARED_BYTES))
            await each.hear()
            await each.say_mapped(each.numbers[-1])
            await each.end_batch(batch)
            each.send(home.tensor(size=size))
            assert await each.hear() == [(each.numbers[-1], 0, size)]
            assert sum(each.stage.segments.sizes().values()) < size

    play(story)


def test_a_reader_that_cannot_map_a_segment_gets_only_copies():
    async def story() -> None:
        home = Home(2)
        async with played() as each:
            await map_first_segment(each, home)
            batch = each.send(home.tensor(2))
            await each.hear()
            first, second = each.numbers
            await each.say_mapped(second, is_mapped=False)
            told = {(await each.stage.hear())[1][:2].tobytes() for _ in range(2)}
            assert told == {UNMAP.pack(first), UNMAP.pack(second)}
            await each.end_batch(batch)
            each.send(home.tensor(1))
            assert (await each.hear())[0][0] < FIRST_SHARED

    play(story)


@pytest.mark.parametrize(("offset", "size"), [(4096, SIZE - 4096), (100, SIZE - 100)], ids=["a page", "no page"])
def test_a_part_of_a_block_is_shared_only_from_its_beginning(offset: int, size: int):
    """Private pages of a block are dropped when the block is shared again, from its beginning."""

    async def story() -> None:
        home = Home()
        async with played() as each:
            number = await map_first_segment(each, home)
            data = home.tensor().data
            assert isinstance(data, memoryview)
            each.send(Tensor("in", DataType.UINT8, (size,), data[offset:]))
            assert (await each.hear())[0][0] != number
            each.send(Tensor("in", DataType.UINT8, (size,), data[:size]))
            assert await each.hear() == [(number, 0, size)]
            del data

    play(story)


@pytest.mark.parametrize("place", [(0, SIZE + 1), (4096, SIZE), (1 << 63, 20 << 10)], ids=["longer", "beyond", "far"])
def test_an_answer_with_bytes_that_are_not_shared_is_refused(place: tuple[int, int]):
    async def story() -> None:
        home = Home()
        async with played() as each:
            number = await map_first_segment(each, home)
            batch = each.send(home.tensor())
            await each.hear()
            offset, size = place
            output = Tensor("out", DataType.UINT8, (size,), bytes(size))
            await each.end_batch(batch, output, place=lambda _: (number, offset))
            assert "which it was not given" in await each.stage.until_lost()

    play(story)


def test_an_answer_with_bytes_that_were_given_back_is_refused():
    async def story() -> None:
        home = Home()
        async with played() as each:
            number = await map_first_segment(each, home)
            batch = each.send(home.tensor())
            await each.hear()
            await each.end_batch(batch)
            batch = each.send(tensor("in", 8))
            await each.hear()
            output = Tensor("out", DataType.UINT8, (SIZE,), bytes(SIZE))
            await each.end_batch(batch, output, place=lambda _: (number, 0))
            assert "which it was not given" in await each.stage.until_lost()

    play(story)


def test_a_batch_that_cannot_be_sent_gives_its_blocks_back():
    async def story() -> None:
        home = Home()
        async with played() as each:
            await map_first_segment(each, home)
            each.send(home.tensor(), Tensor("unknown", DataType.UINT8, (1,), b"x"))
            await each.stage.until(lambda: len(each.stage.heard.done) == 2, "its end")
            assert home.map.sharing.shared_bytes == 0
            each.send(home.tensor())
            assert (await each.hear())[0][0] >= FIRST_SHARED

    # Lines of log that pytest keeps hold on to what failed.
    logging.disable(logging.ERROR)
    try:
        play(story)
    finally:
        logging.disable(logging.NOTSET)


def test_the_number_of_segments_of_one_reader_is_bounded():
    async def story() -> None:
        home = Home(MAX_SEGMENTS + 5)
        async with played() as each:
            for number in range(1, MAX_SEGMENTS + 6):
                batch = each.send(home.tensor(number))
                await each.hear()
                await each.end_batch(batch)
            assert len(each.numbers) == MAX_SEGMENTS
            del home
            each.stage.heard.done.clear()
            gc.collect()
            unmapped = {(await each.stage.hear())[0] for _ in range(MAX_SEGMENTS)}
            assert unmapped == {Kind.UNMAP}
            each.send(Home().tensor())
            await each.hear()
            assert len(each.numbers) == MAX_SEGMENTS + 1

    play(story)


def test_segment_numbers_are_not_reused_and_run_out():
    """A reader that outlives thousands of owners gets copies in the end."""
    sent: list[int] = []
    unmapped: list[int] = []

    def send(number: int, descriptor: int) -> None:
        sent.append(number)
        os.close(descriptor)

    async def main() -> None:
        shared = SharedSegments(send, unmapped.append, asyncio.get_running_loop())
        for _ in range(FIRST_SHARED + 10):
            home = SegmentMap(shareable_bytes=1 << 20)
            descriptor = os.memfd_create("halimede", os.MFD_ALLOW_SEALING)
            os.truncate(descriptor, 4096)
            home.map(1, descriptor)
            assert shared.share(home.lease((1, 0), 0, 4096)) is None
            if len(unmapped) < len(sent):
                shared.on_mapped(sent[-1], is_mapped=True)
            del home
            await asyncio.sleep(0)
        shared.close()

    asyncio.run(main())
    assert sent == list(range(FIRST_SHARED, 1 << 16)) == unmapped


def test_a_segment_without_its_descriptor_is_not_mapped():
    """So it comes to a process that has as many files open as it may."""

    async def story() -> None:
        async with worker(Reader()) as each:
            kept, theirs = socket.socketpair()
            process = HonestWorker(theirs.detach(), lambda _: Script(Reader()))
            kept.sendall(encode_frame(Kind.SEGMENT, SEGMENT.pack(FIRST_SHARED, SHARED)))
            said = await asyncio.to_thread(kept.recv, 100)
            assert said == encode_frame(Kind.MAPPED, MAPPED.pack(FIRST_SHARED, False))
            kept.close()
            await asyncio.to_thread(process.join, LIMIT_S)
            assert process.failure is None
            await each.ask(1, *item(1, 8).request.inputs)

    play(story)
