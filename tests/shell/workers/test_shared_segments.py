"""What one worker answers another reads where it lies: the workers' own code at the other ends, or a test that plays it."""

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
from halimede.workers.frames.kinds import BORROWED, FIRST_BORROWED, FORGET, MAPPED, SEGMENT, Kind, encode_frame
from halimede.workers.segments import Lease, SegmentMap, make_segment
from halimede.workers.server.memory import ARENA_BYTES, COPIED_ON_LOOP_BYTES
from halimede.workers.server.shared_segments import LENT_BYTES, MAX_SEGMENTS, Lending
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


def is_lent(data: Buffer) -> bool:
    """Asked in the worker: whether it is another one's memory."""
    return isinstance(data, memoryview) and isinstance(data.obj, Lease) and data.obj.block[0] >= FIRST_BORROWED


def number_of(request: HostedRequest) -> int:
    return int.from_bytes(bytes(request.request.inputs[0].data[:4]), "little")


def make(size: int = SIZE) -> Callable[[Sequence[HostedRequest]], list[Reply]]:
    """What a worker does that answers a number with new bytes that tell it, and 0 with nothing."""

    def run(requests: Sequence[HostedRequest]) -> list[Reply]:
        numbers = [number_of(one) for one in requests]
        return [Answer([tensor("out", size, number)] if number else []) for number in numbers]

    return run


@dataclass
class Reader:
    """What a worker does that looks at its inputs; notes what they were and whether they were lent."""

    keeps: bool = False
    writes: bool = False
    passes_on: bool = False
    right: list[bool] = field(default_factory=list)
    lent: list[bool] = field(default_factory=list)
    kept: list[np.ndarray[Any, Any]] = field(default_factory=list)

    def __call__(self, requests: Sequence[HostedRequest]) -> list[Reply]:
        return [self._answer(one) for one in requests]

    def _answer(self, one: HostedRequest) -> Reply:
        expected = bytes(tensor("in", len(one.request.inputs[0].data), number_of(one)).data)
        for each in one.request.inputs:
            seen = np.frombuffer(each.data, np.uint8)
            self.right.append(bytes(seen) == expected)
            self.lent.append(is_lent(each.data))
            if self.keeps:
                self.kept.append(seen)
        if self.writes:
            # One after the other, so that one that saw the other's would show it.
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


async def warm_up(lender: Worker, reader: Reader, borrower: Worker, at_once: int = 4) -> None:
    """Until it is lent so many: the first answers come in frames, and each segment has to be mapped."""
    for _ in range(50):
        answers = [await lender.answer(key) for key in range(1, 1 + at_once)]
        for key, answer in enumerate(answers, 1):
            await borrower.ask(key, answer)
        reader.kept.clear()
        if all(reader.lent[-at_once:]):
            del answers, answer
            await borrower.ask(0, tensor("in", 8))
            reader.kept.clear()
            await lender.check_blocks(0)
            return
    raise AssertionError("nothing was lent")


def play(story: Callable[[], Any]) -> None:
    async def main() -> None:
        async with leaving_nothing():
            await story()

    asyncio.run(main())


@pytest.mark.parametrize("size", [LENT_BYTES, LENT_BYTES + 4097, COPIED_ON_LOOP_BYTES + 4])
def test_what_one_worker_answered_another_reads_where_it_lies(size: int):
    async def story() -> None:
        reader = Reader()
        async with worker(make(size)) as lender, worker(reader) as borrower:
            await warm_up(lender, reader, borrower)
            segments = repr(borrower.connection)
            for key in range(100, 130):
                await borrower.ask(key, await lender.answer(key))
            assert all(reader.right)
            assert all(reader.lent[-30:])
            assert repr(borrower.connection) == segments, "no more memory of its own"
            await lender.check_blocks(0)

    play(story)


def test_what_is_small_is_copied():
    async def story() -> None:
        reader = Reader()
        async with worker(make(LENT_BYTES - 1)) as lender, worker(reader) as borrower:
            for key in range(1, 11):
                await borrower.ask(key, await lender.answer(key))
            assert (all(reader.right), any(reader.lent)) == (True, False)
            assert borrower.process.memory.borrowed.sizes() == {}

    play(story)


def test_what_a_model_keeps_stays_as_it_was_until_it_lets_go():
    async def story() -> None:
        reader = Reader(keeps=True)
        async with worker(make()) as lender, worker(reader) as borrower:
            await warm_up(lender, reader, borrower)
            reader.lent.clear()
            for key in range(100, 120):
                await borrower.ask(key, await lender.answer(key))
                await lender.answer(999)
            # But for the first ones of new segments.
            assert sum(reader.lent) > 10
            for key, kept in zip(range(100, 120), reader.kept, strict=True):
                assert bytes(kept) == bytes(tensor("in", SIZE, key).data)
            del kept
            await lender.check_blocks(sum(reader.lent))
            reader.kept.clear()
            await borrower.ask(0, tensor("in", 8))
            await lender.check_blocks(0)

    play(story)


def test_several_workers_read_the_same_bytes_and_the_last_one_frees_them():
    async def story() -> None:
        one, two = Reader(), Reader(keeps=True)
        async with worker(make()) as lender, worker(one) as first, worker(two) as second:
            for key in range(1, 11):
                answer = await lender.answer(key)
                await asyncio.gather(first.ask(key, answer), second.ask(key, answer))
                del answer
            assert all(one.right + two.right)
            assert any(one.lent)
            assert any(two.lent)
            await lender.check_blocks(sum(two.lent))
            two.kept.clear()
            await second.ask(0, tensor("in", 8))
            await lender.check_blocks(0)

    play(story)


@pytest.mark.parametrize("writes", [False, True])
def test_the_same_bytes_twice_are_two_inputs(writes: bool):
    async def story() -> None:
        reader, writer = Reader(), Reader(writes=writes)
        async with worker(make()) as lender, worker(writer) as borrower, worker(reader) as other:
            await warm_up(lender, writer, borrower, 1)
            writer.lent.clear()
            answer = await lender.answer(7)
            await borrower.ask(7, answer, Tensor("b", answer.datatype, answer.shape, answer.data))
            assert writer.lent == [True, False]
            assert all(writer.right)
            await other.ask(7, answer)
            assert all(reader.right)

    play(story)


def test_what_a_model_writes_to_its_inputs_nobody_else_sees_and_it_is_lent_nothing_more():
    async def story() -> None:
        reader, writer = Reader(), Reader(writes=True, passes_on=True)
        async with worker(make()) as lender, worker(writer) as first, worker(reader) as second:
            for key in range(1, 21):
                answer = await lender.answer(key)
                [changed] = await first.ask(key, answer)
                expected = np.frombuffer(tensor("in", SIZE, key).data, np.uint8) + np.uint8(1)
                assert bytes(changed.data) == expected.tobytes()
                assert bytes(answer.data) == bytes(tensor("in", SIZE, key).data)
                await second.ask(key, answer)
                del answer, changed
            assert all(writer.right + reader.right)
            assert 0 < sum(writer.lent) <= 3
            assert any(reader.lent)
            await first.ask(0, tensor("in", 8))
            assert first.process.memory.borrowed.sizes() == {}, "what nobody uses is not kept"

    play(story)


def test_what_is_passed_on_as_it_is_is_never_copied():
    """From a worker through two others and back to itself."""

    async def story() -> None:
        through, again = Reader(passes_on=True), Reader(passes_on=True)
        async with worker(make()) as lender, worker(through) as one, worker(again) as two:
            for key in range(1, 11):
                [passed] = await one.ask(key, await lender.answer(key))
                [back] = await two.ask(key, Tensor("in", passed.datatype, passed.shape, passed.data))
                assert bytes(back.data) == bytes(tensor("in", SIZE, key).data)
                assert not isinstance(back.data, bytes)
                del passed, back
            assert any(through.lent)
            assert any(again.lent)
            assert one.process.memory.outbound.blocks.size_bytes == 0
            await lender.check_blocks(0)

    play(story)


def test_a_worker_may_read_what_it_answered_itself():
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
            assert all(reader.lent[-10:])

    play(story)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_request_that_is_answered_with_is_lent_once_its_model_cannot_write_to_it(keeps: bool):
    async def story() -> None:
        passing, reader = Reader(passes_on=True, keeps=keeps), Reader()
        async with worker(passing) as lender, worker(reader) as borrower:
            for key in range(1, 5):
                [passed] = await lender.ask(key, tensor("in", SIZE, key))
                if keeps:
                    passing.kept[-1][:4] = 99
                    assert bytes(passed.data[:4]) == b"\x63\x63\x63\x63", "its memory is the model's still"
                    passing.kept[-1][:4] = np.frombuffer(tensor("in", 4, key).data, np.uint8)
                await borrower.ask(key, Tensor("in", passed.datatype, passed.shape, passed.data))
                del passed
            assert all(reader.right)
            assert any(reader.lent) is not keeps
            passing.kept.clear()

    play(story)


def test_a_borrower_that_dies_gives_everything_back():
    """The blocks, and what may be lent at a time: two times over its bound it is all there again."""

    async def story() -> None:
        async with worker(make(), arena_bytes=16 * MIB) as lender:
            for _ in range(3):
                reader = Reader(keeps=True)
                async with worker(reader) as borrower:
                    await warm_up(lender, reader, borrower, 3)
                    reader.lent.clear()
                    for key in range(1, 6):
                        await borrower.ask(key, await lender.answer(key))
                    await lender.check_blocks(sum(reader.lent))
                    assert sum(reader.lent) >= 3
                reader.kept.clear()
                await lender.check_blocks(0)

    play(story)


def test_a_lender_that_dies_takes_nothing_away_and_its_memory_goes_with_the_last_view():
    async def story() -> None:
        reader = Reader(keeps=True)
        async with worker(reader) as borrower:
            async with worker(make()) as lender:
                await warm_up(lender, reader, borrower)
                answer = await lender.answer(100)
                await borrower.ask(100, answer)
                queued = await lender.answer(101)
                del answer, lender
            gc.collect()
            # What it answered before its end is lent after it.
            await borrower.ask(101, queued)
            del queued
            assert reader.lent[-2:] == [True, True]
            for key, kept in zip((100, 101), reader.kept, strict=True):
                assert bytes(kept) == bytes(tensor("in", SIZE, key).data)
            del kept
            assert len(borrower.process.memory.borrowed.sizes()) > 0
            reader.kept.clear()
            await borrower.ask(0, tensor("in", 8))
            gc.collect()
            await borrower.stage.until(
                lambda: borrower.process.memory.borrowed.sizes() == {}, "the borrower to forget the lender's segments"
            )

    play(story)


def test_lenders_may_come_and_go():
    async def story() -> None:
        reader = Reader()
        async with worker(reader) as borrower:
            most = 0
            for _ in range(30):
                async with worker(make()) as lender:
                    await warm_up(lender, reader, borrower)
                    most = max(most, len(borrower.process.memory.borrowed.sizes()))
                del lender
                gc.collect()
            assert most <= 6
            assert all(reader.right)
            await borrower.stage.until(
                lambda: borrower.process.memory.borrowed.sizes() == {}, "the last to be forgotten"
            )
            own = 2 * len(borrower.process.memory.inbound.sizes())
            await borrower.stage.until(lambda: mappings() == own, "all but its requests' to be unmapped, on both sides")

    play(story)


def test_a_lender_keeps_half_of_its_memory_whatever_others_keep():
    async def story() -> None:
        reader = Reader(keeps=True)
        # The worker's own bound is as ever: the server's is what it may lend.
        async with worker(make(), arena_bytes=16 * MIB) as lender, worker(reader) as borrower:
            for key in range(1, 21):
                await borrower.ask(key, await lender.answer(key))
            assert all(reader.right)
            assert sum(reader.lent) == 8 * MIB // SIZE
            assert lender.blocks() <= 8 * MIB // SIZE + 1
            for key, kept in enumerate(reader.kept, 1):
                assert bytes(kept) == bytes(tensor("in", SIZE, key).data)
            del kept
            reader.kept.clear()
            await borrower.ask(0, tensor("in", 8))
            reader.kept.clear()
            await lender.check_blocks(0)
            await borrower.ask(50, await lender.answer(50))
            assert reader.lent[-1], "there is room again"
            reader.kept.clear()

    play(story)


class Home:
    """Segments of a worker that is not there."""

    def __init__(self, count: int = 1, size: int = SIZE) -> None:
        self.map = SegmentMap(lendable_bytes=1 << 40)
        for number in range(1, count + 1):
            descriptor = make_segment(size)
            assert descriptor is not None
            self.map.map(number, descriptor)

    def tensor(self, number: int = 1, offset: int = 0, size: int = SIZE, name: str = "in") -> Tensor:
        data = self.map.lease((number, offset), offset, size)
        return Tensor(name, DataType.UINT8, (size,), data)


class Played:
    """A borrower that the test plays."""

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
        self.numbers = self.stage.borrowed
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


async def lent(each: Played, home: Home) -> int:
    """Have the borrower map the home's first segment; its number."""
    batch = each.send(home.tensor())
    await each.hear()
    await each.say_mapped(each.numbers[-1])
    await each.end_batch(batch)
    return each.numbers[-1]


def test_nothing_is_lent_before_the_borrower_has_said_that_it_can_look():
    async def story() -> None:
        home = Home()
        async with played() as each:
            batches = [each.send(home.tensor()) for _ in range(2)]
            assert [(await each.hear())[0][0] < FIRST_BORROWED for _ in batches] == [True, True]
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


def test_what_was_copied_is_let_go_of_with_its_batch():
    async def story() -> None:
        home = Home()
        async with played() as each:
            batch = each.send(home.tensor(size=LENT_BYTES - 1))
            await each.hear()
            await each.end_batch(batch)
            each.stage.heard.done.clear()
            assert list(home.map.released) == [(1, 0)]

    play(story)


def test_no_room_is_made_for_what_is_not_copied():
    size = 4 * COPIED_ON_LOOP_BYTES

    async def story() -> None:
        home = Home(size=size)
        async with played() as each:
            batch = each.send(home.tensor(size=LENT_BYTES))
            await each.hear()
            await each.say_mapped(each.numbers[-1])
            await each.end_batch(batch)
            each.send(home.tensor(size=size))
            assert await each.hear() == [(each.numbers[-1], 0, size)]
            assert sum(each.stage.segments.sizes().values()) < size

    play(story)


def test_a_borrower_that_cannot_look_is_lent_nothing_and_forgets_what_it_was_handed():
    async def story() -> None:
        home = Home(2)
        async with played() as each:
            await lent(each, home)
            batch = each.send(home.tensor(2))
            await each.hear()
            first, second = each.numbers
            await each.say_mapped(second, is_mapped=False)
            told = {(await each.stage.hear())[1][:2].tobytes() for _ in range(2)}
            assert told == {FORGET.pack(first), FORGET.pack(second)}
            await each.end_batch(batch)
            each.send(home.tensor(1))
            assert (await each.hear())[0][0] < FIRST_BORROWED

    play(story)


@pytest.mark.parametrize(("offset", "size"), [(4096, SIZE - 4096), (100, SIZE - 100)], ids=["a page", "no page"])
def test_a_part_of_a_block_is_lent_only_from_its_beginning(offset: int, size: int):
    """Of one block, what is written to at one place is given up when it is lent anew from another."""

    async def story() -> None:
        home = Home()
        async with played() as each:
            number = await lent(each, home)
            data = home.tensor().data
            assert isinstance(data, memoryview)
            each.send(Tensor("in", DataType.UINT8, (size,), data[offset:]))
            assert (await each.hear())[0][0] != number
            each.send(Tensor("in", DataType.UINT8, (size,), data[:size]))
            assert await each.hear() == [(number, 0, size)]
            del data

    play(story)


@pytest.mark.parametrize("place", [(0, SIZE + 1), (4096, SIZE), (1 << 63, 20 << 10)], ids=["longer", "beyond", "far"])
def test_a_borrower_answers_with_nothing_that_it_was_not_lent(place: tuple[int, int]):
    async def story() -> None:
        home = Home()
        async with played() as each:
            number = await lent(each, home)
            batch = each.send(home.tensor())
            await each.hear()
            offset, size = place
            output = Tensor("out", DataType.UINT8, (size,), bytes(size))
            await each.end_batch(batch, output, place=lambda _: (number, offset))
            assert "which it was not given" in await each.stage.until_lost()

    play(story)


def test_what_was_given_back_is_not_lent_any_more():
    async def story() -> None:
        home = Home()
        async with played() as each:
            number = await lent(each, home)
            batch = each.send(home.tensor())
            await each.hear()
            await each.end_batch(batch)
            batch = each.send(tensor("in", 8))
            await each.hear()
            output = Tensor("out", DataType.UINT8, (SIZE,), bytes(SIZE))
            await each.end_batch(batch, output, place=lambda _: (number, 0))
            assert "which it was not given" in await each.stage.until_lost()

    play(story)


def test_a_batch_that_cannot_be_sent_gives_back_what_it_was_lent():
    async def story() -> None:
        home = Home()
        async with played() as each:
            await lent(each, home)
            each.send(home.tensor(), Tensor("unknown", DataType.UINT8, (1,), b"x"))
            await each.stage.until(lambda: len(each.stage.heard.done) == 2, "its end")
            assert home.map.loans.lent_bytes == 0
            each.send(home.tensor())
            assert (await each.hear())[0][0] >= FIRST_BORROWED

    # Lines of log that pytest keeps hold on to what failed.
    logging.disable(logging.ERROR)
    try:
        play(story)
    finally:
        logging.disable(logging.NOTSET)


def test_only_so_many_segments_are_handed_to_one_worker():
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
            forgotten = {(await each.stage.hear())[0] for _ in range(MAX_SEGMENTS)}
            assert forgotten == {Kind.FORGET}
            each.send(Home().tensor())
            await each.hear()
            assert len(each.numbers) == MAX_SEGMENTS + 1

    play(story)


def test_numbers_are_not_used_twice_and_come_to_an_end():
    """A worker that outlives thousands of lenders gets copies at last."""
    handed: list[int] = []
    forgotten: list[int] = []

    def hand(number: int, descriptor: int) -> None:
        handed.append(number)
        os.close(descriptor)

    async def main() -> None:
        lending = Lending(hand, forgotten.append, asyncio.get_running_loop())
        for _ in range(FIRST_BORROWED + 10):
            home = SegmentMap(lendable_bytes=1 << 20)
            descriptor = os.memfd_create("halimede", os.MFD_ALLOW_SEALING)
            os.truncate(descriptor, 4096)
            home.map(1, descriptor)
            assert lending.lend(home.lease((1, 0), 0, 4096)) is None
            if len(forgotten) < len(handed):
                lending.on_mapped(handed[-1], is_mapped=True)
            del home
            await asyncio.sleep(0)
        lending.close()

    asyncio.run(main())
    assert handed == list(range(FIRST_BORROWED, 1 << 16)) == forgotten


def test_a_segment_that_comes_without_its_descriptor_is_not_looked_at():
    """So it comes to a process that has as many files open as it may."""

    async def story() -> None:
        async with worker(Reader()) as each:
            kept, theirs = socket.socketpair()
            process = HonestWorker(theirs.detach(), lambda _: Script(Reader()))
            kept.sendall(encode_frame(Kind.SEGMENT, SEGMENT.pack(FIRST_BORROWED, BORROWED)))
            said = await asyncio.to_thread(kept.recv, 100)
            assert said == encode_frame(Kind.MAPPED, MAPPED.pack(FIRST_BORROWED, False))
            kept.close()
            await asyncio.to_thread(process.join, LIMIT_S)
            assert process.failure is None
            await each.ask(1, *item(1, 8).request.inputs)

    play(story)
