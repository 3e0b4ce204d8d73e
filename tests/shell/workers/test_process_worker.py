"""One instance and its successive processes, with a real launcher: restarts, readiness, time limits, leftovers."""

import asyncio
import gc
import os
import signal
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halimede.backends.hosting import WorkerSpec
from halimede.core.config.read import read_config
from halimede.core.config.write import to_json
from halimede.core.observe.custom_metrics import CustomMetrics
from halimede.core.schedule.replies import ReplyChecker
from halimede.core.types import DataType, InferenceRequest, Tensor
from halimede.core.types.caller import Answers, Beside, Caller, RunningBatch
from halimede.runtime.server import OnResponse
from halimede.runtime.services import ModelServices
from halimede.workers.instance import describe
from halimede.workers.launcher import Launcher
from halimede.workers.process.life import describe_end
from halimede.workers.process.program import Program
from halimede.workers.process.worker import ProcessWorker
from halimede.workers.worker import BatchDone, BatchItem, ResponseSent, WorkerDown, WorkerEvent, WorkerUp

LIMIT_S = 30.0
HOUR_MS = 3_600_000
UNLIMITED = Program()
CONFIG = """
name: "m" backend: "python" max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
HEAD = "import os, struct, time\nimport numpy as np\nimport triton_python_backend_utils as pb\n\n"
ECHO = """
def execute(self, requests):
    return [pb.InferenceResponse([pb.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


class Play:
    """A worker and its events."""

    def __init__(self) -> None:
        self.events: list[WorkerEvent] = []
        self.worker: ProcessWorker | None = None

    def ask(self, key: int) -> BatchItem:
        assert self.worker is not None
        tensor = Tensor("IN", DataType.FP32, (1, 1), np.ones(1, np.float32).tobytes())
        item = BatchItem(key, InferenceRequest("m", inputs=[tensor]), 1, cancelled=False)
        self.worker.execute([item])
        return item

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}: {self.events}"
            await asyncio.sleep(0.005)

    def heard(self, kind: type[WorkerEvent]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@asynccontextmanager
async def playing(
    folder: Path, methods: str, program: Program = UNLIMITED, models: Any = None, decoupled: bool = False
) -> AsyncIterator[tuple[Play, ProcessWorker]]:
    file = folder / "1" / "model.py"
    file.parent.mkdir()
    file.write_text(f"{HEAD}class TritonPythonModel:\n{textwrap.indent(textwrap.dedent(methods), ' ' * 4)}")
    config = read_config("config.pbtxt", CONFIG).config
    spec = WorkerSpec(
        model="m", version=1, instance="m_0_0", ordinal=0, kind="CPU", device_id=0, device_uuid="", backend="python",
        runner="halimede.backends.python.runner:make_runner", config_json=to_json(config).decode(),
        repository=str(folder), artifact=str(file), decoupled=decoupled,
    )  # fmt: skip
    play, launcher = Play(), Launcher()
    services, loop = ModelServices(CustomMetrics()), asyncio.get_running_loop()
    if models is not None:
        services.models = models
    try:
        play.worker = worker = await ProcessWorker.start(
            spec,
            config,
            ReplyChecker(config, is_strict=False),
            program,
            launcher,
            services,
            "m#1",
            play.events.append,
            loop,
        )
        try:
            yield play, worker
        finally:
            await worker.stop()
    finally:
        await asyncio.to_thread(launcher.close)


def run_on_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(scenario(), 2 * LIMIT_S)

    asyncio.run(main())


class Threads(ThreadPoolExecutor):
    """The loop's thread pool, which counts how often it refused a thread."""

    refused = 0
    there_are_some = True

    def submit(self, *args: Any, **named: Any) -> Future[Any]:
        if not self.there_are_some:
            self.refused += 1
            raise RuntimeError("can't start new thread")
        return super().submit(*args, **named)


def test_a_restart_is_repeated_if_no_thread_is_available(tmp_path: Path) -> None:
    async def scenario() -> None:
        threads = Threads()
        asyncio.get_running_loop().set_default_executor(threads)
        async with playing(tmp_path, ECHO) as (play, worker):
            threads.there_are_some = False
            os.kill(worker.pid or 0, signal.SIGKILL)
            await play.until(lambda: threads.refused, "a start that needs a thread")
            threads.there_are_some = True
            await play.until(lambda: play.heard(WorkerUp), "the next start")
            [down] = play.heard(WorkerDown)
            assert (down.parked, await worker.is_ready()) == (False, True)

    run_on_loop(scenario)


def test_abandoned_readiness_checks_leave_nothing(tmp_path: Path) -> None:
    def futures() -> int:
        gc.collect()
        return sum(isinstance(each, asyncio.Future) for each in gc.get_objects())

    async def scenario() -> None:
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

    run_on_loop(scenario)


def test_concurrent_readiness_checks_share_one_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        methods = ECHO + "asked = 0\ndef is_ready(self):\n    self.asked += 1\n    return self.asked != 2\n"
        async with playing(tmp_path, methods) as (_, worker):
            for answer in (True, False, True):
                assert await asyncio.gather(worker.is_ready(), worker.is_ready()) == [answer, answer]

    run_on_loop(scenario)


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


def test_an_invalid_end_of_a_batch_clears_its_time_limit(tmp_path: Path) -> None:
    def timers() -> list[asyncio.TimerHandle]:
        soon = asyncio.get_running_loop().time() + LIMIT_S * 2
        found = [each for each in gc.get_objects() if isinstance(each, asyncio.TimerHandle)]
        return [each for each in found if not each.cancelled() and each.when() > soon]

    async def scenario() -> None:
        async with playing(tmp_path, NONSENSE, Program(execution_timeout_ms=HOUR_MS)) as (play, _):
            play.ask(1)
            assert len(timers()) == 1
            await play.until(lambda: play.heard(ResponseSent), "the end of the request")
            [sent] = play.heard(ResponseSent)
            assert (sent.key, sent.final, "garbage" in str(sent.reply)) == (1, True, True)
            assert timers() == []

    run_on_loop(scenario)


def test_batches_that_a_dead_process_had_not_read_return_to_the_pump(tmp_path: Path) -> None:
    async def scenario() -> None:
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

    run_on_loop(scenario)


def test_the_time_limit_of_a_waiting_batch_begins_with_its_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        slow = ECHO.replace("    return", "    time.sleep(1.2)\n    return")
        async with playing(tmp_path, slow, Program(execution_timeout_ms=2_000)) as (play, _):
            play.ask(1)
            play.ask(2)
            await play.until(lambda: len(play.heard(BatchDone)) == 2, "both ends")
            assert [(done.items[0].key, done.failed) for done in play.heard(BatchDone)] == [(1, False), (2, False)]
            assert play.heard(WorkerDown) == []

    run_on_loop(scenario)


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


def test_calls_of_threads_belong_to_open_requests(tmp_path: Path) -> None:
    async def main() -> None:
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

    asyncio.run(main())


CALLS = """
def execute(self, requests):
    pb.InferenceRequest(model_name="other", inputs=[], requested_output_names=[]).exec()
"""


class AskingOnCancel(Asked):
    """A server that has a further batch for the worker when a call of the first one is cancelled, as the pump may."""

    play: Play

    def cancel(self, ticket: int) -> None:
        self.play.ask(2)


def test_a_batch_that_a_dead_process_could_not_get_is_unread(tmp_path: Path) -> None:
    async def scenario() -> None:
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

    run_on_loop(scenario)
