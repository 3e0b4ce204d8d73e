"""Messages of a connection other than batches: log lines, service calls and metrics."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from halimede.backends.service_calls import MetricValue, ServiceCall, ServiceResult
from halimede.channel.frames import encode_frame
from halimede.channel.server_end.memory import ARENA_BYTES
from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.frames.kinds import METRIC, WorkerFrame
from support.channel import (
    Stage,
    stage,
)
from support.loops import in_a_loop
from support.working import working


def test_log_lines_of_a_worker_have_the_models_name(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with stage() as each:
            for level in range(4):
                await each.send(encode_frame(WorkerFrame.LOG, bytes((level,)) + f"line {level} ü".encode() + b"\xff"))
            await each.send(encode_frame(WorkerFrame.READY, b"\1"))
            await each.until(lambda: each.heard.ready, "the frames")

    with caplog.at_level(logging.DEBUG):
        asyncio.run(main())

    lines = [record for record in caplog.records if "line" in record.getMessage()]
    assert [record.getMessage() for record in lines] == [f"line {level} ü�" for level in range(4)]
    assert {getattr(record, "model", None) for record in lines} == {"m"}


@in_a_loop
async def test_each_call_gets_its_own_result_or_error():
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


def test_connections_on_different_loops_do_not_mix() -> None:
    """A load completes a configuration on its own thread and loop, while other batches are answered."""
    frame_count, updates_per_frame = 600, 500

    async def hear(number: int) -> set[int]:
        # Without `stage`, which counts the open descriptors of the whole process.
        each = Stage(asyncio.get_running_loop(), ARENA_BYTES)
        try:
            updates = METRIC.pack(number, 0, 1.0) * updates_per_frame
            for _ in range(frame_count):
                await each.send(encode_frame(WorkerFrame.METRICS, updates))
            wanted = frame_count * updates_per_frame
            await each.until(lambda: each.lost or len(each.heard.metrics) >= wanted, "the updates")
            assert each.lost == []
            return {metric for metric, _, _ in each.heard.metrics}
        finally:
            each.close()

    numbers = [1, 2, 3, 4]
    with ThreadPoolExecutor(len(numbers)) as threads:
        heard = list(threads.map(lambda number: asyncio.run(hear(number)), numbers))
    assert heard == [{number} for number in numbers]
