"""Frames with wrong lengths and other wrong bytes end in an answer or in the loss of the worker, never in a wait.

The server waits a short time for the rest of a frame here.
"""

import asyncio
import struct
import tracemalloc
from collections.abc import Callable
from enum import IntEnum

import pytest

from halimede.backends.hosting import Answer, Reply
from halimede.backends.service_calls import TakeState
from halimede.channel.frames import HEADER, ChannelFrame, FrameKind
from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.frames.kinds import WORKER_FRAMES, WorkerFrame
from halimede.workers.frames.services import encode_service_call
from support.channel import Stage, done_frame, leaving_nothing, one_of_several, response_frame, stage, tensor
from support.hostile import KIB, MIB, check_reason, executed, infer, raw, taken
from support.loops import in_a_loop

STALL_SECS = 0.02
ANSWER = Answer([tensor("out", 8)], {"k": 1})
REPLIES: dict[str, Reply] = {"answer": ANSWER, "error": InferenceError(ErrorCode.INTERNAL, "no")}
VALUES = (0, 1, 2, 3, 0x7F, 0x80, 0xFF)


async def ended(each: Stage, frame: bytes) -> None:
    """Send an answer to the only batch. It ends, or the worker is lost, for a reason that says why."""
    await each.send(frame)
    await each.until(lambda: each.lost or each.heard.done, "the end of the batch")
    if each.lost:
        assert each.lost[0].startswith("it sent garbage: "), each.lost
        assert each.lost[0].isprintable()
    else:
        (_, done) = each.heard.done[0]
        assert len(done.replies) == 1
        assert done.replies[0] is not None
    each.connection.close()


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
@in_a_loop
async def test_an_answer_with_one_wrong_byte_ends_its_batch(reply: Reply) -> None:
    async def one(at: int, value: int) -> None:
        async with one_of_several(stall_secs=STALL_SECS) as each:
            frame = bytearray(done_frame(await executed(each, 10), [reply]))
            frame[at] = value
            await ended(each, bytes(frame))

    size = len(done_frame(1, [reply]))
    async with leaving_nothing():
        for at in range(size):
            await asyncio.gather(*(one(at, value) for value in VALUES))


OTHERS: dict[str, bytes] = {
    "a response": bytes(response_frame(1, ANSWER)),
    "a line": raw(WorkerFrame.LOG, b"\1hello"),
    "metrics": raw(WorkerFrame.METRICS, bytes(13)),
    "blocks": raw(ChannelFrame.UNUSED, bytes(10)),
    "readiness": raw(WorkerFrame.READY, b"\1"),
    "a service call": raw(WorkerFrame.SERVICE_CALL, bytes(4) + encode_service_call(TakeState(100))),
    "an inference": infer(1, 8),
    "answers that were taken": infer(1, 8) + taken(1, 0),
    "a segment": raw(ChannelFrame.MAPPED, bytes(3)),
    "states": raw(WorkerFrame.STATE_FREED, bytes(8)),
    "a start": raw(ChannelFrame.STARTED, b"{}"),
}


@pytest.mark.parametrize("frame", OTHERS.values(), ids=OTHERS)
@in_a_loop
async def test_other_frames_with_one_wrong_byte_do_not_keep_an_answer_back(frame: bytes) -> None:
    async def one(at: int, value: int) -> None:
        async with one_of_several(stall_secs=STALL_SECS) as each:
            changed = bytearray(frame)
            changed[at] = value
            batch = await executed(each, 10)
            await ended(each, bytes(changed) + bytes(done_frame(batch, [ANSWER])))

    async with leaving_nothing():
        for at in range(len(frame)):
            await asyncio.gather(*(one(at, value) for value in VALUES))


@pytest.mark.parametrize("kind", [kind for kind in WORKER_FRAMES.values() if kind.limit], ids=lambda kind: kind.name)
@in_a_loop
async def test_a_worker_that_stops_within_a_frame_is_ended(kind: FrameKind) -> None:
    async with stage(stall_secs=STALL_SECS) as each:
        await executed(each, 10)
        await each.send(raw(kind, b"", kind.limit or 0))
        check_reason(await each.until_lost(), "8 bytes of a longer frame, and nothing for some time")


class FastLoop(asyncio.SelectorEventLoop):
    """A loop whose clock a test moves forward."""

    moved_s = 0.0

    def time(self) -> float:
        return super().time() + self.moved_s


def test_a_frame_may_arrive_slowly_but_must_not_stop() -> None:
    loop = FastLoop()

    async def main() -> None:
        async with stage(stall_secs=3600) as each:
            for batch in (await executed(each, 10), await executed(each, 10)):
                frame = bytes(done_frame(batch, [ANSWER]))
                for at in range(0, len(frame), 16):
                    progress = repr(each.connection.channel)
                    await each.send(frame[at : at + 16])
                    await each.until(lambda: repr(each.connection.channel) != progress, "the piece")  # noqa: B023
                    loop.moved_s += 2400
                    await asyncio.sleep(0.002)
            assert (len(each.heard.done), each.lost) == (2, [])
            await each.send(raw(WorkerFrame.READY, b"", 1))
            await asyncio.sleep(0.002)
            loop.moved_s += 3601
            await asyncio.sleep(0.002)
            loop.moved_s += 3601
            check_reason(await each.until_lost(), "8 bytes of a longer frame, and nothing for some time")

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def announced(kind: IntEnum, frame: bytes, length: int) -> bytes:
    return raw(kind, frame[HEADER.size :], length)


LARGE: dict[str, tuple[Callable[[int], bytes], str]] = {
    "an answer of 1 GiB": (
        lambda batch: announced(WorkerFrame.DONE, bytes(done_frame(batch, [ANSWER])), 1 << 30),
        "a frame of 1073741824 bytes, of which 120 are described",
    ),
    "a response of 1 GiB": (
        lambda _: announced(WorkerFrame.RESPONSE, bytes(response_frame(1, ANSWER)), 1 << 30),
        "a frame of 1073741824 bytes, of which 104 are described",
    ),
    "a description of 1 GiB": (
        lambda batch: raw(WorkerFrame.DONE, struct.pack("<IIH", 1 << 30, batch, 1) + bytes(100), 1 << 30),
        "a description of 1073741824 bytes",
    ),
    "a description of nothing": (
        lambda batch: raw(WorkerFrame.DONE, struct.pack("<IIH", 40, batch, 1) + b"\xff" * 100, 1 << 30),
        "a large answer: a description that ends too early",
    ),
}


@pytest.mark.parametrize(("make", "pattern"), LARGE.values(), ids=LARGE)
@in_a_loop
async def test_a_large_frame_is_refused_as_soon_as_its_description_is_there(
    make: Callable[[int], bytes], pattern: str
) -> None:
    async with stage() as each:
        frame = make(await executed(each, 10))
        await each.send(frame[:20])
        await asyncio.sleep(0)
        await each.send(frame[20:])
        check_reason(await each.until_lost(), pattern)


def test_an_announced_length_takes_no_memory() -> None:
    async def main() -> int:
        async with stage() as each:
            large = tensor("out", 32 * MIB)
            frame = bytes(done_frame(await executed(each, 10), [Answer([large])]))
            tracemalloc.start()
            await each.send(raw(WorkerFrame.READY, b"\1") + frame[: 2 * KIB])
            await each.until(lambda: each.heard.ready, "the beginning")
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            await asyncio.gather(each.send(frame[2 * KIB :]), each.until(lambda: each.heard.done, "the end"))
            return peak

    assert asyncio.run(main()) < MIB
