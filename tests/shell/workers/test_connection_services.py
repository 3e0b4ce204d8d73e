"""What a connection passes on beside batches: lines of the log, service calls and metrics."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from halimede.backends.service_calls import MetricValue, ServiceCall, ServiceResult
from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.frames.kinds import METRIC, Kind, encode_frame
from halimede.workers.server.memory import ARENA_BYTES
from support.channel import (
    Stage,
    stage,
)
from support.working import working


def test_log_lines_of_a_worker_have_the_models_name(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with stage() as each:
            for level in range(4):
                await each.send(encode_frame(Kind.LOG, bytes((level,)) + f"line {level} ü".encode() + b"\xff"))
            await each.send(encode_frame(Kind.READY, b"\1"))
            await each.until(lambda: each.heard.ready, "the frames")

    with caplog.at_level(logging.DEBUG):
        asyncio.run(main())

    said = [record for record in caplog.records if "line" in record.getMessage()]
    assert [record.getMessage() for record in said] == [f"line {level} ü�" for level in range(4)]
    assert {getattr(record, "model", None) for record in said} == {"m"}


def test_each_call_gets_its_own_result_or_error():
    async def main() -> None:
        async with working() as (each, worker):
            given = await asyncio.gather(
                *(asyncio.to_thread(worker.host.call, MetricValue(number)) for number in range(20))
            )
            assert given == list(range(20))

            class Refusing(type(each.heard)):  # type: ignore[misc]
                async def on_call(self, call: ServiceCall[ServiceResult]) -> ServiceResult:
                    if call == MetricValue(1):
                        raise InferenceError(ErrorCode.NOT_FOUND, "no")
                    raise ZeroDivisionError("a fault of the server's own")

            each.heard.__class__ = Refusing
            for metric, code in ((1, ErrorCode.NOT_FOUND), (2, ErrorCode.INTERNAL)):
                with pytest.raises(InferenceError) as caught:
                    await asyncio.to_thread(worker.host.call, MetricValue(metric))
                assert caught.value.code is code

    asyncio.run(main())


def test_connections_on_different_loops_do_not_mix() -> None:
    """A load asks a model to complete its configuration on a thread of its own, while batches are answered."""
    frame_count, updates_per_frame = 600, 500

    async def hear(number: int) -> set[int]:
        # Not with `stage`, which counts what the whole process has open.
        each = Stage(asyncio.get_running_loop(), ARENA_BYTES)
        try:
            said = METRIC.pack(number, 0, 1.0) * updates_per_frame
            for _ in range(frame_count):
                await each.send(encode_frame(Kind.METRICS, said))
            wanted = frame_count * updates_per_frame
            await each.until(lambda: each.lost or len(each.heard.metrics) >= wanted, "what was said")
            assert each.lost == []
            return {metric for metric, _, _ in each.heard.metrics}
        finally:
            each.close()

    numbers = [1, 2, 3, 4]
    with ThreadPoolExecutor(len(numbers)) as threads:
        heard = list(threads.map(lambda number: asyncio.run(hear(number)), numbers))
    assert heard == [{number} for number in numbers]
