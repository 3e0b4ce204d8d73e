"""Workers that send what ours never do: each is given up once, with a reason that a person understands, and nothing else
suffers: neither the loop, nor memory, nor descriptors. `stage` looks at what is left afterwards.
"""

import asyncio
import gc
import json
import os
import random
import re
import struct
import threading
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest

from halimede.backends.hosting import Answer, Reply
from halimede.backends.service_calls import (
    IsModelReady,
    MetricValue,
    NewMetric,
    NewMetricFamily,
    ServiceCall,
    ServiceResult,
    UnloadModel,
)
from halimede.core.types import Buffer, DataType, ErrorCode, InferenceError, InferenceRequest, Tensor
from halimede.workers.frames.calls import decode_call_answer, encode_infer
from halimede.workers.frames.kinds import (
    BLOCK,
    CALL,
    FIRST_SHARED,
    HEADER,
    LIMITS,
    MAPPED,
    MAX_BLOCKS,
    MAX_CALLS,
    MAX_TEXT_BYTES,
    METRIC,
    TAKEN,
    Kind,
)
from halimede.workers.frames.services import encode_service_call
from halimede.workers.server import calls
from halimede.workers.server.channel import MAX_UNSENT_FRAMES
from halimede.workers.server.connection import MAX_LINES_PER_SECOND
from support.channel import Stage, done_frame, item, mappings, response_frame, stage, tensor

KIB, MIB = 1 << 10, 1 << 20
LONGEST_TURN_S = 0.25
"""Of the loop's processor time, where the goal is 50 ms: other tests share this machine's caches and clock."""


def raw(kind: int, body: bytes = b"", length: int | None = None) -> bytes:
    return HEADER.pack(len(body) if length is None else length, kind) + body


def service(call: ServiceCall[ServiceResult], change: Callable[[bytes], bytes] = bytes) -> bytes:
    """A service call whose body is changed."""
    return raw(Kind.SERVICE_CALL, change(CALL.pack(1) + encode_service_call(call)))


def infer(
    number: int, *sizes: int, place: Callable[[Buffer], tuple[int, int] | None] = lambda _: None, wanted: int = 0
) -> bytes:
    """An inference of another model that the worker asks for."""
    request = InferenceRequest("other", inputs=[tensor(f"x{at}", size) for at, size in enumerate(sizes)])
    return bytes(encode_infer(number, 0, request, place, lambda: wanted))


def taken(number: int, count: int) -> bytes:
    return raw(Kind.TAKEN, TAKEN.pack(number, count))


def uncalled(number: int) -> bytes:
    return raw(Kind.CANCEL_CALL, CALL.pack(number))


def deep_json(start: bytes) -> bytes:
    return start + b"[" * 1_000_000


STREAMS: dict[str, tuple[bytes, str]] = {
    "noise": (random.Random(1).randbytes(5_000), "a frame of kind"),
    "text": (b"Hello, I print to whatever is open\n" * 100, "a frame of kind"),
    "zeros": (bytes(1_000), "a frame of kind 0"),
    "a kind of nobody": (raw(77), "a frame of kind 77"),
    "a huge kind": (raw(0xFFFFFFFF), "a frame of kind 4294967295"),
    **{
        f"the server's {kind.name}": (raw(kind, b"x" * 20), f"a {kind.name} frame, which only the server sends")
        for kind in Kind
        if kind < Kind.STARTED
    },
    **{
        f"a long {kind.name}": (raw(kind, b"", LIMITS[kind] + 1), f"a {kind.name} frame of [0-9]+ bytes")
        for kind in Kind
        if kind >= Kind.STARTED
    },
    "4 GiB": (raw(Kind.DONE, b"", 0xFFFFFFFF), "a DONE frame of 4294967295 bytes"),
    "an end of nothing": (bytes(done_frame(1, [])), "an end of batch 1 with 0 answers, which it was not asked for"),
    "a large end of nothing": (
        raw(Kind.DONE, struct.pack("<IIH", 10, 9, 1) + bytes(1_000), 1 << 30),
        "an end of batch 9 with 1 answers, which it was not asked for",
    ),
    "an empty end": (raw(Kind.DONE), "DONE: 0 bytes"),
    "an empty response": (raw(Kind.RESPONSE), "RESPONSE: a description that ends too early"),
    "a response of no kind": (
        raw(Kind.RESPONSE, struct.pack("<IQBQQ", 8, 1, 0, 0, 0) + struct.pack("<BBHI", 9, 0, 0, 0)),
        "a reply of kind 9",
    ),
    "a response elsewhere": (
        bytes(response_frame(1, Answer([tensor("out", 100 * KIB)]), place=lambda _: (1, 0))),
        "RESPONSE: bytes 0 to 102400 of segment 1, which it was not given",
    ),
    "a response in segment 65535": (
        bytes(response_frame(1, Answer([tensor("out", 100 * KIB)]), place=lambda _: (65535, 2**64 - 1))),
        "of segment 65535, which it was not given",
    ),
    "an end of the start that nobody sees": (raw(Kind.STARTED, b"{}") * 2, "a STARTED frame that was not asked for"),
    "a failure after the start": (
        raw(Kind.STARTED, b"{}") + raw(Kind.FAILED, b'{"code":"INTERNAL","message":"m"}'),
        "a FAILED frame that was not asked for",
    ),
    "a start that is no JSON": (raw(Kind.STARTED, b"{'a'}"), "no JSON"),
    "a start of a million brackets": (raw(Kind.STARTED, deep_json(b"")), "JSON of more than"),
    "a start of 50,000 brackets": (raw(Kind.STARTED, b"[" * 50_000), "no JSON"),
    "a failure without a text": (raw(Kind.FAILED, b'{"code":"INTERNAL"}'), "no error: {'code': 'INTERNAL'}"),
    "a failure of no code": (raw(Kind.FAILED, b'{"code":"OOPS","message":""}'), "no error"),
    "a failure that is a list": (raw(Kind.FAILED, b"[]"), "no error"),
    "an end twice": (raw(Kind.STOPPED) * 2, "a STOPPED frame that was not asked for"),
    "readiness without a word": (raw(Kind.READY), "a READY frame that was not asked for"),
    "a line without a level": (raw(Kind.LOG), "a line of log without a level"),
    "a line of level 4": (raw(Kind.LOG, b"\4hello"), "a line of log without a level"),
    "half a metric": (raw(Kind.METRICS, bytes(20)), "20 bytes are no metrics"),
    "an operation that there is not": (raw(Kind.METRICS, METRIC.pack(1, 3, 1.0)), "metric operation 3"),
    "half a block": (raw(Kind.UNUSED, bytes(7)), "7 bytes are no list of blocks"),
    "a block that it does not hold": (raw(Kind.UNUSED, BLOCK.pack(1, 0)), "a block that it did not hold"),
    "a call without a number": (raw(Kind.SERVICE_CALL, b"abc"), "SERVICE_CALL: a description that ends too early"),
    "a call of nothing": (raw(Kind.SERVICE_CALL, bytes(4)), "SERVICE_CALL: a description that ends too early"),
    "a call that does not exist": (raw(Kind.SERVICE_CALL, CALL.pack(1) + b"\xff"), "call 255, which does not exist"),
    "a call without its last field": (
        service(MetricValue(1), lambda body: body[:-1]), "SERVICE_CALL: a description that ends too early"
    ),
    "a call with a byte too many": (service(MetricValue(1), lambda body: body + b"x"), "1 bytes behind the last field"),
    "a call with a name longer than its frame": (
        service(UnloadModel("m", False), lambda body: body[:5] + b"\xff\xff\xff\xff" + body[9:]),
        "SERVICE_CALL: a description that ends too early",
    ),
    "a call whose name is no text": (
        service(UnloadModel("m", False), lambda body: body.replace(b"m", b"\xff")), "SERVICE_CALL: 'utf-8' codec"
    ),
    "a call with a kind of metric that there is not": (
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
    "an empty inference": (raw(Kind.INFER), "INFER: a description that ends too early"),
    "an inference elsewhere": (
        infer(1, 100 * KIB, place=lambda _: (1, 0)),
        "INFER: bytes 0 to 102400 of segment 1, which it was not given",
    ),
    "an inference twice": (infer(1, 10) * 2, "inference 1 twice"),
    "inferences in a flood": (
        b"".join(infer(at, 1_000) for at in range(MAX_CALLS * 8)),
        f"more than {MAX_CALLS} inferences at a time",
    ),
    "half a number that nobody waits for": (raw(Kind.CANCEL_CALL, bytes(3)), "a CANCEL_CALL frame that was not asked for"),
    "answers taken of no number": (raw(Kind.TAKEN, bytes(7)), "a TAKEN frame that was not asked for"),
    "answers taken that were not sent": (infer(1) + taken(1, 1), "1 answers of inference 1 taken, where 0 were sent"),
    "half a word on a segment": (raw(Kind.MAPPED, bytes(2)), "a MAPPED frame that was not asked for"),
    "an answer about a segment that it was not sent": (
        raw(Kind.MAPPED, MAPPED.pack(FIRST_SHARED, True)), "an answer about segment 32768, which was not sent to it"
    ),
    "an answer about a segment of its own": (
        raw(Kind.MAPPED, MAPPED.pack(1, False)), "an answer about segment 1, which was not sent to it"
    ),
    "lines in a flood": (
        raw(Kind.LOG, b"\3" + b"x" * 100) * (MAX_LINES_PER_SECOND * 3),
        f"more than {MAX_LINES_PER_SECOND} lines of log in a second",
    ),
}  # fmt: skip


def check_reason(reason: str, pattern: str) -> None:
    assert reason.startswith("it sent garbage: "), reason
    assert re.search(pattern, reason), reason
    assert len(reason) < 400
    assert reason.isprintable()


@pytest.mark.parametrize(("stream", "pattern"), STREAMS.values(), ids=STREAMS)
def test_a_worker_that_sends_this_is_given_up(stream: bytes, pattern: str):
    async def main() -> None:
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

    asyncio.run(main())


def send(each: Stage, stream: bytes) -> None:
    """As fast as the server takes it, on a thread, so that only the server's work is the loop's."""
    theirs = os.dup(each.theirs.fileno())
    at = 0
    try:
        os.set_blocking(theirs, True)
        while at < len(stream):
            at += os.write(theirs, stream[at : at + MIB])
    except OSError:
        pass  # nobody reads it any more
    finally:
        os.close(theirs)


Hostile = Callable[[Stage], Awaitable[bytes]]


async def executed(each: Stage, *sizes: int) -> int:
    each.connection.batches.execute([item(1, *sizes)], 0)
    return (await each.hear_batch()).batch


async def too_few(each: Stage) -> bytes:
    return bytes(done_frame(await executed(each, 10), []))


async def too_many(each: Stage) -> bytes:
    return bytes(done_frame(await executed(each, 10), [Answer([]), Answer([])]))


async def very_many(each: Stage) -> bytes:
    return bytes(done_frame(await executed(each, 10), [None] * 65_535))


async def twice(each: Stage) -> bytes:
    return bytes(done_frame(await executed(each, 10), [Answer([])])) * 2


async def before_it_is_sent(each: Stage) -> bytes:
    """The batch is being copied; its number can be guessed."""
    number = each.connection.batches.execute([item(1, 64 * MIB)], 0)
    return bytes(done_frame(number, [Answer([])]))


async def many_outputs(each: Stage) -> bytes:
    body = struct.pack("<IIH", 1 << 20, await executed(each, 10), 1) + struct.pack("<BBHI", 0, 0, 65_535, 0)
    return raw(Kind.DONE, body + bytes(1 << 20))


async def many_blocks(each: Stage) -> bytes:
    batch = await executed(each, 10)
    return bytes(done_frame(batch, [Answer([])], retained=[(1, at) for at in range(200_000)]))


async def a_bomb_in_parameters(each: Stage) -> bytes:
    text = b'{"a":' * 10_000
    reply = struct.pack("<BBHI", 0, 0, 0, len(text)) + text
    return raw(Kind.DONE, struct.pack("<IIH", len(reply) + 33, await executed(each, 10), 1) + reply + bytes(64))


async def bytes_beyond_its_block(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    return bytes(done_frame(batch, [Answer([tensor("out", 100 * KIB + 65)])], place=lambda _: (1, 0)))


async def bytes_of_free_memory(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    return bytes(done_frame(batch, [Answer([tensor("out", 20 * KIB)])], place=lambda _: (1, 512 * KIB)))


async def bytes_behind_a_segment(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    return bytes(done_frame(batch, [Answer([tensor("out", 20 * KIB)])], place=lambda _: (1, MIB - KIB)))


async def bytes_behind_all_memory(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    return bytes(done_frame(batch, [Answer([tensor("out", 20 * KIB)])], place=lambda _: (1, 2**64 - 10 * KIB)))


async def a_block_of_another_batch(each: Stage) -> bytes:
    each.connection.batches.execute([item(2, 100 * KIB)], 1)
    first = (await each.hear_batch()).batch
    await executed(each, 100 * KIB)
    return bytes(done_frame(first, [Answer([])], retained=[(1, 100 * KIB)]))


async def a_block_given_back_twice(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    unused = raw(Kind.UNUSED, BLOCK.pack(1, 0))
    return bytes(done_frame(batch, [Answer([])], retained=[(1, 0)])) + unused * 2


async def a_block_given_back_that_was_not_retained(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    return bytes(done_frame(batch, [Answer([])])) + raw(Kind.UNUSED, BLOCK.pack(1, 0))


async def bytes_given_back(each: Stage) -> bytes:
    batch = await executed(each, 100 * KIB)
    place = {"place": lambda _: (1, 0)}
    return bytes(done_frame(batch, [Answer([])])) + bytes(
        response_frame(1, Answer([tensor("out", 100 * KIB)]), **place)  # type: ignore[arg-type]
    )


async def an_inference_beyond_its_block(each: Stage) -> bytes:
    await executed(each, 100 * KIB)
    return infer(1, 100 * KIB + 65, place=lambda _: (1, 0))


async def an_inference_of_free_memory(each: Stage) -> bytes:
    await executed(each, 100 * KIB)
    return infer(1, 20 * KIB, place=lambda _: (1, 512 * KIB))


async def more_taken_than_sent(each: Stage) -> bytes:
    await each.say(infer(5, 10))
    await each.until(lambda: each.heard.asked, "the inference")
    for _ in range(2):
        each.heard.asked[0].answer(tensor("y", 10), final=False)
        await each.hear()
    await each.say(taken(5, 1))
    await each.until(lambda: each.heard.taken, "one that was taken")
    return taken(5, 2)


async def an_answers_block_twice(each: Stage) -> bytes:
    await each.say(infer(5, 10))
    await each.until(lambda: each.heard.asked, "the inference")
    each.heard.asked[0].answer(tensor("y", 100 * KIB))
    await each.hear()
    return raw(Kind.UNUSED, BLOCK.pack(1, 0)) * 2


WITH_A_BATCH: dict[str, tuple[Hostile, str]] = {
    "too few answers": (too_few, "an end of batch 1 with 0 answers"),
    "too many answers": (too_many, "an end of batch 1 with 2 answers"),
    "65,535 answers": (very_many, "an end of batch 1 with 65535 answers"),
    "an end twice": (twice, "an end of batch 1 with 1 answers"),
    "an end before the beginning": (before_it_is_sent, "an end of batch 1 with 1 answers"),
    "65,535 outputs": (many_outputs, "a reply with 65535 outputs"),
    "blocks without end": (many_blocks, "are no list of blocks"),
    "a bomb in parameters": (a_bomb_in_parameters, "no JSON"),
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
def test_a_worker_that_answers_a_batch_so_is_given_up(hostile: Hostile, pattern: str):
    async def main() -> None:
        async with stage() as each:
            await each.say(await hostile(each))
            check_reason(await each.until_lost(), pattern)
            each.connection.close()
            await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(main())


def test_a_hostile_worker_is_read_no_further_than_to_its_first_wrong_word():
    """An announced gigabyte costs nothing before there is a reason to take it."""
    streams = {
        "garbage": b"\xff" * (256 * MIB),
        "an end of nothing": raw(Kind.DONE, struct.pack("<IIH", 10, 9, 1), 1 << 30) + bytes(256 * MIB),
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
            # What one `os.write` of the sending thread was given is 1 MiB of it.
            assert peak < 4 * MIB

    for stream in streams.values():
        asyncio.run(main(stream))


def test_a_worker_that_calls_and_never_reads_is_given_up_before_much_waits_for_it():
    async def main() -> None:
        async with stage() as each:
            call = service(IsModelReady("x" * 100, ""))
            tracemalloc.start()
            try:
                for _ in range(MAX_UNSENT_FRAMES // 128 * 2):
                    await each.say(call * 128)
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

    asyncio.run(main())


def test_what_crosses_the_last_answer_of_an_inference_is_no_fault():
    async def main() -> None:
        async with stage() as each:
            await each.say(infer(7, 10))
            await each.until(lambda: each.heard.asked, "the inference")
            each.heard.asked[0].answer(final=False)
            each.heard.asked[0].answer()
            await each.say(taken(7, 1) + uncalled(7) + taken(9, 1) + infer(7, 10))
            await each.until(lambda: len(each.heard.asked) == 2, "the next of that number")
            assert (each.heard.taken, each.heard.uncalled, each.lost) == ([], [], [])

    asyncio.run(main())


def test_inferences_of_a_worker_that_is_given_up_are_cancelled_and_their_answers_go_nowhere():
    async def main() -> None:
        async with stage() as each:
            await each.say(infer(1, 10) + infer(2, 10) + infer(3, 10))
            await each.until(lambda: len(each.heard.asked) == 3, "all of them")
            each.heard.asked[1].answer()
            await each.say(raw(77))
            await each.until_lost()
            assert each.heard.uncalled == [1001, 1003]
            for asked in (each.heard.asked[0], each.heard.asked[2]):
                asked.answer(tensor("y", 100 * KIB))
            each.heard.asked.clear()

    asyncio.run(main())


def test_answers_to_a_worker_that_does_not_read_become_errors_before_they_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of the gigabyte that may wait, a small part here."""
    monkeypatch.setattr(calls, "MAX_UNSENT_BYTES", 4 * MIB)

    async def main() -> None:
        async with stage(arena_bytes=0) as each:
            await each.say(b"".join(infer(at, 10) for at in range(1, 101)))
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
                kind, body = await each.hear()
                assert kind is Kind.CALL_ANSWER
                _, response = decode_call_answer(body, each.segments.lease)  # type: ignore[arg-type]
                errors.append(response.error)
            assert errors.count(None) < 10
            assert errors[-1] == InferenceError(
                ErrorCode.UNAVAILABLE, f"more than {4 * MIB} bytes wait for the model's process to read them"
            )
            await each.say(infer(101, 10))
            await each.until(lambda: len(each.heard.asked) == 101, "another")
            each.heard.asked[-1].answer(tensor("y", MIB))
            _, body = await each.hear()
            _, response = decode_call_answer(body, each.segments.lease)  # type: ignore[arg-type]
            assert response.error is None

    asyncio.run(main())


async def with_memory_for_answers(each: Stage) -> None:
    """The worker has a segment of its own: number 1."""
    batch = await executed(each, 10)
    await each.say(done_frame(batch, [Answer([])], wanted=100))
    await each.until(lambda: each.heard.done, "the end of the batch")
    each.heard.done.clear()
    await each.until(mappings, "the segment")


def test_a_worker_that_names_its_memory_without_end_is_given_up():
    """Each answer's memory is given back when the answer is gone; the list of what is given back is bounded."""

    async def main() -> None:
        async with stage() as each:
            await with_memory_for_answers(each)
            response = bytes(response_frame(5, Answer([tensor("out", 100 * KIB)]), place=lambda _: (1, 64)))
            for _ in range(MAX_BLOCKS // 100 * 2):
                await each.say(response * 100)
                each.heard.responses.clear()
                await asyncio.sleep(0)
                if each.lost:
                    break
            check_reason(await each.until_lost(), "blocks that it was not given back yet")

    asyncio.run(main())


def test_answers_that_overlap_are_answers():
    """They can hurt nobody but the model whose they are."""

    async def main() -> None:
        async with stage() as each:
            await with_memory_for_answers(each)
            batch = await executed(each, 10)
            places = iter([(1, 0), (1, 64)])
            outputs = [tensor("out", 100 * KIB), tensor("text", 100 * KIB)]
            await each.say(done_frame(batch, [Answer(outputs)], place=lambda _: next(places)))
            await each.until(lambda: each.heard.done, "the end of the batch")
            assert each.lost == []
            each.heard.done.clear()

    asyncio.run(main())


def test_elements_of_text_are_copied_out_of_reach_before_they_are_read():
    async def main() -> None:
        async with stage() as each:
            batch = await executed(each, 100 * KIB)
            text = Tensor("text", DataType.BYTES, (1,), bytes(100 * KIB))
            await each.say(done_frame(batch, [Answer([text])], place=lambda _: (1, 0)))
            await each.until(lambda: each.heard.done, "the end of the batch")
            each.segments.write((1, 0), b"\xff" * KIB)

            [reply] = each.heard.done[0][1].replies
            assert isinstance(reply, Answer)
            assert bytes(reply.outputs[0].data[:8]) == bytes(tensor("in", 8, 1).data)
            each.heard.done.clear()

    asyncio.run(main())


def test_a_model_that_answers_with_its_input_again_and_again_keeps_the_block_as_long_as_an_answer_lives():
    async def main() -> None:
        async with stage() as each:
            batch = await executed(each, 100 * KIB)
            answer: list[Reply] = [Answer([tensor("out", 100 * KIB), tensor("text", 50 * KIB)])]
            places = iter([(1, 0), (1, 512)])
            await each.say(done_frame(batch, answer, place=lambda _: next(places), retained=[(1, 0)]))
            await each.say(response_frame(1, Answer([tensor("out", 90 * KIB)]), place=lambda _: (1, 64)))
            await each.say(raw(Kind.UNUSED, BLOCK.pack(1, 0)))
            await each.until(lambda: each.heard.responses, "both")
            each.heard.done.clear()
            await executed(each, 20 * KIB)
            assert "2 blocks" in repr(each.connection), "the response's and the new batch's"
            each.heard.responses.clear()
            gc.collect()
            await executed(each, 20 * KIB)
            assert "2 blocks" in repr(each.connection), "of the batches that are executing"
            assert each.lost == []

    asyncio.run(main())


def test_a_start_that_fails_says_why_and_no_more_than_that():
    async def main() -> None:
        async with stage() as each:
            await each.say(raw(Kind.FAILED, json.dumps({"code": "NOT_FOUND", "message": "x" * 9_000_000}).encode()))
            with pytest.raises(InferenceError) as caught:
                await each.connection.start({})
            assert caught.value == InferenceError(ErrorCode.NOT_FOUND, "x" * MAX_TEXT_BYTES)

    asyncio.run(main())


def test_an_owner_that_lets_go_in_the_midst_hears_no_more():
    async def main() -> None:
        async with stage() as each:
            batch = await executed(each, 10)
            each.heard.on_end = lambda *_: each.connection.close()
            await each.say(bytes(done_frame(batch, [Answer([])])) + raw(Kind.READY, b"\1") + b"garbage!")
            await each.until(lambda: each.heard.done, "the end of the batch")
            for _ in range(5):
                await asyncio.sleep(0)
            assert each.heard.ready == []
            assert each.lost == []

    asyncio.run(main())
