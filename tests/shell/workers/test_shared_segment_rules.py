"""The rules for the bytes that the server shares; the test plays the reader."""

import asyncio
import gc
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from halimede.backends.hosting import Answer
from halimede.channel.frames import FIRST_SHARED, MAPPED, SEGMENT, SHARED, UNMAP, ChannelFrame, encode_frame
from halimede.channel.segments import SegmentMap, make_segment
from halimede.channel.server_end.memory import COPIED_ON_LOOP_BYTES
from halimede.channel.server_end.shared_segments import MAX_SEGMENTS, MIN_SHARED_BYTES, SharedSegments
from halimede.core.types import DataType, InferenceRequest, Tensor
from halimede.workers.frames.batches import decode_execute
from halimede.workers.frames.kinds import WorkerFrame
from halimede.workers.worker import BatchItem
from support.channel import (
    LIMIT_S,
    HonestWorker,
    Script,
    Stage,
    done_frame,
    item,
    one_of_several,
    tensor,
)
from support.shared_segments import SIZE, Reader, play, worker


class Home:
    """Segments of a worker, without the worker."""

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

    async def receive(self) -> list[tuple[int, int, int]]:
        """The locations of the next batch's inputs. Segments that arrive before it are recorded without an answer."""
        locations: list[tuple[int, int, int]] = []

        def locate(segment: int, offset: int, size: int) -> bytes:
            locations.append((segment, offset, size))
            return b""

        kind, body = await self.stage.receive()
        assert kind is WorkerFrame.EXECUTE, kind
        decode_execute(body, 0, locate)
        self.numbers = self.stage.shared
        return locations

    async def say_mapped(self, number: int, *, is_mapped: bool = True) -> None:
        await self.stage.send(encode_frame(ChannelFrame.MAPPED, MAPPED.pack(number, is_mapped)))
        # The server has handled the frame once it has handled the next one.
        count = len(self.stage.heard.ready)
        await self.stage.send(encode_frame(WorkerFrame.READY, b"\1"))
        await self.stage.until(lambda: len(self.stage.heard.ready) > count, "the frame to be handled")

    async def end_batch(
        self, batch: int, *outputs: Tensor, retained: Sequence[tuple[int, int]] = (), **more: Any
    ) -> None:
        count = len(self.stage.heard.done)
        await self.stage.send(done_frame(batch, [Answer(list(outputs))], retained=retained, **more))
        await self.stage.until(lambda: len(self.stage.heard.done) > count or self.stage.lost, "the end")


@asynccontextmanager
async def played() -> AsyncIterator[Played]:
    async with one_of_several() as stage:
        yield Played(stage)


async def map_first_segment(each: Played, home: Home) -> int:
    """Have the reader map the first segment of the home; returns its number."""
    batch = each.send(home.tensor())
    await each.receive()
    await each.say_mapped(each.numbers[-1])
    await each.end_batch(batch)
    return each.numbers[-1]


@play
async def test_nothing_is_shared_before_the_reader_has_mapped_the_segment():
    home = Home()
    async with played() as each:
        batches = [each.send(home.tensor()) for _ in range(2)]
        assert [(await each.receive())[0][0] < FIRST_SHARED for _ in batches] == [True, True]
        [number] = each.numbers
        await each.say_mapped(number)
        for batch in batches:
            await each.end_batch(batch)
        batch = each.send(home.tensor())
        assert await each.receive() == [(number, 0, SIZE)]
        assert not home.map.released
        await each.end_batch(batch)
        each.stage.heard.done.clear()
        assert list(home.map.released)[-1] == (1, 0)


@play
async def test_copied_tensors_are_not_kept_beyond_their_batch():
    home = Home()
    async with played() as each:
        batch = each.send(home.tensor(size=MIN_SHARED_BYTES - 1))
        await each.receive()
        await each.end_batch(batch)
        each.stage.heard.done.clear()
        assert list(home.map.released) == [(1, 0)]


@play
async def test_the_arena_does_not_grow_for_shared_tensors():
    size = 4 * COPIED_ON_LOOP_BYTES
    home = Home(size=size)
    async with played() as each:
        batch = each.send(home.tensor(size=MIN_SHARED_BYTES))
        await each.receive()
        await each.say_mapped(each.numbers[-1])
        await each.end_batch(batch)
        each.send(home.tensor(size=size))
        assert await each.receive() == [(each.numbers[-1], 0, size)]
        assert sum(each.stage.segments.sizes().values()) < size


@play
async def test_a_reader_that_cannot_map_a_segment_gets_copies_of_its_bytes():
    home = Home(2)
    async with played() as each:
        first = await map_first_segment(each, home)
        batch = each.send(home.tensor(2))
        await each.receive()
        await each.say_mapped(each.numbers[-1], is_mapped=False)
        await each.end_batch(batch)
        each.send(home.tensor(2))
        assert (await each.receive())[0][0] < FIRST_SHARED
        each.send(home.tensor(1))
        assert await each.receive() == [(first, 0, SIZE)]


@play
async def test_a_segment_that_a_model_has_written_to_is_copied_from_then_on():
    home = Home()
    async with played() as each:
        number = await map_first_segment(each, home)
        batch = each.send(home.tensor())
        assert await each.receive() == [(number, 0, SIZE)]
        await each.say_mapped(number, is_mapped=False)
        await each.end_batch(batch)
        batch = each.send(home.tensor())
        assert (await each.receive())[0][0] < FIRST_SHARED
        await each.end_batch(batch)
        del home
        each.stage.heard.done.clear()
        gc.collect()
        assert await each.stage.receive() == (ChannelFrame.UNMAP, UNMAP.pack(number))


@pytest.mark.parametrize(("offset", "size"), [(4096, SIZE - 4096), (100, SIZE - 100)], ids=["a page", "no page"])
@play
async def test_a_part_of_a_block_is_shared_only_from_its_beginning(offset: int, size: int):
    """Private pages of a block are dropped when the block is shared again, from its beginning."""
    home = Home()
    async with played() as each:
        number = await map_first_segment(each, home)
        data = home.tensor().data
        assert isinstance(data, memoryview)
        each.send(Tensor("in", DataType.UINT8, (size,), data[offset:]))
        assert (await each.receive())[0][0] != number
        each.send(Tensor("in", DataType.UINT8, (size,), data[:size]))
        assert await each.receive() == [(number, 0, size)]
        del data


@pytest.mark.parametrize(
    "location", [(0, SIZE + 1), (4096, SIZE), (1 << 63, 20 << 10)], ids=["longer", "beyond", "far"]
)
@play
async def test_an_answer_with_bytes_that_are_not_shared_is_refused(location: tuple[int, int]):
    home = Home()
    async with played() as each:
        number = await map_first_segment(each, home)
        batch = each.send(home.tensor())
        await each.receive()
        offset, size = location
        output = Tensor("out", DataType.UINT8, (size,), bytes(size))
        await each.end_batch(batch, output, store=lambda _: (number, offset))
        assert "which it was not given" in await each.stage.until_lost()


@play
async def test_an_answer_with_bytes_that_were_given_back_is_refused():
    home = Home()
    async with played() as each:
        number = await map_first_segment(each, home)
        batch = each.send(home.tensor())
        await each.receive()
        await each.end_batch(batch)
        batch = each.send(tensor("in", 8))
        await each.receive()
        output = Tensor("out", DataType.UINT8, (SIZE,), bytes(SIZE))
        await each.end_batch(batch, output, store=lambda _: (number, 0))
        assert "which it was not given" in await each.stage.until_lost()


def test_a_batch_that_cannot_be_sent_gives_its_blocks_back():
    async def scenario() -> None:
        home = Home()
        async with played() as each:
            await map_first_segment(each, home)
            requests = [InferenceRequest("m", inputs=[home.tensor()]), InferenceRequest("m", sequence_id=-1)]
            each.connection.batches.execute([BatchItem(key, one, 1, False) for key, one in enumerate(requests)], 0)
            await each.stage.until(lambda: len(each.stage.heard.done) == 2, "its end")
            assert home.map.sharing.shared_bytes == 0
            each.send(home.tensor())
            assert (await each.receive())[0][0] >= FIRST_SHARED

    # Log records that pytest keeps would hold the failed batch.
    logging.disable(logging.ERROR)
    try:
        play(scenario)()
    finally:
        logging.disable(logging.NOTSET)


@play
async def test_the_number_of_segments_of_one_reader_is_bounded():
    home = Home(MAX_SEGMENTS + 5)
    async with played() as each:
        for number in range(1, MAX_SEGMENTS + 6):
            batch = each.send(home.tensor(number))
            await each.receive()
            await each.end_batch(batch)
        assert len(each.numbers) == MAX_SEGMENTS
        del home
        each.stage.heard.done.clear()
        gc.collect()
        unmapped = {(await each.stage.receive())[0] for _ in range(MAX_SEGMENTS)}
        assert unmapped == {ChannelFrame.UNMAP}
        each.send(Home().tensor())
        await each.receive()
        assert len(each.numbers) == MAX_SEGMENTS + 1


def test_segment_numbers_are_not_reused_and_run_out():
    """A reader that has had segments of many owners runs out of numbers and then gets copies."""
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


@play
async def test_a_segment_without_its_descriptor_is_not_mapped():
    """The kernel drops the descriptor if the process is at its limit of open files."""
    async with worker(Reader()) as each:
        server_end, worker_end = socket.socketpair()
        process = HonestWorker(worker_end.detach(), lambda _: Script(Reader()))
        server_end.sendall(encode_frame(ChannelFrame.SEGMENT, SEGMENT.pack(FIRST_SHARED, SHARED)))
        answer = await asyncio.to_thread(server_end.recv, 100)
        assert answer == encode_frame(ChannelFrame.MAPPED, MAPPED.pack(FIRST_SHARED, False))
        server_end.close()
        await asyncio.to_thread(process.join, LIMIT_S)
        assert process.failure is None
        await each.ask(1, *item(1, 8).request.inputs)
