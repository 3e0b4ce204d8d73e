"""Invalid frames: the connection is lost once, with a readable reason.

`stage` checks afterwards that no memory and no descriptor is left.
"""

import asyncio
import random
import struct
import threading
from collections.abc import Awaitable, Callable

import pytest

from halimede.backends.hosting import Answer
from halimede.backends.service_calls import (
    MetricValue,
    NewMetric,
    NewMetricFamily,
    UnloadModel,
)
from halimede.channel.frames import BLOCK, FIRST_SHARED, MAPPED, ChannelFrame
from halimede.front_processes.frames import FrontFrame
from halimede.inference_frames.kinds import CALL, InferenceFrame
from halimede.workers.connection.worker_connection import MAX_LINES_PER_SECOND
from halimede.workers.frames.kinds import MAX_CALLS, METRIC, WORKER_FRAMES, WorkerFrame
from support.channel import Stage, done_frame, item, response_frame, stage, tensor
from support.hostile import (
    KIB,
    LONGEST_TURN_S,
    MIB,
    check_reason,
    deep_json,
    executed,
    infer,
    raw,
    send,
    service,
    taken,
)
from support.loops import in_a_loop

STREAMS: dict[str, tuple[bytes, str]] = {
    "noise": (random.Random(1).randbytes(5_000), "a frame of kind"),
    "text": (b"Hello, I print to whatever is open\n" * 100, "a frame of kind"),
    "zeros": (bytes(1_000), "a frame of kind 0"),
    "an unknown kind": (raw(77), "a frame of kind 77"),
    "a huge kind": (raw(0xFFFFFFFF), "a frame of kind 4294967295"),
    **{
        f"the server's {kind.name}": (raw(kind, b"x" * 20), f"a {kind.name} frame, which only the server sends")
        for kind in WORKER_FRAMES.values()
        if kind.limit is None
    },
    **{
        f"a long {kind.name}": (raw(kind, b"", kind.limit + 1), f"a {kind.name} frame of [0-9]+ bytes")
        for kind in WORKER_FRAMES.values()
        if kind.limit is not None
    },
    "a frame of front ends": (raw(FrontFrame.INFERS), "a frame of kind 46"),
    "4 GiB": (raw(WorkerFrame.DONE, b"", 0xFFFFFFFF), "a DONE frame of 4294967295 bytes"),
    "an end of nothing": (bytes(done_frame(1, [])), "an end of batch 1 with 0 answers, which it was not asked for"),
    "a large end of nothing": (
        raw(WorkerFrame.DONE, struct.pack("<IIH", 10, 9, 1) + bytes(1_000), 1 << 30),
        "an end of batch 9 with 1 answers, which it was not asked for",
    ),
    "an empty end": (raw(WorkerFrame.DONE), "DONE: 0 bytes"),
    "an empty response": (raw(WorkerFrame.RESPONSE), "RESPONSE: a description that ends too early"),
    "a response of no kind": (
        raw(WorkerFrame.RESPONSE, struct.pack("<IQBQQ", 8, 1, 0, 0, 0) + struct.pack("<BBHI", 9, 0, 0, 0)),
        "a reply of kind 9",
    ),
    "a response elsewhere": (
        bytes(response_frame(1, Answer([tensor("out", 100 * KIB)]), store=lambda _: (1, 0))),
        "RESPONSE: bytes 0 to 102400 of segment 1, which it was not given",
    ),
    "a response in segment 65535": (
        bytes(response_frame(1, Answer([tensor("out", 100 * KIB)]), store=lambda _: (65535, 2**64 - 1))),
        "of segment 65535, which it was not given",
    ),
    "a second STARTED": (raw(ChannelFrame.STARTED, b"{}") * 2, "an unexpected STARTED frame"),
    "a failure after the start": (
        raw(ChannelFrame.STARTED, b"{}") + raw(ChannelFrame.FAILED, b'{"code":"INTERNAL","message":"m"}'),
        "an unexpected FAILED frame",
    ),
    "a start with invalid JSON": (raw(ChannelFrame.STARTED, b"{'a'}"), "invalid JSON"),
    "a start of a million brackets": (raw(ChannelFrame.STARTED, deep_json(b"")), "JSON of more than"),
    "a start of 50,000 brackets": (raw(ChannelFrame.STARTED, b"[" * 50_000), "invalid JSON"),
    "a failure without a text": (raw(ChannelFrame.FAILED, b'{"code":"INTERNAL"}'), "an invalid error: {'code': 'INTERNAL'}"),
    "a failure with an unknown code": (raw(ChannelFrame.FAILED, b'{"code":"OOPS","message":""}'), "an invalid error"),
    "a failure that is a list": (raw(ChannelFrame.FAILED, b"[]"), "an invalid error"),
    "an end twice": (raw(WorkerFrame.STOPPED) * 2, "an unexpected STOPPED frame"),
    "readiness without a value": (raw(WorkerFrame.READY), "an unexpected READY frame"),
    "a line without a level": (raw(WorkerFrame.LOG), "a log line without a valid level"),
    "a line of level 4": (raw(WorkerFrame.LOG, b"\4hello"), "a log line without a valid level"),
    "half a metric": (raw(WorkerFrame.METRICS, bytes(20)), "metrics of 20 bytes"),
    "an unknown metric operation": (raw(WorkerFrame.METRICS, METRIC.pack(1, 3, 1.0)), "metric operation 3"),
    "half a block": (raw(ChannelFrame.UNUSED, bytes(7)), "a list of blocks of 7 bytes"),
    "a block that it does not hold": (raw(ChannelFrame.UNUSED, BLOCK.pack(1, 0)), "a block that it did not hold"),
    "a call without a number": (raw(WorkerFrame.SERVICE_CALL, b"abc"), "SERVICE_CALL: a description that ends too early"),
    "a call of nothing": (raw(WorkerFrame.SERVICE_CALL, bytes(4)), "SERVICE_CALL: a description that ends too early"),
    "a call that does not exist": (raw(WorkerFrame.SERVICE_CALL, CALL.pack(1) + b"\xff"), "call 255, which does not exist"),
    "a call without its last field": (
        service(MetricValue(1), lambda body: body[:-1]), "SERVICE_CALL: a description that ends too early"
    ),
    "a call with a byte too many": (service(MetricValue(1), lambda body: body + b"x"), "1 bytes after the last field"),
    "a call with a name longer than its frame": (
        service(UnloadModel("m", False), lambda body: body[:5] + b"\xff\xff\xff\xff" + body[9:]),
        "SERVICE_CALL: a description that ends too early",
    ),
    "a call with a name that is not UTF-8": (
        service(UnloadModel("m", False), lambda body: body.replace(b"m", b"\xff")), "SERVICE_CALL: 'utf-8' codec"
    ),
    "a call with an unknown kind of metric": (
        service(NewMetricFamily("f", "", "GAUGE"), lambda body: body[:-1] + b"\3"), "SERVICE_CALL: "
    ),
    "a call with a million labels": (
        service(NewMetric(1, {}, []), lambda body: body[:13] + struct.pack("<I", 1_000_000) + bytes(8_000_000)),
        "more than 100000 entries",
    ),
    "a call with a million buckets": (
        service(NewMetric(1, {}, []), lambda body: body[:17] + struct.pack("<I", 1_000_000) + bytes(8_000_000)),
        "more than 100000 entries",
    ),
    "calls in a flood": (
        b"".join(service(MetricValue(1)) for _ in range(MAX_CALLS * 8)),
        f"more than {MAX_CALLS} calls at a time",
    ),
    "an empty inference": (raw(InferenceFrame.INFER), "INFER: a description that ends too early"),
    "an inference elsewhere": (
        infer(1, 100 * KIB, store=lambda _: (1, 0)),
        "INFER: bytes 0 to 102400 of segment 1, which it was not given",
    ),
    "an inference twice": (infer(1, 10) * 2, "inference 1 twice"),
    "inferences in a flood": (
        b"".join(infer(at, 1_000) for at in range(MAX_CALLS * 8)),
        f"more than {MAX_CALLS} inferences at a time",
    ),
    "half a number of a call to cancel": (raw(InferenceFrame.CANCEL_CALL, bytes(3)), "an unexpected CANCEL_CALL frame"),
    "half a number of a call that may stop": (
        raw(InferenceFrame.ASK_CANCEL_CALL, bytes(3)), "an unexpected ASK_CANCEL_CALL frame"
    ),
    "answers taken without a number": (raw(InferenceFrame.TAKEN, bytes(7)), "an unexpected TAKEN frame"),
    "answers taken that were not sent": (infer(1) + taken(1, 1), "1 answers of inference 1 taken, where 0 were sent"),
    "half an answer about a segment": (raw(ChannelFrame.MAPPED, bytes(2)), "an unexpected MAPPED frame"),
    "an answer about a segment that it was not sent": (
        raw(ChannelFrame.MAPPED, MAPPED.pack(FIRST_SHARED, True)), "an answer about segment 32768, which was not sent to it"
    ),
    "an answer about a segment of its own": (
        raw(ChannelFrame.MAPPED, MAPPED.pack(1, False)), "an answer about segment 1, which was not sent to it"
    ),
    "lines in a flood": (
        raw(WorkerFrame.LOG, b"\3" + b"x" * 100) * (MAX_LINES_PER_SECOND * 3),
        f"more than {MAX_LINES_PER_SECOND} log lines in a second",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("stream", "pattern"), STREAMS.values(), ids=STREAMS)
@in_a_loop
async def test_a_worker_that_sends_invalid_frames_is_ended(stream: bytes, pattern: str):
    async with stage() as each:
        each.heard.hold_calls = asyncio.Event()
        started = asyncio.ensure_future(each.connection.start({}))
        ended = asyncio.ensure_future(each.connection.stop())
        await asyncio.sleep(0)
        sending = threading.Thread(target=send, args=(each, stream))
        sending.start()
        check_reason(await each.until_lost(), pattern)
        await asyncio.to_thread(sending.join)
        await asyncio.wait((started, ended))
        if not started.cancelled():
            started.exception()
        each.connection.close()
        assert each.longest_turn_s < LONGEST_TURN_S


Hostile = Callable[[Stage], Awaitable[bytes]]


async def too_few(each: Stage) -> bytes:
    return bytes(done_frame(await executed(each, 10), []))


async def too_many(each: Stage) -> bytes:
    return bytes(done_frame(await executed(each, 10), [Answer([]), Answer([])]))


async def very_many(each: Stage) -> bytes:
    return bytes(done_frame(await executed(each, 10), [None] * 65_535))


async def twice(each: Stage) -> bytes:
    return bytes(done_frame(await executed(each, 10), [Answer([])])) * 2


async def before_it_is_sent(each: Stage) -> bytes:
    """The batch is still being copied, but the worker can guess its number."""
    number = each.connection.batches.execute([item(1, 64 * MIB)], 0)
    return bytes(done_frame(number, [Answer([])]))


async def many_outputs(each: Stage) -> bytes:
    body = struct.pack("<IIH", 1 << 20, await executed(each, 10), 1) + struct.pack("<BBHI", 0, 0, 65_535, 0)
    return raw(WorkerFrame.DONE, body + bytes(1 << 20))


async def many_blocks(each: Stage) -> bytes:
    batch = await executed(each, 10)
    return bytes(done_frame(batch, [Answer([])], retained=[(1, at) for at in range(200_000)]))


async def a_bomb_in_parameters(each: Stage) -> bytes:
    text = b'{"a":' * 10_000
    reply = struct.pack("<BBHI", 0, 0, 0, len(text)) + text
    return raw(WorkerFrame.DONE, struct.pack("<IIH", len(reply) + 33, await executed(each, 10), 1) + reply + bytes(64))


async def bytes_beyond_its_block(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    return bytes(done_frame(batch, [Answer([tensor("out", 100 * KIB + 65)])], store=lambda _: (1, 0)))


async def bytes_of_free_memory(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    return bytes(done_frame(batch, [Answer([tensor("out", 20 * KIB)])], store=lambda _: (1, 512 * KIB)))


async def bytes_behind_a_segment(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    return bytes(done_frame(batch, [Answer([tensor("out", 20 * KIB)])], store=lambda _: (1, MIB - KIB)))


async def bytes_behind_all_memory(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    return bytes(done_frame(batch, [Answer([tensor("out", 20 * KIB)])], store=lambda _: (1, 2**64 - 10 * KIB)))


async def a_block_of_another_batch(each: Stage) -> bytes:
    each.connection.batches.execute([item(2, 100 * KIB)], 1)
    first = (await each.receive_batch()).batch
    await executed(each, 100 * KIB)
    return bytes(done_frame(first, [Answer([])], retained=[(1, 100 * KIB)]))


async def a_block_given_back_twice(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    unused = raw(ChannelFrame.UNUSED, BLOCK.pack(1, 0))
    return bytes(done_frame(batch, [Answer([])], retained=[(1, 0)])) + unused * 2


async def a_block_given_back_that_was_not_retained(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    return bytes(done_frame(batch, [Answer([])])) + raw(ChannelFrame.UNUSED, BLOCK.pack(1, 0))


async def bytes_given_back(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    store = {"store": lambda _: (1, 0)}
    return bytes(done_frame(batch, [Answer([])])) + bytes(
        response_frame(1, Answer([tensor("out", 100 * KIB)]), **store)  # type: ignore[arg-type]
    )


async def an_inference_beyond_its_block(each: Stage) -> bytes:
    await executed(each, 100 * KIB)
    return infer(1, 100 * KIB + 65, store=lambda _: (1, 0))


async def an_inference_of_free_memory(each: Stage) -> bytes:
    await executed(each, 100 * KIB)
    return infer(1, 20 * KIB, store=lambda _: (1, 512 * KIB))


async def more_taken_than_sent(each: Stage) -> bytes:
    await each.send(infer(5, 10))
    await each.until(lambda: each.heard.asked, "the inference")
    for _ in range(2):
        each.heard.asked[0].answer(tensor("y", 10), final=False)
        await each.receive()
    await each.send(taken(5, 1))
    await each.until(lambda: each.heard.taken, "one that was taken")
    return taken(5, 2)


async def an_answers_block_twice(each: Stage) -> bytes:
    await each.send(infer(5, 10))
    await each.until(lambda: each.heard.asked, "the inference")
    each.heard.asked[0].answer(tensor("y", 100 * KIB))
    await each.receive()
    return raw(ChannelFrame.UNUSED, BLOCK.pack(1, 0)) * 2


WITH_A_BATCH: dict[str, tuple[Hostile, str]] = {
    "too few answers": (too_few, "an end of batch 1 with 0 answers"),
    "too many answers": (too_many, "an end of batch 1 with 2 answers"),
    "65,535 answers": (very_many, "an end of batch 1 with 65535 answers"),
    "an end twice": (twice, "an end of batch 1 with 1 answers"),
    "an end before the beginning": (before_it_is_sent, "an end of batch 1 with 1 answers"),
    "65,535 outputs": (many_outputs, "a reply with 65535 outputs"),
    "blocks without end": (many_blocks, "a list of blocks of"),
    "a bomb in parameters": (a_bomb_in_parameters, "invalid JSON"),
    "bytes beyond its block": (bytes_beyond_its_block, "of segment 1, which it was not given"),
    "bytes of free memory": (bytes_of_free_memory, "of segment 1, which it was not given"),
    "bytes behind a segment": (bytes_behind_a_segment, "of segment 1, which it was not given"),
    "bytes behind all memory": (bytes_behind_all_memory, "of segment 1, which it was not given"),
    "another batch's block": (a_block_of_another_batch, "retains blocks that are not its own"),
    "a block twice": (a_block_given_back_twice, "gave back a block that it did not hold"),
    "a block that it did not retain": (
        a_block_given_back_that_was_not_retained,
        "gave back a block that it did not hold",
    ),
    "an inference beyond its block": (an_inference_beyond_its_block, "of segment 1, which it was not given"),
    "an inference of free memory": (an_inference_of_free_memory, "of segment 1, which it was not given"),
    "more taken than sent": (more_taken_than_sent, "2 answers of inference 5 taken, where 1 were sent"),
    "an answer's block twice": (an_answers_block_twice, "gave back a block that it did not hold"),
    "bytes that it gave back": (bytes_given_back, "of segment 1, which it was not given"),
}


@pytest.mark.parametrize(("hostile", "pattern"), WITH_A_BATCH.values(), ids=WITH_A_BATCH)
@in_a_loop
async def test_a_worker_that_answers_a_batch_wrongly_is_ended(hostile: Hostile, pattern: str):
    async with stage() as each:
        await each.send(await hostile(each))
        check_reason(await each.until_lost(), pattern)
        each.connection.close()
        await asyncio.get_running_loop().shutdown_default_executor()
