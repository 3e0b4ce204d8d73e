"""One instance and its successive processes, with a real launcher: restarts, readiness, time limits, leftovers."""

import asyncio
import gc
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from halimede.core.types import InferenceRequest
from halimede.core.types.caller import Answers, Beside, Caller, RunningBatch
from halimede.core.types.error import describe
from halimede.facade.server import OnResponse
from halimede.workers.supervision.life import describe_end
from halimede.workers.supervision.program import Program
from halimede.workers.worker import BatchDone, BatchItem, ResponseSent, WorkerDown, WorkerUp
from support.loops import in_a_loop
from support.playing import ECHO, Play, playing

HOUR_MS = 3_600_000


class Threads(ThreadPoolExecutor):
    """The loop's thread pool, which counts how often it refused a thread."""

    refused = 0
    there_are_some = True

    def submit(self, *args: Any, **named: Any) -> Future[Any]:
        if not self.there_are_some:
            self.refused += 1
            raise RuntimeError("can't start new thread")
        return super().submit(*args, **named)


@in_a_loop
async def test_a_restart_is_repeated_if_no_thread_is_available(tmp_path: Path) -> None:
    threads = Threads()
    asyncio.get_running_loop().set_default_executor(threads)
    async with playing(tmp_path, ECHO) as (play, worker):
        threads.there_are_some = False
        os.kill(worker.pid or 0, signal.SIGKILL)
        await play.until(lambda: threads.refused, "a start that needs a thread")
        threads.there_are_some = True
        await play.until(lambda: play.heard(WorkerUp), "the next start")
        assert [down.reason for down in play.heard(WorkerDown)] == [
            "worker exited: signal 9",
            "worker cannot be started: cannot start a process for 'm_0_0': can't start new thread",
        ]
        assert await worker.is_ready()


@in_a_loop
async def test_abandoned_readiness_checks_leave_nothing(tmp_path: Path) -> None:
    def futures() -> int:
        gc.collect()
        return sum(issubclass(type(each), asyncio.Future) for each in gc.get_objects())

    async with playing(tmp_path, ECHO + "def is_ready(self):\n    time.sleep(3600)\n") as (_, worker):
        before = futures()
        for _ in range(200):
            asked = asyncio.create_task(worker.is_ready())
            await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
        del asked
        assert futures() - before < 20
        os.kill(worker.pid or 0, signal.SIGKILL)  # it would not finalize in time


@in_a_loop
async def test_concurrent_readiness_checks_share_one_answer(tmp_path: Path) -> None:
    methods = ECHO + "asked = 0\ndef is_ready(self):\n    self.asked += 1\n    return self.asked != 2\n"
    async with playing(tmp_path, methods) as (_, worker):
        for answer in (True, False, True):
            assert await asyncio.gather(worker.is_ready(), worker.is_ready()) == [answer, answer]


# A DONE frame of the first batch that retains a block which the batch never had.
NONSENSE = """
def execute(self, requests):
    from halimede.workers.frames.answers import encode_done
    frame = encode_done(1, [None], False, (1, 2, 3), {}, lambda _: None, lambda: (0, [(9, 0)]))
    for number in os.listdir("/proc/self/fd"):
        if int(number) >= 512:
            os.write(int(number), frame)
    time.sleep(3600)
"""


@in_a_loop
async def test_an_invalid_end_of_a_batch_clears_its_time_limit(tmp_path: Path) -> None:
    def timers() -> list[asyncio.TimerHandle]:
        soon = asyncio.get_running_loop().time() + HOUR_MS / 2000
        found = [each for each in gc.get_objects() if issubclass(type(each), asyncio.TimerHandle)]
        return [each for each in found if not each.cancelled() and each.when() > soon]

    async with playing(tmp_path, NONSENSE, Program(execution_timeout_ms=HOUR_MS)) as (play, _):
        play.ask(1)
        assert len(timers()) == 1
        await play.until(lambda: play.heard(ResponseSent), "the end of the request")
        [sent] = play.heard(ResponseSent)
        assert (sent.key, sent.final, "garbage" in str(sent.reply)) == (1, True, True)
        assert timers() == []


@in_a_loop
async def test_batches_that_a_dead_process_had_not_read_return_to_the_pump(tmp_path: Path) -> None:
    async with playing(tmp_path, ECHO) as (play, worker):
        pid = worker.pid or 0
        os.kill(pid, signal.SIGSTOP)
        play.ask(1)
        os.kill(pid, signal.SIGKILL)
        await play.until(lambda: play.heard(WorkerUp), "the next process")
        [down] = play.heard(WorkerDown)
        assert (down.unread, play.heard(BatchDone), play.heard(ResponseSent)) == ({1}, [], [])
        play.ask(1)
        await play.until(lambda: play.heard(BatchDone), "the end of the batch")
        assert [(done.items[0].key, done.failed) for done in play.heard(BatchDone)] == [(1, False)]


@in_a_loop
async def test_the_time_limit_of_a_waiting_batch_begins_with_its_turn(tmp_path: Path) -> None:
    slow = ECHO.replace("    return", "    time.sleep(1.2)\n    return")
    async with playing(tmp_path, slow, Program(execution_timeout_ms=2_000)) as (play, _):
        play.ask(1)
        play.ask(2)
        await play.until(lambda: len(play.heard(BatchDone)) == 2, "both ends")
        assert [(done.items[0].key, done.failed) for done in play.heard(BatchDone)] == [(1, False), (2, False)]
        assert play.heard(WorkerDown) == []


def test_the_text_of_a_models_error_is_valid_unicode() -> None:
    name = os.fsdecode(b"caf\xe9.bin")
    assert describe(ValueError(f"{name} is not there")) == "ValueError: caf?.bin is not there"


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("exit code 3", "it ended by exit code 3"),
        ("it closed its channel", "it closed its channel"),
        ("it sent garbage: DONE: 3 bytes", "it sent garbage: DONE: 3 bytes"),
    ],
)
def test_the_end_of_a_process_is_described_by_one_clause(why: str, text: str) -> None:
    assert describe_end(why) == text


class Asked:
    """A server that records callers and answers no call."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller) -> int:
        self.callers.append(caller)
        return len(self.callers)

    def cancel(self, ticket: int) -> None:
        """No effect."""

    def acknowledge(self, ticket: int, responses: int = 1) -> None:
        """No effect: no call is answered."""


CALLS_ON_A_THREAD = """
def execute(self, requests):
    import threading
    for request in requests:
        threading.Thread(target=self.call, args=(request.get_response_sender(),), daemon=True).start()
def call(self, sender):
    list(pb.InferenceRequest(model_name="other", inputs=[], requested_output_names=[]).exec(decoupled=True))
"""


@in_a_loop
async def test_calls_of_threads_belong_to_open_requests(tmp_path: Path) -> None:
    server = Asked()
    program = Program(bls_timeout_ms=7)
    async with playing(tmp_path, CALLS_ON_A_THREAD, program, server, decoupled=True) as (play, _):

        async def caller_with(key: int) -> tuple[BatchItem, Caller]:
            item = play.ask(key)
            await play.until(lambda: len(server.callers) == key, "the call")
            await play.until(lambda: len(play.heard(BatchDone)) == key, "the end of the batch")
            return item, server.callers[-1]

        def calling(waiter: object) -> Caller:
            return Caller(1, waiter, None, "m", 7_000_000)

        first, caller = await caller_with(1)
        assert caller == calling(Answers(RunningBatch("m", "1", 1)))
        # Its client has disconnected: the request has ended, even if the model still works on it.
        first.cancelled = True
        _, caller = await caller_with(2)
        assert caller == calling(Answers(RunningBatch("m", "1", 2)))
        _, caller = await caller_with(3)
        assert caller == calling(Beside("m", "1", 0))


CALLS = """
def execute(self, requests):
    pb.InferenceRequest(model_name="other", inputs=[], requested_output_names=[]).exec()
"""


class AskingOnCancel(Asked):
    """A server that has a further batch for the worker when a call of the first one is cancelled, as the pump may."""

    play: Play

    def cancel(self, ticket: int) -> None:
        self.play.ask(2)


@in_a_loop
async def test_a_batch_that_a_dead_process_could_not_get_is_unread(tmp_path: Path) -> None:
    server = AskingOnCancel()
    async with playing(tmp_path, CALLS, models=server) as (play, worker):
        server.play = play
        play.ask(1)
        await play.until(lambda: server.callers, "the call")
        os.kill(worker.pid or 0, signal.SIGKILL)
        await play.until(lambda: play.heard(WorkerUp), "the next process")
        [down] = play.heard(WorkerDown)
        assert down.unread == {2}
        assert [(done.items[0].key, done.failed) for done in play.heard(BatchDone)] == [(1, True)]
