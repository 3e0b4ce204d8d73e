"""Requests whose elements are checked on a thread: cancelled, counted, bounded."""

import asyncio
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from halimede.core.config.check_request import Checked
from halimede.core.observe.stats import ModelStats
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.statistics import FailureReason
from halimede.runtime.admission import CHECKING_THREADS, Admission
from halimede.runtime.requests import CANCELLED, InFlight, RequestTable, VersionRequests
from support.loops import in_a_loop

SIZE = 600


@dataclass
class Checker:
    """Asks for a check on a thread, which ends when the test says so."""

    may_end: threading.Event = field(default_factory=threading.Event)
    begun: int = 0
    error: Exception | None = None

    def check(self, request: InferenceRequest) -> Checked:
        return Checked(1, SIZE, (), True)

    def check_framing(self, request: InferenceRequest) -> None:
        self.begun += 1
        self.may_end.wait(20)
        if self.error is not None:
            raise self.error


class Bench:
    """An admission with one model, whose executor keeps what it starts."""

    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        self.table = RequestTable(limit_bytes)
        stats = ModelStats("m", "1")
        self.started: list[int] = []
        executor: Any = SimpleNamespace(start=self._start, is_busy=lambda: False)
        self.requests = VersionRequests(self.table, stats, executor)
        self.checker = Checker()
        model: Any = SimpleNamespace(name="m", stats=stats, checker=self.checker, requests=self.requests)
        self.admission = Admission(lambda *_, **__: model, self.table)
        self.responses: list[InferenceResponse] = []

    def infer(self) -> int:
        return self.admission.infer(InferenceRequest("m"), self.responses.append, None)

    async def until_begun(self, count: int) -> None:
        while self.checker.begun < count:
            await asyncio.sleep(0.001)

    async def until_released(self) -> None:
        while self.table.decoded.held_bytes:
            await asyncio.sleep(0.001)

    def _start(self, flight: InFlight, compatible: object) -> None:
        self.started.append(flight.key)


@pytest.mark.parametrize("has_begun", [False, True])
@in_a_loop
async def test_a_request_cancelled_during_its_check_is_answered_and_forgotten(has_begun: bool) -> None:
    bench = Bench()
    ticket = bench.infer()
    if has_begun:
        await bench.until_begun(1)
    bench.admission.cancel(ticket)
    assert [response.error for response in bench.responses] == [CANCELLED]
    bench.checker.may_end.set()
    await bench.requests.drained()
    assert (bench.requests.count, bench.table.decoded.held_bytes, bench.started) == (0, 0, [])
    assert len(bench.responses) == 1


@in_a_loop
async def test_a_cancelled_check_keeps_its_thread_and_bytes_until_it_ends() -> None:
    bench = Bench()
    for count in range(1, CHECKING_THREADS + 1):
        bench.infer()
        await bench.until_begun(count)
    waiting = bench.infer()
    for ticket in range(1, waiting + 1):
        bench.admission.cancel(ticket)
    await asyncio.sleep(0.05)
    assert (bench.checker.begun, bench.table.decoded.held_bytes) == (
        CHECKING_THREADS,
        SIZE * (CHECKING_THREADS + 1),
    )
    bench.checker.may_end.set()
    await bench.until_released()
    assert (bench.checker.begun, len(bench.responses)) == (CHECKING_THREADS, CHECKING_THREADS + 1)


@in_a_loop
async def test_a_checked_request_counts_once_when_it_is_submitted() -> None:
    bench = Bench(limit_bytes=SIZE + 1)
    ticket = bench.infer()
    drained = asyncio.ensure_future(bench.requests.drained())
    bench.checker.may_end.set()
    while not bench.started:
        await asyncio.sleep(0.001)
    assert (bench.started, bench.responses) == ([ticket], [])
    assert (bench.requests.count, bench.table.decoded.held_bytes) == (1, SIZE)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not drained.done(), "a version with a request in flight may not close"
    bench.requests.fail(bench.table.by_ticket[ticket], CANCELLED, FailureReason.CANCELED)
    await drained


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (InferenceError(ErrorCode.INVALID_ARG, "wrong"), InferenceError(ErrorCode.INVALID_ARG, "wrong")),
        (ValueError(), InferenceError(ErrorCode.INTERNAL, "request for model 'm' could not be checked")),
        (MemoryError(), InferenceError(ErrorCode.UNAVAILABLE, "the server has not enough memory for this")),
    ],
)
@in_a_loop
async def test_a_failed_check_is_answered_with_its_error(error: Exception, answer: InferenceError) -> None:
    bench = Bench()
    bench.checker.error = error
    bench.checker.may_end.set()
    bench.infer()
    await bench.requests.drained()
    assert [response.error for response in bench.responses] == [answer]
